"""SmolLM2-135M for tests that need a real model: pulled into the user's data directory on first use."""

from __future__ import annotations

from moonpool.hub import ModelDir, resolve


def smollm2() -> ModelDir:
    return resolve("smollm2-135m", can_pull=True)

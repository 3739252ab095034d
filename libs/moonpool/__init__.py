"""Moonpool: prefill and decode on separate workers, one shared pool of KV cache."""

__version__ = "0.1.0"

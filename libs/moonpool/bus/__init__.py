"""The control bus: introductions, load and small commands. At most once, never a prompt or a token."""

"""The worker's core: the one owner of block ids, and the values it exchanges with runner and service."""

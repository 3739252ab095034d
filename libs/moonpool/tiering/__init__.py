"""The store's decisions, and the worker's about the store. Pure: no IO, no clock."""

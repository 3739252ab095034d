"""Replay of real traces through the product's caches, index and placement; no model, no sockets.

What is measured is the share of prompt blocks that need not be computed. The floor and the ceiling stand
beside it: a pool that never forgets (ideal), and the best that any eviction could do (Belady).
"""

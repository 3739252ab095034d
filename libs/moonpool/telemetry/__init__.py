"""Metrics, spans and their names. Nothing here is needed for an answer: it may all be absent."""

"""The one step-time model and its online fits; routing, workers and simulator share it."""

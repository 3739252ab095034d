"""What docs/performance/ claims, measured: one command for each note.

    python -m moonpool_loadtest.experiments.overlap
    python -m moonpool_loadtest.experiments.isolation
    python -m moonpool_loadtest.experiments.receiving
    python -m moonpool_loadtest.experiments.engine
    python -m moonpool_loadtest.experiments.multi_turn
    python -m moonpool_loadtest.experiments.slow_peer

Each starts real clusters on this machine, alternates the arms that it compares within one run (a
machine's speed drifts), and prints a table and JSON. `--quick` is a smoke run: the same path through
the code with figures that mean nothing. Two cores are enough; nothing else should run on them.
"""

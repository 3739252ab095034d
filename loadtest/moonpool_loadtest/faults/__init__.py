"""Faults on purpose: each kind once, against a real cluster, with every token checked.

    python -m moonpool_loadtest.faults --model smollm2-135m

Workers are killed at exact places through failpoints, the broker comes and goes, the router is
restarted, clients leave (scenarios.py); prefixes that peers read come wrong, late or never, routers miss
what happens to caches, two routers compete for small pools (reuse.py), stores die in the
middle of puts and gets (stores.py), or come, leave and lose what they find each other by, under load
(store_ring.py). Every answer is compared with the same request on one aggregated worker without faults, and
after each fault every worker's ledger must be quiet and each router's index true.
"""

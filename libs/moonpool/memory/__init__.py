"""Shared memory of a worker: sealed memfd regions that only their owner can write.

worker_memory   pool, digests, control page and bell of one incarnation
region          one memfd, mapped writable by its owner or read-only by a peer
fd_server       hands descriptors to peers on the same host over an abstract Unix socket
host            which processes share a host
"""

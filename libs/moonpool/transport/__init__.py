"""Reading KV blocks out of a peer's pool, one-sided and verified.

    base          KvRead, ReadResult, and the Transport and KvPeer protocols
    shm           a peer on this host: copies out of its memory, mapped read-only
    cuda_ipc      a peer on the same GPU: its engine's pool there, copied by our engine, which
                  device_link asks; what is not there yet comes by shm
    nixl          a peer that runs it too: READs by RDMA, or UCX over shared memory or TCP;
                  nixl_link and its thread drive the agents, nixl_agent is what is used of NIXL
    grpc_reader   any peer: a stream of raw bytes; grpc_server is its other end
    select        which transport to take for a peer, announced
    incoming      one read whose bytes come as messages
    copier        where copies and digests run: off the event loop

A reader only ever writes its own memory. It trusts no byte before the digest of its own copy matches.
"""

"""What a store node keeps below its arena, and what several nodes know of each other.

    base              BlockLog: blocks on disk, as a store node's shell sees them; its values
    segment_log       the one that is: append-only segment files, rebuilt by a scan after any crash
    log_identity      what a directory's blocks are: model, layout, digests, secret
    log_directory     the directory: lock, permissions, one folder per identity
    segment_format    bytes of a record, pure          segment_index   who lies where, pure
    segment_files     the seam to the file system      io_threads      where reads and writes block

    directory         where nodes find each other's records, and the one for a single process
    redis_directory   the one for several hosts        directory_keeper  writes and reads it each second
"""

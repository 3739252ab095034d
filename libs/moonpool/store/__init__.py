"""What a store node keeps below its arena, and what several nodes know of each other.

base              BlockLog: blocks on disk, as a store node's shell sees them; its values
segment_log       the one that is: append-only segment files, rebuilt by a scan after any crash
segment_writer    how it appends and makes room      segment_table    its segments and their files
segment_format    the bytes of a record, pure        segment_index    who lies where, pure
segment_scan      what is found after a restart      record_io        one read or write
segment_files     the seam to the file system        io_threads       where calls to it block
log_identity      what a directory's blocks are: model, layout, digests, secret
log_directory     the directory: lock, permissions, one folder for each identity
budget_keeper     what is left of the write budget, from one life to the next

directory         where store nodes find each other's records; redis_directory for several hosts
directory_keeper  keeps this node's record there, and the last view of the others
"""

"""What an error of the file system means for a log, in words for the operator."""

from __future__ import annotations

import errno
import os

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)

_FIXES = {
    errno.ENOENT: "it, or what it lies in, does not exist: create that, then start again",
    errno.ENOTDIR: "it is no directory, or only a link to one: name a directory",
    errno.ELOOP: "it is no directory, or only a link to one: name a directory",
    errno.EACCES: "this user may not use it: change its owner, or name another one",
    errno.EPERM: "this user may not use it: change its owner, or name another one",
    errno.EROFS: "mount its file system writable, or name another one",
    errno.ENOSPC: "make room on its file system, or give the tier less",
    errno.EDQUOT: "raise this user's quota on its file system, or give the tier less",
    errno.EFBIG: "raise this process's limit of file sizes (ulimit -f)",
    errno.EMFILE: "raise this process's limit of open files (ulimit -n)",
    errno.ENFILE: "raise this machine's limit of open files (fs.file-max)",
    errno.EIO: "look for errors of the disk in the kernel's log (dmesg), or name another one",
}


def explain(error: OSError) -> str:
    """What happened, and what to do about it; no path."""
    number = error.errno or errno.EIO
    return f"{os.strerror(number)}; {_FIXES.get(number, 'check the disk, or name another one')}"


def is_full(error: OSError) -> bool:
    """Whether less data would have been taken."""
    return error.errno in _FULL


def lacks_descriptor(error: OSError) -> bool:
    """Whether it is this process, not the disk, that has run out of something."""
    return error.errno in _NO_DESCRIPTOR

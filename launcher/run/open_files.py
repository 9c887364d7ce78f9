"""Let this process, and all that it starts, open more files: rank 0's host has a connection to every rank."""

from __future__ import annotations

import resource

# Not the hard limit itself, which may be a thousand million: some programs close every number below it.
_FILES = 65536


def raise_file_limit() -> None:
    """Raise the limit of open files (`ulimit -n`, often 1,024) to the hard one, 65,536 at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

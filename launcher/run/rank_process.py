"""Start a rank of local_ranks.py so that it ends with its parent.

Imports the standard library only. What the rank works with imports torch, which takes seconds in which the
parent may be killed; it therefore arrives as bytes, and is unpickled last.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal

_PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends


def start(parent: int, told: bytes) -> None:
    """Call the pickled (function, arguments) in a process that the death of `parent`, a process id, ends."""
    _end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well, which ends its ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    function, arguments = pickle.loads(told)
    function(*arguments)


def _end_with(parent: int) -> None:
    """Make the kernel end this process with its parent, whatever signals it ignores."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        os.kill(os.getpid(), signal.SIGKILL)

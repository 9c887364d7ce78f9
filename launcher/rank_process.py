"""The first lines of a rank that local_ranks.py starts: it ends with its parent from here on.

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
    """A parent that is killed cannot end its ranks: the kernel does, whatever signals they ignore."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        os.kill(os.getpid(), signal.SIGKILL)

"""Hear that this job is to end soon, and agree on the step after which it does.

Owns the handlers of SIGTERM and SIGUSR1 (Slurm's `--signal=USR1@120`), and one small sum over the world for
each step. What a script does then is its own: save a checkpoint, and leave with `PREEMPTED`, which
`ds-ring launch` takes for an attempt that has not failed.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

import torch
import torch.distributed as dist

from ds_ring.runtime.exchange import Exchange
from ds_ring.runtime.mesh import RingMesh

__all__ = ["PREEMPTED", "StopRequest"]

log = logging.getLogger(__name__)

PREEMPTED = 75  # sysexits.h's EX_TEMPFAIL: try again later
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


# [Note: one step for all]
# A launcher signals ranks one after the other, DeepSpeed's with seconds between them, and a checkpoint is
# made by all ranks together. So a signal only sets a flag here, and the flags are added up after each step:
# every rank gets the sum of the same step, and all leave after that one.
class StopRequest:
    """Record signals that ask this process to end, and let all ranks hear of them after the same step."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._heard = False

    def listen(self) -> None:
        """Handle the signals from here on, if this is the main thread: Python allows no others to."""
        if self._heard or threading.current_thread() is not threading.main_thread():
            return
        self._heard = True
        for number in SIGNALS:
            signal.signal(number, self._note)

    def agreed(self, mesh: RingMesh, device: torch.device, timeout_s: float) -> bool:
        """Return whether any rank was asked to end; the same on every rank. Collective over the world."""
        self.listen()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.signal is not None
        asked = torch.tensor([float(self.signal is not None)], device=device)
        assert dist.group.WORLD is not None
        Exchange(mesh, timeout_s).all_reduce(asked, dist.group.WORLD)
        return bool(asked.item() > 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # No lock and no logging: this may interrupt either.
        if self.signal is None:
            self.signal = number

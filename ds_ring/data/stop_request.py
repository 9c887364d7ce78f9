"""Learn on all ranks together that a signal requests the end of this job."""

from __future__ import annotations

import signal
import threading

import torch

from ds_ring.comm.mesh import RingMesh
from ds_ring.data.engine import DEEPSPEED
from ds_ring.data.loss import world_sum
from ds_ring.patches import apply, patch

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # that ask the job to end (Slurm's `--signal=USR1@120`)


# [Note: one step for all]
# A launcher signals ranks one after the other, DeepSpeed's with seconds between them, and a checkpoint is
# made by all ranks together. So a signal only sets a flag here, and the flags are added up after each step:
# every rank gets the sum of the same step, and all leave after that one.
class StopRequest:
    """Record a signal that requests the end of this process."""

    def __init__(self) -> None:
        self.came = self._listens = False

    def listen(self) -> None:
        """Handle the signals from here on, if this is the main thread: Python allows no others to."""
        if self._listens or threading.current_thread() is not threading.main_thread():
            return
        self._listens = True
        apply(self)

    @patch(
        DEEPSPEED.imported("signal"), "signal", stage="at_exit", kind="registered", feature="stop_request",
        reason="SIGTERM and SIGUSR1: leave after a step", when="engine.ring.should_stop() was called",
    )  # fmt: skip
    def _handle_signals(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self.came = True  # no lock and no logging: this may interrupt either

    def came_to_any(self, mesh: RingMesh, device: torch.device) -> bool:
        """Return whether a signal came to any rank; the first call handles them. Collective."""
        self.listen()
        signals = torch.tensor([float(self.came)], device=device)
        return bool(world_sum(signals, mesh) > 0)

"""Time work on all ranks: the device idle before and after, the slowest rank counts."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_ring.errors import RingMeshError, RingMismatchError


class Clock:
    """Measure what all ranks do together.

    Args:
        device: of the tensors; CUDA work is waited for at both ends (written, not run on a GPU).
    """

    def __init__(self, device: torch.device) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RingMeshError(
                "tune: expected torch.distributed to be initialised on every rank, got no process group; use"
                " `ds-ring tune`, or torchrun with `-m ds_ring_launcher.tune`"
            )
        self.device = device
        self._group: ProcessGroup | None = None  # the world
        if dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")  # so that a barrier occupies no device

    def idle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait for all ranks."""
        self.idle()
        dist.barrier(group=self._group)

    def require_equal(self, text: str) -> None:
        """Raise RingMismatchError on every rank unless all ranks have the same text."""
        texts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(texts, text, group=self._group)
        other = next((rank for rank, one in enumerate(texts) if one != texts[0]), None)
        if other is not None:
            raise RingMismatchError(
                f"tune: expected the same request on every rank, got {texts[0]} on rank 0 and {texts[other]}"
                f" on rank {other}; start all ranks with the same arguments and the same file"
            )

    def ranks_here(self) -> int:
        """Count the ranks on this rank's host."""
        names: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(names, socket.gethostname(), group=self._group)
        return names.count(socket.gethostname())

    def slowest(self, value: float) -> float:
        """Return the largest of all ranks' values, the same bits on all."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def least(self, value: float) -> float:
        """Return the smallest of all ranks' values, the same bits on all."""
        return self._reduced(value, dist.ReduceOp.MIN)

    def _reduced(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        together = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(together, op=operation, group=self._group)
        return float(together)

    def own(self, work: Callable[[], object]) -> float:
        """Measure seconds on this rank; the device is idle before and after."""
        self.idle()
        started = time.perf_counter()
        work()
        self.idle()
        return time.perf_counter() - started

    def together(self, work: Callable[[], object], rounds: int = 1) -> float:
        """Return the slowest rank's seconds, all ranks starting at once; the least of some rounds."""
        # The least and not the median: this is for what the machine can do, and a disturbance only adds.
        seconds = []
        for _ in range(rounds):
            self.meet()
            seconds.append(self.slowest(self.own(work)))
        return min(seconds)

"""What a host waits for: operators and calls that make it wait for a device or for a message."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ring.comm import exchange
from ds_ring.comm.mesh import RingMesh

READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal")


@contextmanager
def fake_ring(rank: int, ring_size: int) -> Iterator[RingMesh]:
    """The mesh of one rank of a ring whose other ranks are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ring_size)
    try:
        yield RingMesh.from_world(ring_size)
    finally:
        dist.destroy_process_group()


class DeviceWork:
    """A Work as NCCL's: `wait` returns at once, and it is completed when it has been asked a few times."""

    def __init__(self, waits: HostWaits) -> None:
        self._waits, self._asked = waits, 0

    def wait(self, timeout: object = None) -> bool:
        self._waits.ordered += threading.current_thread() is threading.main_thread()
        return True

    def is_completed(self) -> bool:
        self._waits.note("is_completed()")
        self._asked += 1
        return self._asked > 3


class HostWaits(TorchDispatchMode):
    """Record every operator, and whatever makes the host wait for the device or for a message.

    Attributes:
        found: what the main thread waited for.
        ordered: works that a stream was made to wait for.
        operators: all of them.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.operators: list[str] = []
        self.ordered = 0

    def note(self, what: str) -> None:
        """Add to what was waited for, if it is the main thread that waits."""
        if threading.current_thread() is threading.main_thread():
            self.found.append(what)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(function, "__name__", function)).split(".")[0]
        self.operators.append(name)
        # before it is run: of a fake tensor there is nothing to read, and whoever calls may catch that error
        if name in READS or _masked(name, args) or (name == "repeat_interleave" and _unsized(args, kwargs)):
            self.found.append(name)
        result = function(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            source, target = (args[0], result) if name == "_to_copy" else (args[1], args[0])
            waits = kwargs.get("non_blocking", False) is False and not (len(args) > 2 and args[2])
            if source.device.type != target.device.type and waits:
                self.found.append(f"{name}: {source.device} to {target.device}, {tuple(source.shape)}")
        return result

    @contextmanager
    def watching(self) -> Iterator[HostWaits]:
        """Record inside the block; messages are this module's works."""

        def patched(owner: Any, name: str) -> Any:
            real: Callable[..., Any] = getattr(owner, name)

            def noting(*args: Any, **kwargs: Any) -> Any:
                # Python waits for a thread that it starts, not for a device.
                if sys._getframe(1).f_code is not threading.Thread.start.__code__:
                    self.note(f"{name}()")
                return real(*args, **kwargs)

            return mock.patch.object(owner, name, noting)

        with ExitStack() as stack:

            def start_batch(_: Any, sent: Any, received: Any) -> list[DeviceWork]:
                return [DeviceWork(self)] if sent or received else []

            stack.enter_context(mock.patch.object(exchange, "start_batch", start_batch))
            for owner, name in (
                (time, "sleep"), (threading.Event, "wait"), (torch.Tensor, "item"), (torch.Tensor, "tolist"),
                (torch.Tensor, "cpu"), (torch.Tensor, "numpy"), (torch.Tensor, "cuda"),
                (torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"),
                (torch.cuda.Event, "synchronize"),
            ):  # fmt: skip
                stack.enter_context(patched(owner, name))
            stack.enter_context(self)
            yield self


def _masked(name: str, args: Any) -> bool:
    """Whether an index is a mask: how many elements it selects must be read."""
    indices = args[1] if name in ("index", "index_put", "index_put_") else ()
    return any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in indices or ())


def _unsized(args: Any, kwargs: Any) -> bool:
    return kwargs.get("output_size") is None and args[0].is_cuda

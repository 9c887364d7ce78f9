"""Define how streams are ordered on a device, and what fake tensors have: shapes, no memory and no streams.

On the CPU there is nothing to order. `plugin.DEVICES` names the class of another kind of device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ds_ring.plugin import DEVICES, load


def is_fake(x: Tensor) -> bool:
    """Return True for tensors that only pretend: a pass over them sends nothing and must compare nothing."""
    return isinstance(x, FakeTensor)


def active_fake_mode() -> Any:
    """Return the FakeTensorMode that is on, or None: a tensor of one mode cannot be used in another."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


class Streams:
    """Record and query marks ([Note: three streams]). On the CPU a call returns when its work is done."""

    def mark(self) -> Any:
        """Return a mark after the work that this stream has launched so far; None on the CPU."""
        return None

    def reached(self, mark: Any) -> bool:
        """Return whether the device has reached a mark; never waits."""
        return True

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """Return a context in which messages wait for a mark only, not for work launched after it."""
        yield

    def prepare_thread(self) -> None:
        """Let the current thread query marks that other threads have made."""


def get_stream_number(device: torch.device) -> int:
    """Return a number for the present stream of a device: work on one stream is done in order."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


HOST = Streams()


@lru_cache(maxsize=64)  # more devices than a host has
def _make_streams(device: torch.device) -> Streams:
    streams: Streams = load(DEVICES[device.type].streams)(device) if device.type in DEVICES else HOST
    return streams


def get_streams(tensor: Tensor) -> Streams:
    """Return the streams of a tensor's device."""
    return _make_streams(tensor.device) if tensor.is_cuda and not is_fake(tensor) else HOST

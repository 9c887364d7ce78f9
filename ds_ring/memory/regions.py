"""Find all checkpointed regions that a call belongs to, and where a mesh keeps the results of regions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.function import FunctionCtx


class TensorStore(Protocol):
    """Keep tensors somewhere else until they are asked for."""

    def put(self, tensor: Tensor) -> Any:
        """Return a ticket for a tensor."""

    def get(self, ticket: Any) -> Tensor:
        """Return the tensor."""


class ResultStore:
    """Say where a mesh keeps the results of checkpointed regions: None leaves them on the device."""

    store: TensorStore | None = None


_DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"
# Frames of what is not reentrant, by name and module: the variable that leads to the region's object, and
# whether the region is run again.
_FRAMES = {
    ("checkpoint", "torch.utils.checkpoint"): ("gen", False),
    ("unpack_hook", "torch.utils.checkpoint"): ("frame", True),
    ("non_reentrant_checkpoint", _DEEPSPEED): ("storage", False),
    ("checkpoint_unpack", _DEEPSPEED): ("storage", True),
}
_FRAME_NAMES = {name for name, _ in _FRAMES}


def running_regions() -> Iterator[tuple[Any, bool]]:
    """Yield all regions that are running, innermost first, and whether each is run again.

    The forward pass of any autograd Function counts as a region: its backward pass may run layers again.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals["ctx"]
            if isinstance(ctx, FunctionCtx):
                yield ctx, code.co_name == "backward"
        elif code.co_name in _FRAME_NAMES:
            name, again = _FRAMES.get((code.co_name, frame.f_globals.get("__name__", "")), ("", False))
            region = frame.f_locals.get(name)
            if name == "gen" and region is not None:  # a generator, whose frame has the region's object
                region = region.gi_frame and region.gi_frame.f_locals.get("new_frame")
            if region is not None:
                yield region, again
        frame = frame.f_back

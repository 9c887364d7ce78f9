"""Find the checkpointed region that a call belongs to, and where a mesh keeps the results of regions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

_HOOKS = {  # torch.utils.checkpoint: what a region packs its tensors with, and the name of its frame there
    "_checkpoint_hook.__init__.<locals>.pack_hook": "frame",
    "_recomputation_hook.__init__.<locals>.pack_hook": "target_frame_ref",
}


class TensorStore(Protocol):
    """Keep tensors somewhere else until they are asked for."""

    def put(self, tensor: Tensor) -> Any:
        """Return a ticket for a tensor."""

    def get(self, ticket: Any) -> Tensor:
        """Return the tensor."""


class ResultStore:
    """Say where a mesh keeps the results of checkpointed regions: None leaves them on the device."""

    store: TensorStore | None = None


# [Note: regions]
# One object identifies a region in both of its runs, and lives as long as the graph. Reentrant checkpointing
# (torch's, DeepSpeed's, Megatron's) is an autograd Function that notes `run_function` on its ctx: `forward`
# and `backward`, which call it, have the same ctx and are on the stack. What is not reentrant has a frame
# object, known to the hook by which tensors are saved meanwhile. Where neither is found the pass runs again.
def running_region() -> tuple[Any, bool]:
    """Return the innermost region that is running and whether it is run again; (None, False) outside."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals["ctx"]
            if hasattr(ctx, "run_function"):
                return ctx, code.co_name == "backward"
        frame = frame.f_back
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack: Any = inspect.unwrap(hooks[0]) if hooks is not None else None
    name = _HOOKS.get(getattr(pack, "__qualname__", ""))
    if name is None:
        return None, False
    contents = dict(zip(pack.__code__.co_freevars, pack.__closure__, strict=True))[name].cell_contents
    return (contents, False) if name == "frame" else (contents(), True)


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

"""What a pass keeps for its gradient: the strategies that `registry.SAVED_TENSORS` names, and the plain one.

The plain strategy saves q, k, v, out and lse as they are, and runs every pass. Others are in `memory/`. Finds
the checkpointed region that a call belongs to, too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ds_ring.ring.buffers import HeadSource, Saved
from ds_ring.schedule.steps import HeadChunk

if TYPE_CHECKING:
    from ds_ring.ops.context import RingContext

Results = tuple[Tensor, Tensor]
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


class SavedTensors:
    """Do what the strategy inside does; without one, run every pass and save its tensors as they are."""

    def __init__(self, inner: SavedTensors | None = None) -> None:
        self.inner = inner

    def run(
        self, context: RingContext, run: Callable[[RingContext], Results], q: Tensor, call: tuple[Any, ...]
    ) -> Results:
        """Return (out, lse) of `run(context)`; `call` is equal for equal calls of a context."""
        return run(context) if self.inner is None else self.inner.run(context, run, q, call)

    def save(self, context: RingContext, saved: Saved) -> Saved:
        """Return what autograd saves in place of q, k, v, out and lse."""
        return saved if self.inner is None else self.inner.save(context, saved)

    def load_heads(
        self, context: RingContext, saved: Saved, chunks: Sequence[HeadChunk], device: torch.device
    ) -> HeadSource:
        """Return what gives the heads of one chunk after the other, for tensors that were saved elsewhere."""
        assert self.inner is not None, "no strategy saves elsewhere"
        return self.inner.load_heads(context, saved, chunks, device)


# [Note: regions]
# One object stands for a region in both of its runs, and lives as long as the graph. Reentrant checkpointing
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
    found = dict(zip(pack.__code__.co_freevars, pack.__closure__, strict=True))[name].cell_contents
    return (found, False) if name == "frame" else (found(), True)

"""What a pass is: one way to attend over the keys of all ranks, forward and backward, on all ranks alike.

`plugin.PASSES` has a row for each. Its `home` is a function like `MakePass`; that of `ring` is in
`ring_op.py`.
`SavedTensors` keeps tensors of a pass for its gradient: this one as they are; `plugin.SAVED_TENSORS` names
another. `running_region` finds the checkpointed region that a call belongs to, `run_gradient` runs a gradient
that sends.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError
from ds_ring.kernels.interface import Operands as Operands
from ds_ring.ring.buffers import HeadSource, Saved
from ds_ring.schedule.steps import HeadChunk

if TYPE_CHECKING:
    from ds_ring.ops.context import RingContext
    from ds_ring.ops.prepare import Prepared

Results = tuple[Tensor, Tensor]  # out and lse


class Pass(Protocol):
    """The attention of this rank's queries over the keys of all ranks; shapes as in `RingPass`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        grad_lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv)."""


class SavedTensors:
    """Save the tensors of every pass for its gradient, as they are."""

    def save(self, context: RingContext, saved: Saved) -> Saved:
        """Return what autograd saves in place of q, k, v, out and lse."""
        return saved

    def load_heads(
        self, context: RingContext, saved: Saved, chunks: Sequence[HeadChunk], device: torch.device
    ) -> HeadSource:
        """Return what gives the heads of one chunk after the other, for tensors that were saved elsewhere."""
        raise AssertionError("no strategy saves elsewhere")


_HOOKS = {  # torch.utils.checkpoint: what a region packs its tensors with, and the name of its frame there
    "_checkpoint_hook.__init__.<locals>.pack_hook": "frame",
    "_recomputation_hook.__init__.<locals>.pack_hook": "target_frame_ref",
}


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


_forward_passes_so_far = 0


def count_forward_pass() -> None:
    """Count a forward pass of ring attention, or a scan or halo that reads tokens of other ranks."""
    global _forward_passes_so_far
    _forward_passes_so_far += 1


def get_forward_passes() -> int:
    """Return the number of forward passes of the ring in this process so far, on all of its meshes.

    It counts per process, since a model may use a mesh of its own. A compiled graph counts when it runs.
    """
    return _forward_passes_so_far


# The last argument finishes the header check; None: it is finished.
MakePass = Callable[["RingContext", "Prepared", Callable[[], None] | None], Pass]


# [Note: nodes of all ranks]
# If an eager call sends, its gradient sends, too, so its node in the graph of autograd must run on all ranks
# or on none, and nodes in the same order. Autograd makes a node if an operand requires a gradient:
# ranks compare that in the header of the forward call. It runs a node that leads to one of the tensors whose
# gradients are asked for, so all operands of a call must be in front of each of its nodes, on every rank. The
# header of a gradient has the number of its forward call, so that the gradients of two equal calls cannot be
# exchanged. A compiled graph calls operators directly and has one order of nodes: its headers give no number.
#
# A checkpointed region that is not reentrant runs again, and sends, when a node asks for a saved tensor. So
# each node of a call that sends saves a tensor, and asks for it before its gradient is sent.
GRADIENT = "gradient of the forward call of number"
T = TypeVar("T")


class CallNumber(Protocol):
    """An exchange, which has the number of its last call."""

    call: int


def get_forward_call(exchange: CallNumber | None) -> int:
    """Return the number of the call that was just made, for its gradient; -1 if none was."""
    return -1 if exchange is None else exchange.call


def run_gradient(mesh: RingMesh, number: int, function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, the gradient of the forward call of that number.

    Raises:
        RingMismatchError: other ranks compute that of another call; nothing was sent.
    """
    state, before = mesh.state, mesh.state.compared
    state.compared = GRADIENT, number + 1, str(number)  # the number is -1 if no call was made
    try:
        return function(*arguments)
    finally:
        state.compared = before


def refuse_second_derivative(name: str) -> Callable[..., NoReturn]:
    """Return a gradient that raises RingConfigError: that of an operator that computes a gradient."""
    return partial(raise_for_second_derivative, name)


def raise_for_second_derivative(name: str, ctx: Any, *grads: Tensor | None) -> NoReturn:
    got = "a request for the second one (create_graph=True, then a gradient of that gradient)"
    advice = "differentiate once, or use a model with plain attention for it"
    raise RingConfigError.wrong(name, "a first derivative", got, advice)

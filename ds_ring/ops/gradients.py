"""Run eager calls that send, and their gradients, so that every rank makes the same one, or all ranks raise.

[Note: nodes of all ranks]
The gradient of such a call sends, too, so its node in the graph of autograd must run on all ranks or on
none, and nodes in the same order. Autograd makes a node if an operand requires a gradient: ranks compare
that in the header of the forward call. It runs a node that leads to one of the tensors whose gradients are
asked for, so all operands of a call must be in front of each of its nodes, on every rank. The header of a
gradient has the number of its forward call, so that the gradients of two equal calls cannot be exchanged. A
compiled graph calls operators directly and has one order of nodes: its headers give no number.

A checkpointed region that is not reentrant runs again, and sends, when a node asks for a saved tensor. So
each node of a call that sends saves a tensor, and asks for it before its gradient is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError

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
    state.compared = GRADIENT, number + 1, str(number)  # a mesh's first call has the number 0
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

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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError

_GRADIENT = "gradient of the forward call of number"
T = TypeVar("T")


class _Counts(Protocol):
    """An exchange, which has the number of its last call."""

    call: int


def get_forward_call(exchange: _Counts | None) -> int:
    """Return the number of the call that was just made, for its gradient; -1 if none was."""
    return -1 if exchange is None else exchange.call


@contextmanager
def compare_gradient(mesh: RingMesh, number: int) -> Iterator[None]:
    """Let the headers of calls inside carry the number of the forward call whose gradient they compute."""
    state, before = mesh.state, mesh.state.compared
    state.compared = _GRADIENT, number + 1, str(number)
    try:
        yield
    finally:
        state.compared = before


def note_call(ctx: Any, exchange: _Counts | None, like: Tensor) -> None:
    """Note the call that was just made, whose gradient needs no tensor; `has_run_again` reads it."""
    ctx.call = get_forward_call(exchange)
    ctx.save_for_backward(like.new_empty(0))


def has_run_again(ctx: Any) -> int:
    """Return the number of the forward call, after the checkpointed region that it is in has run again."""
    assert len(ctx.saved_tensors) == 1
    number: int = ctx.call
    return number


def run_gradient(mesh: RingMesh, number: int, function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, the gradient of the forward call of that number.

    Raises:
        RingMismatchError: other ranks compute that of another call; nothing was sent.
    """
    state, before = mesh.state, mesh.state.compared
    state.compared = _GRADIENT, number + 1, str(number)  # a mesh's first call has the number 0
    try:
        return function(*arguments)
    finally:
        state.compared = before


def refuse_second_derivative(name: str) -> Callable[..., NoReturn]:
    """Return a gradient that raises RingConfigError: that of an operator that computes a gradient."""
    return partial(_refuse_second_derivative, name)


def _refuse_second_derivative(name: str, ctx: Any, *grads: Tensor | None) -> NoReturn:
    got = "a request for the second one (create_graph=True, then a gradient of that gradient)"
    advice = "differentiate once, or use a model with plain attention for it"
    raise RingConfigError.wrong(name, "a first derivative", got, advice)


class _Once(torch.autograd.Function):
    """Return the first `count` tensors; a gradient with respect to any tensor is refused."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        _refuse_second_derivative(ctx.name, ctx, *grads)


Backward = Callable[..., tuple[Tensor | None, ...]]


def allow_first_derivative(name: str) -> Callable[[Backward], Backward]:
    """Decorate the backward method of an autograd function so that a second derivative is refused by name."""

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def run(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            with torch.no_grad():
                gradients = backward(ctx, *grads)
            if not torch.is_grad_enabled():
                return gradients
            results = [x for x in gradients if x is not None]
            before = [x for x in (*grads, *ctx.saved_tensors) if x is not None]
            refusing = iter(_Once.apply(name, len(results), *results, *before))
            return tuple(None if x is None else next(refusing) for x in gradients)

        return run

    return decorate

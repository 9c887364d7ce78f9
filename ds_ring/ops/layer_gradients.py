"""Keep the gradients of layers that send by themselves in step on all ranks: [Note: nodes of all ranks]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.ops.passes import GRADIENT, CallNumber, get_forward_call, raise_for_second_derivative


@contextmanager
def compare_gradient(mesh: RingMesh, number: int) -> Iterator[None]:
    """Let headers of calls inside carry the number of their forward call, as `run_gradient` does."""
    state, before = mesh.state, mesh.state.compared
    state.compared = GRADIENT, number + 1, str(number)
    try:
        yield
    finally:
        state.compared = before


def note_call(ctx: Any, exchange: CallNumber | None, like: Tensor) -> None:
    """Note the call that was just made, whose gradient needs no tensor; `has_run_again` reads it."""
    ctx.call = get_forward_call(exchange)
    ctx.save_for_backward(like.new_empty(0))


def has_run_again(ctx: Any) -> int:
    """Return the number of the forward call, after the checkpointed region that it is in has run again."""
    assert len(ctx.saved_tensors) == 1
    number: int = ctx.call
    return number


class _Once(torch.autograd.Function):
    """Return the first `count` tensors; a gradient with respect to any tensor is refused."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise_for_second_derivative(ctx.name, ctx, *grads)


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

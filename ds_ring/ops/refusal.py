"""Refuse a call of compiled code: the operator `ds_ring::refuse`, and constants that carry an error to it.

Dynamo wraps what traced code raises into an error of its own. Only an operator can raise an error unchanged,
when the graph runs. So a call that a check refuses while it is traced becomes this operator, and class and
text of the error are constants of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from ds_ring import errors
from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingError
from ds_ring.ops.checks import check_operand
from ds_ring.ops.handles import constant_in_graphs, new_handle, object_of, operator
from ds_ring.ring.merge import accumulator_dtype

Refusal = tuple[str, str]  # name of the error's class, and its text


def refusal_from(check: Callable[..., object], *given: Any) -> Refusal | None:
    """Return what a check raises as constants of a graph; None if it raises nothing. Traced by Dynamo."""
    try:
        check(*given)
    except RingError as error:
        return type(error).__name__, error.args[0]
    return None


@operator("ds_ring::refuse")
def refuse_op(q: Tensor, value_dim: int, kind: str, why: str, mesh: int) -> tuple[Tensor, Tensor]:
    """Raise the error on all ranks; in a graph its results are those of attention, [.., E] and [..]."""
    _raise(object_of(mesh, RingMesh), kind, why)


@refuse_op.register_fake
def _(q: Tensor, value_dim: int, kind: str, why: str, mesh: int) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))
    return q.new_empty((*q.shape[:-1], value_dim)), lse


def refused_results(q: Tensor, value_dim: int, refusal: Refusal, mesh: RingMesh) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a refused call, in a function that torch.compile traces."""
    if refusal_from(check_operand, "q", q) is not None:
        raise_in_trace(mesh, *refusal)  # no operator would run on it
    out, lse = refuse_op(q.detach(), value_dim, *refusal, _handle_of(mesh))
    return out, lse


@constant_in_graphs
def _handle_of(mesh: RingMesh) -> int:
    return new_handle(mesh)


@constant_in_graphs
def raise_in_trace(mesh: RingMesh, kind: str, why: str) -> NoReturn:
    """Raise the error on all ranks, now."""
    _raise(mesh, kind, why)


def _raise(mesh: RingMesh, kind: str, why: str) -> NoReturn:
    with collective(mesh, "attention"):
        error: type[RingError] = getattr(errors, kind)
        raise error(why)

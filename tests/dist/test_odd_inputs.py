"""Odd inputs that are no mistake: strange strides and numbers that are not finite. Handled, not refused.

A NaN goes where dense attention would take it and nowhere else, over the ring and back; no rank hangs on it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_ring import Causal, RingMesh, gather_sequence, make_layout, ring_attention, shard_sequence
from tests import calls
from tests.cases import Shape, tensors
from tests.reference import dense_attention, relative_error

SHAPE = Shape(batch=2, query_heads=4, kv_heads=2, tokens=32, head_dim=8)

# Each gives an equal tensor with other strides.
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "heads last in memory": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other element": lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],
    "batch last in memory": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "part of a larger tensor": lambda x: torch.nn.functional.pad(x, (3, 2))[..., 3:-2],
}
VALUES = {"NaN": float("nan"), "Inf": float("inf"), "-Inf": float("-inf")}


def attend(rank: int, world_size: int, stride: str, place: str, value: float, transport: str) -> list[Tensor]:
    """out, dq, dk, dv of the whole sequence, with `value` at one number of `place` (token 20, not rank 0's)."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("contiguous", tokens=SHAPE.tokens, ring_size=world_size)
    q, k, v, grad = whole = spoilt(place, value)
    change = STRIDES[stride]
    q, k, v, grad = (change(shard_sequence(x, layout, mesh=mesh, dim=2)) for x in whole)
    assert not q.is_contiguous()
    locals_ = [x.detach().requires_grad_() for x in (q, k, v)]
    out = calls.attend(*locals_, pattern=Causal(), layout=layout, mesh=mesh, transport=transport)
    out.backward(grad)
    result = (out.detach(), *(x.grad for x in locals_))
    return [gather_sequence(x, layout, mesh=mesh, dim=2) for x in result]


def spoilt(place: str, value: float) -> tuple[Tensor, ...]:
    whole = dict(zip(("q", "k", "v", "grad"), tensors(SHAPE), strict=True))
    if place:
        whole[place] = whole[place].clone()
        whole[place][1, 1, 20, 3] = value
    return tuple(whole.values())


def expected(place: str, value: float) -> list[Tensor]:
    want = dense_attention(*spoilt(place, value), Causal())
    return [want.out, want.dq, want.dk, want.dv]


@pytest.mark.situation("inputs", "tensors with other strides")
@pytest.mark.parametrize("transport", ["ring", "all_gather"])
@pytest.mark.parametrize("stride", STRIDES)
def test_strides_do_not_matter(rank_pool, stride, transport):
    for result in rank_pool(2).run(attend, stride, "", 0.0, transport):
        for got, want in zip(result, expected("", 0.0), strict=True):
            assert relative_error(got, want) < 1e-5


def gradient_of_a_sum(rank: int, world_size: int) -> list[Tensor]:
    """dq, dk, dv for a gradient that is one number at stride 0, and for the same written out."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=SHAPE.tokens, ring_size=world_size)
    q, k, v, _ = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in tensors(SHAPE))
    result = []
    for grad in (torch.ones(()).expand(q.shape), torch.ones(q.shape)):
        locals_ = [x.clone().requires_grad_() for x in (q, k, v)]
        ring_attention(*locals_, pattern=Causal(), layout=layout, mesh=mesh).backward(grad)
        result.append([x.grad for x in locals_])
    return [x - y for x, y in zip(*result, strict=True)]


@pytest.mark.situation("inputs", "out.sum().backward(): the incoming gradient is expanded")
def test_the_gradient_of_a_sum(rank_pool):
    for differences in rank_pool(2).run(gradient_of_a_sum):
        assert all(bool((x == 0).all()) for x in differences)


@pytest.mark.situation("inputs", "NaN or Inf in the input")
@pytest.mark.parametrize("place", ["q", "k", "v", "grad"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("world", [2, 4])
def test_what_is_not_finite_passes_through(rank_pool, value, place, world):
    """Every number that dense attention makes finite is finite and right; the others are seen, not hidden."""
    want = expected(place, VALUES[value])
    finite_rows = [x.isfinite().all(-1) for x in want]
    for result in rank_pool(world).run(attend, next(iter(STRIDES)), place, VALUES[value], "ring"):
        assert not all(bool(x.isfinite().all()) for x in result), "the value was swallowed"
        for got, exact, finite in zip(result, want, finite_rows, strict=True):
            assert bool(got[finite].isfinite().all()), "it spread further than in dense attention"
            assert relative_error(got[finite], exact[finite]) < 1e-5

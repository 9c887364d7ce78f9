"""Sparse patterns on real ranks: dilated attention against its definition and Microsoft's mixture, and any
pattern on any layout in cases that Hypothesis draws."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ring import (
    Causal,
    Dilated,
    Documents,
    Full,
    MaskMod,
    RingMesh,
    SlidingWindow,
    gather_sequence,
    shard_sequence,
)
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from tests.cases import LAYOUTS, Shape, layout_for, not_one_of_three, tensors
from tests.dilated_definition import RULES, Branches, mixture, one_softmax
from tests.dist.harness import Pool
from tests.reference import Dense, dense_attention

NAMES = ("out", "dq", "dk", "dv")

# Segment lengths, dilation rates, tokens.
SETS = [
    ((8, 16, 32), (1, 2, 4), 64),
    ((8,), (1,), 64),
    ((4, 16, 64), (1, 2, 8), 128),
    ((10, 20, 40), (1, 3, 5), 100),  # rates not nested, and they do not divide their segments
    ((15, 30, 60), (1, 3, 5), 100),  # rates not nested, segments nested
    ((12, 24, 48, 96, 192), (1, 2, 4, 6, 12), 200),  # the paper's rates
    ((7, 20, 50), (1, 2, 4), 101),  # nothing divides anything
    ((16, 64), (2, 4), 130),  # queries that no branch covers
    ((16, 64), (3, 7), 111),
    ((6, 12, 30), (2, 3, 5), 90),
    ((1000,), (4,), 73),  # a segment longer than the sequence
    ((8, 500), (1, 16), 97),
    ((9, 27), (1, 3), 85),
    ((5, 9), (7, 11), 64),  # rates larger than their segments: some heads see nothing at all
    ((16, 32, 64, 128), (1, 2, 4, 8), 131),
]


def run_ring(
    mesh: RingMesh,
    pattern: Pattern,
    layout_name: str,
    shape: Shape,
    dtype: torch.dtype,
    seed: int = 0,
    options: Options | None = None,
) -> Dense:
    """A pass forward and back, gathered."""
    layout = layout_for(layout_name, pattern, tokens=shape.tokens, ring_size=mesh.ring_size)
    *leaves, grad = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in tensors(shape, dtype, seed))
    for x in leaves:
        x.requires_grad_()
    context = make_ring_context(pattern, layout, mesh, options if options is not None else Options())
    out, lse = ring_attention_op(*leaves, context.handle)
    parts = (out.detach(), lse, *torch.autograd.grad(out, leaves, grad))
    assert {x.dtype for x in (parts[0], *parts[2:])} == {dtype}
    return Dense(*(gather_sequence(x, layout, mesh=mesh, dim=2) for x in parts))


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest magnitude wanted; where nothing but 0 is wanted, what there is."""
    got, want = got.double(), want.double()
    scale = float(want.abs().max())
    worst = float((got - want).abs().max()) / (scale if scale > 1e-9 else 1.0)
    return float("inf") if worst != worst else worst


def differentiate(
    oracle: Callable[[Tensor, Tensor, Tensor, Branches], tuple[Tensor, Tensor]],
    branches: Branches,
    shape: Shape,
) -> Dense:
    q, k, v, grad = (x.double() for x in tensors(shape))
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = oracle(q, k, v, branches)
    out.backward(grad)
    return Dense(out.detach(), lse.detach(), q.grad, k.grad, v.grad)


def test_the_mixture_is_the_one_softmax() -> None:
    """The two oracles agree in float64, gradients of the mixture's weights included."""
    shape = Shape(batch=1, query_heads=4, kv_heads=2, tokens=64, head_dim=8)
    for rule, causal in itertools.product(RULES, (True, False)):
        branches = Branches((8, 16, 32), (1, 2, 4), causal, rule)
        mixed, item = (differentiate(oracle, branches, shape) for oracle in (mixture, one_softmax))
        assert max(error(a, b) for a, b in zip(mixed, item, strict=True) if a is not mixed.lse) < 1e-12


class Case(NamedTuple):
    """One drawn case."""

    pattern: Pattern
    shape: Shape
    layout_name: str
    dtype: torch.dtype
    options: Options
    seed: int


DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
# Of bfloat16 inputs, float32 accumulators are rounded once, and `out` before the backward's delta.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@st.composite
def parts_of_patterns(draw: st.DrawFn, tokens: int) -> Pattern:
    kind = draw(
        st.sampled_from(["dilated", "dilated", "window", "documents", "packed", "causal", "full", "mask"])
    )
    if kind == "dilated":
        lengths, rates, _ = draw(st.sampled_from(SETS))
        return Dilated(lengths, rates, draw(st.booleans()), draw(st.sampled_from(RULES)))
    if kind == "window":
        return SlidingWindow(draw(st.sampled_from([1, 2, 3, 20, 70, 500])), draw(st.booleans()))
    if kind in ("documents", "packed"):
        generator = np.random.default_rng(draw(st.integers(0, 99)))
        ids = generator.integers(-1, 4, tokens)  # every token by itself, -1 is padding
        return Documents(np.sort(ids) if kind == "packed" else ids)
    return {"causal": Causal(), "full": Full(), "mask": MaskMod(not_one_of_three)}[kind]


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    tokens = draw(st.sampled_from([1, 5, 37, 64, 100, 130]))
    pattern = draw(parts_of_patterns(tokens))
    if draw(st.integers(0, 9)) < 4:
        pattern = pattern & draw(parts_of_patterns(tokens))
    heads, kv_heads = draw(st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1), (1, 1)]))
    shape = Shape(draw(st.sampled_from([1, 2])), heads, kv_heads, tokens, head_dim=8)
    transport = draw(st.sampled_from(["ring", "ring", "ring", "all_gather"]))
    how = {"prune": draw(st.integers(0, 7)) > 0, "overlap": draw(st.booleans())}
    options = Options(transport=transport, **(how if transport == "ring" else {}))
    layout_name = draw(st.sampled_from(LAYOUTS))
    return Case(pattern, shape, layout_name, draw(st.sampled_from(DTYPES)), options, draw(st.integers(0, 9)))


def case_errors(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, float]]:
    """Errors of every case over its tolerance, on rank 0; below 1 is right."""
    mesh, result = RingMesh.from_world(world_size), []
    for case in cases:
        got = run_ring(mesh, case.pattern, case.layout_name, case.shape, case.dtype, case.seed, case.options)
        if rank == 0:
            want = dense_attention(*tensors(case.shape, case.dtype, case.seed), case.pattern)
            result.append({n: scaled_error(getattr(got, n), getattr(want, n), case.dtype) for n in NAMES})
            sees = want.lse.isfinite()
            assert torch.equal(got.lse.isfinite(), sees), case
            assert got.out[~sees].eq(0).all() and got.dq[~sees].eq(0).all(), case
    return result


def scaled_error(got: Tensor, want: Tensor, dtype: torch.dtype) -> float:
    """Over the tolerance. Inputs are of size 1: what is 0 in theory (one key: dq, dk) is rounded like 1."""
    worst = float((got.double() - want).abs().max()) / max(float(want.abs().max()), 0.5)
    return float("inf") if worst != worst else worst / TOLERANCE[dtype]


@pytest.mark.day("1-1", "4-1")
@pytest.mark.parametrize(("ring_size", "batches"), [(1, 1), (2, 1), (3, 1), (4, 1)])
def test_any_pattern_on_any_layout_is_the_reference(
    request: pytest.FixtureRequest, rank_pool: Pool, ring_size: int, batches: int
) -> None:
    """Cases are drawn ten at a time, so that ranks are not called for each: 40 by day, 800 at night."""
    pool, done, batches = (
        rank_pool(ring_size),
        list[Case](),
        batches * (20 if request.config.option.night else 1),
    )

    # No shrinking: the message names the one case of the batch that is wrong, and ranks are slow to ask.
    phases = (Phase.reuse, Phase.generate)
    checks = list(HealthCheck)

    @settings(max_examples=batches, deadline=None, suppress_health_check=checks, phases=phases)
    @given(cases=st.lists(any_case(), min_size=10, max_size=10))
    def check(cases: list[Case]) -> None:
        for case, errors in zip(cases, pool.run(case_errors, cases, timeout_s=120)[0], strict=True):
            assert max(errors.values()) < 1, (case, errors)
            done.append(case)

    check()
    assert len(done) >= 10 * batches

"""Every mask x kernel x layout x 1, 2, 4 and 8 ranks x hops or stages: out and each gradient against dense float64.

The truth is a formula of positions (`tests/mask_table.py`) and a softmax written here. FlexAttention runs
uncompiled, on the CPU. A run takes one kernel, one number of ranks and hops or stages for each mask and layout, so
chosen that every two of (mask, kernel, layout, number of ranks, stages) meet at least once. DS_RING_WHOLE_REGISTRY=1 runs the
whole product, the day half of the passes of four ranks; DS_RING_REGISTRY_MASKS="prefix;sinks" the whole product of these rows of the table.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ds_ring
from ds_ring import RingConfigError, RingMesh
from ds_ring.kernels.flex.kernel import FlexKernel
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.plugin import KERNELS, PUBLIC
from tests.cases import LAYOUTS, Shape, layout_for, tensors
from tests.dist.harness import RankPool
from tests.mask_table import HEADS, KV_HEADS, MASKS, TOKENS, dense
from tests.parity import NAMES, gathered_pass

RANKS = (1, 2, 4, 8)
SHAPE = Shape(batch=1, query_heads=HEADS, kv_heads=KV_HEADS, tokens=TOKENS, head_dim=8)
TOLERANCE = 1e-5
WHOLE = "DS_RING_WHOLE_REGISTRY" in os.environ
ONLY = list(filter(None, os.environ.get("DS_RING_REGISTRY_MASKS", "").split(";")))
assert set(ONLY) <= set(MASKS), f"DS_RING_REGISTRY_MASKS: expected names of MASKS, got {ONLY}"


class Case(NamedTuple):
    """One pass."""

    mask: str
    kernel: str
    layout: str
    stages: bool  # keys go to their readers in stages, not around the ring hop by hop


def pairs(case: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    """Every two of the choices of a pass."""
    return set(itertools.combinations(enumerate(case), 2))


@lru_cache
def few() -> list[tuple[str, str, str, int, bool]]:
    """A pass for each mask and layout: of kernels and ring sizes those that meet most for the first time."""
    met: set[tuple[Any, ...]] = set()
    uses: Counter[tuple[str, int]] = Counter()  # of a kernel at a ring size
    result = []
    for mask, layout in itertools.product(MASKS, LAYOUTS):
        choices = itertools.product(KERNELS, RANKS, (False, True))
        every = [(mask, kernel, layout, size, stages) for kernel, size, stages in choices]
        # Of equal ones the one used least, by the work of its ranks: eight take turns on few cores.
        best = max(every, key=lambda case: (len(pairs(case) - met), -(1 + uses[case[1::2]]) * case[3]))
        result.append(best)
        uses[best[1::2]] += 1
        met |= pairs(best)
    return result


def cases(ring_size: int) -> list[Case]:
    """The passes of a ring size: a few, or the whole product, of all masks or of those that are named."""
    masks, every = ONLY or list(MASKS), few()
    if WHOLE or ONLY:
        every = list(itertools.product(masks, KERNELS, LAYOUTS, RANKS, (False, True)))
    return [Case(*choices, stages) for *choices, size, stages in every if size == ring_size]


@lru_cache
def truth(name: str) -> dict[str, Tensor]:
    """Out, dq, dk, dv and which queries see anything, by one softmax over all keys in float64."""
    m = torch.from_numpy(dense(name)).double()
    q, k, v, grad = (x.double() for x in tensors(SHAPE))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = q @ keys.mT / SHAPE.head_dim**0.5
    weights = m * torch.exp(scores - scores.amax(-1, keepdim=True).detach())
    out = weights @ values / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    grads = torch.autograd.grad(out, leaves, grad)
    return dict(zip(NAMES, (out.detach(), *grads), strict=True))


def run_case(mesh: RingMesh, case: Case) -> dict[str, Tensor]:
    pattern = MASKS[case.mask].pattern
    layout = layout_for(case.layout, pattern, tokens=TOKENS, ring_size=mesh.ring_size)
    kernel, most = "reference" if case.kernel == "flex" else case.kernel, (1 << 30) * case.stages
    options = Options(kernel=kernel, stage_bytes=most)
    context = make_ring_context(pattern, layout, mesh, options)
    if case.kernel == "flex":  # by name it is for CUDA only
        context.choose_kernel = lambda q: FlexKernel(16, None, recompute=False)  # type: ignore[method-assign]

    def attend(*operands: Tensor) -> Tensor:
        return torch.ops.ds_ring.ring_attention(*operands, context.handle)[0]

    if case.kernel == "flash" and pattern.masks:  # evaluated pair by pair: refused, on every rank
        with pytest.raises(RingConfigError, match='"kernel": "flex"'):
            gathered_pass(attend, tensors(SHAPE), layout, mesh)
        return {}
    parts = gathered_pass(attend, tensors(SHAPE), layout, mesh)
    context.__dict__.pop("choose_kernel", None)  # contexts are shared by equal calls
    return dict(zip(NAMES, parts, strict=True))


def errors(rank: int, world_size: int, chosen: list[Case]) -> list[dict[str, float]]:
    """Largest errors of every case over the largest value, on rank 0."""
    mesh, result = RingMesh.from_world(world_size), []
    for case in chosen:
        got = run_case(mesh, case)
        if rank == 0:
            want = truth(case.mask)
            worst = {}
            for name in got:
                difference = float((got[name].double() - want[name]).abs().max())
                scale = max(float(want[name].abs().max()), 0.5)
                worst[name] = difference / scale if difference == difference else float("inf")
            result.append(worst)
    return result


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("ring_size", RANKS)
@pytest.mark.day("4-0")
def test_every_mask_is_its_formula(rank_pool: Callable[[int], RankPool], ring_size: int, half: int) -> None:
    chosen = cases(ring_size)[half::2]
    result = rank_pool(ring_size).run(errors, chosen, timeout_s=3600 if WHOLE else 280)[0]
    wrong = {
        case: worst
        for case, worst in zip(chosen, result, strict=True)
        if max(worst.values(), default=0.0) > TOLERANCE
    }
    assert not wrong, f"{len(wrong)} of {len(chosen)} are wrong: {wrong}"


def test_every_two_choices_meet() -> None:
    values = (tuple(MASKS), tuple(KERNELS), LAYOUTS, RANKS, (False, True))
    assert len(MASKS) >= 24 and len(few()) == len(MASKS) * len(LAYOUTS)
    met = set().union(*(pairs(case) for case in few()))
    for (a, first), (b, second) in itertools.combinations(enumerate(values), 2):
        assert {((a, x), (b, y)) for x in first for y in second} <= met, (a, b)


def patterns_in(value: Any) -> Iterator[type[Pattern]]:
    """The kinds of patterns that a composition is made of."""
    if isinstance(value, Pattern):
        yield type(value)
        for field in dataclasses.fields(value):
            yield from patterns_in(getattr(value, field.name))


def test_every_public_pattern_has_a_row() -> None:
    homes = {
        name: home
        for name, home in PUBLIC.items()
        if home.startswith(("ds_ring.masks.", "ds_ring.patterns."))
    }
    public = {name for name in homes if issubclass(getattr(ds_ring, name), Pattern)}
    assert {"Causal", "MaskMod"} <= public
    result = {kind.__name__ for mask in MASKS.values() for kind in patterns_in(mask.pattern)}
    assert public <= result, f"tests/mask_table.py has no row for {sorted(public - result)}"


@pytest.mark.parametrize("name", MASKS)
def test_multiplicities_are_the_formula(name: str) -> None:
    q, k, want = torch.arange(TOKENS)[:, None].numpy(), torch.arange(TOKENS)[None].numpy(), dense(name)
    for head in range(HEADS):
        assert (MASKS[name].pattern.multiplicity(head, HEADS, KV_HEADS, q, k) == want[head]).all()

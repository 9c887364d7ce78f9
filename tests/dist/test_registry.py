"""Every mask x kernel x layout x 1, 2, 4 and 8 ranks: out and each gradient against dense float64.

The truth is a formula of positions (`tests/mask_table.py`) and a softmax written here. FlexAttention runs
uncompiled, on the CPU. The whole product has 2,520 passes; CI takes 210 of them, so chosen that every two of
(mask, kernel, layout, number of ranks) meet at least once. DS_RING_WHOLE_REGISTRY=1 runs them all.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ds_ring import RingMesh, gather_sequence, shard_sequence
from ds_ring.runtime.context import Options
from ds_ring.runtime.contexts import context_for
from ds_ring.runtime.kernels.flex import FlexKernel
from tests.cases import LAYOUTS, Shape, layout_for, tensors
from tests.dist.harness import RankPool
from tests.mask_table import HEADS, KV_HEADS, MASKS, TOKENS, dense

KERNELS = ("reference", "cpu", "flex")
RANKS = (1, 2, 4, 8)
SHAPE = Shape(batch=1, query_heads=HEADS, kv_heads=KV_HEADS, tokens=TOKENS, head_dim=8)
NAMES = ("out", "dq", "dk", "dv")
TOLERANCE = 1e-5
WHOLE = "DS_RING_WHOLE_REGISTRY"


class Case(NamedTuple):
    """One pass."""

    mask: str
    kernel: str
    layout: str


def cases(ring_size: int, whole: bool) -> list[Case]:
    """The passes of a ring size: all, or so many that every pair of choices meets at some ring size."""
    found = []
    for (i, mask), (j, layout) in itertools.product(enumerate(MASKS), enumerate(LAYOUTS)):
        for n, kernel in enumerate(KERNELS):
            chosen = (i + j) % len(KERNELS) == n and RANKS[(i + j) % len(RANKS)] == ring_size
            if whole or chosen:
                found.append(Case(mask, kernel, layout))
    return found


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
    q, k, v, grad = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in tensors(SHAPE))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = Options(kernel="reference" if case.kernel == "flex" else case.kernel)
    context = context_for(pattern, layout, mesh, options)
    if case.kernel == "flex":  # by name it is for CUDA only
        context._kernel = lambda q: FlexKernel(16, None, recompute=False)  # type: ignore[method-assign]
    out, _ = torch.ops.ds_ring.ring_attention(q, k, v, context.handle)
    parts = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    context.__dict__.pop("_kernel", None)  # contexts are shared by equal calls
    return {name: gather_sequence(x, layout, mesh=mesh, dim=2) for name, x in zip(NAMES, parts, strict=True)}


def errors(rank: int, world_size: int, chosen: list[Case]) -> list[dict[str, float]]:
    """Largest errors of every case over the largest value, on rank 0."""
    mesh, found = RingMesh.from_world(world_size), []
    for case in chosen:
        got = run_case(mesh, case)
        if rank == 0:
            want = truth(case.mask)
            worst = {}
            for name in NAMES:
                difference = float((got[name].double() - want[name]).abs().max())
                scale = max(float(want[name].abs().max()), 0.5)
                worst[name] = difference / scale if difference == difference else float("inf")
            found.append(worst)
    return found


@pytest.mark.parametrize("ring_size", RANKS)
def test_every_mask_is_its_formula(rank_pool: Callable[[int], RankPool], ring_size: int) -> None:
    chosen = cases(ring_size, WHOLE in os.environ)
    found = rank_pool(ring_size).run(errors, chosen, timeout_s=280 if WHOLE not in os.environ else 3600)[0]
    wrong = {
        case: worst for case, worst in zip(chosen, found, strict=True) if max(worst.values()) > TOLERANCE
    }
    assert not wrong, f"{len(wrong)} of {len(chosen)} are wrong: {wrong}"


def test_every_two_choices_meet() -> None:
    chosen = [(*case, ranks) for ranks in RANKS for case in cases(ranks, whole=False)]
    assert len(MASKS) >= 24 and len(chosen) == len(MASKS) * len(LAYOUTS)
    values = (tuple(MASKS), KERNELS, LAYOUTS, RANKS)
    for (a, first), (b, second) in itertools.combinations(enumerate(values), 2):
        met = {(case[a], case[b]) for case in chosen}
        assert met == set(itertools.product(first, second)), (a, b)


@pytest.mark.parametrize("name", MASKS)
def test_multiplicities_are_the_formula(name: str) -> None:
    q, k, want = torch.arange(TOKENS)[:, None].numpy(), torch.arange(TOKENS)[None].numpy(), dense(name)
    for head in range(HEADS):
        assert (MASKS[name].pattern.multiplicity(head, HEADS, KV_HEADS, q, k) == want[head]).all()

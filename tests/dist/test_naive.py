"""The ring pass for readers (`ring/naive.py`) computes what `ring_attention` and dense attention compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_ring import RingMesh, gather_sequence, make_layout, ring_attention, shard_sequence
from ds_ring.ring import naive
from tests.cases import PATTERNS, Shape, tensors
from tests.dist.harness import RankPool
from tests.reference import dense_attention, relative_error

SHAPE = Shape(tokens=37, query_heads=4)  # padding in every ring
NAMES = ("out", "lse", "dq", "dk", "dv")


def compare_with_naive(rank: int, ring_size: int, layout_name: str, pattern_name: str) -> dict[str, float]:
    """Relative differences of out, lse and each gradient, from both of the others."""
    mesh, pattern = RingMesh.from_world(ring_size), PATTERNS[pattern_name](SHAPE.tokens)
    layout = make_layout(layout_name, tokens=SHAPE.tokens, ring_size=ring_size)

    def visible(key_rank: int) -> Tensor:
        return torch.from_numpy(pattern.mask(layout.positions(rank), layout.positions(key_rank)))

    def gather(*local: Tensor) -> list[Tensor]:
        return [gather_sequence(x.detach(), layout, mesh=mesh, dim=2) for x in local]

    whole = tensors(SHAPE, torch.float64)
    q, k, v, grad_out = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in whole)
    out, lse = naive.forward(q, k, v, visible)
    gradients = naive.backward(grad_out, q, k, v, out, lse, visible)
    results = gather(out, lse.squeeze(-1), *gradients)

    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = ring_attention(*leaves, pattern=pattern, layout=layout, mesh=mesh, return_lse=True)
    oracles = {
        "ring_attention": gather(out, lse, *torch.autograd.grad(out, leaves, grad_out)),
        "dense": dense_attention(*whole, pattern),
    }
    return {
        f"{name}, {oracle}": relative_error(x, expected)
        for oracle, tensors_expected in oracles.items()
        for name, x, expected in zip(NAMES, results, tensors_expected, strict=True)
    }


@pytest.mark.day("2-striped-window both ways", "2-zigzag-full", "3-zigzag-causal")
@pytest.mark.parametrize(
    ("layout_name", "pattern_name"),
    [("contiguous", "causal"), ("zigzag", "causal"), ("striped", "window both ways"), ("zigzag", "full")],
)
@pytest.mark.parametrize("ring_size", [2, 3])
def test_the_pass_for_readers_is_the_pass(
    rank_pool: Callable[[int], RankPool], ring_size: int, layout_name: str, pattern_name: str
) -> None:
    for errors in rank_pool(ring_size).run(compare_with_naive, layout_name, pattern_name):
        assert len(errors) == 10 and max(errors.values()) < 1e-12, errors

"""`log_linear_attention` against the dense matrix of its buckets, float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from ds_ring import RingMesh, make_layout
from ds_ring.layers.log_linear.log_linear import log_linear_attention
from tests.dist.harness import Pool, catch_refusal
from tests.dist.layers.on_rings import RINGS, T, drawn, errors_on_a_ring, path_of

B, G, H, K, V, LEVELS = 2, 1, 2, 3, 4, 7


def inputs() -> dict[str, Tensor]:
    x = drawn(
        {"q": (B, T, G, K), "k": (B, T, G, K), "v": (B, T, H, V), "g": (B, T, H),
         "level_scales": (B, T, H, LEVELS)}
    )  # fmt: skip
    return x | {"g": -0.2 * x["g"].exp()}


def levels_of(t: int) -> list[int]:
    """Return the level of each position up to t: the Fenwick tree takes the lowest set bit off, again and again."""
    result, end = [0] * (t + 1), t
    while end:
        low = end & -end
        result[end - low : end] = [low.bit_length()] * low
        end -= low
    return result


def alone(q: Tensor, k: Tensor, v: Tensor, g: Tensor, level_scales: Tensor, kind: str) -> Tensor:
    outs = []
    for t in range(T):
        path = path_of(kind, t)
        decay = g[:, path].cumsum(dim=1)
        weights = (decay[:, -1:] - decay).exp() * level_scales[:, t, :, levels_of(len(path) - 1)].mT
        scores = torch.einsum("bk,bsk->bs", q[:, t, 0], k[:, path, 0]) * K**-0.5
        outs.append(torch.einsum("bs,bsh,bshv->bhv", scores, weights, v[:, path]))
    return torch.stack(outs, dim=1)


def on_a_ring(rank: int, world_size: int, ring: tuple[str, int, str], chunk_size: int) -> dict[str, float]:
    operator = partial(log_linear_attention, chunk_size=chunk_size)
    return errors_on_a_ring(world_size, ring, inputs(), alone, operator)


@pytest.mark.parametrize("chunk_size", [1, 6, 64])
@pytest.mark.parametrize("kind", ["whole", "packed", "tree"])
@pytest.mark.parametrize(("world_size", "layout", "ulysses"), RINGS)
@pytest.mark.day(
    "1-zigzag-1-whole-1", "2-zigzag-1-whole-1", "3-contiguous-1-packed-6", "4-balanced-1-tree-64"
)
def test_exact(
    rank_pool: Pool, world_size: int, layout: str, ulysses: int, kind: str, chunk_size: int
) -> None:
    for errors in rank_pool(world_size).run(on_a_ring, (layout, ulysses, kind), chunk_size):
        assert len(errors) == 6 and max(errors.values()) < 1e-10, errors


def refused(rank: int, world_size: int, what: str) -> str:
    mesh, layout = RingMesh.from_world(world_size), make_layout("zigzag", tokens=T, ring_size=world_size)
    x = {key: value[:, : layout.local_tokens] for key, value in inputs().items()}
    if what == "levels":
        x["level_scales"] = x["level_scales"][..., :6]
    else:
        x["g"] = x["g"][..., :1]
    return catch_refusal(log_linear_attention, **x, layout=layout, mesh=mesh)


@pytest.mark.parametrize(
    ("what", "says"),
    [("levels", "expected at least 7 levels"), ("heads", "expected [B, S, G, K] twice")],
)
def test_it_is_refused(rank_pool: Pool, what: str, says: str) -> None:
    for text in rank_pool(2).run(refused, what):
        assert "log_linear_attention" in text and says in text

"""`mamba3_scan` against the paper's complex recurrence, token by token in complex128."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ring import RingMesh, make_layout
from ds_ring.layers.mamba3.mamba3 import mamba3_scan
from tests.dist.harness import Pool, catch_refusal
from tests.dist.layers.on_rings import RINGS, T, drawn, errors_on_a_ring, tokens_before

B, H, N, P, ANGLES = 2, 2, 6, 3, 2


def inputs(rank_of_mimo: int) -> dict[str, Tensor]:
    wide, heads = (B, T, H, rank_of_mimo), (B, T, H)
    x = drawn(
        {"q": (*wide, N), "k": (*wide, N), "v": (*wide, P), "adt": heads, "dt": heads, "trap": heads,
         "angles": (*heads, ANGLES)}
    )  # fmt: skip
    return x | {"adt": -0.2 * x["adt"].exp(), "dt": x["dt"].exp(), "trap": x["trap"].sigmoid()}


def alone(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, angles: Tensor, kind: str
) -> Tensor:
    """Complex states: h = exp(adt - i angle) (h + (1 - trap) dt k v of the token before) + trap dt k v."""
    q, k = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (q, k))
    turn = torch.nn.functional.pad(angles, (0, N // 2 - ANGLES))
    before, states, outs = tokens_before(kind), dict[int, Tensor](), list[Tensor]()
    products = torch.einsum("bthrn,bthrp->bthnp", k, v.to(k.dtype))
    for t in range(T):
        state = (trap * dt)[:, t, :, None, None] * products[:, t]
        if before[t] >= 0:
            reached = ((1 - trap) * dt)[:, t, :, None, None] * products[:, before[t]]
            state = state + torch.polar(adt[:, t].exp()[..., None], -turn[:, t])[..., None] * (
                states[before[t]] + reached
            )
        states[t] = state
        outs.append(torch.einsum("bhrn,bhnp->bhrp", q[:, t].conj(), state).real)
    return torch.stack(outs, dim=1)


def on_a_ring(
    rank: int, world_size: int, ring: tuple[str, int, str], rank_of_mimo: int, chunk_size: int
) -> dict[str, float]:
    operator = partial(mamba3_scan, chunk_size=chunk_size)
    return errors_on_a_ring(world_size, ring, inputs(rank_of_mimo), alone, operator)


@pytest.mark.parametrize("rank_of_mimo", [1, 3])
@pytest.mark.parametrize("chunk_size", [4, 64])
@pytest.mark.parametrize("kind", ["whole", "packed", "tree"])
@pytest.mark.parametrize(("world_size", "layout", "ulysses"), RINGS)
@pytest.mark.day(
    "1-zigzag-1-whole-4-1", "2-zigzag-1-whole-4-1", "3-contiguous-1-packed-64-3", "4-balanced-1-tree-4-1"
)
def test_exact(
    rank_pool: Pool, world_size: int, layout: str, ulysses: int, kind: str, chunk_size: int, rank_of_mimo: int
) -> None:
    ring = layout, ulysses, kind
    for errors in rank_pool(world_size).run(on_a_ring, ring, rank_of_mimo, chunk_size):
        assert len(errors) == 8 and max(errors.values()) < 1e-10, errors


def refused(rank: int, world_size: int) -> str:
    mesh, layout = RingMesh.from_world(world_size), make_layout("zigzag", tokens=T, ring_size=world_size)
    x: dict[str, Any] = {key: value[:, : layout.local_tokens] for key, value in inputs(1).items()}
    if rank:
        x["angles"] = x["angles"].repeat(1, 1, 1, 2)
    return catch_refusal(mamba3_scan, **x, layout=layout, mesh=mesh)


def test_more_angles_than_pairs_are_refused_on_every_rank(rank_pool: Pool) -> None:
    first, second = rank_pool(2).run(refused)
    assert "mamba3_scan: q, k, v, adt, dt, trap, angles: expected [B, S, H, R, N]" in second
    assert "rank 1" in first, first

"""`titans_scan` against the paper's recurrence, token by token, with gradients of the loss by autograd; float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from ds_ring import RingMesh, make_layout
from ds_ring.layers.titans.titans import titans_scan
from tests.dist.harness import Pool, catch_refusal
from tests.dist.layers.on_rings import RINGS, T, drawn, errors_on_a_ring, tokens_before

B, H, K, V = 2, 2, 3, 4


def inputs() -> dict[str, Tensor]:
    x = drawn(
        {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, H, V), "theta": (B, T, H), "log_keep": (B, T, H),
         "log_momentum": (B, T, H)}
    )  # fmt: skip
    rates = {"theta": 0.1 * x["theta"].sigmoid()}
    return x | rates | {name: -0.2 * x[name].exp() for name in ("log_keep", "log_momentum")}


def alone(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, log_keep: Tensor, log_momentum: Tensor, kind: str,
    chunk_size: int,
) -> Tensor:  # fmt: skip
    before, outs = tokens_before(kind), list[Tensor]()
    states: dict[int, tuple[Tensor, Tensor, Tensor, int]] = {}  # M, S, M at the chunk's beginning, position
    for t in range(T):
        empty = torch.zeros(B, H, K, V, dtype=torch.float64, requires_grad=True)
        memory, momentum, begin, where = states.get(before[t], (empty, 0 * empty, empty, -1))
        if (where + 1) % chunk_size == 0:
            begin = memory
        loss = (torch.einsum("bhk,bhkv->bhv", k[:, t], begin) - v[:, t]).square().sum()
        (grad,) = torch.autograd.grad(loss, begin, create_graph=True)
        momentum = log_momentum[:, t, :, None, None].exp() * momentum - theta[:, t, :, None, None] * grad
        memory = log_keep[:, t, :, None, None].exp() * memory + momentum
        states[t] = memory, momentum, begin, where + 1
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], memory))
    return torch.stack(outs, dim=1)


def on_a_ring(rank: int, world_size: int, ring: tuple[str, int, str], chunk_size: int) -> dict[str, float]:
    reference, operator = (partial(item, chunk_size=chunk_size) for item in (alone, titans_scan))
    blocks = chunk_size if ring[2] == "whole" and world_size > 1 else 1
    return errors_on_a_ring(world_size, ring, inputs(), reference, operator, blocks)


# Chunks of 4 only where no run begins inside one.
CASES = [(*ring, kind, 1) for ring in RINGS for kind in ("whole", "packed", "tree")]
CASES += [(*ring, "whole", 4) for ring in RINGS[:4]] + [(*RINGS[0], "packed", 4)]


@pytest.mark.parametrize(("world_size", "layout", "ulysses", "kind", "chunk_size"), CASES)
@pytest.mark.day("1-zigzag-1-whole-1", "3-contiguous-1-packed-1", "4-balanced-1-tree-1", "2-zigzag-1-whole-4")
def test_exact(
    rank_pool: Pool, world_size: int, layout: str, ulysses: int, kind: str, chunk_size: int
) -> None:
    for errors in rank_pool(world_size).run(on_a_ring, (layout, ulysses, kind), chunk_size):
        assert len(errors) == 7 and max(errors.values()) < 1e-10, errors


def refused(rank: int, world_size: int, what: str) -> str:
    mesh, layout = RingMesh.from_world(world_size), make_layout("zigzag", tokens=T, ring_size=world_size)
    x = {name: value[:, : layout.local_tokens] for name, value in inputs().items()}
    if what == "heads":
        x["theta"] = x["theta"][..., :1]
    return catch_refusal(titans_scan, **x, layout=layout, mesh=mesh, chunk_size=16)


@pytest.mark.parametrize(
    ("what", "says"),
    [("chunks", "RingLayoutError: titans_scan: expected runs that begin with blocks of 16 tokens"),
     ("heads", "RingShapeError: titans_scan: q, k, v, theta, log_keep, log_momentum: expected [B, S, H, K]")],
)  # fmt: skip
def test_it_is_refused(rank_pool: Pool, what: str, says: str) -> None:
    for text in rank_pool(2).run(refused, what):
        assert says in text, text

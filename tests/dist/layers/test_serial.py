"""`serial_scan` against one process, float64: token by token, and by mini-batches as TTT layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ring import RingMesh, make_layout
from ds_ring.layers.serial.serial_scan import serial_scan
from tests.dist.harness import Pool, catch_refusal
from tests.dist.layers.on_rings import RINGS, T, drawn, errors_on_a_ring, path_of, tokens_before

B, D = 2, 3


def any_step(state: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A recurrence that is not linear: tanh of state and token."""
    outs = []
    for x in tensors[0].unbind(1):
        state = torch.tanh(1.3 * state + x)
        outs.append(state * x)
    return torch.stack(outs, dim=1), state


def tanh_alone(x: Tensor, kind: str) -> Tensor:
    before, states, outs = tokens_before(kind), {-1: torch.full((B, D), 0.3, dtype=torch.float64)}, []
    for t in range(T):
        states[t] = torch.tanh(1.3 * states[before[t]] + x[:, t])
        outs.append(states[t] * x[:, t])
    return torch.stack(outs, dim=1)


def tanh_on_a_ring(
    rank: int, world_size: int, ring: tuple[str, int, str], batch_parts: int
) -> dict[str, float]:
    def operator(x: Tensor, **named: Any) -> Tensor:
        initial = torch.full((B, D), 0.3, dtype=torch.float64)
        return serial_scan(any_step, initial, [x], batch_parts=batch_parts, **named)

    return errors_on_a_ring(world_size, ring, drawn({"x": (B, T, D)}), tanh_alone, operator)


@pytest.mark.parametrize("batch_parts", [1, 2])
@pytest.mark.parametrize("kind", ["whole", "packed", "tree"])
@pytest.mark.parametrize(("world_size", "layout", "ulysses"), RINGS)
@pytest.mark.covering(1)
def test_any_recurrence_is_exact(
    rank_pool: Pool, world_size: int, layout: str, ulysses: int, kind: str, batch_parts: int
) -> None:
    for errors in rank_pool(world_size).run(tanh_on_a_ring, (layout, ulysses, kind), batch_parts):
        assert len(errors) == 2 and max(errors.values()) < 1e-10, errors


def blocks_step(state: Tensor, tensors: Sequence[Tensor], block: int) -> tuple[Tensor, Tensor]:
    """A recurrence of mini-batches: outputs of the state at their beginning, which all of them change at once."""
    outs = []
    for x in tensors[0].split(block, dim=1):
        outs.append(state[:, None] * x + x.cumsum(1))
        state = torch.tanh(1.3 * state + x.sum(1))
    return torch.cat(outs, dim=1), state


def blocks_alone(x: Tensor, kind: str, block: int) -> Tensor:
    """Each output by itself, from the first token of its document."""
    outs = []
    for t in range(T):
        path, state = path_of(kind, t), torch.full((B, D), 0.3, dtype=torch.float64)
        begin = (len(path) - 1) // block * block
        for first in range(0, begin, block):
            state = torch.tanh(1.3 * state + x[:, path[first : first + block]].sum(1))
        outs.append(state * x[:, t] + x[:, path[begin:]].sum(1))
    return torch.stack(outs, dim=1)


def blocks_on_a_ring(
    rank: int, world_size: int, ring: tuple[str, int, str], block: int, batch_parts: int
) -> dict[str, float]:
    def operator(x: Tensor, **named: Any) -> Tensor:
        initial, step = torch.full((B, D), 0.3, dtype=torch.float64), partial(blocks_step, block=block)
        return serial_scan(step, initial, [x], block_size=block, batch_parts=batch_parts, **named)

    alone, blocks = partial(blocks_alone, block=block), block if ring[2] == "whole" else 1
    return errors_on_a_ring(world_size, ring, drawn({"x": (B, T, D)}), alone, operator, blocks)


@pytest.mark.parametrize(
    ("world_size", "layout", "kind", "block", "batch_parts"),
    [(1, "zigzag", "packed", 4, 1), (2, "contiguous", "packed", 1, 2), (3, "zigzag", "whole", 2, 1),
     (4, "contiguous", "whole", 3, 2)],
)  # fmt: skip
@pytest.mark.day("4-contiguous-whole-3-2")
def test_mini_batches_are_exact(
    rank_pool: Pool, world_size: int, layout: str, kind: str, block: int, batch_parts: int
) -> None:
    for errors in rank_pool(world_size).run(blocks_on_a_ring, (layout, 1, kind), block, batch_parts):
        assert len(errors) == 2 and max(errors.values()) < 1e-10, errors


def refused(rank: int, world_size: int, what: str) -> str:
    mesh, layout = RingMesh.from_world(world_size), make_layout("zigzag", tokens=T, ring_size=world_size)
    x, initial = torch.zeros(B, layout.local_tokens, D), torch.zeros(B, D)
    settings = {"blocks": {"block_size": 5}, "parts": {"batch_parts": 3}, "slots": {}}[what]
    return catch_refusal(
        serial_scan, any_step, initial, [x[:, what == "slots" :]], layout=layout, mesh=mesh, **settings
    )


@pytest.mark.parametrize(
    ("what", "says"),
    [("blocks", "RingLayoutError: serial_scan: expected runs that begin with blocks of 5 tokens"),
     ("parts", "RingShapeError: serial_scan: batch_parts: expected a divisor of 2 samples, got 3"),
     ("slots", "RingShapeError: serial_scan: tensors: expected [2, 23, ...], got [2, 22, 3]")],
)  # fmt: skip
def test_it_is_refused(rank_pool: Pool, what: str, says: str) -> None:
    for text in rank_pool(2).run(refused, what):
        assert says in text, text

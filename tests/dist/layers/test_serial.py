"""`serial_scan` and `ttt_linear` against one process, float64: TTT by gradients that autograd takes of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_ring import RingMesh, make_layout
from ds_ring.layers.serial.serial_scan import serial_scan
from ds_ring.layers.serial.ttt import ttt_linear
from tests.dist.harness import Pool, catch_refusal
from tests.dist.layers.on_rings import RINGS, T, drawn, errors_on_a_ring, path_of, tokens_before

B, H, D = 2, 2, 3


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


def weights() -> dict[str, Tensor]:
    return drawn({"weight": (H, D), "bias": (H, D), "initial": (H, D + 1, D)}, seed=5)


def ttt_alone(q: Tensor, k: Tensor, v: Tensor, eta: Tensor, mini_batch: int, kind: str) -> Tensor:
    """Each output by itself, from the first token of its document."""
    inputs = weights()

    def model(x: Tensor, state: Tensor) -> Tensor:
        result = torch.einsum("bhd,bhde->bhe", F.pad(x, (0, 1), value=1.0), state)
        return F.layer_norm(result, (D,), eps=1e-6) * inputs["weight"] + inputs["bias"]

    outs = []
    for t in range(T):
        path, state = path_of(kind, t), inputs["initial"].expand(B, -1, -1, -1)
        for first in range(0, len(path), mini_batch):
            begin = state.requires_grad_() if state.is_leaf else state
            for s in path[first : first + mini_batch]:
                loss = (model(k[:, s], begin) + k[:, s] - v[:, s]).square().sum() / 2
                (grad,) = torch.autograd.grad(loss, begin, create_graph=True)
                state = state - eta[:, s, :, None, None] * grad
        outs.append(model(q[:, t], state) + q[:, t])
    return torch.stack(outs, dim=1)


def ttt_on_a_ring(
    rank: int, world_size: int, ring: tuple[str, int, str], mini_batch: int, batch_parts: int
) -> dict[str, float]:
    wide, inputs = (B, T, H, D), weights()
    x = drawn({"q": wide, "k": wide, "v": wide, "eta": (B, T, H)})
    operator = partial(
        ttt_linear, norm=(inputs["weight"], inputs["bias"]), initial=inputs["initial"], mini_batch=mini_batch,
        batch_parts=batch_parts,
    )  # fmt: skip
    alone, blocks = partial(ttt_alone, mini_batch=mini_batch), mini_batch if ring[2] == "whole" else 1
    return errors_on_a_ring(world_size, ring, x | {"eta": 0.1 * x["eta"].sigmoid()}, alone, operator, blocks)


@pytest.mark.parametrize(
    ("world_size", "layout", "kind", "mini_batch", "batch_parts"),
    [(1, "zigzag", "packed", 4, 1), (2, "contiguous", "packed", 1, 2), (3, "zigzag", "whole", 2, 1),
     (4, "contiguous", "whole", 3, 2)],
)  # fmt: skip
@pytest.mark.day("4-contiguous-whole-3-2")
def test_ttt_is_exact(
    rank_pool: Pool, world_size: int, layout: str, kind: str, mini_batch: int, batch_parts: int
) -> None:
    for errors in rank_pool(world_size).run(ttt_on_a_ring, (layout, 1, kind), mini_batch, batch_parts):
        assert len(errors) == 5 and max(errors.values()) < 1e-10, errors


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

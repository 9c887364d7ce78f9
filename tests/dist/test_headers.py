"""Arguments that must be equal on all ranks and are not on one: each operator names them, and the ring goes on.

A row is an operator and one argument that the last rank has otherwise. Nothing but a comparison can find it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_ring
from ds_ring import Causal, RingMesh, make_layout
from tests.dist.test_wrong_inputs import MISMATCH, Pool, Refusal, check_refusal, outcomes, refusal

TOKENS = 32
Call = Callable[[RingMesh, bool], Any]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape)


def placed(mesh: RingMesh, name: str = "zigzag") -> dict[str, Any]:
    layout = make_layout(name, tokens=TOKENS, ring_size=mesh.ring_size, multiple_of=mesh.ulysses_size)
    return {"layout": layout, "mesh": mesh}


def slots(mesh: RingMesh) -> int:
    return TOKENS // mesh.ring_size // mesh.ulysses_size


def qkv(mesh: RingMesh, value_dim: int = 8) -> list[Tensor]:
    return [drawn(1, 4, slots(mesh), width) for width in (8, 8, value_dim)]


def attention(mesh: RingMesh, second: bool, value_dim: int = 8, lse: bool = False) -> None:
    q, k, v = qkv(mesh, value_dim if second else 8)
    ds_ring.ring_attention(q, k, v, pattern=Causal(), return_lse=lse and second, **placed(mesh))


def latents(mesh: RingMesh, second: bool) -> None:
    q, latent = drawn(1, 4, slots(mesh), 6), 5 if second else 6
    inputs = drawn(1, 1, slots(mesh), latent), drawn(1, 1, slots(mesh), 2), drawn(4 * (4 + 3), latent)
    ds_ring.latent_attention(q, *inputs, pattern=Causal(), **placed(mesh))


def lse_gradient(mesh: RingMesh, second: bool) -> None:
    torch.manual_seed(3)  # replicated queries
    q, (_, k, v) = drawn(1, 4, 2, 8).requires_grad_(), qkv(mesh)
    out, lse = ds_ring.decode_attention(q, k, v, return_lse=True, **placed(mesh))
    (out.sum() + (2.0 if second else 1.0) * lse.sum()).backward()


def largest_score(mesh: RingMesh, second: bool) -> None:
    q, k, _ = qkv(mesh)
    ds_ring.max_logits(q, k, scale=0.5 if second else None, **placed(mesh))


def selection(mesh: RingMesh, second: bool) -> None:
    keys = drawn(1, slots(mesh), *((2, 6) if second else (3, 4)))
    ds_ring.ring_select(lambda rows, some: some.flatten(2)[:, None, :, 0].expand(1, rows.stop - rows.start, -1),
                        2, keys, **placed(mesh))  # fmt: skip


def ngrams(mesh: RingMesh, second: bool, **changed: Any) -> None:
    ids = torch.randint(0, 9, (1, slots(mesh)))
    inputs: dict[str, Any] = {"multipliers": [3, 5], "sizes": [[7, 11]], "pad_id": 0}
    ds_ring.ngram_rows(ids, **inputs | (changed if second else {}), **placed(mesh))


def shifted(mesh: RingMesh, second: bool) -> None:
    ds_ring.shift_sequence(drawn(1, slots(mesh)), 1, dim=1, fill=-100 if second else 0, **placed(mesh))


# by what the last rank has otherwise: Ulysses size, the call, words of the message
ROWS: dict[str, tuple[int, Call, tuple[str, ...]]] = {
    "the width of v, Ulysses": (2, lambda *of: attention(*of, value_dim=4), ("tensor 2 of Ulysses", "16, 8)", "16, 4)")),
    "the width of v": (1, lambda *of: attention(*of, value_dim=4), ("head_dim of v: ", "has 8", "has 4")),
    "return_lse, Ulysses": (2, lambda *of: attention(*of, lse=True), ("tensor 1 of Ulysses", "has none")),
    "the width of latents, Ulysses": (2, latents, ("tensor 1 of Ulysses", "16, 6)", "16, 5)")),
    "the gradient of lse of replicated queries": (1, lse_gradient, ("values of grad_lse",)),
    "max_logits' scale": (1, largest_score, ("scale: ", "has 0.5")),
    "the shape of ring_select's keys": (1, selection, ("shape of keys", "3, 4)", "2, 6)")),
    "n-grams' multipliers": (1, lambda *of: ngrams(*of, multipliers=[3, 6]), ("multipliers: ", "[3, 6]")),
    "n-grams' sizes": (1, lambda *of: ngrams(*of, sizes=[[11, 7]]), ("sizes: ", "[[11, 7]]")),
    "n-grams' pad_id": (1, lambda *of: ngrams(*of, pad_id=3), ("pad_id: ", "has 3")),
    "shift_sequence's fill": (1, shifted, ("fill: ", "has -100", "has 0")),
}  # fmt: skip


def on_the_last_rank(rank: int, world_size: int, name: str) -> Refusal:
    """The call of a row, then a correct one on the same mesh."""
    ulysses_size, call, _ = ROWS[name]
    mesh = RingMesh.from_world(world_size // ulysses_size, ulysses_size)
    return refusal(lambda: call(mesh, rank == world_size - 1), mesh)


@pytest.mark.situation("inputs", "one rank passes another value of an argument that all ranks must share")
@pytest.mark.parametrize("name", ROWS)
def test_an_argument_that_one_rank_has_otherwise_is_named_on_all(rank_pool: Pool, name: str) -> None:
    for result in outcomes(rank_pool(2), on_the_last_rank, name):
        check_refusal(result, MISMATCH, ROWS[name][2])

"""MoBA on a ring against dense attention, written from the paper, in float64: outputs and gradients.

Grouped queries, lengths that no block divides, blocks that borders of shards cut, documents, NaN in slots of
padding.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_ring import (
    Causal,
    Documents,
    RingError,
    RingMesh,
    make_layout,
    moba_attention,
    ring_select,
    selected_attention,
    shard_sequence,
)
from ds_ring.layers.selection.selected_pass import SelectedPass
from ds_ring.layers.sparse import blocks as of_tokens
from ds_ring.measure.memory import measure_cpu_memory
from tests.dist.harness import Pool, catch_refusal
from tests.dist.one_process import Layer, compare_cases, make, same_as_one_process
from tests.reference import relative_error

B, H, G, D, E = 2, 4, 2, 8, 6


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention [B, H, T, E] under a mask [B, H, T, K], and its probabilities; 0 for rows without keys."""
    k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    scores = (q @ k.mT * D**-0.5).masked_fill(~mask, float("-inf"))
    scores = torch.where(mask.any(-1, keepdim=True), scores, 0.0)
    weights = scores.softmax(-1) * mask
    return weights @ v, weights


def best(scores: Tensor, k: int) -> Tensor:
    """Which of the last dimension are among the k best, the first of equal ones first; none of -inf."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True) & (scores > float("-inf"))


# --- MoBA ------------------------------------------------------------------------------------------

TOKENS = 83
IDS = np.repeat([0, 1, 2, -1], [30, 3, 41, 9])


def moba_alone(q: Tensor, k: Tensor, v: Tensor, size: int, top_k: int, ids: Any) -> Tensor:
    """Equations 2 to 6 of the paper, document by document."""
    mask = torch.zeros(B, H, TOKENS, TOKENS, dtype=torch.bool)
    edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), TOKENS]
    for start, end in pairwise(edges):
        if ids[start] < 0:
            continue
        places = torch.arange(end - start)
        blocks = torch.arange(-(-(end - start) // size))
        part = k[:, :, start:end].detach()
        means = torch.stack([part[:, :, places // size == i].mean(2) for i in blocks], dim=2)
        scores = q[:, :, start:end].detach() @ means.repeat_interleave(H // G, dim=1).mT
        block = (places // size)[:, None]
        scores = scores.masked_fill(blocks > block, float("-inf")).masked_fill(blocks == block, float("inf"))
        chosen = best(scores, top_k)[..., places // size]
        mask[:, :, start:end, start:end] = chosen & (places <= places[:, None])
    return dense(q, k, v, mask)[0]


def moba_inputs() -> dict[str, Tensor]:
    shapes = {"q": (B, H, TOKENS, D), "k": (B, G, TOKENS, D), "v": (B, G, TOKENS, E)}
    return {name: make(name, *shape) for name, shape in shapes.items()}


MOBA = [
    # layout, tokens of a block, blocks, documents
    ("zigzag", 7, 3, False),
    ("contiguous", 16, 2, True),
    ("balanced", 5, 4, True),
    ("zigzag", 50, 2, False),  # longer than a run
    ("contiguous", 6, 1000, False),  # all blocks: causal attention
    ("zigzag", 9, 1, False),  # the own block alone
]


def moba(mesh: RingMesh, name: str, size: int, top_k: int, packed: bool) -> Layer:
    ids = IDS if packed else np.zeros(TOKENS, dtype=int)
    layout = make_layout(name, tokens=TOKENS, ring_size=mesh.ring_size, pattern=Causal())
    attend = partial(
        moba_attention, layout=layout, mesh=mesh, block_size=size, top_k=top_k,
        documents=Documents(ids) if packed else None,
    )  # fmt: skip
    reference = partial(moba_alone, size=size, top_k=top_k, ids=ids)
    return Layer(moba_inputs(), reference, attend, mesh, layout, pad_value=torch.nan)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.day("4")
def test_moba_is_that_of_the_paper(rank_pool: Pool, size: int) -> None:
    same_as_one_process(rank_pool(size), moba, *MOBA, count=4)


# --- faults ----------------------------------------------------------------------------------------


def see_all(self: Any, *arguments: Any) -> Tensor:
    """Tokens of the query's block behind it are seen."""
    self.last = torch.full_like(self.last, TOKENS - 1)
    return places(self, *arguments)


def lose_halo(*arguments: Any) -> Any:
    """What lies on other ranks is left out of the means."""
    return halo(*arguments) * 0


halo, places = of_tokens.halo_op, SelectedPass._places
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "cut": (of_tokens, "halo_op", lose_halo),
    "future": (SelectedPass, "_places", see_all),
}


def faulty(rank: int, world_size: int, case: Any, fault: str) -> float:
    with mock.patch.object(*FAULTS[fault]):
        return compare_cases(rank, world_size, moba, [case], 1)[0]["out"]


@pytest.mark.parametrize(("fault", "case"), [("cut", MOBA[0]), ("future", MOBA[-1])])
def test_faults_are_found(rank_pool: Pool, fault: str, case: Any) -> None:
    assert rank_pool(2).run(faulty, case, fault)[0] > 1e-3


def wrong(rank: int, world_size: int, what: str) -> str:
    """The error of this rank, after which a right call goes through."""
    ulysses = 2 if what == "ulysses" else 1
    mesh = RingMesh.from_world(world_size // ulysses, ulysses)
    layout = make_layout("zigzag", tokens=64, ring_size=mesh.ring_size)
    slots = layout.local_tokens // ulysses
    x = {name: torch.ones(1, heads, slots, 4) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    requested: dict[str, Any] = {"layout": layout, "mesh": mesh}
    of_moba: dict[str, Any] = {"block_size": 8, "top_k": 2}
    changes: dict[str, Any] = {
        "striped": {"layout": make_layout("striped", tokens=64, ring_size=mesh.ring_size)},
        "no blocks": {"block_size": 0},
        "top_k": {"top_k": 2.0},
        "documents": {"documents": Documents([0] * 63)},
        "keys on rank 1": {"k": x["k"][:, :, rank:]},
        "top_k on rank 1": {"top_k": 2 + rank},
    }
    result = catch_refusal(moba_attention, **(x | requested | of_moba | changes.get(what, {})))
    if what != "ulysses":
        assert moba_attention(**x, **requested, **of_moba).shape == x["q"].shape
    return result


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("ulysses", "RingConfigError", "expected ulysses_size 1, got 2"),
        ("striped", "RingLayoutError", "expected shards of consecutive positions"),
        ("no blocks", "RingConfigError", "moba_attention: block_size: expected a positive integer, got 0"),
        ("top_k", "RingConfigError", "moba_attention: top_k: expected a positive integer, got 2.0"),
        ("documents", "RingPatternError", "documents: expected 64 ids"),
        ("keys on rank 1", "RingShapeError", "expected equal batch, heads and tokens"),
        ("top_k on rank 1", "RingMismatchError", "the ranks of this"),
    ],
)  # fmt: skip
def test_misfits_are_refused_on_every_rank(rank_pool: Pool, what: str, kind: str, words: str) -> None:
    first, second = rank_pool(2).run(wrong, what)
    assert second.startswith(kind) and words in second, second
    assert first.startswith("RingMismatchError" if "on rank 1" in what else kind), first


# --- what it is made of ----------------------------------------------------------------------------


def blocks_as_tokens(rank: int, world_size: int) -> dict[str, float]:
    """Chosen blocks against the same choice as tokens, and head by head; scores that read positions."""
    mesh, x = RingMesh.from_world(world_size), moba_inputs()
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=mesh.ring_size)
    place: dict[str, Any] = {"layout": layout, "mesh": mesh}
    size, local = 4, {name: shard_sequence(item, layout, mesh=mesh, dim=2) for name, item in x.items()}
    grad = shard_sequence(make("grad", B, H, TOKENS, E), layout, mesh=mesh, dim=2)
    positions = torch.from_numpy(layout.positions(mesh.ring_rank))
    firsts = torch.stack([positions // size * size, torch.zeros_like(positions)], dim=-1)
    firsts = torch.where((positions < size)[:, None] & (torch.arange(2) == 1), -1, firsts)  # each once
    firsts = torch.where(positions[:, None] < 0, -1, firsts).expand(B, -1, -1)
    tokens = (firsts.unsqueeze(-1) + torch.arange(size)).flatten(-2)
    tokens = torch.where((firsts < 0).repeat_interleave(size, -1) | (tokens > positions[:, None]), -1, tokens)
    errors, want = {}, None
    for name, chosen, extra in (
        ("tokens", tokens, {}),
        ("blocks", firsts, {"block_size": size}),
        ("of each head", firsts[:, None].expand(-1, H, -1, -1), {"block_size": size}),
        ("tokens of each head", tokens[:, None].expand(-1, H, -1, -1), {}),
    ):
        leaves = {key: local[key].clone().requires_grad_() for key in ("q", "k", "v")}
        out, lse = selected_attention(*leaves.values(), chosen, **place, return_lse=True, **extra)
        grads = torch.autograd.grad(out, [*leaves.values()], grad)
        result = {
            "out": out.detach(),
            "lse": lse.detach()[..., positions >= 0],
            **dict(zip("qkv", grads, strict=True)),
        }
        want = result if want is None else want
        errors[name] = max(relative_error(result[key], want[key]) for key in want)

    def nearest(rows: slice, keys: Tensor, where: Tensor) -> Tensor:
        return -(positions[rows, None] - where).abs().double().expand(B, -1, -1)

    best_two = ring_select(nearest, 2, local["k"].transpose(1, 2), with_positions=True, **place)
    here = torch.stack([positions, positions - 1], dim=-1).clamp_min(-1)
    errors["positions"] = float(bool((best_two != here).any()))
    for what, call in (
        ("sinks", lambda: selected_attention(
            *(local[key] for key in "qkv"), firsts[:, None].expand(-1, H, -1, -1), **place, block_size=size,
            sinks=torch.zeros(H, dtype=torch.float64),
        )),
        ("queries", lambda: selected_attention(
            local["q"][:, :, :3], local["k"], local["v"], firsts[:, :3], **place, block_size=size
        )),
        ("size", lambda: selected_attention(*(local[key] for key in "qkv"), firsts, **place, block_size=0)),
    ):  # fmt: skip
        with pytest.raises(RingError, match="no sinks where" if what == "sinks" else "block_size: expected"):
            call()
    return errors


def test_blocks_are_their_tokens_and_heads_choose_for_themselves(rank_pool: Pool) -> None:
    for errors in rank_pool(2).run(blocks_as_tokens):
        assert len(errors) == 5 and max(errors.values()) < 1e-12, errors


def peaks(rank: int, world_size: int, tokens: int) -> int:
    """The most bytes of a forward and backward pass."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=tokens, ring_size=world_size)
    place: dict[str, Any] = {"layout": layout, "mesh": mesh}
    slots = layout.local_tokens

    with measure_cpu_memory() as memory:
        q, k, v = (torch.rand(1, heads, slots, 16, requires_grad=True) for heads in (4, 2, 2))
        moba_attention(q, k, v, **place, block_size=64, top_k=3).sum().backward()
    return memory.peak_bytes


@pytest.mark.night
def test_memory_is_that_of_the_tokens_of_a_rank(rank_pool: Pool) -> None:
    of_two, of_four = rank_pool(2).run(peaks, 256), rank_pool(4).run(peaks, 512)
    assert max(of_four) < 1.1 * max(of_two), (of_two, of_four)

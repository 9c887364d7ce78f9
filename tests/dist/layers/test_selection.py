"""`ring_select` and `selected_attention` against one process in float64: chosen sets, outputs, gradients, bytes.

The single process orders keys as the ring does: by score, and equal scores by position.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from ds_ring import (
    Causal,
    Dilated,
    Documents,
    Full,
    MaskMod,
    RingLayoutError,
    RingMesh,
    RingPatternError,
    SlidingWindow,
    gather_sequence,
    make_layout,
    max_logits,
    ring_select,
    selected_attention,
    shard_sequence,
)
from ds_ring.layers.selection import select as selection
from ds_ring.layers.selection import selected_pass
from ds_ring.layers.selection.block_layout import BlockLayout
from ds_ring.masks.pattern import Pattern
from ds_ring.transports import owner_walk
from tests.dist.harness import catch_refusal
from tests.dist.one_process import Layer, compare, make
from tests.reference import worst

TOKENS, SAMPLES, HEADS, GROUPS, HEAD_DIM, VALUE_DIM, INDEX_HEADS, INDEX_DIM = 203, 2, 4, 2, 8, 6, 3, 4
DOCUMENTS = Documents(document_ids=np.repeat([0, 1, 2], [70, 21, 112]))
PADDED = Documents(document_ids=np.repeat([3, 1, -1], [33, 110, 60]))
PATTERNS: dict[str, Pattern] = {
    "causal": Causal(),
    "full": Full(),
    "documents": Causal() & DOCUMENTS,
    "window": SlidingWindow(40),
    "mask_mod": MaskMod(lambda b, h, q, k: (q >= k) & (k % 3 != 1)),
}


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """A lightning indexer's scores: sum over heads of weight * relu(q k), [B, queries, keys]."""
    return (weights.unsqueeze(-2) @ (queries @ keys.mT.unsqueeze(1)).relu()).squeeze(-2)


def tensors(choices: int) -> dict[str, Tensor]:
    """Global tensors; those of an indexer have the tokens in dim 1, those of attention in dim 2.

    Weights and keys of the indexer are small whole numbers, so that many scores are equal beside the zeros.
    """
    return {
        "iq": make("iq", SAMPLES, TOKENS, INDEX_HEADS, INDEX_DIM).round(),
        "iw": make("iw", SAMPLES, TOKENS, INDEX_HEADS).round(),
        "ik": make("ik", SAMPLES, TOKENS, INDEX_DIM).round(),
        "q": make("q", SAMPLES, HEADS, TOKENS, HEAD_DIM),
        "k": make("k", SAMPLES, GROUPS, TOKENS, HEAD_DIM),
        "v": make("v", SAMPLES, GROUPS, TOKENS, VALUE_DIM),
    }


def scores_of(x: dict[str, Tensor], choices: int, rows: slice, keys: Tensor) -> Tensor:
    """Scores of all choices; a second choice has the first one's with the other sign, so -0 and 0."""
    item = index_scores(x["iq"][:, rows], x["iw"][:, rows], keys)
    return item if choices == 0 else torch.stack([item, -item][:choices], dim=1)


def choose_alone(x: dict[str, Tensor], pattern: Pattern, k: int, choices: int) -> Tensor:
    """The chosen sets as a mask, by a sort of all scores."""
    positions = np.arange(TOKENS)
    visible = torch.from_numpy(pattern.mask(positions, positions))
    scores = scores_of(x, choices, slice(None), x["ik"]).masked_fill(~visible, float("-inf"))
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True) & visible


def attend_alone(
    mask: Tensor, choices: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor]:
    """Out and lse over a mask's keys and the sinks by dense mathematics."""
    keys, values = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
    by_head = mask.unsqueeze(1) if choices == 0 else mask.repeat_interleave(HEADS // choices, dim=1)
    logits = (q @ keys.mT / HEAD_DIM**0.5).masked_fill(~by_head, float("-inf"))
    column = sinks[None, :, None, None].expand(SAMPLES, -1, TOKENS, 1)
    lse = torch.cat([logits, column], dim=-1).logsumexp(-1)
    return (logits - lse.unsqueeze(-1)).exp() @ values, lse


CASES = [
    # layout, pattern, k, choices
    ("zigzag", "causal", 16, 0),
    ("contiguous", "documents", 16, 0),
    ("striped", "documents", 9, 2),
    ("balanced", "window", 7, 1),
    ("zigzag", "full", 5, 2),
    ("contiguous", "mask_mod", 16, 0),
    ("zigzag", "causal", 1000, 0),  # more than there are keys
]


@contextmanager
def small_tiles() -> Iterator[None]:
    """Tiles, blocks and segments smaller than a shard, so that their parts are merged, too."""
    with ExitStack() as stack:
        for module, name, value in (
            (selection, "SCORES", {"cpu": 8 * 32 * 10}), (selection, "KEYS", 10), (selected_pass, "BLOCK", 6),
            (selected_pass, "WORKSPACE", {"cpu": 40_000}), (selected_pass, "SEGMENT", 20),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def parity(rank: int, world_size: int, cases: list[Any] = CASES) -> dict[str, float]:
    """The largest error of each result, over the cases; 1 for chosen sets that differ."""
    mesh, errors = RingMesh.from_world(world_size), {}
    with small_tiles(), closing(mesh):
        for name, pattern, k, choices in cases:
            x, case = tensors(choices), f"{name} {pattern} {k} {choices}"
            layout = make_layout(name, tokens=TOKENS, ring_size=mesh.ring_size, pattern=PATTERNS[pattern])
            place: dict[str, Any] = {"layout": layout, "mesh": mesh}
            # NaN in padding slots must not matter
            local = {
                key: shard_sequence(x[key], dim=1, pad_value=float("nan"), **place)
                for key in ("iq", "iw", "ik")
            }
            chosen = ring_select(
                partial(scores_of, local, choices), k, local["ik"], pattern=PATTERNS[pattern], **place
            )
            every = gather_sequence(chosen, dim=chosen.dim() - 2, **place)
            mask = torch.zeros((*every.shape[:-1], TOKENS + 1), dtype=torch.bool)
            mask.scatter_(-1, torch.where(every < 0, TOKENS, every), True)
            want = choose_alone(x, PATTERNS[pattern], k, choices)
            errors[f"{case} mask"] = float(bool((want != mask[..., :TOKENS]).any()))
            scores = scores_of(x, choices, slice(None), x["ik"])
            ordered = scores.gather(-1, every.clamp_min(0)).masked_fill(every < 0, -1e9)
            errors[f"{case} order"] = float(bool((ordered.diff(dim=-1) > 0).any()))
            attend = partial(selected_attention, chosen=chosen, return_lse=True, **place)
            inputs = {key: x[key] for key in "qkv"} | {"sinks": make("sinks", HEADS)}
            layer = Layer(
                inputs, partial(attend_alone, want, choices), attend, mesh, layout, parameters=["sinks"],
                pad_value=float("nan"),
            )  # fmt: skip
            errors |= {f"{case} {key}": error for key, error in compare(layer).items()}
        return errors


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.day("4")
def test_sets_outputs_and_gradients_are_those_of_one_process(rank_pool, size):
    for errors in rank_pool(size).run(parity):
        assert len(errors) == 8 * len(CASES)
        assert worst(errors.values()) < 1e-12, {key: item for key, item in errors.items() if not item < 1e-12}


BLOCKS = [
    # layout, tokens of a block, documents, whole blocks only, delay, k, choices
    ("zigzag", 4, None, True, 3, 6, 0),
    ("contiguous", 7, DOCUMENTS, True, 6, 3, 2),
    ("balanced", 5, PADDED, False, 5, 4, 1),
    ("zigzag", 6, PADDED, False, 0, 1000, 0),  # more than there are blocks
    ("contiguous", 300, None, True, 299, 2, 0),  # there is no block at all
]


def blocks_alone(size: int, documents: Documents | None, whole: bool) -> list[tuple[int, int]]:
    """First positions of all blocks, and the ends of their documents."""
    edges = [0, TOKENS] if documents is None else [*documents.starts, TOKENS]
    ids = [0] if documents is None else documents.ids
    return [
        (first, end)
        for start, end, number in zip(edges, edges[1:], ids, strict=False)
        for first in range(start, end, size)
        if number >= 0 and (first + size <= end or not whole)
    ]


def block_choices(rank: int, world_size: int) -> dict[str, Any]:
    """Of each case whether the chosen blocks are those of one process, in their order, and how many tie."""
    mesh, result = RingMesh.from_world(world_size), {}
    with small_tiles(), closing(mesh):
        for name, size, documents, whole, delay, k, choices in BLOCKS:
            layout = make_layout(name, tokens=TOKENS, ring_size=mesh.ring_size, pattern=Causal())
            blocks = BlockLayout.from_tokens(layout, size, documents, whole)
            known = blocks_alone(size, documents, whole)
            assert list(zip(blocks.starts.tolist(), blocks.ends.tolist(), strict=True)) == known
            x, count = tensors(choices), max(len(known), 1)
            keys = x["ik"][:, :count]
            firsts, ends = torch.tensor(known or [(TOKENS, TOKENS)]).unbind(1)
            at = torch.arange(TOKENS)[:, None]
            scores = scores_of(x, choices, slice(None), keys)
            scores = scores.masked_fill((at < firsts + delay) | (at >= ends), float("-inf"))
            best = scores.sort(dim=-1, descending=True, stable=True)
            want = torch.where(best.values > float("-inf"), best.indices, -1)[..., :k]
            local = {key: shard_sequence(x[key], layout, mesh=mesh, dim=1) for key in ("iq", "iw")}
            sharded = shard_sequence(keys, blocks, mesh=mesh, dim=1) if known else keys
            got = ring_select(
                partial(scores_of, local, choices), k, sharded, layout=layout, mesh=mesh, blocks=blocks,
                delay=delay,
            )  # fmt: skip
            every = gather_sequence(got, layout, mesh=mesh, dim=got.dim() - 2)
            case = f"{name} {size}"
            result[case] = bool(every.shape == want.shape and (every == want).all())
            ties = (best.values.diff(dim=-1) == 0) & (best.values[..., 1:] > float("-inf"))
            result[f"{case} ties"] = int(ties.sum())
        return result


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.day("1", "4")
def test_chosen_blocks_are_those_of_one_process(rank_pool, size):
    for result in rank_pool(size).run(block_choices):
        for name, block, *_ in BLOCKS:
            case = f"{name} {block}"
            assert result[case] is True, result
            assert result[f"{case} ties"] > 100 or block == 300


@pytest.mark.night
def test_ties_between_blocks_in_another_order_are_found(rank_pool):
    result = rank_pool(2).run(without_ties, block_choices)[0]
    assert result["zigzag 4"] is False


def test_blocks_need_consecutive_tokens_and_documents_without_gaps():
    with pytest.raises(RingLayoutError, match="expected shards of consecutive positions"):
        BlockLayout.from_tokens(make_layout("striped", tokens=64, ring_size=2), 4)
    layout = make_layout("zigzag", tokens=64, ring_size=2)
    with pytest.raises(RingPatternError, match="got one with a gap"):
        BlockLayout.from_tokens(layout, 4, Documents(document_ids=np.repeat([0, 1, 0], [10, 20, 34])))
    with pytest.raises(RingPatternError, match=r"expected 64 ids, got 203"):
        BlockLayout.from_tokens(layout, 4, DOCUMENTS)


def without_ties(rank: int, world_size: int, run: Any = None) -> dict[str, Any]:
    """Break ties as `torch.topk` does."""

    def careless(best: Any, scores: Tensor, positions: Tensor) -> None:
        both = torch.cat([best.scores, scores], dim=-1)
        place = torch.cat([best.positions, positions.expand(scores.shape)], dim=-1)
        values, index = both.topk(best.scores.shape[-1], dim=-1)
        best.positions.copy_(place.gather(-1, index))
        best.scores.copy_(values)

    with mock.patch.object(selection, "merge_best", careless):
        return parity(rank, world_size, CASES[:1]) if run is None else run(rank, world_size)


def test_ties_in_another_order_are_found(rank_pool):
    errors = rank_pool(2).run(without_ties)[0]
    assert errors["zigzag causal 16 0 mask"] == 1 and errors["zigzag causal 16 0 out"] > 1e-3


def without_a_gradient(rank: int, world_size: int) -> dict[str, float]:
    """Lose the gradients of one rank's rows on their way home."""
    messages = owner_walk._in_turn

    def careless(inputs: Any, peer: int, what: tuple[str, str]) -> Any:
        lost = rank == 1 and peer == 0 and what == ("dK", "dV")
        return messages([torch.zeros_like(x) for x in inputs] if lost else inputs, peer, what)

    with mock.patch.object(owner_walk, "_in_turn", careless):
        return parity(rank, world_size, CASES[:1])


def test_a_gradient_that_does_not_return_is_found(rank_pool):
    errors = rank_pool(2).run(without_a_gradient)[0]
    assert errors["zigzag causal 16 0 k"] > 1e-3 and errors["zigzag causal 16 0 v"] > 1e-3
    assert errors["zigzag causal 16 0 q"] < 1e-12 and errors["zigzag causal 16 0 mask"] == 0


def wrong(rank: int, world_size: int, what: str) -> str:
    """Call with a mistake, on rank 1 only where the name says so; then rightly. Returns the first error."""
    mesh = RingMesh.from_world(*((1, 2) if what == "ulysses" else (world_size, 1)))
    layout = make_layout("zigzag", tokens=64, ring_size=mesh.ring_size)
    here = rank == 1
    keys, (q, k, v) = torch.randn(1, 32, 4), torch.randn(3, 1, 2, 32, 4)

    def scores(rows: slice, inputs: Tensor) -> Tensor:
        if what == "scores raise on rank 1" and here:
            raise KeyError("index")
        result = keys[:, rows] @ inputs.mT
        return result.sum(-1) if what == "shape of scores" else result

    def call() -> Tensor:
        count: Any = {"k is 0": 0, "k differs": 5 + rank, "k is no number": 2.0}.get(what, 5)
        chosen = ring_select(
            scores, count, keys[:, :9] if what == "keys on rank 1" and here else keys,
            layout="zigzag" if what == "layout is a name" else layout, mesh=mesh,
        )  # fmt: skip
        if what == "position on rank 1" and here:
            chosen[0, 0, 0] = 64
        chosen = {
            "chosen floats": chosen.float(), "chosen shape": chosen[:, 1:],
            "three choices": chosen.unsqueeze(1).expand(-1, 3, -1, -1),
        }.get(what, chosen)  # fmt: skip
        if "blocks" in what or what == "keys of tokens":
            second = "contiguous" if "another" in what else "zigzag"
            blocks = BlockLayout.from_tokens(make_layout(second, tokens=64, ring_size=mesh.ring_size), 4)
            pattern = Causal() if "pattern" in what else None
            ring_select(scores, 5, keys, layout=layout, mesh=mesh, blocks=blocks, pattern=pattern)
        return selected_attention(q, k, v, chosen, layout=layout, mesh=mesh)

    result = catch_refusal(call)
    if what != "ulysses":
        what = ""
        assert call().shape == q.shape  # all ranks can go on
    return result


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("k is 0", "RingConfigError", "k: expected a positive integer, got 0"),
        ("k is no number", "RingConfigError", "k: expected a positive integer, got 2.0"),
        ("k differs", "RingMismatchError", "k: ring rank 0 has 5, ring rank 1 has 6"),
        ("keys on rank 1", "RingShapeError", "keys: expected [batch, 32, ...]"),
        ("scores raise on rank 1", "RingConfigError", "scores_fn: expected scores of query slots"),
        ("shape of scores", "RingShapeError", "scores_fn: expected floats [1, 1, 1]"),
        ("layout is a name", "RingLayoutError", "layout: expected a layout, got 'zigzag'"),
        ("blocks of another layout", "RingConfigError", "expected blocks of the zigzag layout"),
        ("blocks and a pattern", "RingConfigError", "and no pattern, got zigzag layout"),
        ("keys of tokens", "RingShapeError", "keys: expected [batch, 8, ...]"),
        ("ulysses", "RingConfigError", "expected ulysses_size 1, got 2"),
        ("position on rank 1", "RingShapeError", "chosen: expected positions -1 to 63"),
        ("chosen floats", "RingShapeError", "chosen: expected int64 or int32"),
        ("chosen shape", "RingShapeError", "chosen: expected [1, 32, k]"),
        ("three choices", "RingShapeError", "C a divisor of 2 K/V heads, got (1, 3, 32, 5)"),
    ],
)
def test_wrong_arguments_raise_on_all_ranks_and_leave_the_ring_whole(rank_pool, what, kind, words):
    result = rank_pool(2).run(wrong, what)
    at_fault = result[1]
    assert at_fault.startswith(kind) and words in at_fault, at_fault
    second = "RingMismatchError" if "on rank 1" in what else kind
    assert result[0].startswith(second) and words in result[0], result[0]


BY_HEAD: dict[str, Pattern] = {
    "causal": Causal(),
    "documents": Causal() & Documents([0] * 20 + [1] * 40 + [2] * 7),
    "mask_mod": MaskMod(lambda b, h, q, k: (q >= k) & (k % 4 == h)),
    "mask_mod by sample": MaskMod(lambda b, h, q, k: (q >= k) & (k % 4 == h + b)),
    "dilated": Dilated((16, 64), (2, 4)),
    "dilated by K/V head": Dilated((16, 64), (2, 4), head_offsets="paper_kv"),
    "dilated as torchscale": Dilated((8, 64), (1, 3), causal=False, head_offsets="torchscale"),
    "both": Dilated((16, 64), (1, 4)) & MaskMod(lambda b, h, q, k: (k + h) % 3 != 0),
}


def visible_by_head(pattern: Pattern, tokens: int) -> Tensor:
    """Which keys each of four query heads sees, bool [2 or 1, 4, T, T]."""
    if isinstance(pattern, MaskMod):
        return create_mask(pattern.function, 2, 4, tokens, tokens, device="cpu")
    positions = np.arange(tokens)
    return torch.from_numpy(np.stack([pattern.mask(positions, positions, head, 4, 2) for head in range(4)]))


def largest_by_head(rank: int, world_size: int) -> dict[str, float]:
    """The largest difference of `max_logits` from dense scores, with grouped queries and patterns by head."""
    torch.manual_seed(0)
    tokens, errors = 67, {}
    q, k = (torch.randn(2, heads, tokens, 8, dtype=torch.float64) for heads in (4, 2))
    mesh = RingMesh.from_world(world_size)
    scores = q @ k.repeat_interleave(2, 1).mT
    with small_tiles(), closing(mesh):
        for name, pattern in BY_HEAD.items():
            layout = make_layout(
                "striped" if name == "causal" else "zigzag", tokens=tokens, ring_size=world_size
            )
            place: Any = {"layout": layout, "mesh": mesh}
            mine = [shard_sequence(x, dim=2, pad_value=torch.nan, **place) for x in (q, k)]
            scale = 0.3 if name == "documents" else None
            seen = (scores * (scale or 8**-0.5)).masked_fill(~visible_by_head(pattern, tokens), -torch.inf)
            largest = max_logits(*mine, pattern=pattern, scale=scale, **place)
            errors[name] = float((largest - seen.amax(dim=(0, 2, 3))).abs().max())
        # A NaN of one key of the first K/V head. The last query sees it, and no other one.
        k[1, 0, -1] = torch.nan
        result = max_logits(mine[0], shard_sequence(k, layout, mesh=mesh, dim=2), **place)
        errors["NaN of two heads"] = float(result.isnan().tolist() != [True, True, False, False])
    return errors


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.day("2")
@pytest.mark.situation("operators", "max_logits with a mask by head, or dilated attention, and with a NaN")
def test_largest_scores_follow_the_pattern_of_each_head_and_keep_nan(rank_pool, world_size):
    for errors in rank_pool(world_size).run(largest_by_head):
        assert worst(errors.values()) < 1e-12, errors


def chosen_by_head(rank: int, world_size: int, name: str) -> str:
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=16, ring_size=world_size)
    keys = torch.randn(1, 8, 4)

    def scores(rows: slice, some: Tensor) -> Tensor:
        return (keys[:, rows] @ some.mT).unsqueeze(1).expand(-1, 4, -1, -1)

    text = catch_refusal(ring_select, scores, 3, keys, layout=layout, mesh=mesh, pattern=BY_HEAD[name])
    ring_select(scores, 3, keys, layout=layout, mesh=mesh)  # the mesh lives
    return text


@pytest.mark.parametrize("name", ["mask_mod", "dilated by K/V head"])
@pytest.mark.situation("operators", "ring_select with a pattern that differs between heads")
def test_a_choice_by_a_pattern_that_differs_between_heads_is_refused(rank_pool, name):
    for message in rank_pool(2).run(chosen_by_head, name):
        assert message.startswith("RingPatternError") and "the same for all heads, got" in message


def wrong_scores(rank: int, world_size: int) -> None:
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=16, ring_size=world_size)
    q, k = torch.zeros(1, 4, 8, 4), torch.zeros(1, 3 if rank == 0 else 2, 8, 4)
    max_logits(q, k, layout=layout, mesh=mesh)


def test_heads_that_cannot_be_grouped_are_refused_on_every_rank(rank_pool):
    outcomes = rank_pool(2).collect(wrong_scores)
    assert outcomes[0].error_type == "RingShapeError" and "H a multiple of G" in outcomes[0].message
    assert outcomes[1].error_type == "RingMismatchError"

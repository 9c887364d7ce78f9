"""Attention from queries of one sharded sequence to keys of another, against dense float64 attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor

from ds_ring import (
    Causal,
    CrossAttention,
    Documents,
    Full,
    RingError,
    RingLayoutError,
    RingMesh,
    RingPatternError,
    RingShapeError,
    cross_attention,
    gather_sequence,
    make_layout,
    shard_sequence,
    simulate,
)
from ds_ring.config.pass_options import PassOptions
from ds_ring.layers.cross.layout import PairLayout
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.layout import Layout, in_whole_blocks
from ds_ring.schedule.plan import build_plan
from ds_ring.simulation.simulate import SimulationOptions
from ds_ring.transports.reproducible.blocks import cut_blocks
from tests.dist.harness import RankPool

Pool = Callable[[int], RankPool]
HEADS, KV_HEADS, WIDTH = 4, 2, 16
NAMES = ("out", "dq", "dk", "dv")
# (layout of the queries, of the keys), (queries, keys)
CASES = [
    (("zigzag", "contiguous"), (37, 61)),
    (("contiguous", "zigzag"), (61, 37)),
    (("balanced", "striped"), (3, 50)),
]


def drawn(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, float64."""
    generator = torch.Generator().manual_seed(queries + keys)
    sizes = [(HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys), (HEADS, queries)]
    q, k, v, grad = (
        torch.randn(2, heads, n, WIDTH, generator=generator, dtype=torch.float64) for heads, n in sizes
    )
    return q, k, v, grad


def documents_of(queries: int, keys: int) -> tuple[Documents, Tensor]:
    """Two documents and padding among the keys, one document without keys; and which pairs attend."""
    of_queries = np.arange(queries) * 3 // queries
    of_keys = np.where(np.arange(keys) < keys - 5, np.arange(keys) * 2 // keys, -1)
    return Documents(np.concatenate([of_queries, of_keys])), torch.from_numpy(
        of_queries[:, None] == of_keys[None, :]
    )


def dense(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sees: Tensor | None, score_mod: Any = None
) -> dict[str, Tensor]:
    """Softmax attention; a query without keys has 0."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    k_all, v_all = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in leaves[1:])
    scores = leaves[0] @ k_all.mT / WIDTH**0.5
    if score_mod is not None:
        b, h, i, j = (torch.arange(n) for n in scores.shape)
        scores = score_mod(scores, b[:, None, None, None], h[:, None, None], i[:, None], j)
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool) if sees is None else sees
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1).where(
        mask.any(-1, keepdim=True), 0.0
    )
    out = weights @ v_all
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, grad)), strict=True))


def error_of(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def layouts_for(names: tuple[str, str], lengths: tuple[int, int], ring: int, ulysses: int) -> list[Layout]:
    sizes = {"ring_size": ring, "multiple_of": ulysses, "pattern": Causal()}
    return [make_layout(one, tokens=n, **sizes) for one, n in zip(names, lengths, strict=True)]


def crossed(rank: int, world_size: int, ulysses: int, documents: bool, block: int) -> dict[Any, float]:
    """Relative errors of all cases; with a block those of the reproducible transport."""
    mesh = RingMesh.from_world(world_size // ulysses, ulysses)
    errors = {}
    more: dict[str, Any] = {}
    if block > 1:
        more["options"] = PassOptions(transport="reproducible", block_size=block)
    for names, lengths in CASES[: 2 if block > 1 else None]:
        q_layout, k_layout = layouts_for(names, lengths, mesh.ring_size, ulysses)
        if block > 1:
            q_layout, k_layout = (in_whole_blocks(one, block) for one in (q_layout, k_layout))
        pattern: Pattern = Full()
        sees = None
        if documents:
            pattern, sees = documents_of(*lengths)
        whole = drawn(*lengths)
        want = dense(*whole, sees)
        of = (q_layout, k_layout, k_layout, q_layout)
        q, k, v, grad = (shard_sequence(x, one, mesh=mesh, dim=2) for x, one in zip(whole, of, strict=True))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        both = {"layout": q_layout, "key_layout": k_layout, "mesh": mesh}
        if names[0] == "zigzag" or block > 1:
            out = cross_attention(q, k, v, pattern=pattern, **more, **both)  # type: ignore[arg-type]
        else:
            out = CrossAttention(pattern, **both)(q, k, v)  # type: ignore[arg-type]
        found = (out.detach(), *torch.autograd.grad(out, leaves, grad))
        for name, x, one in zip(NAMES, found, (q_layout, q_layout, k_layout, k_layout), strict=True):
            got = gather_sequence(x.contiguous(), one, mesh=mesh, dim=2)
            errors[names, lengths, name] = error_of(got, want[name])
    return errors


@pytest.mark.parametrize(
    ("world_size", "ulysses", "documents", "block"),
    [
        (2, 1, False, 1),
        (2, 1, True, 1),
        (4, 1, True, 1),
        (4, 2, True, 1),
        (2, 1, True, 16),
        (4, 1, False, 16),
    ],
)
@pytest.mark.day("2-1-False-1", "2-1-True-1", "4-2-True-1", "2-1-True-16")
def test_real_ranks_agree_with_float64(
    rank_pool: Pool, world_size: int, ulysses: int, documents: bool, block: int
) -> None:
    errors = rank_pool(world_size).run(crossed, ulysses, documents, block)[0]
    assert len(errors) == (2 if block > 1 else len(CASES)) * len(NAMES)
    assert max(errors.values()) < 1e-12, errors


def scored(rank: int, world_size: int, ulysses: int, block: int) -> dict[str, float]:
    """Relative errors of score_mods of both positions, against dense attention."""
    mesh = RingMesh.from_world(world_size // ulysses, ulysses)
    lengths = 37, 61
    more: dict[str, Any] = {}
    q_layout, k_layout = layouts_for(("zigzag", "contiguous"), lengths, mesh.ring_size, ulysses)
    if block > 1:
        more["options"] = PassOptions(transport="reproducible", block_size=block)
        q_layout, k_layout = (in_whole_blocks(one, block) for one in (q_layout, k_layout))
    q, k, v, grad = drawn(*lengths)
    generator = torch.Generator().manual_seed(1)
    by_query, by_key = (torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths)
    strength = [0.1]

    def distance(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + strength[0] * (j - i) * (h + 1)

    def tables(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * by_query[i] + by_key[j]

    both: dict[str, Any] = {"layout": q_layout, "key_layout": k_layout, "mesh": mesh}
    calls: dict[str, tuple[Any, Callable[..., Any]]] = {
        "distance": (distance, partial(cross_attention, pattern=Full(), score_mod=distance, **both, **more)),
        "tables": (tables, partial(cross_attention, pattern=Full(), score_mod=tables, **both, **more)),
    }
    if block == 1:
        module = CrossAttention(Full(), score_mod=distance, **both)
        calls |= {"module": (distance, module), "module with another number": (distance, module)}
    errors = {}
    for name, (mod, call) in calls.items():
        strength[0] = 0.3 if "another" in name else 0.1
        want = dense(q, k, v, grad, None, mod)
        of = (q_layout, k_layout, k_layout)
        mine = [
            shard_sequence(x, one, mesh=mesh, dim=2).requires_grad_()
            for x, one in zip((q, k, v), of, strict=True)
        ]
        out = call(*mine)
        grads = torch.autograd.grad(out, mine, shard_sequence(grad, q_layout, mesh=mesh, dim=2))
        for key, x, one in zip(NAMES, (out.detach(), *grads), (q_layout, *of), strict=True):
            got = gather_sequence(x.contiguous(), one, mesh=mesh, dim=2)
            errors[f"{name} {key}"] = error_of(got, want[key])
    return errors


@pytest.mark.parametrize(("world_size", "ulysses", "block"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 16)])
@pytest.mark.day("2-1-1", "2-1-16")
@pytest.mark.situation("operators", "cross_attention with a score_mod of positions: a distance, tables")
def test_score_mods_get_the_positions_of_each_sequence(
    rank_pool: Pool, world_size: int, ulysses: int, block: int
) -> None:
    errors = rank_pool(world_size).run(scored, ulysses, block)[0]
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("ring_size", [2, 3])
@pytest.mark.parametrize(("names", "lengths"), CASES)
def test_virtual_ranks_agree_with_float64(
    names: tuple[str, str], lengths: tuple[int, int], ring_size: int
) -> None:
    q_layout, k_layout = layouts_for(names, lengths, ring_size, 1)
    pair = PairLayout.join(q_layout, k_layout)
    (queries, keys), first = lengths, pair.first_query
    whole = drawn(*lengths)

    def spread(x: Tensor, first: int) -> Tensor:
        """The tokens of all positions of the pair, NaN where no pair is; NaN would spread."""
        found = torch.full((2, x.shape[1], pair.tokens, WIDTH), torch.nan, dtype=torch.float64)
        found[:, :, first : first + x.shape[2]] = x
        return found

    q, k, v, grad = (spread(x, n) for x, n in zip(whole, (first, 0, 0, first), strict=True))
    found = simulate(
        q,
        k,
        v,
        pattern=pair.pattern_between(Full()),
        layout=pair,
        grad_out=grad.nan_to_num(0.0),
        options=SimulationOptions(progress=False),
    )
    want = dense(*whole, None)
    assert found.dq is not None and found.dk is not None and found.dv is not None
    got = tuple(x[:, :, first : first + queries] for x in (found.out, found.dq))
    got += (found.dk[:, :, :keys], found.dv[:, :, :keys])
    for name, x in zip(NAMES, got, strict=True):
        assert error_of(x, want[name]) < 1e-12, name


@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_a_pair_keeps_the_slots_of_both(ulysses: int) -> None:
    q_layout, k_layout = layouts_for(("zigzag", "balanced"), (37, 61), 3, ulysses)
    pair = PairLayout.join(q_layout, k_layout, ulysses)
    everywhere = np.concatenate([pair.positions(rank) for rank in range(3)])
    assert sorted(everywhere.tolist()) == list(range(pair.tokens))
    for rank in range(3):
        slots = pair.positions(rank).reshape(ulysses, -1)
        mine = np.where(slots < 37 + 61, slots, -1)
        size = q_layout.local_tokens // ulysses
        queries = q_layout.positions(rank)
        assert (mine[:, :size].reshape(-1) == np.where(queries < 0, -1, queries + 61)).all()
        assert (mine[:, size:].reshape(-1) == k_layout.positions(rank)).all()


@pytest.mark.parametrize("queries", [1, 16, 37])
def test_a_pair_in_blocks_has_whole_blocks_of_both(queries: int) -> None:
    q_layout, k_layout = layouts_for(("zigzag", "zigzag"), (queries, 61), 3, 1)
    pair = PairLayout.join(*(in_whole_blocks(one, 8) for one in (q_layout, k_layout)), block=8)
    everywhere = np.concatenate([pair.positions(rank) for rank in range(3)])
    assert sorted(everywhere.tolist()) == list(range(pair.tokens)) and pair.first_query == 64
    numbers = [one.number for rank in range(3) for one in cut_blocks(pair, rank, 8, False)]
    assert sorted(numbers) == list(range(pair.tokens // 8))
    with pytest.raises(RingLayoutError, match="expected no Ulysses ranks"):
        PairLayout.join(q_layout, k_layout, 2, 8)


def test_queries_are_neither_computed_as_keys_nor_sent() -> None:
    q_layout, k_layout = layouts_for(("zigzag", "zigzag"), (400, 80), 4, 1)
    pair = PairLayout.join(q_layout, k_layout)
    plan = build_plan(pair.pattern_between(Full()), pair, query_heads=1, kv_heads=1)
    assert (
        sum(hop.pairs for one in plan.classes for rank in range(4) for hop in one.rank(rank).hops) == 400 * 80
    )
    assert plan.tokens_sent == plan.tokens_needed == 80 * 3


WRONG: dict[str, tuple[dict[str, Any], type[RingError], str]] = {
    "pattern": ({"pattern": Causal()}, RingPatternError, "positions of two sequences have no distance"),
    "documents": ({"pattern": Documents([0] * 10)}, RingPatternError, "Documents with 24 ids"),
    "ring": ({"key_layout": make_layout("zigzag", tokens=16, ring_size=2)}, RingLayoutError,
        "expected 1 ranks"),
    "name": ({"layout": "zigzag"}, RingLayoutError, "got str and ChunkLayout"),
    "length": ({"key_layout": make_layout("zigzag", tokens=15, ring_size=1)}, RingShapeError, "local tokens"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what: str) -> None:
    changes, error, said = WRONG[what]
    given: dict[str, Any] = {"pattern": Full(), "mesh": RingMesh.single()}
    given |= {"layout": make_layout("zigzag", tokens=8, ring_size=1)}
    given |= {"key_layout": make_layout("zigzag", tokens=16, ring_size=1)} | changes
    with pytest.raises(error, match=said):
        cross_attention(*(torch.randn(1, 2, n, 8) for n in (8, 16, 16)), **given)


@pytest.mark.parametrize("how", ["function", "module"])
@pytest.mark.day("function")
def test_a_graph_ends_before_it(how: str) -> None:
    mesh, layout = RingMesh.single(), make_layout("zigzag", tokens=8, ring_size=1)
    module = CrossAttention(Full(), mesh=mesh, layout=layout, key_layout=layout)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if how == "module":
            return module(q, k, v)
        return cross_attention(q, k, v, pattern=Full(), layout=layout, key_layout=layout, mesh=mesh)

    given = [torch.randn(1, 2, 8, 8) for _ in range(3)]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs eagerly: call it outside of the graph"):
        torch.compile(attend, backend="eager", fullgraph=True)(*given)
    assert torch.equal(torch.compile(attend, backend="eager")(*given), attend(*given))

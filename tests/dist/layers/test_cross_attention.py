"""Attention from queries of one sharded sequence to keys of another, against dense float64 attention."""

from __future__ import annotations

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
    make_layout,
    simulate,
)
from ds_ring.config.pass_options import PassOptions
from ds_ring.layers.cross.layout import PairLayout
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.pieces import round_to_blocks
from ds_ring.schedule.plan import build_plan
from ds_ring.simulation.simulate import SimulationOptions
from ds_ring.transports.reproducible.blocks import cut_blocks
from tests.dist.harness import Pool
from tests.dist.one_process import Layer, compare, same_as_one_process
from tests.reference import relative_error

HEADS, KV_HEADS, WIDTH = 4, 2, 16
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


def dense(q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None, score_mod: Any = None) -> Tensor:
    """Softmax attention; a query without keys has 0."""
    k_all, v_all = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = q @ k_all.mT / WIDTH**0.5
    if score_mod is not None:
        b, h, i, j = (torch.arange(n) for n in scores.shape)
        scores = score_mod(scores, b[:, None, None, None], h[:, None, None], i[:, None], j)
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool) if sees is None else sees
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1).where(
        mask.any(-1, keepdim=True), 0.0
    )
    return weights @ v_all


def layouts_for(names: tuple[str, str], lengths: tuple[int, int], ring: int, ulysses: int) -> list[Layout]:
    sizes = {"ring_size": ring, "multiple_of": ulysses, "pattern": Causal()}
    return [make_layout(item, tokens=n, **sizes) for item, n in zip(names, lengths, strict=True)]


def crossed(
    mesh: RingMesh, names: tuple[str, str], lengths: tuple[int, int], documents: bool, block: int,
    score_mod: Any = None, is_module: bool = False,
) -> Layer:  # fmt: skip
    """With a block, on the reproducible transport."""
    options = PassOptions()
    q_layout, k_layout = layouts_for(names, lengths, mesh.ring_size, mesh.ulysses_size)
    if block > 1:
        options = PassOptions(transport="reproducible", block_size=block)
        q_layout, k_layout = (round_to_blocks(layout, block) for layout in (q_layout, k_layout))
    pattern, sees = documents_of(*lengths) if documents else (Full(), None)
    place: dict[str, Any] = {"layout": q_layout, "key_layout": k_layout, "mesh": mesh, "score_mod": score_mod}
    attend: Any = partial(cross_attention, pattern=pattern, options=options, **place)
    if is_module:
        module = CrossAttention(pattern, **place)
        attend = lambda q, k, v: module(q, k, v)  # noqa: E731
    inputs = dict(zip("qkv", drawn(*lengths), strict=False))
    reference = partial(dense, sees=sees, score_mod=score_mod)
    return Layer(inputs, reference, attend, mesh, q_layout, layouts={"k": k_layout, "v": k_layout})


@pytest.mark.day("2-1-True-16", "4-2-True-1")
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
def test_real_ranks_agree_with_float64(
    rank_pool: Pool, world_size: int, ulysses: int, documents: bool, block: int
) -> None:
    cases = [
        (*case, documents, block, None, case[0][0] != "zigzag" and block == 1)
        for case in CASES[: 2 if block > 1 else None]
    ]
    same_as_one_process(rank_pool(world_size), crossed, *cases, ulysses=ulysses, count=4)


STRENGTH = [0.1]  # on ranks
GENERATOR = torch.Generator().manual_seed(1)
BY_QUERY, BY_KEY = (torch.randn(n, generator=GENERATOR, dtype=torch.float64) for n in CASES[0][1])


def distance(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + STRENGTH[0] * (j - i) * (h + 1)


def tables(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score * BY_QUERY[i] + BY_KEY[j]


def scored(rank: int, world_size: int, ulysses: int, block: int) -> list[dict[str, float]]:
    """Relative errors of score_mods of both positions; a module's reads another number in its second call."""
    mesh = RingMesh.from_world(world_size // ulysses, ulysses)
    errors = [compare(crossed(mesh, *CASES[0], False, block, mod)) for mod in (distance, tables)]
    if block == 1:
        module = crossed(mesh, *CASES[0], False, block, distance, True)
        errors.append(compare(module))
        STRENGTH[0] = 0.3
        errors.append(compare(module))
        STRENGTH[0] = 0.1
    return errors


@pytest.mark.day("2-1-16")
@pytest.mark.parametrize(("world_size", "ulysses", "block"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 16)])
@pytest.mark.situation("operators", "cross_attention with a score_mod of positions: a distance, tables")
def test_score_mods_get_the_positions_of_each_sequence(
    rank_pool: Pool, world_size: int, ulysses: int, block: int
) -> None:
    for errors in rank_pool(world_size).run(scored, ulysses, block)[0]:
        assert len(errors) == 4 and max(errors.values()) < 1e-12, errors


@pytest.mark.day("names0-lengths0-3", "names1-lengths1-2", "names2-lengths2-3")
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
        result = torch.full((2, x.shape[1], pair.tokens, WIDTH), torch.nan, dtype=torch.float64)
        result[:, :, first : first + x.shape[2]] = x
        return result

    q, k, v, grad = (spread(x, n) for x, n in zip(whole, (first, 0, 0, first), strict=True))
    result = simulate(
        q,
        k,
        v,
        pattern=pair.pattern_between(Full()),
        layout=pair,
        grad_out=grad.nan_to_num(0.0),
        options=SimulationOptions(progress=False),
    )
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    out = dense(*leaves, None)
    want = (out.detach(), *torch.autograd.grad(out, leaves, whole[3]))
    got = tuple(x[:, :, first : first + queries] for x in (result.out, result.dq))
    got += (result.dk[:, :, :keys], result.dv[:, :, :keys])
    assert max(map(relative_error, got, want)) < 1e-12


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
    pair = PairLayout.join(*(round_to_blocks(item, 8) for item in (q_layout, k_layout)), block=8)
    everywhere = np.concatenate([pair.positions(rank) for rank in range(3)])
    assert sorted(everywhere.tolist()) == list(range(pair.tokens)) and pair.first_query == 64
    numbers = [item.number for rank in range(3) for item in cut_blocks(pair, rank, 8, False)]
    assert sorted(numbers) == list(range(pair.tokens // 8))
    with pytest.raises(RingLayoutError, match="expected no Ulysses ranks"):
        PairLayout.join(q_layout, k_layout, 2, 8)


def test_queries_are_neither_computed_as_keys_nor_sent() -> None:
    q_layout, k_layout = layouts_for(("zigzag", "zigzag"), (400, 80), 4, 1)
    pair = PairLayout.join(q_layout, k_layout)
    plan = build_plan(pair.pattern_between(Full()), pair, query_heads=1, kv_heads=1)
    assert (
        sum(hop.pairs for item in plan.classes for rank in range(4) for hop in item.rank(rank).hops)
        == 400 * 80
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
    arguments: dict[str, Any] = {"pattern": Full(), "mesh": RingMesh.single()}
    arguments |= {"layout": make_layout("zigzag", tokens=8, ring_size=1)}
    arguments |= {"key_layout": make_layout("zigzag", tokens=16, ring_size=1)} | changes
    with pytest.raises(error, match=said):
        cross_attention(*(torch.randn(1, 2, n, 8) for n in (8, 16, 16)), **arguments)


@pytest.mark.night
@pytest.mark.parametrize("how", ["function", "module", "function without a plan"])
def test_a_graph_ends_before_it(how: str) -> None:
    is_planned = how != "function without a plan"  # Dynamo traces what makes a plan, too: 10 s
    mesh, slots = RingMesh.single(), 8 if is_planned else 10
    layout = make_layout("zigzag", tokens=slots, ring_size=1)
    module = CrossAttention(Full(), mesh=mesh, layout=layout, key_layout=layout)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if how == "module":
            return module(q, k, v)
        return cross_attention(q, k, v, pattern=Full(), layout=layout, key_layout=layout, mesh=mesh)

    arguments = [torch.randn(1, 2, slots, 8) for _ in range(3)]
    if is_planned:
        attend(*arguments)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs eagerly: call it outside of the graph"):
        torch.compile(attend, backend="eager", fullgraph=True)(*arguments)
    assert torch.equal(torch.compile(attend, backend="eager")(*arguments), attend(*arguments))

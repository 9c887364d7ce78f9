"""`transport="tiles"` on real ranks: float64 against dense attention, bytes, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_ring import (
    Causal,
    Dilated,
    Documents,
    MaskMod,
    PassOptions,
    RingMesh,
    SlidingWindow,
    gather_sequence,
    make_layout,
    ring_attention,
    shard_sequence,
)
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import RingContext, make_ring_context
from ds_ring.ops.eager import attend
from ds_ring.ops.options import Options
from ds_ring.transports.tiles.grid import PassGrid
from ds_ring.transports.tiles.plan import TokenBytes, choose_grid, list_grids, tile_plan
from ds_ring.transports.tiles.tile_pass import pass_on
from tests import calls
from tests.cases import Shape, document_ids, not_one_of_three, tensors
from tests.dist.harness import Pool
from tests.parity import errors, gathered_pass
from tests.reference import dense_attention, relative_error

SHAPE = Shape(batch=2, query_heads=8, kv_heads=2, tokens=203, head_dim=8)
PATTERNS: dict[str, tuple[Pattern, str]] = {
    "causal": (Causal(), "zigzag"),
    "window": (SlidingWindow(30), "contiguous"),
    "documents": (Documents(document_ids(203)) & Causal(), "balanced"),
    "LongNet": (Dilated((16, 64), (1, 4)), "striped"),
    "mask function": (MaskMod(not_one_of_three) & Causal(), "zigzag"),
}


def on_grid(context: RingContext, grid: PassGrid) -> None:
    context.make_pass = lambda context, result, operands, finish: pass_on(grid, context, result)


def parity(rank: int, world_size: int, name: str) -> dict[str, float]:
    """The largest error of each tensor on every grid; checks the bytes of each pass."""
    mesh, (pattern, layout_name) = RingMesh.from_world(world_size), PATTERNS[name]
    layout = make_layout(layout_name, tokens=SHAPE.tokens, ring_size=world_size, pattern=pattern)
    whole = [x.double() for x in tensors(SHAPE)]
    want, worst = dense_attention(*whole, pattern), {}
    for grid in list_grids(world_size):
        context = make_ring_context(pattern, layout, mesh, Options(transport="tiles", chunk_bytes=None))
        on_grid(context, grid)
        exchange = context.exchange
        before = 0 if exchange is None else exchange.counters.bytes_sent
        result = gathered_pass(lambda *x, c=context: attend(*x, c, None, False), whole, layout, mesh)
        for key, error in errors(result, want).items():
            worst[key] = max(worst.get(key, 0.0), error)
        if exchange is not None:
            plan = tile_plan(pattern, layout, SHAPE.query_heads, SHAPE.kv_heads, grid)
            sizes = [TokenBytes.for_pass(backward, 8, 8, 8, 8) for backward in (False, True)]
            planned = SHAPE.batch * sum(plan.traffic(rank, size).sent for size in sizes)
            assert exchange.counters.bytes_sent - before == planned, grid
    return worst


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.day("causal-4", "documents-2")
def test_it_is_exact_and_sends_what_is_planned(rank_pool: Pool, name: str, ranks: int) -> None:
    for worst in rank_pool(ranks).run(parity, name):
        assert max(worst.values()) < 1e-12, worst


def by_options(rank: int, world_size: int, ulysses: int) -> list[float]:
    """Errors of the public function with the lse, sinks, and the grid that it takes itself."""
    mesh = RingMesh.from_world(world_size // ulysses, ulysses)
    layout = make_layout("zigzag", tokens=SHAPE.tokens, ring_size=mesh.ring_size, multiple_of=ulysses)
    whole = [x.double() for x in tensors(SHAPE)]
    run = partial(
        ring_attention, pattern=Causal(), layout=layout, mesh=mesh, options=PassOptions(transport="tiles")
    )
    want = dense_attention(*whole, Causal())
    result = list(errors(gathered_pass(run, whole, layout, mesh), want).values())
    local = [shard_sequence(x, layout, mesh=mesh, dim=2) for x in whole[:3]]
    _, lse = run(*local, return_lse=True)
    whole_lse = gather_sequence(lse, layout, mesh=mesh, dim=2)
    plain = ring_attention(
        *local, pattern=Causal(), layout=layout, mesh=mesh, sinks=torch.ones(SHAPE.query_heads)
    )
    with_sinks = run(*local, sinks=torch.ones(SHAPE.query_heads))
    return [*result, relative_error(whole_lse, want.lse), relative_error(with_sinks, plain)]


@pytest.mark.parametrize(("ranks", "ulysses"), [(4, 1), (4, 2)], ids=str)
@pytest.mark.day("4-2")
def test_the_public_function_takes_a_grid_itself(rank_pool: Pool, ranks: int, ulysses: int) -> None:
    for result in rank_pool(ranks).run(by_options, ulysses):
        assert max(result) < 1e-12, result


def score(s: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
    return s + (k - q) * 0.01 * (h + 1)


def with_scores(rank: int, world_size: int) -> list[float]:
    """The same scores on tiles and on a ring."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=SHAPE.tokens, ring_size=world_size)
    whole = [x.double() for x in tensors(SHAPE)]
    both = [
        gathered_pass(
            partial(calls.attend, pattern=Causal(), layout=layout, mesh=mesh, kernel="reference", score_mod=score,
                transport=transport), whole, layout, mesh)
        for transport in ("ring", "tiles")
    ]  # fmt: skip
    return [relative_error(a, b) for a, b in zip(*both, strict=True)]


def test_scores_that_depend_on_positions_and_heads(rank_pool: Pool) -> None:
    for result in rank_pool(4).run(with_scores):
        assert max(result) < 1e-12, result


def refused(rank: int, world_size: int, extra: dict[str, Any]) -> None:
    mesh = RingMesh.from_world(world_size)
    x = torch.zeros(1, 2, 64, 8)
    up = extra.pop("up", None)
    k, v = (x, x) if up is None else (x[:, :1], x[:, :1])
    calls.attend(
        x, k, v, pattern=Causal(), layout="zigzag", mesh=mesh, transport="tiles", up_projection=up, **extra
    )


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"gradient_payload": "bfloat16"}, "gradient_payload: .*by tiles of its own"),
        ({"overlap": False}, "overlap: .*by tiles of its own"),
        ({"prune": False}, "prune: .*by tiles of its own"),
        ({"stage_bytes": 64}, "stage_bytes: .*by tiles of its own"),
        ({"chunk_bytes": 64}, "chunk_bytes: .*by tiles of its own"),
        ({"up": torch.zeros(32, 8)}, "latents: expected transport"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_what_cannot_be_honoured_is_refused(rank_pool: Pool, extra: dict[str, Any], says: str) -> None:
    import re

    for outcome in rank_pool(2).collect(refused, extra):
        assert outcome.error_type == "RingConfigError" and re.search(says, outcome.message), outcome


def test_grids_that_ranks_choose_are_equal() -> None:
    """The choice depends on what ranks compare: pattern, layout, heads, dtype and ranks of a node."""
    layout = make_layout("zigzag", tokens=np.int64(1024), ring_size=16)
    size = TokenBytes.for_pass(False, 64, 64, 2, 4)
    result = {choose_grid.__wrapped__(Causal(), layout, 8, 2, size, 8) for _ in range(3)}
    assert len(result) == 1

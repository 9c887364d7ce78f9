"""`ngram_rows` and `sharded_rows`: Engram's layer on rings against whole tables on one process, float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_ring import (
    Documents,
    RingConfigError,
    RingMesh,
    Tree,
    gather_sequence,
    make_layout,
    shard_sequence,
    shift_sequence,
)
from ds_ring.layers.ngrams.hashes import ngram_rows
from ds_ring.layers.ngrams.sharded_rows import sharded_rows
from tests.dist.deepspeed_ranks import json_config, start_engine
from tests.dist.harness import Pool, catch_refusal
from tests.dist.one_process import Layer, same_as_one_process
from tests.reference import relative_error

T = 46
IDS = [0] * 5 + [1] * 6 + [2] * 2 + [3] * 20 + [4] * 7 + [-1] * 6
TREE = Tree((-1, 0, 1, 1, 0, 4, -1), (9, 5, 1, 7, 3, 8, 6), T)  # the last 7 tokens are padding

# (world size, layout, Ulysses size) of the tables
RINGS = [
    (1, "zigzag", 1), (2, "zigzag", 1), (3, "contiguous", 1), (4, "zigzag", 1), (4, "balanced", 1),
    (4, "zigzag", 2),
]  # fmt: skip


def documents_of(kind: str) -> Documents | Tree | None:
    return {"whole": None, "packed": Documents(IDS), "tree": TREE}[kind]


def tokens_before(kind: str) -> list[int]:
    """Return the position of the token before each one in its document, or on its path; -1 for none."""
    result = [t - 1 for t in range(T)]
    if kind == "packed":
        return [t - 1 if t and IDS[t - 1] == IDS[t] else -1 for t in range(T)]
    if kind == "tree":
        for node, parent in enumerate(TREE.parents):
            result[TREE.starts[node]] = int(TREE.starts[parent + 1]) - 1 if parent >= 0 else -1
        result[TREE.starts[-1]] = -1
    return result


def real_tokens(kind: str) -> Tensor:
    """Return 1 for each token, and 0 for padding behind a tree, [T]."""
    return (torch.arange(T) < (int(TREE.starts[-1]) if kind == "tree" else T)).double()


def path_of(kind: str, t: int) -> list[int]:
    """Return the positions of the tokens of a document, or path, up to t."""
    before, result = tokens_before(kind), [t]
    while before[result[-1]] >= 0:
        result.append(before[result[-1]])
    return result[::-1]


def drawn(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Return normal numbers of these shapes, float64."""
    draw = np.random.default_rng(seed)
    return {name: torch.from_numpy(draw.normal(size=shape)) for name, shape in shapes.items()}


B, D, E = 2, 3, 4
MULTIPLIERS, SIZES, PAD = (7919, 104729, 1299709), ((11, 13), (17,)), 5
ROWS = 44  # 41, padded to 1, 2 and 4 ranks
WIDTH, DILATION = 4, 3  # of Engram's convolution


def numbers_of(ids: list[int], path: list[int]) -> list[int]:
    """Rows of the n-grams that end at a path's end, by Python's integers."""
    tokens = [ids[t] for t in reversed(path[-3:])] + [PAD] * 3
    pair = tokens[0] * MULTIPLIERS[0] ^ tokens[1] * MULTIPLIERS[1]
    return [pair % 11, 11 + pair % 13, 24 + (pair ^ tokens[2] * MULTIPLIERS[2]) % 17]


def mixed(
    hidden: Tensor, memory: Tensor, weights: dict[str, Tensor], before: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Engram's gate, and its convolution of the gated values with the tokens `before`."""
    key, value = (memory.flatten(2) @ weights[name] for name in ("key", "value"))
    normal = (F.layer_norm(x, (D,)) for x in (hidden, key))
    gated = torch.stack([*normal]).prod(dim=0).sum(-1, keepdim=True).mul(D**-0.5).sigmoid() * value
    taps = (weights["taps"][i] * before(gated, i * DILATION) for i in range(WIDTH))
    return hidden + gated + F.silu(sum(taps, torch.zeros(())))


def engram(mesh: RingMesh, name: str, kind: str) -> Layer:
    """Engram's layer; each rank looks up its rows of a whole table, whose gradients are complete at the owner."""
    pattern, documents = documents_of(kind) or Documents(IDS), documents_of(kind)
    sizes = {"ring_size": mesh.ring_size, "multiple_of": mesh.ulysses_size}
    layout = make_layout(name, tokens=T, pattern=pattern, **sizes)
    place: dict[str, Any] = {"dim": 1, "layout": layout, "mesh": mesh}
    inputs = drawn(
        {"hidden": (B, T, D), "table": (ROWS, E), "key": (3 * E, D), "value": (3 * E, D), "taps": (WIDTH, D)}
    )
    torch.manual_seed(2)
    ids, real = torch.randint(9, (B, T)), real_tokens(kind)
    # padding has no tokens in front
    paths = [[t] if kind == "packed" and IDS[t] < 0 else path_of(kind, t) for t in range(T)]
    numbers = torch.tensor([[numbers_of(row.tolist(), path) for path in paths] for row in ids])
    places = {"layout": layout, "mesh": mesh}
    rows = ngram_rows(
        shard_sequence(ids, **place), MULTIPLIERS, SIZES, pad_id=PAD, documents=documents, **places
    )
    assert torch.equal(gather_sequence(rows, **place) * real[:, None].long(), numbers * real[:, None].long())
    share = ROWS // mesh.sequence_size

    def along_paths(x: Tensor, back: int) -> Tensor:
        result = [x[:, path[-1 - back]] if back < len(path) else 0 * x[:, 0] for path in paths]
        return torch.stack(result, dim=1)

    def behind(x: Tensor, back: int) -> Tensor:
        return shift_sequence(x, -back, documents=documents, **place) if back else x

    def alone(hidden: Tensor, table: Tensor, **weights: Tensor) -> Tensor:
        return mixed(hidden, table[numbers], weights, along_paths)

    def sharded(hidden: Tensor, table: Tensor, **weights: Tensor) -> Tensor:
        shard = table.narrow(0, mesh.sequence_rank * share, share)
        return mixed(hidden, sharded_rows(shard, rows, mesh=mesh), weights, behind)

    parameters = ["table", "key", "value", "taps"]
    return Layer(inputs, alone, sharded, mesh, layout, dim=1, parameters=parameters, real=real)


@pytest.mark.day("2-zigzag-1-tree", "4-zigzag-2-whole")
@pytest.mark.parametrize("kind", ["whole", "packed", "tree"])
@pytest.mark.parametrize(("world_size", "layout", "ulysses"), [ring for ring in RINGS if ring[0] != 3])
def test_engram_is_exact(rank_pool: Pool, world_size: int, layout: str, ulysses: int, kind: str) -> None:
    case = layout, kind
    same_as_one_process(rank_pool(world_size), engram, case, ulysses=ulysses, bound=1e-10, count=6)


def looked_up(rank: int, world_size: int) -> tuple[bool, int]:
    """Whether rows are right where ranks ask for different numbers of them; and the bytes that cross."""
    mesh = RingMesh.from_world(world_size)
    table = torch.arange(12.0, dtype=torch.float32).view(6, 2)
    requested = torch.tensor([[5, 0, 5, 5], [], [1]][rank], dtype=torch.int64)
    shard = table[2 * rank : 2 * rank + 2].clone().requires_grad_()
    result = sharded_rows(shard, requested, mesh=mesh)
    result.sum().backward()
    times = torch.tensor([1.0, 1, 0, 0, 0, 3])[2 * rank : 2 * rank + 2]
    return torch.equal(result, table[requested]) and torch.equal(
        shard.grad, times[:, None].expand(-1, 2)
    ), len(result)


def test_ranks_may_ask_for_any_number_of_rows(rank_pool: Pool) -> None:
    assert rank_pool(3).run(looked_up) == [(True, 4), (True, 0), (True, 1)]


def refused(rank: int, world_size: int, what: str) -> str:
    mesh, layout = RingMesh.from_world(world_size), make_layout("zigzag", tokens=T, ring_size=world_size)
    table, rows = torch.zeros(3, 2), torch.full((4,), 7 if what == "row" and rank else 2)
    ids = torch.zeros(B, layout.local_tokens, dtype=torch.int32)
    calls: dict[str, Callable[[], Any]] = {
        "row": lambda: sharded_rows(table, rows, mesh=mesh),
        "dtype": lambda: sharded_rows(table, rows.int(), mesh=mesh),
        "shards": lambda: sharded_rows(torch.zeros(3 + rank, 2), rows, mesh=mesh),
        "orders": lambda: ngram_rows(ids.long(), MULTIPLIERS, SIZES[:1], layout=layout, mesh=mesh),
        "ids": lambda: ngram_rows(ids, MULTIPLIERS, SIZES[:1], layout=layout, mesh=mesh),
    }
    return catch_refusal(calls[what])


@pytest.mark.parametrize(
    ("what", "says"),
    [("row", "sharded_rows: rows: expected 0 to 5, got 7 to 7"), ("dtype", "expected int64 on cpu, got torch.int32"),
     ("shards", "RingMismatchError"), ("orders", "RingConfigError: ngram_rows: sizes: expected a sequence for each"),
     ("ids", "RingShapeError: ngram_rows: ids: expected [B, S] int64")],
)  # fmt: skip
def test_it_is_refused(rank_pool: Pool, what: str, says: str) -> None:
    for rank, text in enumerate(rank_pool(2).run(refused, what)):
        assert says in text or (what == "row" and rank == 0 and "rank 1" in text), text


class Memory(torch.nn.Module):
    """A model whose table is a parameter: a shard of each rank, or with `whole` all rows on every rank."""

    ring: Any

    def __init__(self, whole: bool, cast: bool, world_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(8 if whole else 8 // world_size, 4))
        self.whole, self.cast = whole, cast

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        mesh, layout = self.ring.mesh, self.ring.batches.current.layout
        rows = ngram_rows(input_ids, MULTIPLIERS[:2], [[8]], layout=layout, mesh=mesh)
        share = 8 // mesh.sequence_size
        first = mesh.sequence_rank * share
        table = self.table[first : first + share] if self.whole else self.table
        return sharded_rows(table.double() if self.cast else table, rows, mesh=mesh).square().sum()


def in_an_engine(rank: int, world_size: int, stage: int, whole: bool, cast: bool) -> str | float:
    """The refusal of a table that an engine trains; or the error of a step with a whole one."""
    model = Memory(whole, cast, world_size)
    alone = model.table.detach().clone().requires_grad_()
    engine = start_engine(model, json_config(world_size, 1, stage), 0.5)
    model.ring = engine.ring
    ids = torch.tensor([[0, 5, 5, 5, 7, 2, 1, 1]])
    local = engine.ring.shard_batch({"input_ids": ids})
    try:
        loss = engine(**local)
    except RingConfigError as error:
        return str(error)
    engine.backward(loss)
    engine.step()
    mixed = ids * MULTIPLIERS[0] ^ F.pad(ids, (1, 0))[:, :-1] * MULTIPLIERS[1]
    (alone[mixed % 8].square().sum() / world_size).backward()
    return relative_error(gathered(engine.module.table), alone.detach() - 0.5 * alone.grad)


def gathered(parameter: Tensor) -> Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (2, 2), (4, 1), (2, 3)])
@pytest.mark.day("2-0-True", "2-3-False")
def test_a_shard_in_an_engine_is_refused(rank_pool: Pool, world_size: int, stage: int, cast: bool) -> None:
    for result in rank_pool(world_size).run(in_an_engine, stage, False, cast):
        assert "expected a shard that this rank trains by itself, got a parameter of an engine" in str(result)
        assert "with an optimizer of its own" in str(result)


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (4, 1), (2, 3)])
@pytest.mark.day("2-0")
def test_a_part_of_a_whole_table_is_not(rank_pool: Pool, world_size: int, stage: int) -> None:
    for result in rank_pool(world_size).run(in_an_engine, stage, True, False):
        assert isinstance(result, float) and result < 1e-6

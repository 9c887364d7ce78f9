"""Estimate attention with `"transport": "tiles"`: the blocks of a grid, and messages meanwhile.

The blocks and their order are those that run (`ds_ring/transports/tiles`); the rates are those of every
other estimate (`pass_time.py`). A step takes as long as its block or its messages, whichever is longer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ds_ring.kernels.flash.calls import flash_calls
from ds_ring.masks.joins import near_rows
from ds_ring.masks.pattern import BoundPattern, Pattern
from ds_ring.masks.slots import IntArray, count_slots
from ds_ring.masks.tiles import Axis, Tiles
from ds_ring.schedule.choose import AS_FAST, bound_to_one_head, collect_runs
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.lowering import count_heads, head_chunks
from ds_ring.transports.tiles.grid import Step, TileGrid, list_steps
from ds_ring.transports.tiles.plan import TilePlan, TokenBytes, choose_grid, tile_plan

from .layer_passes import (
    LayerPass,
    LayerPasses,
    layout_of,
    pass_shape,
    rough_pass_memory,
    sampled_ranks,
)  # fmt: skip
from .model_memory import FLOAT
from .pass_memory import PassShape
from .pass_time import BACKWARD_FLOPS, FORWARD_FLOPS, PassCost, by_head, executed_pairs
from .training_setting import FEW_RANKS, TrainingSetting

MANY_RECTANGLES = 1 << 18  # pairs of runs: beyond it a pattern without short labels is taken as even


def tile_passes(setting: TrainingSetting) -> LayerPasses:
    """Return the attention of all layers on tiles."""
    layout = layout_of(setting)
    shape, looked_at = pass_shape(setting, layout), set[int]()
    passes, buffers = [], []
    for pattern, layers in setting.mix:
        grids = grids_that_run(setting, layout, pattern)
        plans = [tile_plan(pattern, layout, *_heads(setting), grid) for grid in grids]
        ranks = _ranks_to_look_at(pattern, layout, grids)
        looked_at.update(ranks)
        costs = (_cost(setting, shape, plans, rank) for rank in ranks)
        passes.append(LayerPass(pattern, layers, max(costs, key=lambda cost: cost.seconds)))
        buffers.append(_buffers(setting, shape, grids))
    memory = rough_pass_memory(setting)[1]._replace(buffers=max(buffers))
    return LayerPasses(layout, tuple(passes), (), memory, len(looked_at))


def _ranks_to_look_at(pattern: Pattern, layout: Layout, grids: tuple[TileGrid, ...]) -> list[int]:
    """Return the ranks that represent all, the fullest of each grid among them."""
    found = sampled_ranks(layout.ring_size)
    for grid in dict.fromkeys(grids) if layout.ring_size > FEW_RANKS else ():
        works = _work_of_ranks(bound_to_one_head(pattern), layout, grid)
        if works is not None and works.max() > AS_FAST * works[found].max():
            found.append(int(works.argmax()))
    return found


def _work_of_ranks(pattern: BoundPattern, layout: Layout, grid: TileGrid) -> IntArray | None:
    """Return the pairs that every rank of a grid attends, for one head; None for a large dense pattern."""
    (runs, ranks), size = collect_runs([layout]), layout.ring_size
    axis = Axis.from_runs(runs)
    near = near_rows(pattern.branches_by_head[0], axis, axis)
    if near is None and len(runs) ** 2 > MANY_RECTANGLES:
        return None
    table = pattern.cut(Tiles.rectangles(runs, runs, near))
    ends, place = np.cumsum(runs[:, 2]), np.array([grid.place(rank) for rank in range(size)])
    q, k = (ranks[np.searchsorted(ends, side.slot, side="right")] for side in (table.q, table.k))
    # a pair is computed in the row of its query and in the column of its key
    numbers = np.empty((grid.key_ranks, grid.query_ranks), dtype=np.int64)
    numbers[tuple(place.T)] = np.arange(size)
    return np.bincount(numbers[place[q, 0], place[k, 1]], weights=table.pairs.astype(float), minlength=size)


def _heads(setting: TrainingSetting) -> tuple[int, int]:
    """Return query heads and K/V heads of a rank."""
    return setting.model.heads // setting.ulysses_size, setting.model.kv_heads // setting.ulysses_size


def _token_bytes(shape: PassShape, backward: bool) -> TokenBytes:
    return TokenBytes.for_pass(backward, shape.head_dim, shape.value_dim, shape.element_bytes, FLOAT)


def grids_that_run(setting: TrainingSetting, layout: Layout, pattern: Pattern) -> tuple[TileGrid, TileGrid]:
    """Return the grids of the forward and of the backward pass."""
    shape, node = pass_shape(setting, layout), setting.node_ranks
    given = pattern, layout, *_heads(setting)
    forward, backward = (choose_grid(*given, _token_bytes(shape, way), node) for way in (False, True))
    return forward, backward


def _cost(setting: TrainingSetting, shape: PassShape, plans: list[TilePlan], rank: int) -> PassCost:
    """Return the cost of a forward and a backward pass of one rank, one plan for each."""
    hardware, efficiency = setting.hardware, setting.hardware.efficiency(shape.kernel)
    lines, sent, pairs = [], [], []
    for backward, plan in enumerate(plans):
        size = _token_bytes(shape, bool(backward))
        products = BACKWARD_FLOPS if backward else FORWARD_FLOPS
        rate = hardware.flops(setting.dtype) * (efficiency.backward if backward else efficiency.forward)
        traffic = plan.traffic(rank, size)
        sent.append(shape.batch * traffic.sent)
        executed, rows = 0, []
        for number, (kv_heads, _) in enumerate(plan.classes):
            chunks = head_chunks(kv_heads, shape.head_bytes, shape.chunk_bytes)
            heads = shape.batch * count_heads(chunks[0])
            for step in list_steps(plan.grid, bool(backward)):
                tiles = plan.tiles(number, rank)
                work = calls = 0
                if step.block is not None and len(table := tiles.make_block_tiles(step.block)):
                    work = heads * sum(n * executed_pairs(one) for one, n in by_head(table, shape.group))
                    calls = _calls(table, shape.kernel)
                executed += work * len(chunks)
                far, near = (heads * x for x in _received(plan, number, rank, step, size, setting.node_ranks))
                transfer = max(far / setting.bytes_per_s, near / hardware.intra_node_bytes_per_s)
                any_bytes = far + near > 0
                busy = work * products * shape.head_dim / rate + calls * hardware.call_overhead_s
                busy += any_bytes * hardware.hop_overhead_s
                rows += len(chunks) * [(busy, transfer + any_bytes * hardware.link_latency_s)]
        lines.append(np.array(rows))
        pairs.append((shape.batch * traffic.pairs, executed))
    seconds = [float((line.max(axis=1) if setting.overlap else line.sum(axis=1)).sum()) for line in lines]
    busy, transfer = np.concatenate(lines).T
    exposed = int((transfer > busy).sum())
    return PassCost(*pairs[1], *sent, *seconds, float(busy.sum()), len(busy), exposed, exposed)  # type: ignore[call-arg]


def _calls(table: Tiles, kernel: str) -> int:
    """Return the calls of a block: FlashAttention needs several where runs of other ranks lie in between."""
    return len(flash_calls(table)) if kernel == "flash" and not table.is_masked.any() else 1


def _received(
    plan: TilePlan, number: int, rank: int, step: Step, size: TokenBytes, node: int
) -> tuple[int, int]:
    """Return the bytes of a K/V head and its query heads that arrive in a step: from other nodes, near."""
    tiles, grid, group = plan.tiles(number, rank), plan.grid, plan.group
    row, column = (lambda distance, at=at: at(rank, distance) for at in (grid.in_row, grid.in_column))
    q_in, q_back, k_in, k_back = group * size.query, group * size.query_back, size.key, size.key_back
    arriving = [
        *((row(-i), count_slots(tiles.queries[i]) * q_in) for i in step.queries_in),
        *((row(i), count_slots(tiles.query_readers[i]) * q_back) for i in step.queries_back),
        *((column(-j), count_slots(tiles.keys[j]) * k_in) for j in step.keys_in),
        *((column(j), count_slots(tiles.key_readers[j]) * k_back) for j in step.keys_back),
    ]
    near = sum(count for peer, count in arriving if node and peer // node == rank // node)
    return sum(count for _, count in arriving) - near, near


def _buffers(setting: TrainingSetting, shape: PassShape, grids: tuple[TileGrid, TileGrid]) -> int:
    """Return the bytes of a head chunk's tokens and messages: "Memory" in the README of tiles."""
    heads, kv_heads = _heads(setting)
    chunk = count_heads(head_chunks(slice(0, kv_heads), shape.head_bytes, shape.chunk_bytes)[0])
    q = shape.batch * shape.local_tokens * shape.head_dim * chunk * heads // kv_heads  # elements of a shard
    kv = shape.batch * shape.local_tokens * shape.pair_dim * chunk
    element, (forward, backward) = shape.element_bytes, grids
    of_forward = forward.key_ranks * kv * element + 3 * q * element + 2 * q * (element + FLOAT)
    of_backward = (
        backward.query_ranks * q * (3 * element + FLOAT) + 3 * kv * (element + FLOAT) + 2 * q * FLOAT
    )
    return max(of_forward, of_backward)


def on_tiles(setting: TrainingSetting) -> TrainingSetting | None:
    """Return the setting with its sequence on tiles; None if the model has layers that tiles do not run."""
    ring = setting.ring_size * setting.ulysses_size
    usual = (setting.gradient_payload, setting.kv_payload, setting.prune) == ("float32", "as_is", True)
    if setting.other_layers or not usual or not setting.mix or setting.chunk_bytes is not None:
        return None
    return replace(setting, ring_size=ring, ulysses_size=1, transport="tiles", ring_ranks_per_node=None)

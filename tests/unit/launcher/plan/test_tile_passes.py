"""Tiles in `ds-ring plan`: their seconds by hand, and where they are advised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ds_ring import Causal, Full, make_layout
from ds_ring.transports.tiles.plan import TokenBytes, tile_plan
from ds_ring_launcher.plan.documents import pattern_of
from ds_ring_launcher.plan.estimate import estimate
from ds_ring_launcher.plan.hardware import hardware_from
from ds_ring_launcher.plan.model_file import ModelShape
from ds_ring_launcher.plan.node_orders import node_orders
from ds_ring_launcher.plan.tile_passes import grids_that_run, on_tiles, tile_passes
from tests.unit.launcher.plan.test_node_orders import MACHINE, MODEL, SLOW, setting

INSTANT = {
    "peak_flops": {"float32": 1e30},
    "link_latency_s": 0.0,
    "hop_overhead_s": 0.0,
    "call_overhead_s": 0.0,
}


def test_transfers_by_hand() -> None:
    """Full attention without arithmetic: all bytes that a rank receives, at the rate between nodes."""
    quick = hardware_from({**MACHINE.model_dump(), **INSTANT, "devices_per_node": 1}, "test")
    planned = on_tiles(setting(pattern=Full(), layout="contiguous", hardware=quick))
    assert planned is not None and planned.transport == "tiles"
    ((_, layers, cost),) = tile_passes(planned).passes
    assert layers == MODEL.layers
    # 8 query heads, 4 K/V heads of 16 in float32: KV 512, Q and out 512 + 544; backward 1024, 1568 + 512
    tokens, grids = 4096 // 16, [(8, 2), (8, 2)]
    bytes_each = [
        tokens * ((a - 1) * of_keys + (b - 1) * of_queries)
        for (a, b), of_keys, of_queries in zip(grids, (512, 1024), (512 + 544, 1568 + 512), strict=True)
    ]
    assert (cost.forward_bytes, cost.backward_bytes) == tuple(bytes_each)
    assert cost.seconds == pytest.approx(sum(bytes_each) / SLOW)


def test_arithmetic_is_that_of_the_ring() -> None:
    free = {
        **INSTANT,
        "peak_flops": MACHINE.peak_flops,
        "inter_node_bytes_per_s": 1e30,
        "intra_node_bytes_per_s": 1e30,
    }
    quick = hardware_from({**MACHINE.model_dump(), **free, "peak_flops": {"float32": 1e9}}, "test")
    ring = setting(hardware=quick)
    planned = on_tiles(ring)
    assert planned is not None
    whole, tiles = (estimate(one).attention for one in (ring, planned))
    assert tiles.pairs == whole.pairs
    assert tiles.seconds == pytest.approx(whole.seconds, rel=0.05)


def test_the_fullest_rank_counts() -> None:
    """One long document on ranks 4 and 5 of 16, which are none of those that represent all."""
    free = {**INSTANT, "peak_flops": {"float32": 1e9}}
    links = {"inter_node_bytes_per_s": 1e30, "intra_node_bytes_per_s": 1e30}
    slow = hardware_from({**MACHINE.model_dump(), **free, **links}, "test")
    pattern = pattern_of(np.concatenate([np.full(16, 64), [512], np.full(40, 64)]))
    layout = make_layout("contiguous", tokens=4096, ring_size=16)
    planned = on_tiles(setting(pattern=pattern, layout="contiguous", hardware=slow))
    assert planned is not None
    plan = tile_plan(pattern, layout, 8, 4, grids_that_run(planned, layout, pattern)[1])
    pairs = [planned.batch * plan.traffic(rank, TokenBytes(0, 0, 0, 0)).pairs for rank in range(16)]
    ((_, _, cost),) = tile_passes(planned).passes
    assert max(pairs[rank] for rank in (0, 8, 15)) < cost.pairs == max(pairs)


def test_tiles_are_advised_where_heads_limit_ulysses() -> None:
    """One K/V head: no Ulysses. Slow links: what sends the fewest bytes is fastest, and is named."""
    one_head = ModelShape(2, 64, 4, 1, 16, 128, 256)
    found = node_orders(estimate(setting(64, tokens=64 * 256, model=one_head)))
    assert found is not None and found.best is min(
        (row for row in found.rows if row.runs), key=lambda row: row.step_s
    )
    assert ('"transport": "tiles"' in found.advice) == found.best.name.startswith("tiles")


def test_what_tiles_do_not_run_has_no_row() -> None:
    assert on_tiles(setting(gradient_payload="bfloat16")) is None
    assert on_tiles(setting(chunk_bytes=64)) is None
    same = on_tiles(setting(ulysses=2))
    assert same is not None and (same.ring_size, same.ulysses_size) == (16, 1)
    assert replace(same, transport="ring", ring_size=8, ulysses_size=2) == setting(ulysses=2)
    assert Causal() == same.pattern

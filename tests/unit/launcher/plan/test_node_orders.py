"""Sequences over several nodes: what the estimator plans is what runs, its seconds by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_ring import Causal, Full, make_layout, simulate
from ds_ring.comm.mesh import RingMesh
from ds_ring.schedule.grid import Grid
from ds_ring.schedule.plan import build_plan
from ds_ring.simulation.simulate import SimulationOptions
from ds_ring_launcher.plan.estimate import estimate, head_swaps
from ds_ring_launcher.plan.hardware import hardware_from
from ds_ring_launcher.plan.layer_passes import build_plans, layer_passes
from ds_ring_launcher.plan.model_file import ModelShape
from ds_ring_launcher.plan.model_memory import Zero
from ds_ring_launcher.plan.training_setting import TrainingSetting, like_in_hops, like_in_memory
from tests.unit.launcher.plan.test_cost import RATES

MODEL = ModelShape(2, 64, 8, 4, 16, 128, 256)
NODE = 4  # devices of one
FAST, SLOW = 1e9, 1e8  # bytes a second inside a node and between nodes
MACHINE = hardware_from(
    {**RATES, "devices_per_node": NODE, "intra_node_bytes_per_s": FAST, "inter_node_bytes_per_s": SLOW},
    "test",
)


def setting(devices=16, ulysses=1, pattern=None, tokens=4096, layout="zigzag", **changes) -> TrainingSetting:
    ring, zero = devices // ulysses, Zero(1, devices, 4, bucket_elements=1000, fused_adam=False)
    made = TrainingSetting(
        tokens, ring, ulysses, MODEL, pattern or Causal(), layout, zero, "float32", MACHINE
    )
    return replace(made, **changes)


@pytest.mark.parametrize(("devices", "ulysses"), [(16, 1), (16, 2), (16, 4), (8, 1), (4, 1), (6, 1)])
def test_the_plan_is_the_one_that_runs(devices: int, ulysses: int) -> None:
    one = setting(devices, ulysses, tokens=devices * 8)
    mesh = RingMesh(Grid(devices, devices // ulysses, ulysses), 0, ranks_per_node=NODE)
    plan = build_plans(one)[0][0]
    runs = build_plan(
        Causal(), plan.layout, query_heads=8 // ulysses, kv_heads=4 // ulysses,
        ranks_per_node=mesh.grid.ring_ranks_per_node(0, mesh.ranks_per_node),
    )  # fmt: skip
    assert plan.classes == runs.classes
    levels = {way.ranks_per_node for way in plan.classes[0].directions}
    assert levels == {NODE // ulysses if devices in (8, 16) and NODE // ulysses > 1 else 0}


def test_transfers_of_two_levels_by_hand() -> None:
    """Full attention, contiguous shards, no arithmetic to speak of: all is links."""
    quick = hardware_from({**MACHINE.model_dump(), "peak_flops": {"float32": 1e30}}, "test")
    two = setting(pattern=Full(), layout="contiguous", hardware=quick, chunk_bytes=1)
    # a shard's K and V between nodes, in all layers
    unit = MODEL.layers * 2 * MODEL.kv_heads * MODEL.head_dim * 4 * (4096 // 16) / SLOW
    inside, across = SLOW / FAST, 1 / NODE  # of a batch: a shard from the neighbour, a part from another node
    assert layer_passes(replace(two, ring_ranks_per_node=0)).total.forward_s == pytest.approx(
        15 * unit, rel=1e-6
    )
    # Four nodes: in each of the first 3 x 4 batches a part of a shard crosses, in the last 3 none.
    expected = (12 * max(inside, across) + 3 * inside) * unit
    assert layer_passes(two).total.forward_s == pytest.approx(expected, rel=0.02)


def test_all_to_alls_by_hand() -> None:
    inside, over = setting(16, 4), setting(32, 8, model=replace(MODEL, kv_heads=8))
    assert head_swaps(setting(), 256) == (0, 0.0)
    own = 256 * 2 * (8 + 4) * 16 * 4  # q, k, v and out of a rank's tokens
    assert head_swaps(inside, 4 * 256) == (own * 3 // 4, pytest.approx(own * 3 / 4 / FAST))
    # half of eight ranks are on another node
    assert head_swaps(over, 8 * 256).seconds == pytest.approx(256 * 2 * 16 * 16 * 4 * 4 / 8 / SLOW)
    found = estimate(inside)
    plain = found.attention.seconds
    assert found.attention_s == pytest.approx(plain + 2 * 2 * head_swaps(inside, 1024).seconds)
    assert found.swap_bytes == 2 * 2 * head_swaps(inside, 1024).sent_bytes


def test_searches_keep_the_levels() -> None:
    whole = setting(64, tokens=64 * 256)
    assert (like_in_hops(whole, 256).ring_size, like_in_hops(whole, 256).node_ranks) == (8, 4)
    assert (like_in_memory(whole, 256).ring_size, like_in_memory(whole, 256).node_ranks) == (8, 2)
    buffers = [layer_passes(one).memory.buffers for one in (like_in_memory(whole, 256), whole)]
    assert buffers[0] == pytest.approx(buffers[1], rel=0.1)


def test_virtual_ranks_on_two_levels_find_the_same() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v, grad = (torch.randn(1, heads, 67, 8, generator=generator) for heads in (4, 2, 2, 4))
    layout = make_layout("zigzag", tokens=67, ring_size=8)
    given = {"pattern": Causal(), "layout": layout, "grad_out": grad, "measure_memory": False}
    one, two = (
        simulate(q, k, v, **given),
        simulate(q, k, v, **given, options=SimulationOptions(ranks_per_node=4)),
    )
    for name in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(two, name), getattr(one, name), rtol=1e-5, atol=1e-5)
    assert one.bytes_sent != two.bytes_sent  # another way, indeed

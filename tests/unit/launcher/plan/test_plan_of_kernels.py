"""The kernel of a plan: by file and JSON, its rates, its workspace by hand, what it executes, its layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_ring import Causal, Dilated, make_layout
from ds_ring.errors import RingConfigError
from ds_ring.masks.tiles import Tiles
from ds_ring.schedule.plan import build_plan
from ds_ring.schedule.workspace import HopShape, workspace_bytes
from ds_ring_launcher.plan.estimate import estimate
from ds_ring_launcher.plan.hardware import hardware_from, read_hardware
from ds_ring_launcher.plan.layer_passes import blocks_of, layer_passes, pass_shape
from ds_ring_launcher.plan.model_memory import Zero
from ds_ring_launcher.plan.options import json_of
from ds_ring_launcher.plan.pass_time import pass_cost
from ds_ring_launcher.plan.training_setting import TrainingSetting
from tests.unit.launcher.plan.test_cost import LLAMA_8B, RATES, parts

H100, FLASH3 = read_hardware("h100"), read_hardware("h100_flash3")
LONGNET = Dilated((256, 512, 1024, 2048), (1, 2, 4, 8))


def setting(hardware=H100, pattern=None, layout="auto", **changes) -> TrainingSetting:
    made = TrainingSetting(
        8192, 4, 1, LLAMA_8B, pattern or Causal(), layout, Zero(3, 4, 2), "bfloat16", hardware
    )
    return replace(made, **changes)


def test_a_kernel_is_the_files_or_the_jsons() -> None:
    assert setting().kernel_that_runs == "flash" and blocks_of(setting()) == 1
    assert setting(pattern=LONGNET).kernel_that_runs == "flex" and blocks_of(setting(pattern=LONGNET)) == 128
    mixed = ((Causal(), 16), (LONGNET, 16))
    assert setting(pattern=mixed).kernel_that_runs == "flex"
    assert setting(kernel="flash").kernel_that_runs == "flash" and blocks_of(setting(kernel="flash")) == 1
    assert setting(FLASH3).kernel_that_runs == "flash"
    assert pass_shape(setting(FLASH3), make_layout("zigzag", tokens=8192, ring_size=4)).kernel == "flash"
    # what "auto" does not take by itself stands in the JSON that the plan prints
    assert json_of(setting(FLASH3, LONGNET))["ring_attention"] == {"kernel": "flash"}
    assert json_of(setting(kernel="flex"))["ring_attention"] == {"kernel": "flex"}
    assert "ring_attention" not in json_of(setting()) and "ring_attention" not in json_of(setting(FLASH3))
    cpu = hardware_from(RATES, "test")
    assert replace(setting(), hardware=cpu, kernel="cpu").kernel_that_runs == "cpu"
    for hardware, kernel in ((cpu, "flash"), (FLASH3, "flex"), (H100, "reference")):
        with pytest.raises(RingConfigError, match="attention_by_kernel"):
            assert replace(setting(), hardware=hardware, kernel=kernel).kernel_that_runs


def test_rates_go_by_the_kernel() -> None:
    layout = make_layout("contiguous", tokens=1 << 16, ring_size=1)
    _, mine = parts(Causal(), layout, 2, 2, 0)
    shape = pass_shape(setting(), layout)
    seconds = [
        pass_cost(mine, replace(shape, kernel=kernel), H100, "bfloat16", 1e9).forward_s
        for kernel in ("flex", "flash")
    ]
    fixed = H100.call_overhead_s
    assert (seconds[0] - fixed) / (seconds[1] - fixed) == pytest.approx(0.374 / 0.35, rel=0.02)


def test_workspace_of_flash_by_hand() -> None:
    """`mha_bwd`: 8 query and 2 K/V heads, 1000 queries (1024 rounded), 500 keys, D 80 (96 rounded), bf16."""
    tiles, shape = (
        Tiles.rectangles(*(build_runs(n) for n in (1000, 500))),
        HopShape(8, 2, 1000, 500, 80, 2, 80),
    )
    accumulators = 8 * 1024 * (96 + 1) * 4
    results = 2 * 80 * (8 * 1000 + 2 * 2 * 500 + 2 * 8 * 500)
    kept = 2 * 8 * 1000 * 80 * 2 + 8 * 1000 * 4
    assert workspace_bytes("flash", tiles, shape, True) == accumulators + results + kept
    assert workspace_bytes("flash", tiles, shape, False) == 8 * 1000 * (80 * (2 + 4) + 24)
    alone = shape._replace(rows=2)
    expanded = 2 * 80 * 2 * 2 * 500
    assert (
        workspace_bytes("flash", tiles, alone, True)
        == (2 * (accumulators + kept + 160 * 8000) // 8) + expanded
    )


def test_workspace_of_flex_has_the_tables_that_are_kept() -> None:
    tiles, shape = Tiles.rectangles(*(build_runs(n) for n in (8, 4))), HopShape(2, 1, 8, 4, 16, 2, 16)
    tables = (64 << 20) + 4 * (16 + 16) * 2  # and contiguous copies of K and V
    assert workspace_bytes("flex", tiles, shape, False) == tables + 2 * 8 * (16 * (2 + 4) + 24)
    assert workspace_bytes("flex", tiles, shape, True) == tables + (2 * 8 + 2 * 4) * 16 * 2 + 2 * 2 * 8 * 4


def build_runs(length: int):
    return build_plan(Causal(), make_layout("contiguous", tokens=length, ring_size=1)).layout.runs(0)


def test_longnet_costs_what_the_kernel_executes() -> None:
    flex, flash = (layer_passes(setting(pattern=LONGNET, kernel=kernel)) for kernel in ("flex", "flash"))
    assert flex.layout.name == "residue" and flash.layout.name != "residue"
    assert flash.total.executed < 1.4 * flash.total.pairs  # corners of triangles
    assert 1.4 * flex.total.pairs < flex.total.executed < 4 * flex.total.pairs
    contiguous = layer_passes(setting(pattern=LONGNET, layout="contiguous"))
    assert contiguous.total.executed > 1.5 * flex.total.executed
    assert estimate(setting(pattern=LONGNET, kernel="flash")).attention_s > 0

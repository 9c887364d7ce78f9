"""The kernel of a plan: by file and JSON, its rates, its workspace by hand, what it executes, its layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ds_ring import Causal, Dilated, make_layout
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring_launcher import cli
from ds_ring_launcher.plan.estimate import estimate
from ds_ring_launcher.plan.hardware import hardware_from, read_hardware
from ds_ring_launcher.plan.layer_passes import get_block_side, layer_passes, pass_shape
from ds_ring_launcher.plan.model_memory import Zero
from ds_ring_launcher.plan.options import make_json
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
    assert setting().kernel_that_runs == "flash" and get_block_side(setting()) == 1
    assert (
        setting(pattern=LONGNET).kernel_that_runs == "flex"
        and get_block_side(setting(pattern=LONGNET)) == 128
    )
    mixed = ((Causal(), 16), (LONGNET, 16))
    assert setting(pattern=mixed).kernel_that_runs == "flex"
    assert (
        setting(kernel="flash").kernel_that_runs == "flash" and get_block_side(setting(kernel="flash")) == 1
    )
    assert setting(FLASH3).kernel_that_runs == "flash"
    assert pass_shape(setting(FLASH3), make_layout("zigzag", tokens=8192, ring_size=4)).kernel == "flash"
    # what "auto" does not take by itself stands in the JSON that the plan prints
    assert make_json(setting(FLASH3, LONGNET))["ring_attention"] == {"kernel": "flash"}
    assert make_json(setting(kernel="flex"))["ring_attention"] == {"kernel": "flex"}
    assert "ring_attention" not in make_json(setting()) and "ring_attention" not in make_json(setting(FLASH3))
    cpu = hardware_from(RATES, "test")
    assert replace(setting(), hardware=cpu, kernel="cpu").kernel_that_runs == "cpu"
    for hardware, kernel in ((cpu, "flash"), (FLASH3, "flex"), (H100, "reference")):
        with pytest.raises(RingConfigError, match="attention_by_kernel"):
            assert replace(setting(), hardware=hardware, kernel=kernel).kernel_that_runs


def test_a_kernel_that_refuses_the_dtype_or_the_width_is_not_planned() -> None:
    """(float32 was timed with "flash", which takes none: 15.0 s in place of 23.6.)"""
    wide = replace(LLAMA_8B, heads=16, head_dim=512)
    for changes in ({"dtype": "float32"}, {"model": wide}):
        planned = setting(**changes)
        assert planned.kernel_that_runs == "flex" and "ring_attention" not in make_json(planned)
        efficiency = H100.efficiency(planned.kernel_that_runs)
        assert (efficiency.forward, efficiency.backward) == (0.35, 0.3)
        with pytest.raises(RingShapeError, match='kernel "flash": expected'):  # as the run's own
            assert setting(kernel="flash", **changes).kernel_that_runs
        with pytest.raises(RingConfigError, match="attention_by_kernel"):  # the file has rates of flash alone
            assert setting(FLASH3, **changes).kernel_that_runs
    assert setting(dtype="float16").kernel_that_runs == "flash"


def test_the_command_refuses_a_kernel_that_does_not_take_the_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"sequence_parallel_size": 8, "ring_attention": {"kernel": "flash"}}')
    common = "--hf-config llama-3-8b --devices 8 --dtype float32 --hardware h100 --config"
    for tokens in ([], ["--tokens", "64k"], ["--tokens", "64k", "--fit"]):
        assert cli.main(["plan", *common.split(), str(path), *tokens]) == 2
        assert 'kernel "flash": expected bfloat16 or float16 on cuda, got torch.float32' in (
            capsys.readouterr().err
        )


def test_rates_go_by_the_kernel() -> None:
    layout = make_layout("contiguous", tokens=1 << 16, ring_size=1)
    _, mine = parts(Causal(), layout, 2, 2, 0)
    shape = pass_shape(setting(), layout)
    seconds = [
        pass_cost(mine, replace(shape, kernel=kernel), H100, "bfloat16", 1e9).forward_s
        for kernel in ("flex", "flash")
    ]
    fixed = H100.call_overhead_s
    assert (seconds[0] - fixed) / (seconds[1] - fixed) == pytest.approx(0.513 / 0.35, rel=0.02)


@pytest.mark.night
def test_longnet_costs_what_the_kernel_executes() -> None:
    flex, flash = (layer_passes(setting(pattern=LONGNET, kernel=kernel)) for kernel in ("flex", "flash"))
    assert flex.layout.name == "residue" and flash.layout.name != "residue"
    assert flash.total.executed < 1.4 * flash.total.pairs  # corners of triangles
    assert 1.4 * flex.total.pairs < flex.total.executed < 4 * flex.total.pairs
    contiguous = layer_passes(setting(pattern=LONGNET, layout="contiguous"))
    assert contiguous.total.executed > 1.5 * flex.total.executed
    assert estimate(setting(pattern=LONGNET, kernel="flash")).attention_s > 0

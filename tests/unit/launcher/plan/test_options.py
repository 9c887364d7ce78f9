"""Options of long sequences: each saves what it says, and the cheapest set that fits is found."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from ds_ring import Causal
from ds_ring.config.section import RingConfig
from ds_ring_launcher.plan.compare import _torch_step, _ulysses_step, compare
from ds_ring_launcher.plan.estimate import Estimate, estimate
from ds_ring_launcher.plan.hardware import read_hardware
from ds_ring_launcher.plan.layer_passes import LayerPasses, layer_passes
from ds_ring_launcher.plan.model_memory import Zero
from ds_ring_launcher.plan.options import (
    OPTIONS,
    fewest_devices,
    list_flags,
    longest_planned,
    longest_sequence,
    make_deepspeed_json,
    make_json,
    name_limit,
    option_sets,
    plan_whole,
    sets_that_fit,
    with_options,
)
from ds_ring_launcher.plan.training_setting import TrainingSetting
from tests.unit.launcher.plan.test_cost import LLAMA_8B

BY_FLAG = {option.flag: option for option in OPTIONS}


def llama(devices: int = 8, tokens: int = 1 << 20) -> TrainingSetting:
    zero = Zero(3, devices, 2, overlap_comm=True)
    hardware = read_hardware("h100")
    return TrainingSetting(tokens, devices, 1, LLAMA_8B, Causal(), "auto", zero, "bfloat16", hardware)


def fit(setting: TrainingSetting) -> Estimate:
    """Return the plan with the cheapest options that make a setting fit."""
    found = plan_whole(replace(setting, may_add_options=True))
    assert found is not None
    return found


@cache
def _attention() -> LayerPasses:
    return layer_passes(llama())


def with_flags(setting: TrainingSetting, *flags: str) -> TrainingSetting:
    found = with_options(setting, tuple(BY_FLAG[flag] for flag in flags))
    assert found is not None
    return found


@pytest.mark.parametrize("flag", BY_FLAG)
def test_every_option_saves_device_memory_and_takes_no_less_time(flag: str) -> None:
    base = with_flags(llama(), *(["--activation-checkpointing"] if flag.startswith("--recompute") else []))
    option = BY_FLAG[flag]
    assert option.is_possible(base) and not option.is_on(base)
    changed = option.apply(base)
    assert option.is_on(changed)
    attention = _attention()
    before, after = (estimate(one, attention=attention) for one in (base, changed))
    assert after.peak.total <= before.peak.total and after.step_s >= before.step_s
    assert sum(m.total for m in after.moments) < sum(m.total for m in before.moments)
    if flag.startswith("--offload"):
        assert after.node_host_bytes > before.node_host_bytes and after.host_s > before.host_s


def test_nothing_of_the_vocabulary_or_the_intermediate_size_is_left_in_tiles() -> None:
    tiled = with_flags(
        llama(), "--tiled-loss", "--tiled-mlp", "--offload-checkpoints", "--recompute-attention"
    )
    twice = replace(tiled, tokens=2 * tiled.tokens)
    found = [estimate(one) for one in (tiled, twice)]
    per_token = (found[1].peak.total - found[0].peak.total) / (tiled.tokens / 8)
    # of a bf16 layer: two norms, q, k, v, out and the lse, gradients; no 14336 x 2 x 4, no 128256 x 12
    assert per_token < 32 * LLAMA_8B.hidden


def test_checkpoints_on_the_host_are_the_layers_inputs() -> None:
    inputs = 32 * (1 << 20) * 4096 * 2
    results = 32 * (1 << 20) * 32 * (128 * 2 + 4)  # out and its lse
    for flags, bytes_ in (((), inputs + results), (("--recompute-attention",), inputs)):
        found = estimate(with_flags(llama(), "--offload-checkpoints", *flags))
        assert found.node_host_bytes == bytes_ and found.host_bytes == 2 * bytes_ // 8


def test_every_option_is_in_some_set() -> None:
    assert {option.flag for options, _ in option_sets(llama()) for option in options} == {*BY_FLAG}


def test_sets_that_fit_are_minimal_and_the_cheapest_comes_first() -> None:
    base = llama(tokens=1 << 21)
    attention = layer_passes(base)
    found = sets_that_fit(replace(base, may_add_options=True), attention)
    assert found and all(one.fits for one in found)
    seconds = [one.step_s for one in found]
    assert seconds == sorted(seconds)
    for one in found:
        flags = list_flags(one.setting)
        for left_out in flags:
            fewer = with_options(base, tuple(BY_FLAG[flag] for flag in flags if flag != left_out))
            is_same = fewer is not None and list_flags(fewer) == flags  # another option implies it
            assert fewer is None or is_same or not estimate(fewer, attention=attention).fits
    # none of all the others is both enough and cheaper
    for _, changed in option_sets(base):
        tried = estimate(changed, attention=attention)
        assert not tried.fits or tried.step_s >= seconds[0]


@pytest.mark.night
def test_searches_add_options_where_they_may() -> None:
    base = llama()
    free = replace(base, may_add_options=True)
    chosen, _ = longest_planned(free)
    assert chosen is not None and estimate(chosen).fits
    assert chosen.tokens > 10 * longest_sequence(base)
    fewest, with_them = fewest_devices(base), fewest_devices(free)
    assert fewest is not None and with_them is not None and with_them.devices < fewest.devices


def test_the_json_turns_them_on() -> None:
    tiled = with_flags(llama(), "--tiled-loss", "--offload-checkpoints", "--offload-optimizer")
    assert make_json(tiled) == {
        "ring_attention": {"long_sequence": {"tiled_loss": True, "offload_checkpoints": True}},
        "zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }
    assert make_json(replace(tiled, loss_tokens=7))["ring_attention"]["long_sequence"]["tiled_loss"] == 7


@pytest.mark.parametrize("own", [{}, {"gradient_clipping": 0.5, "ring_attention": {"prune": False}}])
def test_the_printed_json_is_whole(own: dict[str, Any], tmp_path: Path) -> None:
    """(--fit printed a part, without batch, stage, precision and sizes.)"""
    setting = replace(with_flags(llama(), "--tiled-loss", "--offload-optimizer"), batch=2)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(make_deepspeed_json(setting, own)))
    section = RingConfig.from_deepspeed(path)
    assert (section.ring_size, section.sequence_parallel_size, section.prune) == (8, 8, not own)
    assert section.long_sequence.tiled_loss is True
    theirs = DeepSpeedConfig(str(path))
    assert (theirs.train_batch_size, theirs.train_micro_batch_size_per_gpu) == (2, 2)
    assert theirs.zero_config.stage == 3 and theirs.bfloat16_config.enabled
    assert theirs.zero_config.offload_optimizer.device == "cpu"
    assert theirs.optimizer_name == (None if own else "adamw")
    assert theirs.gradient_clipping == own.get("gradient_clipping", 1.0)
    assert own.get("ring_attention", {}) in ({}, {"prune": False})  # the caller's JSON stays


def test_the_printed_json_keeps_what_the_plan_counts() -> None:
    """(It pinned memory that the JSON did not pin, and left an "auto" beside a dtype.)"""
    setting = with_flags(llama(), "--offload-optimizer", "--offload-param")
    zero = replace(setting.zero, pins_optimizer=False)
    pageable = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
    printed = make_deepspeed_json(replace(setting, zero=zero), pageable)["zero_optimization"]
    assert printed["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert printed["offload_param"] == {"device": "cpu", "pin_memory": True}
    auto = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    for dtype, enabled in (("bfloat16", (True, False)), ("float32", (False, False))):
        printed = make_deepspeed_json(replace(setting, dtype=dtype), auto)
        assert (printed["bf16"]["enabled"], printed["fp16"]["enabled"]) == enabled


def test_a_plan_leaves_the_error_of_its_memory_free() -> None:
    """(--fit chose plans at 99 % of the GPU, while the planner is 4 % off.)"""
    hardware = read_hardware("h100")
    for tokens in (1 << 18, 1 << 20, 3 << 20):
        plan = fit(llama(tokens=tokens))
        assert plan.peak.total * 1.04 <= 0.92 * hardware.memory_bytes
    longest, plan = longest_planned(llama())
    assert longest is not None and plan is not None and plan.peak.total == estimate(longest).peak.total
    assert 0.95 < plan.peak.total * 1.04 / (0.92 * hardware.memory_bytes) <= 1


def test_what_is_computed_again_is_sent_again() -> None:
    """(Bytes and waiting were those of one forward pass.)"""
    slow = read_hardware("h100").model_copy(update={"intra_node_bytes_per_s": 1e9})
    base = with_flags(replace(llama(tokens=1 << 17), hardware=slow), "--activation-checkpointing")
    passes = layer_passes(base)
    once, half, twice = (
        estimate(replace(base, recompute_attention=part), attention=passes) for part in (0.0, 0.5, 1.0)
    )
    total = passes.total
    assert once.sent_bytes == total.forward_bytes + total.backward_bytes
    assert (
        twice.sent_bytes - once.sent_bytes == total.forward_bytes == 2 * (half.sent_bytes - once.sent_bytes)
    )
    assert twice.attention_s - once.attention_s == pytest.approx(total.forward_s)
    assert twice.exposed_s - once.exposed_s == pytest.approx(total.forward_exposed_s)
    assert 0 < total.forward_exposed_s < total.exposed_s
    plain = replace(base, recompute_attention=1.0, checkpointing=False)
    assert estimate(plain, attention=passes).sent_bytes == once.sent_bytes


def test_the_limit_of_the_longest_sequence_has_a_name() -> None:
    for flags, name in (
        ((), "the device's memory"),
        (
            ("--tiled-loss", "--tiled-mlp", "--offload-checkpoints", "--offload-optimizer"),
            "the host's memory",
        ),
    ):
        setting = with_flags(llama(), *flags)
        longest, _ = longest_planned(setting)
        assert longest is not None and name_limit(longest) == name


def test_an_h200_is_no_slower_than_an_h100() -> None:
    """(Its rates were measured, those of the H100 other kernels' or assumed.)"""
    h200 = replace(llama(), hardware=read_hardware("h200"))
    assert estimate(h200).step_s <= estimate(llama()).step_s


def test_a_file_without_a_host_has_nothing_offloaded() -> None:
    bare = replace(llama(), hardware=read_hardware("h100").model_copy(update={"host_memory_bytes": None}))
    assert not BY_FLAG["--offload-checkpoints"].is_possible(bare)
    assert all("offload" not in option.flag for options, _ in option_sets(bare) for option in options)


def test_other_methods_beside_it() -> None:
    found = fit(llama())
    rows = {row.method: row for row in compare(found, 12345)}
    own, hybrid, alone, ulysses, torch_cp, ulysses_kept, torch_kept, ours, alst, guide = rows.values()
    assert own.longest_tokens == 12345 and own.peak_bytes == found.peak.total
    assert ulysses.ranks == alst.ranks == torch_cp.ranks == guide.ranks == ours.ranks == 8
    # Jacobs et al. 2023, section 3.2: q, k, v and out of N / P tokens, both ways
    shard = (1 << 20) // 8 * (32 + 8 + 8 + 32) * 128 * 2
    assert ulysses.sent_bytes == pytest.approx(3 * 32 * shard * 7 / 8)  # again under checkpointing
    # (No row kept attention's results, as ds_ring does, and its lead was that.)
    for kept, again in ((ulysses_kept, ulysses), (torch_kept, torch_cp)):
        assert kept.method == f"{again.method}, attention kept" and kept.options == own.options
        assert set(again.options) - set(kept.options) == {"--recompute-attention"}
        forward_s = 4 * 128 * 32 * 32 * (1 << 39) / 8 / again.attention_flops[0]
        # results go to the host and back
        assert 0.97 * forward_s < again.step_s - kept.step_s < forward_s
        assert kept.host_bytes > again.host_bytes
    assert hybrid.method == "ds_ring, Ulysses 4 x ring 2" and hybrid.options == own.options
    # (Ulysses alone had no row.) It sends what DeepSpeed's does.
    assert alone.method == "ds_ring, Ulysses 8 x ring 1" and alone.options == own.options
    assert alone.sent_bytes == ulysses.sent_bytes
    assert all(row.longest_tokens % 16 == 0 for row in rows.values() if row is not own)
    twelve = replace(llama(), ring_size=12, zero=replace(llama().zero, world=12), tokens=12 << 10)
    names = [row.method for row in compare(estimate(twelve), 0)]
    assert "ds_ring, Ulysses 4 x ring 3" in names and not any("x ring 1" in name for name in names)
    # Bekman et al. 2025: 3.7 million tokens of this model on 8 H100
    assert 3.0e6 < alst.longest_tokens < 5.5e6 and ulysses.longest_tokens < alst.longest_tokens
    many = {row.method: row for row in compare(estimate(replace(llama(64), tokens=1 << 20)), 0)}
    assert many["ALST"].ranks == 32  # no more than heads


def test_what_a_pass_of_other_methods_holds() -> None:
    """Bytes of bf16 K and V of all tokens, and of float32 sums: out, or dq, dk and dv of a rank's tokens.

    (Kernel workspace was in ds_ring's rows alone.) FlashAttention's: dq and a number of each row in float32,
    and dk and dv of every query head where heads share K and V.
    """
    base, tokens = llama(), 1 << 20
    workspace = tokens * 32 // 8 * (129 * 4 + 2 * 128 * 2)
    sums = tokens // 8 * (32 + 2 * 8) * 128 * 4
    assert _torch_step(base).ring == (2 * tokens * 8 * 128 * 2, sums, workspace)
    assert _ulysses_step(base).ring == (0, 0, workspace)
    alone = replace(base, model=replace(base.model, kv_heads=32))
    assert _ulysses_step(alone).ring.workspace == tokens * 32 // 8 * 129 * 4
    # what ds_ring's plan counts of the same kernel, all heads at once, without its results and copies
    whole = replace(base, ring_size=1, ulysses_size=8, chunk_bytes=1 << 40)
    results, copies = 2 * (4 + 2) * 128 * tokens, 4 * (2 * 128 * 2 + 4) * tokens
    assert layer_passes(whole).memory.workspace == workspace + results + copies


def test_other_methods_have_the_rates_of_torchs_own_call() -> None:
    """(All rows had ds_ring's rates, and no line said so: 507 TFLOP/s, where torch's call has 581.)"""
    planned = estimate(llama())
    rows = compare(planned, 0)
    ours, others = ([row for row in rows if row.method.startswith("ds_ring") is own] for own in (True, False))
    assert {row.attention_flops for row in ours} == {(0.513 * 9.89e14, 0.486 * 9.89e14)}
    assert {row.attention_flops for row in others} == {(0.588 * 9.89e14, 0.516 * 9.89e14)}
    bare = planned.setting.hardware.model_copy(update={"torch_attention": None})
    alike = compare(estimate(replace(planned.setting, hardware=bare)), 0)
    assert {row.attention_flops for row in alike} == {ours[0].attention_flops}
    attention_s = planned.attention.compute_s
    faster_s = attention_s * (1 - (4 / 0.588 + 10 / 0.516) / (4 / 0.513 + 10 / 0.486))
    for row, slower in zip(rows, alike, strict=True):
        again_s = slower.step_s - row.step_s - (0 if row in ours else faster_s)
        assert -0.05 * attention_s < again_s < 0.1 * attention_s, row

"""What the plan answers: models by name, searches over memory that falls, the start, other methods."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import pytest

from ds_ring import Causal
from ds_ring.errors import RingConfigError
from ds_ring_launcher import cli
from ds_ring_launcher.commands.parsers import read_tokens
from ds_ring_launcher.plan import known_models
from ds_ring_launcher.plan.advice import _warn_about_limits, advise
from ds_ring_launcher.plan.compare import compare
from ds_ring_launcher.plan.estimate import estimate
from ds_ring_launcher.plan.hardware import read_hardware
from ds_ring_launcher.plan.model_file import ModelShape, _from_transformers
from ds_ring_launcher.plan.model_memory import Zero
from ds_ring_launcher.plan.more_devices import plan_more_devices
from ds_ring_launcher.plan.options import (
    can_hold,
    list_flags,
    longest_sequence,
    longest_that,
    longest_with_options,
    memory_falls,
    option_sets,
    with_cheapest_options,
    with_options,
)  # fmt: skip
from ds_ring_launcher.plan.training_setting import TrainingSetting
from tests.unit.launcher.plan.test_options import BY_FLAG

# Billions of parameters, as their authors say.
PARAMETERS = {
    "llama-3-70b": 70.55, "llama-3-8b": 8.03, "llama-3.2-1b": 1.24, "mistral-7b": 7.25, "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.72, "qwen3-14b": 14.8, "qwen3-235b-a22b": 235, "qwen3-30b-a3b": 30.5, "qwen3-32b": 32.8,
    "qwen3-4b": 4.0, "qwen3-8b": 8.2,
}  # fmt: skip
SETS = {
    "none": (),
    "checkpoints": ("--activation-checkpointing",),
    "tiles": ("--tiled-loss", "--tiled-mlp"),
    "all": (
        *("--tiled-loss", "--tiled-mlp", "--activation-checkpointing", "--offload-checkpoints"),
        *("--recompute-attention", "--offload-optimizer"),
    ),
}
GPUS = ("a100", "h100", "h200", "b200")
DEVICES = {"qwen3-235b-a22b": 64, "llama-3-70b": 64, "qwen3-32b": 32}


def make_setting(model: str, gpu: str, options: str = "none", tokens: int = 1 << 17) -> TrainingSetting:
    shape, devices = _from_transformers(model), DEVICES.get(model, 8)
    zero, hardware = Zero(3, devices, 2, overlap_comm=True), read_hardware(gpu)
    setting = TrainingSetting(tokens, devices, 1, shape, Causal(), "auto", zero, "bfloat16", hardware)
    changed = with_options(setting, tuple(BY_FLAG[flag] for flag in SETS[options]))
    assert changed is not None
    return changed


def on_devices(setting: TrainingSetting, devices: int) -> TrainingSetting:
    zero = replace(setting.zero, world=devices)
    return replace(setting, ring_size=devices, ulysses_size=1, zero=zero)


def search_exhaustively(holds: Callable[[int], bool], most: int) -> int:
    """Return the longest of lengths 1 / 128 apart that holds, from the longest on."""
    tokens = most
    while tokens > 128 and not holds(tokens):
        tokens -= tokens // 128
    return tokens if holds(tokens) else 0


@pytest.mark.day("llama-3-8b-h100-tiles", "qwen3-30b-a3b-h200-all")
@pytest.mark.parametrize("options", SETS)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", PARAMETERS)
def test_the_longest_sequence_is_what_an_exhaustive_search_finds(model: str, gpu: str, options: str) -> None:
    """(Memory falls where tiles begin: a search that stopped at the first failure found a third.)"""
    setting = make_setting(model, gpu, options)
    found = longest_sequence(setting)
    ring = setting.ring_size
    expected = ring * search_exhaustively(lambda tokens: can_hold(setting, tokens), 1 << 24)
    # Both searches are exact to a part of the length: 1 / 64, and 1 / 128.
    assert 63 / 64 * expected <= found <= 129 / 128 * expected, (found, expected)
    assert not found or estimate(replace(setting, tokens=found - found // 64)).fits


def test_a_plan_that_fits_is_no_longer_than_the_longest_sequence() -> None:
    """(Llama-8B on 8 H100, tiles: 131,072 tokens fitted, and the longest sequence was 59,392.)"""
    setting = make_setting("llama-3-8b", "h100", "tiles")
    planned = estimate(setting)
    assert planned.fits and advise(planned).reach.longest_tokens > setting.tokens
    (falls,) = memory_falls(setting)
    assert setting.mlp_tokens is not None and falls == setting.mlp_tokens + 1


def test_a_search_goes_on_behind_a_length_that_does_not_hold() -> None:
    holds = lambda tokens: tokens < 50 or 100 <= tokens < 120  # noqa: E731
    assert longest_that(holds, [100], 1 << 20, 1, 256) == 119
    assert 45 < longest_that(holds, [], 1 << 20, 1, 256) < 50  # what a seeded search without falls says
    assert longest_that(lambda tokens: False, [100], 1 << 20, 1, 256) == 0
    assert longest_that(lambda tokens: True, [100, 1 << 30], 1 << 10, 8, 256) == 1 << 10
    assert longest_that(lambda tokens: tokens <= 64, [], 64, 16, 256) == 64


@pytest.mark.parametrize("model", PARAMETERS)
def test_a_model_has_as_many_parameters_as_its_authors_say(model: str) -> None:
    assert _from_transformers(model).parameters / 1e9 == pytest.approx(PARAMETERS[model], rel=0.012)
    assert set(known_models()) >= set(PARAMETERS)


def test_an_unknown_model_is_refused_with_the_near_one() -> None:
    with pytest.raises(RingConfigError, match="did you mean 'qwen3-8b'"):
        _from_transformers("qwen-8b")
    with pytest.raises(RingConfigError, match=r'expected one of .*llama-3-70b, .*, got "gpt5"'):
        _from_transformers("gpt5")


def test_experts_are_counted_and_few_of_them_compute() -> None:
    shape = _from_transformers("qwen3-30b-a3b")
    assert shape.experts is not None and (shape.active_experts, shape.active_intermediate) == (8, 8 * 768)
    # Qwen3-30B-A3B: 3.3 billion parameters are active
    active = shape.parameters - shape.layers * (shape.mlp_parameters - shape.active_mlp_parameters)
    assert active / 1e9 == pytest.approx(3.3, rel=0.02)
    text = '{"num_experts": 8, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,'
    text += ' "intermediate_size": 64, "vocab_size": 128}'
    with pytest.raises(RingConfigError, match="num_experts_per_tok: expected how many of 8"):
        _from_transformers(text)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_start_of_a_divided_model_is_never_the_peak(stage: int) -> None:
    """(70B "fitted on no number" of H100s: the whole model was on each of them at the start.)"""
    setting = make_setting("llama-3-70b", "h100", "checkpoints")
    setting = replace(setting, zero=replace(setting.zero, stage=stage))
    planned, whole = estimate(setting), 2 * setting.model.parameters
    start = {moment.name: moment.total for moment in planned.moments}["start of the engine"]
    if stage < 3:
        assert start >= whole
        return
    assert start < planned.peak.total and planned.fits
    assert setting.zero.whole_start(setting.model) == whole > setting.usable_bytes
    warnings = " ".join(_warn_about_limits(planned))
    assert "deepspeed.zero.Init" in warnings and "131.4 GiB" in warnings
    small = _warn_about_limits(estimate(make_setting("qwen3-0.6b", "h100")))
    assert not any("zero.Init" in warning for warning in small)


def test_methods_are_compared_with_the_same_options_first() -> None:
    planned = estimate(make_setting("llama-3-8b", "h100", "tiles"))
    rows = compare(planned, 12345)
    assert [row.best_options for row in rows] == [False] * 4 + [True] * 3
    for row in rows[:4]:
        assert row.options == ("--tiled-loss", "--tiled-mlp"), row
    # (The row of "all options" was shorter than some of them reach: offloading fills the host.)
    ours = rows[4]
    sets = [changed for _, changed in option_sets(planned.setting)]
    assert ours.longest_tokens >= 63 / 64 * max(longest_sequence(changed) for changed in sets[::40])
    assert ours.longest_tokens > max(row.longest_tokens for row in rows if row is not ours)
    # The same arithmetic at the same rates: methods differ by messages, and by what they compute again.
    for row in rows[1:4]:
        assert row.step_s == pytest.approx(planned.step_s, rel=0.1)
    assert all(row.tokens_per_s == pytest.approx((1 << 17) / row.ranks / row.step_s) for row in rows)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "ranks", "copies", "bound"),
    [
        (64, 8, 64, 64, 8, ""),
        (64, 8, 8, 8, 1, ""),
        (64, 8, 128, 64, 8, "2 data replicas of 64 ranks, the most that 64 query heads and 8 K/V heads"),
        # DeepSpeed refuses 12 ranks of 8 K/V heads: neither divides the other.
        (24, 8, 12, 4, 1, "3 data replicas of 4 ranks, the most that 24 query heads and 8 K/V heads"),
    ],
)
def test_ranks_of_ulysses_and_copies_of_its_heads(
    heads: int, kv_heads: int, devices: int, ranks: int, copies: int, bound: str
) -> None:
    setting = make_setting("llama-3-8b", "h100")
    model = replace(setting.model, layers=1, heads=heads, kv_heads=kv_heads, head_dim=64)
    zero = replace(setting.zero, world=devices)
    setting = replace(setting, tokens=96 << 10, ring_size=devices, model=model, zero=zero)
    rows = {row.method: row for row in compare(estimate(setting), 0)}
    note = f"; {bound} allow on {devices} devices" if bound else ""
    note += f"; each of {kv_heads} K/V heads is copied to {copies} ranks" if copies > 1 else ""
    for method in ("DeepSpeed Ulysses", "ALST"):
        row = rows[method]
        assert (row.ranks, row.replicas, row.kv_copies) == (ranks, devices // ranks, copies)
        assert row.note == note
        # q and out, k and v of a rank's tokens, to all but itself, both ways: copies travel, too
        rows_sent = 2 * (heads + copies * kv_heads) * ((96 << 10) // ranks) * (ranks - 1) // ranks
        passes = 2 + ("--activation-checkpointing" in row.options)
        assert row.sent_bytes == pytest.approx(passes * rows_sent * 64 * 2)
    assert rows["ds_ring"].note == rows["torch context parallel"].note == ""
    assert rows["ds_ring"].kv_copies == rows["torch context parallel"].kv_copies == 1


def test_the_table_says_that_heads_are_copied(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--layers 1 --hidden 1024 --heads 16 --kv-heads 2 --vocab 4096 --tokens 4k"
    assert cli.main(["plan", *sizes.split(), "--devices", "32", "--compare"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "DeepSpeed Ulysses: these options; 2 data replicas of 16 ranks, the most" in printed
    assert "; each of 2 K/V heads is copied to 8 ranks" in printed
    assert cli.main(["plan", *sizes.split(), "--devices", "32", "--ulysses-size", "8"]) == 2
    refusal = capsys.readouterr().err
    assert "expected a divisor of 2 K/V heads, got 8; use 1 or 2, and a ring for the other ranks" in refusal


def test_speed_is_told_by_device() -> None:
    planned = estimate(make_setting("llama-3-8b", "h100"))
    assert planned.tokens_per_s == pytest.approx((1 << 17) / 8 / planned.step_s)
    shape = planned.setting.model
    # Narayanan et al. 2021's formula halves nothing for causal attention: PaLM's with half of the pairs
    pairs = shape.layers * shape.heads * (1 << 17) ** 2 / 2 / 8
    matrices = shape.parameters - shape.head_parameters
    flops = 6 * matrices * (1 << 17) / 8 + 12 * shape.head_dim * pairs
    assert planned.mfu == pytest.approx(flops / planned.step_s / 9.89e14, rel=0.01)


def test_more_devices_are_planned_with_what_they_need() -> None:
    """(They kept the options that --fit had chosen for the fewest, which more devices do not need.)"""
    plain = make_setting("llama-3-8b", "h100", tokens=1 << 18)
    plans = plan_more_devices(estimate(plain))
    fitted = estimate(replace(with_cheapest_options(plain), before_fit=plain))
    assert list_flags(fitted.setting) and plan_more_devices(fitted) == plans
    assert [plan.setting.devices for plan in plans] == [8, 16, 32, 64] and all(plan.fits for plan in plans)
    seconds = [plan.step_s for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    flags = [sum(option.is_on(plan.setting) for option in BY_FLAG.values()) for plan in plans]
    assert flags[0] > flags[-1] == 0


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("512k", 1 << 19), ("128Ki", 1 << 17), ("1M", 1 << 20), ("1mi", 1 << 20), ("4096", 4096)],
)
def test_lengths_may_be_written_short(text: str, tokens: int) -> None:
    assert read_tokens(text) == tokens


@pytest.mark.parametrize("text", ["512kb", "k", "1.5k", "-1k", "1G"])
def test_wrong_lengths_are_told_how_to_write_them(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected a whole number, got .*131072 or 128k"):
        read_tokens(text)


IN_TOKENS = {"--tokens", "--tiled-loss", "--tiled-mlp", "--loss-chunk"}


def test_each_option_in_tokens_may_be_written_short() -> None:
    (commands,) = [action for action in cli._parser()._actions if isinstance(action.choices, dict)]
    options = {
        (name, option): action.type
        for name, command in commands.choices.items()
        for action in command._actions
        for option in IN_TOKENS & {*action.option_strings}
    }
    assert {name for name, _ in options} == {"plan", "simulate", "compare", "check-model", "tune"}
    assert {option for _, option in options} == IN_TOKENS
    assert {*options.values()} == {read_tokens}


def test_any_set_of_options_is_looked_at_where_memory_falls() -> None:
    setting = replace(make_setting("llama-3-8b", "h100"), may_add_options=True)
    sets = [candidate for _, candidate in option_sets(setting)]
    assert any(list(memory_falls(candidate)) for candidate in sets)
    best = max(longest_sequence(replace(candidate, may_add_options=False)) for candidate in sets[::60])
    assert longest_sequence(setting) >= best
    assert isinstance(setting.model, ModelShape)


def test_the_longest_does_not_depend_on_what_fit_chose_for_fewer_tokens() -> None:
    """(With half of attention computed again, all of it was not tried: 1.10 M tokens in place of 1.99 M.)"""
    plain = on_devices(make_setting("qwen3-32b", "h100", tokens=1 << 20), 8)
    fitted = with_cheapest_options(replace(plain, may_add_options=True))
    assert fitted.recompute_attention == 0.5
    longest, expected = (longest_with_options(replace(one, may_add_options=True)) for one in (fitted, plain))
    assert longest is not None and expected is not None
    assert (longest.tokens, list_flags(longest)) == (expected.tokens, list_flags(expected))


def test_the_fewest_devices_are_one_ring() -> None:
    """(Two rings of 32 fit: their seconds, 74, stood beside "one ring" of 64, which takes 39.)"""
    setting = make_setting("qwen3-32b", "h100", "checkpoints", 1 << 19)
    setting = on_devices(setting, 64)
    two, one = (advise(estimate(replace(setting, ring_size=size))).reach for size in (32, 64))
    assert two.fewest_devices == one.fewest_devices == 64
    assert two.fewest_step_s == pytest.approx(one.fewest_step_s)

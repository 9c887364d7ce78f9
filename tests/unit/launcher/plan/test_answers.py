"""What the plan answers: models by name, searches over memory that falls, the start, other methods."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ds_ring import Causal, SlidingWindow
from ds_ring.errors import RingConfigError
from ds_ring.limits import Timeouts
from ds_ring.masks.pattern import Pattern
from ds_ring_launcher import cli
from ds_ring_launcher.commands.parsers import read_tokens
from ds_ring_launcher.plan import known_models, options
from ds_ring_launcher.plan.advice import (
    Reach,
    _warn_about_limits,
    _warn_about_timeouts,
    advise,
    get_longest_work,
)
from ds_ring_launcher.plan.compare import _sent_by_torch, compare, get_torch_waiting
from ds_ring_launcher.plan.estimate import estimate, head_swaps
from ds_ring_launcher.plan.hardware import read_hardware
from ds_ring_launcher.plan.inputs import make_request
from ds_ring_launcher.plan.layer_passes import build_plans, choose_parts, pass_shape
from ds_ring_launcher.plan.model_file import ModelShape, _from_transformers
from ds_ring_launcher.plan.model_memory import Zero
from ds_ring_launcher.plan.more_devices import plan_more_devices
from ds_ring_launcher.plan.options import (
    can_hold,
    fewest_devices,
    find_roomier,
    list_flags,
    list_shapes,
    longest_planned,
    longest_sequence,
    longest_that,
    memory_falls,
    option_sets,
    plan_whole,
    sets_that_fit,
    with_options,
)  # fmt: skip
from ds_ring_launcher.plan.pass_time import bytes_sent
from ds_ring_launcher.plan.report import _devices_table, _longest
from ds_ring_launcher.plan.training_setting import USABLE, TrainingSetting
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
ROOT = Path(__file__).resolve().parents[4]
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
    while tokens > 1 and not holds(tokens):
        tokens -= max(tokens // 128, 1)
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
    assert found % (2 * ring * setting.ulysses_size) == 0  # zigzag takes two parts of a rank
    expected = ring * (search_exhaustively(lambda tokens: can_hold(setting, tokens), 1 << 24) // 2 * 2)
    # Both searches are exact to a part of the length: 1 / 1024, and 1 / 128.
    assert 1023 / 1024 * expected <= found <= 129 / 128 * expected, (found, expected)
    # What the command says is planned whole, and leaves the margin of the plan's error.
    planned, _ = longest_planned(setting)
    assert (planned is None) == (not expected)
    if planned is not None:
        assert 63 / 64 * expected <= planned.tokens <= 129 / 128 * expected
        assert planned.tokens % (2 * ring * setting.ulysses_size) == 0
        peak = estimate(planned).peak.total
        assert peak * 1.04 <= USABLE["cuda"] * setting.hardware.memory_bytes


def test_a_plan_that_fits_is_no_longer_than_the_longest_sequence() -> None:
    """(Llama-8B on 8 H100, tiles: 131,072 tokens fitted, and the longest sequence was 59,392.)"""
    setting = make_setting("llama-3-8b", "h100", "tiles")
    planned = estimate(setting)
    assert planned.fits and advise(planned).reach.longest_tokens > setting.tokens
    (falls,) = memory_falls(setting)
    assert setting.mlp_tokens is not None and falls == setting.mlp_tokens + 1


def test_devices_that_no_length_fits_have_no_longest_sequence() -> None:
    """(It was of 0 tokens.)"""
    reach = Reach(0, "", (), None, "", None, None, (), None)
    assert _longest(reach, "tokens with these options") == "none with these options"
    reach = reach._replace(longest_tokens=4096, longest_ends_at="the device's memory")
    assert _longest(reach, "with these and -x") == "4,096 with these and -x (limit: the device's memory)"
    reach = reach._replace(longest_step_s=13239.2)
    assert _longest(reach, "tokens") == "4,096 tokens, 13,239 s a step (limit: the device's memory)"


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
    assert replace(setting.zero, partitioned_init=False).start(setting.model) == whole > setting.usable_bytes
    warnings = " ".join(_warn_about_limits(planned))
    assert "deepspeed.zero.Init" in warnings and "131.4 GiB" in warnings
    small = _warn_about_limits(estimate(make_setting("qwen3-0.6b", "h100")))
    assert not any("zero.Init" in warning for warning in small)
    wide = on_devices(make_setting("llama-3-8b", "h100", "checkpoints"), 64)
    assert any("takes 15.0 GiB" in warning for warning in _warn_about_limits(estimate(wide)))


@pytest.mark.parametrize(
    ("devices", "node", "rate"), [(8, 8, 4.5e11), (64, 8, 4e11), (64, 4, 2e11), (64, 32, 4.5e11)]
)
def test_a_collective_enters_a_node_by_every_adapter(devices: int, node: int, rate: float) -> None:
    """(ZeRO had one adapter for eight devices: 3.87 s for 0.48.) H100: 450 and 50 GB/s."""
    setting = replace(on_devices(make_setting("qwen3-32b", "h100"), devices), ring_size=8)
    setting = replace(setting, hardware=setting.hardware.model_copy(update={"devices_per_node": node}))
    gathered = 3 * 2 * setting.model.parameters * (devices - 1) / devices
    planned = estimate(setting)
    assert planned.zero_s == pytest.approx(gathered / rate)
    # a ring's hops and Ulysses' all-to-alls have one adapter a device
    assert setting.bytes_per_s == (4.5e11 if node >= 8 else 5e10)
    assert on_devices(setting, 64).bytes_per_s == 5e10
    wide = replace(setting, ring_size=1, ulysses_size=64)
    own = (1 << 17) // 64 * 128 * 2 * 2 * (64 + 8)  # bytes of a rank's q, k, v and out
    fixed = 2 * setting.hardware.link_latency_s
    assert head_swaps(wide, 1 << 17).seconds == pytest.approx(own * (64 - node) / 64 / 5e10 + fixed)


def test_what_torch_hides_behind_its_kernels() -> None:
    """(Its messages were all exposed, at one adapter: 13.5 s of 61.3.) 512 Ki tokens, 8 x 8 H100."""
    setting = on_devices(make_setting("qwen3-32b", "h100", "checkpoints", 1 << 19), 64)
    setting = replace(setting, recompute_attention=1.0)
    shard = 2 * 8192 * 8 * 128  # elements of K and V of a rank
    gather_s, home_s = 63 * shard * 2 / 4e11, shard * 4 / 5e10
    layers, hops = 64, 64 * 64**2  # of all ranks and layers
    kernel = estimate(replace(setting, tokens=64 << 7)).attention
    cases = {
        (0.0, 0.0): 3 * gather_s + 64 * home_s,  # nothing hides
        (1.0, 1.0): home_s,  # all but the last message
        (gather_s / 2, home_s / 2): 2 * gather_s / 2 + gather_s - home_s / 2 + 63 * home_s / 2 + home_s,
    }
    for (forward_s, backward_s), exposed_s in cases.items():
        whole = replace(kernel, forward_s=forward_s * hops, backward_s=backward_s * hops)
        assert get_torch_waiting(setting, whole) == pytest.approx(layers * exposed_s)
    # K and V of 63 ranks three times; 64 float32 gradients, the own ones last of all
    assert _sent_by_torch(setting) == layers * shard * (3 * 63 * 2 + 64 * 4)
    # selective checkpointing gathers once less
    kept = replace(setting, recompute_attention=0.0)
    assert _sent_by_torch(kept) == layers * shard * (2 * 63 * 2 + 64 * 4)
    whole = replace(kernel, forward_s=0.0, backward_s=0.0)
    assert get_torch_waiting(kept, whole) == pytest.approx(layers * (2 * gather_s + 64 * home_s))
    assert _sent_by_torch(on_devices(setting, 1)) == get_torch_waiting(on_devices(setting, 1), kernel) == 0


def test_methods_are_compared_with_the_same_options_first() -> None:
    setting = make_setting("llama-3-8b", "h100", "tiles")
    one_rate = setting.hardware.model_copy(update={"torch_attention": None})
    planned = estimate(replace(setting, hardware=one_rate))
    rows = compare(planned, 12345)
    assert [row.best_options for row in rows] == [False] * 5 + [True] * 3
    for row in rows[:5]:
        assert row.options == ("--tiled-loss", "--tiled-mlp"), row
    # (The row of "all options" was shorter than some of them reach: offloading fills the host.)
    ours = rows[5]
    sets = [changed for _, changed in option_sets(planned.setting)]
    assert ours.longest_tokens >= 63 / 64 * max(longest_sequence(changed) for changed in sets[::40])
    assert ours.longest_tokens > max(row.longest_tokens for row in rows[:5])
    # Pinned tensors take powers of two of bytes: 16,384 x 4,096 x 2 are one, 20,000 x 4,096 x 2 are not.
    for tokens, times in ((1 << 17, 1.0), (160_000, (1 << 28) / (20_000 * 4096 * 2))):
        kept = estimate(replace(setting, tokens=tokens, checkpointing=True, offload_checkpoints=True))
        blocks = kept.setting.model.layers * 4096 * 2 * tokens // 8
        assert kept.host_peak.host["checkpoints on the host"] == pytest.approx(times * blocks, rel=1e-6)
    # The same arithmetic at the same rates: methods differ by messages, and by what they compute again.
    for row in rows[1:5]:
        assert row.step_s == pytest.approx(planned.step_s, rel=0.1)
    assert all(row.tokens_per_s == pytest.approx((1 << 17) / row.ranks / row.step_s) for row in rows)


@pytest.mark.parametrize(
    ("stage", "pinned"),
    [
        # the flat gradients in bf16, float32 ones of sub-groups of a billion parameters each, and the rest
        (3, [2 * 4.095e9, *[4e9] * 4, 4 * 0.095e9]),
        # bf16 for the way back, gradients, the float32 copy; a largest parameter in bf16
        (2, [2 * 4.095e9, 4 * 4.095e9, 4 * 4.095e9, 2 * 151936 * 5120]),
    ],
)
def test_states_on_the_host_are_pinned_in_powers_of_two(stage: int, pinned: list[float]) -> None:
    """(Only checkpoints and attention's results were: a host that looked roomy could be full.)"""
    setting = make_setting("qwen3-32b", "h100")
    model = setting.model
    zero = Zero(stage, 8, 2, offload_optimizer=True)
    assert model.parameters / 8 == pytest.approx(4.095e9, rel=1e-3)
    plain = zero.host(model, pins=False)
    # float32: copy, two moments, gradients; bf16
    assert plain == 18 * zero.share(model.parameters) + (stage == 2) * 2 * model.largest_parameter
    assert replace(zero, pins_optimizer=False).host(model, pins=True) == plain
    blocks = sum(2 ** math.ceil(math.log2(size)) for size in pinned)
    assert zero.host(model, pins=True) == pytest.approx(plain - sum(pinned) + blocks, rel=1e-3)
    assert replace(zero, offload_optimizer=False).host(model, pins=True) == 0
    on_host = estimate(replace(setting, zero=replace(zero, world=32))).host_peak.host
    assert on_host["ZeRO's states on the host"] == replace(zero, world=32).host(model, pins=True)


def test_parameters_on_the_host_are_one_pinned_tensor() -> None:
    """(They counted as if the flat tensor had no power of two, and the blocks before it were given back.)"""
    model = _from_transformers("llama-3-70b")
    zero = Zero(3, 8, 2, offload_parameters=True)
    flat = 2 * zero.share(model.parameters)
    assert flat == pytest.approx(17.64e9, rel=1e-3)
    assert zero.host(model, pins=True) == 2**35 + flat
    assert replace(zero, pins_parameters=False).host(model, pins=True) == 2**35  # pinned all the same
    assert zero.host(model, pins=False) == flat


def test_stage_2_pins_gradients_of_earlier_micro_batches() -> None:
    zero, model = Zero(2, 8, 2, offload_optimizer=True), _from_transformers("llama-3-8b")
    later = replace(zero, accumulates=True)
    flat = 2 * zero.share(model.parameters)
    assert later.host(model, pins=False) - zero.host(model, pins=False) == flat
    assert later.host(model, pins=True) - zero.host(model, pins=True) == 2**31 >= flat
    assert later.earlier_gradients(model) == 0


def test_the_table_of_the_worked_case_is_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "configs/recipes/README.md").read_text()
    (command,) = re.findall(r"^ds-ring (plan .* --compare)$", text, re.MULTILINE)
    assert not cli.main([*command.replace("configs/", f"{ROOT}/configs/").split(), "--json"])
    rows = json.loads(capsys.readouterr().out)["compared"]
    expected = [
        f"{row['peak_bytes'] / 2**30:.1f} | {row['host_bytes'] / 2**30:.1f} | {row['step_s']:.1f} |"
        f" {row['longest_tokens']:,}"
        for row in rows
        if "guide" not in row["method"]  # its other options
    ]
    table = re.findall(r"^\| (?:ds_ring|DeepSpeed|torch|ALST)[^|]* \| (.*) \|$", text, re.MULTILINE)
    assert sorted(table) == sorted(expected)


def test_pages_have_the_figures_of_the_plan() -> None:
    """(README had 55.4 GiB, and 5.8 million tokens stood on the page of results.)"""
    (gib,) = re.findall(
        r"Llama-8B, 1 Mi tokens, 8 H100: ([0-9.]+) GiB a GPU", (ROOT / "README.md").read_text()
    )
    base = make_setting("llama-3-8b", "h100")
    free = replace(base, may_add_options=True, may_split_heads=True)
    fitted = plan_whole(replace(free, tokens=1 << 20))
    assert fitted is not None and f"{fitted.peak.total / 2**30:.1f}" == gib
    page = (ROOT / "tools/results/modelled.md").read_text()
    (millions,) = re.findall(r"Llama-8B holds (.*) million tokens on 1, 8 and 32 H100", page)
    longest = [longest_planned(on_devices(free, devices))[0] for devices in (1, 8, 32)]
    assert [f"{tokens.tokens / 1e6:.2g}" if tokens else "" for tokens in longest] == [
        f"{float(number):.2g}" for number in millions.replace(" and", ",").split(", ")
    ]
    rows = re.findall(r"^\| ([0-9,]+) \| ([0-9*,]+) \| ([0-9*,]+) \| [0-9,]+ \|$", page, re.MULTILINE)
    fast = replace(base, hardware=read_hardware("h100_flash3"), checkpointing=True)
    for length, *cells in rows:
        tokens = 8 * int(length.replace(",", ""))
        plans = [replace(fast, tokens=tokens), replace(fast, tokens=tokens, ring_size=1, ulysses_size=8)]
        expected = [f"{1e3 * estimate(plan).attention_s:,.0f}" for plan in plans]
        assert [cell.strip("*") for cell in cells] == expected
    assert len(rows) == 3


def test_the_longest_sequence_is_at_least_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """(1,048,576 tokens fitted, and the longest were 1,038,096: pinned memory grows at powers of two.)"""
    flags = ("--tiled-loss", "--tiled-mlp", "--activation-checkpointing", "--offload-checkpoints")
    plain = replace(on_devices(make_setting("qwen3-32b", "h100"), 16), ring_size=2, ulysses_size=8)
    setting = with_options(plain, tuple(BY_FLAG[flag] for flag in (*flags, "--offload-optimizer")))
    assert setting is not None and longest_sequence(setting) == 1 << 20
    planned = estimate(replace(setting, tokens=(1 << 20) + 1))
    (text,) = (warning for warning in advise(planned).warnings if "does not fit" in warning)
    # (It said "25.4 GiB, of 65.9 that a plan may take".)
    assert f"does not fit: {planned.node_host_bytes / 2**30:,.1f} GiB of a node's host at the" in text
    assert "of 1,769.5 GiB that a plan may take; attention's results on the host take 1,040.0" in text
    assert "at most 1,048,576 tokens fit 16 devices" in text
    # a length between those that are tried
    tried = estimate(replace(plain, tokens=longest_sequence(plain)))
    monkeypatch.setattr(options, "FINE", 2)
    assert longest_sequence(plain) < tried.setting.tokens == advise(tried).reach.longest_tokens


def test_the_head_is_not_computed_again() -> None:
    """(Under checkpointing it was: 7 % of Qwen3-0.6B's matrices.) 2 FLOPs forward, 4 backward, 2 again."""
    plain = make_setting("qwen3-0.6b", "h100")
    shape, tokens = plain.model, (1 << 17) // 8
    layers, head = shape.parameters - shape.head_parameters, 1024 * 151_936
    for checkpointing, again in ((False, 0), (True, 2)):
        flops = estimate(replace(plain, checkpointing=checkpointing)).dense_flops
        assert flops == pytest.approx(((6 + again) * layers + 6 * head) * tokens, rel=1e-3)


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
    copied = f"is copied to {copies} ranks, as UlyssesSPAttentionHF does (DistributedAttention refuses that)"
    note = f"; {bound} allow on {devices} devices" if bound else ""
    note += f"; each of {kv_heads} K/V heads {copied}" if copies > 1 else ""
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


def test_rows_move_what_their_ranks_hold() -> None:
    """(32 of 128 ranks moved the checkpoints of an eighth of their tokens: 0.009 s for 0.036.)"""
    setting = on_devices(make_setting("qwen3-4b", "h100", tokens=1 << 16), 128)
    flags = ("--tiled-loss", "--tiled-mlp", "--activation-checkpointing", "--offload-checkpoints")
    changed = with_options(setting, tuple(BY_FLAG[flag] for flag in flags))
    assert changed is not None
    planned = estimate(changed)
    rows = {row.method: row for row in compare(planned, 0)}
    again, kept = rows["DeepSpeed Ulysses"], rows["DeepSpeed Ulysses, attention kept"]
    assert again.ranks == kept.ranks == 32 and planned.setting.ring_size == 128
    model, tokens = changed.model, (1 << 16) // 32
    results = tokens * model.heads * (model.head_dim * 2 + 4)  # out in bf16, lse in float32
    moved_s = 2 * model.layers * results / (changed.hardware.host_link_bytes_per_s or 1)
    forward_s = 4 * model.head_dim * model.heads * model.layers * (1 << 31) / 32 / again.attention_flops[0]
    assert again.step_s - kept.step_s == pytest.approx(forward_s - moved_s, rel=0.05)


def test_a_method_that_lacks_the_mask_has_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    """(torch's ring, which takes no window, was a windowed pass of 12 seconds.)"""
    words = "plan --hf-config llama-3.2-1b --tokens 64k --devices 8 --compare"
    for more, count in (([], 2), (["--pattern", '{"window": 4096}'], 0)):
        assert cli.main([*words.split(), *more]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert printed.count("torch context parallel: no row; it computes causal attention") == (not count)
        assert cli.main([*words.split(), *more, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert sum("torch" in row["method"] for row in found["compared"]) == count
        assert len(found["not_compared"]) == (not count)
        assert {"DeepSpeed Ulysses", "ALST"} <= {row["method"] for row in found["compared"]}


def test_documents_are_planned_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    """(Seconds were those of causal attention, and nothing said so.)"""
    words = "plan --hf-config llama-3.2-1b --tokens 64k --devices 8 --json"
    warned = []
    for more in ([], ["--pattern", '{"documents": true}']):
        assert cli.main([*words.split(), *more]) == 0
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        warned.append(any("planned as one document" in warning for warning in warnings))
    assert warned == [False, True]


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
    rows = plan_more_devices(plain)
    assert all(plan.fits for plan in rows)
    # (Which split a row has was nowhere, and two replicas, as fast a device as one, had no row.)
    # (24, three nodes, was found by luck.)
    names = ["8x1", "16x1", "8x2", "24x1", "8x3", "32x1", "8x4", "64x1", "8x8"]  # ring x data
    assert [plan.setting.split for plan in rows] == [
        "ring {} x Ulysses 1 x data {}".format(*name.split("x")) for name in names
    ]
    for plan in rows[2::2]:
        assert plan.step_s == pytest.approx(rows[0].step_s, rel=0.05)
        assert plan.peak.total < rows[0].setting.usable_bytes
    plans = [plan for plan in rows if plan.setting.replicas == 1]
    assert [plan.setting.devices for plan in plans] == [8, 16, 24, 32, 64]
    seconds = [plan.step_s for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    flags = [sum(option.is_on(plan.setting) for option in BY_FLAG.values()) for plan in plans]
    assert flags[0] > flags[-1] == 0
    # (The JSON's ring was replaced.)
    kept_ring = plan_more_devices(plain, keeps_ring=True)
    assert [plan.setting.replicas for plan in kept_ring] == [1, 2, 3, 4, 8]
    # replicas that do not divide the batch of the JSON
    batch_of_2 = plan_more_devices(plain, keeps_ring=True, train_batch=2)
    assert [(plan.setting.ring_size, plan.setting.replicas) for plan in batch_of_2] == [
        (8, 1), (8, 2), (24, 1), (32, 1), (64, 1),
    ]  # fmt: skip
    four = [plan.setting.devices for plan in plan_more_devices(on_devices(plain, 4))]
    assert 12 not in four and 16 in four  # no whole nodes


@pytest.mark.parametrize(
    ("pattern", "layout", "ring", "node"),
    [
        (Causal(), "zigzag", 6, 1), (Causal(), "zigzag", 12, 1), (Causal(), "zigzag", 12, 4),
        (Causal(), "zigzag", 6, 8), (Causal(), "contiguous", 12, 1), (SlidingWindow(1024), "auto", 12, 1),
    ],
)  # fmt: skip
def test_bytes_sent_are_those_of_the_rank_that_sends_most(
    pattern: Pattern, layout: str, ring: int, node: int
) -> None:
    """(They were those of the slowest rank, which may send least: under the mean.)"""
    base = on_devices(make_setting("llama-3-8b", "h100", tokens=ring << 10), ring)
    hardware = base.hardware.model_copy(update={"devices_per_node": node})
    setting = replace(base, hardware=hardware, pattern=pattern, layout=layout)
    planned = estimate(setting)
    cost, plan = planned.passes[0].cost, build_plans(setting)[0][0]
    shape = pass_shape(setting, planned.layout)
    by_rank = [bytes_sent(choose_parts(plan, rank), shape) for rank in range(ring)]
    sent = (cost.forward_bytes, cost.backward_bytes)
    assert sent == max(by_rank, key=sum)
    if layout == "zigzag":
        # By hand: all others read a shard's first half, half of them its second: 3/4 of P - 1 shards arrive
        # on average, backward as well, with float32 gradients of two such shards. A neighbour of the ends
        # passes on all of P - 1 in one ring.
        shard = 2 * 1024 * 8 * 128 * 2
        mean = 0.75 * (ring - 1) * shard
        assert sum(forward for forward, _ in by_rank) >= ring * mean
        assert sent[0] >= mean and (node > 1 or sent[0] == (ring - 1) * shard)
        assert planned.sent_bytes == 32 * sum(sent) > 32 * sum(map(sum, by_rank)) / ring


def test_fixed_costs_are_named_where_they_are_most_of_attention() -> None:
    """(512 tokens a device: "transfers hide from 64 tokens on", in a step of fixed costs.)"""
    short = estimate(on_devices(make_setting("llama-3-8b", "h100", tokens=16 << 9), 16))
    assert short.fixed_share > 0.5 and short.attention.exposed_s < 0.05 * short.attention.seconds
    warnings = " ".join(_warn_about_limits(short))
    assert f"fixed costs of kernel calls and hops are {short.fixed_share:.0%}" in warnings
    assert "at 512 tokens a device" in warnings
    long = estimate(on_devices(make_setting("llama-3-8b", "h100", tokens=1 << 20), 16))
    assert long.fixed_share < 0.05
    assert not any("fixed costs" in warning for warning in _warn_about_limits(long))


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


IN_TOKENS = {"--tokens", "--tiled-loss", "--tiled-mlp"}


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
    """(With half of attention computed again, all of it was not tried.)"""
    plain = on_devices(make_setting("qwen3-32b", "h100", tokens=3 << 18), 8)
    free = replace(plain, may_add_options=True)
    fitted = plan_whole(free)
    assert fitted is not None and fitted.setting.recompute_attention == 0.5
    longest, expected = (longest_planned(one)[0] for one in (fitted.setting, free))
    assert longest is not None and expected is not None
    assert (longest.tokens, list_flags(longest)) == (expected.tokens, list_flags(expected))


def test_the_fewest_devices_are_one_ring() -> None:
    """(Two rings of 32 fit: their seconds, 74, stood beside "one ring" of 64, which takes 39.)

    (Of whole nodes only powers of two were looked at.)
    """
    setting = make_setting("qwen3-32b", "h100", "checkpoints", 1 << 19)
    setting = on_devices(setting, 64)
    two, one = (advise(estimate(replace(setting, ring_size=size))).reach for size in (32, 64))
    assert two.fewest_devices == one.fewest_devices == 48
    assert two.fewest_step_s == pytest.approx(one.fewest_step_s)


def test_searches_try_ulysses_ranks_inside_a_node() -> None:
    """(README has Ulysses inside nodes and a ring between: --fit and --more-devices had rings alone.)"""
    ring = replace(make_setting("qwen3-32b", "h100", tokens=1 << 18), may_add_options=True)
    free = replace(ring, may_split_heads=True)
    chosen, alone = plan_whole(free), plan_whole(ring)
    assert chosen is not None and alone is not None and alone.setting.ulysses_size == 1
    assert chosen.setting.split == "ring 4 x Ulysses 8 x data 1" and chosen.step_s < alone.step_s
    assert chosen.sent_bytes + chosen.swap_bytes < alone.sent_bytes / 2
    roomier = find_roomier(chosen, free)
    assert roomier is not None and roomier.setting.split == chosen.setting.split
    # (For 1 of 143 seconds, memory was full to 97 %.)
    tight = on_devices(replace(free, tokens=1 << 19), 16)
    taken, cheapest = plan_whole(tight), sets_that_fit(list_shapes(tight)[1])[0]
    assert taken is not None and taken.setting.split == cheapest.setting.split
    assert taken.peak.total < 0.9 * tight.usable_bytes < cheapest.peak.total
    assert cheapest.step_s < taken.step_s < 1.01 * cheapest.step_s
    shapes = [plan.setting.split for plan in plan_more_devices(replace(free, may_add_options=False))]
    assert shapes[:3] == [f"ring {size} x Ulysses 8 x data {n}" for size, n in ((4, 1), (8, 1), (4, 2))]
    reach = advise(chosen, before_fit=free).fit_reach
    longest, plan = longest_planned(free)  # one search: it was of the chosen shape here, of both in --compare
    assert reach is not None and longest is not None and plan is not None
    assert (reach.longest_tokens, reach.longest_split) == (longest.tokens, longest.split)
    assert reach.longest_step_s == plan.step_s
    assert reach.longest_tokens == compare(chosen, 0)[-3].longest_tokens
    fewest = fewest_devices(replace(free, tokens=1 << 23))
    assert fewest is not None and fewest.devices == fewest.ring_size * fewest.ulysses_size
    for devices in (fewest.devices // 2, 3 * fewest.devices // 4):
        tried = on_devices(free, devices)
        assert plan_whole(replace(tried, tokens=1 << 23)) is None


def test_what_no_option_makes_fit_is_told_with_the_least_that_it_takes() -> None:
    """(The largest part without any option was named, which options take away.)"""
    setting = make_setting("qwen3-32b", "h100", tokens=1 << 18)
    whole = replace(setting, zero=replace(setting.zero, stage=2), may_add_options=True)
    assert plan_whole(whole) is None
    planned = estimate(whole)
    warning = next(text for text in advise(planned, before_fit=whole).warnings if "does not fit" in text)
    parameters = 4 * whole.model.parameters / 2**30  # and gradients, both whole in bfloat16
    least, share = re.findall(r"([\d.]+) GiB a device.*gradients take ([\d.]+)", warning)[0]
    assert float(share) == pytest.approx(parameters, rel=0.01) and float(share) <= float(least) < 140
    assert warning.endswith("--zero-stage 3 divides them")


@pytest.mark.parametrize(
    ("words", "free"),
    [("", True), ("--ulysses-size 1", False), ("--ring-size 4", False), ("--ulysses-size 8", False)],
)
def test_a_shape_that_is_asked_for_is_kept(words: str, free: bool) -> None:
    arguments = f"plan --hf-config qwen3-32b --devices 32 --tokens 128k {words}"
    options = cli._parser().parse_args(arguments.split())
    assert make_request(options, lambda what: None).setting.may_split_heads == free


def test_ulysses_alone_is_planned_without_the_sums_of_a_ring() -> None:
    """(A ring of one was planned with float32 sums that it does not make.)"""
    usual = make_setting("llama-3-8b", "h100", "all")
    alone, hybrid = (
        estimate(replace(usual, ring_size=8 // size, ulysses_size=size)).attention_passes.memory
        for size in (8, 4)
    )
    assert alone.accumulators == 0 < hybrid.accumulators


def test_how_late_a_rank_can_be_is_told() -> None:
    """(A step of 342 s beside a limit of 60 s: what all ranks do at the same time does not count.)"""
    usual = estimate(make_setting("llama-3-8b", "h100", "all", 1 << 20))
    assert usual.step_s > 5 * Timeouts().hop > 50 * get_longest_work(usual)
    (part,) = usual.passes
    assert part.lead_s < 0.01 * part.cost.seconds
    assert part.cost.seconds / part.cost.hops < part.cost.longest_hop_s < part.cost.backward_s / 8
    # A rank that sees few keys has done its passes while the last one has hardly begun.
    uneven = estimate(replace(usual.setting, layout="contiguous"))
    assert get_longest_work(uneven) > 0.9 * uneven.passes[0].cost.seconds > 5 * get_longest_work(usual)
    # An optimizer on a slow host, and matrices between two passes on a slow device.
    hardware = usual.setting.hardware
    slow = hardware.model_copy(update={"host_memory_bytes_per_s": 1e9})
    assert get_longest_work(estimate(replace(usual.setting, hardware=slow))) == pytest.approx(
        28 * 8.03, rel=0.01
    )


def test_a_time_limit_that_is_near_is_warned_of_with_its_value() -> None:
    usual = make_setting("llama-3-8b", "h100", "all", 1 << 20)
    rates = usual.hardware.peak_flops.model_copy(update={"bfloat16": 9.89e12})
    slow = replace(usual, hardware=usual.hardware.model_copy(update={"peak_flops": rates}))
    planned = estimate(slow)
    assert _warn_about_timeouts(estimate(usual), Timeouts()) == []
    (warning,) = _warn_about_timeouts(planned, Timeouts())
    assert 'near hop_timeout_seconds (60), after which a late one counts as failed: set "hop' in warning
    seconds = int(re.findall(r'"hop_timeout_seconds": (\d+)$', warning)[0])
    assert seconds >= 2 * get_longest_work(planned) and seconds % 10 == 0
    assert _warn_about_timeouts(planned, Timeouts(hop=seconds)) == []
    (warning,) = _warn_about_timeouts(planned, Timeouts(step=seconds - 1))
    assert f'and "step_timeout_seconds": {seconds}' in warning
    assert _warn_about_timeouts(estimate(replace(slow, ring_size=1)), Timeouts()) == []  # nobody waits


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, None),
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": 8192, "rope_scaling": {"type": "linear", "factor": 4}}, 32768),
        ({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
          "original_max_position_embeddings": 32768}}, 131072),
        ({"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "llama3", "factor": 32.0,
          "original_max_position_embeddings": 8192}}, 131072),
        ({"max_position_embeddings": 163840, "rope_scaling": {"rope_type": "yarn", "factor": 40,
          "original_max_position_embeddings": 4096}}, 163840),
    ],
)  # fmt: skip
def test_positions_that_end_before_the_sequence_are_warned_of(
    changes: dict[str, object], most: int | None
) -> None:
    text = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
    model = _from_transformers(json.dumps(text | {"vocab_size": 128} | changes))
    assert model.positions == most
    for tokens in (most or 4096, 2 * (most or 4096)):
        planned = estimate(replace(make_setting("llama-3-8b", "h100", tokens=tokens), model=model))
        warned = [text for text in _warn_about_limits(planned) if f"reaches {most or 0:,} (max_pos" in text]
        assert len(warned) == (most is not None and tokens > most)


def test_the_next_set_with_memory_to_spare_is_named() -> None:
    plain = replace(make_setting("llama-3-8b", "h100", tokens=1 << 20), may_add_options=True)
    fitted = plan_whole(plain)
    assert fitted is not None
    roomier = find_roomier(fitted, plain)
    assert roomier is not None and roomier.fits and roomier.step_s < 1.01 * fitted.step_s
    assert fitted.peak.total - roomier.peak.total > 0.1 * plain.usable_bytes
    # no other set that leaves as much is cheaper
    for _, changed in option_sets(plain):
        tried = estimate(changed, attention=fitted.attention_passes)
        near = tried.fits and tried.peak.total <= fitted.peak.total - 0.1 * plain.usable_bytes
        assert not near or tried.step_s >= roomier.step_s


def test_what_fit_would_choose_is_told_without_it() -> None:
    plain = make_setting("llama-3-8b", "h100", tokens=1 << 20)
    fitted = plan_whole(replace(plain, may_add_options=True))
    assert fitted is not None
    flags = " ".join(list_flags(fitted.setting))
    warnings = advise(estimate(plain)).warnings
    figures = "55.4 GiB a device, 516 of a node's host, 271 s a step"
    assert f"it fits with --fit, which would choose {flags}: {figures}" in warnings
    longer = advise(estimate(replace(plain, tokens=1 << 24))).warnings
    assert "no options of --fit make 16,777,216 tokens fit 8 devices" in longer


def test_tables_have_one_word_for_one_thing(capsys: pytest.CaptureFixture[str]) -> None:
    """("T / P" beside "tokens of a ring rank"; 1M as 2**20 beside "1.05 M"; a host's GiB of nobody.)"""
    words = "--hf-config llama-3-8b --tokens 64k --devices 8 --ulysses-size 2 --compare --more-devices"
    assert cli.main(["plan", *words.split()]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "8,192 tokens a device, 16,384 in a ring's shard" in printed
    assert "attention at 507 TFLOP/s forward and 481 backward, that of other methods at torch's" in printed
    assert "ways to split 65,536 tokens, computed: its options for the longest" in printed
    assert "memory of each row has its kernel's buffers" in printed
    assert "tokens/s" in printed.split("more devices, each row")[1] and "\u2026" not in printed
    words = "--hf-config llama-3-8b --tokens 64k --devices 8 --hardware a100 --compare"
    assert cli.main(["plan", *words.split()]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "206 TFLOP/s forward and 165 backward, as that of other methods: they compare" in printed
    assert "tokens a device" in [str(column.header) for column in _devices_table([]).columns]
    assert re.search(r"transfers hide .*: from [0-9,]+ tokens a device on", printed)
    assert not re.search(r"T ?/ ?P|ring rank|[0-9] M\b", printed)
    assert not re.search("host [GM]iB", printed) and re.search("[│┃] [GM]iB of a host [│┃]", printed)

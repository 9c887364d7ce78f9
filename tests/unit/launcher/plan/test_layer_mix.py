"""Layers that differ: what a config.json says, and plans that add up over the layers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ds_ring import Causal, Chunked, SlidingWindow
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring_launcher.plan.advice import Advice, Reach, describe_plan
from ds_ring_launcher.plan.estimate import Estimate, estimate
from ds_ring_launcher.plan.hardware import read_hardware
from ds_ring_launcher.plan.hiding import Hiding, hiding_shard
from ds_ring_launcher.plan.layer_passes import _most, layer_passes
from ds_ring_launcher.plan.model_file import count_patterns, patterns_by, read_complete_config
from ds_ring_launcher.plan.pass_memory import PassMemory
from ds_ring_launcher.plan.report import as_json, print_report
from tests.unit.launcher.plan.test_cost import SMALL, setting

GEMMA = {"num_hidden_layers": 6, "sliding_window": 512, "hidden_size": 64}
LOCAL = "sliding_attention"


def section(**pattern: object) -> RingConfig:
    return RingConfig.from_deepspeed({"sequence_parallel_size": 1, "ring_attention": {"pattern": pattern}})


def test_layer_types_say_what_each_layer_sees() -> None:
    types = [LOCAL] * 5 + ["full_attention"]
    found = patterns_by(GEMMA | {"layer_types": types})
    assert found == (*[SlidingWindow(512)] * 5, Causal())
    assert patterns_by({"text_config": GEMMA | {"layer_types": types}}) == found
    assert patterns_by(GEMMA) == (SlidingWindow(512),) * 6
    assert patterns_by(GEMMA | {"use_sliding_window": False}) == (Causal(),) * 6
    chunks = GEMMA | {"layer_types": ["chunked_attention"] * 6, "attention_chunk_size": 64}
    assert patterns_by(chunks) == (Chunked(64),) * 6


def test_what_a_file_leaves_open_is_transformers_word() -> None:
    found = read_complete_config(
        '{"model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 512}'
    )
    assert found["layer_types"] == ([LOCAL] * 5 + ["full_attention"]) * 2
    with pytest.raises(RingConfigError, match="is_encoder_decoder: expected a model of one sequence"):
        patterns_by(GEMMA | {"is_encoder_decoder": True})
    with pytest.raises(RingConfigError, match='expected one of the installed transformers, got "no_such'):
        read_complete_config('{"model_type": "no_such_model", "num_hidden_layers": 2, "sliding_window": 4}')


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_types": ["full_attention"]}, "a list of 6 words"),
        ({"layer_types": ["full_attention"] * 5 + ["linear_attention"]}, '"linear_attention"'),
        ({"sliding_window": 0}, "sliding_window: expected a whole number"),
        ({"num_hidden_layers": "six"}, "num_hidden_layers: expected a whole number"),
    ],
)
def test_a_file_that_is_wrong_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(RingConfigError, match=message):
        patterns_by(GEMMA | values)


def test_the_section_and_the_model_are_put_together_as_the_runtime_does() -> None:
    found = (*[SlidingWindow(512)] * 5, Causal())
    assert dict(count_patterns(section(), found, 4096)) == {SlidingWindow(512): 5, Causal(): 1}
    assert dict(count_patterns(section(), found, 512)) == {Causal(): 6}  # windows that hide nothing
    named = section(layers={"0-1": {"window": 128}})
    assert dict(count_patterns(named, (None,) * 4, 4096)) == {SlidingWindow(128): 2, Causal(): 2}
    with pytest.raises(RingConfigError, match="layers from 0 to 1"):
        count_patterns(section(layers={"7": {"window": 8}}), (None, None), 4096)
    with pytest.raises(RingPatternError, match="see otherwise"):
        count_patterns(section(window=64), found, 4096)


def test_attention_is_summed_over_the_layers_and_memory_is_that_of_the_largest() -> None:
    deep = replace(SMALL, layers=6)
    local, whole = SlidingWindow(512), Causal()

    def of(pattern: object) -> Estimate:
        return estimate(setting(8192, 4, model=deep, pattern=pattern, layout="zigzag"))

    mixed, narrow, plain = of(((local, 5), (whole, 1))), of(local), of(whole)
    for name in ("attention_s", "exposed_s"):
        expected = 5 / 6 * getattr(narrow, name) + getattr(plain, name) / 6
        assert getattr(mixed, name) == pytest.approx(expected)
    for name in ("pairs", "forward_bytes", "backward_bytes", "hops"):
        of_layers = [getattr(one.cost, name) for one in mixed.passes]
        assert getattr(mixed.attention, name) == 5 * of_layers[0] + of_layers[1]
    assert mixed.peak.total == max(narrow.peak.total, plain.peak.total)
    buffers = [layer_passes(one.setting).memory.buffers for one in (mixed, narrow, plain)]
    assert buffers[0] == max(buffers[1:])


def test_a_rank_keeps_the_most_buffers_of_any_layer() -> None:
    assert _most([PassMemory(7, 1, 1), PassMemory(2, 3, 4)]) == PassMemory(7, 3, 4)


def test_a_report_says_what_its_figures_are_of(capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any] = {
        "model": replace(SMALL, layers=6), "checkpointing": True, "offload_checkpoints": True,
        "pattern": ((SlidingWindow(512), 5), (Causal(), 1)), "dtype": "bfloat16",
    }  # fmt: skip
    mixed = estimate(setting(8192, 4, hardware=read_hardware("h100"), **changes))
    tiled = ("--tiled-loss",)
    device, host = "the device's memory", "the host's memory"
    few = Reach(8192, mixed.setting.split, tiled, None, device, 8, "ring 1 x Ulysses 8", tiled, 3.0)
    more = Reach(65536, "ring 2 x Ulysses 2", (*tiled, "--tiled-mlp"), 120.0, host, 2, None, tiled, 250.4)
    advice = Advice(few, more, Hiding(4096, None), mixed, ("read this",))
    print_report(mixed, advice, {})
    printed = " ".join(capsys.readouterr().out.split())
    usable = 4 * (mixed.setting.usable_host_bytes or 0) / 2**20
    host_mib = mixed.node_host_bytes / 2**20
    on_host = [4 * size / 2**20 for size in mixed.host_peak.host.values() if size]
    seconds = [part.layers * part.cost.seconds for part in mixed.passes]
    pairs = [part.layers * part.cost.pairs for part in mixed.passes]
    for words in (
        "attention: SlidingWindow(window=512, causal=True) in 5 layers, Causal() in 1 layer",
        "these options: --activation-checkpointing --offload-checkpoints",
        f"node's host: checkpoints │ {on_host[0]:.3f}",
        f"node's host: attention's results │ {on_host[1]:.3f}",
        f"node's host, in all, of {usable:,.1f} │ {host_mib:.3f}",
        f"5 x SlidingWindow(window=512, causal=True) │ {pairs[0]:.3g} pairs │ {seconds[0]:.3g}",
        f"1 x Causal() │ {pairs[1]:.3g} pairs │ {seconds[1]:.3g}",
        f"host, not overlapped │ {mixed.host_bytes / 2**20:.3g} MiB │ {mixed.host_s:.3g}",
        "8,192 tokens with these options (limit: the device's memory); 65,536 with these and --tiled-mlp"
        " on ring 2 x Ulysses 2, 120 s a step (limit: the host's memory)",
        "8 (ring 1 x Ulysses 8) with these options, 3 s a step transfers",
        "from 4,096 tokens a device on",
        "with more memory to spare: ",
        "each pinned tensor takes a power of two of bytes",
        "warning: read this",
        "and in the script: model.gradient_checkpointing_enable()",
    ):
        assert words in printed, printed
    none = few._replace(fewest_devices=None, fewest_split=None, fewest_step_s=None)
    config = {"train_batch_size": 3}
    print_report(mixed, advice._replace(reach=none), config, counts=[mixed], spare=[mixed])
    printed = " ".join(capsys.readouterr().out.split())
    assert "none up to 16384 with these options; 2 with these and no option more, 250 s a step" in printed
    assert "replicas divide the JSON's train_batch_size, 3" in printed
    assert f"3 take at most {3 * mixed.step_s:.3g} s" in printed
    assert printed.count(f"with more memory to spare {describe_plan(mixed)}") == 1
    (row,) = json.loads(as_json(mixed, advice, {}, counts=[mixed]))["more_devices"]
    assert (row["devices"], row["peak_bytes"]) == (4, mixed.peak.total)


@pytest.mark.night
def test_searches_know_the_mix() -> None:
    mixed = setting(
        1 << 16, 4, model=replace(SMALL, layers=6), pattern=((SlidingWindow(512), 5), (Causal(), 1))
    )
    narrow, plain = (replace(mixed, pattern=pattern) for pattern in (SlidingWindow(512), Causal()))
    found = [hiding_shard(one).tokens or 0 for one in (plain, mixed, narrow)]
    assert 0 < found[0] < found[1] <= found[2]

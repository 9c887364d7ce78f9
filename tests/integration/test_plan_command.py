"""`ds-ring plan`: its JSON for known cases, its tables, and what wrong input is told (exit status 2)."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from ds_ring_launcher import cli
from ds_ring_launcher.plan import known_hardware
from ds_ring_launcher.plan.estimate import Estimate, estimate
from ds_ring_launcher.plan.inputs import make_request
from tests.plan_costs import costs_once  # noqa: F401 (used by all tests)

ROOT = Path(__file__).resolve().parents[2]

SIZES = [
    *("--layers", "4", "--hidden", "256", "--heads", "4", "--kv-heads", "2"),
    *("--intermediate", "768", "--vocab", "4096"),
]
CPU = ["--hardware", "cpu", "--dtype", "float32"]
LLAMA = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 768, "vocab_size": 4096, "head_dim": None,
}  # fmt: skip


def plan(capsys, *arguments: str) -> dict:
    assert cli.main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def estimated(*arguments: str) -> Estimate:
    """What the command estimates, without its searches and advice, which take most of its time."""
    options = cli._parser().parse_args(["plan", *arguments])
    return estimate(make_request(options, lambda what: None).setting)


def refused(capsys, *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err


def test_a_known_case(capsys):
    found = plan(capsys, *SIZES, *CPU, "--tokens", "4096", "--devices", "4", "--zero-stage", "1")
    assert (found["devices"], found["ring_size"], found["local_tokens"]) == (4, 4, 1024)
    assert (found["layout"], found["zero_stage"], found["dtype"]) == ("zigzag", 1, "float32")
    assert found["parameters"] == 5_245_184
    assert found["memory"]["peak_bytes"] == sum(found["memory"]["components"].values())
    assert found["memory"]["peak_bytes"] == max(found["memory"]["moments"].values())
    # each rank sends three quarters of an all-gather's K/V forward (zigzag, causal), of 2 heads
    assert found["attention"]["forward_bytes_sent"] <= 2 * 2 * 64 * 4 * 3 * 1024
    assert found["step"]["total_s"] > 0 and found["ranks_looked_at"] == 4


def test_a_config_json_is_the_same_as_sizes(capsys, tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    common = [*CPU, "--tokens", "2048", "--devices", "2"]
    expected = plan(capsys, *SIZES, *common)
    assert plan(capsys, "--hf-config", str(path), *common) == expected
    assert plan(capsys, "--hf-config", json.dumps(LLAMA), *common) == expected


def test_a_deepspeed_json_gives_sizes_stage_dtype_and_pattern(capsys, tmp_path: Path):
    path = tmp_path / "ds.json"
    section = {"pattern": {"window": 512}, "layout": "contiguous"}
    path.write_text(
        json.dumps(
            {
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
                "sequence_parallel_size": 4,
                "ring_attention": section,
            }
        )
    )
    common = [*SIZES, "--hardware", "cpu", "--tokens", "4096", "--config", str(path)]
    found = plan(capsys, *common)
    assert (found["ring_size"], found["zero_stage"], found["dtype"]) == (4, 2, "bfloat16")
    assert (found["layout"], found["pattern"]) == ("contiguous", "SlidingWindow(window=512, causal=True)")
    data_parallel = plan(capsys, *common, "--devices", "8", "--zero-stage", "0")
    assert (data_parallel["devices"], data_parallel["ring_size"], data_parallel["zero_stage"]) == (8, 4, 0)


def test_what_is_left_out_is_searched(capsys):
    fewest = plan(capsys, *SIZES, *CPU, "--tokens", "40000")
    assert fewest["memory"]["fits"] and fewest["devices"] == fewest["fewest_devices"] > 1
    longest = plan(capsys, *SIZES, *CPU, "--devices", "2", "--zero-stage", "0")
    assert longest["tokens"] == longest["longest_tokens"] and longest["memory"]["fits"]


def test_a_run_that_does_not_fit_is_warned_of(capsys):
    found = plan(capsys, *SIZES, *CPU, "--tokens", "1000000", "--devices", "2")
    assert not found["memory"]["fits"]
    assert any(
        "does not fit" in warning and "tokens fit 2 devices" in warning for warning in found["warnings"]
    )


def test_transfers_that_do_not_hide_are_warned_of(capsys):
    found = plan(capsys, *SIZES, *CPU, "--tokens", "1024", "--devices", "4")
    hides = found["hiding_tokens_per_rank"]
    assert hides > 256
    assert any(f"from {hides:,} tokens a device on they hide" in warning for warning in found["warnings"])
    enough = plan(capsys, *SIZES, *CPU, "--tokens", str(4 * hides), "--devices", "4")
    assert not any("do not hide" in warning for warning in enough["warnings"])


def test_ulysses_splits_heads(capsys):
    found = plan(capsys, *SIZES, *CPU, "--tokens", "4096", "--devices", "4", "--ulysses-size", "2")
    assert (found["ring_size"], found["ulysses_size"], found["local_tokens"]) == (2, 2, 2048)


def test_tables_for_people(capsys):
    pattern = '{"segment_lengths": [256, 1024], "dilation_rates": [1, 4]}'
    arguments = [*SIZES, *CPU, "--tokens", "4096", "--devices", "2", "--pattern", pattern]
    assert cli.main(["plan", *arguments]) == 0
    printed = capsys.readouterr().out
    for words in (
        "memory of a device",
        "optimizer states",
        "longest sequence",
        "fewest devices",
        "transfers hide",
    ):
        assert words in printed


LLAMA_8B = [
    *("--layers", "32", "--hidden", "4096", "--heads", "32", "--kv-heads", "8"),
    *("--intermediate", "14336", "--vocab", "128256", "--devices", "8", "--hardware", "h100"),
]


ALL_AUTO = {"long_sequence": "auto", "ulysses_size": 2}
OPTION_SETS = [  # arguments, and the JSON of --config
    (["--tokens", "1M"], ALL_AUTO),  # "auto" has attention on the host from 131,072 tokens a ring rank on
    (["--tokens", "256k"], ALL_AUTO),
    (["--tokens", "256k", "--fit", "--batch", "1"], {"long_sequence": {"offload_attention": "auto"}}),
    (["--tokens", "64k", "--batch", "2", "--dtype", "float16", "--zero-stage", "2"], {"prune": False}),
    (["--tokens", "64k", "--layout", "contiguous", "--offload-optimizer"], {"recompute_attention": 0.3}),
]


@pytest.mark.parametrize(("arguments", "section"), OPTION_SETS)
def test_the_printed_json_has_the_figures_that_are_printed(capsys, tmp_path: Path, arguments, section):
    """("auto" had attention on the host, in no line nor the JSON; --batch and --dtype were left out.)"""
    path, printed = tmp_path / "ds.json", tmp_path / "printed.json"
    whole = {"bf16": {"enabled": True}, "train_batch_size": 8, "sequence_parallel_size": 8}
    whole |= {"zero_optimization": {"stage": 3}, "ring_attention": section}
    path.write_text(json.dumps(whole))
    common = ["--hf-config", "llama-3-8b", "--hardware", "h100", "--devices", "16"]
    first = plan(capsys, *common, *arguments, "--config", str(path))
    printed.write_text(json.dumps(first["deepspeed_json"]))
    script = ["--activation-checkpointing"] * first["activation_checkpointing"]  # a line after the JSON
    again = plan(capsys, *common, *arguments[:2], *script, "--config", str(printed))
    differing = {key for key in first if again[key] != first[key]}
    # next sets are those of --fit alone
    assert differing <= {"with_fit_options", "roomier_set"}, [(first[key], again[key]) for key in differing]
    assert (first["offload_attention"] is True) == (arguments[1] == "1M")
    # (A JSON with the samples of a step alone was planned with one of them.)
    assert first["batch"] == int(dict(pairwise(arguments)).get("--batch", 4))
    batch = first["deepspeed_json"]
    steps = batch["gradient_accumulation_steps"]
    assert batch["train_batch_size"] == 8 == first["batch"] * steps * 2  # replicas


@pytest.mark.night
def test_every_line_of_the_annotated_report_is_in_one(capsys):
    section = (ROOT / "launcher/README.md").read_text().split("### A report, line by line")[1].split("## ")[0]
    lines = [
        line for row in re.findall(r"(?m)^\| (`.+?) \|", section) for line in re.findall("`([^`]+)`", row)
    ]
    assert len(lines) > 12
    # Accumulators are in the table where attention is the highest moment.
    flags = ["--tiled-loss", "--tiled-mlp", "--offload-checkpoints", "--recompute-attention"]
    for options in (flags, ["--fit", "--compare"]):
        assert cli.main(["plan", *LLAMA_8B, "--tokens", str(1 << 20), *options]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert [line for line in lines if line not in printed] == []
    limit = r"\(limit: the (device|host)'s memory( and the host's memory)?\)"
    seconds = "[0-9,.]+ s a step"
    longest = f"[0-9,]+ tokens with these options, {seconds} {limit};"
    longest += f" [0-9,]+ with these and --[a-z -]+ on ring 8 x Ulysses 1 x data 1, {seconds} {limit}"
    assert re.search(f"longest sequence on ring .*: {longest}", printed)
    fewest = r"fewest devices .*: 8 \(ring 1 x Ulysses 8 x data 1\) with these options, "
    assert re.search(fewest + seconds, printed)
    assert "these options: --tiled-loss --activation-checkpointing --offload-checkpoints highest" in printed
    assert "DeepSpeed Ulysses: --tiled-loss" in printed and "ALST: --tiled-loss --tiled-mlp" in printed
    assert "ds_ring, longest: --tiled-loss --tiled-mlp" in printed
    assert "and in the script: model.gradient_checkpointing_enable()" in printed


def test_every_figure_names_its_options_and_other_methods_have_the_same(capsys):
    """(Longest sequences and fewest devices of --fit assumed four more options than the JSON beside them.)"""
    found = plan(capsys, *LLAMA_8B, "--tokens", str(1 << 20), "--fit", "--compare")
    flags = ["--tiled-loss", "--activation-checkpointing", "--offload-checkpoints"]
    own, *others = found["compared"]
    assert own["options"] == flags and own["longest_tokens"] == found["longest_tokens"]
    longest = found["with_fit_options"]
    assert longest["longest_tokens"] > 3 * own["longest_tokens"]
    assert longest["longest_split"] == "ring 8 x Ulysses 1 x data 1"
    assert set(longest["longest_options"]) > set(flags)
    for row in others:
        assert set(flags) <= set(row["options"]), row
    # each longest sequence fits with its options, and what is longer does not
    small = [*LLAMA_8B, "--ulysses-size", "8", "--tokens", str(own["longest_tokens"]), *flags]
    assert estimated(*small).fits
    assert not estimated(*small, "--tokens", str(int(1.05 * own["longest_tokens"]))).fits
    more = [*LLAMA_8B, "--tokens", str(longest["longest_tokens"]), *longest["longest_options"]]
    assert estimated(*more).fits
    fewer = [*LLAMA_8B, "--tokens", str(1 << 20), "--devices", str(longest["fewest_devices"])]
    assert estimated(*fewer, *longest["fewest_options"]).fits
    assert found["fewest_devices"] > longest["fewest_devices"]


def test_what_does_not_fit_with_all_options_is_told_what_would(capsys):
    """(With --fit no change was known, beside the number of devices that fit.)"""
    arguments = [*SIZES, *CPU, "--devices", "2", "--tokens", "800000"]
    found = plan(capsys, *arguments, "--fit")
    assert not found["memory"]["fits"] and found["with_fit_options"]["longest_tokens"] < 800000
    assert "both with the options of --fit" in found["warnings"][0]


@pytest.mark.parametrize(
    ("layers", "vocab", "words"),
    [("1", "16", "1,304 parameters"), ("32", "4096", "million parameters"), ("32", "8000000", "billion")],
)
def test_small_models_have_a_size(capsys, layers, vocab, words):
    sizes = {"1": ["--hidden", "8"], "32": ["--hidden", "128"]}[layers]
    arguments = ["--layers", layers, *sizes, "--heads", "2", "--vocab", vocab, *CPU]
    assert cli.main(["plan", *arguments, "--tokens", "64", "--devices", "2"]) == 0
    printed = capsys.readouterr().out
    assert words in printed and "0.00" not in printed.split("parameters")[0]
    assert "MiB" in printed


def test_help_has_every_hardware_and_the_default(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{', '.join(known_hardware())}, or a YAML file; default: h100" in printed


def test_nothing_fits(capsys, tmp_path: Path):
    path = tmp_path / "tiny.yaml"
    cpu = Path(__file__).resolve().parents[2] / "configs/hardware/cpu.yaml"
    path.write_text(cpu.read_text().replace("4_000_000_000", "1_000_000"))
    small = [*SIZES, "--dtype", "float32", "--hardware", str(path)]
    assert "none up to 16384" in refused(capsys, *small, "--tokens", "4096")
    assert "expected a length that fits 2 devices" in refused(capsys, *small, "--devices", "2")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"zero_optimization": 3}, "zero_optimization: expected an object {...}, got 3; correct it"),
        ({"zero_optimization": {"stage": 4}}, "stage: expected a number from 0 to 3, got 4"),
        ({"zero_optimization": {"stage": True}}, "stage: expected a number from 0 to 3, got true"),
        ({"zero_optimization": {"stage": 2, "overlap_comm": "yes"}},
            'zero_optimization.overlap_comm: expected true or false, got "yes"; write it without quotes'),
        ({"zero_optimization": {"offload_param": "cpu"}},
            "zero_optimization.offload_param: expected an object {...}, got cpu"),
        ({"train_micro_batch_size_per_gpu": 0}, "size_per_gpu: expected a number from 1 to 1,048,576"),
        ({"bf16": {"enabled": "auto"}}, 'bf16.enabled: expected true or false, got "auto"; give --dtype'),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4},
            "train_batch_size: expected 4 (1 a replica x 4 steps x 1 replicas), got 8"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            'offload_optimizer.device: expected "cpu" or "none", got "nvme"'),
    ],
)  # fmt: skip
def test_a_wrong_deepspeed_json_is_refused(capsys, tmp_path: Path, config, says):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"sequence_parallel_size": 2, "ring_attention": {}} | config))
    options = ["--tokens", "64", "--devices", "2", "--config", str(path)]
    assert says in refused(capsys, *SIZES, *options)


def test_micro_batches_of_a_step_take_memory(capsys, tmp_path: Path):
    """(ZeRO 1 with eight micro-batches fitted a sequence without the gradients of seven.)"""
    path, peaks = tmp_path / "ds.json", []
    config = {"ring_attention": {}, "sequence_parallel_size": 8, "bf16": {"enabled": True}}
    config |= {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    for steps in (1, 8):
        path.write_text(json.dumps(config | {"gradient_accumulation_steps": steps}))
        arguments = ["--config", str(path), "--tokens", "131072", "--activation-checkpointing"]
        found = plan(capsys, *LLAMA_8B, *arguments)
        peaks.append(found["memory"]["peak_bytes"])
    assert peaks[1] - peaks[0] == pytest.approx(16e9, rel=0.05)  # all gradients in bfloat16
    assert not found["memory"]["fits"]


def test_a_size_of_a_config_json_that_is_no_number_is_refused(capsys):
    wrong = json.dumps(LLAMA | {"num_key_value_heads": "two"})
    words = '--hf-config: num_key_value_heads: expected a whole number or null, got "two"'
    assert words in refused(capsys, "--hf-config", wrong, *CPU, "--tokens", "64", "--devices", "2")


def test_what_is_not_estimated_is_refused(capsys, tmp_path):
    path, section = tmp_path / "ds.json", {"transport": "reproducible"}
    path.write_text(json.dumps({"sequence_parallel_size": 2, "ring_attention": section}))
    assert cli.main(["plan", *SIZES, "--tokens", "64", "--devices", "2", "--config", str(path)]) == 2
    assert "plan computes ring passes: leave the key out" in capsys.readouterr().err


def test_larger_rings_that_are_left_out_are_named(capsys):
    """(--more-devices left them out without a word.)"""
    found = plan(capsys, *SIZES, *CPU, "--tokens", "32", "--devices", "8", "--more-devices")
    rings = [row["devices"] for row in found["more_devices"] if row["sequences_per_step"] == 1]
    assert rings == [8, 16, 24, 32]
    assert any("a larger ring on 64 devices is left out" in warning for warning in found["warnings"])

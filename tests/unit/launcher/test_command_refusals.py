"""Refusals of commands that no probe of tests/cli_probes.py meets: of options together, of this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds_ring_launcher import cli
from ds_ring_launcher.cluster import cluster
from ds_ring_launcher.commands import parsers
from tests.unit.test_launcher import LOCAL, folder  # noqa: F401  a fixture

TUNE = ["--tokens", "4096", "--heads", "4", "--head-dim", "64", "--processes", "2"]
REFUSED = {
    "sbatch of another engine": (["launch", "cluster.yaml", "--sbatch"], "--sbatch: expected engine: slurm"),
    "a misspelt command": (["lanch", "cluster.yaml"], "got 'lanch'; did you mean 'launch'?"),
    "an option of the script": (["launch", "cluster.yaml", "--steps", "3"],
        "got --steps 3; options of the script come after --: ds-ring launch FILE -- --steps 3"),
    "a misspelt option": (["plan", "--hf-confg", "llama-3-8b"],
        "expected no other arguments, got --hf-confg llama-3-8b; did you mean '--hf-config'?"),
    "a misspelt option of launch": (["launch", "cluster.yaml", "--dry-rum"], "did you mean '--dry-run'?"),
    "an option too many": (["configs", "there", "--steps"], "got --steps; leave it out"),
    "a misspelt key of slots": (["launch", "slot.yaml"], "slot: expected a known key, got the unknown key"),
    "no model": (["check-model"],
        "model: expected a configuration, a model type or --all, and one of them only"),
    "a model and all": (["check-model", "llama", "--all"], "one of them only"),
    "no jobs": (["check-model", "--all", "--jobs", "0"], "--jobs: expected 1 to 64, got 0"),
    "a model that is none": (["check-model", "nosuchmodel"], "expected"),
    "a model without such a head": (["check-model", "vit", "--head", "causal-lm"],
        "expected the head causal-lm, got none"),
    "too few tokens for two ranks": (["check-model", "llama", "--tokens", "3"],
        "--tokens: expected at least 4, got 3"),
    "a seed below 0": (["check-model", "llama", "--seed", "-1"], "--seed: expected at least 0, got -1"),
    "too many ranks": (["check-model", "llama", "--ring-size", "65"],
        "--ring-size: expected 1 to 64 ranks of this machine, got 65"),
    "two dashes for a value": (["plan", "--devices=--"], "--devices: expected a value, got '--'"),
    "a blank": (["plan", "--hf-config", " "], "--hf-config: expected a word, got ' '"),
    "too large a number": (["check-model", "llama", "--seed", "9" * 20],
        "--seed: expected a number of at most"),
    "no number": (["check-model", "llama", "--deadline-seconds", "x"],
        "--deadline-seconds: expected a number, got 'x'"),
    "a number without end": (["check-model", "llama", "--deadline-seconds", "inf"], "got 'inf'"),
    "more memory than there is": (["tune", *TUNE, "--tokens", str(2**30), "--heads", "4096"],
        "--tokens x --heads x --head-dim: expected at most this machine's"),
    "no heads to compare": (["compare", "--tokens", "64", "--gpus", "2", "--heads", "4"],
        "expected --hf-config, or --heads and --head-dim, got neither"),
    "latents to compare": (["compare", "--tokens", "64", "--gpus", "2", "--hf-config", "deepseek_v32_small"],
        "kv_lora_rank: expected attention with K/V heads, got \"latents\"; give --heads and --head-dim"),
    "no folder": (["verify-checkpoint", "nowhere"],
        'expected save_checkpoint\'s folder, got "nowhere", no folder'),
    "a folder of 300 letters": (["verify-checkpoint", "x" * 300], "no folder"),
    "accept without a tag": (["verify-checkpoint", ".", "--accept"], "--accept: expected --tag with it"),
    "a ring that does not divide": (["resize-checkpoint", ".", "--world-size", "4", "--ring-size", "3"],
        "--ring-size: expected a divisor of --world-size 4, got 3"),
    "no GPU": (["tune", *TUNE, "--device", "cuda"], "local rank 1: expected at least 2 GPUs, got 0"),
    "configs below a file": (["configs", "train.py/out"],
        "FOLDER: expected a folder to write to, got train.py/out"),
    "a number of 31 digits": (["launch", "long.yaml"],
        "expected a number of at most 30 digits, got a longer one"),
    **{
        f"more words for {words.split()[0]}": ([*words.split(), "--", "more"],
            f"{words.split()[0]}: expected nothing after --, got more")
        for words in (
            "configs", "doctor", "status x", "compare --tokens 8 --gpus 2", "check-model x",
            "verify-checkpoint x", "resize-checkpoint x --world-size 2",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(("argv", "words"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(folder)
    (folder / "cluster.yaml").write_text(LOCAL)
    (folder / "slot.yaml").write_text(LOCAL.replace("slots", "slot"))
    (folder / "long.yaml").write_text(LOCAL + f"environment: {{A: {10**30}}}\n")
    try:
        status = cli.main(argv)
    except SystemExit as end:  # argparse's own
        status = end.code
    assert status == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.match(r"ds-ring[\w -]*: error: ", said) and words in said


def test_packages_that_are_not_installed_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parsers, "find_spec", lambda name: None)
    assert cli.main(["check-model", "llama"]) == 2
    assert "check-model: expected transformers, got no transformers" in capsys.readouterr().err


def test_an_error_that_is_not_of_the_output_is_not_hidden() -> None:
    with pytest.raises(FileNotFoundError):
        cli._cannot_print(FileNotFoundError(2, "No such file or directory"))


def test_half_of_a_character_is_refused_where_yaml_lets_it_through() -> None:
    with pytest.raises(ValueError, match="expected text in UTF-8, got half of a character"):
        cluster._text("\ud800")

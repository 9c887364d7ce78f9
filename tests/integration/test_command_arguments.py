"""What commands that compute say of wrong options: one sentence, exit status 2, no result; and their help.

Options of every wrong kind, one by one, are tests/cli_probes.py's; here are the words.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_ring_launcher import cli

ATTENTION = ["--tokens", "500", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
MODEL = ["--layers", "4", "--hidden", "256", "--heads", "4", "--kv-heads", "2", "--vocab", "4096"]
COMMANDS = {
    "simulate": ATTENTION,
    "plan": [*MODEL, "--intermediate", "768", "--tokens", "64"],
    "tune": ["--tokens", "4096", "--heads", "4", "--head-dim", "64", "--processes", "2"],
}
ALL = "simulate plan tune"
# The commands, their options, and what is said of them.
REFUSED: list[tuple[str, list[str], str]] = [
    (ALL, ["--tokens", "0"], "--tokens: expected a number of at least 1, got 0"),
    (ALL, ["--pattern", "{window: 3}"], "--pattern: not JSON: "),
    (ALL, ["--pattern", '{"windw": 4}'], "'windw'; did you mean 'window'?"),
    (ALL, ["--pattern", "[1]"], "--pattern: expected a JSON object {...} at the top level, got [1]"),
    (ALL, ["--config", "no_such.json"], "no_such.json: the file does not exist"),
    (ALL, ["--", "more"], "expected nothing after --, got more"),
    ("simulate", ["--kv-heads", "3"], "query heads: expected a multiple of K/V heads, got 4 and 3"),
    ("simulate", ["--ring-sizes", "-2"], "--ring-sizes: expected a number of at least 1, got -2"),
    ("simulate", ["--layout", "zigzig"], "got 'zigzig'"),
    ("simulate", ["--pattern", '{"documents": true}'], 'without "documents"'),
    ("simulate", ["--pattern", "{}", "--config", "x.json"], "--pattern or --config, got both"),
    ("simulate", ["--chunk-bytes", "0"], "--chunk-bytes: expected a number of at least 1, got 0"),
    ("tune", ["--threads", "0"], "--threads: expected a number of at least 1, got 0"),
    ("simulate", ["--layout", "residue"], "residue"),
    ("simulate", ["--check", "0"], "--check: expected at least 1 row, got 0"),
    ("simulate", ["--seed", "-1"], "seed: expected 0 to 2^64 - 1, got -1"),
    ("plan", ["--hardware", "h10"], "did you mean 'h100'"),
    ("plan", ["--layout", "zigzak"], 'did you mean "zigzag"'),
    ("plan", ["--devices", "6", "--ring-size", "4"], "--devices: expected a multiple"),
    ("plan", ["--devices", "4", "--ulysses-size", "4"], "divisor of 2 K/V heads"),
    ("plan", ["--hf-config", "x.json"], "expected no sizes with it, got --layers"),
    ("plan", ["--heads", "3"], "hidden: expected a multiple of 3 heads, got 256"),
    ("plan", ["--recompute-attention"], "--recompute-attention: expected activation checkpointing, and no"),
    ("plan", ["--ring-size", "65536", "--ulysses-size", "2"], "expected at most 65,536 ranks, got 131072"),
    ("tune", ["--processes", "-2"], "processes: expected a number of at least 1, got -2"),
    ("tune", ["--kv-heads", "3"], "a divisor of 4 heads, got 3; use one of 1, 2, 4"),
    ("tune", ["--pattern", '{"window": 0}'], "window: expected a whole number of at least 1, or null, got 0"),
    ("tune", ["--hardware-output", "."], "--hardware-output .: expected a file in a folder"),
    ("tune", ["--hardware-output", "no/folder/x.yaml"], "--hardware-output no/folder/x.yaml: expected"),
    ("tune", ["--dtype", "int8"], "dtype: expected one of float32, bfloat16, float16, got 'int8'"),
    ("tune", ["--device", "tpu"], "device: expected one of cpu, cuda, got 'tpu'"),
    ("tune", ["--deadline-seconds", "0"], "--deadline-seconds: expected a number above 0"),
]
ROWS = [(command, *row) for commands, *row in REFUSED for command in commands.split()]


@pytest.mark.parametrize(("command", "arguments", "words"), ROWS)
def test_it_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, arguments: list[str], words: str
) -> None:
    assert cli.main([command, *COMMANDS[command], *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("ds-ring: error: ") and words in printed.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "got no --layers, --hidden, --heads, --vocab"),
        (MODEL, "expected --tokens, --devices or both, got neither"),
        (["--hf-config", "/no/such.json", "--tokens", "64"], "does not exist"),
        (
            ["--hf-config", '{"hidden_siz": 4}', "--tokens", "64"],
            "num_hidden_layers: expected a whole number",
        ),
        (["--hf-config", '{"hidden', "--tokens", "64"], "--hf-config: not JSON: "),
    ],
)
def test_a_model_that_is_none(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert cli.main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "ds-ring launch configs/quickstart.yaml"),
        ("launch", "ds-ring launch configs/quickstart.yaml"),
        ("simulate", "ds-ring simulate --tokens 65536 --pattern"),
        ("tune", "--hardware-output"),
    ],
)
def test_help_has_examples(capsys: pytest.CaptureFixture[str], command: str, words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])
    assert ended.value.code == 0 and words in capsys.readouterr().out

"""What `ds-ring check-model` prints and with which status it ends; of a ring of one, which needs no peer."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from ds_ring_launcher import cli
from ds_ring_launcher.check.small_model import HEADS
from ds_ring_launcher.commands.check_model import _SHOWN, _check_all, _text

LLAMA = ["check-model", "llama", "--ring-size", "1", "--tokens", "8", "--layers", "1"]


def test_a_model_is_exact_and_with_another_mask_it_is_not(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(LLAMA) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("exact: LlamaForCausalLM, 1 layers, 8 tokens, 1 ranks\n")
    assert "\n  largest relative errors: loss " in printed
    assert "\n  rounding of one process (float64): loss " in printed
    path, section = tmp_path / "ds.json", {"pattern": {"window": 4}}
    path.write_text(json.dumps({"sequence_parallel_size": 1, "ring_attention": section}))
    assert cli.main([*LLAMA, "--json", "--config", str(path)]) == 1  # of another mask than the model's
    report = json.loads(capfd.readouterr().out)
    assert (report["result"], report["shape"], report["seed"]) == ("WRONG", "1x8x1", 0)
    assert report["section"] == section | {"ring_size": 1}


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({"vocab_size": 20}, "float64"),  # (an index out of range)
        (
            {"model_type": "mistral", "sliding_window": 6},
            "moved weights",
        ),  # (float64 had NaN: "inf is allowed")
    ],
)
def test_small_vocabularies_and_padded_windows_are_checked(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any], measured: str
) -> None:
    sizes = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(sizes | changes))
    words = ["check-model", str(tmp_path), "--ring-size", "1", "--tokens", "32"]
    assert cli.main([*words, "--batch", "packed", "--layers", "1"]) == 0
    printed = capfd.readouterr().out
    assert f"rounding of one process ({measured}): " in printed and "inf" not in printed, printed


def test_ranks_that_do_not_end_are_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*LLAMA, "--deadline-seconds", "0.001"]) == 1
    assert capfd.readouterr().out.startswith("WRONG: llama: expected all ranks to end within 0.001 s, got 1")


REPORT: dict[str, Any] = {
    "source": "bert", "model": "Bert", "result": "exact", "reason": "", "layers": 2,
    "tokens": 61, "ring_size": 2,
    "largest": {"loss": {"error": 0.25, "name": ""}, "layer": {"error": 0.5, "name": "layers.1"}},
    "rounding": {"loss": {"error": 0.125}}, "measured": "moved weights", "tipped": [], "eager_differs": "",
    "in_float64": "", "differences": [],
}  # fmt: skip
TIP = {"kind": "logits", "name": "", "error": 0.5}
MANY = [{"kind": "gradient", "name": f"w{number}", "error": 0.5} for number in range(_SHOWN + 2)]


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, ["exact: Bert, 2 layers, 61 tokens, 2 ranks",
              "  largest relative errors: loss 2.5e-01, layer 5.0e-01 layers.1",
              "  rounding of one process (moved weights): loss 1.2e-01; 10 times that is allowed"]),
        ({"result": "refused", "reason": "why"}, ["refused: Bert: why"]),
        ({"result": "WRONG", "reason": "crash", "model": ""}, ["WRONG: bert: crash"]),
        ({"tipped": [TIP], "in_float64": "exact"},
            ["  a threshold that rounding tips on one process, too: logits  by 5.0e-01",
             "  a ring in float64, where nothing is near it: exact"]),
        ({"eager_differs": "layer layers.0"},
            ["  the model's eager attention, not compared, differs: layer layers.0"]),
        ({"result": "WRONG", "differences": MANY},
            ["WRONG: Bert, 2 layers, 61 tokens, 2 ranks", f"  gradient w{_SHOWN - 1}: 5.0e-01",
             "  and 2 more; --json has all"]),
    ],
    ids=["exact", "refused", "a crash", "tipped", "eager", "differences"],
)  # fmt: skip
def test_a_report_is_told_in_lines(changes: dict[str, Any], lines: list[str]) -> None:
    printed = _text(REPORT | changes).split("\n")
    assert [line for line in lines if line not in printed] == []
    assert f"  gradient w{_SHOWN}: 5.0e-01" not in printed


@pytest.mark.parametrize("as_json", [False, True])
def test_all_types_have_a_row_and_one_that_is_wrong_a_status(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    head, options = "speech-seq2seq-lm", Namespace(jobs=2, json=as_json)

    def check(source: str) -> dict[str, Any]:
        result = {"whisper": "WRONG", "moonshine": "refused"}.get(source, "exact")
        return {"source": source, "result": result, "reason": "two\n words" if result == "refused" else ""}

    assert _check_all(check, head, options) == 1
    rows = capsys.readouterr().out.splitlines()
    types = sorted(HEADS[head].families)
    if as_json:
        reports = [json.loads(row) for row in rows]
        assert [(report["source"], report["head"]) for report in reports] == [(name, head) for name in types]
        return
    assert "WRONG     whisper" in rows and "refused   moonshine: two words" in rows
    assert [row.split()[1].rstrip(":") for row in rows[:-1]] == types
    assert rows[-1].startswith(f"{len(types)} model types ({head}, transformers ")
    assert rows[-1].endswith(f": {len(types) - 2} exact, 1 refused, 0 no model, 1 WRONG")
    assert _check_all(lambda source: {"source": source, "result": "exact", "reason": ""}, head, options) == 0

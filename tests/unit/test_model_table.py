"""Whether the table of model types has the worst of each type's results, and a newer version is seen."""

from __future__ import annotations

import json

import model_table
import pytest

ABOUT = {"transformers": "5.24.0", "head": "causal-lm", "date": "2026-11-26", "reason": "", "tipped": []}
INDEX = "transformers (5.24.1)\nAvailable versions: 5.24.1, 5.24.0\n"


def row(source, result, **others):
    return ABOUT | {"source": source, "result": result} | others


def test_a_type_has_the_worst_of_its_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(model_table, "RESULTS", tmp_path)
    runs = [
        [row("llama", "exact"), row("xlnet", "refused", reason="it | adds\nscores"), row("t5", "invalid")],
        [row("llama", "exact", tipped=[{}]), row("xlnet", "exact"), row("mpt", "WRONG", reason="2 differ")],
    ]
    files = [tmp_path / f"{number}.jsonl" for number in range(2)]
    for file, reports in zip(files, runs, strict=True):
        file.write_text("".join(json.dumps(one) + "\n" for one in reports))
    asked = ["--read", *map(str, files), "--seeds", "0", "1", "--commit", "abc"]
    assert model_table.main(asked) == 1
    text = (tmp_path / "models_5.24.0_causal-lm.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    assert "4 types: 1 exact, 1 refused, 1 no small model, 1 WRONG." in text
    assert "seed 0 and 1, 2026-11-26, commit abc" in text and "tips a threshold of llama" in text
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert rows == [
        "| mpt | WRONG | 2 differ |", "| t5 | no small model |  |", "| xlnet | refused | it / adds scores |",
        "| llama | exact | |",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tables", "newer"),
    [(["models_5.24.0_causal-lm"], None), (["models_5.23.0_causal-lm"], "5.24.1"), ([], "5.24.1")],
)
def test_a_newer_minor_version_is_seen(tables, newer):
    assert model_table.newer_than_tables(INDEX, tables) == newer


def test_an_index_that_does_not_answer_is_told():
    with pytest.raises(SystemExit, match="expected a version of transformers"):
        model_table.newest_in("")

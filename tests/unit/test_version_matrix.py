"""The matrix of versions: what ends in a cell does not end the command, and the table has all of it."""

from __future__ import annotations

import ast
import json
import symtable
import sys
from pathlib import Path
from typing import Any

import pytest
import version_cells
import version_matrix


def result(row: str, cell: str, verdict: str, reason: str = "") -> dict[str, Any]:
    return {
        "row": row,
        "cell": cell,
        "verdict": verdict,
        "reason": reason,
        "date": "2026-11-28",
        "commit": "abc",
    }


def test_an_error_in_a_cell_is_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> version_cells.Cell:
        raise RuntimeError(f"no\n{name}")

    def refuse(name: str) -> version_cells.Cell:
        raise version_cells.RefusedError("RingConfigError: not here")

    monkeypatch.setattr(version_cells, "check_family", fail)
    monkeypatch.setattr(version_cells, "check_stage", refuse)
    wrong, refused = version_cells.check_cells(["llama", "zero1"])
    assert wrong[:3] == ("llama", "WRONG", "RuntimeError: no llama")
    assert refused[:3] == ("zero1", "refused", "RingConfigError: not here")


@pytest.mark.parametrize(("end", "seconds"), [("os._exit(3)", 60.0), ("time.sleep(60)", 1.0)])
def test_a_process_that_ends_abruptly_leaves_its_other_cells_wrong(
    tmp_path: Path, end: str, seconds: float
) -> None:
    line = json.dumps({"cell": "llama", "verdict": "exact", "reason": "", "seconds": 1.0})
    interpreter = tmp_path / "python"  # in place of the environment's
    program = f"import os, time; print('noise'); print({line!r}, flush=True); {end}"
    interpreter.write_text(f"#!{sys.executable}\n{program}\n")
    interpreter.chmod(0o755)
    got = version_matrix.compare(interpreter, ["llama", "qwen3", "bert"], tmp_path / "log", seconds)
    assert [entry["verdict"] for entry in got] == ["exact", "WRONG", "WRONG"]
    assert "the command ended" in got[1]["reason"]


def test_an_environment_that_cannot_be_made_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"bad": version_matrix.Row("DeepSpeed", {"deepspeed": "0"}, ("zero0", "zero1"))}
    monkeypatch.setattr(version_matrix, "ROWS", rows)
    got = version_matrix.try_row("bad", tmp_path, tmp_path / "no_such_environment")
    assert [entry["verdict"] for entry in got] == ["WRONG", "WRONG"]
    assert got[0]["reason"].startswith("no environment")


def test_a_later_run_of_a_row_replaces_an_earlier_one() -> None:
    first = [result("a", "zero0", "WRONG", "x"), result("b", "zero0", "exact")]
    merged = version_matrix.merge(first, [result("a", "zero0", "exact")])
    assert {(entry["row"], entry["verdict"]) for entry in merged} == {("a", "exact"), ("b", "exact")}


def test_the_table_has_verdicts_of_both_forms_reasons_and_dates() -> None:
    row = "transformers 4.56.2"
    text = version_matrix.make_table(
        [
            result(row, "llama", "exact"),
            result(row, "llama.packed", "WRONG", "Error: a | b"),
            result(row, "bert", "refused", "no"),
        ]
    )
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row}")]
    assert "exact; WRONG" in line and "2026-11-28, abc" in line
    assert f"- {row} llama.packed: WRONG: Error: a / b" in text and f"- {row} bert: refused: no" in text


def test_an_unknown_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"expected all, corners or rows .* got \['deepspeed 9'\]"):
        version_matrix.main(["--folder", str(tmp_path), "--rows", "deepspeed 9"])


def test_what_tools_take_from_tests_is_there() -> None:
    """A cell imports it when it runs, which it does at night."""
    root, missing = Path(version_matrix.ROOT), []
    for file in (root / "tools").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tests."):
                continue
            home = root / f"{node.module.replace('.', '/')}.py"  # type: ignore[union-attr]
            names = symtable.symtable(home.read_text(), str(home), "exec").get_identifiers()
            missing += [f"{file.name}: {node.module}.{x.name}" for x in node.names if x.name not in names]
    assert not missing


@pytest.mark.night
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("row", version_matrix.CORNERS)
def test_a_corner_is_exact_or_refused(row: str, tmp_path: Path) -> None:
    """Environments copied from this one: minutes a row. Needs an index of packages."""
    results = version_matrix.try_row(row, tmp_path, Path(sys.prefix))
    wrong = [entry for entry in results if entry["verdict"] == "WRONG"]
    if wrong and "no environment" in wrong[0]["reason"]:
        pytest.skip(wrong[0]["reason"])
    assert wrong == []

"""Whether the table of model types has the worst of each type's results, and a newer version is seen."""

from __future__ import annotations

import json

import model_table
import pytest

ABOUT = {"transformers": "5.24.0", "head": "causal-lm", "form": "plain", "date": "2026-11-26", "reason": ""}
INDEX = "transformers (5.24.1)\nAvailable versions: 5.24.1, 5.24.0\n"
RUNS = [(shape, seed) for shape in ("2x61x2", "3x100x3") for seed in (0, 1)]


def row(source, result="exact", shape="2x61x2", seed=0, **others):
    return ABOUT | {"source": source, "result": result, "shape": shape, "seed": seed} | others


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Return what makes the table of files of reports: its status and its text."""
    monkeypatch.setattr(model_table, "RESULTS", tmp_path)

    def made(*files):
        paths = [tmp_path / f"{number}.jsonl" for number in range(len(files))]
        for path, reports in zip(paths, files, strict=True):
            path.write_text("".join(json.dumps(one) + "\n" for one in reports))
        status = model_table.main(["--read", *map(str, paths), "--commit", "abc"])
        return status, next(tmp_path.glob("models_5.24.0_*.md")).read_text()

    return made


def rows_of(text):
    return [line for line in text.splitlines() if line.startswith("|")][2:]


def test_a_type_has_the_worst_of_its_results(table, capsys):
    refused = row("xlnet", "refused", reason="it | adds\nscores")
    status, text = table(
        [row("llama"), refused, row("t5", "invalid"), row("mpt")],
        [row("llama", seed=1, tipped=[{}]), row("xlnet", seed=1), row("t5", "invalid", seed=1)],
        [row("mpt", "WRONG", seed=1, reason="2 differ")],
    )
    assert status == 1
    assert capsys.readouterr().out.strip() == text.strip()
    assert "4 types: 1 exact, 1 refused, 1 no small model, 1 WRONG." in text
    assert "2026-11-26, commits abc (8 runs)." in text and "tips a threshold of llama" in text
    assert "Shapes (ranks x tokens x least layers): 2x61x2 with seed 0 and 1." in text
    assert rows_of(text) == [
        "| mpt | WRONG | seed 1 of 2x61x2: 2 differ |",
        "| t5 | no small model |  |",
        "| xlnet | refused | seed 0 of 2x61x2: it / adds scores |",
        "| llama | exact | |",
    ]


@pytest.mark.parametrize("wrong", RUNS)
def test_a_row_that_is_wrong_in_one_shape_is_found(table, wrong):
    """A seeded fault: of four runs of two types one is wrong."""
    files = [[row("bloom", shape=s, seed=n), row("llama", shape=s, seed=n)] for s, n in RUNS]
    assert table(*files)[0] == 0
    files[RUNS.index(wrong)][1] |= {"result": "WRONG", "reason": "2 differ"}
    status, text = table(*files)
    assert status == 1 and "2 types: 1 exact, 0 refused, 0 no small model, 1 WRONG." in text
    assert "2x61x2 with seed 0 and 1; 3x100x3 with seed 0 and 1." in text
    assert rows_of(text)[0] == f"| llama | WRONG | seed {wrong[1]} of {wrong[0]}: 2 differ |"


def test_a_type_that_lacks_a_shape_is_named(table):
    """A seeded fault: a type was run with one shape, its neighbour with two."""
    status, text = table([row("bloom"), row("llama"), row("llama", shape="3x100x3")])
    assert status == 1 and "Not run with seed 0 of 3x100x3: bloom.\n" in text


def test_a_type_that_was_run_again_has_its_last_report_and_commit(table):
    status, text = table(
        [row("bloom", commit="a1"), row("llama", "WRONG", commit="a1"), row("mpt", commit="a1")],
        [row("llama", commit="b2", date="2026-11-27")],
    )
    assert status == 0 and rows_of(text) == ["| bloom, llama, mpt | exact | |"]
    assert "2026-11-26 and 2026-11-27, commits a1 (2 runs), b2 (1 runs)." in text


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            [[{key: value for key, value in row("llama").items() if key != "shape"}]],
            "with its shape, got none",
        ),
        ([[row("llama")], [row("llama", form="packed")]], "of one version, head and form"),
        ([[]], "got no report"),
    ],
)
def test_reports_that_cannot_be_joined_are_refused(table, files, words):
    with pytest.raises(SystemExit, match=words):
        table(*files)


def test_a_shape_that_is_none_is_refused():
    with pytest.raises(SystemExit, match="expected RANKSxTOKENSxLAYERS, as 3x100x3, got '3x100'"):
        model_table.main(["--shapes", "3x100"])


@pytest.mark.parametrize(
    ("tables", "newer"),
    [(["models_5.24.0_causal-lm"], None), (["models_5.23.0_causal-lm"], "5.24.1"), ([], "5.24.1")],
)
def test_a_newer_minor_version_is_seen(tables, newer):
    assert model_table.newer_than_tables(INDEX, tables) == newer


def test_an_index_that_does_not_answer_is_told():
    with pytest.raises(SystemExit, match="expected a version of transformers"):
        model_table.newest_in("")

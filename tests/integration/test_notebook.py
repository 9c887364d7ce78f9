"""The notebook: its code cells run in their order, and what it stores of them is what they print and show."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT
from tests.notebook import (
    NOTEBOOK,
    digest_sources,
    find_stale,
    list_code,
    read_outputs,
    run_cells,
    store_outputs,
)

STORED = json.loads(NOTEBOOK.read_text())
MOST_PICTURE_BYTES = 40_000
DRAWN = """from ds_ring_launcher.plan.picture import Picture, new_figure
figure = new_figure(2, 2)
figure.subplots().plot([0, {height}, 1])
figure.savefig("curve.png")
Picture("curve.png")"""


def make_notebook(**sources: str) -> dict[str, Any]:
    cells = [
        {"cell_type": "code", "id": name, "source": [source], "outputs": []}
        for name, source in sources.items()
    ]
    return {"cells": cells, "metadata": {}}


@pytest.mark.slow
@pytest.mark.night
def test_the_stored_outputs_are_those_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = run_cells(STORED)
    assert not find_stale(STORED, outputs), "python -m tests.notebook"
    printed = "".join(output.text for output in outputs.values())
    assert "largest difference from one piece below 2e-6: True" in printed and "1,048,576 tokens" in printed
    stale = copy.deepcopy(STORED)
    (texts,) = [output for output in list_code(stale)["c2"]["outputs"] if "text" in output]
    texts["text"][-1] = texts["text"][-1].replace("5", "6", 1)
    pictures = [name for name, output in outputs.items() if output.png is not None]
    assert len(pictures) == 3
    list_code(stale)[pictures[2]]["outputs"] = list_code(stale)[pictures[1]]["outputs"]
    assert find_stale(stale, outputs) == ["c2", pictures[2]]


def test_no_code_is_newer_than_its_outputs() -> None:
    assert STORED["metadata"]["code_that_ran"] == digest_sources(STORED), "python -m tests.notebook"
    changed = copy.deepcopy(STORED)
    list_code(changed)["c2"]["source"][-1] += "  # changed"
    assert STORED["metadata"]["code_that_ran"] != digest_sources(changed)


def test_it_is_whole_and_small() -> None:
    assert len({cell["id"] for cell in STORED["cells"]}) == len(STORED["cells"])
    assert (STORED["nbformat"], STORED["nbformat_minor"]) == (4, 5)
    code, outputs = list_code(STORED), read_outputs(STORED)
    assert [cell["execution_count"] for cell in code.values()] == list(range(1, len(code) + 1))
    assert all(output.text or output.png for output in outputs.values())
    assert all(len(output.png) < MOST_PICTURE_BYTES for output in outputs.values() if output.png is not None)
    text = NOTEBOOK.read_text()
    assert str(ROOT) not in text and "/tmp/" not in text
    # Cells write pictures where the notebook is; what a reader sees is stored.
    assert not any("![" in "".join(cell["source"]) for cell in STORED["cells"])


def test_a_stale_output_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = {"first": "x = 3\nprint(x)", "silent": "x + 1\nNone", "drawn": DRAWN.format(height=3)}
    notebook = make_notebook(**cells)
    outputs = run_cells(notebook)
    assert outputs["first"].text == "3\n" and not any(outputs["silent"])
    store_outputs(notebook, outputs)
    assert not find_stale(notebook, outputs) and not find_stale(notebook, run_cells(notebook))
    for name, source in (
        ("first", "x = 4\nprint(x)"),
        ("drawn", DRAWN.format(height=2)),
        ("silent", "print(9)"),
    ):
        assert find_stale(notebook, run_cells(make_notebook(**cells | {name: source}))) == [name]
    list_code(notebook)["drawn"]["outputs"].clear()
    assert find_stale(notebook, outputs) == ["drawn"]


def test_a_cell_that_fails_is_named() -> None:
    with pytest.raises(ZeroDivisionError) as error:
        run_cells(make_notebook(seventh="1 / 0\n"))
    assert error.traceback[-1].path == "<cell seventh>"
    with pytest.raises(AssertionError, match="cell words: its last expression"):
        run_cells(make_notebook(words="'not a picture'"))

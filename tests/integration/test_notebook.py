"""The notebook: its code cells run in their order, as text, and it is committed without outputs."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT

NOTEBOOK = json.loads((ROOT / "configs/examples/plan.ipynb").read_text())


def run_cells(notebook: dict[str, Any]) -> str:
    """Run all code cells in one namespace and return what they print; the first that fails names itself."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"<cell {cell['id']}>", "exec"), names)
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.night
def test_the_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run_cells(NOTEBOOK)
    found = re.search(r"largest difference from one piece: (\S+)", printed)
    assert found and float(found[1]) < 2e-6
    assert "tokens" in printed and "1,048,576" in printed
    text = "".join(line for cell in NOTEBOOK["cells"] for line in cell["source"])
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert len(pictures) == 2
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_it_has_no_outputs_and_its_cells_have_names() -> None:
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in NOTEBOOK["cells"])
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)


def test_a_cell_that_fails_is_named() -> None:
    cells = [{"cell_type": "code", "id": "seventh", "source": ["1 / 0\n"]}]
    with pytest.raises(ZeroDivisionError) as error:
        run_cells({"cells": cells})
    assert error.traceback[-1].path == "<cell seventh>"

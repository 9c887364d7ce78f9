"""Run the cells of the notebook without a kernel, and store what they print and show.

Example:
    python -m tests.notebook
"""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import io
import json
import os
import tempfile
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from tests.documents import ROOT

NOTEBOOK = ROOT / "configs/examples/plan.ipynb"
PNG = "image/png"
COLORS = 48  # of a stored picture
MOST_DIFFERENCE = 1.0  # of 255, on average: runs of one code differ by 0.1, one point of a curve by 2


class CellOutput(NamedTuple):
    """Hold what a cell gives."""

    text: str  # that it prints
    png: bytes | None  # of its last expression, if that is a picture


def list_code(notebook: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the code cells by their names."""
    return {cell["id"]: cell for cell in notebook["cells"] if cell["cell_type"] == "code"}


def run_cells(notebook: dict[str, Any]) -> dict[str, CellOutput]:
    """Run all code cells in one namespace; a cell that fails has its name in the traceback."""
    names: dict[str, Any] = {}
    outputs = {}
    for name, cell in list_code(notebook).items():
        tree, shown = ast.parse("".join(cell["source"])), None
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, f"<cell {name}>", "exec"), names)
            if last is not None:
                shown = eval(compile(ast.Expression(last.value), f"<cell {name}>", "eval"), names)
        get_png = getattr(shown, "_repr_png_", None)
        png = get_png() if get_png else None
        assert shown is None or png is not None, f"cell {name}: its last expression is no picture"
        outputs[name] = CellOutput(printed.getvalue(), png)
    return outputs


def digest_sources(notebook: dict[str, Any]) -> str:
    """Return a digest of all code, by which a change after the last run is noticed."""
    return hashlib.sha256(
        json.dumps([cell["source"] for cell in list_code(notebook).values()]).encode()
    ).hexdigest()


def read_outputs(notebook: dict[str, Any]) -> dict[str, CellOutput]:
    """Return what is stored."""
    stored = {}
    for name, cell in list_code(notebook).items():
        pngs = [output["data"][PNG] for output in cell["outputs"] if "data" in output]
        text = "".join("".join(output["text"]) for output in cell["outputs"] if "text" in output)
        stored[name] = CellOutput(text, base64.b64decode(pngs[0]) if pngs else None)
    return stored


def store_outputs(notebook: dict[str, Any], outputs: dict[str, CellOutput]) -> None:
    """Put the outputs of a run into a notebook, pictures in few colours."""
    for number, (name, cell) in enumerate(list_code(notebook).items(), 1):
        output, cell["execution_count"], cell["outputs"] = outputs[name], number, []
        if output.text:
            lines = output.text.splitlines(keepends=True)
            cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": lines})
        if output.png is not None:
            small = io.BytesIO()
            Image.open(io.BytesIO(output.png)).convert("RGB").quantize(COLORS).save(
                small, "png", optimize=True
            )
            data = {PNG: base64.b64encode(small.getvalue()).decode()}
            cell["outputs"].append(
                {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}
            )
    notebook["metadata"]["code_that_ran"] = digest_sources(notebook)


def find_stale(notebook: dict[str, Any], outputs: dict[str, CellOutput]) -> list[str]:
    """Return the cells whose stored output is not that of a run."""
    stored = read_outputs(notebook)
    return [
        name
        for name, output in outputs.items()
        if stored[name].text != output.text or not _are_alike(stored[name].png, output.png)
    ]


def _are_alike(stored: bytes | None, shown: bytes | None) -> bool:
    """Compare pixels, as fonts and renderers of two machines differ a little."""
    if stored is None or shown is None:
        return stored is shown
    first, second = (np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), float) for png in (stored, shown))
    return first.shape == second.shape and float(np.abs(first - second).mean()) <= MOST_DIFFERENCE


def main() -> None:
    """Run the notebook in an empty folder and write its outputs."""
    notebook = json.loads(NOTEBOOK.read_text())
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        store_outputs(notebook, run_cells(notebook))
        os.chdir(ROOT)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""What a new pattern, layout, kernel, transport or layer touches: a file and a row; an integration: a file.

A copy of the package gets one of each (`additions/`), and nothing else. Two real ranks of the copy then run a
model by the names in the JSON, against float64; the copy's own architecture tests are run on the new files.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ADDITIONS = Path(__file__).parent / "additions"

# Each with its file, and the row that it takes: in which file, before which line, what.
TOUCHED: dict[str, tuple[str, tuple[str, str, str] | None]] = {
    "pattern": (
        "masks/block_causal.py",
        ("__init__.pyi", "from ds_ring.masks.catalog import Chunked",
            "from ds_ring.masks.block_causal import BlockCausal as BlockCausal"),
    ),
    "layout": (
        "layouts/mirrored.py",
        ("registry.py", '    "striped": ',
            '    "mirrored": LayoutRow("ds_ring.layouts.mirrored.make_mirrored"),'),
    ),
    "kernel": (
        "kernels/double.py",
        ("registry.py", '    "reference": KernelRow',
            '    "double": KernelRow("ds_ring.kernels.double.DoubleKernel"),'),
    ),
    "transport": (
        "transports/counted.py",
        ("registry.py", '    "ring": PassRow',
            '    "counted": PassRow("ds_ring.transports.counted.make_pass"),'),
    ),
    "layer": (
        "layers/neighbour_mean.py",
        ("__init__.pyi", "from ds_ring.layers.scan.halo import halo",
            "from ds_ring.layers.neighbour_mean import neighbour_mean as neighbour_mean"),
    ),
    "model integration": ("integrations/multihead.py", None),
}  # fmt: skip


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, changed as TOUCHED says, and the test of its architecture."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "ds_ring", folder / "ds_ring", ignore=shutil.ignore_patterns("__pycache__"))
    for name, row in TOUCHED.values():
        target = folder / "ds_ring" / name
        assert not target.exists()
        shutil.copy(ADDITIONS / target.name, target)
        if row is not None:
            changed, before, line = row
            lines = (folder / "ds_ring" / changed).read_text().splitlines()
            (place,) = (number for number, text in enumerate(lines) if text.startswith(before))
            (folder / "ds_ring" / changed).write_text("\n".join([*lines[:place], line, *lines[place:], ""]))
    (folder / "tests").mkdir()
    for name in ("pyproject.toml", "tests/__init__.py", "tests/test_architecture.py"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def test_a_file_and_a_row_are_all(copy: Path) -> None:
    before, after = (
        {path.relative_to(root).as_posix(): path.read_text().splitlines() for path in root.rglob("*.py[!c]")}
        | {path.relative_to(root).as_posix(): path.read_text().splitlines() for path in root.rglob("*.py")}
        for root in (ROOT / "ds_ring", copy / "ds_ring")
    )
    assert set(after) - set(before) == {name for name, _ in TOUCHED.values()}
    differing = {
        name: len(after[name]) - len(lines) for name, lines in before.items() if lines != after[name]
    }
    assert differing == {"__init__.pyi": 2, "registry.py": 3}  # a row each


def test_two_ranks_run_all_of_them_by_their_names(copy: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    reports = [tmp_path / f"report{rank}" for rank in range(2)]
    command = [sys.executable, str(ADDITIONS / "rank.py")]
    ranks = []
    for rank, report in enumerate(reports):
        arguments = [*command, str(rank), str(tmp_path / "store"), str(report)]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(subprocess.Popen(arguments, env=environment, cwd=copy, **output))
    try:
        said = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    for rank, report in enumerate(json.loads(path.read_text()) for path in reports):
        assert report["file"] == str(copy / "ds_ring/__init__.py")
        assert max(report["errors"]) < 1e-5, report
        assert report["first position"] == 32 * (1 - rank)
        assert report["passes of the kernel"] >= 2 * 2  # layers, forward and backward
        assert report["passes of the transport"] == 2 * 2
        assert report["public"] == ["ds_ring.masks.block_causal", "ds_ring.layers.neighbour_mean"]


@pytest.mark.night
def test_the_copy_keeps_to_the_architecture(copy: Path) -> None:
    chosen = " or ".join([*(Path(name).stem for name, _ in TOUCHED.values()), "public"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_architecture.py"]
    environment, output = os.environ | {"PYTHONPATH": str(copy)}, {"capture_output": True, "text": True}
    done = subprocess.run([*command, "-k", chosen], cwd=copy, env=environment, timeout=180, **output)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr

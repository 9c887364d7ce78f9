"""What a new pattern, layout, kernel, transport or layer touches: a folder and the index.

A copy of the package gets one of each (`additions/`), and nothing else. Two real ranks of the copy then run a
model by the names in the JSON, against float64; the copy's own architecture tests are run on the new files.
The same rows in another package, found by its entry point, run beside the package as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_ring.errors import RingConfigError
from ds_ring.plugin import GROUP

ROOT = Path(__file__).resolve().parents[2]
ADDITIONS = Path(__file__).parent / "additions"

# Each with its file; a public name has a line of __init__.pyi, too. The index is written by a command.
TOUCHED = {
    "pattern": (
        "block_causal.py",
        "patterns/block_causal/plugin.py",
        "patterns.block_causal.plugin",
        "BlockCausal",
    ),
    "layout": ("mirrored.py", "layouts/mirrored/plugin.py", "", ""),
    "kernel": ("double.py", "kernels/double/plugin.py", "", ""),
    "transport": ("counted.py", "transports/counted/plugin.py", "", ""),
    "layer": ("neighbour_mean.py", "layers/neighbour_mean.py", "layers.neighbour_mean", "neighbour_mean"),
    "model integration": ("multihead.py", "contrib/equip.py", "", ""),
}
_PYPROJECT = f"""[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "outsider"
version = "1.0"
[project.entry-points."{GROUP}"]
rows = "outsider.plugin:PLUGIN"
"""
_PLUGIN = """from ds_ring.plugin import KernelRow, LayoutRow, PassRow, Plugin

PLUGIN = Plugin(
    patterns={"BlockCausal": "outsider.block_causal.BlockCausal"},
    layouts={"mirrored": LayoutRow("outsider.mirrored.make_mirrored")},
    kernels={"double": KernelRow("outsider.double.DoubleKernel")},
    passes={"counted": PassRow("outsider.counted.make_pass")},
)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, changed as TOUCHED says, and the test of its architecture."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(
        ROOT / "ds_ring",
        folder / "ds_ring",
    )
    with open(folder / "ds_ring/__init__.pyi", "a") as file:
        for source, name, module, public in TOUCHED.values():
            target = folder / "ds_ring" / name
            assert not target.exists()
            target.parent.mkdir(exist_ok=True)
            shutil.copy(ADDITIONS / source, target)
            if public:
                file.write(f"from ds_ring.{module} import {public} as {public}\n")
    (folder / "tests").mkdir()
    for name in ("pyproject.toml", "tests/__init__.py", "tests/test_architecture.py"):
        shutil.copy(ROOT / name, folder / name)
    write = "from ds_ring.plugin import INDEX, make_index; INDEX.write_text(make_index())"
    subprocess.run(
        [sys.executable, "-c", write], cwd=folder, env=environment(folder), check=True, timeout=120
    )
    return folder


def environment(*folders: Path) -> dict[str, str]:
    paths = os.pathsep.join(map(str, folders))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def test_a_folder_and_the_index_are_all(copy: Path) -> None:
    before, after = (
        {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.[pj][ys]*[!c]")}
        | {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.py")}
        for root in (ROOT / "ds_ring", copy / "ds_ring")
    )
    assert set(after) - set(before) == {name for _, name, *_ in TOUCHED.values()}
    differing = {name for name, text in before.items() if text != after[name]}
    assert differing == {"__init__.pyi", "plugins.json"}


def run_ranks(folder: Path, *paths: Path) -> list[dict[str, Any]]:
    command = [sys.executable, str(ADDITIONS / "rank.py"), str(folder)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environment(*paths), cwd=paths[0], timeout=180, **output)
    assert done.returncode == 0, done.stdout
    return [json.loads((folder / f"report{rank}").read_text()) for rank in range(2)]


def check(reports: list[dict[str, Any]], package: Path, pattern: str) -> None:
    for rank, report in enumerate(reports):
        assert report["file"] == str(package / "ds_ring/__init__.py")
        assert max(report["errors"]) < 1e-5, report
        assert report["first position"] == 32 * (1 - rank)
        assert report["passes of the kernel"] >= 2 * 2  # layers, forward and backward
        assert report["passes of the transport"] == 2 * 2
        assert report["pattern"] == pattern


def test_two_ranks_run_all_of_them_by_their_names(copy: Path, tmp_path: Path) -> None:
    check(run_ranks(tmp_path, copy), copy, "ds_ring.patterns.block_causal.plugin")


@pytest.fixture(scope="module")
def outsider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an installed package whose entry points have rows."""
    folder = tmp_path_factory.mktemp("outsider")
    source, target = folder / "source", folder / "target"
    (source / "outsider").mkdir(parents=True)
    (source / "pyproject.toml").write_text(_PYPROJECT)
    (source / "outsider/__init__.py").write_text("")
    (source / "outsider/plugin.py").write_text(_PLUGIN)
    for name in ("block_causal.py", "mirrored.py", "double.py", "counted.py"):
        shutil.copy(ADDITIONS / name, source / "outsider" / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, timeout=120)
    return target


@pytest.mark.night
def test_another_package_registers_rows_by_its_entry_points(outsider: Path, tmp_path: Path) -> None:
    check(run_ranks(tmp_path, ROOT, outsider), ROOT, "outsider.block_causal")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("outsider.nowhere:PLUGIN", "No module named 'outsider.nowhere'"),
        ("outsider.mirrored:PLUGIN", "import ds_ring.plugin alone there"),
        ("outsider.plugin:LayoutRow", "expected a ds_ring.plugin.Plugin, got type"),
        ("outsider.plugin:PLUGIN", "expected one row 'mirrored', got two"),
    ],
)
def test_an_entry_point_that_is_wrong_is_refused(
    outsider: Path, tmp_path: Path, value: str, words: str
) -> None:
    information = tmp_path / "wrong-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{GROUP}]\nwrong = {value}\n")
    paths = environment(ROOT, outsider, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", "import ds_ring.plugin"],
        env=paths, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and RingConfigError.__name__ in done.stderr and words in done.stderr


@pytest.mark.night
def test_the_copy_keeps_to_the_architecture(copy: Path) -> None:
    chosen = " or ".join([*(Path(name).stem for _, name, *_ in TOUCHED.values()), "public"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_architecture.py"]
    output = {"capture_output": True, "text": True}
    done = subprocess.run([*command, "-k", chosen], cwd=copy, env=environment(copy), timeout=180, **output)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr

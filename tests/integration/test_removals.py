"""The rule of the house: a capability is removed by deleting its folder, its tests and its row.

Each capability of tests/removals.py is deleted from a copy of the tree. Every module that is left is
imported, and two real ranks attend, against float64. By night the core's tests pass in the copy, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.removals import CAPABILITIES, Capability, core_lines, removed, still_needing

CORES_TESTS = (
    "tests/unit/masks",
    "tests/unit/schedule",
    "tests/unit/config",
    "tests/dist/test_ring_attention.py",
)


def two_ranks_attend(copy: Path, folder: Path) -> list[str]:
    """Run the copy's package on two ranks; return what a rank that failed printed."""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    script = str(copy / "tests/integration/removals/rank.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(folder / "store")],
            cwd=copy, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        printed = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [text for rank, text in zip(ranks, printed, strict=True) if rank.returncode]


@pytest.mark.day("ring-flash-attn's functions")
@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_capability_is_deleted_with_its_folder_and_its_row(name: str, tmp_path: Path) -> None:
    copy = removed(name, tmp_path / "copy")
    assert not two_ranks_attend(copy, tmp_path)


@pytest.mark.night
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CAPABILITIES)
def test_the_tests_of_the_core_pass_without_it(name: str, tmp_path: Path) -> None:
    copy = removed(name, tmp_path / "copy")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORES_TESTS],
        cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize("name", CAPABILITIES)
def test_no_module_that_stays_imports_it(name: str) -> None:
    assert still_needing(name) == []


def test_an_import_by_a_module_that_stays_is_found() -> None:
    with mock.patch.dict(CAPABILITIES, {"masks": Capability(("masks.catalog",))}):
        assert "schedule.layout imports masks.catalog" in still_needing("masks")


@pytest.mark.parametrize("name", CAPABILITIES)
def test_the_core_does_not_name_it(name: str) -> None:
    one = CAPABILITIES[name]
    assert one.named <= 5 and bool(one.named) == bool(one.why)
    assert len(core_lines(name)) <= one.named, "\n".join(core_lines(name))


def test_a_module_that_still_needs_it_is_found(tmp_path: Path) -> None:
    """A seeded fault: the core imports a capability when a module is loaded."""
    copy = removed("simulation", tmp_path / "copy")
    with open(copy / "ds_ring/ring/merge.py", "a") as file:
        file.write("\nfrom ds_ring.simulation.simulate import simulate\n")
    (first, *_) = two_ranks_attend(copy, tmp_path)
    assert "No module named 'ds_ring.simulation'" in first

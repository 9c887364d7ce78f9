"""The rule of the house: a capability is removed by deleting its folder, its tests and its row.

Each capability of tests/removals.py is deleted from a copy of the tree. Every module that is left is
imported, and two real ranks attend, against float64. By night the core's tests pass in the copy, too.
Without an attention variant a model that needs it is refused with a reason, and a model of another variant
trains on two ranks as on one process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ds_ring.models.variants import TABLE, variants
from tests.removals import (
    CAPABILITIES,
    ROOT,
    VARIANTS_FOLDER,
    Capability,
    core_lines,
    own_tests_of,
    removed,
    still_needing,
    table,
)

CORES_TESTS = (
    "tests/unit/masks",
    "tests/unit/schedule",
    "tests/unit/config",
    "tests/dist/test_ring_attention.py",
)
OF_MODELS = [name for name, one in CAPABILITIES.items() if one.family]
VARIANTS = [name for name in OF_MODELS if CAPABILITIES[name].places[0].startswith(VARIANTS_FOLDER)]
OTHERS = [name for name in CAPABILITIES if name not in VARIANTS]
ADAPTER = ROOT / "ds_ring/models"


def environment_of(copy: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def pass_in(copy: Path, *tests: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--day",
        *tests,
    ]
    done = subprocess.run(
        command, cwd=copy, env=environment_of(copy), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:] + done.stderr


def ranks_attend(copy: Path, folder: Path, ranks: int = 2) -> list[str]:
    """Run the copy's package on the first ranks of two; return what a rank that failed printed."""
    script = str(copy / "tests/integration/removals/rank.py")
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(folder / "store")],
            cwd=copy, env=environment_of(copy), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        printed = [rank.communicate(timeout=400)[0] for rank in started]
    finally:
        for rank in started:
            rank.kill()
    return [text for rank, text in zip(started, printed, strict=True) if rank.returncode]


@pytest.mark.night  # by day ranks of a copy with a fault, below, and the imports of all copies
@pytest.mark.parametrize("name", OTHERS)
def test_a_capability_is_deleted_with_its_folder_and_its_row(name: str, tmp_path: Path) -> None:
    copy = removed(name, tmp_path / "copy")
    assert not ranks_attend(copy, tmp_path)


@pytest.mark.night
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", OTHERS)
def test_the_tests_of_the_core_pass_without_it(name: str, tmp_path: Path) -> None:
    pass_in(removed(name, tmp_path / "copy"), *CORES_TESTS)


@pytest.mark.night
@pytest.mark.timeout(1200)
def test_the_tests_of_the_adapter_pass_without_a_variant(tmp_path: Path) -> None:
    pass_in(removed("variant relative_bias", tmp_path / "copy"), "tests/unit/models")


@pytest.mark.parametrize("name", CAPABILITIES)
def test_no_module_that_stays_imports_it(name: str) -> None:
    assert still_needing(name) == []


def test_an_import_by_a_module_that_stays_is_found() -> None:
    with mock.patch.dict(CAPABILITIES, {"masks": Capability(("masks.pattern",))}):
        assert "schedule.layout imports masks.pattern" in still_needing("masks")


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
    (first,) = ranks_attend(copy, tmp_path, ranks=1)
    assert "No module named 'ds_ring.simulation'" in first


def check_models(copy: Path, *families: str) -> list[dict[str, Any]]:
    """Compare small models on two ranks with one process, by the copy's `ds-ring check-model`."""
    code = (
        "import sys; from ds_ring_launcher.cli import main\n"
        "sys.exit(max(main(['check-model', family, '--json']) for family in sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *families],
        cwd=copy, env=environment_of(copy), capture_output=True, text=True, timeout=480,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    reports: list[dict[str, Any]] = json.loads(f"[{done.stdout.replace(chr(10) + '{', ',{')}]")
    return reports


@pytest.mark.night  # by day: nothing imports them, and one capability is deleted
@pytest.mark.parametrize("name", OF_MODELS)
def test_a_model_of_another_variant_trains_without_it(name: str, tmp_path: Path) -> None:
    row = CAPABILITIES[name]
    found, other = check_models(removed(name, tmp_path / "copy"), row.family, row.other)
    if row.reason:
        assert found["result"] == "refused" and row.reason in found["reason"], found
    else:
        assert found["result"] == "exact", found
    assert other["result"] == "exact", other


def test_each_variant_has_its_row_its_file_and_its_tests() -> None:
    names = [row.partition(".")[0] for row in TABLE if not row.startswith("ds_ring.")]
    assert [f"variant {name}" for name in sorted(names)] == sorted(VARIANTS)
    files = {path.stem for path in (ADAPTER / "variants").iterdir() if path.stem[0] != "_"}
    assert files == {*names, "variant"}
    found = {path for name in VARIANTS for path in own_tests_of(name)}
    assert set(ROOT.glob("tests/*/**/variants/test_*.py")) == found
    assert all(map(own_tests_of, VARIANTS)), "a variant without tests of its own"


def test_no_file_of_the_adapter_names_a_variant() -> None:
    """Nor does a variant import another one."""
    names = {CAPABILITIES[one].places[0].removeprefix(f"{VARIANTS_FOLDER}.") for one in VARIANTS}
    classes = {type(variant).__name__ for variant in variants()}
    for path in ADAPTER.rglob("*.py"):
        first, *parts = path.relative_to(ADAPTER).parts
        own = parts[0].removesuffix(".py") if first == "variants" else ""
        if own == "__init__":
            continue  # the table
        text = path.read_text()
        found = (names & set(re.findall(r"\bvariants\.(\w+)", text))) - {own}
        found |= {name for name in classes if re.search(rf"\b{name}\b", text)} if not own else set()
        found |= (names & set(re.findall(r"\b(\w+)\.py\b", text))) - {own}
        assert not found, f"{path.relative_to(ROOT)} names {sorted(found)}"


def test_the_table_has_a_row_for_each_capability() -> None:
    rows = [row.split(" | ") for row in table().splitlines()[2:]]
    assert [row[0].removeprefix("| ") for row in rows] == list(CAPABILITIES)
    assert all(int(row[1]) and int(row[2].replace(",", "")) for row in rows), "a capability without files"

"""A variant of attention is removed by deleting its file or folder and its row, with its tests.

Each test does that in a copy of the package. There, the core's files name the variant nowhere, a model that
needs it is refused with a reason, and a model of another variant trains on two ranks as on one process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ds_ring.integrations.transformers.variants import TABLE, variants
from tests.removals import import_only_from, remove_variants

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("ds_ring/integrations/transformers")


class Removed(NamedTuple):
    """What a row's removal does.

    Attributes:
        family: of a model that needs the variant.
        reason: a part of the reason for which it is refused then; "" if it is exact without the variant.
        other: of a model of another variant.
    """

    family: str
    reason: str
    other: str


ROWS = {
    "encoder_decoder": Removed("t5", "it is an encoder-decoder", "bloom"),
    "eager_attention": Removed("bloom", "its attention bypasses transformers' attention interface", "t5"),
    "recurrent": Removed(
        "qwen3_next", "its attention bypasses transformers' attention interface", "deepseek_v4"
    ),
    "compressed": Removed("deepseek_v4", "its layers compressed_sparse_attention", "deepseek_v32"),
    "indexed": Removed("deepseek_v32", "its layers indexed_attention mix tokens otherwise", "deepseek_v4"),
    "indexed_blocks": Removed("minimax_m3_vl_text", "its layers minimax_m3_sparse", "deepseek_v32"),
    "latents": Removed("deepseek_v3", "", "mamba2"),
    "relative_bias": Removed("t5", "its attention bypasses transformers' attention interface", "bart"),
    "key_terms": Removed("doge", "expected a model that hands its mask to attention as it is", "llama4_text"),
    "query_scale": Removed("llama4_text", "config.attn_temperature_tuning scales queries", "doge"),
}
DAY = ("relative_bias",)  # the one whose models are made soonest


def without(name: str, folder: Path) -> Path:
    """Make a copy of the package without a variant, and return its folder."""
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ds_ring", folder / "ds_ring", ignore=skipped)
    shutil.copytree(ROOT / "launcher", folder / "ds_ring_launcher", ignore=skipped)
    import_only_from(folder)
    variant = folder / FOLDER / "variants" / name
    if variant.is_dir():
        shutil.rmtree(variant)
    else:
        variant.with_suffix(".py").unlink()
    remove_variants(folder, name)
    return folder


def files_of_tests(name: str) -> list[Path]:
    """Return the files of tests that go with a variant."""
    names = (
        f"tests/unit/integrations/transformers/variants/test_{name}.py",
        f"tests/dist/variants/test_{name}.py",
    )
    return [Path(name) for name in names if (ROOT / name).exists()]


def check_model(folder: Path, family: str) -> dict[str, Any]:
    """Compare a small model on two ranks with one process, by the copy's `ds-ring check-model`."""
    code = "import sys; from ds_ring_launcher.cli import main; sys.exit(main())"
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", code, "check-model", family, "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_each_row_of_the_table_has_a_file_and_a_case() -> None:
    names = [row.partition(".")[0] for row in TABLE]
    assert sorted(names) == sorted(ROWS)
    files = {path.stem for path in (ROOT / FOLDER / "variants").iterdir() if path.stem[0] != "_"}
    assert files == {*names, "variant"}
    tests = {path.relative_to(ROOT) for path in ROOT.glob("tests/*/**/variants/test_*.py")}
    assert tests == {path for name in names for path in files_of_tests(name)}
    assert all(map(files_of_tests, names)), "a variant without tests of its own"


def test_no_file_of_the_core_names_a_variant() -> None:
    """Nor does a variant import another one."""
    classes = {type(variant).__name__ for variant in variants()}
    for path in (ROOT / FOLDER).rglob("*.py"):
        first, *parts = path.relative_to(ROOT / FOLDER).parts
        own = parts[0].removesuffix(".py") if first == "variants" else ""
        if own == "__init__":
            continue  # the table
        text = path.read_text()
        found = {name for name in re.findall(r"\bvariants\.(\w+)", text) if name in ROWS} - {own}
        found |= {name for name in classes if re.search(rf"\b{name}\b", text)} if not own else set()
        found |= {name for name in re.findall(r"\b(\w+)\.py\b", text) if name in ROWS} - {own}
        assert not found, f"{path.relative_to(ROOT)} names {sorted(found)}"


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.day(*DAY)
def test_a_model_of_another_variant_trains_without_it(name: str, tmp_path: Path) -> None:
    row, folder = ROWS[name], without(name, tmp_path)
    report = check_model(folder, row.family)
    if row.reason:
        assert report["result"] == "refused" and row.reason in report["reason"], report
    else:
        assert report["result"] == "exact", report
    report = check_model(folder, row.other)
    assert report["result"] == "exact", report


@pytest.mark.night
@pytest.mark.parametrize("name", DAY)
def test_the_other_tests_of_the_adapter_pass_without_it(name: str, tmp_path: Path) -> None:
    folder = without(name, tmp_path)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for path in files_of_tests(name):
        (folder / path).unlink()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, "tests/unit/integrations/transformers"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr

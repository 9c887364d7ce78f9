"""The patches for accelerate and TRL, applied to copies of the installed packages: their tests and ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.upstream import apply

ROOT = Path(__file__).resolve().parents[2]
OURS = (
    "tests/dist/test_trainers.py::test_grpo_runs_on_a_registered_backend_as_on_one_process",
    "tests/dist/test_trainers.py::test_ranks_of_a_ring_shuffle_alike_without_a_seed",
    "tests/dist/test_trainers.py::test_what_cannot_be_honoured_is_refused",
    "tests/dist/test_trainers.py::test_every_target_in_trl_exists",
)


def run_tests(folder: Path, tests: list[str], sources: list[Path]) -> str:
    """Run tests with these sources before the installed packages; return what pytest printed."""
    path = os.pathsep.join(map(str, [*sources, ROOT]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.mark.parametrize("package", apply.SOURCES)
def test_a_patch_applies_to_the_installed_package(tmp_path: Path, package: str) -> None:
    pytest.importorskip(package)
    sources = apply.patched(package, tmp_path)
    assert (sources / package / "__init__.py").exists() and list((tmp_path / "tests").glob("test_*.py"))


def test_a_patch_for_another_version_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another accelerate has another list of backends; TRL is not there at all."""
    accelerate = pytest.importorskip("accelerate")
    other = tmp_path / "other/accelerate"
    installed = Path(accelerate.__file__).parent / "parallelism_config.py"
    (other / "utils").mkdir(parents=True)
    (other / "__init__.py").touch()
    (other / "parallelism_config.py").write_text(installed.read_text().replace('["deepspeed"]', "BACKENDS"))
    spec = type("Spec", (), {"origin": str(other / "__init__.py")})
    monkeypatch.setattr(apply, "find_spec", lambda package: spec if package == "accelerate" else None)
    with pytest.raises(SystemExit) as error:
        apply.patched("accelerate", tmp_path / "new")
    said = str(error.value)
    assert said.startswith("accelerate: expected the files of 1.15.0, got ") and "FAILED" in said
    with pytest.raises(SystemExit, match="trl: expected an installed package, got none; pip install trl"):
        apply.patched("trl", tmp_path / "new")


@pytest.mark.night
@pytest.mark.timeout(1800)
def test_tests_of_the_patches_and_ours_pass_with_them(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    sources = [apply.patched(package, tmp_path) for package in apply.SOURCES]
    assert "skipped" not in run_tests(tmp_path, ["tests"], sources)
    assert "skipped" not in run_tests(ROOT, ["--night", *OURS], sources)

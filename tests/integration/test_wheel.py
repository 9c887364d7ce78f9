"""The wheel by itself: what its commands name is in it, and they work in a folder without a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from email.parser import Parser
from pathlib import Path

import pytest

from tests.documents import ROOT, SMALL_RUN
from tests.removals import copy_tree

# As `python -m build` does: the wheel is made of the sdist.
_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
# All help texts, by one process.
_HELP = """
import contextlib
from ds_ring_launcher import cli
commands = cli._parser()._subparsers._group_actions[0].choices
for words in ([], *([name] for name in commands)):
    with contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
"""
_CONFIGURATION = re.compile(r"configs/[\w/.-]*\w")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of the wheel, as `pip install --no-deps --target` leaves them."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_tree(folder / "tree")
    sdist = build("sdist", folder / "tree", folder)
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    wheel = build("wheel", folder / "unpacked" / sdist.name.removesuffix(".tar.gz"), folder)
    shutil.unpack_archive(wheel, folder / "target", "zip")
    return folder / "target"


def build(kind: str, tree: Path, folder: Path) -> Path:
    """Build the sdist or the wheel of a tree."""
    command = [sys.executable, "-c", _BUILD, f"build_{kind}", str(folder)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def run(installed: Path, folder: Path, *command: str, status: int = 0) -> str:
    """What a command of the wheel prints in a folder."""
    environment = os.environ | {"PYTHONPATH": str(installed), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *command] if command[0] == "-c" else [sys.executable, "-m", *command]
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        text=True,
        timeout=280,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def ds_ring(installed: Path, folder: Path, line: str, status: int = 0) -> str:
    return run(installed, folder, "ds_ring_launcher.cli", *line.split(), status=status)


def absent(text: str, folder: Path) -> list[str]:
    """The configurations that a text names and the folder lacks."""
    return sorted({name for name in _CONFIGURATION.findall(text) if not (folder / name).exists()})


@pytest.mark.night
def test_the_configurations_that_help_names_are_written(installed: Path, tmp_path: Path) -> None:
    help = run(installed, tmp_path, "-c", _HELP)
    assert "configs/quickstart.yaml" in absent(help, tmp_path) and "usage: ds-ring resize-checkpoint" in help
    ds_ring(installed, tmp_path, "configs")
    assert absent(help, tmp_path) == []
    assert absent("ds-ring launch configs/quikstart.yaml", tmp_path) == ["configs/quikstart.yaml"]


def test_all_of_configs_is_written_and_what_is_there_stays(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/million.json").write_text("{}")
    printed = ds_ring(installed, tmp_path, "configs")
    assert "kept, though other than in this version: million.json" in printed
    assert (tmp_path / "configs/million.json").read_text() == "{}"
    listed = subprocess.run(["git", "ls-files", "configs"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        assert name == "configs/million.json" or (tmp_path / name).read_text() == (ROOT / name).read_text()
    assert "configs: 0 files written" in ds_ring(installed, tmp_path, "configs")


def test_a_folder_without_configurations_hears_of_the_command(installed: Path, tmp_path: Path) -> None:
    printed = ds_ring(installed, tmp_path, "launch configs/quickstart.yaml", status=2)
    assert "the folder configs does not exist; ds-ring configs writes it" in printed
    (tmp_path / "file").write_text("")
    printed = ds_ring(installed, tmp_path, "configs file/configs", status=2)
    assert "FOLDER: expected a folder to write to" in printed


@pytest.mark.night
def test_the_quick_start_needs_no_checkout(installed: Path, tmp_path: Path) -> None:
    ds_ring(installed, tmp_path, "configs")
    script = ds_ring(installed, tmp_path, "launch configs/quickstart.yaml --dry-run")
    assert f"{installed}/ds_ring_launcher/demo/train_lm.py --deepspeed" in script
    assert f"--deepspeed_config {tmp_path}/configs/quickstart.json" in script
    assert f"{ROOT}/configs" not in script and f"{ROOT}/launcher" not in script
    script = ds_ring(installed, tmp_path, "launch configs/recipes/64_gpus.yaml --dry-run")
    assert f"mkdir -p {tmp_path}/runs/64_gpus" in script


def test_the_readme_is_in_the_metadata(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    fields = Parser().parsestr(metadata.read_text())
    assert fields["Description-Content-Type"] == "text/markdown"
    assert fields.get_payload() == (ROOT / "README.md").read_text()


@pytest.mark.night
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"launch configs/quickstart.yaml -- {SMALL_RUN} --compare_tokens 64", "loss of the trained model"),
        ("simulate --tokens 2048 --config configs/longnet.json --ring-sizes 1 2", "ring"),
        ("plan --tokens 65536 --layers 2 --hidden 64 --heads 4 --vocab 100 --hardware gb300", "GB300"),
        ("doctor", "ring of 2"),
        ("check-model llama", "exact"),
    ],
)  # fmt: skip
def test_a_command_needs_no_checkout(installed: Path, tmp_path: Path, line: str, words: str) -> None:
    ds_ring(installed, tmp_path, "configs")
    assert words in ds_ring(installed, tmp_path, line)


@pytest.mark.night
def test_two_builds_of_the_wheel_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SOURCE_DATE_EPOCH takes the place of the files' times, which differ from checkout to checkout."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    wheels = []
    for name, time in (("first", 981173106), ("second", 1234567890)):
        copy_tree(tmp_path / name / "tree")
        for path in (tmp_path / name / "tree").rglob("*"):
            os.utime(path, (time, time), follow_symlinks=False)
        wheels.append(build("wheel", tmp_path / name / "tree", tmp_path / name).read_bytes())
    assert wheels[0] == wheels[1]

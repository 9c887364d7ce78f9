"""The Dockerfile, which no docker builds here: its stages, what it copies, and what it runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.document_readers import read_command
from tests.documents import ROOT
from tests.integration.test_wheel import build

TEXT = (ROOT / "Dockerfile").read_text()


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions with their arguments, comments left out."""
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def copied(text: str) -> list[str]:
    return [name for word, rest in instructions(text) if word == "COPY" for name in rest.split()[:-1]]


def pip_words(text: str) -> list[str]:
    """What `pip install` of a text is given, its options left out."""
    found = re.search(r"pip install (.+)", text)
    assert found, text
    words = shlex.split(found[1].split("&&")[0])
    return [word for word in words if not word.startswith("-")]


def faults(text: str) -> list[str]:
    """What the Dockerfile names and is not there, by its words."""
    known = instructions(text)
    stages = [rest.split(" AS ")[1] for word, rest in known if word == "FROM" and " AS " in rest]
    arguments = [rest.partition("=") for word, rest in known if word == "ARG"]
    found = [f"COPY {name}" for name in copied(text) if not (ROOT / name).exists()]
    found += [f"ARG {name}" for name, _, _ in arguments if f"${{{name}}}" not in text]
    found += [f"DEVICE={default}" for _, _, default in arguments if default not in stages]
    found += [
        f"DEVICE={name}" for name in re.findall(r"--build-arg DEVICE=(\w+)", text) if name not in stages
    ]
    readme = pip_words((ROOT / "README.md").read_text())
    (install,) = [rest for word, rest in known if word == "RUN" and "pip install" in rest]
    return found + ([f"pip {pip_words(install)}"] if pip_words(install) != readme else [])


def test_what_it_names_is_there() -> None:
    assert faults(TEXT) == []


@pytest.mark.parametrize(
    ("right", "wrong", "found"),
    [
        ("COPY launcher launcher", "COPY launch launcher", "COPY launch"),
        ("FROM ${DEVICE}", "FROM cpu", "ARG DEVICE"),
        ("ARG DEVICE=cpu", "ARG DEVICE=gpu", "DEVICE=gpu"),
        ("--build-arg DEVICE=cuda", "--build-arg DEVICE=rocm", "DEVICE=rocm"),
        ('".[train]"', '".[plot]"', "pip ['torch==2.13.0', '.[plot]']"),
    ],
)  # fmt: skip
def test_a_fault_is_found(right: str, wrong: str, found: str) -> None:
    assert right in TEXT
    assert faults(TEXT.replace(right, wrong)) == [found]


@pytest.mark.night
@pytest.mark.parametrize("missing", ["nothing", "launcher", "configs"])
def test_what_it_copies_builds_the_package(tmp_path: Path, missing: str) -> None:
    (tmp_path / "tree").mkdir()
    for name in copied(TEXT):
        if name != missing:
            target = tmp_path / "tree" / name
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, target)
    if missing != "nothing":
        with pytest.raises(AssertionError, match=missing):
            build("wheel", tmp_path / "tree", tmp_path)
    else:
        assert build("wheel", tmp_path / "tree", tmp_path).is_file()


def test_its_command_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = [json.loads(rest) for word, rest in instructions(TEXT) if word == "CMD"]
    read_command(shlex.join(command), monkeypatch)
    assert (ROOT / command[2]).is_file()

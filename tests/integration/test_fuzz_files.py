"""Spoilt checkpoints, files of a run and loader states: a few rounds, and what the tool says of a fault."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import fuzz_files
import pytest

from tests import spoiled_files


@pytest.mark.slow
@pytest.mark.night  # by day pickles alone, in tests/unit/checkpoint/test_pickles.py
def test_nothing_that_is_spoilt_ends_a_process_or_raises_what_has_no_type(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fuzz_files.main(["--rounds", "40"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "40 rounds, 0 bad" in said and "refused" in said


def test_an_error_without_a_type_is_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def bare(draw: random.Random, root: Path) -> None:
        raise KeyError("momentum")

    monkeypatch.setattr(spoiled_files, "checkpoint_round", bare)
    assert fuzz_files.play(38, range(0, 2)) == 2
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 2 and all('"untyped"' in line and "momentum" in line for line in lines)


def test_a_process_that_ends_is_a_crash_and_the_rounds_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second round of every process ends it by a signal."""
    child = tmp_path / "python"
    good = '{"kind": "checkpoint", "outcome": "read", "text": ""}'
    child.write_text(f"#!/bin/sh\necho '{good}'\nkill -SEGV $$\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    assert fuzz_files.main(["--rounds", "4"]) == 2
    said = capsys.readouterr().out
    assert "round 1 (checkpoint): crash: exit status -11" in said and "4 rounds, 2 bad" in said

"""A newer attempt of a run takes over the folder that a stopped rank of an older one still has locked."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ring.checkpoint.manifest import (
    LOCK,
    OWNER,
    Attempt,
    FolderLocks,
    Storage,
    attempt_in,
    write_manifest,
)
from ds_ring.checkpoint.save import _commit, exchange_reports
from ds_ring.errors import RingCheckpointError
from ds_ring.limits import Limit

HOLD = """
import sys
from pathlib import Path
from ds_ring.checkpoint.manifest import Attempt, FolderLocks
locks = FolderLocks(Attempt("run", 1, "token"))
locks.claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
for act in (locks.require_still, locks.claim):
    try:
        act(Path(sys.argv[1]))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.fixture
def older(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder as attempt 1, and asks again when it gets a line."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_newer_attempt_takes_over_and_the_older_one_is_refused(
    older: subprocess.Popen[str], tmp_path: Path
) -> None:
    newer = FolderLocks(Attempt("run", 2, "token"))
    newer.claim(tmp_path)
    newer.require_still(tmp_path)
    assert json.loads((tmp_path / OWNER).read_text())["attempt"] == 2
    said = older.communicate("\n", timeout=60)[0].splitlines()
    assert len(said) == 2 and all(line.startswith("RingCheckpointError") for line in said)
    assert "got a newer one" in said[0] and "expected no other job" in said[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, OWNER]


def test_an_attempt_commits_nothing_after_a_newer_one_took_over(tmp_path: Path) -> None:
    locks, hidden = FolderLocks(Attempt("run", 1, "token")), tmp_path / ".step1.saving"
    locks.claim(tmp_path)
    hidden.mkdir()
    newer = [sys.executable, "-c", HOLD.replace('"run", 1', '"run", 2'), str(tmp_path)]
    assert subprocess.run(newer, input="", capture_output=True, text=True).stdout.startswith("held\n")
    with pytest.raises(RingCheckpointError, match="got a newer one"):
        _commit(hidden, tmp_path / "step1", locks)
    assert hidden.exists() and not (tmp_path / "step1").exists()


OTHERS = [
    None, Attempt("another run", 2, "token"), Attempt("run", 1, "token"),
    Attempt("run", 2, "another launcher"), Attempt("run", 2, ""),
]  # fmt: skip


@pytest.mark.parametrize("attempt", OTHERS)
def test_others_are_refused(older: subprocess.Popen[str], tmp_path: Path, attempt: Attempt | None) -> None:
    """A second launcher of the run among them, whose attempts have higher numbers."""
    with pytest.raises(RingCheckpointError, match="expected no other job that saves here"):
        FolderLocks(attempt).claim(tmp_path)


def test_the_launcher_that_holds_the_run_takes_over_from_one_that_is_gone(tmp_path: Path) -> None:
    """Which cannot be at work: run_lock.py gives the run's folder to one launcher."""
    run, folder = tmp_path / "run", tmp_path / "checkpoints"
    for made in (run / "attempt-1", run / "attempt-2", folder):
        made.mkdir(parents=True)
    for path, token in ((run / "attempt-1", "first"), (run / "attempt-2", "second"), (run, "first")):
        (path / "launcher.json").write_text(json.dumps({"token": token}))
    before, after = attempt_in(run / "attempt-1"), attempt_in(run / "attempt-2")
    assert after == Attempt(str(run), 2, "second")
    hold = HOLD.replace('Attempt("run", 1, "token")', f"Attempt(*{tuple(before)!r})")
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as older:
        assert older.stdout is not None and older.stdout.readline() == "held\n"
        with pytest.raises(RingCheckpointError, match="expected no other job that saves here"):
            FolderLocks(after).claim(folder)
        (run / "launcher.json").write_text(json.dumps({"token": "second", "pid": 3}))
        FolderLocks(after).claim(folder)
        assert "got a newer one" in older.communicate("\n", timeout=60)[0]


NOBODY = [
    "", "[]", "{}", '{"run": "run"}', '{"run": "run", "attempt": "1"}', '{"attempt": [[1]]}', "[" * 3000,
]  # fmt: skip


@pytest.mark.parametrize("owner", NOBODY)
def test_an_owner_that_says_nothing_is_not_taken_over(
    older: subprocess.Popen[str], tmp_path: Path, owner: str
) -> None:
    (tmp_path / OWNER).write_text(owner)
    with pytest.raises(RingCheckpointError, match=r"got process \? on another host"):
        FolderLocks(Attempt("run", 2, "token")).claim(tmp_path)


@pytest.mark.parametrize("name", ["attempt-", "attempt-x", "attempts", "attempt-1000000000000"])
def test_a_folder_of_another_name_is_no_attempt(tmp_path: Path, name: str) -> None:
    assert attempt_in(tmp_path / name) is None and attempt_in(None) is None
    assert attempt_in(tmp_path / "attempt-3") == Attempt(str(tmp_path), 3, "")


def test_a_claim_outlives_its_folder_and_ends_with_its_engine(tmp_path: Path) -> None:
    """Engines of one process share a claim, a folder that is made anew is claimed anew."""
    folder = tmp_path / "runs"
    folder.mkdir()
    first, second = FolderLocks(), FolderLocks()
    first.claim(folder)
    second.claim(folder)
    other = [sys.executable, "-c", HOLD.replace('Attempt("run", 1, "token")', "None"), str(folder)]
    shutil.rmtree(folder)
    folder.mkdir()
    first.claim(folder)
    del first
    refused = subprocess.run(other, input="", capture_output=True, text=True)
    assert "expected no other job that saves here, got process" in refused.stderr, refused
    del second
    assert subprocess.run(other, input="", capture_output=True, text=True).stdout == "held\n"


def test_files_of_a_checkpoint_follow_the_umask(tmp_path: Path) -> None:
    (tmp_path / "step1").mkdir()
    before = os.umask(0o077)
    try:
        write_manifest(tmp_path / "step1", [], 1)
        FolderLocks().claim(tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
    assert len(modes) >= 2 and OWNER in modes and set(modes.values()) == {0o600}, modes


def test_a_report_is_not_written_through_a_planted_link(tmp_path: Path) -> None:
    victim, reports = tmp_path / "victim", tmp_path / "reports"
    victim.write_text("precious")
    reports.mkdir()
    (reports / ".1").symlink_to(victim)
    assert exchange_reports(reports, Storage((0, 1), 1), list, Limit(1.0, "no key")) is None
    assert victim.read_text() == "precious"

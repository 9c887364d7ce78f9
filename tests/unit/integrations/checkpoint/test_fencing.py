"""A newer attempt of a run takes over the folder that a stopped rank of an older one still has locked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ring.errors import RingCheckpointError
from ds_ring.integrations.checkpoint.manifest import LOCK, OWNER, FolderLocks
from ds_ring.integrations.checkpoint.save import _commit

HOLD = """
import sys
from pathlib import Path
from ds_ring.integrations.checkpoint.manifest import FolderLocks
locks = FolderLocks(("run", 1))
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
    newer = FolderLocks(("run", 2))
    newer.claim(tmp_path)
    newer.require_still(tmp_path)
    assert json.loads((tmp_path / OWNER).read_text())["attempt"] == 2
    said = older.communicate("\n", timeout=60)[0].splitlines()
    assert len(said) == 2 and all(line.startswith("RingCheckpointError") for line in said)
    assert "a newer one that saves here now" in said[0] and "expected no other job" in said[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, OWNER]


def test_an_attempt_commits_nothing_after_a_newer_one_took_over(tmp_path: Path) -> None:
    locks, hidden = FolderLocks(("run", 1)), tmp_path / ".step1.saving"
    locks.claim(tmp_path)
    hidden.mkdir()
    newer = [sys.executable, "-c", HOLD.replace('("run", 1)', '("run", 2)'), str(tmp_path)]
    assert subprocess.run(newer, input="", capture_output=True, text=True).stdout.startswith("held\n")
    with pytest.raises(RingCheckpointError, match="a newer one that saves here now"):
        _commit(hidden, tmp_path / "step1", locks)
    assert hidden.exists() and not (tmp_path / "step1").exists()


@pytest.mark.parametrize("attempt", [None, ("another run", 2), ("run", 1)])
def test_others_are_refused(
    older: subprocess.Popen[str], tmp_path: Path, attempt: tuple[str, int] | None
) -> None:
    with pytest.raises(RingCheckpointError, match="expected no other job that saves here"):
        FolderLocks(attempt).claim(tmp_path)


def test_a_claim_outlives_its_folder_and_ends_with_its_engine(tmp_path: Path) -> None:
    """Engines of one process share a claim, a folder that is made anew is claimed anew."""
    folder = tmp_path / "runs"
    folder.mkdir()
    first, second = FolderLocks(), FolderLocks()
    first.claim(folder)
    second.claim(folder)
    other = [sys.executable, "-c", HOLD.replace('("run", 1)', "None"), str(folder)]
    shutil.rmtree(folder)
    folder.mkdir()
    first.claim(folder)
    del first
    refused = subprocess.run(other, input="", capture_output=True, text=True)
    assert "expected no other job that saves here, got process" in refused.stderr, refused
    del second
    assert subprocess.run(other, input="", capture_output=True, text=True).stdout == "held\n"

"""One launcher of a run at a time: what is refused, what is taken over, and how a dead one is told."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from ds_ring.errors import RingConfigError
from ds_ring_launcher.run import run_lock
from ds_ring_launcher.run.run_folder import RunFolder
from ds_ring_launcher.run.run_lock import RunInUseError, run_held
from ds_ring_launcher.run.run_records import LauncherRecord, read_record
from tests.clock import wait_until
from tests.machine import make_read_only, small_disk

HOLD = """
import sys, time
from pathlib import Path
from ds_ring_launcher.run.run_lock import run_held
with run_held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def said(run: Path) -> LauncherRecord:
    found = read_record(run / "launcher.json", LauncherRecord)
    return found


def held_by_another(run: Path, *before: str) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-c", HOLD, str(run)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    return other


def test_a_live_launcher_is_named_and_a_killed_one_is_followed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    other = held_by_another(run)
    try:
        started = time.monotonic()
        named = f"process {other.pid} on {os.uname().nodename}, at work since"
        with pytest.raises(RunInUseError, match=named), run_held(run):
            pass
        assert time.monotonic() - started < run_lock._OWNER_SECONDS
        with run_held(run, node_rank=1):  # with ssh: false each host has a launcher of its own
            assert (run / "launcher-1.json").exists()
    finally:
        other.kill()
        other.wait()
    before = said(run).token
    with run_held(run) as token:
        assert token == said(run).token != before and not said(run).ended
    assert said(run).ended
    with run_held(run):
        pass


def of_another_host(run: Path, **more: object) -> None:
    run.mkdir(exist_ok=True)
    text = {"host": "node-7", "pid": 12, "processes": "another", "token": "ab", "at": 1.0, **more}
    (run / "launcher.json").write_text(json.dumps(text))


def test_another_hosts_launcher_lives_as_long_as_its_file_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system keeps locks for each host, so that this lock is free though that one lives."""
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(run_lock, "_LOOK_SECONDS", 0.02)
    run = tmp_path / "run"
    of_another_host(run)
    with run_held(run):  # not renewed within three beats
        pass
    of_another_host(run)
    os.utime(run / "launcher.json", (1.0, 1.0))  # old by the file system's clock: at once
    started = time.monotonic()
    with run_held(run):
        assert time.monotonic() - started < 0.4
    of_another_host(run)
    beat = subprocess.Popen(
        ["sh", "-c", f"while :; do touch {run}/launcher.json; sleep 0.05; done"], start_new_session=True
    )
    try:
        with pytest.raises(RunInUseError, match="process 12 on node-7"), run_held(run):
            pass
    finally:
        beat.kill()
        beat.wait()


def test_without_locks_the_process_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    other = held_by_another(run)

    def acquire(self: FileLock) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", acquire)
    try:
        with pytest.raises(RunInUseError, match=f"process {other.pid}"), run_held(run):
            pass
    finally:
        other.kill()
        other.wait()
    with run_held(run):
        pass
    assert "has no locks (No locks available)" in capsys.readouterr().err


@pytest.mark.night
@pytest.mark.needs("namespaces")
def test_a_launcher_in_a_container_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel, other process ids: its own say nothing here, its beat does."""
    run = tmp_path / "run"
    other = held_by_another(run, "unshare", "--pid", "--fork", "--kill-child")
    try:
        assert run_lock.is_alive_here(said(run)) is None

        def acquire(self: FileLock) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(FileLock, "acquire", acquire)
        with pytest.raises(RunInUseError), run_held(run):
            pass
    finally:
        other.kill()
        other.wait()


def test_a_launcher_whose_folder_was_taken_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_lock.os, "kill", lambda pid, number: killed.append(pid))
    with run_held(tmp_path / "run"):
        of_another_host(tmp_path / "run")
        wait_until(lambda: killed, 20.0)
    assert killed == [os.getpid()] and "another launcher has taken" in capsys.readouterr().err
    assert said(tmp_path / "run").host == "node-7"


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RingConfigError, match="to write to, got Not a dir"), run_held(tmp_path / "file/run"):
        pass
    with pytest.raises(RingConfigError, match="to write to, got File exists"), run_held(tmp_path / "file"):
        pass


@pytest.mark.needs("mounts")
def test_a_disk_that_is_read_only_or_full_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path, 1 << 16):
        (tmp_path / "run").mkdir()
        make_read_only(tmp_path)
        with pytest.raises(RingConfigError, match="Read-only file system"), run_held(tmp_path / "run"):
            pass
        with pytest.raises(RingConfigError, match="Read-only file system"), run_held(tmp_path / "other"):
            pass
        with pytest.raises(RingConfigError, match="Read-only file system"):
            RunFolder(tmp_path / "run").start_attempt()

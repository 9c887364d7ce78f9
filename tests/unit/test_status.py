"""What is known of a run from its folder, whatever stands in it."""

from __future__ import annotations

import json
import math
import os
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ring.errors import RingConfigError
from ds_ring.measure.run_report import RunHistory
from ds_ring_launcher import cli
from ds_ring_launcher.cluster.cluster import Host
from ds_ring_launcher.run import run_lock
from ds_ring_launcher.run.culprit import find_culprit
from ds_ring_launcher.run.relaunch import Outcome, decide
from ds_ring_launcher.run.run_folder import RankFault, RunFolder, write_exit, write_fault, write_json
from ds_ring_launcher.run.run_lock import run_held
from ds_ring_launcher.run.run_records import (
    EventRecord,
    HistoryRecord,
    MetricsRecord,
    newest_checkpoint,
    read_bytes,
    read_lines,
)
from ds_ring_launcher.status.run_status import SILENT_SECONDS, RankStatus, read_run
from ds_ring_launcher.status.table import make_tables, memory_text, print_status, seconds_text
from tests.clock import unqueued_seconds

NASTY = "</td><script>document.title='owned'</script><img src=x onerror=alert(1)> & \x1b[31m [bold]"


def figures(folder: Path, rank: int, step: int, **more: Any) -> None:
    loss: dict[str, Any] = {"rank": rank, "at": time.time(), "step": step, "memory_bytes": 3 << 20}
    write_json(folder / f"rank-{rank}.metrics.json", loss | more)


def course(folder: Path, *losses: Any, first: int = 1) -> None:
    with open(folder / "history.jsonl", "a") as file:
        for step, loss in enumerate(losses, first):
            file.write(json.dumps({"step": step, "loss": loss, "tokens_per_second": 1000.0}) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run whose first attempt lost rank 1 on a host that is missing in the second, which is under way."""
    found = RunFolder(tmp_path / "run")
    for attempt in (1, 2):
        assert found.start_attempt() == attempt
        hosts = {"node-0": 1, "node-1": 1} if attempt == 1 else {"node-0": 1}
        missing = {} if attempt == 1 else {"node-1": NASTY}
        found.record("start", attempt, engine="torchrun", hosts=hosts, world_size=len(hosts), missing=missing,
                     sequence_parallel_size=len(hosts), checkpoint=None if attempt == 1 else "global_step2",
                     checkpoints=str(tmp_path / "checkpoints"))  # fmt: skip
        folder = found.attempt(attempt)
        course(folder, 4.0, 3.0, "nan", first=attempt)
        for rank in range(len(hosts)):
            link = {
                "from": 1 - rank, "hops": 2, "hop_seconds": 0.01 + rank, "wait_seconds": 0.001,
                "bytes": 3 << 20,
            }  # fmt: skip
            figures(folder, rank, attempt + 2, links=[link])
        if attempt == 1:
            found.record("fault", 1, kind="lost", rank=1, host="node-1", step=4, what=NASTY, frames=[])
            found.record("end", 1, status=1, verdict="failed", next="again", why="lost", wait_seconds=1.0)
    tag = tmp_path / "checkpoints" / "global_step2"
    tag.mkdir(parents=True)
    write_json(tag / "ds_ring_manifest.json", {"global_steps": 2, "files": [{"bytes": 7}, {"bytes": 5}]})
    (tag.parent / "latest").write_text("global_step2")
    (tag.parent / "global_step4").mkdir()  # being saved
    return found


def test_a_run_under_way_is_known(run: RunFolder) -> None:
    status = read_run(run.path)
    assert status.state == "running" and [one.verdict for one in status.attempts] == ["failed", None]
    assert status.attempts[0].faults == (NASTY,) and list(status.attempts[1].missing) == ["node-1"]
    assert [one.last_step for one in status.attempts] == [3, 4]
    (rank,) = status.ranks
    assert (rank.host, rank.step, rank.memory_bytes, rank.state) == ("node-0", 4, 3 << 20, "at work")
    assert [(one.tag, one.step, one.total_bytes, one.is_latest) for one in status.checkpoints] == [
        ("global_step2", 2, 12, True)
    ]
    assert status.latest is not None and (status.latest.attempt, status.latest.step) == (2, 4)
    assert status.age_seconds is not None and status.age_seconds < 5
    json.dumps(status.document(), allow_nan=False)
    assert status.document()["latest"]["loss"] == "nan"


def test_before_and_between_attempts_more_may_come(run: RunFolder, tmp_path: Path) -> None:
    run.record("end", 2, status=1, verdict="failed", next="again", why="lost", wait_seconds=1.0)
    status = read_run(run.path)
    assert (status.state, status.why) == ("waiting", "attempt 2 failed; another one follows")
    (tmp_path / "attempts.jsonl").touch()
    status = read_run(tmp_path)
    assert (status.state, status.why, status.is_under_way) == ("starting", "no attempt has begun", True)


def test_of_many_ranks_those_that_need_a_look_are_shown(run: RunFolder) -> None:
    figures: dict[str, Any] = {"host": "node-0", "ring_rank": 0, "step": 1, "loss": None}
    figures |= {"step_seconds": None, "tokens_per_second": None}
    ranks = [
        RankStatus(rank=rank, memory_bytes=1 << 30, age_seconds=1.0, state="at work", **figures)
        for rank in range(9)
    ]
    ranks[8] = replace(ranks[8], state="raised KeyError")
    ranks[3] = replace(ranks[3], age_seconds=240.0)
    ranks[5], ranks[6] = (replace(ranks[n], memory_bytes=n << 31) for n in (5, 6))
    table = make_tables(replace(read_run(run.path), ranks=tuple(ranks)), most=4)[1]
    assert [row[0] for row in table.rows] == ["3", "5", "6", "8"] and table.left_out == 5
    assert table.rows[0][-2:] == ("1,024 MiB", "4 min before") and table.rows[2][-2] == "12.0 GiB"
    assert [seconds_text(seconds) for seconds in (119.0, 120.0, 7199.0, 7200.0)] == [
        "119 s", "2 min", "120 min", "2.0 h",
    ]  # fmt: skip
    assert memory_text(None) == "unknown"


def test_only_what_is_known_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """(Before the first step figures were "unknown", and a first step had a false rate.)"""
    run = RunFolder(tmp_path / "run")
    run.record("start", run.start_attempt(), hosts={"node-0": 1}, world_size=1, checkpoints=str(tmp_path))

    def printed() -> str:
        print_status(read_run(run.path))
        return capsys.readouterr().out

    assert "step 1" not in printed()
    with open(run.attempt(1) / "history.jsonl", "a") as file:
        file.write(json.dumps({"step": 1, "loss": None, "tokens_per_second": None}) + "\n")
    assert "step 1\n" in printed()
    course(run.attempt(1), 3.0, first=2)
    assert "step 2, loss 3, 1,000 tokens per second" in printed()


def test_a_rank_that_others_wait_for_is_late(run: RunFolder) -> None:
    """(It was "at work".)"""
    now, folder = time.time(), run.attempt(2)
    late = {"rank": 0, "at": now - 20, "seconds": 60.0, "what": "the start of the next batch"}
    more = {"where": "load (train.py:12)", "limit_seconds": 600.0, "key": "step_timeout_seconds"}
    write_json(folder / "rank-0.late.json", late | more)
    assert read_run(run.path, now=now).ranks[0].state == (
        "late: others wait at the start of the next batch for 80 s of 600 s (step_timeout_seconds); it is in"
        " load (train.py:12)"
    )
    write_json(folder / "rank-0.late.json", late)
    assert read_run(run.path, now=now).ranks[0].state.endswith("for 80 s")
    write_json(folder / "rank-0.late.json", {"rank": 0, "at": now})
    assert read_run(run.path, now=now).ranks[0].state == "at work"


def test_a_run_of_which_nothing_is_heard_is_silent(run: RunFolder) -> None:
    late = time.time() + SILENT_SECONDS + 1
    assert read_run(run.path, late).state == "silent"
    (run.path / "launcher.json").write_text(json.dumps({"at": late - 30}))
    assert read_run(run.path, late).state == "running"
    run.record("end", 2, status=1, verdict="failed", next="stop", why="a bug", wait_seconds=0.0)
    assert read_run(run.path, late).state == "failed"


def test_whatever_stands_in_the_files_is_read(run: RunFolder) -> None:
    folder = run.attempt(2)
    write_exit(folder, 3, 75)
    for name, text in {
        "history.jsonl": b'{"step": 9, "loss": 1.0}\n{"step": 10, "lo',
        "rank-0.metrics.json": b'{"rank": 0, "st',
        "rank-1.metrics.json": b"\xff\x00[]",
        "rank-2.metrics.json": b'{"rank": 2, "step": "x", "memory_bytes": true, "links": [3, {}]}',
        "rank-4.exit.json": b'{"rank": "four"}',
        "rank-5.fault.json": b'{"frames": 3, "rank": 5}',
    }.items():
        (folder / name).write_bytes(text)
    with open(run.path / "attempts.jsonl", "ab") as file:
        file.write(b'[1]\n{"event": "start", "attempt": 2, "hosts": 4}\n\xff\xfe\n{"event": "en')
    status = read_run(run.path)
    assert [(one.rank, one.step, one.state) for one in status.ranks] == [
        (0, None, "at work"), (2, None, "at work"), (3, None, "left with status 75")
    ]  # fmt: skip
    assert status.latest is not None and status.latest.step == 9 and status.links == ()


def hostile_files(run: RunFolder, what: str) -> None:
    """Put something into a run's folder that no part of ds_ring writes."""
    folder, start = run.attempt(2), {"event": "start", "attempt": 2, "at": time.time()}
    deep = "[" * 200_000
    lines = {
        "deep JSON": deep,
        "a deep object": '{"event": ' + deep,
        "mixed types of at": "\n".join(
            json.dumps({"event": "fault", "attempt": 2, "at": at}) for at in ("x", 1, None, [2], True)
        ),
        "at 1e300": json.dumps({**start, "at": 1e300}),
        "slots 10**9": json.dumps({**start, "hosts": {"node-0": 10**9}, "world_size": 10**9}),
        "many hosts": json.dumps(
            {**start, "hosts": {f"n{n}": 4096 for n in range(10_000)}, "world_size": 1 << 20}
        ),
        "a long integer": '{"event": "start", "attempt": 2, "at": ' + "9" * 5000 + "}",
        "a verdict that is none": json.dumps({"event": "end", "attempt": 2, "verdict": {"a": 1}, "why": 3}),
    }
    if what in lines:
        with open(run.path / "attempts.jsonl", "a") as file:
            file.write(lines[what] + "\n")
        (folder / "rank-0.metrics.json").write_text(lines[what])
    elif what == "faults of mixed types":
        good = {
            "rank": 0, "at": 1.0, "step": 1, "kind": "error", "type": "E", "message": "m", "frames": ["f"],
        }  # fmt: skip
        wrong = [
            {"at": "x"}, {"at": None}, {"rank": -5}, {"rank": "1"}, {"frames": 3}, {"frames": [3]},
            {"kind": 4},
        ]  # fmt: skip
        for number, change in enumerate([{}, *wrong]):
            path = folder / f"rank-{number}.fault.json"
            path.write_text(json.dumps({**good, "traceback": "t", "rank": number, **change}))
    elif what == "rank -5":
        (folder / "rank--5.metrics.json").write_text('{"rank": -5, "at": 1.0, "links": [{"from": -1}]}')
        (folder / "rank--5.exit.json").write_text('{"rank": -5, "status": 1}')
    elif what == "a FIFO":
        for name in ("rank-7.metrics.json", "rank-7.fault.json", "rank-7.exit.json", "history.jsonl"):
            (folder / name).unlink(missing_ok=True)
            os.mkfifo(folder / name)
        os.mkfifo(run.path / "launcher.json")
        (run.path.parent / "checkpoints/latest").unlink()
        os.mkfifo(run.path.parent / "checkpoints/latest")
    elif what == "a link to /dev/zero":
        for path in (folder / "rank-7.metrics.json", folder / "history.jsonl", run.path / "launcher.json"):
            path.unlink(missing_ok=True)
            path.symlink_to("/dev/zero")
        manifest = run.path.parent / "checkpoints/global_step2/ds_ring_manifest.json"
        manifest.unlink()
        manifest.symlink_to("/dev/zero")
    elif what == "a file of a terabyte":
        for path in (run.path / "attempts.jsonl", folder / "rank-0.metrics.json", run.path / "launcher.json"):
            with open(path, "ab") as file:
                file.truncate(1 << 40)


@pytest.mark.parametrize(
    "what",
    [
        "deep JSON", "a deep object", "mixed types of at", "at 1e300", "slots 10**9", "many hosts",
        "a long integer", "a verdict that is none", "faults of mixed types", "rank -5", "a FIFO",
        "a link to /dev/zero", "a file of a terabyte",
    ],
)  # fmt: skip
def test_files_that_nobody_of_ds_ring_writes_are_left_out(run: RunFolder, what: str) -> None:
    hostile_files(run, what)
    started = unqueued_seconds()
    status = read_run(run.path)
    json.dumps(status.document(), allow_nan=False)
    print_status(status)
    find_culprit(run.attempt(2), (Host(name="node-0", slots=1),), 1)
    newest_checkpoint(run.path.parent / "checkpoints")
    assert unqueued_seconds() - started < 5.0
    assert [one.number for one in status.attempts] == [1, 2]
    if what == "faults of mixed types":
        assert [(one.rank, one.state) for one in status.ranks] == [(0, "raised E")]


@given(
    st.dictionaries(
        st.sampled_from(
            [*EventRecord.model_fields, *MetricsRecord.model_fields, "from", "frames", "traceback"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=8,
        ),
    )
)
def test_a_record_of_any_values_is_read(
    tmp_path_factory: pytest.TempPathFactory, value: dict[str, Any]
) -> None:
    found = RunFolder(tmp_path_factory.mktemp("run"))
    found.start_attempt()
    text = json.dumps({"event": "start", "attempt": 1, "rank": 0, **value})
    for name in ("attempts.jsonl", "launcher.json"):
        (found.path / name).write_text(text)
    for name in (
        "history.jsonl",
        "rank-0.metrics.json",
        "rank-0.fault.json",
        "rank-0.exit.json",
        "rank-0.log",
    ):
        (found.attempt(1) / name).write_text(text)
    status = read_run(found.path)
    json.dumps(status.document(), allow_nan=False)
    find_culprit(found.attempt(1), (Host(name="node-0", slots=1),), 1)


def test_a_rate_below_0_is_none(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    lines = (json.dumps({"step": 1, "tokens_per_second": rate}) for rate in (-1.0, 2, "inf"))
    path.write_text("\n".join(lines))
    assert [one.tokens_per_second for one in read_lines(path, HistoryRecord)] == [None, 2.0, math.inf]


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Change some bytes, numbers or pieces of a file at random."""
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randrange(len(data) + 1), draw.randint(0, 8)
        piece = draw.choice(
            [
                bytes(draw.randrange(256) for _ in range(length)), b"", b"-1", b"1e999", b"9" * 400, b"null",
                b'""', b"[" * 5000, b"{}", b"\n", b"\\ud800", data[at : at + 40],
            ]
        )  # fmt: skip
        data = data[:at] + piece + data[at + draw.choice([0, length]) :]
    return data


@pytest.mark.parametrize("rounds", [40, 1000])
@pytest.mark.day("40")
def test_mutated_files_of_a_run_are_read(run: RunFolder, rounds: int) -> None:
    folder = run.attempt(2)
    write_fault(folder, RankFault(0, 1.0, 2, "error", "E", "m", ("a.py:1",), "t"))
    write_exit(folder, 1, 1)
    (run.path / "launcher.json").write_text(json.dumps({"at": 1.0, "host": "h", "pid": 3, "token": "t"}))
    whole = {
        path: path.read_bytes()
        for place in (run.path, run.path.parent / "checkpoints")
        for path in place.rglob("*")
        if path.is_file()
    }
    for number in range(rounds):
        draw = random.Random(number)
        for path, data in whole.items():
            path.write_bytes(mutated(data, draw) if draw.random() < 0.4 else data)
        status = read_run(run.path)
        json.dumps(status.document(), allow_nan=False)
        found = find_culprit(folder, (Host(name="node-0", slots=1), Host(name="node-1", slots=1)), 1)
        decide([Outcome(2, 1, None, False, False, found)], None)
        newest_checkpoint(run.path.parent / "checkpoints")


def test_a_readers_clock_that_is_ahead_makes_no_run_silent(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.1)
    ahead = time.time() + 240.0
    with run_held(run.path):
        assert read_run(run.path, ahead).state == "silent"
        found = read_run(run.path, ahead, confirm_seconds=20.0)
        assert found.state == "running" and abs(found.at - time.time()) < 60
    assert read_run(run.path, ahead, confirm_seconds=0.5).state == "silent"  # nobody speaks any more
    (run.path / "launcher.json").write_text(
        re.sub('"started": [^,]*', '"started": 1.0', (run.path / "launcher.json").read_text())
    )
    started = time.monotonic()
    assert (
        read_run(run.path, ahead, confirm_seconds=60.0).state == "silent"
    )  # its launcher is known to be gone
    assert time.monotonic() - started < 30


def test_a_run_without_a_ring_says_so(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    end = {"status": 0, "verdict": "done", "next": "stop", "why": "done", "wait_seconds": 0.0}
    run.record("end", 2, **end, ring=False)
    assert cli.main(["status", str(run.path)]) == 0
    assert "done (no rank has made a ring)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("what", ["nothing", "a file", "another folder", "an attempt"])
def test_what_is_no_run_is_refused(
    tmp_path: Path, run: RunFolder, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    paths = {"nothing": "no-such", "a file": "file", "another folder": ".", "an attempt": "run/attempt-1"}
    path = tmp_path / paths[what]
    with pytest.raises(RingConfigError, match="expected the folder of a run"):
        read_run(path)
    assert cli.main(["status", str(path)]) == 2
    assert "expected the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verdict", "status"), [("done", 0), ("failed", 1), ("interrupted", 1), ("preempted", 75), (None, 0)]
)
def test_the_exit_status_is_that_of_the_state(
    run: RunFolder, verdict: str | None, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    if verdict is not None:
        run.record("end", 2, status=status, verdict=verdict, next="stop", why=verdict, wait_seconds=0.0)
    assert cli.main(["status", str(run.path), "--json"]) == status
    assert json.loads(capsys.readouterr().out)["state"] == (verdict or "running")
    assert cli.main(["status", str(run.path)]) == status
    printed = capsys.readouterr().out
    assert "global_step2" in printed and "node-1" in printed and "\x1b" not in printed and "[bold]" in printed


def test_a_long_history_is_thinned_out_evenly(tmp_path: Path) -> None:
    history = RunHistory(tmp_path / "history.jsonl", most_lines=8)
    for step in range(1, 101):
        history.add({"step": step})
        lines = (tmp_path / "history.jsonl").read_text().splitlines()
        assert len(lines) <= 8
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(1, 100, 16))


def test_times_of_a_link_are_milliseconds_and_bytes_kibibytes(run: RunFolder) -> None:
    links = next(one for one in make_tables(read_run(run.path)) if one.title.startswith("Hop times"))
    assert [row[3:] for row in links.rows] == [("10.00 ms", "1.00 ms", "3,072 KiB")]


def test_of_a_larger_file_nothing_or_the_last_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "letters"
    path.write_bytes(b"abcdef")
    assert [read_bytes(path, most, last) for most in (6, 4) for last in (False, True)] == [
        b"abcdef", b"abcdef", None, b"cdef"
    ]  # fmt: skip

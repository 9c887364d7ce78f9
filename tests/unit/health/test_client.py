"""A rank's side of the failure detector, against a monitor that the test plays."""

from __future__ import annotations

import json
import logging
import multiprocessing
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from ds_ring.error_origins import is_distributed_error
from ds_ring.errors import RingPeerError
from ds_ring.health import client as client_module
from ds_ring.health import stuck_waits
from ds_ring.health.client import DetectorClient, LateNotice
from ds_ring.health.failure_detector.wire import Fault
from ds_ring.health.stuck_waits import call_guarded, make_peer_error
from ds_ring.health.whereabouts import describe_place
from ds_ring.limits import Limit
from ds_ring.schedule.grid import Grid
from tests.clock import wait_until

HEARTBEAT_S = 1.0


class Clock:
    """The time of the detector's module: the real one, and what a test adds."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.added_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Monitor:
    """Answer heartbeats, and keep what the rank says."""

    def __init__(self) -> None:
        self.connection, self.of_rank = socket.socketpair()
        self.heard: list[dict[str, Any]] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def say(self, **message: Any) -> None:
        with suppress(OSError):  # the rank has left
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [item for item in self.heard if item["kind"] == kind]

    def _serve(self) -> None:
        with suppress(OSError):
            for line in self.connection.makefile("rb"):
                message = json.loads(line)
                self.heard.append(message)
                if message["kind"] == "beat":
                    self.say(kind="beat")


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    built = Monitor()
    yield built
    built.connection.close()


@pytest.mark.parametrize("pause_s", [1.5 * HEARTBEAT_S, 100.0])
def test_a_pause_of_this_process_is_no_silence_of_the_monitor(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    """(Suspended, or stopped for a debugger. A seeded fault did not excuse it.)"""
    clock = Clock()
    monkeypatch.setattr(client_module, "time", clock)
    detector = DetectorClient(1, monitor.of_rank, 0, HEARTBEAT_S)
    wait_until(lambda: len(monitor.kinds("beat")) > 1)
    clock.added_s = pause_s
    beats = len(monitor.kinds("beat"))
    wait_until(lambda: len(monitor.kinds("beat")) > beats + 2)
    assert detector.fault is None and detector.is_open
    detector.leave()


def test_a_monitor_that_is_silent_while_this_process_runs_is_lost(monitor: Monitor) -> None:
    ours, theirs = socket.socketpair()
    detector = DetectorClient(1, ours, 0, 0.3)
    wait_until(lambda: detector.fault is not None)
    assert detector.fault is not None and "no answer for" in detector.fault.cause
    theirs.close()


def in_a_function_of_the_test(seconds: float) -> None:
    time.sleep(seconds)


def test_a_late_rank_says_where_it_is_and_logs_it(monitor: Monitor, caplog: pytest.LogCaptureFixture) -> None:
    detector = DetectorClient(1, monitor.of_rank, 0, HEARTBEAT_S)
    threading.Timer(0.1, lambda: monitor.say(kind="where")).start()
    in_a_function_of_the_test(0.5)
    wait_until(lambda: monitor.kinds("at"))
    (answer,) = monitor.kinds("at")
    assert answer["text"].startswith("in_a_function_of_the_test (test_client.py:"), answer
    late = {"rank": 1, "what": "collective 7", "since": 6.0, "limit_s": 60.0, "key": "a_key"}
    with caplog.at_level(logging.WARNING, "ds_ring"):
        monitor.say(kind="late", at="load (train.py:3)", **late)
        monitor.say(kind="on time", rank=1, since=8.0)
        wait_until(lambda: len(caplog.records) == 2)
    assert caplog.records[0].getMessage() == (
        "rank 1 is late: others have waited 6.0 s for it at collective 7, and is in load (train.py:3);"
        " it counts as failed after 60 s (a_key)"
    )
    assert caplog.records[1].getMessage() == "rank 1 goes on"
    detector.leave()


def test_a_notice_without_a_place_is_a_sentence() -> None:
    assert "at a wait; it counts" in str(LateNotice(2, "a wait", 1.0, Limit(3.0, "key"), ""))


def test_heartbeats_say_nothing_of_collectives_unless_asked(monitor: Monitor) -> None:
    detector = DetectorClient(1, monitor.of_rank, 0, HEARTBEAT_S)
    wait_until(lambda: monitor.kinds("beat"))
    assert monitor.kinds("beat")[0] == {"kind": "beat"}
    with detector.within("nothing", Limit(1.0, "key")):
        assert detector._read_calls() == {}
    detector.leave()


def test_a_mesh_that_is_dropped_while_its_process_ends_says_so(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SystemExit frees the mesh before the process ends: others may be in a collective for ever."""
    monkeypatch.setattr(client_module, "collective_calls", lambda not_compared: {"0": 7})
    detector = DetectorClient(1, monitor.of_rank, 0, HEARTBEAT_S)
    detector.report_collectives("the training script", Limit(10.0, "step_timeout_seconds"))
    detector.leave_later()
    assert detector.is_open
    detector.end()
    wait_until(lambda: monitor.kinds("bye"))
    assert monitor.kinds("bye")[0]["in"] == "the training script" and not detector.is_open


@pytest.mark.parametrize("judges", [True, False])
def test_a_mesh_that_is_dropped_leaves_the_job(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch, judges: bool
) -> None:
    monkeypatch.setattr(client_module, "collective_calls", lambda not_compared: {"0": 7})
    monkeypatch.setattr(client_module, "LINGER_S", 0.3)
    detector = DetectorClient(1, monitor.of_rank, 0, HEARTBEAT_S)
    if judges:
        detector.report_collectives("the training script", Limit(10.0, "step_timeout_seconds"))
    detector.leave_later()
    wait_until(lambda: monitor.kinds("bye"))
    assert monitor.kinds("bye") == [{"kind": "bye"}] and not detector.is_open


def test_a_guarded_call_that_takes_too_long_names_the_limit(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stuck_waits, "_in_stuck_waits", [])  # else the tests' process ends with exit code 1
    detector, wake = DetectorClient(1, monitor.of_rank, 0, HEARTBEAT_S), threading.Event()

    def verdict() -> None:
        wait_until(lambda: monitor.kinds("timeout"))
        monitor.say(kind="fault", rank=0, cause=monitor.kinds("timeout")[0]["cause"])

    threading.Thread(target=verdict, daemon=True).start()
    with pytest.raises(RingPeerError, match=r"did not come to a call within 0.5 s \(a_key\)"):
        call_guarded(wake.wait, detector, Grid(2, 2), "a call", 1, Limit(0.5, "a_key"))
    assert monitor.kinds("wait")[0]["limit"] == 0.5
    wake.set()
    detector.leave()


def test_a_guarded_call_that_ends_is_not_waited_for_any_more(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stuck_waits, "PATIENCE_S", 0.01)
    detector, wake = DetectorClient(1, monitor.of_rank, 0, HEARTBEAT_S), threading.Event()
    threading.Thread(target=lambda: wait_until(lambda: monitor.kinds("wait")) or wake.set()).start()
    assert call_guarded(wake.wait, detector, Grid(2, 2), "a call", 1, Limit(9.0, "a_key"))
    wait_until(lambda: monitor.kinds("go"))
    assert not monitor.kinds("timeout")
    detector.leave()


def test_where_a_thread_is_names_the_function_of_the_user() -> None:
    """Inside a library the call that the script made; of a thread that has ended nothing is known."""
    wake = threading.Event()

    def of_the_user() -> None:
        wake.wait()

    thread = threading.Thread(target=of_the_user)
    thread.start()
    number = thread.ident
    assert number is not None
    pattern = r".*wait \(threading.py:\d+\), called by .*of_the_user \(test_client.py:\d+\)"
    wait_until(lambda: re.fullmatch(pattern, describe_place(number)))
    wake.set()
    thread.join()
    assert describe_place(number) == "a thread that has ended"


def test_a_fault_of_no_rank_of_the_world_names_none() -> None:
    error = make_peer_error(Grid(2, 2), 1, 3, Fault(-1, "the monitor is lost"))
    assert (error.ring_rank, error.hop, error.peer, error.cause) == (1, 3, None, "the monitor is lost")


def test_an_error_is_of_a_collective_by_who_called_it() -> None:
    import torch
    import torch.distributed as dist

    def raised_in(module: str, code: str) -> BaseException:
        names: dict[str, Any] = {"__name__": module, "torch": torch}
        exec(f"def call():\n    {code}", names)
        with pytest.raises(RuntimeError) as caught:
            names["call"]()
        return caught.value

    compiled, local = (
        "torch.ones(2).view(3)",
        "raise RuntimeError('nccl: Connection reset by peer, gloo, c10d')",
    )
    assert is_distributed_error(raised_in("torch.distributed.distributed_c10d", compiled))
    assert is_distributed_error(raised_in("deepspeed.runtime.engine", compiled))
    assert not is_distributed_error(raised_in("model", compiled))
    assert not is_distributed_error(raised_in("__main__", compiled))
    assert is_distributed_error(raised_in("__main__", compiled), "__main__")
    assert not is_distributed_error(raised_in("__main__", local), "__main__")
    assert not is_distributed_error(raised_in("torch.distributedly", compiled))
    assert is_distributed_error(dist.DistBackendError("anything"))
    assert not is_distributed_error(RingPeerError(0, None, None, "gloo")) and not is_distributed_error(
        OSError()
    )


def test_a_forked_child_does_not_end_for_the_stuck_wait_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a data loader's worker: the thread that waits is not in it."""
    monkeypatch.setattr(stuck_waits, "_in_stuck_waits", [])
    stuck_waits.keep_for_ever(object())
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
    child.start()
    child.join(10.0)
    assert child.exitcode == 0

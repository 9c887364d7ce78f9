"""The failure path of a device: marks and works that fail or never come give a typed error, and no hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_ring.comm import waiting
from ds_ring.comm.collective import collective
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.in_flight import Pending
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.waiting import CallSite
from ds_ring.cuda import streams as device
from ds_ring.cuda import watchdog
from ds_ring.cuda.watchdog import WorkWatchdog
from ds_ring.errors import RingPeerError
from ds_ring.health import stuck_waits
from ds_ring.health.failure_detector.wire import Fault
from ds_ring.limits import Timeouts
from ds_ring.schedule.grid import Grid
from tests.clock import wait_until
from tests.fake_cuda import fake_gpu

OWN, PEER, SOON_S = 1, 2, 0.2
DEVICE_FAILS = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.fixture(autouse=True)
def saved(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is kept for ever, until the end of a test: else the tests' process ends with exit code 1."""
    saved: list[object] = []
    monkeypatch.setattr(stuck_waits, "_in_stuck_waits", saved)
    return saved


class Monitor:
    """The connection to the monitor: believes whatever is said first."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.noticed, self.is_open, self.told = False, True, []

    def report_timeout(self, on: Sequence[int], cause: str) -> None:
        self.told.append(("timeout", tuple(on)))
        self.fault = self.fault or Fault(on[0], cause)

    def report_failure(self, cause: str) -> None:
        self.told.append(("failed", cause))
        self.fault = self.fault or Fault(OWN, cause)

    def subscribe(self, wake: Any) -> None: ...
    def unsubscribe(self, wake: Any) -> None: ...
    def report_wait(self, on: Sequence[int], place: Any, what: str) -> None: ...
    def wait_done(self) -> None: ...


class Work:
    """A Work of NCCL; `after` says when it completes, or raises; a wait for it may raise `error`."""

    def __init__(self, after: Callable[[], bool], error: Exception | None = None) -> None:
        self.is_completed, self._error = after, error

    def wait(self, timeout: object = None) -> bool:
        if self._error is not None:
            raise self._error
        return True


class Marks:
    """The streams of a device, whose marks in front of and behind a wait are reached when these say so."""

    def __init__(self, *reached: Callable[[], bool]) -> None:
        self._marks = iter(reached)

    def mark(self) -> Callable[[], bool]:
        return next(self._marks)

    def reached(self, mark: Callable[[], bool]) -> bool:
        return mark()

    def prepare_thread(self) -> None: ...


class Group:
    """A process group that notes its abort."""

    def __init__(self, name: str, aborted: list[str]) -> None:
        self._name, self._aborted = name, aborted
        self.during: Callable[[], object] = bool

    def abort(self) -> None:
        self._aborted.append(self._name)
        self.during()


def never() -> bool:
    return False


def at_once() -> bool:
    return True


def fails() -> bool:
    raise DEVICE_FAILS


class Ring:
    """Ring rank 1 of 4, its groups and its watch of a device."""

    def __init__(self, monitor: Monitor | None = None) -> None:
        self.aborted: list[str] = []
        self.monitor = monitor or Monitor()
        self.groups = {
            name: Group(name, self.aborted) for name in ("sequence", "ring", "ulysses", "data", "world")
        }
        built: dict[str, Any] = {f"{name}_group": g for name, g in self.groups.items() if name != "world"}
        self.mesh = RingMesh(Grid(4, 4), OWN, detector=self.monitor, **built)  # type: ignore[arg-type]
        self.watchdog = WorkWatchdog.for_mesh(self.mesh)

    def post(
        self, works: Callable[[], bool], came: Callable[[], bool] = at_once, group: str = "ring",
        error: Exception | None = None, received: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """A batch from rank 2, and the wait that the host makes for it."""
        received = torch.zeros(1) if received is None else received
        batch = Pending(
            [Work(works, error)], [(PEER,)], self.mesh, CallSite(7, 3), SOON_S, [], [received],
            self.groups[group], self.watchdog, Marks(came, works),
        )  # type: ignore[arg-type, list-item]  # fmt: skip
        before = time.monotonic()
        batch.wait()
        assert time.monotonic() - before < SOON_S, "the host waited"

    def broken(self) -> RingPeerError:
        """The error that the next call raises, as soon as it is there."""
        wait_until(lambda: self.mesh.state.broken is not None)
        with pytest.raises(RingPeerError) as caught:
            Exchange(RingMesh(self.mesh.grid, OWN, state=self.mesh.state)).all_gather(torch.zeros(1), Any, 4)
        return caught.value


def test_a_batch_that_never_ends_names_its_peer_and_aborts_its_group() -> None:
    ring = Ring()
    ring.post(at_once, group="sequence")
    ring.post(never)
    error = ring.broken()
    assert (error.ring_rank, error.hop, error.peer) == (OWN, 3, PEER)
    assert "call 7, hop 3 before the deadline (hop_timeout_seconds;" in error.cause
    wait_until(lambda: ring.aborted == ["ring"])
    assert not ring.monitor.noticed, "an error that nobody has seen"


@pytest.mark.parametrize(("came", "works"), [(fails, never), (at_once, fails)], ids=["mark", "work"])
def test_a_device_that_fails_names_its_own_rank_and_accuses_nobody(came: Any, works: Any) -> None:
    """(An error of a mark ended the thread, and no batch was watched any more.)"""
    ring = Ring()
    ring.post(works, came)
    error = ring.broken()
    assert error.peer == OWN and "its device failed: CUDA error: an illegal memory" in error.cause
    assert [kind for kind, _ in ring.monitor.told] == ["failed"]
    wait_until(lambda: ring.aborted == ["ring"])


def test_a_device_that_never_comes_to_a_batch_names_its_own_rank() -> None:
    ring = Ring()
    object.__setattr__(ring.mesh, "timeouts", Timeouts(step=SOON_S))
    ring.post(never, never)
    error = ring.broken()
    assert error.peer == OWN and "did not come to call 7, hop 3 within 0.2 s" in error.cause


def test_a_verdict_about_another_rank_ends_the_wait_for_a_busy_device() -> None:
    ring = Ring()
    ring.post(never, never)
    time.sleep(0.1)
    assert ring.mesh.state.broken is None
    ring.monitor.fault = Fault(3, "its process ended")
    error = ring.broken()
    assert error.peer == 3 and error.cause.endswith("its process ended")


def test_only_stuck_groups_of_the_mesh_are_aborted_and_once() -> None:
    ring = Ring()

    def fails_too() -> None:
        raise RuntimeError("NCCL error in abort")

    ring.groups["sequence"].during = fails_too
    for group, works in (
        ("ring", never), ("world", never), ("ulysses", at_once), ("sequence", never), ("ring", never),
    ):  # fmt: skip
        ring.post(works, group=group)
    ring.broken()
    wait_until(lambda: len(ring.aborted) >= 2)
    assert sorted(ring.aborted) == ["ring", "sequence"]
    # A batch that was posted before and is waited for only now: its group's turn comes then.
    ring.post(never, group="data")
    wait_until(lambda: len(ring.aborted) >= 3)
    assert ring.aborted[2:] == ["data"]


@pytest.mark.parametrize("stuck", [False, True])
def test_aborts_of_several_groups_are_under_way_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stuck: bool
) -> None:
    """(One after the other, the first one waited for ever: NCCL's communicators abort together.)"""
    monkeypatch.setattr(watchdog, "ABORT_S", SOON_S if stuck else 10.0)
    ring, over = Ring(), []
    together = threading.Barrier(3 if stuck else 2)
    for name in ("ring", "sequence"):
        ring.groups[name].during = lambda: over.append(together.wait(5.0))
    ring.post(never)
    ring.post(never, group="sequence")
    ring.broken()
    if stuck:  # a third one never begins: the watch gives up, says so and goes on
        wait_until(lambda: "2 of 2 process groups were not aborted in 0.2 s" in caplog.text)
        together.abort()
        ring.post(never, group="data")
        wait_until(lambda: "data" in ring.aborted)
    else:
        wait_until(lambda: len(over) == 2)


ERRORS = [
    RuntimeError("NCCL error: remote process exited"),
    dist.DistBackendError("NCCL communicator was aborted"),
]


def a_pass(exchange: Exchange) -> collective:
    """A call whose ranks have agreed."""
    exchange.spread = lambda header: torch.stack([header, header])  # type: ignore[method-assign]
    call = collective(exchange.mesh, "a pass", exchange)
    call.agree({})
    return call


@pytest.mark.parametrize("error", ERRORS, ids=["RuntimeError", "DistBackendError"])
def test_an_error_of_a_wait_names_the_culprit_and_keeps_the_memory(
    saved: list[object], error: RuntimeError
) -> None:
    """(It was raised as it is, and this rank, a victim, told the monitor that it had failed itself.)"""
    ring, received = Ring(), torch.zeros(1)

    def report_timeout(on: Sequence[int], cause: str) -> None:
        ring.monitor.told.append(("timeout", tuple(on)))
        ring.monitor.fault = Fault(3, "its process ended")  # rank 2 waits for rank 3

    ring.monitor.report_timeout = report_timeout  # type: ignore[method-assign]
    with pytest.raises(RingPeerError) as caught, a_pass(Exchange(ring.mesh)):
        ring.post(at_once, error=error, received=received)
    assert (caught.value.hop, caught.value.peer) == (3, 3) and caught.value.cause.endswith(
        "its process ended"
    )
    assert caught.value.__cause__ is error
    assert ring.monitor.told == [("timeout", (PEER,))] and ring.monitor.noticed
    assert any(received is entry for tensors in saved if isinstance(tensors, list) for entry in tensors)
    assert ring.broken().peer == 3
    wait_until(lambda: ring.aborted == ["ring"])


def test_an_error_of_the_device_in_a_wait_names_its_own_rank() -> None:
    ring = Ring()
    with pytest.raises(RingPeerError, match="its device failed: CUDA error: an illegal"):
        ring.post(at_once, error=DEVICE_FAILS)
    assert [kind for kind, _ in ring.monitor.told] == ["failed"]


@pytest.mark.parametrize("fault", [never, fails], ids=["late", "failed"])
def test_results_are_not_settled_where_a_message_failed(fault: Callable[[], bool]) -> None:
    """The message is the last one: no later call of attention would raise."""
    ring = Ring()
    ring.post(at_once)
    ring.post(fault)
    with pytest.raises(RingPeerError) as caught:
        ring.mesh.synchronize()
    assert caught.value.peer == (PEER if fault is never else OWN)
    assert ring.monitor.noticed, "it was raised here"


def test_results_are_settled_once_every_message_has_arrived() -> None:
    ring = Ring()
    ring.mesh.synchronize()
    assert not ring.watchdog._running, "a thread for nothing"
    began = time.monotonic()
    ring.post(lambda: time.monotonic() > began + 0.1)
    ring.mesh.synchronize()
    assert time.monotonic() > began + 0.1 and ring.mesh.state.broken is None
    ring.post(fails)
    wait_until(lambda: ring.mesh.state.broken is not None, 5.0)  # later batches are watched, too


@pytest.mark.parametrize("poll_fast", [False, True])
def test_a_watch_asks_more_and_more_seldom_unless_somebody_waits(
    monkeypatch: pytest.MonkeyPatch, poll_fast: bool
) -> None:
    """(Each millisecond, whoever waits: 400 queries of a batch that takes 0.4 s.)"""
    slept, woken = [], []
    clock = SimpleNamespace(monotonic=lambda: sum(slept) + sum(woken), sleep=slept.append)
    monkeypatch.setattr(waiting, "time", clock)
    event = SimpleNamespace(is_set=lambda: poll_fast, wait=woken.append)
    assert not waiting.poll(never, 0.4, event)  # type: ignore[arg-type]
    pauses, others = (slept, woken) if poll_fast else (woken, slept)
    assert not others and sum(pauses) == pytest.approx(0.4)
    if poll_fast:
        assert max(pauses) == waiting.POLL_S
    else:
        assert pauses[:3] == [0.001, 0.002, 0.004] and max(pauses) == 0.02 and len(pauses) < 30


class Driver:
    """CUDA's driver: notes by thread the queries of events and the capture modes."""

    def __init__(self, results: Sequence[int]) -> None:
        self.results, self.calls = iter(results), []

    def cuEventQuery(self, event: Any) -> int:  # noqa: N802
        self.calls.append((threading.get_ident(), "query", event.value))
        return next(self.results)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        self.calls.append((threading.get_ident(), "mode", mode._obj.value))
        return 0


def test_events_are_queried_without_the_lock_by_a_thread_that_disturbs_no_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver([600, 600, 0, 600, 0])
    monkeypatch.setattr(device, "_load_driver", lambda: driver)

    def query() -> bool:
        raise AssertionError("Event.query holds the interpreter's lock")

    event = SimpleNamespace(cuda_event=4711, query=query)
    with fake_gpu(set_device=None, Stream=None):
        cuda = device.CudaStreams(torch.device("cuda", 0))
        monkeypatch.setattr(cuda, "mark", lambda: event)
        ring = Ring()
        batch = Pending(
            [Work(at_once)], [(PEER,)], ring.mesh, CallSite(7, 3), SOON_S, [], [], ring.groups["ring"],
            ring.watchdog, cuda,
        )  # type: ignore[arg-type, list-item]  # fmt: skip
        batch.wait()
        ring.mesh.synchronize()
    assert [call[1:] for call in driver.calls[:2]] == [("mode", device.THREAD_LOCAL), ("query", 4711)]
    threads = {thread for thread, *_ in driver.calls}
    assert len(threads) == 1 and threads != {threading.get_ident()} and ring.mesh.state.broken is None


def test_a_query_that_fails_raises_the_error_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_load_driver", lambda: Driver([700]))
    with pytest.raises(torch.AcceleratorError, match="illegal memory"):
        device.CudaStreams.reached(None, SimpleNamespace(cuda_event=1, query=fails))  # type: ignore[arg-type]


def test_a_batch_of_a_pass_that_raised_is_aborted_too() -> None:
    """Nobody waits for it any more, and nobody completes it."""
    ring = Ring()
    exchange = Exchange(ring.mesh)
    exchange._latest = Pending(
        [Work(never)], [(PEER,)], ring.mesh, CallSite(7, 3), SOON_S, [], [torch.zeros(1)],
        ring.groups["ring"], ring.watchdog, Marks(),
    )  # type: ignore[arg-type, list-item]  # fmt: skip
    with pytest.raises(ZeroDivisionError), a_pass(exchange):
        raise ZeroDivisionError("out of memory, say")
    assert ring.broken().peer == OWN
    wait_until(lambda: ring.aborted == ["ring"])

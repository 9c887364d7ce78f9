"""The failure path of a device: marks and works that fail or never come give a typed error, and no hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ds_ring.errors import RingPeerError
from ds_ring.health.monitor.failure_detector import Fault
from ds_ring.runtime import pending
from ds_ring.runtime.exchange import Exchange
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.pending import DeviceWatch, Pending
from ds_ring.runtime.waiting import Place
from ds_ring.schedule.grid import Grid

OWN, PEER, SOON_S = 1, 2, 0.2
DEVICE_FAILS = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class Monitor:
    """The connection to the monitor: believes whatever is said first."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.noticed, self.is_open, self.told = False, True, []

    def accuse(self, on: Sequence[int], cause: str) -> None:
        self.told.append(("accuse", tuple(on)))
        self.fault = self.fault or Fault(on[0], cause)

    def failed(self, cause: str) -> None:
        self.told.append(("failed", cause))
        self.fault = self.fault or Fault(OWN, cause)

    def expect(self, wake: Any) -> None: ...
    def expect_no_more(self, wake: Any) -> None: ...
    def waits(self, on: Sequence[int], place: Any, what: str) -> None: ...
    def goes_on(self) -> None: ...


class Work:
    """A Work of NCCL; `after` says when it completes, or raises."""

    def __init__(self, after: Callable[[], bool]) -> None:
        self.is_completed = after

    def wait(self, timeout: object = None) -> bool:
        return True


class Group:
    """A process group that notes its abort."""

    def __init__(self, name: str, aborted: list[str], error: Exception | None = None) -> None:
        self._name, self._aborted, self._error = name, aborted, error

    def abort(self) -> None:
        self._aborted.append(self._name)
        if self._error is not None:
            raise self._error

    def _get_backend(self, device: torch.device) -> Any:
        raise RuntimeError("no backend for this device")


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
        made: dict[str, Any] = {f"{name}_group": g for name, g in self.groups.items() if name != "world"}
        self.mesh = RingMesh(Grid(4, 4), OWN, watch=self.monitor, **made)  # type: ignore[arg-type]
        self.watch = DeviceWatch(self.mesh)

    def post(
        self, works: Callable[[], bool], begun: Callable[[], bool] = at_once, group: str = "ring"
    ) -> None:
        """A batch from rank 2, and the wait that the host makes for it."""
        batch = Pending(
            [Work(works)], [(PEER,)], self.mesh, Place(7, 3), SOON_S, [], [torch.zeros(1)],
            self.groups[group], self.watch, begun,
        )  # type: ignore[arg-type, list-item]  # fmt: skip
        before = time.monotonic()
        batch.wait()
        assert time.monotonic() - before < SOON_S, "the host waited"

    def broken(self) -> RingPeerError:
        """The error that the next call raises, as soon as it is there."""
        self.until(lambda: self.mesh.use.broken is not None)
        with pytest.raises(RingPeerError) as caught:
            Exchange(RingMesh(self.mesh.grid, OWN, use=self.mesh.use))._check_alive(3)
        return caught.value

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 10.0
        while not true():
            assert time.monotonic() < end, "hangs"
            time.sleep(0.01)


def test_a_batch_that_never_ends_names_its_peer_and_aborts_its_group() -> None:
    ring = Ring()
    ring.post(at_once, group="sequence")
    ring.post(never)
    error = ring.broken()
    assert (error.ring_rank, error.hop, error.peer) == (OWN, 3, PEER)
    assert "call 7, hop 3 before the deadline (hop_timeout_seconds;" in error.cause
    ring.until(lambda: ring.aborted == ["ring"])
    assert not ring.monitor.noticed, "an error that nobody has seen"


@pytest.mark.parametrize(("begun", "works"), [(fails, never), (at_once, fails)], ids=["mark", "work"])
def test_a_device_that_fails_names_its_own_rank_and_accuses_nobody(begun: Any, works: Any) -> None:
    """(An error of a mark ended the thread, and no batch was watched any more.)"""
    ring = Ring()
    ring.post(works, begun)
    error = ring.broken()
    assert error.peer == OWN and "its device failed: CUDA error: an illegal memory" in error.cause
    assert [kind for kind, _ in ring.monitor.told] == ["failed"]
    ring.until(lambda: ring.aborted == ["ring"])


def test_a_device_that_never_comes_to_a_batch_names_its_own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "BUSY_TIMEOUT_S", SOON_S)
    ring = Ring()
    ring.post(never, never)
    error = ring.broken()
    assert error.peer == OWN and "did not come to call 7, hop 3 within 0.2 s" in error.cause


def test_a_verdict_about_another_rank_ends_the_wait_for_a_busy_device() -> None:
    ring = Ring()
    ring.post(never, never)
    time.sleep(0.1)
    assert ring.mesh.use.broken is None
    ring.monitor.fault = Fault(3, "its process ended")
    error = ring.broken()
    assert error.peer == 3 and error.cause.endswith("its process ended")


def test_only_stuck_groups_of_the_mesh_are_aborted_once_and_in_the_order_of_their_making() -> None:
    ring = Ring()
    ring.groups["sequence"]._error = RuntimeError("NCCL error in abort")
    for group, works in (
        ("ring", never), ("world", never), ("ulysses", at_once), ("sequence", never), ("ring", never),
    ):  # fmt: skip
        ring.post(works, group=group)
    ring.broken()
    ring.until(lambda: len(ring.aborted) >= 2)
    assert ring.aborted == ["sequence", "ring"]
    # A batch that was posted before and is waited for only now: its group's turn comes then.
    ring.post(never, group="data")
    ring.until(lambda: len(ring.aborted) >= 3)
    assert ring.aborted == ["sequence", "ring", "data"]


def test_aborts_of_several_groups_stand_in_one_nccl_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring()

    class Backend:
        def _group_start(self) -> None:
            ring.aborted.append("start")

        def _group_end(self) -> None:
            ring.aborted.append("end")

    monkeypatch.setattr(Group, "_get_backend", lambda self, device: Backend())
    ring.post(never)
    ring.post(never, group="sequence")
    ring.broken()
    ring.until(lambda: len(ring.aborted) >= 4)
    assert ring.aborted == ["start", "sequence", "ring", "end"]


def test_a_batch_of_a_pass_that_raised_is_aborted_too() -> None:
    """Nobody waits for it any more, and nobody completes it."""
    ring = Ring()
    exchange = Exchange(ring.mesh)
    exchange._latest = Pending(
        [Work(never)], [(PEER,)], ring.mesh, Place(7, 3), SOON_S, [], [torch.zeros(1)],
        ring.groups["ring"], ring.watch,
    )  # type: ignore[arg-type, list-item]  # fmt: skip
    with pytest.raises(ZeroDivisionError), exchange.guarded():
        raise ZeroDivisionError("out of memory, say")
    assert ring.broken().peer == OWN
    ring.until(lambda: ring.aborted == ["ring"])

"""What a collective call and an exchange raise and tell, on one rank of two that is answered here."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_ring import Causal, RingAttention, RingConfig
from ds_ring.comm import in_flight, waiting
from ds_ring.comm.collective import Agreement, collective
from ds_ring.comm.exchange import Exchange, make_batch_exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import Message
from ds_ring.comm.waiting import CallSite, Task
from ds_ring.data.failure_attribution import attribute_failure
from ds_ring.errors import (
    RingBufferError,
    RingConfigError,
    RingMeshError,
    RingMismatchError,
    RingPeerError,
    RingShapeError,
)
from ds_ring.health import stuck_waits
from ds_ring.health.failure_detector.wire import Fault
from ds_ring.schedule.grid import Grid

REPORTS = [
    f'{{"operation": "a call", "number of the call": "0", "window": "{window}"}}'.encode()
    for window in (3, 4)
]


class Answered(Exchange):
    """An exchange of rank 0 of two whose other rank is played: what it sends and is told is noted.

    Args:
        answer: returns the other rank's header for this rank's, or raises.
    """

    def __init__(self, answer: Any) -> None:
        super().__init__(RingMesh(Grid(2, 2), 0))
        self.answer, self.headers, self.failures = answer, [], []
        self.gathered = 0

    def spread(self, header: Tensor) -> Tensor:
        self.headers.append(header.tolist())
        both = sorted([header.tolist(), self.answer(header).tolist()])
        return torch.tensor([both[0], both[-1]])

    def all_gather(self, *_: object) -> list[Tensor]:
        self.gathered += 1
        return [torch.frombuffer(bytearray(text.ljust(1 << 15)), dtype=torch.uint8) for text in REPORTS]

    def failed(self, error: BaseException) -> None:
        self.failures.append(type(error).__name__)

    def begin(self) -> collective:
        return collective(self.mesh, "a call", self)


def agrees(header: Tensor) -> Tensor:
    return header


def differs(header: Tensor) -> Tensor:
    return header + torch.tensor([0, 1, 0, 0])


def another_call(header: Tensor) -> Tensor:
    return torch.tensor([0, 5, 0, 0])


def refuses(header: Tensor) -> Tensor:
    return torch.tensor([1, 0, 0, 0])


def silent(header: Tensor) -> Tensor:
    raise RingPeerError(0, None, 1, "it is gone")


def test_ranks_that_agree_send_one_header_and_tell_nothing() -> None:
    exchange = Answered(agrees)
    with exchange.begin() as call:
        call.agree({"window": 3}, patience_s=2.5)
    assert exchange.headers[0][0] == 0 and len(exchange.headers) == 1 and not exchange.failures
    assert exchange.mesh.state.patience_s == 3.0


def test_a_block_that_never_agrees_sends_nothing() -> None:
    exchange = Answered(silent)
    with exchange.begin():
        pass
    assert not exchange.headers


def test_ranks_that_differ_raise_the_difference_and_tell_nobody() -> None:
    exchange = Answered(differs)
    with (
        pytest.raises(RingMismatchError, match="window: ring rank 0 has 3, ring rank 1 has 4") as raised,
        exchange.begin() as call,
    ):
        call.agree({"window": 3})
    assert raised.value.peers_know and not exchange.failures and len(exchange.headers) == 1


@pytest.mark.parametrize(("answer", "gathered"), [(another_call, 1), (refuses, 0)])
def test_a_refusal_is_sent_as_a_header_and_raised_as_it_is(answer: Any, gathered: int) -> None:
    """Reports are gathered unless all ranks refuse."""
    exchange = Answered(answer)
    with pytest.raises(RingConfigError, match="its own input") as raised, exchange.begin():
        raise RingConfigError("its own input")
    assert exchange.headers == [[1, 0, 0, 0]] and exchange.gathered == gathered
    assert raised.value.peers_know and not exchange.failures


def test_a_rank_that_hears_nobody_says_its_own_fault_first() -> None:
    exchange = Answered(silent)
    with pytest.raises(RingConfigError) as raised, exchange.begin():
        raise RingConfigError("its own input")
    assert isinstance(raised.value.__cause__, RingPeerError)
    with pytest.raises(RingPeerError), exchange.begin() as call:
        call.agree({})


def raise_in(call: collective, error: Exception, agrees: bool = True) -> None:
    with call:
        if agrees:
            call.agree({})
        raise error


def test_an_error_after_the_agreement_is_a_failure() -> None:
    exchange = Answered(agrees)
    for error in (ZeroDivisionError(), RingShapeError("late")):
        with pytest.raises(type(error)):
            raise_in(exchange.begin(), error)
    assert exchange.failures == ["ZeroDivisionError", "RingShapeError"] and len(exchange.headers) == 2


def test_an_error_while_headers_are_compared_is_a_failure() -> None:
    """The device computes meanwhile: other ranks may wait for what this rank would have sent."""
    heard = threading.Event()

    def late(header: Tensor) -> Tensor:
        heard.wait()
        return header

    exchange = Answered(late)
    call = exchange.begin()
    finish = call.compare_headers_meanwhile(Agreement.on("a call", {}))
    with pytest.raises(RingShapeError):
        raise_in(call, RingShapeError("of the first hop"), agrees=False)
    heard.set()
    finish()
    assert exchange.failures == ["RingShapeError"]


def test_what_one_call_has_told_the_call_around_it_does_not_tell_again() -> None:
    exchange = Answered(agrees)
    for agreed in (False, True):
        with pytest.raises(RingShapeError), exchange.begin():
            raise_in(exchange.begin(), RingShapeError("once"), agreed)
    assert [header[0] for header in exchange.headers] == [1, 0] and exchange.failures == ["RingShapeError"]


def test_other_errors_before_the_agreement_are_refusals_too() -> None:
    """The other ranks wait for a header, whatever keeps this rank from sending its own."""
    exchange = Answered(silent)
    with pytest.raises(ZeroDivisionError), exchange.begin():
        _ = 1 / 0
    assert [header[0] for header in exchange.headers] == [1] and not exchange.failures


def test_alone_nobody_is_told() -> None:
    exchange = Answered(silent)
    for call in (
        collective(exchange.mesh, "fake", exchange, alone=True),
        collective(RingMesh.single(), "one"),
    ):
        with pytest.raises(RingConfigError):
            raise_in(call, RingConfigError("its own input"))
    assert not exchange.headers and not exchange.failures


def test_a_mesh_has_one_call_at_a_time_and_is_free_after_an_error() -> None:
    mesh, errors = RingMesh.single(), []

    def from_another_thread() -> None:
        try:
            with collective(mesh, "other"):
                pass
        except RingMeshError as error:
            errors.append(str(error))

    def in_a_thread() -> None:
        thread = threading.Thread(target=from_another_thread)
        thread.start()
        thread.join()

    with collective(mesh, "one"):
        in_a_thread()
    assert len(errors) == 1 and "one thread at a time" in errors[0]
    with pytest.raises(ZeroDivisionError):
        raise_in(collective(mesh, "one"), ZeroDivisionError())
    in_a_thread()
    assert len(errors) == 1


# --- the exchange ----------------------------------------------------------------------------------------


def test_a_group_of_one_keeps_its_parts() -> None:
    parts = [torch.ones(2)]
    assert Exchange(RingMesh.single()).all_to_all(parts, None) == parts


class Told:
    """What a monitor would be told, and the fault that it knows of."""

    fault: Fault | None = None
    rank, is_open, noticed = 0, False, False

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.late: list[Any] = []

    def report_failure(self, cause: str) -> None:
        self.failures.append(cause)

    report_broken_collective = report_failure

    def report_timeout(self, *late: Any) -> None:
        self.late.append(late)


def exchange_of_two(detector: Any = None) -> Exchange:
    return Exchange(RingMesh(Grid(2, 2), 0, detector=detector))


def raising(error: BaseException) -> Any:
    def begin(*_: object) -> Any:
        raise error

    return begin


def start_and_fail(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, detector: Told | None = None
) -> None:
    monkeypatch.setattr(stuck_waits, "_in_stuck_waits", [])
    monkeypatch.setattr("ds_ring.comm.exchange.start_batch", raising(error))
    two = exchange_of_two(detector)
    two.start(two.world_route([1], [1], torch.zeros(1), None), [], [], 2)


def test_a_batch_that_cannot_be_started_names_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was posted of it may be written to for ever, so its buffers are kept."""
    with pytest.raises(RingPeerError, match=r"could not start call 0, hop 2: the network is gone") as raised:
        start_and_fail(monkeypatch, RuntimeError("the network is gone\nat 7"))
    assert raised.value.peer == 1
    told = Told()
    with pytest.raises(RingPeerError):
        start_and_fail(monkeypatch, RuntimeError("the network is gone"), told)
    assert told.late == [((1,), "could not start call 0, hop 2: the network is gone")]


def test_a_fault_of_ds_ring_in_a_batch_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RingBufferError, match="in flight"):
        start_and_fail(monkeypatch, RingBufferError("in flight"))


def test_the_monitor_is_told_of_faults_of_this_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stuck_waits, "_in_stuck_waits", [])
    told = Told()
    exchange_of_two(told).failed(RingPeerError(0, None, 1, "it is gone"))
    assert told.failures == []
    exchange_of_two(told).failed(ValueError("a line\nand more"))
    assert told.failures == ["ValueError in call 0: a line"]


def test_a_broken_collective_of_others_names_the_rank_that_failed() -> None:
    told = Told()
    mesh = RingMesh(Grid(2, 2), 0, detector=told)  # type: ignore[arg-type]
    broken = dist.DistBackendError("Connection closed by peer\nand more")
    for fault in (None, Fault(0, "its own")):
        told.fault = fault
        with pytest.raises(dist.DistBackendError):
            attribute_failure(mesh, raising(broken))
    told.fault = Fault(1, "it ended")
    with pytest.raises(RingPeerError, match="waiting for ring rank 1: it ended"):
        attribute_failure(mesh, raising(broken))
    assert told.noticed and told.failures == ["Connection closed by peer"] * 3


class Stuck:
    """A work that ends when it is let."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def wait(self, *_: object) -> None:
        self.end.wait()


def test_without_a_monitor_a_wait_ends_at_its_deadline_and_names_its_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stuck_waits, "_in_stuck_waits", [])
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.01)
    mesh, work, site = RingMesh(Grid(2, 2), 0), Stuck(), CallSite(3, 1)
    began = time.monotonic()
    words = "waiting for ring rank 1: it did not come to call 3, hop 1 before the deadline"
    with pytest.raises(RingPeerError, match=words):
        waiting.wait_for([work], [[1]], mesh, site, began + 0.06)  # type: ignore[list-item]
    assert time.monotonic() - began > 0.05 and mesh.state.abandoned
    work.end.set()
    fault = waiting.get_own_fault(mesh, site, RuntimeError("a bad address\nat 7"))
    assert (fault.peer, fault.hop, fault.cause) == (0, 1, "its device failed: a bad address")


def test_a_mesh_that_is_held_is_refused() -> None:
    mesh = RingMesh(Grid(2, 2), 0)
    mesh.state.refusal = "expected no call now"
    with pytest.raises(RingMeshError, match="expected no call now"), collective(mesh, "a call"):
        pass


def test_a_copy_of_a_module_is_on_the_same_mesh() -> None:
    """As nn.TransformerEncoder copies its layer, and as averages of weights are kept."""
    mesh = RingMesh.single()
    attention = RingAttention(RingConfig(ring_size=1), mesh=mesh, layout="contiguous", pattern=Causal())
    again = copy.deepcopy([attention, mesh])
    assert again[0].context is attention.context and again[1] is mesh
    assert repr(again[0]) == "RingAttention(Causal(), layout=contiguous, ring_size=1)"


def test_writes_to_tensors_of_inference_are_not_counted() -> None:
    plain = torch.zeros(2).add_(1)
    with torch.inference_mode():
        inference = torch.zeros(2)
    assert in_flight._read_versions([plain]) == [1]
    assert in_flight._read_versions([plain, inference]) == [1, 0]


def test_what_runs_in_a_waiting_thread_raises_where_its_result_is_asked_for() -> None:
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        Task(raising(ZeroDivisionError("on purpose"))).start().result()


def test_a_wait_outside_of_a_pass_has_its_own_name_and_key() -> None:
    exchange = make_batch_exchange(RingMesh(Grid(2, 2), 0), "the next batch")
    assert exchange.deadline_s == 600.0
    site = CallSite(0, None, ("the next batch", "step_timeout_seconds"))
    assert (str(site), site.limit_key, site.key) == ("the next batch", "step_timeout_seconds", (0, -1))
    assert CallSite(3, 1).limit_key.startswith("hop_timeout_seconds")


MESSAGES: dict[str, Callable[[Tensor], list[Message]]] = {
    "smaller": lambda k: [Message(k[:4], 1, "K/V", 8)],
    "larger": lambda k: [Message(torch.cat([k, k]), 1, "K/V", 8)],
    "dtype": lambda k: [Message(k.int(), 1, "K", 8, k.dtype), Message(k, 1, "V", 8, k.dtype)],
    "order": lambda k: [Message(k, 1, "V", 8), Message(k, 1, "K", 8)],
    "no second": lambda k: [Message(k, 1, "K", 8)],
    "gaps": lambda k: [Message(torch.stack([k, k], -1)[..., 0], 1, "K", 8), Message(k, 1, "V", 8)],
}


@pytest.mark.parametrize("what", MESSAGES)
def test_nothing_is_sent_that_is_not_what_the_plan_says(what: str) -> None:
    exchange = exchange_of_two()
    with pytest.raises(RingMismatchError):
        exchange.post(MESSAGES[what](torch.zeros(8, 1, 1, 4)), [])
    assert exchange.counters.messages_sent == 0

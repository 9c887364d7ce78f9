"""What a collective call and an exchange raise and tell, on one rank of two that is answered here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ring.comm.collective import Agreement, collective
from ds_ring.comm.exchange import Exchange, make_batch_exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import Message
from ds_ring.comm.waiting import CallSite, Task
from ds_ring.errors import (
    RingBufferError,
    RingConfigError,
    RingMeshError,
    RingMismatchError,
    RingPeerError,
    RingShapeError,
)
from ds_ring.health import stuck_waits
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


def exchange_of_two() -> Exchange:
    return Exchange(RingMesh(Grid(2, 2), 0))


def raising(error: BaseException) -> Any:
    def begin(*_: object) -> Any:
        raise error

    return begin


def start_and_fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(stuck_waits, "_in_stuck_waits", [])
    monkeypatch.setattr("ds_ring.comm.exchange.start_batch", raising(error))
    two = exchange_of_two()
    two.start(two.world_route([1], [1], torch.zeros(1), None), [], [], 2)


def test_a_batch_that_cannot_be_started_names_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was posted of it may be written to for ever, so its buffers are kept."""
    with pytest.raises(RingPeerError, match=r"could not start call 0, hop 2: the network is gone") as raised:
        start_and_fail(monkeypatch, RuntimeError("the network is gone\nat 7"))
    assert raised.value.peer == 1


def test_a_fault_of_ds_ring_in_a_batch_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RingBufferError, match="in flight"):
        start_and_fail(monkeypatch, RingBufferError("in flight"))


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

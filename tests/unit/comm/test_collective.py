"""What a collective call raises and tells, on one rank of two whose exchange is answered here."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ring.comm.collective import Agreement, collective
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError, RingMeshError, RingMismatchError, RingPeerError, RingShapeError
from ds_ring.schedule.grid import Grid

REPORTS = [
    f'{{"operation": "a call", "number of the call": "0", "window": "{window}"}}'.encode()
    for window in (3, 4)
]


class Answered(Exchange):
    """An exchange of rank 0 of two whose other rank is played: what it sends and is told is noted.

    Args:
        other: returns the other rank's header for this rank's, or raises.
    """

    def __init__(self, other: Any) -> None:
        super().__init__(RingMesh(Grid(2, 2), 0))
        self.other, self.headers, self.failures = other, [], []
        self.gathered = 0

    def spread(self, header: Tensor) -> Tensor:
        self.headers.append(header.tolist())
        both = sorted([header.tolist(), self.other(header).tolist()])
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


@pytest.mark.parametrize(("other", "gathered"), [(another_call, 1), (refuses, 0)])
def test_a_refusal_is_sent_as_a_header_and_raised_as_it_is(other: Any, gathered: int) -> None:
    """Reports are gathered unless all ranks refuse."""
    exchange = Answered(other)
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

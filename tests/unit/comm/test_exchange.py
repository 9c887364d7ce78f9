"""What an exchange raises where no message is under way: wrong messages, a batch that does not start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ring.comm.exchange import Exchange, Route, once_a_batch
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import Message
from ds_ring.comm.waiting import CallSite, Task
from ds_ring.errors import RingBufferError, RingMismatchError, RingPeerError
from ds_ring.schedule.grid import Grid


def exchange_of_two() -> Exchange:
    return Exchange(RingMesh(Grid(2, 2), 0))


def raising(error: BaseException) -> Any:
    def begin(*_: object) -> Any:
        raise error

    return begin


def route_that(error: BaseException) -> Route:
    like = exchange_of_two().world_route([1], [1], torch.zeros(1), None)
    return like._replace(begin=raising(error))


def test_a_batch_that_cannot_be_started_names_its_peer() -> None:
    """What was posted of it may be written to for ever, so its buffers are kept."""
    with pytest.raises(RingPeerError, match=r"could not start call 0, hop 2: the network is gone") as raised:
        exchange_of_two().start(route_that(RuntimeError("the network is gone\nat 7")), [], [], 2)
    assert raised.value.peer == 1


def test_a_fault_of_ds_ring_in_a_batch_stays_what_it_is() -> None:
    with pytest.raises(RingBufferError, match="in flight"):
        exchange_of_two().start(route_that(RingBufferError("in flight")), [], [])


def test_what_runs_in_a_waiting_thread_raises_where_its_result_is_asked_for() -> None:
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        Task(raising(ZeroDivisionError("on purpose"))).start().result()


def test_a_wait_outside_of_a_pass_has_its_own_name_and_key() -> None:
    exchange = once_a_batch(RingMesh(Grid(2, 2), 0), "the next batch")
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

"""What bare point-to-point does silently, and that ds_ring refuses it. One pair of tests for every cause.

The bare half is evidence that the guard is needed: it must hang, abort or deliver something wrong.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor

from ds_ring import (
    Causal,
    Full,
    RingBufferError,
    RingError,
    RingMesh,
    RingPeerError,
    ring_attention,
)
from ds_ring.comm.collective import collective
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.messages import Message
from tests.clock import unqueued_seconds
from tests.dist.harness import RankOutcome, RankPool, run_ranks_collect

Pool = Callable[[int], RankPool]
HANGS_S = 4.0  # nobody answers for so long: it never will
LARGE = 16 << 20  # floats: 64 MiB


def outcomes(fn: Callable[..., Any], *args: Any, timeout_s: float = 30.0) -> list[RankOutcome]:
    return run_ranks_collect(fn, 2, *args, timeout_s=timeout_s)


def error_of(act: Callable[[], object]) -> RingError | None:
    try:
        act()
    except RingError as error:
        return error
    return None


# --- bare --------------------------------------------------------------------------------------------


def send_then_receive(rank: int, world_size: int) -> None:
    dist.send(torch.ones(1), 1 - rank)
    dist.recv(torch.ones(1), 1 - rank)


@pytest.mark.alone
@pytest.mark.night
def test_bare_blocking_sends_deadlock_at_one_element() -> None:
    assert [one.status for one in outcomes(send_then_receive, timeout_s=HANGS_S)] == ["hung", "hung"]


def send_and_receive(rank: int, world_size: int, sent: list[Tensor], expected: list[Tensor]) -> list[Tensor]:
    """Rank 0 posts `sent`, rank 1 posts receives like `expected`, in this order."""
    operations = [dist.P2POp(dist.isend, tensor, 1) for tensor in sent]
    if rank == 1:
        operations = [dist.P2POp(dist.irecv, tensor, 0) for tensor in expected]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return expected


def received(pool: RankPool, sent: list[Tensor], expected: list[Tensor]) -> list[Tensor]:
    found: list[Tensor] = pool.run(send_and_receive, sent, expected)[1]
    return found


def test_bare_a_smaller_message_fills_a_part_silently(rank_pool: Pool) -> None:
    (found,) = received(rank_pool(2), [torch.ones(4)], [torch.full((8,), 7.0)])
    assert found.tolist() == [1.0] * 4 + [7.0] * 4


def test_bare_another_dtype_arrives_as_garbage_silently(rank_pool: Pool) -> None:
    (found,) = received(rank_pool(2), [torch.ones(4, dtype=torch.int32)], [torch.zeros(4)])
    assert 0 < found.max() < 1e-40  # the bits of the integer 1


def test_bare_another_order_swaps_silently(rank_pool: Pool) -> None:
    k, v = torch.ones(4), torch.full((4,), 2.0)
    found = received(rank_pool(2), [v, k], [torch.zeros(4), torch.zeros(4)])
    assert found[0].tolist() == v.tolist() and found[1].tolist() == k.tolist()


@pytest.mark.night
def test_bare_a_larger_message_ends_the_process() -> None:
    _, receiver = outcomes(send_and_receive, [torch.ones(8)], [torch.zeros(4)])
    assert receiver.status == "exited", receiver


@pytest.mark.night
def test_bare_a_tensor_with_gaps_raises_on_one_side_only() -> None:
    found = run_ranks_collect(
        send_and_receive, 2, [torch.ones(4, 4).mT[1:]], [torch.zeros(3, 4)], timeout_s=HANGS_S
    )
    assert [one.status for one in found] == ["raised", "hung"], found


def write_while_sending(rank: int, world_size: int) -> float:
    x = torch.zeros(LARGE)
    if rank == 0:
        work = dist.isend(x, 1)
        x.fill_(1.0)
        work.wait()
        return 0.0
    time.sleep(0.3)
    dist.recv(x, 0)
    return float(x.mean())


@pytest.mark.alone
def test_bare_a_buffer_that_is_written_while_it_travels_arrives_mixed(rank_pool: Pool) -> None:
    """Zeros were sent; how many ones arrive is a matter of luck, but some do."""
    assert rank_pool(2).run(write_while_sending)[1] > 0.0


def killed_in_the_middle(rank: int, world_size: int) -> None:
    x = torch.zeros(4 * LARGE)
    if rank == 0:
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        dist.send(x, 1)
    dist.recv(x, 0)


@pytest.mark.alone
@pytest.mark.night
def test_bare_a_peer_that_stops_is_waited_for_without_end() -> None:
    assert outcomes(killed_in_the_middle, timeout_s=HANGS_S)[1].status == "hung"


def gradient_of_a_gather(rank: int, world_size: int) -> float:
    x = torch.ones(4, 3, requires_grad=True)
    weights = torch.arange(24.0).view(2, 3, 4)
    parts = differentiable.all_gather(x)
    sum((part.mT.contiguous() * w).sum() for part, w in zip(parts, weights, strict=True)).backward()
    want = world_size * weights[rank].mT
    return float((x.grad - want).abs().max() / want.abs().max())


# --- ours --------------------------------------------------------------------------------------------


def attend(rank: int, world_size: int, what: str) -> tuple[str, str, float]:
    """Rank 1 calls otherwise; what this rank gets, and after how long."""
    mesh = RingMesh.from_world(world_size)
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    pattern = Causal()
    if rank == 1 and what == "smaller":
        q, k, v = (x[:, :, :4].contiguous() for x in (q, k, v))
    if rank == 1 and what == "larger":
        q, k, v = (torch.cat([x, x], dim=2) for x in (q, k, v))
    if rank == 1 and what == "dtype":
        q, k, v = (x.half() for x in (q, k, v))
    if rank == 1 and what == "order":
        pattern = Full()
    if rank == 1 and what == "gaps":
        q, k, v = (torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v))
    started = unqueued_seconds()
    error = error_of(lambda: ring_attention(q, k, v, pattern=pattern, layout="contiguous", mesh=mesh))
    return type(error).__name__, str(error), unqueued_seconds() - started


@pytest.mark.parametrize("what", ["smaller", "larger", "dtype", "order"])
def test_ours_refuses_calls_that_differ_on_every_rank(rank_pool: Pool, what: str) -> None:
    for name, text, seconds in rank_pool(2).run(attend, what):
        assert name == "RingMismatchError", (name, text)
        assert "ring rank 0 has" in text and "ring rank 1 has" in text and seconds < 1.0, (text, seconds)


def test_ours_takes_a_tensor_with_gaps(rank_pool: Pool) -> None:
    assert [found[0] for found in rank_pool(2).run(attend, "gaps")] == ["NoneType"] * 2


MESSAGES: dict[str, Callable[[Tensor], list[Message]]] = {
    "smaller": lambda k: [Message(k[:4], 1, "K/V", 8)],
    "larger": lambda k: [Message(torch.cat([k, k]), 1, "K/V", 8)],
    "dtype": lambda k: [Message(k.int(), 1, "K", 8, k.dtype), Message(k, 1, "V", 8, k.dtype)],
    "order": lambda k: [Message(k, 1, "V", 8), Message(k, 1, "K", 8)],
    "no second": lambda k: [Message(k, 1, "K", 8)],
    "gaps": lambda k: [Message(torch.stack([k, k], -1)[..., 0], 1, "K", 8), Message(k, 1, "V", 8)],
}


def post_wrong(rank: int, world_size: int, what: str) -> tuple[str, int]:
    exchange = Exchange(RingMesh.from_world(world_size))
    error = error_of(lambda: exchange.post(MESSAGES[what](torch.zeros(8, 1, 1, 4)), []))
    return type(error).__name__, exchange.counters.messages_sent


@pytest.mark.parametrize("what", MESSAGES)
def test_ours_sends_nothing_that_is_not_what_the_plan_says(rank_pool: Pool, what: str) -> None:
    assert rank_pool(2).run(post_wrong, what) == [("RingMismatchError", 0)] * 2


def written_while_travelling(rank: int, world_size: int) -> str:
    exchange = Exchange(RingMesh.from_world(world_size))
    x, y = torch.zeros(LARGE), torch.zeros(LARGE)
    pending = exchange.post([Message(x, 1 - rank)], [Message(y, 1 - rank)])
    if rank == 0:
        x.fill_(1.0)
    return type(error_of(pending.wait)).__name__


@pytest.mark.alone
def test_ours_notices_a_buffer_that_is_written_while_it_travels(rank_pool: Pool) -> None:
    assert rank_pool(2).run(written_while_travelling) == [RingBufferError.__name__, "NoneType"]


def stopped(rank: int, world_size: int) -> tuple[str, int | None]:
    mesh = RingMesh.from_world(world_size, heartbeat_timeout_s=1.0)
    x, y = torch.zeros(4 * LARGE), torch.zeros(4 * LARGE)
    if rank == 0:
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    error = error_of(Exchange(mesh).post([Message(x, 1 - rank)], [Message(y, 1 - rank)]).wait)
    return type(error).__name__, getattr(error, "peer", None)


@pytest.mark.alone
def test_ours_names_a_peer_that_stops() -> None:
    survivor = run_ranks_collect(stopped, 2, timeout_s=8, silent=[0])[1]
    assert survivor.value == (RingPeerError.__name__, 0), survivor


def fails_in_the_middle(rank: int, world_size: int) -> tuple[str, bool]:
    """A pass on rank 1 raises while its messages travel; nothing is dropped, and nobody waits for ever."""
    mesh = RingMesh.from_world(world_size, heartbeat_timeout_s=1.0)
    exchange = Exchange(mesh)
    x, y = torch.zeros(LARGE), torch.zeros(LARGE)
    try:
        with collective(mesh, "a pass", exchange) as call:
            call.agree({})
            pending = exchange.post([Message(x, 1 - rank)], [Message(y, 1 - rank)], 1)
            if rank == 1:
                raise ZeroDivisionError("in a kernel")
            pending.wait()
            exchange.post([Message(x, 1 - rank)], [Message(y, 1 - rank)], 2).wait()
    except (RingError, ZeroDivisionError) as error:
        again = error_of(lambda: exchange.post([Message(x, 1 - rank)], [Message(y, 1 - rank)], 3))
        return type(error).__name__, isinstance(again, RingPeerError)
    return "nothing", False


@pytest.mark.alone
def test_ours_tells_the_others_when_a_pass_fails() -> None:
    found = [one.value for one in run_ranks_collect(fails_in_the_middle, 2, timeout_s=20)]
    assert found == [("RingPeerError", True), ("ZeroDivisionError", True)], found

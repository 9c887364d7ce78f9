"""The exchange by itself: deadlines that name the peer and the hop, order, headers, counters, refusals."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_ring import Causal, RingBufferError, RingError, RingMesh, RingPeerError
from ds_ring.comm.collective import collective
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.messages import Counters, Message
from ds_ring.schedule.grid import Grid
from tests import calls
from tests.clock import unqueued_seconds
from tests.dist.harness import Pool, catch_refusal, first_in_time, run_ranks_collect
from tests.dist.rank_process import RankOutcome

DEADLINE_S = 0.5
LARGE = 16 << 20  # floats: 64 MiB
LATE_S = 2.0  # by then a deadline of half a second must have been heard


class Blame(NamedTuple):
    """A RingPeerError; the ring rank -1 stands for no error.

    Attributes:
        wall_s, seconds: until it came, and without time in the queue for a processor.
    """

    ring_rank: int
    hop: int | None
    peer: int | None
    cause: str
    wall_s: float
    seconds: float


def blame(act: Callable[[], object]) -> Blame:
    """Whom `act` blames."""
    wall, started = time.perf_counter(), unqueued_seconds()
    named: tuple[int, int | None, int | None, str] = (-1, None, None, "nothing raised")
    try:
        act()
    except RingPeerError as error:
        named = (error.ring_rank, error.hop, error.peer, error.cause)
    return Blame(*named, time.perf_counter() - wall, unqueued_seconds() - started)


# --- peers that do not answer ----------------------------------------------------------------------


def waiting_for(rank: int, world_size: int, what: str, silent: int, exits: bool) -> Blame | None:
    """Every rank but `silent` waits for it, in one of the ways there are; it sleeps, or exits."""
    mesh = RingMesh.from_world(world_size)
    exchange = Exchange(mesh, 30.0 if exits else DEADLINE_S)
    buffer = torch.zeros(1 << 18)
    waits: dict[str, Callable[[], object]] = {
        "hop": lambda: exchange.post(
            [Message(buffer, rank + 1)], [Message(buffer.clone(), silent)], 5
        ).wait(),
        "header": lambda: exchange.spread(torch.tensor([rank])),
        "collective": lambda: exchange.all_gather(buffer, mesh.ring_group, world_size),
        "attention": lambda: calls.attend(
            *torch.zeros(3, 1, 1, 4, 8),
            pattern=Causal(),
            layout="zigzag",
            mesh=mesh,
            hop_timeout_seconds=exchange.hop_timeout_s,
        ),
    }
    dist.barrier()
    if rank != silent:
        return blame(waits[what])
    if exits:
        time.sleep(0.2)  # the others are in the middle of it
        os._exit(3)
    time.sleep(2 * DEADLINE_S)  # alive, connected, and not posting
    return None


def in_time(outcomes: list[RankOutcome]) -> bool:
    return all(item.value is None or item.value.seconds < LATE_S for item in outcomes)


@pytest.mark.day("hop-5-1", "collective-None-1")
@pytest.mark.parametrize(
    ("what", "hop", "peer"),
    [("hop", 5, 1), ("header", None, 1), ("collective", None, 1), ("attention", None, 1)],
)
def test_a_deadline_names_the_peer_and_the_hop(what: str, hop: int | None, peer: int | None) -> None:
    waiting, silent = first_in_time(
        lambda: run_ranks_collect(waiting_for, 2, what, 1, False, timeout_s=20), in_time
    )
    assert (waiting.status, silent.status) == ("returned", "returned"), waiting.report
    result: Blame = waiting.value
    assert result[:3] == (0, hop, peer), result
    assert "before the deadline (hop_timeout_seconds;" in result.cause
    assert result.wall_s > DEADLINE_S * 0.9 and result.seconds < LATE_S, result


def waiting_for_two(rank: int, world_size: int) -> Blame | None:
    """Rank 0 waits for a message of rank 1, which comes, and for one of rank 2, which does not."""
    exchange = Exchange(RingMesh.from_world(world_size), DEADLINE_S)
    buffers = torch.zeros(2, 4)
    dist.barrier()
    if rank == 0:
        receives = [Message(buffer, peer) for buffer, peer in zip(buffers, (1, 2), strict=True)]
        return blame(lambda: exchange.post([], receives, 5).wait())
    if rank == 1:
        exchange.post([Message(buffers[0], 0)], [], 5).wait()
    time.sleep(2 * DEADLINE_S)
    return None


def test_of_several_peers_the_one_that_did_not_come_is_named() -> None:
    waiting, *others = first_in_time(lambda: run_ranks_collect(waiting_for_two, 3, timeout_s=20), in_time)
    assert [item.status for item in others] == ["returned"] * 2, waiting.report
    assert waiting.value[:3] == (0, 5, 2), waiting.value


@pytest.mark.parametrize(("what", "hop"), [("hop", 5), ("header", None), ("attention", None)])
def test_a_peer_that_exits_is_noticed_at_once(what: str, hop: int | None) -> None:
    """Long before the deadline of 30 s, and every survivor names it, whomever it was waiting for."""
    *survivors, dead = first_in_time(
        lambda: run_ranks_collect(waiting_for, 3, what, 2, True, timeout_s=20), in_time
    )
    assert (dead.status, dead.message) == ("exited", "exit code 3")
    for item in survivors:
        assert item.status == "returned", item.report
        result: Blame = item.value
        assert result[:3] == (item.rank, hop, 2), result
        assert "ended without a goodbye" in result.cause, result
        assert result.seconds < LATE_S, result


# --- headers ---------------------------------------------------------------------------------------


def spread_over(rank: int, world_size: int) -> list[list[list[int]] | None]:
    """Least and greatest of some headers, among the first n ranks, for every n."""
    result: list[list[list[int]] | None] = []
    for size in range(1, world_size + 1):
        group = dist.new_group(list(range(size)))
        if rank < size:
            mesh = RingMesh(Grid(size, size), rank, ring_group=group, sequence_group=group, cpu_group=group)
            result.append(Exchange(mesh).spread(torch.tensor(header(rank, size))).tolist())
        else:
            result.append(None)
    return result


def header(rank: int, size: int) -> list[int]:
    """The greatest is neither the first nor the last, ties are broken by what follows, the sign counts."""
    return [(7 * rank + size) % 5 - 2, -rank, 1 << 62]


def test_every_rank_sees_the_least_and_the_greatest_header(rank_pool: Pool) -> None:
    by_rank = rank_pool(8).run(spread_over)
    for size in range(1, 9):
        headers = [header(rank, size) for rank in range(size)]
        for result in by_rank[:size]:
            assert result[size - 1] == [min(headers), max(headers)], size


def one_call_more_on_rank_1(rank: int, world_size: int) -> str:
    mesh = RingMesh.from_world(world_size)
    for _ in range(rank):
        next(mesh.calls)

    def agree() -> None:
        with collective(mesh, "a call") as call:
            call.agree({})

    return catch_refusal(agree)


def test_the_same_call_with_another_number_is_a_mismatch(rank_pool: Pool) -> None:
    for said in rank_pool(2).run(one_call_more_on_rank_1):
        assert "number of the call: ring rank 0 has 0, ring rank 1 has 1" in said, said


def spread_over_the_sequence(rank: int, world_size: int) -> list[list[int]]:
    """Two sequences of ring 2 x Ulysses 2: a header is heard in its own sequence, on all four ranks."""
    return Exchange(RingMesh.from_world(2, 2)).spread(torch.tensor([rank])).tolist()


def test_headers_reach_ulysses_ranks_and_stay_in_their_sequence(rank_pool: Pool) -> None:
    assert rank_pool(8).run(spread_over_the_sequence) == [[[0], [3]]] * 4 + [[[4], [7]]] * 4


# --- messages --------------------------------------------------------------------------------------


def marked(sender: int, way: int, hop: int, tokens: int = 300) -> Tensor:
    """A payload that says where it comes from."""
    return torch.full((2, tokens), 100.0 * sender + 10.0 * hop + way)


def both_ways(rank: int, world_size: int) -> bool:
    """At every hop one message up and one down, the next batch posted before the last one is waited for."""
    exchange = Exchange(RingMesh.from_world(world_size))
    up, down = rank + 1, rank - 1
    flying = []
    for hop in range(6):
        arriving = [torch.empty(2, 300), torch.empty(2, 300)]
        pending = exchange.post(
            [Message(marked(rank, 1, hop), up), Message(marked(rank, 2, hop), down)],
            [Message(arriving[0], down), Message(arriving[1], up)],
            hop,
        )
        flying.append((pending, arriving, hop))
        if len(flying) > 1:
            check_arrival(*flying.pop(0), rank, world_size)
    check_arrival(*flying.pop(), rank, world_size)
    return True


def check_arrival(pending: object, arriving: list[Tensor], hop: int, rank: int, size: int) -> None:
    pending.wait()  # type: ignore[attr-defined]
    from_below, from_above = (marked((rank + way) % size, -way % 3, hop) for way in (-1, 1))
    assert torch.equal(arriving[0], from_below) and torch.equal(arriving[1], from_above)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_two_directions_do_not_mix(rank_pool: Pool, world_size: int) -> None:
    """In a ring of two both neighbours are the same rank, and only the order tells the messages apart."""
    assert all(rank_pool(world_size).run(both_ways))


def collectives(rank: int, world_size: int) -> dict[str, Tensor]:
    """All-gather, all-to-all and reduce-scatter of strided parts that say where they come from and go to."""
    mesh = RingMesh.from_world(world_size)
    exchange = Exchange(mesh)
    wide = torch.arange(24.0).view(2, 12) + 100 * rank
    parts = list(wide.chunk(world_size, dim=1))  # not contiguous
    assert not parts[0].is_contiguous()
    return {
        "gathered": torch.stack(exchange.all_gather(wide.mT, mesh.ring_group, world_size)),
        "swapped": torch.stack(exchange.all_to_all(parts, mesh.ring_group)),
        "reduced": exchange.reduce_scatter(parts, mesh.ring_group),
    }


def test_collectives_put_everything_where_it_belongs(rank_pool: Pool) -> None:
    wide = [torch.arange(24.0).view(2, 12) + 100 * rank for rank in range(3)]
    for rank, result in enumerate(rank_pool(3).run(collectives)):
        mine = torch.stack([x.chunk(3, dim=1)[rank] for x in wide])
        assert torch.equal(result["gathered"], torch.stack([x.mT for x in wide]))
        assert torch.equal(result["swapped"], mine) and torch.equal(result["reduced"], mine.sum(0))


# --- counters and refusals -------------------------------------------------------------------------


def counted(rank: int, world_size: int) -> list[Counters]:
    """The counters after a batch of two messages, an empty batch, a header, and an all-gather."""
    mesh = RingMesh.from_world(world_size)
    exchange, result = Exchange(mesh), []

    def note() -> None:
        result.append(Counters(**vars(exchange.counters)))

    sends = [Message(torch.zeros(10), rank + 1), Message(torch.zeros(3, dtype=torch.bfloat16), rank + 1)]
    receives = [Message(torch.empty_like(tensor), rank - 1) for tensor, *_ in sends]
    exchange.post(sends, receives).wait()
    note()
    exchange.post([], []).wait()
    note()
    exchange.spread(torch.tensor([1]))
    note()
    exchange.all_gather(torch.zeros(5), mesh.ring_group, world_size)
    note()
    return result


def test_counters_count_payloads_and_nothing_else(rank_pool: Pool) -> None:
    posted = Counters(bytes_sent=46, messages_sent=2, batches=1)
    gathered = Counters(bytes_sent=46 + 2 * 20, messages_sent=2, batches=1)
    for result in rank_pool(3).run(counted):
        assert result == [posted, posted, posted, gathered]


def strided(rank: int, world_size: int, side: str) -> str:
    """A buffer with gaps, to be sent or to be received into: NCCL would take its raw pointer."""
    exchange = Exchange(RingMesh.from_world(world_size))
    messages = {
        "send": [Message(torch.zeros(4, 4), 1 - rank)],
        "receive": [Message(torch.zeros(4, 4), 1 - rank)],
    }
    messages[side] = [Message(torch.zeros(4, 4).mT, 1 - rank)]
    text = catch_refusal(exchange.post, messages["send"], messages["receive"])
    exchange.post([Message(torch.zeros(4, 4), 1 - rank)], [Message(torch.zeros(4, 4), 1 - rank)]).wait()
    return f"{text}; sent {exchange.counters.messages_sent}"


@pytest.mark.parametrize("side", ["send", "receive"])
def test_a_buffer_that_is_not_contiguous_is_refused_before_anything_is_sent(
    rank_pool: Pool, side: str
) -> None:
    for said in rank_pool(2).run(strided, side):
        assert said.startswith("RingMismatchError") and said.endswith("sent 1"), said
        assert "expected a contiguous tensor, got strides (1, 4)" in said, said


def written_while_travelling(rank: int, world_size: int) -> str:
    exchange = Exchange(RingMesh.from_world(world_size))
    x, y = torch.zeros(LARGE), torch.zeros(LARGE)
    pending = exchange.post([Message(x, 1 - rank)], [Message(y, 1 - rank)])
    if rank == 0:
        x.fill_(1.0)
    return catch_refusal(pending.wait).partition(":")[0]


def test_a_buffer_that_is_written_while_it_travels_is_noticed(rank_pool: Pool) -> None:
    assert rank_pool(2).run(written_while_travelling) == [RingBufferError.__name__, ""]


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
        again = catch_refusal(exchange.post, [Message(x, 1 - rank)], [Message(y, 1 - rank)], 3)
        return type(error).__name__, again.startswith("RingPeerError")
    return "nothing", False


def test_a_pass_that_fails_in_the_middle_tells_the_others() -> None:
    result = [item.value for item in run_ranks_collect(fails_in_the_middle, 2, timeout_s=20)]
    assert result == [("RingPeerError", True), ("ZeroDivisionError", True)], result

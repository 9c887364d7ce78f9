"""Model the time of a ring pass on one rank: its steps with rates. The only time model; measures nothing.

A batch of a schedule takes the time of its arithmetic, of posting its messages, and of the messages in
flight. The rates are a hardware description's.

FLOPs of attention: 4 D per attended pair and query head forward (two products of D multiply-adds), 10 D
backward (five products; Dao et al. 2022, FlashAttention). One product forward and two backward are of values,
which may have another head_dim E.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_ring.kernels.cpu import TRIANGLE
from ds_ring.kernels.cpu.calls import triangulate
from ds_ring.masks.tiles import Tiles
from ds_ring.schedule.lowering import count_heads
from ds_ring.schedule.rank_plan import HeadClassPlan
from ds_ring.schedule.steps import ChunkSteps, Recv, Schedule, Send

from .hardware import Hardware
from .pass_memory import PassShape

FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10  # per pair, query head and element of D: 2 and 5 products

Work = np.ndarray  # float64 [rounds, 5]: see `count_work`


class PassRates(NamedTuple):
    """Describe what a machine takes for the work of a pass, seconds."""

    flops_per_s: float  # of the kernel
    tile_s: float  # fixed cost of a tile; of a hop where `exclusive_call`
    exclusive_call: bool  # the kernel takes all tiles of a hop at once
    post_s: float  # of posting a batch that has messages; nothing hides it
    bytes_per_s: float  # of the slowest link of the ring
    latency_s: float = 0.0  # of the link
    # of links inside a node, where messages over them are counted apart
    node_bytes_per_s: float | None = None
    # part of the multiprocessors that the kernels of messages hold while these travel
    message_share: float = 0.0


class TimeLine(NamedTuple):
    """Hold the seconds of every batch of a pass; float64 [batches] each."""

    kernel: np.ndarray  # in the kernel, its calls' fixed costs included
    posting: np.ndarray  # of the rank's other work
    transfer: np.ndarray  # until the messages have arrived
    calls: np.ndarray  # of the kernel's, fixed costs of its calls

    @property
    def compute(self) -> np.ndarray:
        """Return the seconds in which the rank is busy."""
        return self.kernel + self.posting

    def seconds(self, overlap: bool) -> np.ndarray:
        """Return how long each batch takes: messages travel while the rank computes, or after that."""
        return np.maximum(self.compute, self.transfer) if overlap else self.compute + self.transfer


def by_head(tiles: Tiles, group: int) -> Iterator[tuple[Tiles, int]]:
    """Yield tiles with the number of query heads they are for, of the `group` that share a K/V head."""
    # A table may hold tiles of one head in the group and tiles of all heads.
    single = tiles.head_in_group >= 0
    if not single.any():
        yield tiles, group
        return
    yield tiles.rows(single), 1
    if not single.all():
        yield tiles.rows(np.logical_not(single)), group


def count_work(
    steps: ChunkSteps,
    shape: PassShape,
    executed: Callable[[Tiles], int],
    is_inside: Callable[[int], bool] = lambda peer: False,
) -> Work:
    """Return the work of one K/V head and its query heads by batch; the last batch of a chunk has none.

    Args:
        steps: of a head chunk.
        shape: of the tensors; only the query heads that share a K/V head, and bytes of elements, are read.
        executed: pairs that the kernel multiplies for a table of tiles.
        is_inside: whether a ring rank is of the same node, where links inside nodes have their own rate.

    Returns:
        [rounds - 1, 5]: pairs attended, pairs multiplied, tiles, and bytes of one K/V head that arrive by
        the slowest link and by links inside the node.
    """
    work = np.zeros((len(steps.rounds) - 1, 5))
    for row, steps_now in zip(work, steps.rounds, strict=False):
        for step in steps_now.computed:
            for tiles, heads in by_head(step.tiles, shape.group) if len(step.tiles) else ():
                # Pairs count for every query head; a tile is one call for all heads that it is for.
                row[:3] += heads * int(tiles.pairs.sum()), heads * executed(tiles), len(tiles)
        for post in steps_now.posted:
            if isinstance(post, Recv):
                size = post.count * shape.slot_bytes(post.payload)
                row[4 if is_inside(post.peer) else 3] += size
    return work


def time_line(schedule: Schedule, work: dict[int, Work], shape: PassShape, rates: PassRates) -> TimeLine:
    """Return what every batch of a pass takes, all head chunks together.

    Args:
        schedule: of one rank.
        work: by id of a chunk's steps, from `count_work`.
        shape: of the tensors.
        rates: of the machine.
    """
    flops, of_values = (BACKWARD_FLOPS, 4) if schedule.backward else (FORWARD_FLOPS, 2)
    flops = flops * shape.head_dim + of_values * (shape.value_dim - shape.head_dim)
    starts = schedule.starts
    # Chunks overlap: a batch takes what all chunks under way in it take.
    line = np.zeros(
        (4, max(at + len(work[id(c.steps)]) for at, c in zip(starts, schedule.chunks, strict=True)))
    )
    for start, chunk in zip(starts, schedule.chunks, strict=True):
        mine = work[id(chunk.steps)]
        _, executed, tiles, far, near = mine.T
        rows = shape.batch * count_heads(chunk.kv_heads)
        calls = np.minimum(tiles, 1) if rates.exclusive_call else tiles
        seconds = [
            rows * sizes / rate
            for sizes, rate in ((far, rates.bytes_per_s), (near, rates.node_bytes_per_s or rates.bytes_per_s))
        ]
        size = far + near
        called = calls * rates.tile_s
        kernel = executed * rows * flops / rates.flops_per_s + called
        # both kinds of link are at work at once
        transfer = np.maximum(*seconds) + np.where(size > 0, rates.latency_s, 0.0)
        part = np.stack([kernel, np.where(size > 0, rates.post_s, 0.0), transfer, called])
        line[:, start : start + len(mine)] += part
    kernel, posting, transfer, called = line
    # While messages travel the kernel has 1 - share of the device: its loss is added.
    lost = rates.message_share * np.minimum(transfer, kernel / (1 - rates.message_share))
    return TimeLine(kernel + lost, posting, transfer, called)


# FLOPs, bytes and time of one rank's attention pass on described hardware.

EXPOSED = 0.05  # of a pass's time: more than that counts as a transfer that does not hide


class CostPart(NamedTuple):
    """Hold one of a rank's classes of K/V heads, which may represent several."""

    head_class: HeadClassPlan  # the rank's part of the plan for the class
    times: int  # how many classes it represents


@dataclass(frozen=True)
class PassCost:
    """Hold what a forward and a backward pass of one rank cost."""

    # pairs, executed: summed over query heads and the batch
    pairs: int
    executed: int
    # forward_bytes, backward_bytes: sent by this rank; of a LayerPass by the rank that sends most
    forward_bytes: int
    backward_bytes: int
    # forward_s, backward_s: seconds
    forward_s: float
    backward_s: float
    compute_s: float  # of these, both together, seconds in the kernel
    hops: int  # batches of all head chunks, forward and backward
    exposed_hops: int  # of these, where the transfer takes longer than the arithmetic that should hide it
    late_hops: int  # of these, up to the last hop; the others are in the batches in which gradients return
    forward_exposed_s: float  # of exposed_s, in the forward pass
    longest_hop_s: float  # of a batch
    fixed_s: float  # of compute_s, fixed costs of kernel calls and of posting messages

    @property
    def seconds(self) -> float:
        """Return the time of both passes, seconds."""
        return self.forward_s + self.backward_s

    @property
    def exposed_s(self) -> float:
        """Return the seconds in which the device waits for messages."""
        return max(0.0, self.seconds - self.compute_s)  # sums in another order


def count_executed_pairs(tiles: Tiles) -> int:
    """Return the pairs that a kernel multiplies: corners of triangles and bands as well, in blocks of 128."""
    tiles = triangulate(tiles)
    q, k = tiles.q.length, tiles.k.length
    # The halves of the smallest triangles beyond the diagonal: (side - 1) / 2 keys for each query.
    corner = q * (np.minimum(q, TRIANGLE) - 1) // 2
    whole = tiles.pairs + corner * tiles.edges
    return int(np.minimum(whole, q * k).sum())


def _last_hop(schedule: Schedule) -> int:
    """Return the last batch that computes a hop, before parts of the own shard that are kept for the end."""
    return max(
        start + number
        for start, chunk in zip(schedule.starts, schedule.chunks, strict=True)
        for number, steps in enumerate(chunk.steps.rounds)
        if number == 0 or any(step.hop for step in steps.computed)
    )


def bytes_sent(parts: list[CostPart], shape: PassShape) -> tuple[int, int]:
    """Return the bytes that one rank sends, forward and backward.

    K and V of every token that the plan sends travel once forward and once backward. In the backward pass dK
    and dV of each received token return, in the dtype of their payload (`PassShape.slot_bytes`).
    """
    classes = [part.head_class for part in parts for _ in range(part.times)]
    return _sent(shape.schedule(classes, False), shape), _sent(shape.schedule(classes, True), shape)


def _sent(schedule: Schedule, shape: PassShape) -> int:
    slots: dict[int, int] = {}  # by chunk's steps: bytes that are sent of one head
    # Chunks that are read alike share one object of steps: looked at once, counted for each.
    for chunk in schedule.chunks:
        if id(chunk.steps) not in slots:
            posted = (post for steps in chunk.steps.rounds for post in steps.posted if isinstance(post, Send))
            slots[id(chunk.steps)] = sum(post.count * shape.slot_bytes(post.payload) for post in posted)
    heads = sum(count_heads(chunk.kv_heads) * slots[id(chunk.steps)] for chunk in schedule.chunks)
    return shape.batch * heads


def pass_cost(
    parts: list[CostPart],
    shape: PassShape,
    hardware: Hardware,
    dtype: str,
    bytes_per_s: float,
    overlap: bool = True,
    get_executed: Callable[[Tiles], int] | None = None,
) -> PassCost:
    """Return the cost of a forward and a backward pass of one rank.

    On two levels (`schedule/rank_plan.py`) messages inside a node travel at the rate of its links, while
    those between nodes travel at the rate of the adapters. In one ring of all ranks the slowest link is the
    pace of every hop.

    Args:
        parts: its classes of heads, or some that represent all.
        shape: of the tensors.
        hardware: rates and fixed costs.
        dtype: in which products run.
        bytes_per_s: of the slowest link of the ring.
        overlap: a hop's messages travel while the one before it is computed.
        get_executed: pairs that the kernel multiplies for a table; None: `count_executed_pairs`.
    """
    classes = [part.head_class for part in parts for _ in range(part.times)]
    # A plan that does not go by nodes has 0 ranks of a node: no peer is inside.
    way = classes[0].directions[0]
    # Hosts of one node share its links: none of their messages has another rate.
    is_one_rate = bytes_per_s == hardware.intra_node_bytes_per_s
    first_hop, node = way.hops[0], 0 if is_one_rate else way.direction.ranks_per_node
    inside = lambda peer: node > 0 and first_hop is not None and peer // node == first_hop.origin // node  # noqa: E731
    efficiency, lines, in_hops, sent = hardware.efficiency(shape.kernel), [], [], []
    share = hardware.message_share or 0.0
    if not overlap or bytes_per_s < hardware.intra_node_bytes_per_s:
        share = 0.0
    for backward in (False, True):
        schedule = shape.schedule(classes, backward)
        steps = {id(chunk.steps): chunk.steps for chunk in schedule.chunks}
        work = {
            key: count_work(chunk_steps, shape, get_executed or count_executed_pairs, inside)
            for key, chunk_steps in steps.items()
        }
        rates = PassRates(
            hardware.flops(dtype) * (efficiency.backward if backward else efficiency.forward),
            hardware.call_overhead_s,
            shape.kernel != "cpu",  # flex takes a whole hop at once
            hardware.hop_overhead_s,
            bytes_per_s,
            hardware.link_latency_s,
            hardware.intra_node_bytes_per_s,
            share,
        )
        line = time_line(schedule, work, shape, rates)
        lines.append(line)
        in_hops.append((line.kernel > 0) & (np.arange(len(line.kernel)) <= _last_hop(schedule)))
        sent.append(_sent(schedule, shape))
        heads = [(count_heads(chunk.kv_heads), work[id(chunk.steps)]) for chunk in schedule.chunks]
        # The same in both directions; the last turn's figures stay.
        pairs, executed = (shape.batch * int(sum(n * w[:, i].sum() for n, w in heads)) for i in (0, 1))
    compute, transfer = (
        np.concatenate([getattr(line, name) for line in lines]) for name in ("compute", "transfer")
    )
    exposed = transfer > (compute if overlap else 0)
    hops = (len(compute), int(exposed.sum()), int((exposed & np.concatenate(in_hops)).sum()))
    batches = [line.seconds(overlap) for line in lines]
    forward_s, backward_s = (float(seconds.sum()) for seconds in batches)
    waits = max(0.0, forward_s - float(lines[0].compute.sum()))
    seconds = (forward_s, backward_s, float(compute.sum()))
    longest_s = max(float(seconds.max()) for seconds in batches)
    fixed_s = sum(float(line.calls.sum() + line.posting.sum()) for line in lines)
    return PassCost(pairs, executed, sent[0], sent[1], *seconds, *hops, waits, longest_s, fixed_s)

"""Model the time of a ring pass on one rank: its steps with rates. The only time model; measures nothing.

Owns what a batch of a schedule takes: arithmetic, the rank's own work of posting, and the messages that
arrive meanwhile. Which rates are true of a machine is the caller's: `cost.py` reads a hardware description,
`launcher/tune/model.py` what it has measured.

FLOPs of attention: 4 D per attended pair and query head forward (two products of D multiply-adds), 10 D
backward (five products; Dao et al. 2022, FlashAttention). One product forward and two backward are of values,
which may have another head_dim E.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ds_ring.masks.tiles import Tiles
from ds_ring.schedule.lowering import count_heads
from ds_ring.schedule.steps import ChunkSteps, Recv, Schedule

from .pass_memory import PassShape

FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10  # per pair, query head and element of D: 2 and 5 products

Work = np.ndarray  # float64 [rounds, 5]: see `work_of`


class Rates(NamedTuple):
    """Describe what a machine takes for the work of a pass, seconds.

    Attributes:
        flops_per_s: of the kernel.
        tile_s: of a tile beside its pairs; of a hop where `one_call`.
        one_call: the kernel takes all tiles of a hop at once.
        post_s: of posting a batch that has messages; nothing hides it.
        bytes_per_s: of the slowest link of the ring.
        latency_s: of the link.
        node_bytes_per_s: of links inside a node, where messages over them are counted apart.
    """

    flops_per_s: float
    tile_s: float
    one_call: bool
    post_s: float
    bytes_per_s: float
    latency_s: float = 0.0
    node_bytes_per_s: float | None = None


class TimeLine(NamedTuple):
    """Hold the seconds of every batch of a pass; float64 [batches] each.

    Attributes:
        kernel: in the kernel.
        posting: of the rank's own work beside it.
        transfer: until what is received has arrived.
    """

    kernel: np.ndarray
    posting: np.ndarray
    transfer: np.ndarray

    @property
    def compute(self) -> np.ndarray:
        """Return the seconds in which the rank is busy."""
        return self.kernel + self.posting

    def seconds(self, overlap: bool) -> float:
        """Return how long the pass takes: messages travel while the rank computes, or after that."""
        both = np.maximum(self.compute, self.transfer) if overlap else self.compute + self.transfer
        return float(both.sum())


def by_head(tiles: Tiles, group: int) -> Iterator[tuple[Tiles, int]]:
    """Yield tiles with the number of query heads they are for, of the `group` that share a K/V head."""
    # A table may hold tiles of one head in the group beside tiles of all.
    single = tiles.head_in_group >= 0
    if not single.any():
        yield tiles, group
        return
    yield tiles.rows(single), 1
    if not single.all():
        yield tiles.rows(np.logical_not(single)), group


def work_of(
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
        [rounds - 1, 5]: pairs attended, pairs multiplied, tiles, and for each element of a head bytes that
        arrive by the slowest link and by links inside the node.
    """
    work = np.zeros((len(steps.rounds) - 1, 5))
    for row, steps_now in zip(work, steps.rounds, strict=False):
        for step in steps_now.computed:
            for tiles, heads in by_head(step.tiles, shape.group) if len(step.tiles) else ():
                # Pairs count for every query head; a tile is one call for all heads that it is for.
                row[:3] += heads * int(tiles.pairs.sum()), heads * executed(tiles), len(tiles)
        for post in steps_now.posted:
            if isinstance(post, Recv):
                size = steps.buffers[post.buffer].slots * shape.bytes_of(post.payload)
                row[4 if is_inside(post.peer) else 3] += size
    return work


def time_line(schedule: Schedule, work: dict[int, Work], shape: PassShape, rates: Rates) -> TimeLine:
    """Return what every batch of a pass takes, all head chunks together.

    Args:
        schedule: of one rank.
        work: by id of a chunk's steps, from `work_of`.
        shape: of the tensors.
        rates: of the machine.
    """
    flops, of_values = (BACKWARD_FLOPS, 4) if schedule.backward else (FORWARD_FLOPS, 2)
    flops = flops * shape.head_dim + of_values * (shape.value_dim - shape.head_dim)
    starts = schedule.starts
    # Chunks overlap: a batch takes what all chunks under way in it take.
    line = np.zeros(
        (3, max(at + len(work[id(c.steps)]) for at, c in zip(starts, schedule.chunks, strict=True)))
    )
    for start, chunk in zip(starts, schedule.chunks, strict=True):
        mine = work[id(chunk.steps)]
        _, executed, tiles, far, near = mine.T
        rows = shape.batch * count_heads(chunk.kv_heads)
        calls = np.minimum(tiles, 1) if rates.one_call else tiles
        seconds = [
            rows * shape.pair_dim * sizes / rate
            for sizes, rate in ((far, rates.bytes_per_s), (near, rates.node_bytes_per_s or rates.bytes_per_s))
        ]
        size = far + near
        kernel = executed * rows * flops / rates.flops_per_s + calls * rates.tile_s
        # both kinds of link are at work at once
        transfer = np.maximum(*seconds) + np.where(size > 0, rates.latency_s, 0.0)
        part = np.stack([kernel, np.where(size > 0, rates.post_s, 0.0), transfer])
        line[:, start : start + len(mine)] += part
    return TimeLine(*line)

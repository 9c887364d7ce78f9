"""Which tokens cross to which node, and in which stage: one table for all ranks, the same on each.

[Note: direct exchange]
Owners send what is read, and nothing else. Inside a node a token goes straight to each of its readers.
Between nodes it crosses once for all readers of a node: the rank at the owner's place in that node, the
gateway, receives what any rank of its node reads, and sends each of them its part over the node's links.
Gradients return the same way: readers send them to the gateway, which adds them in float32 and returns one
sum to the owner. So all adapters of a node have about the same traffic, and only those at equal places are
linked, as in networks with rails.

A rank computes in stages. Stage 0 is its own shard. Then come tokens of its node, then those of other nodes,
the nearest before it first. All ranks of a node have the same stages. A stage ends where one of them would
hold, or relay as a gateway, more tokens than `stage_tokens`; one shard is always taken whole. Tokens of
another node cross while the rank computes two stages before, and are relayed one stage before.

MagiAttention's group cast (SandAI 2025) also crosses once; the stages by bytes and the gateways are ours.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from ds_ring.masks.slots import SlotRanges, count_slots, ranges_by_set
from ds_ring.schedule.rank_plan import Direction

OriginAndNode = tuple[int, int]
Reads = dict[tuple[int, int], SlotRanges]  # slots of the origin's shard, by (origin, other rank that reads)


class ExchangeTable(NamedTuple):
    """How tokens of all shards reach their readers; [Note: direct exchange]."""

    crossing: dict[OriginAndNode, SlotRanges]  # slots of an origin that other nodes read
    far_stages: dict[OriginAndNode, int]  # stage in which a node computes with them
    near_stages: tuple[tuple[int, ...], ...]  # by node and hop inside it: the stage of its tokens
    last: int  # greatest number of a stage

    def get_stage(self, origin: int, reader: int, hop: int, inner: int) -> int:
        """Return the stage in which a reader computes with an origin's tokens, at a hop of two levels."""
        node = reader // inner
        return self.near_stages[node][hop] if hop < inner else self.far_stages[origin, node]


def make_exchange_table(reads: Reads, direction: Direction, size: int, stage_tokens: int) -> ExchangeTable:
    """Return the table of a ring.

    Args:
        reads: of all ranks.
        direction: two levels; its `ranks_per_node` is the ring size if all ranks share a node.
        size: number of ranks.
        stage_tokens: most tokens that a rank holds, or relays, in a stage of several shards.
    """
    inner = direction.ranks_per_node
    counts: dict[OriginAndNode, list[tuple[int, int]]] = defaultdict(list)  # of (place of a reader, tokens)
    rows, numbers = [], []
    for (origin, reader), slots in reads.items():
        node = reader // inner
        counts[origin, node].append((reader % inner, count_slots(slots)))
        if origin // inner != node:
            rows.append(slots)
            numbers.append(origin * size + node)
    crossing = {}
    if rows:
        start, end = np.concatenate(rows).T
        which = np.repeat(numbers, [len(slots) for slots in rows])
        sets = ranges_by_set(np.stack([start, np.ones_like(start), end - start], axis=1), which)
        crossing = {divmod(number, size): slots for number, slots in sets.items()}
    near, far, last = [], {}, 0
    for node in range(size // inner):
        stages = _cut_near(counts, node, inner, stage_tokens)
        near.append(stages)
        cut = _StageCutter(stage_tokens, max(stages[-1], 1))
        for hop in range(inner, size, inner):
            first = direction.origin(node * inner, hop, size)
            for origin in range(first, first + inner):
                if (origin, node) in crossing:
                    held, relayed = np.zeros((2, inner), dtype=np.int64)
                    for place, tokens in counts[origin, node]:
                        held[place] += tokens
                    gateway = origin % inner
                    relayed[gateway] = held.sum() - held[gateway]
                    held[gateway] = count_slots(crossing[origin, node])
                    far[origin, node] = cut.add(np.concatenate([held, relayed]))
        last = max(last, stages[-1] if cut.loads is None else cut.stage)
    return ExchangeTable(crossing, far, tuple(near), last)


class _StageCutter:
    """Number the stages of one shard after the other; a stage ends where a load would exceed `most`."""

    def __init__(self, most: int, before: int) -> None:
        self.stage, self.most = before, most
        self.loads: np.ndarray | None = None  # of the stage; None before the first shard

    def add(self, loads: np.ndarray) -> int:
        """Return the stage of a shard with these loads."""
        if self.loads is not None and (self.loads + loads).max() <= self.most:
            self.loads = self.loads + loads
        else:
            self.stage, self.loads = self.stage + 1, loads
        return self.stage


def _cut_near(
    counts: dict[OriginAndNode, list[tuple[int, int]]], node: int, inner: int, most: int
) -> tuple[int, ...]:
    """Return the stage of every hop inside a node; the last one is 0 if nothing is read there."""
    by_hop = np.zeros((inner, inner), dtype=np.int64)
    for place in range(inner):
        for reader, tokens in counts.get((node * inner + place, node), ()):
            by_hop[(reader - place) % inner, reader] = tokens
    cut, stages = _StageCutter(most, 0), [0]
    for loads in by_hop[1:]:
        stages.append(cut.add(loads) if loads.any() else cut.stage)
    return tuple(stages)

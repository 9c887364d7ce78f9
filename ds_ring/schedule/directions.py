"""Choose the directions in which shards travel, by what their tokens cross, and the sizes of stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_ring.schedule.head_class import HeadClass, ReadsOfShards
from ds_ring.schedule.rank_plan import Direction, make_one_way, make_two_levels

STAGE_GROWTH = 4  # most shards of a stage over those of the stage before, during which they arrive


SAMPLED_ORIGINS = 6  # in a large ring directions are chosen by the costs of this many shards


def sample_origins(size: int) -> list[int]:
    """Return the shards by which costs are compared: a sample, or all of them up to 16."""
    if size <= 16:
        return list(range(size))
    # Spread by the golden ratio: regular distances would hit the same place of every segment.
    return sorted({int(size * (i * 0.6180339887 % 1)) for i in range(SAMPLED_ORIGINS)} | {size - 1})


def choose_stage_sizes(size: int, most: int) -> tuple[int, ...]:
    """Return the shards of each stage after the own one, in a ring of `size` ranks; [Note: stages].

    As few stages as `most` shards in each allow, and of these the ones whose largest stage is smallest. The
    last stage is as short as that allows, because at most a part of the own shard is computed while its
    gradients return.
    """
    best_sizes: tuple[int, ...] = ()
    for limit in range(min(most, size - 1), 0, -1):
        sizes, left, last = [], size - 1, 1
        while left:
            last = min(limit, STAGE_GROWTH * last, left)
            sizes.append(last)
            left -= last
        if best_sizes and len(sizes) > len(best_sizes):
            break
        best_sizes = tuple(sizes)
    return best_sizes


def make_stages(size: int, most: int) -> tuple[Direction, ...]:
    """Return the direction of stages of at most so many shards; [Note: stages] in `rank_plan.py`."""
    return (Direction(1, size - 1, stages=choose_stage_sizes(size, most)),)


def count_links(head_class: HeadClass, origins: Sequence[int]) -> int:
    """Return the sum over tokens sent of the links that each crosses: 1 relayed, s sent directly."""
    total = 0
    for direction in head_class.directions:
        _, hop, held, relayed = head_class.travel(origins, direction)
        total += int((relayed + hop * (held - relayed)).sum())
    return total


def count_busiest_adapter(head_class: HeadClass, origins: Sequence[int], ranks_per_node: int) -> int:
    """Return the tokens of some shards that cross between nodes through the busiest network adapters.

    Each rank has one adapter. Those at the same place in every node are counted together.
    """
    size, inner = head_class._size, ranks_per_node
    left = np.zeros(inner, dtype=np.int64)
    for direction in head_class.directions:
        origin, hop, held, relayed = head_class.travel(origins, direction)
        node = direction.reader(origin, hop, size) // inner
        earlier = np.array([direction.before(hop_number) for hop_number in hop.tolist()], dtype=np.int64)
        before = direction.reader(origin, earlier, size)
        np.add.at(left, before % inner, np.where(before // inner != node, relayed, 0))
        np.add.at(left, origin % inner, np.where(origin // inner != node, held - relayed, 0))
    return int(left.max())


def choose_directions(reads: ReadsOfShards, ranks_per_node: int = 0) -> tuple[Direction, ...]:
    """Return the directions whose tokens cross the fewest links; on a tie one direction, upwards.

    The number of tokens sent is the same for every choice; see [Note: relays and direct sends]. With two
    directions, a shard reaches every reader by the shorter way. This suits patterns that are not causal. If
    the nodes are known, the traffic of the busiest network adapter is compared first. Then two levels are
    chosen, unless few tokens go from node to node.
    """
    size = reads.layout.ring_size
    # Together size - 1 hops, so every other rank is reached once.
    both_ways = (Direction(1, size // 2), Direction(-1, (size - 1) // 2))
    origins = sample_origins(size)
    ways = [make_one_way(size), make_one_way(size, -1), both_ways]
    of_nodes: list[int] = []
    if ranks_per_node:
        # the ranks of the first and of the middle node represent all ranks
        firsts = {0, size // ranks_per_node // 2 * ranks_per_node}
        of_nodes = [first + place for first in sorted(firsts) for place in range(ranks_per_node)]
        ways += [make_two_levels(size, ranks_per_node), make_two_levels(size, ranks_per_node, -1)]

    def cost(way: tuple[Direction, ...]) -> tuple[int, int]:
        travel = HeadClass(reads, slice(0, 1), way)
        crossing = count_busiest_adapter(travel, of_nodes, ranks_per_node) if ranks_per_node else 0
        return crossing, count_links(travel, origins)

    # `min` returns the first of equal costs.
    return min(ways, key=cost)

"""In which order shards reach the ranks of a ring: around all, or inside nodes and from node to node.

Owns the arithmetic from a shard and a hop to the rank that reads it, and back.

[Note: two levels]
With nodes of R ranks each, the shard of rank l of node n is at hop s = t * R + i at rank l + i of node n + t
(both modulo their sizes, or downwards): it goes around inside a node, by the links of that node, and from the
first rank that has it in a node to the rank of the same number in the next one. That message has R batches to
get there, so it is cut into R parts, one for each batch: every network adapter of a node sends 1 / R of a
shard in every batch, while in one ring of all ranks one adapter sends a whole shard and the others nothing.
Sums of gradients follow the keys inside a node, and leave it once, straight to the owner of the keys, in as
many parts.
Published as DoubleRing (Gu et al. 2024, LoongTrain, arXiv 2406.18485, section 4.2) and as BurstAttention's
two rings (Sun et al. 2024, arXiv 2403.09347, section 3); TASP (Wang et al. 2025, arXiv 2509.26541) uses all
links by Hamiltonian cycles instead. The parts, one for each batch, are ours: there the message between nodes
is one, posted apart from the others.

[Note: which order is taken]
The ranks of a node are known from LOCAL_WORLD_SIZE, or from `ranks_per_node` of `RingMesh.from_world`. Then
`build_plan` takes the order whose busiest network adapter sends less. In one ring of all ranks one adapter of
eight sends; with two levels all of them do. Batches, buffers and the ring pass are the same in both.
"""

from __future__ import annotations

from typing import NamedTuple

from ds_ring.masks.slot_ranges import SlotRanges, count_slots, take_slots


class Direction(NamedTuple):
    """Say which way shards travel, for at most `limit` hops; [Note: two levels].

    Attributes:
        sign: +1 from rank o to o + 1, -1 the other way.
        limit: hops at most.
        ranks_per_node: R, a divisor of the ring size; 0 for one ring of all ranks.
    """

    sign: int
    limit: int
    ranks_per_node: int = 0

    def reader(self, origin: int, hop: int, size: int) -> int:
        """Return the rank that has the shard of `origin` at a hop, in a ring of `size`."""
        return _moved(origin, self.sign, hop, self.ranks_per_node or size, size)

    def origin(self, ring_rank: int, hop: int, size: int) -> int:
        """Return whose shard a rank has at a hop."""
        return _moved(ring_rank, -self.sign, hop, self.ranks_per_node or size, size)

    def hop(self, origin: int, reader: int, size: int) -> int:
        """Return the hop at which a rank has the shard of `origin`."""
        inner = self.ranks_per_node or size
        nodes, places = ((reader // inner - origin // inner), (reader - origin))
        # places of ranks in their nodes are their numbers modulo R
        return nodes * self.sign % (size // inner) * inner + places * self.sign % inner

    def before(self, hop: int) -> int:
        """Return the hop whose rank hands the shard to the rank of a hop from 1 on."""
        return hop - self.ranks_per_node if self.crosses(hop) else hop - 1

    def crosses(self, hop: int) -> bool:
        """Return whether the rank of a hop gets the shard from another node."""
        return self.ranks_per_node > 0 and hop > 0 and hop % self.ranks_per_node == 0

    def is_next(self, hop: int) -> bool:
        """Return whether the rank of the hop before hands on to the rank of a hop, inside a node."""
        return 0 < hop <= self.limit and not self.crosses(hop)

    def batches(self, hop: int) -> int:
        """Return in how many batches the gradients of a hop return to the owner: from another node in R."""
        return self.ranks_per_node if 0 < self.ranks_per_node <= hop else 1


def part_of(slots: SlotRanges, number: int, parts: int) -> SlotRanges:
    """Return one of so many equal parts of a set of slots."""
    count = count_slots(slots)
    return take_slots(slots, count * number // parts, count * (number + 1) // parts)


def _moved(rank: int, sign: int, hop: int, inner: int, size: int) -> int:
    nodes, places = divmod(hop, inner)
    node, place = divmod(rank, inner)
    return (node + sign * nodes) % (size // inner) * inner + (place + sign * places) % inner

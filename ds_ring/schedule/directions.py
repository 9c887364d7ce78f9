"""The order in which shards reach the ranks of a ring: around all ranks, or inside nodes and between nodes.

Owns the arithmetic between a shard, a hop and the rank that reads the shard at that hop.

[Note: two levels]
With nodes of R ranks each, the shard of rank l of node n is at hop s = t * R + i at rank l + i of node n + t
(modulo R and modulo the number of nodes; or downwards). So it goes around inside a node over the node's fast
links, and the first rank of a node that receives it sends it to the rank at the same place of the next node.
That message has R batches of time, so it is split into R parts, one per batch. Every network adapter of a
node then sends 1 / R of a shard in every batch. In one ring of all ranks, one adapter of the node sends a
whole shard and the others send nothing. Sums of gradients follow the keys inside a node. They leave the node
once, directly to the owner of the keys, also in R parts.
Published as DoubleRing (Gu et al. 2024, LoongTrain, arXiv 2406.18485, section 4.2) and as BurstAttention's
two rings (Sun et al. 2024, arXiv 2403.09347, section 3); TASP (Wang et al. 2025, arXiv 2509.26541) uses all
links by Hamiltonian cycles instead. The split into one part per batch is ours: there the message between
nodes is a single one, posted apart from the others.

[Note: which order is taken]
The ranks of a node are known from LOCAL_WORLD_SIZE, or from `ranks_per_node` of `RingMesh.from_world`. Then
`build_plan` takes the order whose busiest network adapter sends less. In one ring of all ranks one adapter of
eight sends; with two levels all of them do. Batches, buffers and the ring pass are the same in both.
"""

from __future__ import annotations

from typing import NamedTuple

from ds_ring.masks.slot_ranges import SlotRanges, count_slots, take_slots


class Direction(NamedTuple):
    """A direction in which shards travel, for at most `limit` hops; [Note: two levels].

    Attributes:
        sign: +1 from rank o to o + 1, -1 for the other way.
        limit: maximum number of hops.
        ranks_per_node: R, a divisor of the ring size; 0 for one ring of all ranks.
    """

    sign: int
    limit: int
    ranks_per_node: int = 0

    def reader(self, origin: int, hop: int, size: int) -> int:
        """Return the rank at which the shard of `origin` is at a hop, in a ring of `size` ranks."""
        return _moved(origin, self.sign, hop, self.ranks_per_node or size, size)

    def origin(self, ring_rank: int, hop: int, size: int) -> int:
        """Return the rank whose shard a rank has at a hop."""
        return _moved(ring_rank, -self.sign, hop, self.ranks_per_node or size, size)

    def hop(self, origin: int, reader: int, size: int) -> int:
        """Return the hop at which `reader` has the shard of `origin`."""
        inner = self.ranks_per_node or size
        nodes, places = ((reader // inner - origin // inner), (reader - origin))
        # A rank's place in its node is its number modulo R.
        return nodes * self.sign % (size // inner) * inner + places * self.sign % inner

    def before(self, hop: int) -> int:
        """Return the hop whose rank passes the shard on to the rank of `hop` (at least 1)."""
        return hop - self.ranks_per_node if self.crosses(hop) else hop - 1

    def crosses(self, hop: int) -> bool:
        """Return whether the rank of a hop receives the shard from another node."""
        return self.ranks_per_node > 0 and hop > 0 and hop % self.ranks_per_node == 0

    def is_next(self, hop: int) -> bool:
        """Return whether the rank of hop - 1 passes the shard on to the rank of `hop`, inside a node."""
        return 0 < hop <= self.limit and not self.crosses(hop)

    def batches(self, hop: int) -> int:
        """Return the number of batches over which a hop's gradients return: R from another node, else 1."""
        return self.ranks_per_node if 0 < self.ranks_per_node <= hop else 1


def part_of(slots: SlotRanges, number: int, parts: int) -> SlotRanges:
    """Return part `number` of a set of slots that is cut into `parts` equal parts."""
    count = count_slots(slots)
    return take_slots(slots, count * number // parts, count * (number + 1) // parts)


def _moved(rank: int, sign: int, hop: int, inner: int, size: int) -> int:
    nodes, places = divmod(hop, inner)
    node, place = divmod(rank, inner)
    return (node + sign * nodes) % (size // inner) * inner + (place + sign * places) % inner

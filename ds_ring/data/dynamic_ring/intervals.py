"""Rings of any number of consecutive ranks of a ring, on its process groups.

Owns the order of their ranks, their meshes, and the collectives of ranks that have no group of their own.

[Note: rings of intervals]
A ring of every size at every place would need a process group for each, and connections between all ranks.
So smaller rings use the groups of the whole ring, and their ranks are in the order 0, 2, 4, ..., 5, 3, 1,
counted from the first one: even ones up, odd ones down (the square of a path has a Hamiltonian cycle).
Neighbours in such a ring are at most two ranks apart in the whole one, wherever the smaller ring begins and
however long it is. So rank r sends to r - 2, r - 1, r + 1 and r + 2 (modulo P), in rings of all sizes
together. (Megatron-LM, pull request 7097, has such an order, too.) For this
- headers go around the ring in both directions, P / 2 rounds instead of log2 P;
- an all-gather, an all-to-all and a sum are messages from neighbour to neighbour;
- where the messages of a plan would go further (gradients return to their owners), the tokens that any other
  rank reads, and the sums of their gradients, go once around the ring.

Not held to these four: stages inside a node ("auto" on a GPU), bfloat16 gradients, transport "reproducible",
scans and selected keys, and rings of whole nodes that travel on two levels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import BatchSizes
from ds_ring.errors import RingMeshError
from ds_ring.masks.slots import SlotRanges, subtract_slots
from ds_ring.schedule.grid import Coordinates, Grid
from ds_ring.schedule.head_class import HeadClass
from ds_ring.schedule.plan import Plan
from ds_ring.schedule.rank_plan import make_one_way

Place = tuple[int, int]  # the first ring rank of an interval, and how many it has

KEPT_RINGS = 64  # of the whole ring's divisions, the latest; at least 4 of these


def ring_order(ranks: int) -> tuple[int, ...]:
    """Return consecutive ranks 0 .. ranks - 1 as a ring of neighbours at most two apart."""
    return (*range(0, ranks, 2), *reversed(range(1, ranks, 2)))


def are_linked(first: int, second: int, ring_size: int) -> bool:
    """Return whether two ranks of the whole ring may send to each other."""
    apart = (first - second) % ring_size
    return min(apart, ring_size - apart) <= 2


def stays_linked(plan: Plan, numbers: Sequence[int], ring_size: int) -> bool:
    """Return whether the pass of a plan sends between linked ranks alone; True where pruning changes nothing.

    `numbers` are the ranks in the whole ring of the plan's ranks.
    """
    for head_class in plan.classes:
        for way in head_class.directions:
            if not head_class.prune or head_class.rounded or way.stages or way.ranks_per_node:
                continue
            rows = [tuple(x.tolist()) for x in head_class.travel(range(plan.ring_size), way)]
            passed_on = {(origin, hop - 1): relayed for origin, hop, _, relayed in zip(*rows, strict=True)}
            for origin, hop, held, relayed in zip(*rows, strict=True):
                # What is not relayed comes from the owner; gradients that are not passed on return to it.
                if relayed == held == passed_on.get((origin, hop)):
                    continue
                reader = int(way.reader(origin, hop, plan.ring_size))
                if not are_linked(numbers[origin], numbers[reader], ring_size):
                    return False
    return True


@dataclass(frozen=True)
class OnceAround(HeadClass):
    """Send what any other rank reads once around the ring, from neighbour to neighbour."""

    @cached_property
    def _read(self) -> list[SlotRanges]:
        reads, rows = self.reads, []
        reads.find_readers(range(reads.layout.ring_size))
        for origin, shard in enumerate(reads.shards):
            unread = shard
            for reader in reads.readers(origin):
                unread = subtract_slots(unread, reads.slots(origin, reader))
            rows.append(subtract_slots(shard, unread))
        return rows

    def unpruned(self, origin: int) -> SlotRanges:
        """Return the slots of a shard that another rank reads."""
        return self._read[origin]


def between_neighbours(plan: Plan, numbers: Sequence[int], ring_size: int) -> Plan:
    """Return the plan itself if it stays between linked ranks, or else one that goes once around."""
    if stays_linked(plan, numbers, ring_size):
        return plan
    way = make_one_way(plan.ring_size)
    classes = (OnceAround(x.reads, x.kv_heads, way, False, x.rounded) for x in plan.classes)
    return Plan(plan.pattern, plan.layout, plan.query_heads, plan.kv_heads, tuple(classes))


@dataclass(frozen=True)
class IntervalGrid(Grid):
    """The numbering of one ring of some ranks of the world.

    Attributes:
        members: world ranks in the ring's order.
        numbers: their ranks in the whole ring of `whole_size` ranks.
    """

    members: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    whole_size: int = 0

    def __post_init__(self) -> None:
        """Accept a size that does not divide the world."""

    def coordinates(self, global_rank: int) -> Coordinates:
        """Return the place of a global rank; that of another ring has other data."""
        if global_rank in self.members:
            return Coordinates(0, self.members.index(global_rank), 0)
        return Coordinates(1, 0, 0)

    def global_rank(self, data: int, ring: int, ulysses: int) -> int:
        """Return the rank at a place of this ring; the index wraps around."""
        return self.members[ring % self.ring_size]


class NeighbourCollectives:
    """Collectives of a ring that has no process group of its own, by messages between its neighbours.

    Args:
        ring_rank: of this rank.
        members: the world ranks of the ring, in its order.
    """

    def __init__(self, ring_rank: int, members: Sequence[int]) -> None:
        self.rank, self.size = ring_rank, len(members)
        self.behind, self.ahead = (members[(ring_rank + step) % self.size] for step in (-1, 1))

    def spread(self, exchange: Exchange, header: Tensor) -> Tensor:
        """Return the least and the greatest header, as `Exchange.spread`."""
        least = greatest = tuple(header.tolist())
        sides = list(dict.fromkeys((self.behind, self.ahead)))
        route = exchange.world_route(sides, sides, header, exchange.mesh.cpu_group)
        for _ in range(self.size // 2):
            known = torch.tensor([least, greatest], dtype=torch.int64, device="cpu")
            heard = [torch.empty_like(known) for _ in sides]
            exchange.start(route, [known] * len(sides), heard).wait()
            for low, high in (interval.tolist() for interval in heard):
                least, greatest = min(least, tuple(low)), max(greatest, tuple(high))
        return torch.tensor([least, greatest], dtype=torch.int64, device="cpu")

    def all_gather(self, exchange: Exchange, tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
        """Return every rank's tensor in ring order."""
        parts = [tensor] * self.size
        for step in range(self.size - 1):
            sent = parts[(self.rank - step) % self.size]
            parts[(self.rank - step - 1) % self.size] = self._pass_on(exchange, sent, group)
        return parts

    def all_to_all(
        self, exchange: Exchange, parts: Sequence[Tensor], group: ProcessGroup | None
    ) -> list[Tensor]:
        """Return what each rank has for this one; parts travel together, and each rank takes its own out."""
        received = list(parts)
        bundle = torch.stack([parts[(self.rank + step) % self.size] for step in range(1, self.size)])
        for step in range(1, self.size):
            arrived = self._pass_on(exchange, bundle, group)
            received[(self.rank - step) % self.size], bundle = arrived[0], arrived[1:]
        return received

    def _pass_on(self, exchange: Exchange, sent: Tensor, group: ProcessGroup | None) -> Tensor:
        """Send a contiguous tensor to the next rank, and return the equally shaped one of the rank before."""
        got = torch.empty_like(sent)
        sizes = BatchSizes(True, 1, sent.nbytes)
        route = exchange.world_route([self.behind], [self.ahead], sent, group, sizes)
        exchange.start(route, [sent], [got]).wait()
        return got


@dataclass(frozen=True, eq=False)
class IntervalMesh(RingMesh):
    """A ring of some ranks of a ring, with the groups of the whole one; [Note: rings of intervals]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.grid, IntervalGrid)
        vars(self)["collectives"] = NeighbourCollectives(self.ring_rank, self.grid.members)

    def fitted(self, plan: Plan) -> Plan:
        """Return a plan that keeps to the four peers of each rank, or is not held to them."""
        assert isinstance(self.grid, IntervalGrid)
        return between_neighbours(plan, self.grid.numbers, self.grid.whole_size)


class SubRings:
    """Make and keep the rings of a whole ring's intervals.

    All share the failure detector, the groups and the owners of the whole mesh (buffers, host memory,
    observers), and are closed with it. Each has its own plans and its own counter of calls. Only one is used
    at a time.

    Raises:
        RingMeshError: Ulysses ranks share a sequence, whose heads smaller rings could not split alike.
    """

    def __init__(self, whole: RingMesh) -> None:
        if whole.ulysses_size > 1:
            raise RingMeshError.wrong(
                "SubRings", "no Ulysses ranks", f"{whole.ulysses_size}", "set ulysses_size to 1"
            )
        self.whole = whole
        node = whole.grid.ring_ranks_per_node(whole.global_rank, whole.ranks_per_node) or 0
        self.node = node if 1 < node < whole.ring_size else 0
        # By place, the latest last; None for a ring that this rank is not in. All ranks of the whole ring
        # have the same places in the same order, so that the ranks of a ring forget it together.
        self._meshes: OrderedDict[Place, RingMesh | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._meshes)

    def get_ring(self, places: Iterable[Place]) -> RingMesh:
        """Return this rank's ring of a division. All ranks of the whole ring call it, in the same order."""
        rank, own_mesh = self.whole.ring_rank, self.whole
        for place in places:
            mesh, is_here = self._meshes.pop(place, None), place[0] <= rank < sum(place)
            if is_here:
                own_mesh = mesh = mesh or self._made(*place)
            self._meshes[place] = mesh
        while len(self._meshes) > max(KEPT_RINGS, 4 * self.whole.ring_size):
            self._meshes.popitem(last=False)
        return own_mesh

    def numbers(self, first: int, ranks: int) -> tuple[int, ...]:
        """Return the ranks of an interval in the order of its ring; see `covers_nodes`."""
        natural = ranks == self.whole.ring_size or self.covers_nodes(first, ranks)
        return tuple(first + step for step in (range(ranks) if natural else ring_order(ranks)))

    def covers_nodes(self, first: int, ranks: int) -> bool:
        """Return whether a ring is of several whole nodes, on which it may travel on two levels."""
        return bool(self.node) and first % self.node == 0 == ranks % self.node and ranks > self.node

    def _made(self, first: int, ranks: int) -> RingMesh:
        whole = self.whole
        options: dict[str, Any] = {
            "owners": whole.owners.derived(), "state": whole.state, "timeouts": whole.timeouts,
        }  # fmt: skip
        if ranks == 1:
            return RingMesh(Grid(1, 1), 0, **options) if whole.ring_size > 1 else whole
        numbers = self.numbers(first, ranks)
        members = tuple(whole.global_rank_of(number) for number in numbers)
        grid = IntervalGrid(whole.grid.world_size, ranks, 1, (), members, numbers, whole.ring_size)
        return IntervalMesh(
            grid, whole.global_rank, whole.ring_group, None, whole.sequence_group, None, whole.cpu_group,
            whole.detector, ranks_per_node=whole.ranks_per_node, **options,
        )  # fmt: skip

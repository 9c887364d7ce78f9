"""FLOPs, bytes and time of a plan on given hardware, per attention pass of one rank. Pure arithmetic.

Owns the counting of a walk (pairs, messages, batches) and the time of a pass made of it. Memory is
pass_memory.py's; layers, other matrices and ZeRO are estimate.py's.

FLOPs of attention: 4 D per attended pair and query head forward (two products of D multiply-adds), 10 D
backward (five products; Dao et al. 2022, FlashAttention). Bytes: K and V of every token that the plan sends
go once forward; backward they go again, and a float32 dK and dV comes back for each ("one hop behind").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_ring.config.hardware import Hardware
from ds_ring.estimator.pass_memory import PassShape
from ds_ring.masks.slot_ranges import count_slots
from ds_ring.masks.tiles import Kind, Tiles
from ds_ring.schedule.head_chunks import MANY, head_chunks
from ds_ring.schedule.rank_plan import LanePlan, WalkPlan
from ds_ring.schedule.workspace import FLOAT, TRIANGLE

FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10  # per pair, query head and element of D: 2 and 5 products
EXPOSED = 0.05  # of a pass's time: more than that counts as a transfer that does not hide


class Part(NamedTuple):
    """Some of a rank's walks stand for all of them.

    Attributes:
        walk: of one class of K/V heads.
        times: how many classes it stands for.
    """

    walk: WalkPlan
    times: int


class HopCost(NamedTuple):
    """One hop of one K/V head and of its queries' heads, both lanes together.

    Attributes:
        pairs, executed: (query, key, query head) triples attended, and multiplied by the kernel.
        calls: of the kernel.
        received: tokens of K/V that the batch posted before this hop brings.
        returned: tokens whose dK/dV that batch brings (backward only).
    """

    pairs: int
    executed: int
    calls: int
    received: int
    returned: int


@dataclass(frozen=True)
class PassCost:
    """What a forward and a backward pass of one rank cost.

    Attributes:
        pairs, executed: summed over query heads and the batch.
        forward_bytes, backward_bytes: sent by this rank.
        forward_s, backward_s: seconds.
        compute_s: of these, both together, seconds in the kernel.
        hops: of all groups of heads, forward and backward.
        exposed_hops: of these, where the transfer takes longer than the arithmetic that should hide it.
        late_hops: of these, where there is arithmetic; the others wait when nothing is left to compute.
    """

    pairs: int
    executed: int
    forward_bytes: int
    backward_bytes: int
    forward_s: float
    backward_s: float
    compute_s: float
    hops: int
    exposed_hops: int
    late_hops: int

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def exposed_s(self) -> float:
        """Seconds in which the device waits for messages."""
        return self.seconds - self.compute_s


def executed_pairs(tiles: Tiles) -> int:
    """Pairs that a kernel multiplies: the corners of triangles and bands as well, in blocks of 128."""
    q, k = tiles.q.length, tiles.k.length
    corner = q * (np.minimum(q, TRIANGLE) - 1) // 2
    edged = (tiles.kind != Kind.FULL) & (tiles.kind != Kind.PARTIAL)
    whole = tiles.pairs + np.where(edged, corner * np.where(tiles.kind == Kind.BI_CAUSAL, 2, 1), 0)
    return int(np.minimum(whole, q * k).sum())


def hop_costs(walk: WalkPlan, group: int, backward: bool) -> list[HopCost]:
    """Every hop of a walk, in order; `group` query heads share a K/V head."""
    count = max(lane.backward_batches if backward else lane.hops for lane in walk.lanes)
    return [_hop_cost(walk, group, hop, backward) for hop in range(count)]


def _hop_cost(walk: WalkPlan, group: int, hop: int, backward: bool) -> HopCost:
    pairs = executed = calls = received = returned = 0
    for lane in walk.lanes if hop else walk.lanes[:1]:
        if (visit := lane.visit(hop)) is not None and len(visit.tiles):
            heads = np.where(visit.tiles.member < 0, group, 1)
            share = float((visit.tiles.pairs * heads).sum()) / max(int(visit.tiles.pairs.sum()), 1)
            pairs += int((visit.tiles.pairs * heads).sum())
            executed += int(executed_pairs(visit.tiles) * share)
            calls += len(visit.tiles)
    for lane in walk.lanes:
        coming = lane.visit(hop + 1)
        received += count_slots(coming.held) if coming is not None else 0
        returned += _returned(lane, hop) if backward else 0
    return HopCost(pairs, executed, calls, received, returned)


def _returned(lane: LanePlan, hop: int) -> int:
    """Tokens whose accumulators arrive while a hop is computed; ring_buffers.py's `_add_accumulators`."""
    here = lane.visit(hop)
    passing = count_slots(here.relayed) if here is not None and here.hop > 1 else 0
    return passing + sum(count_slots(home.slots) for home in lane.homecomings if home.hop == hop - 1)


def bytes_sent(parts: list[Part], shape: PassShape) -> tuple[int, int]:
    """Bytes that one rank sends, forward and backward."""
    token = 2 * shape.batch * shape.head_dim
    sent = sum(p.times * _heads(p.walk) * p.walk.tokens_sent for p in parts)
    received = sum(p.times * _heads(p.walk) * p.walk.tokens_received for p in parts)
    forward = token * shape.element_bytes * sent
    return forward, forward + token * FLOAT * received


def _heads(walk: WalkPlan) -> int:
    return len(range(*walk.kv_heads.indices(walk.kv_heads.stop)))


def pass_cost(
    parts: list[Part],
    shape: PassShape,
    hardware: Hardware,
    dtype: str,
    bytes_per_s: float,
    overlap: bool = True,
) -> PassCost:
    """Cost of a forward and a backward pass of one rank.

    Args:
        parts: its walks, or some that stand for all.
        shape: of the tensors.
        hardware: rates and fixed costs.
        dtype: in which products run.
        bytes_per_s: of the slowest link of the ring.
        overlap: a hop's messages travel while the one before it is computed.
    """
    found = []
    for backward in (False, True):
        costs = {id(p.walk): hop_costs(p.walk, shape.group, backward) for p in parts}
        found.append(_direction(parts, costs, shape, hardware, dtype, bytes_per_s, backward))
        if not backward:
            pairs, executed = (
                shape.batch * sum(p.times * _heads(p.walk) * c[i] for p in parts for c in costs[id(p.walk)])
                for i in (0, 1)
            )
    forward_s, backward_s = (float((np.maximum(c, x) if overlap else c + x).sum()) for c, x, _ in found)
    compute, transfer, kernel = np.concatenate(found, axis=1)
    exposed = transfer > (compute if overlap else 0)
    hops = (len(compute), int(exposed.sum()), int((exposed & (kernel > 0)).sum()))
    sent = bytes_sent(parts, shape)
    return PassCost(pairs, executed, *sent, forward_s, backward_s, float(compute.sum()), *hops)


def _direction(
    parts: list[Part],
    costs: dict[int, list[HopCost]],
    shape: PassShape,
    hardware: Hardware,
    dtype: str,
    bytes_per_s: float,
    backward: bool,
) -> np.ndarray:
    """What `_seconds` returns, all groups of heads on one time line."""
    efficiency = hardware.attention_efficiency
    per_pair = (BACKWARD_FLOPS if backward else FORWARD_FLOPS) * shape.head_dim
    fraction = efficiency.backward if backward else efficiency.forward
    flop_s = per_pair / (hardware.flops(dtype) * fraction)
    chunks = [(part, heads) for part in parts for heads in _chunks(part.walk, shape) * part.times]
    later = int(backward and len(chunks) < MANY)
    return _one_after_another(
        [
            (
                max(part.walk.limit + later, 1),
                _seconds(costs[id(part.walk)], shape, heads, flop_s, bytes_per_s, hardware),
            )
            for part, heads in chunks
        ]
    )


def _chunks(walk: WalkPlan, shape: PassShape) -> list[int]:
    """K/V heads of each group that goes round."""
    head_bytes = shape.head_bytes if walk.limit else 0
    chunks = head_chunks(walk.kv_heads, head_bytes, shape.chunk_bytes)
    return [len(range(*chunk.indices(chunk.stop))) for chunk in chunks]


def _seconds(
    costs: list[HopCost],
    shape: PassShape,
    heads: int,
    flop_s: float,
    bytes_per_s: float,
    hardware: Hardware,
) -> np.ndarray:
    """Seconds of compute, of transfer, and of compute in the kernel, of one group of heads; [3, hops]."""
    _, executed, calls, received, returned = np.array(costs, dtype=np.float64).T
    rows = shape.batch * heads
    calls = calls if shape.kernel == "cpu" else np.minimum(calls, 1)  # flex: one call for the whole hop
    token = 2 * rows * shape.head_dim
    size = token * (received * shape.element_bytes + returned * FLOAT)
    posting = np.where(size > 0, hardware.hop_overhead_s, 0.0)  # this rank's own time: nothing hides it
    kernel = executed * rows * flop_s
    compute = kernel + calls * hardware.call_overhead_s + posting
    return np.stack([compute, size / bytes_per_s + np.where(size > 0, hardware.link_latency_s, 0.0), kernel])


def _one_after_another(groups: list[tuple[int, np.ndarray]]) -> np.ndarray:
    """All groups' hops on one time line: each sets out `wait` hops after the one before it; [3, hops]."""
    starts = np.cumsum([0, *(wait for wait, _ in groups[:-1])])
    length = max(start + mine.shape[1] for start, (_, mine) in zip(starts, groups, strict=True))
    line = np.zeros((3, length))
    for start, (_, mine) in zip(starts, groups, strict=True):
        line[:, start : start + mine.shape[1]] += mine
    return line

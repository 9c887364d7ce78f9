"""Model one attention pass of a published method by its own algorithm: kernels, copies and messages.

Owns one function for each method: its seconds on the slowest rank. table.py has the figures, packs.py the
documents. An algorithm is read in its source, and no constant is fitted to a row:

- a kernel takes the time that it takes alone, by the length of its sequence;
- a copy reads and writes the device's memory; every torch operation is a kernel of its own, which reads its
  operands and writes its result;
- messages go at the published rate of the link; they overlap where the algorithm posts them before a kernel
  and waits after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log, sqrt
from typing import NamedTuple

from .table import Curve, Direction, Kernel, Machine

TILE = 128  # rows and columns that a kernel multiplies at once
MERGE_BYTES = 38  # of out in torch's `out - sigmoid(.) * (out - block)` in float32, block cast before it
ADD_BYTES = 10  # of `a += b`: a float32, b bfloat16
MAGI_SMS = 48 / 132  # multiprocessors that MagiAttention's benchmark gives to its native group cast
MAGI_CHUNK = 2048  # tokens that its dispatch moves as one


@dataclass(frozen=True)
class Pass:
    """Describe one pass of attention: where, of what, and in which direction."""

    machine: Machine
    kernel: Kernel
    ranks: int
    tokens: int  # of a rank
    heads: int
    kv_heads: int
    direction: Direction
    lengths: tuple[int, ...]  # of the documents; one for a causal sequence
    head_dim: int = 128
    element_bytes: int = 2

    @property
    def flops(self) -> float:
        """Return the FLOPs that count in a published TFLOPS figure, of one rank."""
        pairs = sum(n * (n + 1) / 2 for n in self.lengths)
        return self.pair_flops * pairs * self.heads / self.ranks

    @property
    def pair_flops(self) -> float:
        """Return the FLOPs of a pair: two products forward, five backward."""
        return {"forward": 4, "backward": 10, "both": 14}[self.direction] * self.head_dim

    @property
    def q_bytes(self) -> int:
        """Return the bytes of a rank's queries, or out, dout, dq."""
        return self.tokens * self.heads * self.head_dim * self.element_bytes

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of a rank's keys and values together."""
        return 2 * self.tokens * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def nodes(self) -> int:
        """Return how many nodes the ranks span."""
        return ceil(self.ranks / self.machine.node)

    @property
    def out_elements(self) -> int:
        """Return the elements of a rank's out."""
        return self.q_bytes // self.element_bytes

    def causal_s(self, lengths: Sequence[float], heads: float) -> float:
        """Return the seconds of one kernel call over whole causal documents."""
        curve = self.kernel.curve(self.direction).causal
        pairs = [(n, n * (n + 1) / 2) for n in lengths]
        return sum(self.pair_flops * count * heads / rate_at(curve, n) for n, count in pairs)

    def full_s(self, q: float, k: float, heads: float) -> float:
        """Return the seconds of a kernel call of q queries and k keys without a mask."""
        curve = self.kernel.curve(self.direction).full
        return self.pair_flops * q * k * heads / rate_at(curve, sqrt(q * k))

    def tiled_s(self, q: float, k: float, heads: float) -> float:
        """Return the same for one of many short pieces of a call: whole tiles, at the rate of a long one."""
        curve = self.kernel.curve(self.direction).full
        tiles = ceil(q / TILE) * ceil(k / TILE) * TILE * TILE
        return self.pair_flops * tiles * heads / rate_at(curve, max(curve))

    def copies_s(self, moved: float) -> float:
        """Return the seconds in which the device reads and writes so many bytes."""
        return moved / self.machine.memory

    def exchange_s(self, sent: float) -> float:
        """Return the seconds of an all-to-all in which a rank has so many bytes for all ranks."""
        inside = min(self.ranks, self.machine.node)
        near, far = (inside - 1) / self.ranks, (self.ranks - inside) / self.ranks
        return max(sent * near / self.machine.link, sent * far / self.machine.network)

    def gather_s(self, received: float) -> float:
        """Return the seconds of NCCL's all-gather, whose rings use all adapters of a node at once."""
        rate = self.machine.link
        return received / (rate if self.nodes == 1 else min(rate, self.machine.node * self.machine.network))

    def hop_s(self, sent: float) -> float:
        """Return the seconds of a hop to the next rank; the slowest is between nodes."""
        return sent / (self.machine.link if self.nodes == 1 else self.machine.network)


def rate_at(curve: Curve, length: float) -> float:
    """Return FLOP/s at a length: linear in its logarithm between the published ones, constant outside."""
    known = sorted(curve)
    length = min(max(length, known[0]), known[-1])
    high = next(n for n in known if n >= length)
    low = max((n for n in known if n <= length), default=high)
    part = 0.0 if high == low else (log(length) - log(low)) / (log(high) - log(low))
    return 1e12 * (curve[low] + part * (curve[high] - curve[low]))


# MagiAttention's baselines pack documents: a kernel call takes padded tensors apart by `torch.gather` (read
# and written) and puts its results together by zeros and `scatter_` (written, then read and written).
UNPAD, PAD = 2, 3


def kernel_copies(q: float, kv: float, backward: bool) -> float:
    """Return the bytes that one call of the baselines' kernel moves beside its own work."""
    if backward:  # q, out and dout apart, dq together; likewise K/V
        return UNPAD * (3 * q + kv) + PAD * (q + kv)
    return UNPAD * (q + kv) + PAD * q


def ulysses(attention: Pass) -> float:
    """Return the seconds of all-to-alls of q, k, v and of out, with nothing to overlap (its class Ulysess).

    Before the exchange and after it a tensor is put into another order; on the way back once. K/V heads that
    are fewer than the ranks are repeated.
    """
    backward, q = attention.direction == "backward", attention.q_bytes
    kv = attention.kv_bytes * max(attention.ranks // attention.kv_heads, 1)
    exchanged = attention.exchange_s(2 * q + kv)
    orders = 4 * (q + kv) + 2 * q
    kernel = attention.causal_s(attention.lengths, attention.heads / attention.ranks)
    return exchanged + attention.copies_s(orders + kernel_copies(q, kv, backward)) + kernel


def all_gather(attention: Pass) -> float:
    """Return the seconds of K/V gathered at once, then one kernel call for each of a rank's two pieces.

    Its class FA3RingAGAttnFunc: the gathered keys are put in order, and a call takes all of them apart;
    backward the float gradients of all keys are summed over both calls, put in order and scattered.
    """
    backward, q, kv = (
        attention.direction == "backward",
        attention.q_bytes,
        attention.kv_bytes * attention.ranks,
    )
    pieces, heads = 2 * attention.ranks, attention.heads
    kernel = 0.0
    for rank in {0, attention.ranks // 2, attention.ranks - 1}:
        mine = 0.0
        for length in attention.lengths:
            part = length / pieces
            for piece in (rank, pieces - 1 - rank):
                if len(attention.lengths) == 1:  # the piece's own triangle, and what is before it
                    mine += attention.full_s(part, part * piece, heads) if piece else 0.0
                    mine += attention.causal_s([part], heads)
                else:
                    mine += attention.tiled_s(part, part * (piece + 0.5), heads)
        kernel = max(kernel, mine)
    moved = 2 * kv + 2 * UNPAD * kv  # in order; apart, for each call
    if backward:
        moved += 2 * (PAD + 3) * kv + kv + 2 * kv  # results of a call together and added; zeros; in order
        moved += 4 * q + UNPAD * 3 * q + PAD * q + 2 * q
    else:
        moved += 2 * q + UNPAD * q + PAD * q + 2 * q
    messages = attention.gather_s(attention.kv_bytes * (attention.ranks - 1)) * (2 if backward else 1)
    return kernel + attention.copies_s(moved) + messages


def ring_hops(attention: Pass, ranks: int, tokens: int, heads: int, kv_heads: int) -> float:
    """Return the seconds of TransformerEngine's ring on its last rank, whose hops read half of the keys.

    Its class FA3RingAttnFunc: a document is cut into two pieces a rank; every hop takes tensors apart and
    puts them together, and corrects out (forward) or adds dq and dk, dv (backward). K/V, and backward dK and
    dV as well, travel while the kernel runs.
    """
    backward = attention.direction == "backward"
    kv = 2 * tokens * kv_heads * attention.head_dim * attention.element_bytes
    q = tokens * heads * attention.head_dim * attention.element_bytes
    if len(attention.lengths) == 1:
        local = attention.lengths[0] / ranks
        first = 2 * attention.causal_s([local / 2], heads) + attention.full_s(local / 2, local / 2, heads)
        hop = attention.full_s(local, local / 2, heads)
    else:
        shares = [(n / ranks, n / ranks / 2) for n in attention.lengths]
        first = sum(attention.tiled_s(share, share, heads) for share, _ in shares)  # causal tiles: about half
        first = max(first / 2, attention.causal_s([share for share, _ in shares], heads))
        hop = sum(attention.tiled_s(share, half, heads) for share, half in shares)
    half = kv / 2
    moved = kernel_copies(q, half, backward) + 2 * half
    moved += 3 * q + 5 * half if backward else 3 * q
    message = attention.hop_s(2 * kv if backward else kv) if ranks > 1 else 0.0
    compute = hop + attention.copies_s(moved)
    start = first + attention.copies_s(kernel_copies(q, kv, backward) + 3 * q)
    return max(start, message) + (ranks - 1) * max(compute, message)


def te_ring(attention: Pass) -> float:
    """Return the seconds of TransformerEngine's ring over all ranks."""
    return ring_hops(attention, attention.ranks, attention.tokens, attention.heads, attention.kv_heads)


def usp(attention: Pass) -> float:
    """Return the seconds of Ulysses inside a node and TransformerEngine's ring between nodes (class USP)."""
    inside = min(attention.ranks, attention.machine.node)
    exchange = (2 * attention.q_bytes + attention.kv_bytes) * (inside - 1) / inside / attention.machine.link
    orders = attention.copies_s(4 * (attention.q_bytes + attention.kv_bytes) + 2 * attention.q_bytes)
    if attention.nodes == 1:
        copies = attention.copies_s(
            kernel_copies(attention.q_bytes, attention.kv_bytes, attention.direction == "backward")
        )
        return exchange + orders + attention.causal_s(attention.lengths, attention.heads / inside) + copies
    inner = (attention.tokens * inside, attention.heads // inside, max(attention.kv_heads // inside, 1))
    return exchange + orders + ring_hops(attention, attention.nodes, *inner)


def magi(attention: Pass) -> float:
    """Return the seconds of MagiAttention: chunks dispatched to equal work, K/V cast to those who read them.

    Chunks go to the rank of the least work that has room (MinHeapDispatchAlg); a token crosses to a node
    once. In two stages (`degree = 2`) the first half of the cast overlaps with the local keys, the second
    with the first half's; the cast holds multiprocessors. Backward dK and dV are reduced likewise, and the
    last half of it has nothing to overlap with.
    """
    load = dispatched(attention)
    token = attention.kv_bytes / attention.tokens
    message = max(load.near * token / attention.machine.link, load.far * token / attention.machine.network)
    kernel = load.imbalance * attention.causal_s(attention.lengths, attention.heads) / attention.ranks
    local, stage, half = kernel * load.local, kernel * (1 - load.local) / 2, message / 2
    if attention.direction == "backward":  # the second stage's keys and the first stage's gradients
        return _with_cast(local, half) + _with_cast(stage, 2 * half) + stage + half
    return _with_cast(local, half) + _with_cast(stage, half) + stage


def _with_cast(kernel: float, message: float) -> float:
    """Return the seconds of a kernel beside a cast that holds multiprocessors."""
    return max(kernel + MAGI_SMS * min(message, kernel / (1 - MAGI_SMS)), message)


class Load(NamedTuple):
    """Hold what a dispatch of chunks gives the ranks."""

    imbalance: float  # the fullest rank's work over the mean
    local: float  # part of the work whose keys are in the rank's own chunks
    near: int  # the most tokens that a rank gets from its node
    far: float  # from other nodes


def dispatched(attention: Pass) -> Load:
    """Return what MagiAttention's dispatch gives: the largest chunks first, each to the least loaded rank."""
    chunk = min(MAGI_CHUNK, attention.tokens)
    count, node, ranks = (
        attention.ranks * attention.tokens // chunk,
        attention.machine.node,
        range(attention.ranks),
    )
    areas, local_areas, reads = [0.0] * count, [0.0] * count, [set[int]() for _ in range(count)]
    start = 0
    for length in attention.lengths:
        for index in range(start // chunk, ceil((start + length) / chunk)):
            first, last = max(index * chunk, start), min((index + 1) * chunk, start + length)
            areas[index] += ((last - start) ** 2 - (first - start) ** 2) / 2
            local_areas[index] += (last - first) ** 2 / 2
            reads[index].update(range(start // chunk, index + 1))
        start += length
    loads, room, owner = [0.0] * attention.ranks, [count // attention.ranks] * attention.ranks, [0] * count
    for index in sorted(range(count), key=lambda i: -areas[i]):
        rank = min((r for r in ranks if room[r]), key=lambda r: loads[r])
        loads[rank] += areas[index]
        room[rank] -= 1
        owner[index] = rank
    needs = [set[int]() for _ in ranks]
    for index in range(count):
        needs[owner[index]] |= reads[index]
    near = max(sum(owner[c] != r and owner[c] // node == r // node for c in needs[r]) for r in ranks)
    # between nodes a chunk crosses once for all ranks of a node, which share the adapters
    crossing = []
    for group in range(attention.nodes):
        mine = ranks[group * node : (group + 1) * node]
        wanted = set[int]().union(*(needs[r] for r in mine))
        crossing.append(sum(owner[c] // node != group for c in wanted) / len(mine))
    return Load(
        max(loads) * attention.ranks / sum(loads),
        sum(local_areas) / sum(areas),
        near * chunk,
        max(crossing) * chunk,
    )


def zigzag_ring(attention: Pass) -> float:
    """Return the seconds of ring-flash-attention's zigzag ring on its last rank.

    Each hop merges out in float32 by torch operations; backward it adds dq, dk and dv in float32. K/V travel
    while the kernel runs, as do dK and dV in float32 backward.
    """
    first, hop = (
        attention.causal_s([attention.tokens], attention.heads),
        attention.full_s(attention.tokens, attention.tokens / 2, attention.heads),
    )
    return _ring_flash(attention, [first] + [hop] * (attention.ranks - 1))


def plain_ring(attention: Pass) -> float:
    """Return the seconds of ring-flash-attention's plain ring: its last rank reads the keys of all hops."""
    first, hop = (
        attention.causal_s([attention.tokens], attention.heads),
        attention.full_s(attention.tokens, attention.tokens, attention.heads),
    )
    return _ring_flash(attention, [first] + [hop] * (attention.ranks - 1))


def _ring_flash(attention: Pass, kernels: list[float]) -> float:
    merge = attention.copies_s(MERGE_BYTES * attention.out_elements)
    forward = 0.0 if attention.direction == "backward" else merge * len(kernels)
    added = attention.out_elements + attention.kv_bytes / attention.element_bytes
    backward = (
        0.0 if attention.direction == "forward" else attention.copies_s(ADD_BYTES * added) * len(kernels)
    )
    # K/V once, and backward again with dK and dV in float32
    sent = attention.kv_bytes * {"forward": 1, "backward": 3, "both": 4}[attention.direction]
    message = attention.hop_s(sent)
    return sum(max(kernel, message) for kernel in kernels) + forward + backward


def kernel_alone(attention: Pass) -> float:
    """Return the seconds of one kernel call over all documents."""
    return attention.causal_s(attention.lengths, attention.heads)


METHODS: dict[str, Callable[[Pass], float]] = {
    "kernel alone": kernel_alone,
    "Ulysses": ulysses,
    "USP": usp,
    "all-gather": all_gather,
    "TE ring": te_ring,
    "Magi": magi,
    "zigzag ring": zigzag_ring,
    "plain ring": plain_ring,
}

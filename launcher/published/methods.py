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


def ulysses(one: Pass) -> float:
    """Return the seconds of all-to-alls of q, k, v and of out, with nothing to overlap (its class Ulysess).

    Before the exchange and after it a tensor is put into another order; on the way back once. K/V heads that
    are fewer than the ranks are repeated.
    """
    backward, q = one.direction == "backward", one.q_bytes
    kv = one.kv_bytes * max(one.ranks // one.kv_heads, 1)
    exchanged = one.exchange_s(2 * q + kv)
    orders = 4 * (q + kv) + 2 * q
    kernel = one.causal_s(one.lengths, one.heads / one.ranks)
    return exchanged + one.copies_s(orders + kernel_copies(q, kv, backward)) + kernel


def all_gather(one: Pass) -> float:
    """Return the seconds of K/V gathered at once, then one kernel call for each of a rank's two pieces.

    Its class FA3RingAGAttnFunc: the gathered keys are put in order, and a call takes all of them apart;
    backward the float gradients of all keys are summed over both calls, put in order and scattered.
    """
    backward, q, kv = one.direction == "backward", one.q_bytes, one.kv_bytes * one.ranks
    pieces, heads = 2 * one.ranks, one.heads
    kernel = 0.0
    for rank in {0, one.ranks // 2, one.ranks - 1}:
        mine = 0.0
        for length in one.lengths:
            part = length / pieces
            for piece in (rank, pieces - 1 - rank):
                if len(one.lengths) == 1:  # the piece's own triangle, and what is before it
                    mine += one.full_s(part, part * piece, heads) if piece else 0.0
                    mine += one.causal_s([part], heads)
                else:
                    mine += one.tiled_s(part, part * (piece + 0.5), heads)
        kernel = max(kernel, mine)
    moved = 2 * kv + 2 * UNPAD * kv  # in order; apart, for each call
    if backward:
        moved += 2 * (PAD + 3) * kv + kv + 2 * kv  # results of a call together and added; zeros; in order
        moved += 4 * q + UNPAD * 3 * q + PAD * q + 2 * q
    else:
        moved += 2 * q + UNPAD * q + PAD * q + 2 * q
    messages = one.gather_s(one.kv_bytes * (one.ranks - 1)) * (2 if backward else 1)
    return kernel + one.copies_s(moved) + messages


def ring_hops(one: Pass, ranks: int, tokens: int, heads: int, kv_heads: int) -> float:
    """Return the seconds of TransformerEngine's ring on its last rank, whose hops read half of the keys.

    Its class FA3RingAttnFunc: a document is cut into two pieces a rank; every hop takes tensors apart and
    puts them together, and corrects out (forward) or adds dq and dk, dv (backward). K/V, and backward dK and
    dV as well, travel while the kernel runs.
    """
    backward = one.direction == "backward"
    kv = 2 * tokens * kv_heads * one.head_dim * one.element_bytes
    q = tokens * heads * one.head_dim * one.element_bytes
    if len(one.lengths) == 1:
        local = one.lengths[0] / ranks
        first = 2 * one.causal_s([local / 2], heads) + one.full_s(local / 2, local / 2, heads)
        hop = one.full_s(local, local / 2, heads)
    else:
        shares = [(n / ranks, n / ranks / 2) for n in one.lengths]
        first = sum(one.tiled_s(share, share, heads) for share, _ in shares)  # causal tiles: about half
        first = max(first / 2, one.causal_s([share for share, _ in shares], heads))
        hop = sum(one.tiled_s(share, half, heads) for share, half in shares)
    half = kv / 2
    moved = kernel_copies(q, half, backward) + 2 * half
    moved += 3 * q + 5 * half if backward else 3 * q
    message = one.hop_s(2 * kv if backward else kv) if ranks > 1 else 0.0
    compute = hop + one.copies_s(moved)
    start = first + one.copies_s(kernel_copies(q, kv, backward) + 3 * q)
    return max(start, message) + (ranks - 1) * max(compute, message)


def te_ring(one: Pass) -> float:
    """Return the seconds of TransformerEngine's ring over all ranks."""
    return ring_hops(one, one.ranks, one.tokens, one.heads, one.kv_heads)


def usp(one: Pass) -> float:
    """Return the seconds of Ulysses inside a node and TransformerEngine's ring between nodes (class USP)."""
    inside = min(one.ranks, one.machine.node)
    exchange = (2 * one.q_bytes + one.kv_bytes) * (inside - 1) / inside / one.machine.link
    orders = one.copies_s(4 * (one.q_bytes + one.kv_bytes) + 2 * one.q_bytes)
    if one.nodes == 1:
        copies = one.copies_s(kernel_copies(one.q_bytes, one.kv_bytes, one.direction == "backward"))
        return exchange + orders + one.causal_s(one.lengths, one.heads / inside) + copies
    inner = (one.tokens * inside, one.heads // inside, max(one.kv_heads // inside, 1))
    return exchange + orders + ring_hops(one, one.nodes, *inner)


def magi(one: Pass) -> float:
    """Return the seconds of MagiAttention: chunks dispatched to equal work, K/V cast to those who read them.

    Chunks go to the rank of the least work that has room (MinHeapDispatchAlg); a token crosses to a node
    once. In two stages (`degree = 2`) the first half of the cast overlaps with the local keys, the second
    with the first half's; the cast holds multiprocessors. Backward dK and dV are reduced likewise, and the
    last half of it has nothing to overlap with.
    """
    load = dispatched(one)
    token = one.kv_bytes / one.tokens
    message = max(load.near * token / one.machine.link, load.far * token / one.machine.network)
    kernel = load.imbalance * one.causal_s(one.lengths, one.heads) / one.ranks
    local, stage, half = kernel * load.local, kernel * (1 - load.local) / 2, message / 2
    if one.direction == "backward":  # the second stage's keys and the first stage's gradients
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


def dispatched(one: Pass) -> Load:
    """Return what MagiAttention's dispatch gives: the largest chunks first, each to the least loaded rank."""
    chunk = min(MAGI_CHUNK, one.tokens)
    count, node, ranks = one.ranks * one.tokens // chunk, one.machine.node, range(one.ranks)
    areas, own, reads = [0.0] * count, [0.0] * count, [set[int]() for _ in range(count)]
    start = 0
    for length in one.lengths:
        for index in range(start // chunk, ceil((start + length) / chunk)):
            first, last = max(index * chunk, start), min((index + 1) * chunk, start + length)
            areas[index] += ((last - start) ** 2 - (first - start) ** 2) / 2
            own[index] += (last - first) ** 2 / 2
            reads[index].update(range(start // chunk, index + 1))
        start += length
    loads, room, owner = [0.0] * one.ranks, [count // one.ranks] * one.ranks, [0] * count
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
    for group in range(one.nodes):
        mine = ranks[group * node : (group + 1) * node]
        wanted = set[int]().union(*(needs[r] for r in mine))
        crossing.append(sum(owner[c] // node != group for c in wanted) / len(mine))
    return Load(
        max(loads) * one.ranks / sum(loads), sum(own) / sum(areas), near * chunk, max(crossing) * chunk
    )


def zigzag_ring(one: Pass) -> float:
    """Return the seconds of ring-flash-attention's zigzag ring on its last rank.

    Each hop merges out in float32 by torch operations; backward it adds dq, dk and dv in float32. K/V travel
    while the kernel runs, as do dK and dV in float32 backward.
    """
    first, hop = one.causal_s([one.tokens], one.heads), one.full_s(one.tokens, one.tokens / 2, one.heads)
    return _ring_flash(one, [first] + [hop] * (one.ranks - 1))


def plain_ring(one: Pass) -> float:
    """Return the seconds of ring-flash-attention's plain ring: its last rank reads the keys of all hops."""
    first, hop = one.causal_s([one.tokens], one.heads), one.full_s(one.tokens, one.tokens, one.heads)
    return _ring_flash(one, [first] + [hop] * (one.ranks - 1))


def _ring_flash(one: Pass, kernels: list[float]) -> float:
    merge = one.copies_s(MERGE_BYTES * one.out_elements)
    forward = 0.0 if one.direction == "backward" else merge * len(kernels)
    added = one.out_elements + one.kv_bytes / one.element_bytes
    backward = 0.0 if one.direction == "forward" else one.copies_s(ADD_BYTES * added) * len(kernels)
    # K/V once, and backward again with dK and dV in float32
    sent = one.kv_bytes * {"forward": 1, "backward": 3, "both": 4}[one.direction]
    message = one.hop_s(sent)
    return sum(max(kernel, message) for kernel in kernels) + forward + backward


def kernel_alone(one: Pass) -> float:
    """Return the seconds of one kernel call over all documents."""
    return one.causal_s(one.lengths, one.heads)


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

"""The layout "auto": what is compared, and by which costs.

[Note: the cost of a layout]
The imbalance of a layout is the number of (query, key) pairs that the rank with most work computes, divided
by the mean of all ranks. The traffic is the number of tokens that the plan sends. Layers with different
patterns share one layout: traffic is summed over the layers, and so is the work of each layer's fullest rank,
because ranks wait for one another in every layer. Of the layouts with an imbalance of at most `EVEN` we take
the one with the least traffic, then the one with the fewest runs; if there is none, the most even one. Memory
is not considered: candidates differ little in the length of shards.
For a kernel that computes whole blocks a layout is even enough if it computes at most `EVEN` times the
minimum.

[Note: what auto compares]
Contiguous and zigzag shards, and those of rows with `always`, which are for some patterns. Where all are
uneven, those of rows with `if_uneven`. A kernel in blocks rates them by its own count, and adds layouts that
are made for blocks. If rows with `for_labels` have layouts, too, the least modelled time decides among them
and the even ones.

[Note: modelled time]
Messages travel while a rank computes, so a rank takes the longer of both: its pairs, or the tokens that it
receives, each of which costs as much as some pairs. A twentieth of the messages is not hidden. The slowest
rank decides. For grouped heads of H:G a token is 4 D G bytes and a pair 4 D H operations, so at 600 TFLOPS
and 45 GB/s (one adapter of 400 Gbit/s a GPU) a token costs 13,333 G / H pairs: 1,667 at 8:1. Over the links
inside a node (360 GB/s) it costs 208. A ring of at most `NODE` ranks counts as inside one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ds_ring.masks.pattern import BoundPattern, Pattern
from ds_ring.masks.slots import IntArray, count_sets, intersect_slots, merge_progressions
from ds_ring.masks.tiles import UNBOUNDED, Tiles
from ds_ring.plugin import KERNELS, LAYOUTS, load
from ds_ring.schedule.directions import sample_origins
from ds_ring.schedule.head_class import HeadClass, ReadsOfShards
from ds_ring.schedule.layout import ChunkLayout, Layout, Mix
from ds_ring.schedule.rank_plan import make_one_way

EVEN = 1.05  # an imbalance up to this value counts as even
TOKEN_PAIRS, TOKEN_PAIRS_IN_NODE = 1600.0, 200.0  # cost of a token that is received; [Note: modelled time]
NODE = 8  # ranks
AS_FAST = 1.01  # times up to this ratio count as equal: the tokens sent decide
NOT_HIDDEN = 0.05  # of the time of messages
COMPARED = 4  # how many even layouts, starting with the fewest runs, are compared by traffic
_log = logging.getLogger(__name__)


class Candidate(NamedTuple):
    """A layout with its costs; see [Note: the cost of a layout]."""

    layout: Layout
    imbalance: float  # pairs that the fullest rank computes, over the mean of the attended pairs
    tokens_sent: int = 0  # per K/V head and forward pass, over the sampled shards; for the best ones only
    time: float = 0.0  # of the slowest rank, over the time of the mean work; [Note: modelled time]

    def __str__(self) -> str:
        return f"{self.layout.name} (work max/mean {self.imbalance:.3f}, {self.tokens_sent} tokens sent)"


def bind_one_head(pattern: Pattern) -> BoundPattern:
    """Return the pattern of head 0: a layout is chosen by one head, since all heads have similar work."""
    return pattern.bind((0,), 1, 1)


def count_run_work(pattern: Pattern, runs: IntArray, tokens: int) -> np.ndarray:
    """Return the attended pairs of the queries of every run, over all keys; float64 [len(runs)]."""
    tiles = pattern.tiles(runs, np.array([[0, 1, tokens]]))
    # Runs are consecutive in the query slots, so a tile's first slot determines its run.
    first_slots = np.cumsum(runs[:, 2]) - runs[:, 2]
    row = np.searchsorted(first_slots, tiles.q.slot, side="right") - 1
    return np.bincount(row, weights=_count_pairs(tiles), minlength=len(runs))


def _count_pairs(tiles: Tiles) -> np.ndarray:
    """Return the pairs of tiles, float64: exact up to 2^53, and sums beyond int64 do not overflow."""
    return tiles.pairs.astype(np.float64)


def count_rank_work(pattern: Pattern, layout: Layout) -> np.ndarray:
    """Return the attended pairs of every rank, for one head; float64 [ring_size]."""
    works: np.ndarray = _count_rank_pairs(pattern, [layout])[0]
    return works


def _count_rank_pairs(pattern: Pattern, layouts: Sequence[Layout]) -> np.ndarray:
    """Return the same for layouts of equal sizes, by one table; float64 [len(layouts), ring_size]."""
    (runs, ranks), size = collect_runs(layouts), layouts[0].ring_size
    work = count_run_work(pattern, runs, layouts[0].tokens)
    return np.bincount(ranks, weights=work, minlength=len(layouts) * size).reshape(-1, size)


def collect_runs(layouts: Sequence[Layout]) -> tuple[IntArray, IntArray]:
    """Return the runs of all ranks of all layouts, and the number of the rank that has each."""
    shards = [layout.runs(rank) for layout in layouts for rank in range(layout.ring_size)]
    return np.concatenate(shards), np.repeat(np.arange(len(shards)), [len(runs) for runs in shards])


def compute_costs(pattern: Pattern, layouts: Sequence[Layout]) -> tuple[np.ndarray, IntArray]:
    """Return the pairs of each rank and the tokens that it receives in a forward pass, for one head.

    They are float64 and int64 [len(layouts), ring_size]; one table for layouts of equal sizes. Tokens
    received are 0 where they are not known: if the keys of a tile are not consecutive.
    """
    tokens, size = layouts[0].tokens, layouts[0].ring_size
    count, width = len(layouts) * size, tokens + 1
    runs, ranks = collect_runs(layouts)
    tiles = pattern.tiles(runs, np.array([[0, 1, tokens]]))
    first_slots = np.cumsum(runs[:, 2]) - runs[:, 2]
    reader = ranks[np.searchsorted(first_slots, tiles.q.slot, side="right") - 1]
    work = np.bincount(reader, weights=_count_pairs(tiles), minlength=count).reshape(-1, size)
    strided = (tiles.k.position_step != 1) & (tiles.k.length > 1)
    if strided.any() or (runs[:, 1] != 1).any() or count * width >= UNBOUNDED:
        return work, np.zeros(work.shape, dtype=np.int64)
    # one set of positions for each rank, as in `join_sets`
    rows = np.stack([tiles.k.position + reader * width, np.ones_like(reader), tiles.k.length], axis=1)
    read = merge_progressions(rows)
    shard_slots = np.stack([runs[:, 0], runs[:, 0] + runs[:, 2]], axis=1) + (ranks * width)[:, None]
    counts = [count_sets(slots, width, count) for slots in (read, intersect_slots(read, shard_slots))]
    return work, (counts[0] - counts[1]).reshape(-1, size)


def timed(mix: Mix, layouts: Sequence[Layout]) -> list[Candidate]:
    """Return layouts of equal sizes with all of their costs; [Note: modelled time]."""
    costs = [(layers, *compute_costs(pattern, layouts)) for pattern, layers in mix]
    options, price = [], TOKEN_PAIRS if layouts[0].ring_size > NODE else TOKEN_PAIRS_IN_NODE
    for index, layout in enumerate(layouts):
        works = [layers * work[index] for layers, work, _ in costs]
        sent, total, mean = 0, 0.0, sum(float(work.mean()) for work in works)
        for layers, work, received in costs:
            messages = price * received[index]
            total += layers * float((np.maximum(work[index], messages) + NOT_HIDDEN * messages).max())
            sent += layers * int(received[index].sum())
        options.append(Candidate(layout, imbalance(works), sent, total / mean if mean else 1.0))
    return options


def imbalance(works: list[np.ndarray]) -> float:
    """Return the imbalance of the ranks' work, given for each pattern over all its layers."""
    mean = sum(work.mean() for work in works)
    return float(sum(work.max() for work in works) / mean) if mean else 1.0


def rated(mix: Mix, layout: Layout) -> Candidate:
    """Return a layout with its imbalance; [Note: the cost of a layout]."""
    return rate_all(mix, [layout])[0]


def rate_all(mix: Mix, layouts: Sequence[Layout]) -> list[Candidate]:
    """Return layouts of equal sizes with their imbalance."""
    works = [layers * _count_rank_pairs(bind_one_head(pattern), layouts) for pattern, layers in mix]
    return [
        Candidate(layout, imbalance([work[index] for work in works])) for index, layout in enumerate(layouts)
    ]


def select_candidates(options: list[Candidate], least: float = 1.0) -> list[Candidate]:
    """Return the even options with the fewest runs; the most even one if none is even."""
    even = [o for o in options if o.imbalance <= EVEN * least]
    even.sort(key=lambda o: len(o.layout.runs(0)))
    return even[:COMPARED] or [min(options, key=lambda o: o.imbalance)]


def choose_best(mix: Mix, options: list[Candidate], least: float = 1.0) -> tuple[Candidate, list[Candidate]]:
    """Return the best option, and all options compared by traffic; [Note: the cost of a layout]."""
    compared = []
    for option in select_candidates(options, least):
        size, sent = option.layout.ring_size, 0
        for pattern, layers in mix:
            # as much in both directions
            travel = HeadClass(ReadsOfShards(pattern, option.layout), slice(0, 1), make_one_way(size))
            sent += layers * travel.tokens_sent(sample_origins(size))
        compared.append(option._replace(tokens_sent=sent))
    return min(compared, key=lambda c: c.tokens_sent), compared


def make_auto(tokens: int, ring_size: int, multiple_of: int, mix: Mix, block: int = 1) -> Layout:
    """Compare contiguous and zigzag layouts and, if both are uneven, those of other rows; log which and why.

    For a kernel that computes in blocks of `block` x `block` slots, the kernel's row rates the options.
    """
    if not mix or ring_size == 1:
        return ChunkLayout(tokens, ring_size, multiple_of, 1)
    bound = tuple((bind_one_head(pattern), layers) for pattern, layers in mix)
    options = rate_all(bound, [ChunkLayout(tokens, ring_size, multiple_of, n) for n in (1, 2)])
    for make in [load(row.always) for row in LAYOUTS.values() if row.always]:
        options += make(tokens, ring_size, multiple_of, bound)
    labels: list[Layout] = []
    # Pieces mean more runs, so try them only if no chunk layout is even.
    if min(o.imbalance for o in options) > EVEN:
        for make in [load(row.for_labels) for row in LAYOUTS.values() if row.for_labels]:
            labels += make(tokens, ring_size, multiple_of, bound)
        makers = [load(row.if_uneven) for row in LAYOUTS.values() if row.if_uneven]
        options += [layout for make in makers for layout in make(tokens, ring_size, multiple_of, bound)]
    least = 1.0
    for row in KERNELS.values() if block > 1 else ():
        in_blocks = load(row.rates_layouts)(options, bound, block) if row.rates_layouts else None
        if in_blocks is not None:
            labels, options, least = [], in_blocks, min(o.imbalance for o in in_blocks)
    if labels:
        even = [option.layout for option in select_candidates(options)]
        compared = timed(bound, [*even, *labels])
        # never slower than the even layout that would be taken without the others
        slowest = min(compared[: len(even)], key=lambda option: option.tokens_sent).time
        slowest = min(slowest, AS_FAST * min(option.time for option in compared))
        best = min(
            (option for option in compared if option.time <= slowest), key=lambda option: option.tokens_sent
        )
    else:
        best, compared = choose_best(bound, options, least)
    others = "; ".join(str(c) for c in compared if c is not best) or "no other was even enough"
    blocks = f" in blocks of {block}" if block > 1 else ""
    _log.info(
        "ds_ring: layout auto took %s for %s%s; compared with: %s", best, describe_mix(mix), blocks, others
    )
    return best.layout


def describe_mix(mix: Mix) -> str:
    """Return the patterns as text, with their numbers of layers if there are several."""
    if len(mix) == 1:
        return str(mix[0][0])
    return ", ".join(f"{pattern} in {layers} layer{'s' * (layers > 1)}" for pattern, layers in mix)

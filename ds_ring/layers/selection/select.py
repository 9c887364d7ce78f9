"""Choose the k best keys of each query by a learned score, over the ring: `ring_select`.

The indexer's keys, which are narrow, go to every rank that sees them, and each query keeps its k best. A rank
holds the keys of two ranks at a time and k numbers for each query. Any layout will do: runs do not matter.

Shapes: B samples, C choices (heads that choose for themselves), S local tokens, n keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.device_tables import DeviceTables
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.comm.messages import Message
from ds_ring.errors import RingConfigError, RingShapeError, whole_number
from ds_ring.layers.selection.block_layout import BlockLayout
from ds_ring.layers.selection.context import selection_context
from ds_ring.layers.selection.total_order import BestKeys, in_order, merge_best, none_so_far
from ds_ring.masks.branches import Branch
from ds_ring.masks.catalog import Before, Causal, Full
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.masks.slots import IntArray, expand_ranges
from ds_ring.ops.checks import DTYPES, check_operand
from ds_ring.ops.context import RingContext
from ds_ring.ops.handles import never_traced
from ds_ring.schedule.head_class import HeadClass, ReadsOfShards
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.plan import one_way
from ds_ring.schedule.rank_plan import HopPlan

ScoresFunction = Callable[..., Tensor]  # of a slice of queries and keys, perhaps also their positions

# Scores that exist at a time, by device: those of a tile, [B, C, queries, at most KEYS]. One choice counts as
# HEADS, since an indexer makes its score from several heads' scores.
SCORES = {"cpu": 1 << 21, "cuda": 1 << 25}
HEADS, KEYS = 8, 8192


@never_traced
def ring_select(
    scores_fn: ScoresFunction, k: int, keys: Tensor, *, layout: Layout, mesh: RingMesh,
    pattern: Pattern | None = None, blocks: BlockLayout | None = None, delay: int = 0,
    with_positions: bool = False, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Return the positions of the k best keys of each local query: by score, the smaller position first.

    Scores need no gradient: the result is a set. `selected_attention` is differentiable.

    Args:
        scores_fn: called with a slice of this rank's query slots and some keys [B, n, ...] of any rank;
            returns their scores [B, queries, n], or [B, C, queries, n] where C heads choose for themselves.
            A key whose score is -inf or NaN is never chosen, one whose score is +inf before all others.
        k: keys that a query chooses at most.
        keys: of the indexer, which travel: this rank's [B, S, ...], of any dtype.
        layout: of the keys.
        mesh: this process's place in the grid of ranks; every rank of the ring must call.
        pattern: which keys a query may choose, the same for all heads; None is `Causal()`.
        blocks: `keys` are of blocks of tokens, [B, blocks.local_tokens, ...], and the numbers of blocks are
            returned. A query may choose blocks of its document, and there is no pattern.
        delay: tokens from a block's first one to the first query that may choose it.
        with_positions: call `scores_fn` also with the positions of the keys, or numbers of blocks, int64 [n].
        hop_timeout_s: seconds after which a hop whose messages have not arrived raises.

    Returns:
        int64 [B, S, min(k, T)] or [B, C, S, min(k, T)]: positions in the sequence, the best first; -1 where a
        query sees fewer keys. T is the number of tokens, or of blocks (at least 1).

    Raises:
        RingConfigError, RingShapeError, RingLayoutError: arguments that do not fit each other or the layout.
        RingMismatchError: ranks that call with other shapes or settings; nothing was sent.
        RingPeerError: another rank failed or was too late.
    """
    given = (layout, mesh, pattern, blocks, delay, with_positions, hop_timeout_s)
    return in_order(best_keys(scores_fn, k, keys, *given))


def best_keys(
    scores_fn: ScoresFunction, k: int, keys: Tensor, layout: Layout, mesh: RingMesh, pattern: Pattern | None,
    blocks: BlockLayout | None, delay: int, with_positions: bool, hop_timeout_s: float,
    more: Mapping[str, object] | None = None,
) -> BestKeys:  # fmt: skip
    """Return the k best keys of each local query with their scores; see `ring_select`.

    Ranks compare what is in `more`, too.
    """
    check_mesh(mesh)
    if pattern is None:
        pattern = Full() if blocks is not None else Causal()
    scores = scores_fn if with_positions else (lambda rows, of_keys, _: scores_fn(rows, of_keys))
    with collective(mesh, "selection of keys") as call, torch.no_grad():
        if blocks is not None and not (isinstance(pattern, Full) and blocks.of == layout):
            raise RingConfigError.wrong(
                "ring_select", f"blocks of the {layout} and no pattern", f"{blocks.of}, {pattern}", "pass one"
            )
        context = selection_context(pattern, layout, mesh, hop_timeout_s)
        heads, dtype = _checked_scores(scores, k, keys, context, blocks)
        described = keys.flatten(2).unsqueeze(1)
        fields = {"k": k, "shape and dtype of scores": (*heads, dtype), "blocks": str(blocks), "delay": delay}
        fields |= {"shape of keys": tuple(keys.shape), **(more or {})}
        context.agree(call, described, described, fields)
        best = none_so_far(keys, (*heads, layout.local_tokens), k, blocks or layout, dtype)
        if blocks is None:
            _walk_tokens(best, scores, keys, context)
        else:
            _walk_blocks(best, scores, keys, context, blocks, delay)
        return best


def _checked_scores(
    scores_fn: ScoresFunction, k: int, keys: Tensor, context: RingContext, blocks: BlockLayout | None
) -> tuple[torch.Size, torch.dtype]:
    """Check the arguments of `ring_select`; return the leading dimensions of scores, and their dtype."""
    check_operand("keys", keys)
    layout = context.layout_for(0, keys.device.type)
    slots = (blocks or layout).local_tokens
    if keys.dim() < 3 or keys.shape[1] != slots or 0 in keys.shape:
        raise RingShapeError.wrong(
            "keys", f"[batch, {slots}, ...]", list(keys.shape), "use ds_ring.shard_sequence(..., dim=1)"
        )
    whole_number(k, "k", RingConfigError)
    context.pattern.check(layout.tokens, len(keys), 1, str(keys.device))
    try:
        none = torch.zeros(1, dtype=torch.int64, device=keys.device)
        scores = scores_fn(slice(0, 1), keys[:, :1], none)
    except Exception as error:
        raise RingConfigError(
            f"scores_fn: expected scores of query slots slice(0, 1) and keys {tuple(keys[:, :1].shape)}, got"
            f" {type(error).__name__}: {error}"
        ) from error
    shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    fits = isinstance(scores, Tensor) and scores.dtype in DTYPES and scores.dim() in (3, 4)
    if not fits or shape[0] != len(keys) or shape[-2:] != (1, 1):
        raise RingShapeError.wrong(
            "scores_fn", f"floats [{len(keys)}, 1, 1] or [{len(keys)}, C, 1, 1]", shape, "keep the dims"
        )
    return scores.shape[:-2], torch.promote_types(scores.dtype, torch.float32)


@lru_cache(maxsize=16)
def _head_class(pattern: Pattern, layout: Layout) -> HeadClass:
    # Every owner sends to its readers directly, so the order of ranks is all that a direction says here.
    reads = ReadsOfShards(pattern.bind((0,), 1, 1), layout)
    return HeadClass(reads, slice(0, 1), one_way(layout.ring_size))


@lru_cache(maxsize=16)
def _hops(pattern: Pattern, layout: Layout, ring_rank: int) -> tuple[HopPlan | None, ...]:
    """Return what a rank sees of each shard, by hop: at hop s that of rank `ring_rank` - s."""
    return _head_class(pattern, layout).rank(ring_rank).directions[0].hops


def _walk(
    keys: Tensor, context: RingContext, leaving: Callable[[int], Tensor | None],
    arriving: Callable[[int], int], merge: Callable[[int, Tensor], None],
) -> None:  # fmt: skip
    """Call `merge` with the keys of each hop that this rank reads, while those of the next one travel.

    Args:
        keys: this rank's.
        context: of the call.
        leaving: returns the rows for the rank `hop` after this one; None if it reads none.
        arriving: returns the number of rows of the rank `hop` before this one; 0 if this rank reads none.
        merge: takes the hop and the keys.
    """
    mesh, exchange = context.mesh, context.exchange
    size, rank = mesh.ring_size, mesh.ring_rank
    arrived: Tensor | None = keys
    for hop in range(size):
        following, received, pending = hop + 1, [], None
        if following < size and exchange is not None:
            rows, count = leaving(following), arriving(following)
            sent = [] if rows is None else [Message(keys.index_select(1, rows), (rank + following) % size)]
            if count:
                buffer = keys.new_empty((len(keys), count, *keys.shape[2:]))
                received = [Message(buffer, (rank - following) % size)]
            pending = exchange.post(sent, received, following)
        if arrived is not None:
            merge(hop, arrived)
        if pending is not None:
            pending.wait()
        arrived = received[0].tensor if received else None


def _walk_tokens(best: BestKeys, scores_fn: ScoresFunction, keys: Tensor, context: RingContext) -> None:
    layout, rank = context.layout_for(0, keys.device.type), context.mesh.ring_rank
    reads, hops = _head_class(context.pattern, layout).reads, _hops(context.pattern, layout, rank)
    tables, queries = context.mesh.owners[DeviceTables], layout.positions(rank)[: layout.valid_tokens(rank)]

    def held(hop: int) -> IntArray:
        plan = hops[hop] if hop < len(hops) else None
        return no_positions if plan is None else layout.positions(plan.origin)[expand_ranges(plan.held)]

    def leaving(hop: int) -> Tensor | None:
        ranges = reads.slots(rank, (rank + hop) % layout.ring_size)
        return tables.slot_index(ranges, keys.device) if len(ranges) else None

    def merge(hop: int, arrived: Tensor) -> None:
        positions = held(hop)
        keep_best(best, scores_fn, arrived, positions, Visible(context.pattern, queries, positions), tables)

    no_positions = layout.positions(rank)[:0]
    _walk(keys, context, leaving, lambda hop: len(held(hop)), merge)


def _walk_blocks(
    best: BestKeys,
    scores_fn: ScoresFunction,
    keys: Tensor,
    context: RingContext,
    blocks: BlockLayout,
    delay: int,
) -> None:
    size, rank, layout = context.mesh.ring_size, context.mesh.ring_rank, blocks.of
    tables, queries = context.mesh.owners[DeviceTables], layout.positions(rank)[: layout.valid_tokens(rank)]
    pattern: Pattern = Before(delay) if blocks.documents is None else Before(delay) & blocks.documents

    def numbers(owner: int) -> IntArray:
        return blocks.positions(owner)[: blocks.valid_tokens(owner)]

    def count(reader: int, owner: int) -> int:
        own, queries = numbers(owner), layout.positions(reader)
        return len(own) if len(own) and blocks.starts[own].min() + delay <= queries.max() else 0

    def leaving(hop: int) -> Tensor | None:
        rows = count((rank + hop) % size, rank)
        return torch.arange(rows, device=keys.device) if rows else None

    def merge(hop: int, arrived: Tensor) -> None:
        own = numbers((rank - hop) % size)
        keep_best(best, scores_fn, arrived, own, Visible(pattern, queries, blocks.starts[own]), tables)

    _walk(keys, context, leaving, lambda hop: count(rank, (rank - hop) % size), merge)


@dataclass(frozen=True, eq=False)
class Visible:
    """Which queries may choose which keys, by their positions, none of which is padding."""

    pattern: Pattern
    q: IntArray
    k: IntArray

    @cached_property
    def _branches(self) -> list[tuple[Branch, IntArray, IntArray]]:
        # with the labels of queries and of keys
        return [
            (one, *one.labels(self.q, self.k)) for one in self.pattern.bind((0,), 1, 1).branches(QueryHead())
        ]

    def columns(self, rows: slice) -> tuple[int, int]:
        """Return the first key and the end of the keys that some queries may choose, perhaps among others."""
        q, near = self.q[rows], np.zeros(len(self.k), dtype=bool)
        for branch, labels, of_keys in self._branches:
            least, most = max(0, labels[rows].min()), labels[rows].max()
            near |= (
                (self.k >= q.min() - branch.most)
                & (self.k <= q.max() - branch.least)
                & ((of_keys >= least) & (of_keys <= most))
            )
        found = np.flatnonzero(near)
        return (int(found[0]), int(found[-1]) + 1) if len(found) else (0, 0)

    def mask(
        self, rows: slice, columns: slice, samples: int, tables: DeviceTables, device: torch.device
    ) -> Tensor | None:
        """Return the mask, bool [queries, keys] or [samples or 1, 1, queries, keys]; None for all."""
        some_q, some_k, found = self.q[rows], self.k[columns], None
        q, k = tables.array(self.q, device)[rows], tables.array(self.k, device)[columns]
        for branch, labels, of_keys in self._branches:
            seen, both = [mask(samples, q, k) for mask in branch.masks], (labels[rows], of_keys[columns])
            if some_q.min() - some_k.max() < branch.least:
                seen.append((q - branch.least).unsqueeze(1) >= k)
            if some_q.max() - some_k.min() > branch.most:
                seen.append((q - branch.most).unsqueeze(1) <= k)
            if min(x.min() for x in both) < 0 or min(x.min() for x in both) < max(x.max() for x in both):
                ours, theirs = tables.array(labels, device)[rows], tables.array(of_keys, device)[columns]
                # -1 is no label, and equal to none
                seen.append(ours.masked_fill(ours < 0, -2).unsqueeze(1) == theirs)
            if not seen:
                return None
            for other in seen[1:]:
                seen[0] = seen[0] & other
            found = seen[0] if found is None else found | seen[0]
        return found


def keep_best(
    best: BestKeys, scores_fn: ScoresFunction, keys: Tensor, numbers: IntArray, seen: Visible,
    tables: DeviceTables,
) -> None:  # fmt: skip
    """Merge the keys of one shard, with their positions or numbers, into the best ones of each query."""
    samples, device, of_keys = len(keys), keys.device, tables.array(numbers, keys.device)
    width = max(1, min(len(numbers), KEYS))
    scores_of_key = samples * max(math.prod(best.scores.shape[1:-2]), HEADS)
    step = max(1, SCORES[device.type] // scores_of_key // width)
    for first in range(0, len(seen.q), step):
        rows = slice(first, min(first + step, len(seen.q)))
        start, end = seen.columns(rows)
        for begin in range(start, end, width):
            columns = slice(begin, min(begin + width, end))
            scores = scores_fn(rows, keys[:, columns], of_keys[columns]).to(best.scores.dtype)
            visible = seen.mask(rows, columns, samples, tables, device)
            if visible is not None:
                if visible.dim() == 4 and scores.dim() == 3:
                    visible = visible[:, 0]
                scores = scores.masked_fill(~visible, float("-inf"))
            merge_best(BestKeys(*(x[..., rows, :] for x in best)), scores, of_keys[columns])

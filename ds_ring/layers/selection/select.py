"""Choose the k best keys of each query by a learned score, over the ring: `ring_select`.

The indexer's keys, which are narrow, go to every rank that sees them, and each query keeps its k best. A rank
holds the keys of two ranks at a time and k numbers for each query. Any layout will do: runs do not matter.

Shapes: B samples, C choices (heads that choose for themselves), S local tokens, n keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.device_tables import DeviceTables
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.comm.messages import Message
from ds_ring.errors import RingConfigError, RingShapeError, check_whole_number
from ds_ring.layers.selection.block_layout import BlockLayout
from ds_ring.layers.selection.context import selection_context
from ds_ring.layers.selection.total_order import BestKeys, in_order, merge_best, none_so_far
from ds_ring.masks.branches import Branch
from ds_ring.masks.catalog import Before, Causal, Full
from ds_ring.masks.pattern import BoundPattern, Pattern, cache_by_pattern
from ds_ring.masks.slots import IntArray, expand_ranges
from ds_ring.ops.checks import DTYPES, check_operand
from ds_ring.ops.context import RingContext
from ds_ring.ops.tracing import forbid_tracing
from ds_ring.schedule.head_class import HeadClass, ReadsOfShards
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.rank_plan import HopPlan, make_one_way

ScoresFunction = Callable[..., Tensor]  # of a slice of queries and keys, perhaps also their positions
Merge = Callable[[slice, Tensor, Tensor], None]  # takes a slice of queries, scores, and positions of keys
LabelledBranch = tuple[Branch, IntArray, IntArray]  # with the labels of queries and of keys

# Scores that exist at a time, by device: those of a tile, [B, C, queries, at most KEYS]. One choice counts as
# HEADS, since an indexer makes its score from several heads' scores.
SCORES = {"cpu": 1 << 21, "cuda": 1 << 25}
HEADS, KEYS = 8, 8192


@forbid_tracing
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
        mesh: this process's place in the grid of ranks; all ranks of the sequence (ring x Ulysses) must call.
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
        heads, dtype = checked_scores(scores, k, keys, context, blocks)
        described = keys.flatten(2).unsqueeze(1)
        fields = {"k": k, "shape and dtype of scores": (*heads, dtype), "blocks": str(blocks), "delay": delay}
        fields["shape of keys"] = tuple(keys.shape)
        context.agree(call, described, described, fields)
        best = none_so_far(keys, (*heads, layout.local_tokens), k, blocks or layout, dtype)
        walk = keeping(best), scores, math.prod(heads[1:]), keys, context
        if blocks is None:
            walk_tokens(*walk, pattern.bind((0,), 1, 1))
        else:
            _walk_blocks(*walk, blocks, delay)
        return in_order(best)


def checked_scores(
    scores_fn: ScoresFunction, k: int, keys: Tensor, context: RingContext, blocks: BlockLayout | None,
    query_heads: int = 1,
) -> tuple[torch.Size, torch.dtype]:  # fmt: skip
    """Check the arguments of `ring_select`; return the leading dimensions of scores, and their dtype.

    `query_heads` are those that the pattern's mask functions may be evaluated for.
    """
    check_operand("keys", keys)
    layout = context.layout_for(0, keys.device.type)
    slots = (blocks or layout).local_tokens
    if keys.dim() < 3 or keys.shape[1] != slots or 0 in keys.shape:
        raise RingShapeError.wrong(
            "keys", f"[batch, {slots}, ...]", list(keys.shape), "use ds_ring.shard_sequence(..., dim=1)"
        )
    check_whole_number(k, "k", RingConfigError)
    context.pattern.check(layout.tokens, len(keys), query_heads, str(keys.device))
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


@partial(cache_by_pattern, 16)
def _head_class(pattern: BoundPattern, layout: Layout) -> HeadClass:
    # Every owner sends to its readers directly, so the order of ranks is all that a direction says here.
    return HeadClass(ReadsOfShards(pattern, layout), slice(0, 1), make_one_way(layout.ring_size))


@partial(cache_by_pattern, 16)
def _hops(pattern: BoundPattern, layout: Layout, ring_rank: int) -> tuple[HopPlan | None, ...]:
    """Return what a rank sees of each shard, by hop: at hop s that of rank `ring_rank` - s."""
    return _head_class(pattern, layout).rank(ring_rank).directions[0].hops


def _walk(
    keys: Tensor, context: RingContext, leaving: Callable[[int], Tensor | None],
    arriving: Callable[[int], int], compute: Callable[[int, Tensor], None],
) -> None:  # fmt: skip
    """Call `compute` with the keys of each hop that this rank reads, while those of the next one travel.

    Args:
        keys: this rank's.
        context: of the call.
        leaving: returns the rows for the rank `hop` after this one; None if it reads none.
        arriving: returns the number of rows of the rank `hop` before this one; 0 if this rank reads none.
        compute: takes the hop and the keys.
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
            compute(hop, arrived)
        if pending is not None:
            pending.wait()
        arrived = received[0].tensor if received else None


def walk_tokens(
    merge: Merge, scores_fn: ScoresFunction, choices: int, keys: Tensor, context: RingContext,
    pattern: BoundPattern,
) -> None:  # fmt: skip
    """Pass the scores of this rank's queries, and of all keys that they see by a pattern, to `merge`.

    `choices` are the heads of the scores, which the pattern may tell apart.
    """
    layout, rank = context.layout_for(0, keys.device.type), context.mesh.ring_rank
    reads, hops = _head_class(pattern, layout).reads, _hops(pattern, layout, rank)
    tables, queries = context.mesh.owners[DeviceTables], layout.positions(rank)[: layout.valid_tokens(rank)]

    def held(hop: int) -> IntArray:
        plan = hops[hop] if hop < len(hops) else None
        return no_positions if plan is None else layout.positions(plan.origin)[expand_ranges(plan.held)]

    def leaving(hop: int) -> Tensor | None:
        ranges = reads.slots(rank, (rank + hop) % layout.ring_size)
        return tables.slot_index(ranges, keys.device) if len(ranges) else None

    def compute(hop: int, arrived: Tensor) -> None:
        positions = held(hop)
        seen = Visible(pattern, queries, positions)
        merge_scores(merge, scores_fn, choices, arrived, positions, seen, tables)

    no_positions = layout.positions(rank)[:0]
    _walk(keys, context, leaving, lambda hop: len(held(hop)), compute)


def _walk_blocks(
    merge: Merge, scores_fn: ScoresFunction, choices: int, keys: Tensor, context: RingContext,
    blocks: BlockLayout, delay: int,
) -> None:  # fmt: skip
    size, rank, layout = context.mesh.ring_size, context.mesh.ring_rank, blocks.of
    tables, queries = context.mesh.owners[DeviceTables], layout.positions(rank)[: layout.valid_tokens(rank)]
    documents: Pattern = Full() if blocks.documents is None else blocks.documents
    pattern = (Before(delay) & documents).bind((0,), 1, 1)

    def numbers(owner: int) -> IntArray:
        return blocks.positions(owner)[: blocks.valid_tokens(owner)]

    def count(reader: int, owner: int) -> int:
        blocks_here, queries = numbers(owner), layout.positions(reader)
        return (
            len(blocks_here)
            if len(blocks_here) and blocks.starts[blocks_here].min() + delay <= queries.max()
            else 0
        )

    def leaving(hop: int) -> Tensor | None:
        rows = count((rank + hop) % size, rank)
        return torch.arange(rows, device=keys.device) if rows else None

    def compute(hop: int, arrived: Tensor) -> None:
        make_block_numbers = numbers((rank - hop) % size)
        seen = Visible(pattern, queries, blocks.starts[make_block_numbers])
        merge_scores(merge, scores_fn, choices, arrived, make_block_numbers, seen, tables)

    _walk(keys, context, leaving, lambda hop: count(rank, (rank - hop) % size), compute)


@dataclass(frozen=True, eq=False)
class Visible:
    """Which queries may choose which keys, by their positions, none of which is padding."""

    pattern: BoundPattern
    q: IntArray
    k: IntArray

    @cached_property
    def _branches(self) -> list[list[LabelledBranch]]:
        """Return the branches of each head, of one where all are equal."""
        return [
            [(branch, *branch.labels(self.q, self.k)) for branch in branches]
            for branches in self.pattern.branches_by_head
        ]

    def columns(self, rows: slice) -> tuple[int, int]:
        """Return the first key and the end of the keys that some queries may choose, perhaps among others."""
        q, near = self.q[rows], np.zeros(len(self.k), dtype=bool)
        for branch, labels, of_keys in chain(*self._branches):
            least, most = max(0, labels[rows].min()), labels[rows].max()
            near |= (
                (self.k >= q.min() - branch.most)
                & (self.k <= q.max() - branch.least)
                & ((of_keys >= least) & (of_keys <= most))
            )
        near_columns = np.flatnonzero(near)
        return (int(near_columns[0]), int(near_columns[-1]) + 1) if len(near_columns) else (0, 0)

    def mask(
        self, rows: slice, columns: slice, samples: int, tables: DeviceTables, device: torch.device
    ) -> Tensor | None:
        """Return the mask, [queries, keys] or [samples or 1, heads or 1, queries, keys]; None for all."""
        masks = [self._mask(branch, rows, columns, samples, tables, device) for branch in self._branches]
        if len(masks) == 1:
            return masks[0]
        shape = 1, 1, len(self.q[rows]), len(self.k[columns])
        every = [torch.ones(shape, dtype=torch.bool, device=device) if x is None else x for x in masks]
        count = max(len(x) if x.dim() == 4 else 1 for x in every)
        return torch.cat([x.expand(count, *shape[1:]) for x in every], dim=1)

    def _mask(
        self, branches: list[LabelledBranch], rows: slice, columns: slice, samples: int,
        tables: DeviceTables, device: torch.device,
    ) -> Tensor | None:  # fmt: skip
        """Return the mask of some branches; see `mask`."""
        some_q, some_k, visible = self.q[rows], self.k[columns], None
        q, k = tables.array(self.q, device)[rows], tables.array(self.k, device)[columns]
        for branch, labels, of_keys in branches:
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
            for label_mask in seen[1:]:
                seen[0] = seen[0] & label_mask
            visible = seen[0] if visible is None else visible | seen[0]
        return visible


def keeping(best: BestKeys) -> Merge:
    """Return the function that merges scores into the best keys of each query."""

    def merge(rows: slice, scores: Tensor, positions: Tensor) -> None:
        merge_best(BestKeys(*(x[..., rows, :] for x in best)), scores.to(best.scores.dtype), positions)

    return merge


def merge_scores(
    merge: Merge, scores_fn: ScoresFunction, choices: int, keys: Tensor, numbers: IntArray, seen: Visible,
    tables: DeviceTables,
) -> None:  # fmt: skip
    """Pass scores of one shard's keys, which have positions or numbers, to `merge`, a tile at a time."""
    samples, device, of_keys = len(keys), keys.device, tables.array(numbers, keys.device)
    width = max(1, min(len(numbers), KEYS))
    scores_of_key = samples * max(choices, HEADS)
    step = max(1, SCORES[device.type] // scores_of_key // width)
    for first in range(0, len(seen.q), step):
        rows = slice(first, min(first + step, len(seen.q)))
        start, end = seen.columns(rows)
        for begin in range(start, end, width):
            columns = slice(begin, min(begin + width, end))
            scores = scores_fn(rows, keys[:, columns], of_keys[columns])
            visible = seen.mask(rows, columns, samples, tables, device)
            if visible is not None:
                if visible.dim() == 4 and scores.dim() == 3:
                    visible = visible[:, 0]
                scores = scores.masked_fill(~visible, float("-inf"))
            merge(rows, scores, of_keys[columns])

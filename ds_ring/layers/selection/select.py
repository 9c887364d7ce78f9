"""Choose keys by learned scores over the ring (`ring_select`), and attend to them (`selected_attention`).

Owns both passes of attention whose keys an indexer selects (DeepSeek-V3.2's sparse attention and its
relatives). Pass 1: the indexer's keys, which are narrow, go to every rank that sees them, and each query
keeps its k best. Pass 2: each rank asks the owners for the rows of K and V that its queries chose, and
attends to them, one owner at a time; the gradients of these rows return to the owners. A rank holds the
shards of two ranks at a time, k numbers for each query and a few bytes for each position, so memory is
O(T / P). Any layout will do: runs do not matter.

[Note: a total order]
Scores are often equal (those of a ReLU are 0 for half of the keys), and `torch.topk` says nothing about
which of equal entries it returns. So keys are ordered by score, and equal scores by position, the smaller one
first. This order is total: the k best of a union are the k best of the k best of its parts, whatever the
layout and the number of ranks. A comparison with one process must use it there, too.

[Note: what a query block reads]
Queries that stand together choose similar keys. So a block of queries attends to the union of the rows that
its queries chose, by one matrix product under a boolean mask of the pairs that were chosen. A gather of k
rows for each query would take k times the memory.

Shapes: B samples, C choices (heads that choose for themselves), H query heads, G key/value heads, S local
tokens, Q local queries, D and E head dims of keys and values, N = B * C, R chosen rows of one owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ds_ring.comm.device_tables import outside_inference_mode
from ds_ring.comm.exchange import Exchange, walk_owners
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.comm.messages import Message
from ds_ring.errors import RingConfigError, RingError, RingShapeError, shown
from ds_ring.kernels.interface import each_tile
from ds_ring.kernels.reference import weights_of
from ds_ring.masks.catalog import Causal, Full
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import IntArray, Tiles, expand_ranges
from ds_ring.ops.checks import (
    DTYPES,
    check_heads,
    check_keys,
    check_sinks,
    check_tensors,
    why_not_an_operand,
    why_not_transformed,
)
from ds_ring.ops.context import RingContext, check_layout, context_for, context_of, count_forward_pass, refuse
from ds_ring.ops.handles import never_traced, operator
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import register, sinks_gradient
from ds_ring.ring.merge import accumulator_dtype, empty_results, merge_
from ds_ring.schedule.head_class import HeadClass, ReadsOfShards
from ds_ring.schedule.layout import BlockLayout, Layout
from ds_ring.schedule.plan import one_way
from ds_ring.schedule.rank_plan import HopPlan

ScoresFunction = Callable[..., Tensor]  # of a slice of queries and keys, perhaps also their positions

# Sides of a tile: scores [queries, keys] of all heads of an indexer exist for one tile at a time.
QUERIES, KEYS = 128, 2048
# Queries of a block in pass 2; see [Note: what a query block reads].
BLOCK = 32


@never_traced
def ring_select(
    scores_fn: ScoresFunction, k: int, keys: Tensor, *, layout: Layout, mesh: RingMesh,
    pattern: Pattern | None = None, blocks: BlockLayout | None = None, delay: int = 0,
    with_positions: bool = False, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Return the positions of the k best keys of each local query: by score, the smaller position first.

    Scores need no gradient: what is chosen is a set. `selected_attention` is differentiable.

    Args:
        scores_fn: called with a slice of this rank's query slots and some keys [B, n, ...] of any rank;
            returns their scores [B, queries, n], or [B, C, queries, n] where C heads choose for themselves.
            A key whose score is -inf or NaN is never chosen, one whose score is +inf before all others.
        k: keys that a query chooses at most.
        keys: what travels, this rank's [B, S, ...], of any dtype.
        layout: which position lies in which slot.
        mesh: this process's place in the grid of ranks; every rank of the ring must call.
        pattern: which keys a query may choose, the same for all heads; None is `Causal()`.
        blocks: `keys` are of blocks of tokens, [B, blocks.local_tokens, ...], and the numbers of blocks are
            returned. A query may choose blocks of its document, and there is no pattern.
        delay: how many tokens behind a block's first one the queries begin that may choose it.
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
    return _in_order(
        _best_of(scores_fn, k, keys, layout, mesh, pattern, blocks, delay, with_positions, hop_timeout_s)
    )


@never_traced
def max_logits(
    q: Tensor, k: Tensor, *, layout: Layout, mesh: RingMesh, pattern: Pattern | None = None,
    scale: float | None = None, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Return the largest score of each head over the whole sequence, the same on all ranks of the ring.

    MuonClip rescales the projections of heads whose largest score is above a bound (Kimi Team 2025, "Kimi
    K2", arXiv 2507.20534, section 2.1). Keys travel once more, without values, and the scores of one tile
    exist at a time.

    Args:
        q, k: local queries [B, H, S, D] and keys [B, G, S, D]; H a multiple of G.
        layout, mesh, hop_timeout_s: see `ring_select`.
        pattern: which query attends to which key, the same for all heads; None is `Causal()`.
        scale: factor of the scores; None is 1 / sqrt(D).

    Returns:
        [H], float32 (float64 for float64), without a gradient; -inf for a head that sees no key.

    Raises:
        as `ring_select`.
    """
    check_mesh(mesh)
    why = why_not_an_operand("q", q) or why_not_an_operand("k", k)
    fits = (
        why is None and q.dim() == k.dim() == 4 and q.shape[::2] == k.shape[::2] and q.shape[3] == k.shape[3]
    )
    if not fits or q.shape[1] % k.shape[1]:
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else shown(x) for x in (q, k)]
        refuse(
            mesh,
            RingShapeError(
                why
                or "max_logits: expected q [B, H, S, D] and k [B, G, S, D] with H a multiple of G, got"
                f" {shapes}; pass this rank's shards"
            ),
        )
    factor, dtype = q.shape[-1] ** -0.5 if scale is None else scale, accumulator_dtype(q.dtype)

    def scores(rows: slice, keys: Tensor) -> Tensor:  # of keys [B, n, G, D]
        grouped = q[:, :, rows].unflatten(1, (k.shape[1], -1)).to(dtype)
        return torch.einsum("bgrqd,bngd->bgrqn", grouped, keys.to(dtype)).flatten(1, 2) * factor

    keys = k.detach().transpose(1, 2).contiguous()
    best = _best_of(scores, 1, keys, layout, mesh, pattern, None, 0, False, hop_timeout_s)
    found = best.scores.amax(dim=(0, 2, 3))
    if mesh.ring_size == 1:
        return found
    with mesh.in_call():
        parts = Exchange(mesh, hop_timeout_s).all_gather(found, mesh.ring_group, mesh.ring_size)
    return torch.stack(parts).amax(0)


def _best_of(
    scores_fn: ScoresFunction, k: int, keys: Tensor, layout: Layout, mesh: RingMesh, pattern: Pattern | None,
    blocks: BlockLayout | None, delay: int, with_positions: bool, hop_timeout_s: float,
) -> _Best:  # fmt: skip
    """Return the k best keys of each local query with their scores; see `ring_select`."""
    check_mesh(mesh)
    given: Pattern = Full() if blocks is not None else Causal()
    context = _context(given if pattern is None else pattern, layout, mesh, hop_timeout_s, blocks=blocks)
    refused: RingError | None = None
    heads, dtype = torch.Size(), torch.float32
    scores = scores_fn if with_positions else (lambda rows, of_keys, _: scores_fn(rows, of_keys))
    with mesh.in_call(), torch.no_grad():
        try:
            heads, dtype = _checked_scores(scores, k, keys, context, blocks)
        except RingError as error:
            refused = error
        described = keys.flatten(2).unsqueeze(1) if refused is None else torch.empty(0)
        more = {"k": k, "shape and dtype of scores": (*heads, dtype), "blocks": str(blocks), "delay": delay}
        context.agree("selection of keys", described, described, refused, more)
        with _guarded(context):
            best = _none_so_far(keys, (*heads, layout.local_tokens), k, blocks or layout, dtype)
            if blocks is None:
                _walk_tokens(best, scores, keys, context)
            else:
                _walk_blocks(best, scores, keys, context, blocks, delay)
            return best


@never_traced
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, *, layout: Layout, mesh: RingMesh,
    scale: float | None = None, sinks: Tensor | None = None, return_lse: bool = False, block_size: int = 1,
    hop_timeout_s: float = 60.0,
) -> Any:  # fmt: skip
    """Compute attention of each query over the keys that it chose, on a sharded sequence. Differentiable.

    Args:
        q: local queries [B, H, Q, D], as many as `chosen` is for: S, unless the keys are not those of tokens.
        k, v: local keys [B, G, S, D] and values [B, G, S, E]; H a multiple of G.
        chosen: what `ring_select` returned: positions [B, Q, k], or [B, C, Q, k] with C a divisor of G, where
            choice c is that of K/V heads c * G / C and on; or with C = H. -1 is no key; a position counts
            once.
        layout: of the keys.
        mesh, hop_timeout_s: as `ring_select` had them.
        scale: factor of the scores; None is 1 / sqrt(D).
        sinks: [H]; see `ring_attention`.
        return_lse: return the lse as well. Its gradient is exact.
        block_size: a chosen position stands for itself and the block_size - 1 behind it, of which a query
            attends to none behind itself. So it costs one number a block; blocks must not overlap.

    Returns:
        out [B, H, Q, E] in q's dtype, and the lse [B, H, Q] with `return_lse`. A row that chose nothing has
        out 0 and lse -inf (or its sink).

    Raises:
        RingConfigError, RingShapeError, RingLayoutError: arguments that do not fit each other or the layout.
        RingMismatchError: ranks that call with other shapes or settings; nothing was sent.
        RingPeerError: another rank failed or was too late.
    """
    check_mesh(mesh)
    context = _context(Full(), layout, mesh, hop_timeout_s, scale)
    for name, x in (("q", q), ("k", k), ("v", v), ("chosen", chosen)):
        why = why_not_an_operand(name, x)
        if why is not None:
            refuse(mesh, RingShapeError(why))
    size = block_size if isinstance(block_size, int) else 0  # refused
    group, by_query_head = _group(q, k, chosen), False
    if group > 1 and sinks is None:  # see [Note: choices of query heads]
        by_query_head, (heads, slots) = True, q.shape[1:3]
        q, chosen = (
            x.unflatten(1, (-1, group)).transpose(2, 3).flatten(2, 3).contiguous() for x in (q, chosen)
        )
    out, lse = selected_attention_op(q, k, v, chosen, context.handle, sinks, size)
    if by_query_head:
        out, lse = (x.unflatten(2, (slots, group)).transpose(2, 3).flatten(1, 2) for x in (out, lse))
        assert out.shape[1] == heads
    return (out, lse) if return_lse else out


# [Note: choices of query heads]
# Query heads that share a K/V head and choose for themselves become queries of that head, slot by slot: a
# query of slot s and head h of the group is number s * r + h of r * S queries. So a row crosses once, however
# many heads of the group chose it.
def _group(q: Tensor, k: Tensor, chosen: Tensor) -> int:
    """Return how many query heads share a K/V head if each of them chooses for itself, else 1."""
    if not q.dim() == k.dim() == chosen.dim() == 4 or 0 in k.shape or q.shape[1] % k.shape[1]:
        return 1  # refused, or no choice of heads
    return q.shape[1] // k.shape[1] if chosen.shape[1] == q.shape[1] else 1


def _context(
    pattern: Pattern, layout: Layout, mesh: RingMesh, hop_timeout_s: float, scale: float | None = None,
    blocks: BlockLayout | None = None,
) -> RingContext:  # fmt: skip
    """Return the context of a call; refused arguments raise on all ranks."""
    try:
        why = why_not_transformed("ring_select and what is built on it")
        if why is not None:
            raise RingConfigError(why)
        if blocks is not None and not (isinstance(pattern, Full) and blocks.of == layout):
            raise RingConfigError(
                f"ring_select: expected blocks of the {layout} and no pattern, got blocks of the {blocks.of}"
                f" and {pattern}; use BlockLayout.of_tokens(layout, size, documents)"
            )
        if mesh.ulysses_size > 1:
            raise RingConfigError(
                f"ring_select: expected a mesh with ulysses_size 1, got {mesh.ulysses_size}; use a ring of"
                f" {mesh.sequence_size} for attention over chosen keys"
            )
        check_layout(layout, mesh)  # no name, which stands for different layouts beside different patterns
        return context_for(pattern, layout, mesh, Options(scale=scale, hop_timeout_seconds=hop_timeout_s))
    except RingError as error:
        refuse(mesh, error)


@lru_cache(maxsize=16)
def _head_class(pattern: Pattern, layout: Layout) -> HeadClass:
    # Every owner sends to its readers directly, so the order of ranks is all that a direction says here.
    reads = ReadsOfShards(pattern.bind((0,), 1, 1), layout)
    return HeadClass(reads, slice(0, 1), one_way(layout.ring_size))


@lru_cache(maxsize=16)
def _hops(pattern: Pattern, layout: Layout, ring_rank: int) -> tuple[HopPlan | None, ...]:
    """Return what a rank sees of each shard, by hop: at hop s that of rank `ring_rank` - s."""
    return _head_class(pattern, layout).rank(ring_rank).directions[0].hops


def _guarded(context: RingContext) -> Any:
    return (context.exchange or Exchange(context.mesh)).guarded()


class TotalOrder(TorchFunctionMode):
    """Make `torch.topk` return what `ring_select` does, of equal entries those that come first.

    For a model on one process with which one on a ring is compared: [Note: a total order].
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        return _first_of_equal(*args, **(kwargs or {}))


def _first_of_equal(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, indices = x.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


# Pass 1: each query keeps its k best.


def _checked_scores(
    scores_fn: ScoresFunction, k: int, keys: Tensor, context: RingContext, blocks: BlockLayout | None
) -> tuple[torch.Size, torch.dtype]:
    """Check the arguments of `ring_select`; return the leading dimensions of scores, and their dtype."""
    why = why_not_an_operand("keys", keys)
    if why is not None:
        raise RingShapeError(why)
    layout = context.layout_for(0, keys.device.type)
    slots = (blocks or layout).local_tokens
    if keys.dim() < 3 or keys.shape[1] != slots or 0 in keys.shape:
        raise RingShapeError(
            f"keys: expected this rank's [batch, {slots}, ...] (the layout's slots), got shape"
            f" {tuple(keys.shape)}; shard them with ds_ring.shard_sequence(..., dim=1)"
        )
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise RingConfigError(f"k: expected a number of keys, at least 1, got {shown(k)}")
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
        raise RingShapeError(
            f"scores_fn: expected floating scores [{len(keys)}, 1, 1] or [{len(keys)}, C, 1, 1] of one query"
            f" and one key, got {shape}"
        )
    return scores.shape[:-2], torch.promote_types(scores.dtype, torch.float32)


class _Best(NamedTuple):
    """The best keys so far of each query, in no order: scores (-inf for none) and positions, [.., S, k]."""

    scores: Tensor
    positions: Tensor


def _none_so_far(keys: Tensor, queries: tuple[int, ...], k: int, of: Layout, dtype: torch.dtype) -> _Best:
    shape = (*queries, max(1, min(k, of.tokens)))
    return _Best(
        keys.new_full(shape, float("-inf"), dtype=dtype), keys.new_full(shape, -1, dtype=torch.int64)
    )


def _walk(
    keys: Tensor, context: RingContext, leaving: Callable[[int], Tensor | None],
    arriving: Callable[[int], int], merge: Callable[[int, Tensor], None],
) -> None:  # fmt: skip
    """Call `merge` with the keys of each hop that this rank reads, while those of the next one travel.

    Args:
        keys: this rank's.
        context: of the call.
        leaving: returns the rows for the rank `hop` behind this one; None if it reads none.
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


def _walk_tokens(best: _Best, scores_fn: ScoresFunction, keys: Tensor, context: RingContext) -> None:
    layout, rank = context.layout_for(0, keys.device.type), context.mesh.ring_rank
    reads, hops = _head_class(context.pattern, layout).reads, _hops(context.pattern, layout, rank)

    def leaving(hop: int) -> Tensor | None:
        ranges = reads.slots(rank, hop)
        return torch.from_numpy(expand_ranges(ranges)).to(keys.device) if len(ranges) else None

    def arriving(hop: int) -> int:
        plan = _at(hops, hop)
        return 0 if plan is None else len(expand_ranges(plan.held))

    def merge(hop: int, arrived: Tensor) -> None:
        plan = _at(hops, hop)
        if plan is not None:
            positions = layout.positions(plan.origin)
            held = positions if hop == 0 else positions[expand_ranges(plan.held)]
            _keep_best(best, scores_fn, plan.tiles, arrived, torch.from_numpy(held).to(keys.device))

    _walk(keys, context, leaving, arriving, merge)


def _walk_blocks(
    best: _Best,
    scores_fn: ScoresFunction,
    keys: Tensor,
    context: RingContext,
    blocks: BlockLayout,
    delay: int,
) -> None:
    size, rank, layout = context.mesh.ring_size, context.mesh.ring_rank, blocks.of

    def numbers(owner: int) -> IntArray:
        return blocks.positions(owner)[: blocks.valid_tokens(owner)]

    def count(reader: int, owner: int) -> int:
        own, queries = numbers(owner), layout.positions(reader)
        return len(own) if len(own) and blocks.starts[own].min() + delay <= queries.max() else 0

    def leaving(hop: int) -> Tensor | None:
        rows = count((rank + hop) % size, rank)
        return torch.arange(rows, device=keys.device) if rows else None

    def merge(hop: int, arrived: Tensor) -> None:
        own, queries = numbers((rank - hop) % size), layout.positions(rank)[: layout.valid_tokens(rank)]
        first, end = blocks.starts[own] + delay, blocks.ends[own]
        for q_first in range(0, len(queries), QUERIES):
            rows = slice(q_first, min(q_first + QUERIES, len(queries)))
            for k_first in range(0, len(own), KEYS):
                columns = slice(k_first, min(k_first + KEYS, len(own)))
                seen = queries[rows, None]
                visible = torch.from_numpy((seen >= first[columns]) & (seen < end[columns]))
                if bool(visible.any()):
                    positions = torch.from_numpy(own[columns]).to(keys.device)
                    scores = scores_fn(rows, arrived[:, columns], positions).to(best.scores.dtype)
                    scores = scores.masked_fill(~visible.to(keys.device), float("-inf"))
                    merge_best(_Best(*(x[..., rows, :] for x in best)), scores, positions)

    _walk(keys, context, leaving, lambda hop: count(rank, (rank - hop) % size), merge)


def _at(hops: Sequence[HopPlan | None], hop: int) -> HopPlan | None:
    return hops[hop] if hop < len(hops) else None


def _keep_best(best: _Best, scores_fn: ScoresFunction, tiles: Tiles, keys: Tensor, held: Tensor) -> None:
    """Merge the keys of one shard, whose positions are `held`, into the best ones."""
    for whole in each_tile(tiles):
        for q_first in range(0, whole.q_rows.length, QUERIES):
            for k_first in range(0, whole.k_rows.length, KEYS):
                sides = (
                    min(QUERIES, whole.q_rows.length - q_first),
                    min(KEYS, whole.k_rows.length - k_first),
                )
                tile = whole.part(q_first, sides[0], k_first, sides[1])
                if tile.low > tile.high or tile.low >= sides[0] or tile.high <= -sides[1]:
                    continue  # beside the band
                rows, columns = (
                    slice(one.start, one.start + (one.length - 1) * one.step + 1, one.step)
                    for one in (tile.q_rows, tile.k_rows)
                )
                scores = scores_fn(rows, keys[:, columns], held[columns]).to(best.scores.dtype)
                if tile.is_masked or any(tile.edges):
                    visible = tile.visible(len(keys), keys.device)
                    if visible.dim() == 4 and scores.dim() == 3:
                        visible = visible[:, 0]
                    scores = scores.masked_fill(~visible, float("-inf"))
                merge_best(_Best(*(x[..., rows, :] for x in best)), scores, held[columns])


def merge_best(best: _Best, scores: Tensor, positions: Tensor) -> None:
    """Merge scores [.., q, n] of keys at `positions` [n] into the best keys of q queries, in place.

    See [Note: a total order].
    """
    k = best.scores.shape[-1]
    # A tile has few candidates once many keys were seen, so only they are sorted.
    least = best.scores.amin(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    candidates = (scores >= least).flatten(0, -2)
    counts = candidates.sum(-1)
    width = int(counts.max())
    if not width:
        return
    new_scores, new_positions = scores.flatten(0, -2), positions.expand(len(counts), -1)
    if 4 * width < len(positions):
        row, column = candidates.nonzero(as_tuple=True)
        place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
        found, new_scores = new_scores[row, column], scores.new_full((len(counts), width), float("-inf"))
        new_scores[row, place] = found
        new_positions = positions.new_full((len(counts), width), -1)
        new_positions[row, place] = positions[column]
    else:
        new_scores = new_scores.masked_fill(~candidates, float("-inf"))
    rows = counts > 0
    of_best = rows.view(scores.shape[:-1])  # `best` may be a view that cannot be flattened
    both = torch.cat([best.scores[of_best], new_scores[rows]], dim=-1)
    where = torch.cat([best.positions[of_best], new_positions[rows]], dim=-1)
    top = both.topk(k, dim=-1)
    last, index = top.values[:, -1:], top.indices
    # Entries equal to the k-th best one that did not all fit: which of them topk took is not defined.
    tied = ((both == last).sum(-1) > (top.values == last).sum(-1)) & (last[:, 0] > float("-inf"))
    if bool(tied.any()):
        some, worst = both[tied], last[tied]
        order = where[tied].masked_fill(some < worst, torch.iinfo(torch.int64).max)
        order = order.masked_fill(some > worst, -1)  # of a better score: before every position
        index[tied] = order.topk(k, dim=-1, largest=False).indices
    best.positions[of_best] = where.gather(-1, index)
    best.scores[of_best] = both.gather(-1, index)


def _in_order(best: _Best) -> Tensor:
    """Return the positions, the best first; -1 at the end for none."""
    chosen = best.positions.masked_fill_(best.scores == float("-inf"), -1)
    for scores, positions in zip(
        best.scores.flatten(0, -2).split(KEYS), chosen.flatten(0, -2).split(KEYS), strict=True
    ):
        positions_sorted, order = positions.sort(dim=-1)
        order = scores.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices
        positions.copy_(positions_sorted.gather(-1, order))
    return chosen


# Pass 2: attention over the rows that were chosen.


class _HopRows(NamedTuple):
    """Chosen rows of one owner's K and V, of all items n, one item after the other."""

    owner: int
    slots: Tensor  # int64 [R]: n * S + slot, ascending
    k: Tensor  # [R, G / C, D]
    v: Tensor  # [R, G / C, E]


class _Block(NamedTuple):
    """Some queries of one item and rows that at least one of them chose: [Note: what a query block reads]."""

    where: tuple[slice, slice, slice]  # sample, query heads, query slots
    rows: Tensor  # int64, indices into the rows of the hop, each once
    visible: Tensor  # bool [queries, rows]


class _SelectedPass:
    """Attend to the chosen rows of one owner after the other: at hop s to those of rank p - s."""

    def __init__(
        self, context: RingContext, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int
    ) -> None:
        mesh, layout = context.mesh, context.layout_for(0, q.device.type)
        self.exchange, self.size, self.rank = context.exchange, mesh.ring_size, mesh.ring_rank
        self.scale = q.shape[-1] ** -0.5 if context.options.scale is None else context.options.scale
        self.choices = 1 if chosen.dim() == 3 else chosen.shape[1]
        self.slots, self.dtype = layout.local_tokens, accumulator_dtype(q.dtype)
        self.chosen, self.block = chosen.reshape(-1, *chosen.shape[-2:]), block
        self.table = _slots_by_position(layout, q.device)
        positions = torch.from_numpy(layout.positions(self.rank)).to(q.device)
        self.last = positions.repeat_interleave(max(1, chosen.shape[-2] // self.slots))  # [Q], for blocks
        # Of blocks, places are made where they are used: there are block times as many.
        self.placed: Tensor | None = None
        if block == 1:
            self.placed = self._places(slice(None), slice(None))
        # Slots of padding, which chose nothing, come last.
        choosing = (self.chosen >= 0).flatten(2).any(-1).any(0).nonzero()
        self.queries = int(choosing[-1]) + 1 if len(choosing) else 0
        self.q, self.k, self.v = q, self._by_token(k), self._by_token(v)
        # What this rank's queries chose of each rank, and what the queries of each rank chose here, as bits.
        self.wanted = [self._wanted(owner) for owner in range(self.size)]
        self.asked = self.wanted
        if self.exchange is not None:
            self.asked = self.exchange.all_to_all(self.wanted, mesh.ring_group)

    def _by_token(self, x_BGSD: Tensor) -> Tensor:
        """Return [N * S, G / C, D]."""
        return x_BGSD.unflatten(1, (self.choices, -1)).movedim(3, 2).flatten(0, 2)

    def _places(self, items: int | slice, queries: slice) -> Tensor:
        """Return rank * S + slot of each chosen key of some queries, [.., n, k * block]; -1 for none."""
        if self.placed is not None:
            return self.placed[items, queries]
        tokens = self.chosen[items, queries]
        hidden = tokens < 0
        if self.block > 1:
            behind = torch.arange(self.block, device=tokens.device)
            tokens = tokens.unsqueeze(-1) + behind
            hidden = hidden.unsqueeze(-1) | (tokens > self.last[queries, None, None])
            tokens, hidden = tokens.flatten(-2), hidden.flatten(-2)
        return self.table[tokens.masked_fill(hidden, 0)].masked_fill_(hidden, -1)

    def _local(self, place: Tensor, owner: int) -> Tensor:
        """Return the slots of chosen keys in the shard of `owner`; S for keys of other shards, or none."""
        local = place - owner * self.slots
        return torch.where((local >= 0) & (local < self.slots), local, self.slots)

    def _wanted(self, owner: int) -> Tensor:
        """Return which slots of a shard this rank's queries chose, as bits: uint8 [N, ceil(S / 8)]."""
        wanted = self.chosen.new_zeros((len(self.chosen), self.slots + 1), dtype=torch.bool)
        step = max(BLOCK, KEYS // self.block)
        for first in range(0, self.queries, step):
            places = self._places(slice(None), slice(first, min(first + step, self.queries)))
            wanted.scatter_(1, self._local(places, owner).flatten(1), True)
        bits = wanted[:, : self.slots].to(torch.uint8)
        bits = torch.nn.functional.pad(bits, (0, -self.slots % 8)).unflatten(1, (-1, 8))
        return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)

    def _index(self, bits: Tensor) -> Tensor:
        shifted = bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=bits.device)
        return (shifted & 1).flatten(1)[:, : self.slots].bool().flatten().nonzero().squeeze(1)

    def walk(
        self, compute: Callable[[_HopRows], Sequence[Tensor]],
        add: Callable[[Tensor, Sequence[Tensor]], None] | None = None,
    ) -> None:  # fmt: skip
        """Call `compute` with the rows of each hop, while those of the next one travel.

        If there is `add`, what `compute` returns (gradients of K's and V's rows) returns to the owner, and
        `add` gets what others return for rows of this rank, with their index; in the order of hops.
        """
        kv, index_of = (self.k, self.v), {self.rank: self._index(self.wanted[self.rank])}
        asked = {self.rank: index_of[self.rank]}  # rows of this rank's shard, by the rank that reads them

        def sent_to(reader: int) -> Sequence[Tensor]:
            leaving = self._index(self.asked[reader])
            return [x[leaving] for x in kv]

        def received_from(owner: int) -> Sequence[Tensor]:
            index_of[owner] = self._index(self.wanted[owner])
            return [x.new_empty((len(index_of[owner]), *x.shape[1:])) for x in kv]

        def returned_by(reader: int) -> Sequence[Tensor]:
            asked[reader] = self._index(self.asked[reader])
            return [self.k.new_empty((len(asked[reader]), *x.shape[1:]), dtype=self.dtype) for x in kv]

        walk_owners(
            self.exchange, self.rank, self.size, [x[index_of[self.rank]] for x in kv], sent_to, received_from,
            lambda owner, rows: compute(_HopRows(owner, index_of.pop(owner), rows[0], rows[1])), returned_by,
            None if add is None else lambda reader, gradients: add(asked.pop(reader), gradients),
        )  # fmt: skip

    def blocks(self, rows: _HopRows) -> Iterator[_Block]:
        """Yield the blocks of queries and rows of a hop."""
        heads = self.q.shape[1] // self.choices
        ends = torch.searchsorted(
            rows.slots, self.slots * torch.arange(len(self.chosen) + 1, device=rows.slots.device)
        )
        for item, (first, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
            count = end - first
            if not count:
                continue
            number = rows.slots.new_full((self.slots + 1,), count)  # of each slot among the item's rows
            number[rows.slots[first:end] - item * self.slots] = torch.arange(count, device=rows.slots.device)
            sample, choice = divmod(item, self.choices)
            at = slice(sample, sample + 1), slice(choice * heads, (choice + 1) * heads)
            for start in range(0, self.queries, BLOCK):
                queries = slice(start, min(start + BLOCK, self.queries))
                chosen = number[self._local(self._places(item, queries), rows.owner)]
                used, place = chosen.unique(return_inverse=True)
                visible = chosen.new_zeros((len(chosen), len(used)), dtype=torch.bool)
                visible.scatter_(1, place, True)
                used = used[used < count]  # `count` stands for no key of this owner, and is the last one
                for first_used in range(0, len(used), KEYS):
                    part = used[first_used : first_used + KEYS]
                    seen = visible[:, first_used : first_used + len(part)]
                    yield _Block((*at, queries), part + first, seen)

    def _scores(self, block: _Block, rows: _HopRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q [g, r * queries, D], k and v [g, R, ..], and masked scores [g * r, queries, R]."""
        k, v = (x[block.rows].to(self.dtype).transpose(0, 1) for x in (rows.k, rows.v))
        q = self.q[block.where][0].to(self.dtype)
        q_of_group = q.reshape(len(k), -1, q.shape[-1])
        scores = (q_of_group @ k.mT * self.scale).view(len(q), -1, k.shape[1])
        return q_of_group, k, v, scores.masked_fill_(~block.visible, float("-inf"))

    def forward(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        out, lse = empty_results(self.q, self.v.shape[-1], self.dtype, sinks)

        def compute(rows: _HopRows) -> Sequence[Tensor]:
            for block in self.blocks(rows):
                _, _, v, scores = self._scores(block, rows)
                part_lse = scores.logsumexp(-1)
                weights = weights_of(scores, part_lse)
                part = (weights.view(len(v), -1, v.shape[1]) @ v).view(*part_lse.shape, -1)
                merge_(out[block.where], lse[block.where], part.unsqueeze(0), part_lse.unsqueeze(0))
            return ()

        self.walk(compute)
        return out.to(self.q.dtype), lse

    def backward(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        delta = (out.to(self.dtype) * grad_out).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse
        dq = torch.zeros_like(self.q, dtype=self.dtype)
        totals = [torch.zeros_like(x, dtype=self.dtype) for x in (self.k, self.v)]

        def compute(rows: _HopRows) -> Sequence[Tensor]:
            dk, dv = (torch.zeros_like(x, dtype=self.dtype) for x in (rows.k, rows.v))
            for block in self.blocks(rows):
                q, k, v, scores = self._scores(block, rows)
                grad = grad_out[block.where][0].to(self.dtype)
                grad_of_group = grad.reshape(len(v), -1, v.shape[-1])
                weights = weights_of(scores, lse[block.where][0])
                products = (grad_of_group @ v.mT).view_as(weights)
                of_scores = weights * (products - delta[block.where][0].unsqueeze(-1)) * self.scale
                of_group, weights = (x.view(len(k), -1, k.shape[1]) for x in (of_scores, weights))
                dq[block.where] += (of_group @ k).view(1, *grad.shape[:2], -1)
                # Each row occurs once in a block, so the order of additions is that of the blocks.
                dk.index_add_(0, block.rows, (of_group.mT @ q).transpose(0, 1))
                dv.index_add_(0, block.rows, (weights.mT @ grad_of_group).transpose(0, 1))
            return dk, dv

        def add(index: Tensor, gradients: Sequence[Tensor]) -> None:
            for total, part in zip(totals, gradients, strict=True):
                total.index_add_(0, index, part)

        self.walk(compute, add)
        # From [N * S, G / C, D] to [B, G, S, D].
        dk, dv = (
            x.unflatten(0, (-1, self.choices, self.slots))
            .movedim(2, 3)
            .flatten(1, 2)
            .to(self.q.dtype)
            .contiguous()
            for x in totals
        )
        return dq.to(self.q.dtype), dk, dv


@lru_cache(maxsize=16)
@outside_inference_mode
def _slots_by_position(layout: Layout, device: torch.device) -> Tensor:
    return torch.from_numpy(layout.slots_by_position()).to(device)


def _check_chosen(chosen: Tensor, q: Tensor, k: Tensor, layout: Layout, block: int) -> None:
    """Raise RingShapeError for what is no choice of positions beside q and k, or no size of blocks."""
    tokens = layout.tokens
    if block < 1 or (block > 1 and q.shape[2] % layout.local_tokens):
        raise RingShapeError(
            "block_size: expected a whole number of at least 1, and above 1 queries of all"
            f" {layout.local_tokens} slots, got {block} and {q.shape[2]} queries; pass those of the tokens"
        )
    shape, groups = tuple(chosen.shape), k.shape[1]
    fits = chosen.dim() in (3, 4) and shape[0] == len(q) and shape[-2] == q.shape[2] and shape[-1] > 0
    if not fits or (len(shape) == 4 and (shape[1] < 1 or groups % shape[1])):
        raise RingShapeError(
            f"chosen: expected [{len(q)}, {q.shape[2]}, k] or [{len(q)}, C, {q.shape[2]}, k] with C a divisor"
            f" of the {groups} K/V heads, got shape {shape}; pass what ring_select returned, and no"
            " sinks where each query head chooses"
        )
    if chosen.dtype not in (torch.int64, torch.int32) or chosen.device != q.device:
        raise RingShapeError(
            f"chosen: expected int64 or int32 on {q.device}, got {chosen.dtype} on {chosen.device}; cast or"
            " move it"
        )
    least, most = int(chosen.min()), int(chosen.max())
    if least < -1 or most >= tokens:
        raise RingShapeError(
            f"chosen: expected positions -1 to {tokens - 1} of the layout's {tokens} tokens, got {least} to"
            f" {most}; pass what ring_select returned"
        )


def _agreed(
    context: RingContext, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, sinks: Tensor | None, block: int,
    way: str,
) -> None:  # fmt: skip
    """Check the tensors, and agree with the other ranks on the pass."""
    refused: RingError | None = None
    more: dict[str, object] = {}
    try:
        check_tensors(q, k, v)
        check_heads(q.shape[1], k.shape[1], 1)
        layout = context.layout_for(k.shape[2], k.device.type)
        check_keys(k.shape[2], layout.local_tokens)
        check_sinks(sinks, q, q.shape[1])
        _check_chosen(chosen, q, k, layout, block)
        more = {
            "head_dim of v": v.shape[-1],
            "shape of chosen": (*chosen.shape[1:-2], chosen.shape[-1]),
            "sinks": None if sinks is None else sinks.dtype,
            "block_size": block,
        }
    except RingError as error:
        refused = error
    context.agree(f"attention over chosen keys {way}", q, k, refused, more)
    if way == "forward":
        count_forward_pass()


@operator("ds_ring::selected_attention")
def selected_attention_op(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, handle: int, sinks: Tensor | None = None, block: int = 1
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of `selected_attention`."""
    context = context_of(handle)
    with context.mesh.in_call():
        _agreed(context, q, k, v, chosen, sinks, block, "forward")
        with _guarded(context):
            return _SelectedPass(context, q, k, v, chosen, block).forward(sinks)


@operator("ds_ring::selected_attention_backward")
def selected_attention_backward_op(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, out: Tensor, lse: Tensor, handle: int,
    block: int, grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of `selected_attention`."""
    context = context_of(handle)
    with context.mesh.in_call():
        _agreed(context, q, k, v, chosen, None, block, "backward")
        with _guarded(context):
            return _SelectedPass(context, q, k, v, chosen, block).backward(grad_out, out, lse, grad_lse)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, chosen, handle, sinks, ctx.block = inputs
    ctx.save_for_backward(q, k, v, chosen, *output, sinks)
    ctx.context = context_of(handle)  # keep it alive until the backward pass
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, chosen, out, lse, sinks = ctx.saved_tensors
    if grad_out is None:  # every rank must go through the pass: another rank's gradient may need it
        grad_out = torch.zeros_like(out)
    handle = ctx.context.handle
    grads = selected_attention_backward_op(grad_out, q, k, v, chosen, out, lse, handle, ctx.block, grad_lse)
    of_sinks = sinks_gradient(sinks, slice(None), grad_out, out, lse, grad_lse)
    return (*grads, None, None, of_sinks, None)


register(selected_attention_op, selected_attention_backward_op, _setup, _backward)

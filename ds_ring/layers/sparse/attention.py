"""Attend to blocks of keys that learned scores choose: `moba_attention` and `nsa_attention`.

Owns both patterns, from `ring_select`, `selected_attention` and ring passes. Of K and V, rows cross that some
query of a rank attends to; nothing here holds the keys of all ranks, or a number for each pair of tokens.
Both are causal. Layers of transformers models that choose blocks of tokens gather them as these do: the
tokens of a block may lie on two ranks or more, and its owner gets them (`tokens_of_blocks`). What is chosen
has no gradient, as in the papers.

Shapes: B samples, H query heads, G key/value heads, r = H / G, S local tokens, N local blocks, L tokens of a
block, D and E head dims of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ring.api import ring_attention
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.errors import RingConfigError, RingError, RingShapeError, shown, whole_number
from ds_ring.layers.scan.scan import Neighbours, halo_op, neighbours_of
from ds_ring.layers.scan.sequence_runs import in_blocks
from ds_ring.layers.selection.select import ring_select, selected_attention
from ds_ring.masks.catalog import Before, Documents, SlidingWindow
from ds_ring.masks.tiles import IntArray
from ds_ring.ops.checks import check_heads, check_keys, check_tensors, why_not_an_operand
from ds_ring.ops.context import check_layout, refuse
from ds_ring.ops.handles import never_traced
from ds_ring.ring.merge import accumulator_dtype
from ds_ring.schedule.layout import BlockLayout, Layout


def tokens_of_blocks(
    x: Tensor, blocks: BlockLayout, mesh: RingMesh, hop_timeout_s: float
) -> tuple[Tensor, Tensor]:
    """Return the tokens of this rank's blocks [B, N, L, ...] of x [B, S, ...], and first slots [N].

    The owner of a block has its first token, and gets the others by `halo`. A block at the end of a document
    has its last token again in place of those that it lacks.
    """
    layout, after = blocks.of, blocks.size - 1
    index, source = _index(blocks, mesh.ring_rank), x
    if after:
        near = neighbours_of(layout, mesh, None, hop_timeout_s)
        source = torch.cat([x, halo_op(x.contiguous(), 1, 0, after, near.handle).flatten(1, 2)], dim=1)
    padded = np.zeros((blocks.local_tokens, blocks.size), dtype=np.int64)
    padded[: len(index)] = index
    places = torch.from_numpy(padded).to(x.device)
    return source[:, places.flatten()].unflatten(1, places.shape), places[:, 0]


def _index(blocks: BlockLayout, rank: int) -> IntArray:
    """Return where tokens of blocks stand, [n, L]: in the shard, or behind it in the halos of runs."""
    after, slots = blocks.size - 1, blocks.of.local_tokens
    own = blocks.positions(rank)[: blocks.valid_tokens(rank)]
    tokens = blocks.starts[own, None] + np.arange(blocks.size)
    tokens = np.minimum(tokens, blocks.ends[own, None] - 1)
    found = np.empty_like(tokens)
    first = 0
    for run, (start, _, length) in enumerate(blocks.of.runs(rank).tolist()):
        mine = (tokens[:, 0] >= start) & (tokens[:, 0] < start + length)
        behind = tokens[mine] - start - length
        found[mine] = np.where(behind < 0, first + length + behind, slots + run * after + behind)
        first += length
    return found


def windows(x: Tensor, near: Neighbours, before: int, after: int, step: int = 1) -> Tensor:
    """Return `before` + step + `after` neighbours of each group of `step` slots: [B, n, that, ...].

    Slots in front of the sequence and behind it are zeros. Differentiable; each rank takes part.

    Args:
        x: [B, S, ...], where the layout of `near` has S slots.
        near: the neighbours of a layout whose runs are whole groups; the end of the sequence may cut one.
        before, after: slots in front of a group and behind it.
        step: slots of a group.
    """
    size, parts = before + step + after, []
    beside = halo_op(x.contiguous(), 1, before, after, near.handle) if before + after else None
    for piece in near.pieces:
        own = x[:, piece.slot : piece.slot + piece.length]
        rest = own.new_zeros((len(own), -piece.length % step, *own.shape[2:]))
        whole = torch.cat([own, rest], dim=1)
        if beside is not None:
            front, behind = beside[:, piece.run].split([before, after], dim=1)
            whole = torch.cat([front, whole, behind], dim=1)
        parts.append(whole.unfold(1, size, step).movedim(-1, 2))
    if parts:
        return torch.cat(parts, dim=1)
    none = x.new_zeros((len(x), 0, size, *x.shape[2:]))
    # Also without slots, every rank takes part in the backward pass of the halo.
    return none if beside is None else none + beside.flatten()[:0].sum()


SCORED = 2048  # keys whose scores exist at a time, of all heads and a tile's queries
Compress = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@never_traced
def moba_attention(
    q: Tensor, k: Tensor, v: Tensor, *, layout: Layout, mesh: RingMesh, block_size: int, top_k: int,
    documents: Documents | None = None, scale: float | None = None, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Compute mixture of block attention (MoBA) over a sharded sequence. Differentiable.

    Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs" (arXiv 2502.13189, section 2.2).
    The score of a block is the product of the query with the mean of the block's keys. Each query head
    attends to the block that holds the query, causally, and to the top_k - 1 best blocks before it, by one
    softmax over all their keys. Equal scores are ordered by block, the first one first.

    Args:
        q: local queries [B, H, S, D].
        k, v: local keys [B, G, S, D] and values [B, G, S, E]; H a multiple of G.
        layout: which position lies in which slot; shards of consecutive tokens, which may cut blocks.
        mesh: this process's place; every rank of the ring must call. Its Ulysses size is 1.
        block_size: tokens of a block; blocks begin with the sequence, or with each document.
        top_k: blocks that a query attends to at most, its own one among them.
        documents: tokens of other documents are not seen.
        scale: factor of the scores in the softmax; None is 1 / sqrt(D).
        hop_timeout_s: seconds after which a hop whose messages have not arrived raises.

    Returns:
        out [B, H, S, E] in q's dtype. Rows of padding are 0.

    Raises:
        RingConfigError, RingShapeError, RingLayoutError, RingPatternError: arguments that do not fit each
            other or the layout, or shards of single tokens.
        RingMismatchError: ranks that call with other shapes or settings; nothing was sent.
        RingPeerError: another rank failed or was too late.
    """

    def checked() -> BlockLayout:
        for name, value in (("block_size", block_size), ("top_k", top_k)):
            whole_number(value, f"moba_attention: {name}", RingConfigError)
        _check("moba_attention", layout, mesh, ("q", q), ("k", k), ("v", v))
        return BlockLayout.of_tokens(layout, block_size, documents, whole=False)

    blocks = _or_refuse(mesh, checked)
    q, k, v = (_without_padding(x, layout, mesh) for x in (q, k, v))
    positions = layout.positions(mesh.ring_rank)
    own = torch.from_numpy(np.searchsorted(blocks.starts, positions, side="right") - 1).to(q.device)
    with torch.no_grad():
        tokens, _ = tokens_of_blocks(k.transpose(1, 2), blocks, mesh, hop_timeout_s)
        means = tokens.mean(dim=2, dtype=accumulator_dtype(k.dtype))  # [B, N, G, D]

        def scores(rows: slice, keys: Tensor, numbers: Tensor) -> Tensor:
            of_groups = q[:, :, rows].unflatten(1, (k.shape[1], -1)).to(keys.dtype)
            found = torch.einsum("bgrqd,bngd->bgrqn", of_groups, keys).flatten(1, 2)
            # not in place: selective checkpointing may have saved the product
            return found.masked_fill(numbers == own[rows, None], float("inf"))

        chosen = ring_select(
            scores, top_k, means, layout=layout, mesh=mesh, blocks=blocks, with_positions=True,
            hop_timeout_s=hop_timeout_s,
        )  # fmt: skip
    return _attend(q, k, v, chosen, blocks, mesh, scale, hop_timeout_s)[0]


@never_traced
def nsa_attention(
    q: Tensor, k: Tensor | Sequence[Tensor], v: Tensor | Sequence[Tensor], gates: Tensor, *,
    layout: Layout, mesh: RingMesh, compress: Compress, compressed_size: int = 32, stride: int = 16,
    block_size: int = 64, top_k: int = 16, first_blocks: int = 1, local_blocks: int = 2, window: int = 512,
    scale: float | None = None, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Compute native sparse attention (NSA) over a sharded sequence. Differentiable.

    Yuan et al. 2025, "Native Sparse Attention" (arXiv 2502.11089, section 3.3). The output is the sum of
    three attentions, each times its gate: to compressed keys, one for every `stride` tokens, made of
    `compressed_size` tokens (equation 7); to the tokens of the top_k blocks that the probabilities of the
    compressed keys add up to most (equations 9 and 10), the same for the query heads of a group; and to a
    window. All of them see what lies up to the query. Equal sums are ordered by block, the first one first.

    Args:
        q: local queries [B, H, S, D].
        k, v: local keys [B, G, S, D] and values [B, G, S, E] of all branches, or three of each: those that
            are compressed, those of chosen blocks, and those of the window.
        gates: [B, H, S, 3], of the branches in this order.
        layout: which position lies in which slot; runs of whole blocks of `block_size` tokens.
        mesh: this process's place; every rank of the ring must call. Its Ulysses size is 1.
        compress: takes keys [B, G, n, compressed_size, D] and values [.., E] of n windows, and returns
            [B, G, n, D] and [B, G, n, E]. It is called once on each rank, and may have parameters; on each
            rank their gradient is that of the rank's windows: sum it over the ring.
        compressed_size, stride: tokens of a window, and between the beginnings of two; the first one is a
            multiple of the second one, and no larger than `block_size`, which is one, too.
        block_size, top_k: tokens of a block, and blocks that a query attends to at most.
        first_blocks, local_blocks: of the top_k blocks, how many at the start, and up to the query's own, are
            always chosen.
        window: tokens that the last branch sees, the query's own included.
        scale, hop_timeout_s: see `moba_attention`.

    Returns:
        out [B, H, S, E] in q's dtype. Rows of padding are 0, and so is a branch that sees no key.

    Raises:
        RingLayoutError: runs that are no whole blocks: see the message for a length that fits.
        RingConfigError, RingShapeError, RingMismatchError, RingPeerError: as `moba_attention`.
    """
    three_k, three_v = (3 * [x] if isinstance(x, Tensor) else [*x] for x in (k, v))

    def checked() -> tuple[BlockLayout, Layout]:
        given = {
            "compressed_size": compressed_size, "stride": stride, "block_size": block_size, "top_k": top_k,
            "window": window,
        }  # fmt: skip
        for name, value in given.items():
            whole_number(value, f"nsa_attention: {name}", RingConfigError)
        for name, value in (("first_blocks", first_blocks), ("local_blocks", local_blocks)):
            if value != 0:
                whole_number(value, f"nsa_attention: {name}", RingConfigError)
        if compressed_size % stride or block_size % stride or compressed_size > block_size:
            raise RingConfigError(
                "nsa_attention: expected compressed_size and block_size that are multiples of stride, the"
                f" first no larger than the second, got {compressed_size}, {block_size} and {stride}; take"
                " the paper's 32, 64 and 16, say"
            )
        if first_blocks + local_blocks > top_k:
            raise RingConfigError(
                f"nsa_attention: expected top_k of at least first_blocks + local_blocks, got {top_k} <"
                f" {first_blocks} + {local_blocks}; raise top_k"
            )
        if len(three_k) != 3 or len(three_v) != 3:
            raise RingConfigError(
                "nsa_attention: expected one tensor of keys and one of values, or three of each, got"
                f" {len(three_k)} and {len(three_v)}; pass those of each branch"
            )
        for keys, values in zip(three_k, three_v, strict=True):
            _check("nsa_attention", layout, mesh, ("q", q), ("k", keys), ("v", values))
        shape = (*q.shape[:3], 3)
        if not isinstance(gates, Tensor) or gates.shape != shape or not gates.is_floating_point():
            got = tuple(gates.shape) if isinstance(gates, Tensor) else shown(gates)
            raise RingShapeError(
                f"nsa_attention: gates: expected floating {shape}, one for each branch, got {got}"
            )
        in_blocks(layout, block_size)  # or what does not fit
        return BlockLayout.of_tokens(layout, block_size, whole=False), in_blocks(layout, stride)

    blocks, entries = _or_refuse(mesh, checked)
    q, gates = (_without_padding(x, layout, mesh) for x in (q, gates))
    three_k, three_v = ([_without_padding(x, layout, mesh) for x in three] for three in (three_k, three_v))
    place: dict[str, Any] = {"mesh": mesh, "scale": scale, "hop_timeout_s": hop_timeout_s}
    near = neighbours_of(entries, mesh, None, hop_timeout_s)

    # Windows of compressed_size tokens: those of their own stride, and the next ones.
    both = torch.cat([three_k[0], three_v[0]], dim=3).transpose(1, 2)  # [B, S, G, D + E]
    by_stride = _padded(both, entries.local_tokens * stride).unflatten(1, (-1, stride))
    of_windows = windows(by_stride, near, 0, compressed_size // stride - 1).flatten(2, 3)
    of_windows = _padded(of_windows, entries.local_tokens).permute(0, 3, 1, 2, 4)
    keys, values = _compressed(compress, of_windows, three_k[0].shape[3], mesh)
    compressed, lse = _attend_to_entries(q, keys, values, entries, stride, compressed_size // stride, place)

    with torch.no_grad():
        of_blocks = windows(
            keys.transpose(1, 2), near, compressed_size // stride - 1, 0, block_size // stride
        )  # [B, N, w, G, D]
        scores = _Importance(
            q, lse, layout.positions(mesh.ring_rank), compressed_size, stride, block_size, scale,
            (first_blocks, local_blocks),
        )  # fmt: skip
        chosen = ring_select(
            scores, top_k, _padded(of_blocks, blocks.local_tokens), layout=layout, mesh=mesh, blocks=blocks,
            with_positions=True, hop_timeout_s=hop_timeout_s,
        )  # fmt: skip
    selected = _attend(q, three_k[1], three_v[1], chosen, blocks, mesh, scale, hop_timeout_s)[0]
    near_ones = ring_attention(
        q, three_k[2], three_v[2], pattern=SlidingWindow(window), layout=layout, **place
    )
    branches = zip((compressed, selected, near_ones), gates.unbind(-1), strict=True)
    parts = [gate.unsqueeze(-1) * out for out, gate in branches]
    return (parts[0] + parts[1] + parts[2]).to(q.dtype)


class _Importance:
    """Score blocks by the probabilities of compressed keys (equations 9 and 10 of the paper).

    A compressed key adds its probability to a block once for every `stride` tokens that its window and the
    block share: the double sum of equation 9, whose indices begin at 1. The probability is exact, since the
    lse of attention to all compressed keys is known.

    Args:
        q: [B, H, S, D].
        lse: [B, H, S] of attention to compressed keys.
        positions: of the slots, -1 for padding.
        size, stride, block: tokens of a window, between windows, and of a block.
        scale: factor of the scores; None is 1 / sqrt(D).
        always: how many first and local blocks are chosen whatever their score is.
    """

    def __init__(
        self, q: Tensor, lse: Tensor, positions: np.ndarray, size: int, stride: int, block: int,
        scale: float | None, always: tuple[int, int],
    ) -> None:  # fmt: skip
        self.q, self.lse, self.block, self.always = q, lse, block, always
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.positions = torch.from_numpy(positions).to(q.device)
        # Of a block's compressed keys: where their windows begin and end, from the block's first token, and
        # how many strides they share with it.
        first = torch.arange(stride - size, block, stride, device=q.device)
        self.first, self.last = first, first + size - 1
        self.shared = (self.last.clamp_max(block - 1) - first.clamp_min(0) + 1) // stride

    def __call__(self, rows: slice, keys: Tensor, numbers: Tensor) -> Tensor:
        """Return scores [B, G, queries, n] of keys [B, n, w, G, D]."""
        step = max(1, SCORED // keys.shape[2])
        parts = zip(keys.split(step, dim=1), numbers.split(step), strict=True)
        found = torch.cat([self._sums(rows, part, number) for part, number in parts], dim=-1)
        own = self.positions[rows, None] // self.block
        first, local = self.always
        chosen = (numbers < first) | ((numbers <= own) & (numbers > own - local))
        return found.masked_fill_(chosen, float("inf"))

    def _sums(self, rows: slice, keys: Tensor, numbers: Tensor) -> Tensor:
        lse, groups = self.lse[:, :, rows], keys.shape[3]
        q, of_lse = (
            x.to(lse.dtype).unflatten(1, (groups, -1)) for x in (self.q[:, :, rows] * self.scale, lse)
        )
        logits = torch.einsum("bgrqd,bnwgd->bgrqnw", q, keys.to(lse.dtype))
        begins = numbers[:, None] * self.block
        positions = self.positions[rows, None, None]
        visible = (begins + self.first >= 0) & (begins + self.last <= positions)  # [queries, n, w]
        # A query that sees no compressed key has an lse of -inf, and no probability.
        logits = (logits - of_lse[..., None, None]).masked_fill_(~visible, float("-inf"))
        return (logits.exp_() * self.shared).sum(-1).sum(2)


def _attend_to_entries(
    q: Tensor, keys: Tensor, values: Tensor, entries: Layout, stride: int, strides: int, place: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attend to the compressed keys whose windows end at the query or before it.

    A query is at place r of stride b. It sees compressed key i if i + strides <= b, and at the last place if
    i + strides <= b + 1. So the queries of all other places are heads of one ring pass over the layout of
    strides, and those of the last place of another one.

    Args:
        q: [B, H, S, D].
        keys, values: [B, G, n, D] and [B, G, n, E].
        entries: their layout.
        stride: tokens between two windows.
        strides: of a window.
        place: arguments of `ring_attention`.
    """
    heads, slots = q.shape[1:3]
    padded = _padded(q, entries.local_tokens * stride, dim=2).unflatten(2, (-1, stride)).transpose(2, 3)
    outs, lses = [], []
    for places, apart in ((padded[:, :, :-1], strides), (padded[:, :, -1:], strides - 1)):
        if places.shape[2]:
            out, lse = ring_attention(
                places.flatten(1, 2), keys, values, pattern=Before(apart), layout=entries, return_lse=True,
                **place,
            )  # fmt: skip
            outs.append(out.unflatten(1, (heads, -1)))
            lses.append(lse.unflatten(1, (heads, -1)))
    out, lse = torch.cat(outs, dim=2), torch.cat(lses, dim=2)  # [B, H, stride, n, ..]
    out, lse = (_padded(x.transpose(2, 3).flatten(2, 3), slots, dim=2) for x in (out, lse))
    return out, lse


def _attend(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, blocks: BlockLayout, mesh: RingMesh,
    scale: float | None, hop_timeout_s: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (out, lse) of attention to the tokens of chosen blocks up to the query."""
    starts = torch.from_numpy(np.append(blocks.starts, -1)).to(q.device)  # number -1 is that of no block
    found: tuple[Tensor, Tensor] = selected_attention(
        q, k, v, starts[chosen], layout=blocks.of, mesh=mesh, scale=scale, return_lse=True,
        block_size=blocks.size, hop_timeout_s=hop_timeout_s,
    )  # fmt: skip
    return found


def _compressed(compress: Compress, of_windows: Tensor, width: int, mesh: RingMesh) -> tuple[Tensor, Tensor]:
    """Return compressed keys [B, G, n, D] and values of windows [B, G, n, L, D + E], contiguous."""
    keys, values = of_windows.split([width, of_windows.shape[4] - width], dim=4)
    found = compress(keys, values)
    want = [(*x.shape[:3], x.shape[4]) for x in (keys, values)]
    fits = isinstance(found, tuple) and all(isinstance(x, Tensor) for x in found)
    if not fits or [tuple(x.shape) for x in found] != want or any(x.dtype != keys.dtype for x in found):
        got = [tuple(x.shape) for x in found] if fits else type(found).__name__
        told = f"compress: expected keys and values {want} in {keys.dtype}, got {got}"
        refuse(mesh, RingShapeError(told))
    return found[0].contiguous(), found[1].contiguous()


def _check(name: str, layout: Layout, mesh: RingMesh, *named: tuple[str, Any]) -> None:
    """Raise for tensors that do not fit each other or the layout, and for a mesh with Ulysses ranks."""
    if mesh.ulysses_size > 1:
        raise RingConfigError(
            f"{name}: expected a mesh with ulysses_size 1, got {mesh.ulysses_size}; use a ring of"
            f" {mesh.sequence_size} for attention over chosen blocks"
        )
    check_layout(layout, mesh)
    for what, x in named:
        why = why_not_an_operand(what, x)
        if why is not None:
            raise RingShapeError(why)
    q, k, v = (x for _, x in named)
    check_tensors(q, k, v)
    check_heads(q.shape[1], k.shape[1], 1)
    for x in (q, k):
        check_keys(x.shape[2], layout.local_tokens)


def _or_refuse(mesh: RingMesh, check: Callable[[], Any]) -> Any:
    """Return what a check returns; an error that it raises is told to all ranks first."""
    check_mesh(mesh)
    try:
        return check()
    except RingError as error:
        refuse(mesh, error)


def _without_padding(x: Tensor, layout: Layout, mesh: RingMesh) -> Tensor:
    """Return x [B, heads, S, ...] with zeros in slots of padding, whatever they hold."""
    valid = layout.valid_tokens(mesh.ring_rank)
    if valid == x.shape[2]:
        return x
    is_padding = torch.arange(x.shape[2], device=x.device) >= valid
    return x.masked_fill(is_padding[:, None], 0)


def _padded(x: Tensor, slots: int, dim: int = 1) -> Tensor:
    """Append zeros to a dimension, or cut it off, so that it has so many slots."""
    if x.shape[dim] >= slots:
        return x.narrow(dim, 0, slots)
    shape = list(x.shape)
    shape[dim] = slots - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim=dim)

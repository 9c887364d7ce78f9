"""Gather the tokens of blocks, which may lie on two ranks or more, at the block's owner.

Owns what layers that choose blocks of tokens have in common, in transformers models and in `ds_ring.sparse`.

Shapes: B samples, S local tokens, N local blocks, L tokens of a block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ds_ring.masks.tiles import IntArray
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.scan import Neighbours, halo_op, neighbours_of
from ds_ring.schedule.layout import BlockLayout


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

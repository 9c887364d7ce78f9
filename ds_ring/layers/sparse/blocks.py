"""Blocks of tokens on shards: gather the tokens of a block, and attend to chosen blocks.

Layers of transformers models that choose blocks of tokens gather them as MoBA does: the tokens of a
block may be on two ranks or more, and its owner gets them. Nothing here holds the keys of all ranks.

Shapes: B samples, H query heads, G key/value heads, S local tokens, N local blocks, L tokens of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.device_tables import on_device
from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError
from ds_ring.layers.scan.context import scan_context
from ds_ring.layers.scan.halo import halo_op
from ds_ring.layers.selection.attention import selected_attention
from ds_ring.layers.selection.block_layout import BlockLayout
from ds_ring.masks.slots import IntArray
from ds_ring.ops.checks import check_heads, check_layout, check_operand, check_tensors, check_tokens
from ds_ring.ops.eager import run_compared
from ds_ring.schedule.layout import Layout


def gather_blocks(
    x: Tensor, blocks: BlockLayout, mesh: RingMesh, hop_timeout_s: float
) -> tuple[Tensor, Tensor]:
    """Return the tokens of this rank's blocks [B, N, L, ...] of x [B, S, ...], and first slots [N].

    The owner of a block has its first token, and gets the others by `halo`. A block at the end of a document
    has its last token again in place of those that it lacks.
    """
    layout, after = blocks.of, blocks.size - 1
    index, source = _index(blocks, mesh.ring_rank), x
    if after:
        context = scan_context(layout, mesh, None, hop_timeout_s)
        copies = run_compared(mesh, "blocks of tokens", halo_op, x.contiguous(), 1, 0, after, context.handle)
        source = torch.cat([x, copies.flatten(1, 2)], dim=1)
    padded = np.zeros((blocks.local_tokens, blocks.size), dtype=np.int64)
    padded[: len(index)] = index
    places = on_device(padded, x.device)
    return source[:, places.flatten()].unflatten(1, places.shape), places[:, 0]


def _index(blocks: BlockLayout, rank: int) -> IntArray:
    """Return the indices of tokens of blocks, [n, L]: in the shard, or after it in the halos of runs."""
    after, slots = blocks.size - 1, blocks.of.local_tokens
    local = blocks.positions(rank)[: blocks.valid_tokens(rank)]
    tokens = blocks.starts[local, None] + np.arange(blocks.size)
    tokens = np.minimum(tokens, blocks.ends[local, None] - 1)
    index = np.empty_like(tokens)
    first = 0
    for run, (start, _, length) in enumerate(blocks.of.runs(rank).tolist()):
        mine = (tokens[:, 0] >= start) & (tokens[:, 0] < start + length)
        behind = tokens[mine] - start - length
        index[mine] = np.where(behind < 0, first + length + behind, slots + run * after + behind)
        first += length
    return index


def attend_to_blocks(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, blocks: BlockLayout, mesh: RingMesh,
    scale: float | None, hop_timeout_s: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (out, lse) of attention to the tokens of chosen blocks up to the query."""
    starts = on_device(np.append(blocks.starts, -1), q.device)  # number -1 is that of no block
    result: tuple[Tensor, Tensor] = selected_attention(
        q, k, v, starts[chosen], layout=blocks.of, mesh=mesh, scale=scale, return_lse=True,
        block_size=blocks.size, hop_timeout_s=hop_timeout_s,
    )  # fmt: skip
    return result


def check_shards(name: str, layout: Layout, mesh: RingMesh, *named: tuple[str, Any]) -> None:
    """Raise for tensors that do not fit each other or the layout, and for a mesh with Ulysses ranks."""
    if mesh.ulysses_size > 1:
        raise RingConfigError.wrong(name, "ulysses_size 1", mesh.ulysses_size, "use a larger ring")
    check_layout(layout, mesh.ring_size)
    for what, x in named:
        check_operand(what, x)
    q, k, v = (x for _, x in named)
    check_tensors(q, k, v)
    check_heads(q.shape[1], k.shape[1], 1)
    for x in (q, k):
        check_tokens(x.shape[2], layout.local_tokens)


def without_padding(x: Tensor, layout: Layout, mesh: RingMesh) -> Tensor:
    """Return x [B, heads, S, ...] with zeros in slots of padding."""
    valid = layout.valid_tokens(mesh.ring_rank)
    if valid == x.shape[2]:
        return x
    is_padding = torch.arange(x.shape[2], device=x.device) >= valid
    return x.masked_fill(is_padding[:, None], 0)

"""Mixture of block attention over a sharded sequence: `moba_attention`.

Made of `ring_select` over means of blocks and `selected_attention`. Shapes: B samples, H query heads, G
key/value heads, S local tokens, N local blocks, D and E head dims of keys and values.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.device_tables import on_device
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.errors import RingConfigError, check_whole_number
from ds_ring.layers.selection.block_layout import BlockLayout
from ds_ring.layers.selection.select import ring_select
from ds_ring.layers.sparse.blocks import attend_to_blocks, check_shards, gather_blocks, without_padding
from ds_ring.ops.tracing import forbid_tracing
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.ring.merge import get_accumulator_dtype
from ds_ring.schedule.layout import Layout


@forbid_tracing
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
        layout: shards of consecutive tokens, which may cut blocks.
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
    check_mesh(mesh)
    with collective(mesh, "moba_attention"):
        for name, value in (("block_size", block_size), ("top_k", top_k)):
            check_whole_number(value, f"moba_attention: {name}", RingConfigError)
        check_shards("moba_attention", layout, mesh, ("q", q), ("k", k), ("v", v))
        blocks = BlockLayout.from_tokens(layout, block_size, documents, whole=False)
    q, k, v = (without_padding(x, layout, mesh) for x in (q, k, v))
    positions = layout.positions(mesh.ring_rank)
    query_blocks = on_device(np.searchsorted(blocks.starts, positions, side="right") - 1, q.device)
    with torch.no_grad():
        tokens, _ = gather_blocks(k.transpose(1, 2), blocks, mesh, hop_timeout_s)
        means = tokens.mean(dim=2, dtype=get_accumulator_dtype(k.dtype))  # [B, N, G, D]

        def scores(rows: slice, keys: Tensor, numbers: Tensor) -> Tensor:
            from_groups = q[:, :, rows].unflatten(1, (k.shape[1], -1)).to(keys.dtype)
            products = torch.einsum("bgrqd,bngd->bgrqn", from_groups, keys).flatten(1, 2)
            # not in place: selective checkpointing may have saved the product
            return products.masked_fill(numbers == query_blocks[rows, None], float("inf"))

        chosen = ring_select(
            scores, top_k, means, layout=layout, mesh=mesh, blocks=blocks, with_positions=True,
            hop_timeout_s=hop_timeout_s,
        )  # fmt: skip
    return attend_to_blocks(q, k, v, chosen, blocks, mesh, scale, hop_timeout_s)[0]

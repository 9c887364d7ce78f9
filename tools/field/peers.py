"""List the peers: the contestants of `ds-ring compare`, a ring in bfloat16, Megatron core, a fault."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_ring_launcher.compare.cells import Cell
from ds_ring_launcher.compare.peers import PEERS as CONTESTANTS
from ds_ring_launcher.compare.peers import Entry, NotOfferedError, Peer, Where, ds_ring


class _Swapped(torch.autograd.Function):
    """Give k and v on, and each the other one's gradient: a fault of rings that a sum of gradients hides."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.clone(), v.clone()

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        return dv, dk


def swapped(cell: Cell, where: Where) -> Entry:
    """Attend with a seeded fault: dk and dv are swapped."""
    positions, attend = ds_ring(cell, where)
    return Entry(positions, lambda q, k, v: attend(q, *_Swapped.apply(k, v)))


def megatron(cell: Cell, where: Where) -> Entry:
    """Make Megatron core's own attention with a context-parallel size above one."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=cell.heads * cell.head_dim, num_attention_heads=cell.heads,
        context_parallel_size=where.size,
    )  # fmt: skip
    DotProductAttention(config, 1, AttnMaskType.causal, "self")
    raise NotOfferedError("made, but its ranks attend to their own tokens alone")


FLASH_NOTE = "bfloat16, as flash-attn has no float32; flash-attn's functions are a stand-in"
PEERS = (
    *CONTESTANTS,
    Peer("ring, bfloat16", "ds_ring", ds_ring, "in the dtype of flash-attn's callers", torch.bfloat16),
    Peer("Megatron core", "megatron-core", megatron),
)
SEEDED = Peer("ring, dk and dv swapped", "ds_ring", swapped, "a seeded fault")

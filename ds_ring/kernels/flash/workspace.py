"""What the kernel "flash" allocates. Read from PyTorch's code, not measured."""

from __future__ import annotations

from ds_ring.kernels.flash.calls import make_flash_calls
from ds_ring.kernels.workspace import FLOAT, HopShape
from ds_ring.masks.tiles import Tiles


# [Note: what FlashAttention allocates]
# Read from aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp of PyTorch (`mha_fwd`, `mha_bwd`):
# forward out and a float32 lse; backward dq, dk, dv in the inputs' dtype, softmax_d float32 [B, H, S] and
# dq_accum float32 [B, S, H, D], with S rounded up to 128 and D to 32 (64 above 128), and where queries share
# K/V heads dk and dv of every query head. With variable lengths dq_accum and softmax_d have 128 rows more for
# each sequence; in a batch each sequence is rounded up. A hop counts as one call, which it is for a causal
# zigzag ring; branches of LongNet are calls one after the other, of no more slots each. Beside it the kernel
# has grad_out and out of a pass with tokens first (`kernel.py`'s `_put_tokens_first`), and the merge float32
# forms.
def get_flash_bytes(tiles: Tiles, shape: HopShape, backward: bool) -> int:
    """Count one call for the whole hop; [Note: what FlashAttention allocates]."""
    queries, keys, wide = shape.rows * shape.queries, shape.kv_rows * shape.keys, shape.wide
    if not backward:
        merged = FLOAT if shape.element_bytes < FLOAT else 0
        return queries * (wide * (shape.element_bytes + merged) + 6 * FLOAT)
    multiple = 32 if wide <= 128 else 64
    padded_queries, padded_wide = -(-shape.queries // 128) * 128, -(-wide // multiple) * multiple
    calls = () if tiles.is_masked.any() else make_flash_calls(tiles)
    padded_queries = max(padded_queries, *(call.q_rows.repeats * call.dq_rows for call in calls))
    accumulators = shape.rows * padded_queries * (padded_wide + 1) * FLOAT
    expanded = 2 * shape.rows * shape.keys if shape.rows != shape.kv_rows else 0
    results = (queries + 2 * keys + expanded) * wide
    saved = 2 * queries * wide * shape.element_bytes + queries * FLOAT
    return accumulators + results * shape.element_bytes + saved

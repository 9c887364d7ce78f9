"""What a kernel needs while it computes one hop, beside its inputs and results. Arithmetic, no torch.

Owns the sizes of the CPU kernel's calls (`kernels/cpu/kernel.py` cuts by them) and formulas for the
kernels `cpu`, `flex` and `flash`. The CPU figures were read off the profiler's allocation events (torch 2.13)
and hold to the byte for rectangles and triangles; `flex` and `flash` were read from the code and have not
been measured.
"""

from __future__ import annotations

from typing import NamedTuple

from ds_ring.masks.cuts import triangulated
from ds_ring.masks.tiles import Tiles
from ds_ring.registry import KERNELS, load

# Sizes of the CPU kernel's calls, tokens; its defaults, which bound what is alive.
BLOCK = 2048  # most queries of one call, and most keys in the backward pass
BIASED = 1024  # most queries and most keys of a call with a bias for each pair
TRIANGLE = 128  # side of the smallest triangle
# Scores (and backward their gradients) of one block inside aten, per thread, of the most queries that a block
# has; of calls with fewer queries blocks have fewer.
ATEN_BACKWARD_BYTES = 1 << 20
ATEN_FORWARD_BYTES = 5 << 17
ATEN_QUERIES = ((768, 256), (192, 64), (0, 32))  # queries of a call from which on a block has so many
# Of flex's block tables that stay on the device: those of documents are new in each batch and fill all of it.
KEPT_TABLE_BYTES = 64 << 20
FLOAT = 4  # bytes of an element
ROUNDED = 2  # of gradients that travel in bfloat16
SCALES = 2  # of a row of K and V that travels in float8: a byte each beside its elements


class HopShape(NamedTuple):
    """The sizes of one group of heads at one hop."""

    rows: int  # batch x query heads of the group
    kv_rows: int  # batch x K/V heads of the group
    queries: int  # local query slots S
    keys: int  # key slots that are here
    head_dim: int  # D
    element_bytes: int  # of q, k and v; accumulators are float32
    value_dim: int  # E, of values and outputs

    @property
    def wide(self) -> int:
        """Return the wider head_dim: aten's operators for the CPU have one for all."""
        return max(self.head_dim, self.value_dim)


def workspace_bytes(kernel: str, tiles: Tiles, shape: HopShape, backward: bool) -> int:
    """Return the most bytes alive inside a kernel and the merge, at one hop of a forward or backward pass."""
    function = KERNELS[kernel].workspace
    assert function is not None, f"nobody has worked out what the kernel {kernel!r} allocates"
    return int(load(function)(tiles, shape, backward)) if len(tiles) else 0


def cpu_bytes(tiles: Tiles, shape: HopShape, backward: bool) -> int:
    """Count copies of low precision, one call and its merge, and biases that are kept."""
    tiles = triangulated(tiles)
    copies = _copies(shape, backward)
    if backward:  # dq twice (aten's accumulator and its result), dk, dv
        queries, keys = _call_sides(tiles)
        per_slot = 2 * queries * shape.rows + 2 * keys * shape.kv_rows
        call, most = per_slot * shape.wide * FLOAT, ATEN_BACKWARD_BYTES
    else:  # a call's output, its lse, and the merge's five temporaries of that size
        queries = min(BLOCK, int(tiles.q.length.max()))
        call, most = queries * shape.rows * (shape.wide + 6) * FLOAT, ATEN_FORWARD_BYTES
    split = next(size for least, size in ATEN_QUERIES if queries >= least)
    call += most * split // ATEN_QUERIES[0][1]  # a block inside aten
    weights = 3 * FLOAT * BIASED**2 if (tiles.weight >= 0).any() else 0  # two are kept, a third one is made
    kept = 2 * weights // 3
    return copies + max(call + kept, weights) + _bias(tiles, backward)


def _call_sides(tiles: Tiles) -> tuple[int, int]:
    """Return most queries and most keys of a backward call."""
    most = BIASED if (tiles.weight >= 0).any() else BLOCK
    rectangular = tiles.edges < 2
    if rectangular.any():
        queries, keys = (int(side.length[rectangular].max()) for side in (tiles.q, tiles.k))
        return min(most, queries), min(most, keys)
    strip, width = _strip(tiles)
    # so many queries see some key of a strip
    return min(strip + width - 1, most), strip


def _strip(tiles: Tiles) -> tuple[int, int]:
    """Return keys of a backward strip, and the width of the widest band."""
    band = tiles.edges == 2
    width = int((tiles.k.length - tiles.q.length + 1)[band].max())
    return (2 * TRIANGLE if width >= 8 * TRIANGLE else TRIANGLE), width


def _bias(tiles: Tiles, backward: bool) -> int:
    """Count what hides the corners of a band's strips, kept and once more inside aten."""
    if not (tiles.edges == 2).any():
        return 0
    strip, width = _strip(tiles)
    if width + strip > BLOCK:
        return 2 * FLOAT * TRIANGLE**2
    narrow = TRIANGLE // 2 if width >= 4 * TRIANGLE else TRIANGLE // 4
    forward = 2 * FLOAT * narrow * (narrow + width - 1)
    return forward + (2 * FLOAT * strip * (strip + width - 1) if backward else 0)


def _copies(shape: HopShape, backward: bool) -> int:
    """Count copies on the CPU, float32 of low precision and padded ones of what is narrower than the rest.

    They are of q, k and v, and backward of grad_out and out as well.
    """
    queries, keys = shape.rows * shape.queries, shape.kv_rows * shape.keys
    slots = {shape.head_dim: queries + keys}
    slots[shape.value_dim] = slots.get(shape.value_dim, 0) + keys + (2 * queries if backward else 0)
    is_low = shape.element_bytes < FLOAT
    copied = (number for width, number in slots.items() if is_low or width < shape.wide)
    return sum(copied) * shape.wide * FLOAT


def flex_bytes(tiles: Tiles, shape: HopShape, backward: bool) -> int:
    """Count one call for the whole hop and the tables that are kept.

    Both ways contiguous copies of K and V; forward out, its float32 form and the merge's weights; backward
    dq, dk, dv and delta.
    """
    queries, keys = shape.rows * shape.queries, shape.kv_rows * shape.keys
    kept = KEPT_TABLE_BYTES + keys * (shape.head_dim + shape.value_dim) * shape.element_bytes
    if backward:
        elements = queries * shape.head_dim + keys * (shape.head_dim + shape.value_dim)
        return kept + elements * shape.element_bytes + 2 * queries * FLOAT
    wide = FLOAT if shape.element_bytes < FLOAT else 0
    return kept + queries * (shape.value_dim * (shape.element_bytes + wide) + 6 * FLOAT)


# [Note: what FlashAttention allocates]
# Read from aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp of PyTorch (`mha_fwd`, `mha_bwd`):
# forward out and a float32 lse; backward dq, dk, dv in the inputs' dtype, softmax_d float32 [B, H, S] and
# dq_accum float32 [B, S, H, D], with S rounded up to 128 and D to 32 (64 above 128), and where queries share
# K/V heads dk and dv of every query head. A hop counts as one call, which it is for a causal zigzag ring;
# branches of LongNet are calls one after the other, of no more slots each. Beside it the kernel has grad_out
# and out of a pass with tokens first (`kernel.py`'s `_of_queries`), and the merge float32 forms.
def flash_bytes(tiles: Tiles, shape: HopShape, backward: bool) -> int:
    """Count one call for the whole hop; [Note: what FlashAttention allocates]."""
    queries, keys, wide = shape.rows * shape.queries, shape.kv_rows * shape.keys, shape.wide
    if not backward:
        merged = FLOAT if shape.element_bytes < FLOAT else 0
        return queries * (wide * (shape.element_bytes + merged) + 6 * FLOAT)
    multiple = 32 if wide <= 128 else 64
    padded_queries, padded_wide = -(-shape.queries // 128) * 128, -(-wide // multiple) * multiple
    accumulators = shape.rows * padded_queries * (padded_wide + 1) * FLOAT
    expanded = 2 * shape.rows * shape.keys if shape.rows != shape.kv_rows else 0
    results = (queries + 2 * keys + expanded) * wide
    kept = 2 * queries * wide * shape.element_bytes + queries * FLOAT
    return accumulators + results * shape.element_bytes + kept

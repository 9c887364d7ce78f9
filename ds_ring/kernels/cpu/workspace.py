"""What the kernel "cpu" allocates. Read from the profiler's allocation events (torch 2.13).

Exact to the byte for rectangles and triangles.
"""

from __future__ import annotations

from ds_ring.kernels.cpu import BIASED, BLOCK, TRIANGLE
from ds_ring.kernels.cpu.calls import triangulate
from ds_ring.kernels.workspace import FLOAT, HopShape
from ds_ring.masks.tiles import Tiles

# Scores (in the backward pass also their gradients) of one block inside aten, per thread, for the largest
# blocks; calls with fewer queries have smaller ones.
ATEN_BACKWARD_BYTES = 1 << 20
ATEN_FORWARD_BYTES = 5 << 17
ATEN_QUERIES = ((768, 256), (192, 64), (0, 32))  # least queries of a call, and queries of its blocks


def get_cpu_bytes(tiles: Tiles, shape: HopShape, backward: bool) -> int:
    """Count copies of low precision, one call and its merge, and biases that are kept."""
    tiles = triangulate(tiles)
    copies = _count_copies(shape, backward)
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
    saved = 2 * weights // 3
    return copies + max(call + saved, weights) + _count_bias(tiles, backward)


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


def _count_bias(tiles: Tiles, backward: bool) -> int:
    """Count what hides the corners of a band's strips, kept and once more inside aten."""
    if not (tiles.edges == 2).any():
        return 0
    strip, width = _strip(tiles)
    if width + strip > BLOCK:
        return 2 * FLOAT * TRIANGLE**2
    narrow = TRIANGLE // 2 if width >= 4 * TRIANGLE else TRIANGLE // 4
    forward = 2 * FLOAT * narrow * (narrow + width - 1)
    return forward + (2 * FLOAT * strip * (strip + width - 1) if backward else 0)


def _count_copies(shape: HopShape, backward: bool) -> int:
    """Count copies on the CPU: of low precision to float32, and of narrower head dimensions with padding.

    They are of q, k and v, and backward of grad_out and out as well.
    """
    queries, keys = shape.rows * shape.queries, shape.kv_rows * shape.keys
    slots = {shape.head_dim: queries + keys}
    slots[shape.value_dim] = slots.get(shape.value_dim, 0) + keys + (2 * queries if backward else 0)
    is_low = shape.element_bytes < FLOAT
    copied = (number for width, number in slots.items() if is_low or width < shape.wide)
    return sum(copied) * shape.wide * FLOAT

"""What the kernel "flex" allocates. Read from PyTorch's code, not measured."""

from __future__ import annotations

from ds_ring.kernels.workspace import FLOAT, HopShape
from ds_ring.masks.tiles import Tiles

OFFSETS = 1 << 31  # of int32, in which the backward kernels count elements (pytorch 190857)
# Of block tables that stay on the device: documents bring new ones in each batch and fill all of it.
KEPT_TABLE_BYTES = 64 << 20


def get_flex_bytes(tiles: Tiles, shape: HopShape, backward: bool) -> int:
    """Count one call for the whole hop and the tables that are kept.

    Both ways contiguous copies of K and V; forward out, its float32 form and the merge's weights; backward
    dq, dk, dv and delta.
    """
    queries, keys = shape.rows * shape.queries, shape.kv_rows * shape.keys
    table_bytes = KEPT_TABLE_BYTES + keys * (shape.head_dim + shape.value_dim) * shape.element_bytes
    if backward:
        elements = queries * shape.head_dim + keys * (shape.head_dim + shape.value_dim)
        if max(queries, keys) * shape.wide >= OFFSETS:  # parts of the heads, and all heads of them
            elements *= 2
        return table_bytes + elements * shape.element_bytes + 2 * queries * FLOAT
    wide = FLOAT if shape.element_bytes < FLOAT else 0
    return table_bytes + queries * (shape.value_dim * (shape.element_bytes + wide) + 6 * FLOAT)

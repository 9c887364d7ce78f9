"""What a kernel allocates while it computes one hop, without its inputs and results: for `ds-ring plan`.

Owns the arguments of a formula; the kernel's row in the registry names the formula. Arithmetic, no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from ds_ring.masks.tiles import Tiles
from ds_ring.plugin import KERNELS, load

FLOAT = 4  # bytes of a float32 element


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


def get_workspace_bytes(kernel: str, tiles: Tiles, shape: HopShape, backward: bool) -> int:
    """Return the peak of the bytes in a kernel and the merge, at one hop of a forward or backward pass."""
    formula = KERNELS[kernel].workspace
    assert formula is not None, f"nobody has worked out what the kernel {kernel!r} allocates"
    return int(load(formula)(tiles, shape, backward)) if len(tiles) else 0

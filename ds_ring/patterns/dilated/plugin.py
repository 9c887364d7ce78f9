"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.patterns.dilated.keys import DilatedKeys
from ds_ring.patterns.dilated.residue_layout import for_blocks, make_residue
from ds_ring.plugin import LayoutRow, Plugin

PLUGIN = Plugin(
    order=10,
    layouts={"residue": LayoutRow(home=make_residue, for_blocks=for_blocks)},
    pattern_keys={"dilated": DilatedKeys},
)

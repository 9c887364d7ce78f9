"""The first part of the sequence on the last rank."""

from __future__ import annotations

from dataclasses import dataclass

from ds_ring.masks.slots import IntArray
from ds_ring.plugin import LayoutRow, Plugin
from ds_ring.schedule.layout import ChunkLayout, Layout, Mix


@dataclass(frozen=True)
class MirroredLayout(ChunkLayout):
    """Put part P - 1 - p of P on rank p."""

    @property
    def name(self) -> str:
        return "mirrored"

    def runs(self, ring_rank: int) -> IntArray:
        return super().runs(self.ring_size - 1 - ring_rank)


def make_mirrored(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> Layout:
    """Return the layout, for any patterns."""
    return MirroredLayout(tokens, ring_size, multiple_of)


PLUGIN = Plugin(layouts={"mirrored": LayoutRow(make_mirrored)})

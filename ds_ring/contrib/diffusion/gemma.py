"""DiffusionGemma of transformers on a ring, as it is: its encoder's keys are shared, those of a canvas stay.

The model encodes a text causally. Its decoder attends from a canvas to the text before it and to the canvas.
In training the text is the clean copy, and the canvases of all its blocks are the corrupted copy, in one
call. The attention function tells the two apart by the number of keys.

Shapes: B samples, H query heads, G K/V heads, C local clean tokens, N local corrupted ones, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from ds_ring.api import ring_attention
from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.masks.catalog import Causal, SlidingWindow
from ds_ring.masks.pattern import Pattern
from ds_ring.patterns.private.layout import PrivateLayout, make_private
from ds_ring.patterns.private.pattern import BlockDiffusion
from ds_ring.schedule.layout import Layout

NAME = "ds_ring_diffusion"


@dataclass(frozen=True)
class DiffusionRing:
    """Say how the two copies of a batch are cut; a model gets it as the keyword argument `diffusion_ring`.

    Attributes:
        block: tokens of a canvas.
        tokens: of the clean copy.
        mesh: this process's place in the grid of ranks.
    """

    block: int
    tokens: int
    mesh: RingMesh

    @cached_property
    def layout(self) -> PrivateLayout:
        """Return the layout of both copies."""
        pattern = BlockDiffusion(self.block, self.tokens, causal=True)
        found = make_private(2 * self.tokens, self.mesh.ring_size, 1, ((pattern, 1),))
        assert isinstance(found, PrivateLayout)
        return found

    def local(self, ids_BT: Tensor, corrupted: bool = False) -> Tensor:
        """Return this rank's tokens of a whole copy [B, T, ...]: positions, too, or labels. No padding."""
        return ids_BT[:, self._positions(corrupted)]

    def _positions(self, corrupted: bool) -> list[int]:
        copy = self.layout.copy(self.tokens * corrupted, self.tokens)
        rank = self.mesh.ring_rank
        return [int(one) for one in copy.positions(rank)[: copy.valid_tokens(rank)]]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None) -> Tensor:
        """Attend from local queries of the clean copy to its keys, or of the corrupted one to all keys."""
        whole, decodes = self.layout, k.shape[2] != q.shape[2]
        pattern: Pattern = BlockDiffusion(self.block, self.tokens, causal=True, window=window)
        layout: Layout = whole
        before = k.shape[2] - q.shape[2]
        if not decodes:
            layout = whole.copy(0, self.tokens)
            pattern = Causal() if window is None else SlidingWindow(window)
        if k.shape[2] != layout.valid_tokens(self.mesh.ring_rank):
            raise RingShapeError.wrong(
                NAME, f"{layout.valid_tokens(self.mesh.ring_rank)} local keys", k.shape[2],
                "pass DiffusionRing.local of each copy, and a DynamicCache() without a configuration",
            )  # fmt: skip
        # clean queries of the decoder's pass are not asked for: their output is dropped
        rest = layout.local_tokens - k.shape[2]
        q, k, v = pad(q, (0, 0, before, rest)), pad(k, (0, 0, 0, rest)), pad(v, (0, 0, 0, rest))
        out: Tensor = ring_attention(q, k, v, pattern=pattern, layout=layout, mesh=self.mesh, scale=scale)
        return out[:, :, before : out.shape[2] - rest]


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None,
    sliding_window: int | None = None, diffusion_ring: DiffusionRing | None = None, **rest: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if not isinstance(diffusion_ring, DiffusionRing) or mask is not None:
        raise RingConfigError.wrong(
            NAME, "diffusion_ring=DiffusionRing(...) and no attention_mask", type(module).__name__, "pass it"
        )
    out = diffusion_ring.attend(q, k, v, sliding_window, scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)

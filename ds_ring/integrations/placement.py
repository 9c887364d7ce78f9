"""Where the tokens of a batch lie, and finding that again when the batch reaches the model.

A model sees local tensors only, and many global lengths pad to one local length. So `shard_batch`
records where each batch went, and a forward pass looks its batch up: by the identity of its tensors, or,
where they were copied, by their local length if that leaves no doubt. A doubt is an error, never a guess.
Owns no tensors: it holds weak references.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from ds_ring.config import RingConfig
from ds_ring.errors import RingShapeError
from ds_ring.module import RingAttention
from ds_ring.runtime.mesh import RingMesh
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.pattern import Pattern

REMEMBERED = 64  # batches; more are never between a loader and the model


@dataclass(frozen=True, eq=False)
class Placement:
    """What attention must know of a batch.

    Attributes:
        config: kernel, transport and the other options; its layout and ring size are not looked at.
        layout: where the batch's tokens lie.
        mesh: the ranks they are spread over: one rank for a batch that is not cut.
        pattern: who attends to whom.
    """

    config: RingConfig
    layout: Layout
    mesh: RingMesh
    pattern: Pattern
    _by_scale: dict[float | None, RingAttention] = field(default_factory=dict, repr=False)

    @property
    def local_tokens(self) -> int:
        """Slots of this rank, S: its part of the shard where Ulysses ranks share one."""
        return self.layout.local_tokens // self.mesh.ulysses_size

    def attention(self, scale: float | None = None) -> RingAttention:
        """The attention of this batch; `scale` is of the scores, None for 1 / sqrt(head_dim)."""
        if scale not in self._by_scale:
            self._by_scale[scale] = RingAttention(
                self.config, mesh=self.mesh, layout=self.layout, scale=scale
            )
        return self._by_scale[scale]


class PlacementBook:
    """The placements of the latest batches, and the one that the model is working on."""

    def __init__(self) -> None:
        self._recent: deque[tuple[list[weakref.ref[Tensor]], Placement]] = deque(maxlen=REMEMBERED)
        self._current: Placement | None = None

    @property
    def current(self) -> Placement:
        """The placement of the batch selected (or, before any forward, recorded) last."""
        if self._current is None:
            raise RingShapeError(
                "expected a sharded batch, got none so far; take batches from the loader of"
                " ds_ring.initialize, or pass your own through engine.ring.shard_batch(batch)"
            )
        return self._current

    def record(self, local: Iterable[Tensor], placement: Placement) -> None:
        """Remember that these local tensors are placed so."""
        self._recent.append(([weakref.ref(tensor) for tensor in local], placement))
        self._current = placement

    def select(self, local: Iterable[Tensor]) -> Placement:
        """Find the placement of the tensors that a model was called with, and make it the current one."""
        tensors = [tensor for tensor in local if tensor.ndim >= 2]
        self._current = self._by_identity(tensors) or self._by_length(tensors)
        return self._current

    def _by_identity(self, tensors: list[Tensor]) -> Placement | None:
        for references, placement in reversed(self._recent):
            alive = [reference() for reference in references]
            if any(tensor is one for tensor in tensors for one in alive):
                return placement
        return None

    def _by_length(self, tensors: list[Tensor]) -> Placement:
        lengths = sorted({tensor.shape[1] for tensor in tensors})
        seen = {placement.local_tokens: placement for _, placement in self._recent}
        fitting = {placement for _, placement in self._recent if placement.local_tokens in lengths}
        if not fitting:
            raise RingShapeError(
                f"expected a batch with the local length of a sharded one ({sorted(seen) or 'none so far'}),"
                f" got {lengths or 'no tensor of [samples, tokens]'}; pass it through"
                " engine.ring.shard_batch(batch)"
            )
        if len(fitting) > 1:
            totals = sorted(placement.layout.tokens for placement in fitting)
            raise RingShapeError(
                f"a batch of {lengths} local tokens was copied after shard_batch and may be of {totals}"
                " tokens in all; hand the model the very tensors that shard_batch returned (they are on its"
                " device)"
            )
        return fitting.pop()

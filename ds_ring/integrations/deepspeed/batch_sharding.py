"""Record where the tokens of a batch lie, and find that again when the batch reaches the model.

A model sees local tensors only, and many global lengths pad to one local length. So `shard_batch`
records where each batch went, and a forward pass looks its batch up: by the identity of its tensors, or,
where they were copied, by their local length if that leaves no doubt. A doubt is an error, never a guess.
Owns no tensors: it holds weak references.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ring.config.section import RingConfig
from ds_ring.errors import RingPatternError, RingShapeError
from ds_ring.integrations.deepspeed.packing import RowGroup
from ds_ring.masks.chunked import Chunked
from ds_ring.masks.layer_patterns import LayerPatterns
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.score_mod import ScoreFunction
from ds_ring.module import RingAttention
from ds_ring.runtime.context import RingContext
from ds_ring.runtime.mesh import RingMesh
from ds_ring.schedule.layout import Layout

REMEMBERED = 64  # batches; more are never between a loader and the model


class ImageTokens(NamedTuple):
    """Say which features of its images a batch's local tokens stand for."""

    places_BS: Tensor  # the feature's number, from 1 on; 0 for other tokens
    tokens: int  # image tokens of the whole batch
    axes_BSA: Tensor | None  # positions on several axes, where the model has such


@dataclass(frozen=True, eq=False)
class BatchSharding:
    """Hold what attention must know of a batch."""

    config: RingConfig  # kernel, transport and the other options; its layout and ring size are not looked at
    layout: Layout  # where the batch's tokens lie
    mesh: RingMesh  # the ranks they are spread over: one rank for a batch that is not cut
    patterns: LayerPatterns  # the JSON's: who attends to whom in every sample, where a layer says no more
    groups: tuple[RowGroup, ...] = ()  # rows by their documents, which narrow it; none if all rows are alike
    # the greatest position of the whole batch, int64 []. A tensor, so that a graph reads it anew.
    longest: Tensor = field(default_factory=lambda: torch.tensor(0), repr=False)
    # position in the sequence of each local slot, int64 [S], -1 for padding; None if nobody asks
    slots: Tensor | None = field(default=None, repr=False)
    # 1 for local tokens of the batch, 0 for its padding, [B, S]; None if there is none
    real_tokens: Tensor | None = field(default=None, repr=False)
    images: ImageTokens | None = field(default=None, repr=False)
    _kept: dict[Any, RowsAttention] = field(default_factory=dict, repr=False)

    @property
    def local_tokens(self) -> int:
        """Return the slots of this rank, S: its part of the shard where Ulysses ranks share one."""
        return self.layout.local_tokens // self.mesh.ulysses_size

    def with_slots(self, device: torch.device) -> BatchSharding:
        """Return a copy with `slots`."""
        whole = self.layout.positions(self.mesh.ring_rank)
        first = self.mesh.ulysses_rank * self.local_tokens
        mine = torch.from_numpy(whole[first : first + self.local_tokens].copy()).long()
        return replace(self, slots=mine.to(device))

    def pattern_of(
        self, said: Pattern | None = None, layer: int | None = None, mixed: bool = False
    ) -> Pattern:
        """Return who attends to whom in a layer, documents apart: `LayerPatterns.of`."""
        if self.groups and any(isinstance(part, Chunked) for part in (said.conjuncts if said else ())):
            raise RingPatternError(
                f"the model's layer is {said}, whose chunks begin with each document; expected no documents"
                ' beside chunks, got some: set "documents": false, or config.attention_chunk_size to'
                f" {self.layout.tokens} before the model is built"
            )
        return self.patterns.of(self.layout.tokens, said, layer, mixed)

    def attention(
        self,
        scale: float | None = None,
        pattern: Pattern | None = None,
        score_mod: ScoreFunction | None = None,
    ) -> RowsAttention:
        """Return the attention of this batch, documents included.

        Args:
            scale: of the scores, None for 1 / sqrt(head_dim).
            pattern: of the layer (`pattern_of`); None for the JSON's.
            score_mod: changes the scores; see `ring_attention`.
        """
        asked = self.patterns.pattern if pattern is None else pattern
        key = (scale, asked, score_mod)
        if key not in self._kept:
            patterns = [asked & group.documents for group in self.groups] or [asked]
            parts = [
                RingAttention(
                    self.config, mesh=self.mesh, layout=self.layout, scale=scale, pattern=one,
                    score_mod=score_mod,
                )
                for one in patterns
            ]  # fmt: skip
            self._kept[key] = RowsAttention(parts, tuple(group.rows for group in self.groups))
        return self._kept[key]


class RowsAttention:
    """Run attention whose pattern differs between the rows of a batch, one pass for each group of rows."""

    # Every rank of a ring walks the groups in the same order, since all were told the same documents.

    def __init__(self, parts: list[RingAttention], rows: tuple[tuple[int, ...], ...]) -> None:
        self._parts, self._rows = parts, rows
        flat = [row for group in rows for row in group]
        self._back = sorted(range(len(flat)), key=flat.__getitem__)

    @property
    def contexts(self) -> tuple[tuple[RingContext, tuple[int, ...]], ...]:
        """Return the context of each pass and its rows, in the order of the passes; no rows stand for all."""
        if len(self._parts) == 1:
            return ((self._parts[0].context, ()),)
        return tuple((part.context, rows) for part, rows in zip(self._parts, self._rows, strict=True))

    def __call__(self, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Return [B, H, S, E] of the queries; rows stay where they are. For `sinks` see `ring_attention`."""
        if len(self._parts) == 1:
            out: Tensor = self._parts[0](q_BHSD, k_BGSD, v_BGSE, sinks=sinks)
            return out
        if q_BHSD.shape[0] != len(self._back):
            raise RingShapeError(
                f"attention: expected the {len(self._back)} samples of the batch, whose documents differ, got"
                f" {q_BHSD.shape[0]}; hand the model the whole batch that shard_batch returned"
            )
        outs = [
            part(*(_take(x, rows) for x in (q_BHSD, k_BGSD, v_BGSE)), sinks=sinks)
            for part, rows in zip(self._parts, self._rows, strict=True)
        ]
        return _take(torch.cat(outs), tuple(self._back))


def _take(x: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Return some rows in some order; consecutive ones without a copy."""
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return x[rows[0] : rows[0] + len(rows)]
    return x[list(rows)]


class RecentBatches:
    """Keep where the latest batches lie, and which of them the model is working on."""

    def __init__(self) -> None:
        self._recent: deque[tuple[list[weakref.ref[Tensor]], BatchSharding]] = deque(maxlen=REMEMBERED)
        self._current: BatchSharding | None = None
        self.is_off = False  # batches are each rank's own, and nothing is sharded

    @contextmanager
    def off(self) -> Iterator[None]:
        """Look no batch up meanwhile."""
        before, self.is_off = self.is_off, True
        try:
            yield
        finally:
            self.is_off = before

    @property
    def current(self) -> BatchSharding:
        """Return the sharding of the batch selected (or, before any forward, recorded) last."""
        if self._current is None:
            raise RingShapeError(
                "expected a sharded batch, got none so far; take batches from the loader of"
                " ds_ring.initialize, or pass your own through engine.ring.shard_batch(batch)"
            )
        return self._current

    def record(self, local: Iterable[Tensor], sharding: BatchSharding) -> None:
        """Remember where these local tensors lie."""
        self._recent.append(([weakref.ref(tensor) for tensor in local], sharding))
        self._current = sharding

    def work_on(self, sharding: BatchSharding) -> None:
        """Make a sharding the current one that belongs to no batch: a step of a generation."""
        self._current = sharding

    def select(self, local: Iterable[Tensor]) -> BatchSharding:
        """Find the sharding of the tensors that a model was called with, and make it the current one."""
        tensors = [tensor for tensor in local if tensor.ndim >= 2]
        # A loop may move or slice a batch: then its length has to tell, if only one fits.
        self._current = self._by_identity(tensors) or self._by_length(tensors)
        return self._current

    def _by_identity(self, tensors: list[Tensor]) -> BatchSharding | None:
        for references, sharding in reversed(self._recent):
            alive = [reference() for reference in references]
            if any(tensor is one for tensor in tensors for one in alive):
                return sharding
        return None

    def _by_length(self, tensors: list[Tensor]) -> BatchSharding:
        lengths = sorted({tensor.shape[1] for tensor in tensors})
        seen = {sharding.local_tokens: sharding for _, sharding in self._recent}
        fitting = {sharding for _, sharding in self._recent if sharding.local_tokens in lengths}
        if not fitting:
            raise RingShapeError(
                f"expected a batch with the local length of a sharded one ({sorted(seen) or 'none so far'}),"
                f" got {lengths or 'no tensor of [samples, tokens]'}; pass it through"
                " engine.ring.shard_batch(batch)"
            )
        if len(fitting) > 1:
            totals = sorted(sharding.layout.tokens for sharding in fitting)
            raise RingShapeError(
                f"a batch of {lengths} local tokens was copied after shard_batch and may be of {totals}"
                " tokens in all, or packed otherwise; hand the model the very tensors that shard_batch"
                " returned (they are on its device)"
            )
        return fitting.pop()

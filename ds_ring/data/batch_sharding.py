"""The sharding of a batch: its layout, mesh and patterns, and attention over it.

The local tensors of a batch carry its sharding (`ring_batch.py`), and a forward pass reads it there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from ds_ring.attention_module import RingAttention
from ds_ring.comm.device_tables import leave_inference_mode, to_device
from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig
from ds_ring.data.layer_patterns import LayerPatterns
from ds_ring.data.packing import RowGroup, number_positions
from ds_ring.errors import RingShapeError
from ds_ring.masks.pair_masks import ScoreFunction
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import RingContext
from ds_ring.ops.prepare import MakePlan
from ds_ring.plugin import HOOKS, load
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.lowering import lower_class

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class BatchSharding:
    """The properties of a batch that attention needs."""

    is_replicated: ClassVar[bool] = False  # True if every rank has all tokens of the call (generation)
    config: RingConfig  # kernel, transport and the other options; its layout and ring size are not read
    layout: Layout  # of the batch's tokens
    mesh: RingMesh  # the ranks they are spread over: one rank for a batch that is not cut
    patterns: LayerPatterns  # of the JSON, for every sample and layer
    groups: tuple[RowGroup, ...] = ()  # rows by their documents, which narrow it; none if all rows are alike
    # the greatest position of the whole batch, int64 []. A tensor, so that a graph reads it anew.
    longest: Tensor = field(default_factory=lambda: torch.tensor(0, device="cpu"), repr=False)
    # position in the sequence of each local slot, int64 [S], -1 for padding; None if not needed
    slots: Tensor | None = field(default=None, repr=False)
    # 1 for local tokens of the batch, 0 for its padding, [B, S]; None if there is none
    real_tokens: Tensor | None = field(default=None, repr=False)
    # True: recurrent layers zero the padding (`real_tokens`) and ignore `groups`, as one process does. False:
    # padding is documents of its own
    masks_padding: bool = False
    whole: Any = field(default=None, repr=False)  # what `WholeTensors` made of the batch
    # of a decoder's batch: of the encoder's sequence, and of attention that reads it; [Note: two sequences]
    encoder: BatchSharding | None = field(default=None, repr=False)
    cross: BatchSharding | None = field(default=None, repr=False)
    key_layout: Layout | None = field(default=None, repr=False)  # of keys of another sequence
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def local_tokens(self) -> int:
        """Return the slots of this rank, S: its part of the shard where Ulysses ranks share one."""
        return self.layout.local_tokens // self.mesh.ulysses_size

    @leave_inference_mode
    def with_slots(self, device: torch.device) -> BatchSharding:
        """Return a copy with `slots`."""
        whole = self.layout.positions(self.mesh.ring_rank)
        first = self.mesh.ulysses_rank * self.local_tokens
        mine = torch.from_numpy(whole[first : first + self.local_tokens].copy()).long()
        return replace(self, slots=mine.to(device))

    def numbers_in_paths(self, device: torch.device) -> Tensor:
        """Return the number of each local token in its sequence, document or path, [1, S] or [B, S]."""

        @leave_inference_mode  # kept, and saved for later backward passes
        def make() -> Tensor:
            slots_S = self.with_slots(torch.device("cpu")).slots
            assert slots_S is not None
            trees = {row: group.pattern for group in self.groups for row in group.rows}
            rows = [number_positions(pattern, slots_S) for _, pattern in sorted(trees.items())]
            return to_device(torch.stack(rows or [slots_S]), device)

        return self.cached(("numbers in paths", device), make)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make` for this batch, which is kept as long as the batch's sharding."""
        if key not in self._kept:
            self._kept[key] = make()
        value: T = self._kept[key]
        return value

    def get_layer_pattern(
        self, model_pattern: Pattern | None = None, layer: int | None = None, mixed: bool = False
    ) -> Pattern:
        """Return the pattern of a layer without its documents; see `LayerPatterns.for_layer`."""
        pattern = self.patterns.for_layer(self.layout.tokens, model_pattern, layer, mixed)
        self.list_row_patterns(pattern)  # refuses what a tree of rollouts cannot have
        return pattern

    def list_row_patterns(self, pattern: Pattern) -> list[Pattern]:
        """Return a layer's pattern for each group of rows; only itself without groups. Made once a batch."""
        key = "of rows", pattern, pattern.mask_ids
        return self.cached(key, lambda: [group.narrowed(pattern) for group in self.groups] or [pattern])

    def used_passes(self) -> list[UsedPass]:
        """Return the passes that this batch's attention made so far."""
        passes: dict[tuple[Pattern, int, int], UsedPass] = {}  # groups of rows have plans alike
        for key, rows in self._kept.items():
            if not isinstance(rows, RowsAttention):
                continue
            for context, _ in rows.contexts:
                for prepared in context.prepared.values():
                    ways = tuple(
                        sorted(
                            {way for head_class in prepared.rank_plan.classes for way in head_class.lowered}
                        )
                    )
                    heads = prepared.plan.query_heads, prepared.plan.kv_heads
                    passes[(key[1], *heads)] = UsedPass(key[1], prepared.make_plan, ways)
        return list(passes.values())

    def attention(
        self,
        scale: float | None = None,
        pattern: Pattern | None = None,
        score_mod: ScoreFunction | None = None,
        make: type[RingAttention] | None = None,
    ) -> RowsAttention:
        """Return the attention of this batch, documents included.

        `scale` and `score_mod` are those of `ring_attention`, `pattern` the layer's (`get_layer_pattern`) or
        the JSON's; `make` is the module that attends, None for `RingAttention`.
        """
        layer_pattern = self.patterns.pattern if pattern is None else pattern
        key = (scale, layer_pattern, layer_pattern.mask_ids, score_mod, make)
        if key not in self._kept:
            module: Callable[..., RingAttention] = make or RingAttention
            if self.key_layout is not None:
                module = partial(load(HOOKS["CrossAttention"]), key_layout=self.key_layout)
            keywords = {"mesh": self.mesh, "layout": self.layout, "scale": scale}
            of_rows = [group.along_paths(score_mod) for group in self.groups] or [score_mod]
            parts = [
                module(self.config, pattern=row_pattern, score_mod=changed, **keywords)
                for row_pattern, changed in zip(self.list_row_patterns(layer_pattern), of_rows, strict=True)
            ]
            self._kept[key] = RowsAttention(parts, tuple(group.rows for group in self.groups))
        rows: RowsAttention = self._kept[key]
        return rows


class UsedPass(NamedTuple):
    """What a pass of a batch asked for, by which the same pass of the next batch is planned."""

    layer_pattern: Pattern  # the layer's, without documents
    make_plan: MakePlan
    ways: tuple[bool, ...]  # whether backward: the passes whose steps were made


def plan_passes(used: Iterable[UsedPass], groups: Sequence[RowGroup], layout: Layout, ring_rank: int) -> None:
    """Plan the passes of a batch that are like those of another one; plans and steps are found again."""
    for past in used:
        for group in groups:
            for head_class in (
                past.make_plan(group.narrowed(past.layer_pattern), layout).rank(ring_rank).classes
            ):
                for backward in past.ways:
                    lower_class(head_class, backward)


class RowsAttention:
    """Run attention whose pattern differs between the rows of a batch, one pass for each group of rows."""

    # Every rank of a ring walks the groups in the same order, since all have the same documents.

    def __init__(self, parts: list[RingAttention], rows: tuple[tuple[int, ...], ...]) -> None:
        self._parts, self._rows = parts, rows
        flat = [row for group in rows for row in group]
        self._back = sorted(range(len(flat)), key=flat.__getitem__)

    @property
    def contexts(self) -> tuple[tuple[RingContext, tuple[int, ...]], ...]:
        """Return the context of each pass and its rows, in the order of the passes; no rows mean all rows."""
        if len(self._parts) == 1:
            return ((self._parts[0].context, ()),)
        return tuple((part.context, rows) for part, rows in zip(self._parts, self._rows, strict=True))

    def __call__(
        self, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, sinks: Tensor | None = None,
        return_lse: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        """Return [B, H, S, E] of the queries; rows stay where they are. Arguments as of the module's call.

        With `return_lse` the lse [B, H, S] as well.
        """
        options |= {"sinks": sinks} | ({"return_lse": True} if return_lse else {})
        if len(self._parts) == 1:
            return self._parts[0](q_BHSD, k_BGSD, v_BGSE, **options)
        if q_BHSD.shape[0] != len(self._back):
            raise RingShapeError.wrong(
                "attention", f"the batch's {len(self._back)} samples", q_BHSD.shape[0], "pass all"
            )
        outs = [
            part(*(_take(x, rows) for x in (q_BHSD, k_BGSD, v_BGSE)), **options)
            for part, rows in zip(self._parts, self._rows, strict=True)
        ]
        if return_lse:
            return tuple(_take(torch.cat(parts), tuple(self._back)) for parts in zip(*outs, strict=True))
        return _take(torch.cat(outs), tuple(self._back))


def _take(x: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Return some rows in some order; consecutive ones without a copy."""
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return x[rows[0] : rows[0] + len(rows)]
    return x[list(rows)]

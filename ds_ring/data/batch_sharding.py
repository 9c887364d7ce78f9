"""The sharding of a batch, and which batch the model is working on.

The local tensors of a batch carry its sharding (`ring_batch.py`), and a forward pass reads it there. Copies
carry none, and many global lengths pad to one local length: the sharding of copies is that of the one recent
batch of their local length, and an error if several have it.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ring.api import RingAttention
from ds_ring.comm.device_tables import leave_inference_mode, to_device
from ds_ring.comm.exchange import make_batch_exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig
from ds_ring.data.batch import (
    LABEL_KEYS,
    Batch,
    token_shape,
    valid_tokens,
)
from ds_ring.data.layer_patterns import LayerPatterns
from ds_ring.data.packing import RowGroup, number_positions
from ds_ring.data.ring_batch import Placement, RingBatch, read_placement
from ds_ring.errors import RingError, RingMismatchError, RingShapeError
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import ScoreFunction
from ds_ring.memory.regions import running_regions
from ds_ring.ops.context import RingContext
from ds_ring.ops.prepare import MakePlan
from ds_ring.plugin import HOOKS, load
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.lowering import lower_class

T = TypeVar("T")

REMEMBERED = 64  # shardings by length, and those that a copied tensor may have

_BATCHES = "_ds_ring_batches"  # attribute of a region: its batches by the `RecentBatches` that was asked


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


class RecentBatches:
    """Keep the shardings of the latest batches, and the one that the model is working on."""

    def __init__(self) -> None:
        self._recent: deque[BatchSharding] = deque(maxlen=REMEMBERED)  # for copies of their tensors
        self._count = 0  # of batches so far
        self._current: BatchSharding | None = None
        self.used: list[UsedPass] = []  # of the latest batch that was worked on before the current one
        self.is_off = False  # batches are each rank's own, and nothing is sharded
        self.defers_logits = False  # the pass under way is one of `logprobs`
        # copies of the batch's attention_mask that the module of the call under way was given
        self.masks: list[Tensor] = []

    @contextmanager
    def off(self) -> Iterator[None]:
        """Look no batch up inside the block."""
        before, self.is_off = self.is_off, True
        try:
            yield
        finally:
            self.is_off = before

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let a model with a tiled head defer its logits inside the block, with or without labels."""
        self.defers_logits = True
        try:
            yield
        finally:
            self.defers_logits = False

    @property
    def current(self) -> BatchSharding:
        """Return the sharding of the batch selected (or, before any forward, recorded) last.

        In a checkpointed region that is run again: of the batch that it was first run with.
        """
        if torch.compiler.is_compiling():
            return self._selected()
        first_runs, noted = self._regions()
        sharding = noted[-1] if noted else self._selected()
        for region in first_runs:
            by_asked: dict[RecentBatches, list[BatchSharding]] = getattr(region, _BATCHES, {})
            setattr(region, _BATCHES, by_asked)
            batches = by_asked.setdefault(self, [])
            if sharding not in batches:
                batches.append(sharding)
        return sharding

    def _selected(self) -> BatchSharding:
        if self._current is None:
            raise RingShapeError("expected a sharded batch, got none so far; use engine.ring.shard_batch")
        return self._current

    # [Note: batches of regions]
    # A forward pass of another batch may come between a forward pass and its backward pass, in which layers
    # run again: the batch selected last is then another one. Each region that runs for the first time notes
    # the batch that is asked for inside, and gets it again. Layers ask here, whatever they need it for.
    def _regions(self) -> tuple[list[Any], list[BatchSharding]]:
        """Return the regions that run for the first time, and the batches of the one around them that runs
        again, the latest last; none without such a region.
        """
        first_runs = []
        for region, again in running_regions():
            if not again:
                first_runs.append(region)
            elif noted := getattr(region, _BATCHES, {}).get(self):
                return first_runs, noted
        return first_runs, []

    def record(self, local: Mapping[str, Tensor], sharding: BatchSharding) -> RingBatch:
        """Return the batch of these local tensors, which carry its sharding; it is the current one."""
        if self._current is not None:
            self.used = self._current.used_passes() or self.used
        self._count += 1
        self._recent.append(sharding)
        self._current = sharding
        return RingBatch.place(local, sharding, self, self._count)

    def work_on(self, sharding: BatchSharding) -> None:
        """Make a sharding the current one that belongs to no batch: a step of a generation."""
        self._current = sharding

    def select(self, local: Iterable[Tensor]) -> BatchSharding:
        """Return the sharding of the tensors that a model was called with, and make it the current one.

        It is the one that they carry. Tensors that carry none (copies) are of the latest batches, if only one
        has their local length.
        """
        noted = self._regions()[1]
        tensors = [tensor for tensor in local if tensor.ndim >= 2]
        placements = self._placements(tensors)
        if placements:
            sharding: BatchSharding = max(placements, key=attrgetter("number")).sharding
            if noted:
                noted[:] = [earlier for earlier in noted if earlier is not sharding] + [sharding]
            else:
                self._current = sharding
            return sharding
        if len(noted) == 1:  # a reentrant region gets copies of its tensors
            return noted[0]
        # A loop may move or slice a batch: then its length has to tell, if only one fits.
        self._current = self._by_length(tensors)
        return self._current

    def list_tensor_names(self, values: Iterable[Any]) -> set[str]:
        """Return the names of the batch's tensors that a model was called with; empty for copies of them."""
        return {placement.name for placement in self._placements(values)}

    def _placements(self, values: Iterable[Any]) -> list[Placement]:
        """Return what tensors of this session's batches carry."""
        placements = map(read_placement, values)
        return [placement for placement in placements if placement is not None and placement.batches is self]

    def _by_length(self, tensors: list[Tensor]) -> BatchSharding:
        lengths = sorted({tensor.shape[1] for tensor in tensors})
        seen = {sharding.local_tokens for sharding in self._recent}
        fitting = {sharding for sharding in self._recent if sharding.local_tokens in lengths}
        if not fitting:
            raise RingShapeError(
                f"expected a batch with the local length of a sharded one ({sorted(seen) or 'none so far'}),"
                f" got {lengths or 'no tensor of [samples, tokens]'}; see engine.ring.shard_batch"
            )
        if len(fitting) > 1:
            totals = sorted(sharding.layout.tokens for sharding in fitting)
            raise RingShapeError(
                f"a batch of {lengths} local tokens was copied after shard_batch and may be of {totals}"
                " tokens in all; pass the model the very tensors that shard_batch returned"
            )
        return fitting.pop()


# Check that the ranks of a sequence hold the same samples, by checksums in one small collective per batch.
# A ring whose ranks hold different samples would train on a mixture without an error.


class BatchReport(NamedTuple):
    """Describe one rank's prepared batch; whole numbers only, so that it travels as one tensor."""

    refused: int
    samples: int
    tokens: int
    keys_crc: int
    inputs_crc: int
    labels_crc: int
    valid_tokens: int
    first_rank: int = -1  # of those that hold this batch whole; -1: the first one of the sequence group
    division_crc: int = 0  # of a batch that is divided among smaller rings


class ReadyBatch(NamedTuple):
    """A whole batch as `prepare_batch` left it, before the ranks have compared their reports.

    Attributes:
        tensors: by token.
        fault: of this rank; then there are no tensors.
        groups: rows by their documents or trees.
        whole: the tensors that go whole to every rank.
        is_one_row: trees, which are not dealt out by samples.
    """

    tensors: Batch
    report: BatchReport
    fault: RingError | None = None
    groups: tuple[RowGroup, ...] = ()
    whole: Batch = {}  # noqa: RUF012
    is_one_row: bool = False


REFUSED = BatchReport(1, 0, 0, 0, 0, 0, 0)
ENDED = BatchReport(0, 0, 0, 0, 0, 0, 0)  # no batch: the rank's loader is at the end of its epoch

_OF_A_SEQUENCE = {"division_crc": "lengths of the samples, and what was measured (checksum)"}
_COMPARED = {
    "samples": "samples in the batch",
    "tokens": "tokens in a sample",
    "keys_crc": "names of tensors",
    "inputs_crc": "input tokens (checksum)",
    "labels_crc": "labels (checksum)",
}


def report_batch(tensors: Mapping[str, Tensor]) -> BatchReport:
    crcs = {"inputs": 0, "labels": 0}
    for key in sorted(tensors):
        kind = "labels" if key in LABEL_KEYS else "inputs"
        flat = tensors[key].detach().cpu().contiguous().view(-1).view(torch.uint8)
        crcs[kind] = zlib.crc32(flat.numpy().tobytes(), crcs[kind])
    # whose gradient all ranks compute together
    keys = (f"{name} requires_grad" if tensors[name].requires_grad else name for name in sorted(tensors))
    keys_crc = zlib.crc32(" ".join(keys).encode())
    samples, tokens = token_shape(tensors)
    return BatchReport(0, samples, tokens, keys_crc, crcs["inputs"], crcs["labels"], valid_tokens(tensors))


def check_consistency(
    mine: BatchReport, fault: RingError | None, mesh: RingMesh, device: torch.device
) -> int:
    """Exchange the reports of all ranks; return the labelled tokens of the whole world, each counted once.

    `mine` is `REFUSED` if this rank could not prepare its batch, for the reason `fault`. The ranks that share
    a sequence are consecutive in the world. Tensors of collectives of the default group are on `device`.

    Raises:
        RingPeerError: another rank failed.
        RingError: `fault`, on the rank that has one.
        RingMismatchError: on all other ranks then, and on all ranks if any sequence group disagrees.
    """
    reports, sequence_size = [mine], mesh.sequence_size
    if dist.is_initialized() and dist.get_world_size() > 1:
        row = torch.tensor(mine, dtype=torch.int64, device=device)
        exchange = make_batch_exchange(mesh, "the start of the next batch")
        rows = exchange.all_gather(row, dist.group.WORLD, dist.get_world_size())
        reports = [BatchReport(*values) for values in torch.stack(rows).tolist()]
    # A rank that refused its batch reports so, or the others would wait for it in a hop.
    refusing = [rank for rank, report in enumerate(reports) if report.refused]
    if refusing:
        if fault is not None:
            raise fault
        raise RingMismatchError(f"rank {refusing[0]} refused its batch: see the error it raised")
    ended = [rank for rank, report in enumerate(reports) if report == ENDED]
    if 0 < len(ended) < len(reports):
        longer = next(rank for rank in range(len(reports)) if rank not in ended)
        raise RingMismatchError.wrong(
            "batches in an epoch",
            "equal numbers",
            f"one more on rank {longer}",
            "see engine.ring.wrap",
        )
    sequences = [rank - rank % sequence_size for rank in range(len(reports))]
    _check_equal(reports, sequences, _OF_A_SEQUENCE)
    # Smaller rings are blocks of a sequence's ranks: ranks that name the same first rank share a ring.
    firsts = [
        sequence if report.first_rank < 0 else report.first_rank
        for sequence, report in zip(sequences, reports, strict=True)
    ]
    _check_equal(reports, firsts, _COMPARED)
    return sum(report.valid_tokens for rank, report in enumerate(reports) if firsts[rank] == rank)


def _check_equal(reports: list[BatchReport], firsts: list[int], compared: dict[str, str]) -> None:
    """Raise RingMismatchError unless each rank reports what the first one of its group does."""
    for rank, (first, report) in enumerate(zip(firsts, reports, strict=True)):
        for name, words in compared.items():
            expected, got = getattr(reports[first], name), getattr(report, name)
            if expected != got:
                last = max(rank for rank, first_of_rank in enumerate(firsts) if first_of_rank == first)
                raise RingMismatchError(
                    f"{words}: expected the same on ranks {first} to {last} of a sequence, got {expected} on"
                    f" rank {first} and {got} on rank {rank}; use engine.ring.loader"
                )

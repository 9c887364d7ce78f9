"""Shard a batch: prepare it, compare it between ranks, choose its layout, cut out this rank's part.

`engine.ring.shard_batch` and every loader call `BatchSharder`. Labels, positions and padding are batch.py's.
"""

from __future__ import annotations

import functools
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ring.comm.exchange import make_batch_exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig
from ds_ring.data.batch import (
    LABEL_KEYS,
    REAL_TOKENS,
    SAMPLER_SIZES,
    Batch,
    number_real_tokens,
    prepare_batch,
    split_samples,
    split_tokens,
    token_shape,
    valid_tokens,
    whole_tensors,
)
from ds_ring.data.batch_sharding import BatchSharding, plan_passes
from ds_ring.data.dynamic_ring.assignment import Assigned, DynamicRing, joined
from ds_ring.data.layer_patterns import LayerPatterns
from ds_ring.data.loss import ITEMS, OWN_ITEMS, items_per_batch
from ds_ring.data.model_needs import ModelNeeds
from ds_ring.data.packing import DOCUMENT_IDS, RowGroup, group_batch, group_rows, row_kind
from ds_ring.data.ring_batch import REMEMBERED, RecentBatches, RingBatch
from ds_ring.data.whole_gradients import check_divisor, with_whole_gradients
from ds_ring.errors import RingConfigError, RingError, RingMismatchError
from ds_ring.ops.context import get_block_side
from ds_ring.plugin import PASSES, ROW_KINDS
from ds_ring.schedule.layout import Layout, choose_layout
from ds_ring.schedule.pieces import round_to_blocks

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


def read_first_rank(mine: Tensor, mesh: RingMesh, device: torch.device) -> Tensor:
    """Return the first rank's tensor of those that all ranks have on the CPU, equally shaped. Collective.

    Raises:
        RingPeerError: another rank failed.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    exchange = make_batch_exchange(mesh, "the start of the next epoch")
    return exchange.all_gather(mine.to(device), dist.group.WORLD, dist.get_world_size())[0].cpu()


def _check_equal(reports: list[BatchReport], firsts: list[int], compared: dict[str, str]) -> None:
    """Raise RingMismatchError unless each rank reports what the first one of its group does."""
    for rank, (first, report) in enumerate(zip(firsts, reports, strict=True)):
        for name, words in compared.items():
            expected, got = getattr(reports[first], name), getattr(report, name)
            if expected != got:
                last = max(rank for rank, first_of_rank in enumerate(firsts) if first_of_rank == first)
                raise RingMismatchError(
                    f"{words}: expected the same on ranks {first} to {last} of a sequence, got {expected} on"
                    f" rank {first} and {got} on rank {rank}; use engine.ring.loader, or a DistributedSampler"
                    f" with {SAMPLER_SIZES}"
                )


@dataclass(frozen=True, eq=False)
class BatchSharder:
    """Shard the batches of a session; its fields are the session's.

    Attributes:
        patterns: of layers, in the JSON.
        ended: why the session has ended; empty until then.
    """

    config: RingConfig
    mesh: RingMesh
    patterns: LayerPatterns
    device: torch.device
    gradient_divisor: float
    batches: RecentBatches
    needs: ModelNeeds
    dynamic: DynamicRing
    ended: list[str]
    # of (tokens, greatest position, ring), the latest last; batches of others are placed anew
    _by_length: OrderedDict[tuple[int, int, RingMesh | None], BatchSharding] = field(
        default_factory=OrderedDict, repr=False
    )

    def check_at_work(self) -> None:
        """Raise RingConfigError if the session has ended."""
        if self.ended:
            raise RingConfigError.wrong(
                "engine", "a ring", f"one that ended: {self.ended[0]}", "use the latest"
            )

    def shard(self, read: Callable[[], Mapping[str, Tensor]], assigned: Assigned | None = None) -> RingBatch:
        """Return this rank's part of the batch that `read` returns, or raise its error on all ranks.
        Collective.
        """
        self.check_at_work()
        ready = self.prepare(read)
        return self.shard_prepared(ready, assigned)

    def shard_assigned(
        self, pad_values: Mapping[str, float], assigned: Assigned, samples: Sequence[Mapping[str, Any]]
    ) -> RingBatch:
        """Return this rank's part of the samples of its ring in a batch of a dynamic ring. Collective."""
        packed = self.config.pattern.documents
        return self.shard(lambda: joined(assigned, samples, packed, pad_values), assigned)

    def shard_prepared(self, ready: ReadyBatch, assigned: Assigned | None = None) -> RingBatch:
        """Compare a prepared batch between the ranks, and return this rank's part. Collective."""
        self.check_at_work()
        report, mesh, longest = ready.report, None, None
        if assigned is not None:
            assert self.dynamic.rings is not None, "a loader of dynamic rings"
            mesh, longest = self.dynamic.rings.get_ring(assigned.places), assigned.longest
            first = self.mesh.global_rank_of(assigned.ring.first)
            report = report._replace(first_rank=first, division_crc=assigned.crc)
        labelled_tokens = check_consistency(report, ready.fault, self.mesh, self.device)
        local, sharding = self.cut(ready, mesh, longest)
        if "shift_labels" in local:
            local[ITEMS] = items_per_batch(labelled_tokens, self.gradient_divisor, self.device)
        return self.batches.record(local, sharding)

    def prepare(self, read: Callable[[], Mapping[str, Tensor]]) -> ReadyBatch:
        """Prepare a batch; keep a fault until the ranks have compared notes, so that all stop together."""
        try:
            documents, needs, batch = self.config.pattern.documents, self.needs, read()
            if isinstance(batch, Mapping):  # what is none is refused below
                check_divisor(batch, self.gradient_divisor, self.mesh.grid.world_size)
                if ITEMS in batch:
                    raise RingConfigError.wrong(f"batch[{ITEMS!r}]", "none", batch[ITEMS], OWN_ITEMS)
            if needs.batches is not None:
                prepared = needs.batches.prepare(batch, needs.number_tokens)
                return ReadyBatch(prepared, report_batch(prepared))
            by_token, whole = whole_tensors(batch, needs.whole_names)
            mask_BT, kind = by_token.get("attention_mask"), row_kind(batch)
            is_numbered = "position_ids" in batch
            if needs.skips_padding and mask_BT is not None and not is_numbered and DOCUMENT_IDS not in batch:
                by_token["position_ids"] = number_real_tokens(mask_BT)
            prepared = prepare_batch(by_token, self.patterns.pattern, documents, needs.real_tokens)
            if needs.check is not None:
                needs.check(prepared)
            if needs.number_tokens is not None and (not is_numbered or kind is not None):
                prepared["position_ids"] = needs.number_tokens(prepared)
            if whole and needs.whole is not None:
                needs.whole.add_columns(prepared, batch)
            report = report_batch(prepared | whole)
            groups = group_batch(prepared, report.samples)
        except RingError as fault:
            return ReadyBatch({}, REFUSED, fault)
        return ReadyBatch(prepared, report, groups=groups, whole=whole, is_one_row=kind is not None)

    def cut(
        self, ready: ReadyBatch, mesh: RingMesh | None = None, longest: int | None = None
    ) -> tuple[Batch, BatchSharding]:
        """Return this rank's part of a prepared batch, and its sharding; `document_ids` become patterns.

        `mesh` is a smaller ring that the batch is for, `longest` then the greatest position of the whole
        batch.
        """
        ring, tokens, needs = mesh or self.mesh, ready.report.tokens, self.needs
        prepared = with_whole_gradients(ready.tensors, ring)
        whole = with_whole_gradients(ready.whole, ring)
        if needs.batches is not None:
            local, sharding = needs.batches.cut(prepared, self)
            return {key: tensor.to(self.device) for key, tensor in local.items()}, sharding
        if longest is None:
            longest = int(prepared["position_ids"].max())  # before the cut: see positions.py
        whole_batch, groups = prepared | whole, ready.groups
        short = mesh is None and self.mesh.sequence_size > 1 and tokens < self.config.min_sequence_length
        short = short and not ready.is_one_row  # one row, for trees
        padded = REAL_TOKENS in prepared and (short or not bool(prepared[REAL_TOKENS].all()))
        if short:
            ring, places = RingMesh.single(), self.mesh.sequence_size
            prepared = split_samples(prepared, self.mesh.sequence_rank, places)
            ids = prepared.get(DOCUMENT_IDS)
            groups = () if ids is None else group_rows(ids, -(-ready.report.samples // places))
        sharding = self._place(tokens, longest, ring, groups)
        local = {key: x for key, x in prepared.items() if key not in (DOCUMENT_IDS, *ROW_KINDS)}
        layout = None if short else sharding.layout
        if layout is not None:
            local = split_tokens(local, layout, ring)
        local = {key: tensor.to(self.device) for key, tensor in (local | whole).items()}
        real_tokens = local.pop(REAL_TOKENS, None)
        if needs.whole is not None:
            columns = needs.whole.take_columns(local, whole_batch, layout, ring)
            sharding = sharding if columns is None else replace(sharding, whole=columns)
        if padded and real_tokens is not None:
            sharding = replace(sharding, real_tokens=real_tokens)
        return local, sharding

    def prepare_ahead(self, batch: Callable[[Any], Mapping[str, Tensor]], read: Any) -> ReadyBatch:
        """Prepare a batch, and plan its passes as those of the last batch; no collective. In a thread."""
        used, ready = self.batches.used, self.prepare(lambda: batch(read))
        if ready.fault is None and ready.report.tokens >= self.config.min_sequence_length:
            with suppress(RingError):  # raised again, where every rank raises it
                layout = self.layout_for(ready.report.tokens, self.mesh, ready.groups)
                plan_passes(used, ready.groups, layout, self.mesh.ring_rank)
        return ready

    def make_ahead(
        self, reads_ahead: bool, batch: Callable[[Any], Mapping[str, Tensor]] = lambda read: read
    ) -> Callable[[Any], ReadyBatch] | None:
        """Return what prepares the next batch in a thread; None where it is no use, or not allowed.

        Only documents are new in every batch. A model's own functions of whole batches run in its thread.
        """
        if not (reads_ahead and self.config.pattern.documents) or self.needs.whole_batches:
            return None
        return functools.partial(self.prepare_ahead, batch)

    def kept_by_length(
        self, sizes: tuple[int, int], mesh: RingMesh, make: Callable[[], BatchSharding]
    ) -> BatchSharding:
        """Return the sharding of batches of some lengths, made at the first one; the latest are kept."""
        key = (*sizes, mesh if mesh.sequence_size > 1 else None)
        if key not in self._by_length:
            self._by_length[key] = make()
        self._by_length.move_to_end(key)
        if len(self._by_length) > REMEMBERED:  # texts of any length come by: each has its plans and contexts
            self._by_length.popitem(last=False)
        return self._by_length[key]

    def layout_for(
        self,
        tokens: int,
        mesh: RingMesh,
        groups: tuple[RowGroup, ...] = (),
        patterns: LayerPatterns | None = None,
    ) -> Layout:
        """Choose one layout for all layers and rows: with documents for the rows that are most work.

        `patterns` are those of layers that are all alike, None for the model's.
        """
        config = self.config
        mix = (patterns or self.patterns).counted(tokens, self.needs.layers if patterns is None else ())
        name = "contiguous" if mesh.sequence_size == 1 < self.mesh.sequence_size else config.layout
        block_size = get_block_side(config.kernel, self.device.type, mix, config.block_size)
        layers = {groups[0].counted(pattern) if groups else pattern: count for pattern, count in mix.items()}
        mixed = tuple(layers.items())
        layout = choose_layout(name, tokens, mesh.ring_size, mixed, mesh.ulysses_size, block_size)
        whole = PASSES[config.transport].whole_blocks
        return round_to_blocks(layout, config.block_size) if whole else layout

    def _place(
        self, tokens: int, longest: int, mesh: RingMesh, groups: tuple[RowGroup, ...]
    ) -> BatchSharding:
        """Return the sharding of a batch; one for all batches of a length that have no groups of rows."""

        def make() -> BatchSharding:
            greatest = torch.tensor(longest, device=self.device)
            layout = self.layout_for(tokens, mesh, groups)
            sharding = BatchSharding(self.config, layout, mesh, self.patterns, groups, greatest)
            return sharding.with_slots(self.device) if self.needs.slots else sharding

        return make() if groups else self.kept_by_length((tokens, longest), mesh, make)

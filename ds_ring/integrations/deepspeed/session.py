"""Give a training script what it needs of the ring as one object: `engine.ring`.

Owns the path of a batch from the loader to the model (which layout, sharded or split by samples). How labels
are shifted, batches compared, losses scaled and shardings found again stands in the files it imports. Knows
neither DeepSpeed nor transformers.
"""

from __future__ import annotations

import functools
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from ds_ring.config.section import RingConfig, named_patterns
from ds_ring.errors import RingConfigError, RingError
from ds_ring.integrations.adapter import describe
from ds_ring.integrations.deepspeed.batch import (
    IGNORE,
    Batch,
    ModelNeeds,
    add_places,
    prepare_batch,
    whole_tensors,
)
from ds_ring.integrations.deepspeed.batch_sharding import (
    ENDED,
    REFUSED,
    BatchCutter,
    BatchReport,
    BatchSharding,
    RecentBatches,
    RowsAttention,
    check_consistency,
    report_of,
)
from ds_ring.integrations.deepspeed.dynamic_ring import (
    Assigned,
    AssignedBatches,
    AssignedSamples,
    DynamicRing,
    joined,
)
from ds_ring.integrations.deepspeed.engine import DEEPSPEED
from ds_ring.integrations.deepspeed.loader import (
    RingLoader,
    check_dataset,
    is_sliced,
    ordered_loader,
    padded,
    shard_slices,
    wrapped,
)
from ds_ring.integrations.deepspeed.loss import RingLoss, items_per_batch, local_loss, world_mean, world_sum
from ds_ring.integrations.deepspeed.packing import PackedRows, RowGroup
from ds_ring.integrations.deepspeed.sample_order import SampleOrder
from ds_ring.masks.layer_patterns import LayerPatterns
from ds_ring.masks.pattern import Pattern
from ds_ring.runtime.exchange import Exchange
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.shard import gather_sequence
from ds_ring.runtime.tiled import DeferredLogits
from ds_ring.schedule.layout import Layout

# Signals that ask the job to end (Slurm's `--signal=USR1@120`).

__all__ = ["PREEMPTED", "StopRequest"]

log = logging.getLogger(__name__)

PREEMPTED = 75  # sysexits.h's EX_TEMPFAIL: try again later
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


# [Note: one step for all]
# A launcher signals ranks one after the other, DeepSpeed's with seconds between them, and a checkpoint is
# made by all ranks together. So a signal only sets a flag here, and the flags are added up after each step:
# every rank gets the sum of the same step, and all leave after that one.
class StopRequest:
    """Record signals that ask this process to end, and let all ranks hear of them after the same step."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._heard = False

    def listen(self) -> None:
        """Handle the signals from here on, if this is the main thread: Python allows no others to."""
        if self._heard or threading.current_thread() is not threading.main_thread():
            return
        self._heard = True
        DEEPSPEED.apply({"stop_request": SimpleNamespace(at_exit=self._handle_signals)})

    def _handle_signals(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._note)

    def agreed(self, mesh: RingMesh, device: torch.device, timeout_s: float) -> bool:
        """Return whether any rank was asked to end; the same on every rank. Collective over the world."""
        self.listen()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.signal is not None
        asked = torch.tensor([float(self.signal is not None)], device=device)
        assert dist.group.WORLD is not None
        Exchange(mesh, timeout_s).all_reduce(asked, dist.group.WORLD)
        return bool(asked.item() > 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # No lock and no logging: this may interrupt either.
        if self.signal is None:
            self.signal = number


@dataclass(frozen=True, eq=False)
class RingSession:
    """Cut, place and weigh the batches of a model on a ring.

    Attributes:
        config: the "ring_attention" section.
        mesh: this process's place in the data x ring x ulysses grid.
        pattern: who attends to whom in every batch, where neither the model nor the JSON says otherwise of a
            layer; packed documents narrow it batch by batch.
        device: where sharded batches go.
        gradient_divisor: what the engine divides the summed gradients by ([Note: gradient scale] in loss.py).
        batches: where the latest batches lie.
        needs: what the model must know of whole batches.
        attached: for each model on the ring, what takes it off meanwhile.
        dynamic: what batches are divided with, under `"dynamic_ring": true`.
        stop_request: the signals by which this process was asked to end.
        latest: "loss", the last mean loss that was asked for; for the report of run_report.py.
    """

    config: RingConfig
    mesh: RingMesh
    pattern: Pattern
    device: torch.device
    gradient_divisor: float
    batches: RecentBatches = field(default_factory=RecentBatches, repr=False)
    needs: ModelNeeds = field(default_factory=ModelNeeds, repr=False)
    attached: list[Callable[[], AbstractContextManager[None]]] = field(default_factory=list, repr=False)
    dynamic: DynamicRing = field(default_factory=DynamicRing, repr=False)
    latest: dict[str, Tensor] = field(default_factory=dict, repr=False)
    stop_request: StopRequest = field(default_factory=StopRequest, repr=False)

    @functools.cached_property
    def patterns(self) -> LayerPatterns:
        """Return what the JSON says of layers."""
        return LayerPatterns(self.pattern, named_patterns(self.config))

    @functools.cached_property
    def _cutter(self) -> BatchCutter:
        return BatchCutter(self.config, self.mesh, self.device, self.patterns, self.needs)

    @property
    def layout(self) -> Layout:
        """Return the layout of the batch that the model is working on (for attention modules of your own)."""
        return self.batches.current.layout

    def attention(self, scale: float | None = None, layer: int | None = None) -> RowsAttention:
        """Return attention over the batch that the model is working on, packed documents included.

        For modules of your own: `out = session.attention()(q, k, v)`, asked for in every forward pass.
        `layer` counts from 0; it is needed where the JSON names layers.
        """
        current = self.batches.current
        return current.attention(scale, current.pattern_of(layer=layer))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Make the model plain and local meanwhile: its own attention, each rank by itself, nothing sharded.

        For `engine.module.generate`, an evaluation of short texts, an export. At ZeRO 3 all ranks must run
        equally many forward passes, since each gathers parameters. Training is refused.
        """
        with ExitStack() as stack:
            for take_off in self.attached:
                stack.enter_context(take_off())
            stack.enter_context(self.batches.off())
            yield

    def describe(self) -> str:
        """Return what ds_ring replaces, wraps and hooks in DeepSpeed, transformers and trainers here.

        One line for each change, by package, in the order in which they are applied.
        """
        return describe(self)

    def shard_batch(self, batch: Mapping[str, Tensor]) -> Batch:
        """Return this rank's part of a batch that every rank of its sequence group holds whole. Collective.

        Takes input_ids (or inputs_embeds) [B, T] and optionally labels, attention_mask, position_ids and
        other per-token tensors, document_ids among them if the JSON says "documents": true
        ([Note: packing] in packing.py). Returns local tensors [B, S] on `device`, with position_ids and, if
        there were labels, `labels` and `shift_labels` (both shifted already) and `num_items_in_batch`, so
        that `engine(**batch).loss` of a transformers model is the loss to hand to `engine.backward`.

        A sequence shorter than `min_sequence_length` is not cut: each rank takes whole samples instead.

        Raises:
            RingShapeError, RingPatternError: the batch cannot be sharded.
            RingMismatchError: the ranks of a sequence hold different batches (raised on every rank).
        """
        prepared, report, fault = self._prepare(lambda: batch)
        labelled_tokens = check_consistency(report, fault, self.mesh, self.device)
        return self._given_out(*self._cutter.cut(prepared), labelled_tokens)

    def shard_assigned(self, assigned: Assigned, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """Return this rank's part of the samples of its ring in a batch of `loader`, as `shard_batch`.
        Collective.
        """
        documents, ring = self.config.pattern.documents, assigned.ring
        prepared, report, fault = self._prepare(lambda: joined(assigned, samples, documents))
        first = self.mesh.global_rank_of(ring.first)
        report = report._replace(first_rank=first, division_crc=assigned.crc)
        labelled_tokens = check_consistency(report, fault, self.mesh, self.device)
        local, sharding = self._cutter.cut(prepared, self.dynamic.meshes[ring.ranks], assigned.longest)
        return self._given_out(local, sharding, labelled_tokens)

    def _given_out(self, local: Batch, sharding: BatchSharding, labelled_tokens: int) -> Batch:
        self.batches.record(local.values(), sharding)
        if "shift_labels" in local:
            local["num_items_in_batch"] = items_per_batch(labelled_tokens, self.gradient_divisor, self.device)
        return local

    def loss(self, logits_BSV: Tensor | DeferredLogits, batch: Mapping[str, Tensor]) -> RingLoss:
        """Return the loss of local logits on a batch from `shard_batch`. Collective: one number, for
        `mean_loss`.
        """
        items = batch["num_items_in_batch"]
        backward_loss = local_loss(logits_BSV, batch["shift_labels"], items)
        return RingLoss(backward_loss, self.mean_loss(backward_loss), items * self.gradient_divisor)

    def mean_loss(self, loss: Tensor) -> Tensor:
        """Return the mean over the world's labelled tokens, out of every rank's `engine(**batch).loss`.
        Collective.
        """
        self.latest["loss"] = mean = world_mean(loss, self.gradient_divisor, self.mesh)
        return mean

    def should_stop(self) -> bool:
        """Return whether the job is to end after this step: a rank got SIGTERM or SIGUSR1. Collective.

        Call it once before the first step, so that these signals no longer end the process, and after every
        step on every rank; all ranks get the same answer after the same step. Then save, and leave:

            if engine.ring.should_stop():
                engine.save_checkpoint(folder, client_state=state)
                engine.ring.leave()

        Raises:
            RingPeerError: a rank failed.
        """
        return self.stop_request.agreed(self.mesh, self.device, self.config.hop_timeout_seconds)

    def leave(self) -> NoReturn:
        """End this process with status 75 (EX_TEMPFAIL), by which a launcher knows that nothing failed."""
        raise SystemExit(PREEMPTED)

    def gather(self, local: Tensor, dim: int = 1) -> Tensor:
        """Return the whole sequence of a local result (logits, say) of the current batch, or of the samples
        of this rank's ring if it was divided. Collective.
        """
        sharding = self.batches.current
        if sharding.mesh is not self.mesh and sharding.mesh.sequence_size == 1:
            return local  # this rank's samples are whole already
        return gather_sequence(local, sharding.layout, mesh=sharding.mesh, dim=dim)

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[..., Any] | None = None,
        num_workers: int = 0,
        lengths: Sequence[int] | None = None,
        pack_tokens: int | None = None,
        most_tokens: int | None = None,
    ) -> RingLoader:
        """Return a loader of sharded batches: one sequence group's ranks get the same samples.

        A data set with `slice(index, start, stop)`, which gives those tokens by name, and `length(index)`
        is read by slices: each rank reads the tokens that it keeps, in its own process. With
        `"dynamic_ring": true` each batch is divided among smaller rings ([Note: dynamic rings] in
        dynamic_ring.py), and a rank reads the samples of its own.

        Args:
            dataset: samples by index, mappings of tensors.
            batch_size: samples per data replica.
            num_workers: processes that read whole samples; they end with their rank ([Note: workers] in
                loader.py).
            lengths: tokens by sample. Batches then have samples of similar length, padded to the longest.
            pack_tokens: pack the samples, documents of `lengths`, into rows of so many tokens.
            most_tokens: under `"dynamic_ring": true`, of one rank of a ring that is smaller than the whole
                one; None: what the whole ring's longest batch takes, and an eighth more.

        Raises:
            RingConfigError: the arguments or the JSON's pattern do not go together.
        """
        given = LoaderArguments(
            batch_size, shuffle, seed, drop_last, collate_fn, num_workers, lengths, pack_tokens, most_tokens
        )
        return make_loader(self, dataset, given)

    def wrap(self, loader: Iterable[Any], *, split: bool | None = None, seed: int = 0) -> RingLoader:
        """Return a loader that shards the batches of a DataLoader, or of any iterable of whole batches.

        All ranks of a ring must get the same batches; every batch is compared, and so is the end of an
        epoch. A shuffling sampler of torch's without a generator is given one, seeded by `seed` and the
        epoch.

        Args:
            loader: gives mappings of tensors, as `shard_batch` takes them.
            split: whether data replicas take turns with its batches (True: it gives every rank the same
                ones) or have loaders of their own (False); None: by its sampler.
            seed: of the order that a shuffling sampler gets.

        Raises:
            RingConfigError: it divides its samples among other replicas, or does not tell.
            RingMismatchError: (from an iteration) ranks of a ring got different batches, or not as many.
        """
        whole, order = wrapped(loader, (self.mesh.data_rank, self.mesh.data_size), split, seed)
        return RingLoader(whole, self.shard_batch, order, self._check_end)

    def _check_end(self) -> None:
        check_consistency(ENDED, None, self.mesh, self.device)

    def _prepare(
        self, batch: Callable[[], Mapping[str, Tensor]]
    ) -> tuple[Batch, BatchReport, RingError | None]:
        """Prepare a batch; keep a fault until the ranks have compared notes, so that all stop together."""
        try:
            documents, needs, given = self.config.pattern.documents, self.needs, batch()
            by_token, whole = whole_tensors(given, needs.images)
            prepared = prepare_batch(by_token, self.pattern, documents, needs.real_tokens)
            if needs.number_tokens is not None and "position_ids" not in given:
                prepared["position_ids"] = needs.number_tokens(prepared)
            if whole and needs.images is not None:
                add_places(prepared, given, needs.images)
        except RingError as fault:
            return {}, REFUSED, fault
        return prepared | whole, report_of(prepared | whole), None

    def layout_for(self, tokens: int, mesh: RingMesh, groups: tuple[RowGroup, ...] = ()) -> Layout:
        """Choose one layout for all layers and rows: with documents for the rows that are most work."""
        return self._cutter.layout_for(tokens, mesh, groups)


# The loader of a session: whole samples, slices of them, packed rows, or samples for smaller rings.

_SLACK = 1.125  # of the whole ring's tokens of a rank, for a ring that is smaller


@dataclass(frozen=True)
class LoaderArguments:
    """Hold the arguments of `RingSession.loader`."""

    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    collate_fn: Callable[..., Any] | None
    num_workers: int
    lengths: Sequence[int] | None
    pack_tokens: int | None
    most_tokens: int | None


def make_loader(session: RingSession, dataset: Any, given: LoaderArguments) -> RingLoader:
    """Return the loader that `RingSession.loader` describes.

    Raises:
        RingConfigError: the arguments or the JSON's pattern do not go together.
    """
    check_dataset(dataset)
    lengths, dynamic = given.lengths, session.config.dynamic_ring
    if given.most_tokens is not None and not dynamic:
        raise RingConfigError(
            f'most_tokens: expected "dynamic_ring": true in the section beside it, got {given.most_tokens}'
            " and false; leave it out"
        )
    if dynamic and lengths is None and hasattr(dataset, "length"):
        lengths = [int(dataset.length(index)) for index in range(len(dataset))]
    if dynamic:
        _check_dynamic(given, lengths)
    if given.pack_tokens is not None:
        if lengths is None or not session.config.pattern.documents:
            raise RingConfigError(
                'pack_tokens: expected lengths=... and "documents": true in the "pattern" section of the'
                f" JSON, got {'no' if lengths is None else 'the'} lengths and the pattern {session.pattern}"
            )
        dataset, lengths = PackedRows(dataset, lengths, given.pack_tokens), None
    order = SampleOrder(
        len(dataset),
        given.batch_size,
        (session.mesh.data_rank, session.mesh.data_size),
        shuffle=given.shuffle,
        seed=given.seed,
        drop_last=given.drop_last,
        lengths=lengths,
    )
    needs = session.needs
    if dynamic:
        if needs.images is not None:
            raise RingConfigError(
                "loader: expected a model that reads no images beside dynamic rings, got one: which of a"
                " batch's images a smaller ring has is not worked out; leave dynamic rings off"
            )
        return _dynamic_loader(session, dataset, order, given, lengths)
    if is_sliced(dataset):
        if given.num_workers or given.collate_fn is not None or needs.number_tokens or needs.images:
            raise RingConfigError(
                "loader: expected no workers, no collate_fn and a model that neither numbers tokens by"
                " their ids nor reads images, since the data set is read by slices; give one without"
                " `slice`"
            )
        return RingLoader(order, lambda some: _shard_slices(session, dataset, some), order)
    collate_fn = padded if lengths is not None and given.collate_fn is None else given.collate_fn
    whole = ordered_loader(dataset, order, num_workers=given.num_workers, collate_fn=collate_fn)
    return RingLoader(whole, session.shard_batch, order)


def _check_dynamic(given: LoaderArguments, lengths: Sequence[int] | None) -> None:
    if lengths is None:
        raise RingConfigError(
            "loader: expected lengths=..., the tokens of each sample, under dynamic_ring, got none: nobody"
            " knows which samples are short; give them, or a data set with length(index), or set dynamic_ring"
            " to false"
        )
    if given.collate_fn is not None:
        raise RingConfigError(
            "loader: expected no collate_fn under dynamic_ring, got one: the samples of each ring are padded,"
            " or packed with documents; do in the data set what it does to samples"
        )
    if given.most_tokens is not None and (type(given.most_tokens) is not int or given.most_tokens < 1):
        raise RingConfigError(
            f"most_tokens: expected a whole number of at least 1, got {given.most_tokens!r}; leave it out for"
            " what the whole ring's longest batch takes, and an eighth more"
        )


def _dynamic_loader(
    session: RingSession,
    dataset: Any,
    order: SampleOrder,
    given: LoaderArguments,
    lengths: Sequence[int] | None,
) -> RingLoader:
    packed = session.config.pattern.documents
    row = max(lengths, default=1) if lengths is not None else given.pack_tokens or 1
    most = given.most_tokens or -(-round(_SLACK * given.batch_size * row) // session.mesh.ring_size)
    batches = AssignedBatches(order, dataset, lengths or (), most, packed, session)
    whole = ordered_loader(
        AssignedSamples(dataset), batches, num_workers=given.num_workers, collate_fn=itemgetter(0)
    )

    def shard(read: Any) -> Batch:
        return session.shard_assigned(*read)

    return RingLoader(whole, shard, order)


def _shard_slices(session: RingSession, dataset: Any, indices: Any) -> Batch:
    def items_of(labels_BS: Tensor) -> Tensor:
        count = world_sum((labels_BS != IGNORE).sum().to(session.device), session.mesh)
        return items_per_batch(int(count), session.gradient_divisor, session.device)

    return shard_slices(dataset, indices, session.shard_batch, items_of)

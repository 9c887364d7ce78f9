"""Give a training script what it needs of the ring as one object: `engine.ring`.

Owns the path of a batch from the loader to the model (which layout, sharded or split by samples). How labels
are shifted, batches compared, losses scaled and shardings found again stands in the files it imports. Knows
neither DeepSpeed nor transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ds_ring.config.patterns import named_patterns
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingError
from ds_ring.integrations.deepspeed.batch import (
    Batch,
    prepare_batch,
)
from ds_ring.integrations.deepspeed.batch_agreement import (
    ENDED,
    REFUSED,
    BatchReport,
    check_consistency,
    report_of,
)
from ds_ring.integrations.deepspeed.batch_cutting import BatchCutter
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding, RecentBatches, RowsAttention
from ds_ring.integrations.deepspeed.dynamic_ring import Assigned, DynamicRing, joined
from ds_ring.integrations.deepspeed.image_batch import add_places, whole_tensors
from ds_ring.integrations.deepspeed.loader import RingLoader, wrapped
from ds_ring.integrations.deepspeed.loss import RingLoss, items_per_batch, local_loss, world_mean
from ds_ring.integrations.deepspeed.packing import RowGroup
from ds_ring.integrations.deepspeed.session_loader import LoaderArguments, make_loader
from ds_ring.integrations.deepspeed.stop_request import PREEMPTED, StopRequest
from ds_ring.integrations.transformers.model_needs import ModelNeeds
from ds_ring.masks.layer_patterns import LayerPatterns
from ds_ring.masks.pattern import Pattern
from ds_ring.runtime.deferred_logits import DeferredLogits
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.shard import gather_sequence
from ds_ring.schedule.layout import Layout


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

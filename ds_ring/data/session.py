"""The interface of the ring for a training script, as one object: `engine.ring`.

A facade: `BatchSharder` shards batches, `Loaders` makes loaders, loss.py scales losses. Knows neither
DeepSpeed nor transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ds_ring.comm.collective import collective
from ds_ring.comm.device_tables import on_device
from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig, named_patterns
from ds_ring.data.batch import IGNORE, check_local, check_tensor
from ds_ring.data.batch_sharder import BatchSharder
from ds_ring.data.batch_sharding import RowsAttention
from ds_ring.data.dynamic_ring.assignment import DynamicRing
from ds_ring.data.layer_patterns import LayerPatterns
from ds_ring.data.loader import RingLoader
from ds_ring.data.loaders import Loaders
from ds_ring.data.loss import (
    DocumentLosses,
    RingLoss,
    UncomputedLogits,
    compute_logprobs,
    local_loss,
    sum_document_losses,
    world_mean,
)
from ds_ring.data.model_needs import ModelNeeds
from ds_ring.data.packing import check_losses, number_documents
from ds_ring.data.ring_batch import RecentBatches, RingBatch
from ds_ring.data.stop_request import StopRequest
from ds_ring.errors import RingShapeError
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.prepare import PlanReasons
from ds_ring.ops.shard import gather_sequence
from ds_ring.patches import AppliedPatch, describe, undo
from ds_ring.plugin import SESSION_METHODS, load
from ds_ring.schedule.layout import Layout


@dataclass(frozen=True, eq=False)
class RingSession:
    """Shard batches, move them to the device, scale the loss: the interface of a ring to a training script.

    Attributes:
        config: the "ring_attention" section.
        run_mesh: this process's place in the data x ring x ulysses grid; `mesh` is that of a batch.
        pattern: of every batch, for layers without a pattern of their own in the model or the JSON; packed
            documents narrow it batch by batch.
        device: of sharded batches.
        gradient_divisor: by which the engine divides summed gradients ([Note: gradient scale] in loss.py).
        batches: the shardings of the latest batches.
        needs: the facts on whole batches that the model needs.
        attached: for each model on the ring, a context manager that takes it off.
        dynamic: divides batches, under `"dynamic_ring": true`.
        stop_request: the signals that have requested the end of this process.
        changes: of objects that outlive the session: `end` takes them back.
        ended: why the session has ended; empty until then.
        patterns: of layers, in the JSON.
        sharder: shards the batches.
        latest: "loss", the last mean loss that was read; for the report of run_report.py.
    """

    config: RingConfig
    run_mesh: RingMesh
    pattern: Pattern
    device: torch.device
    gradient_divisor: float
    batches: RecentBatches = field(default_factory=RecentBatches, repr=False)
    needs: ModelNeeds = field(default_factory=ModelNeeds, repr=False)
    attached: list[Callable[[], AbstractContextManager[None]]] = field(default_factory=list, repr=False)
    dynamic: DynamicRing = field(default_factory=DynamicRing, repr=False)
    changes: list[AppliedPatch] = field(default_factory=list, repr=False)
    ended: list[str] = field(default_factory=list, repr=False)
    latest: dict[str, Tensor] = field(default_factory=dict, repr=False)
    stop_request: StopRequest = field(default_factory=StopRequest, repr=False)
    patterns: LayerPatterns = field(init=False, repr=False)
    sharder: BatchSharder = field(init=False, repr=False)
    _loaders: Loaders = field(init=False, repr=False)

    def __post_init__(self) -> None:
        patterns = LayerPatterns(self.pattern, named_patterns(self.config))
        sharder = BatchSharder(
            self.config, self.run_mesh, patterns, self.device, self.gradient_divisor, self.batches,
            self.needs, self.dynamic, self.ended,
        )  # fmt: skip
        vars(self).update(patterns=patterns, sharder=sharder, _loaders=Loaders(sharder))

    def __getattr__(self, name: str) -> Any:
        """Return a method that a capability adds: a row of `plugin.SESSION_METHODS`."""
        if name not in SESSION_METHODS:
            raise AttributeError(f"engine.ring has no attribute {name!r}")
        return functools.partial(load(SESSION_METHODS[name]), self)

    @property
    def layout(self) -> Layout:
        """Return the layout of the batch that the model is working on (for attention modules of your own)."""
        return self.batches.current.layout

    @property
    def mesh(self) -> RingMesh:
        """Return the ranks that share the batch that the model is working on; `run_mesh` before the first.

        They are fewer for a batch that is not cut, for one of a smaller ring, and in the one process of
        `verify_first_batch`.
        """
        return self.batches.current.mesh if self.batches.has_current else self.run_mesh

    def attention(self, scale: float | None = None, layer: int | None = None) -> RowsAttention:
        """Return attention over the batch that the model is working on, packed documents included.

        For modules of your own: `out = session.attention()(q, k, v)`, called in every forward pass.
        `layer` counts from 0; it is needed where the JSON names layers.
        """
        current = self.batches.current
        return current.attention(scale, current.get_layer_pattern(layer=layer))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Make the model plain and local inside the block: its own attention, each rank by itself, unsharded.

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

        One line for each change, by package, in the order in which they are applied. Where a plan was chosen
        among several, further lines say which was taken last, and why.
        """
        return "\n".join([describe(self), *self.run_mesh.owners[PlanReasons].texts])

    def shard_batch(self, batch: Mapping[str, Tensor]) -> RingBatch:
        """Return this rank's part of a batch that every rank of its sequence group holds whole. Collective.

        Takes input_ids (or inputs_embeds) [B, T] and optionally labels, attention_mask, position_ids and
        other per-token tensors, document_ids among them if the JSON has "documents": true
        ([Note: packing] in packing.py). Returns local tensors [B, S] on `device`, with position_ids and, if
        there were labels, `labels` and `shift_labels` (both shifted already) and `num_items_in_batch`, so
        that `engine(**batch).loss` of a transformers model is the loss to hand to `engine.backward`. Each
        tensor carries the batch's sharding to the model; `batch.to(device)` keeps it.

        Of an encoder-decoder it takes input_ids and attention_mask [B, E], and labels or decoder_input_ids
        [B, D] or both. Labels are aligned with the decoder's tokens and stay so.

        A sequence shorter than `min_sequence_length` is not cut: each rank takes whole samples instead.

        Raises:
            RingShapeError, RingPatternError: the batch cannot be sharded.
            RingMismatchError: the ranks of a sequence hold different batches (raised on every rank).
        """
        return self.sharder.shard(lambda: batch)

    def loss(self, logits_BSV: Tensor | UncomputedLogits, batch: Mapping[str, Tensor]) -> RingLoss:
        """Return the loss of local logits on a batch from `shard_batch`. Collective: one number, for
        `mean_loss`.
        """
        check_local("loss", batch, "labels")
        if not isinstance(logits_BSV, Tensor) and not hasattr(logits_BSV, "logprobs"):
            got = type(logits_BSV).__name__
            raise RingShapeError.wrong("loss", "logits [B, S, V]", got, "pass output.logits of the model")
        items = batch["num_items_in_batch"]
        backward_loss = local_loss(logits_BSV, batch["shift_labels"], items)
        return RingLoss(backward_loss, self.mean_loss(backward_loss), items * self.gradient_divisor)

    def logprobs(
        self, model: Callable[..., Any], batch: Mapping[str, Tensor], *, entropies: bool = False
    ) -> Any:
        """Return the log-probability of each label of a batch from `shard_batch`, float32 [B, S].
        Differentiable.

        Labels are `batch["shift_labels"]`; a token without one has 0. With "tiled_loss" in the
        "long_sequence" section the logits of S tokens x vocabulary never exist: they are computed tile by
        tile, and again in the backward pass.

        Args:
            model: the engine, or a model on its ring (a reference model, say). It is called with the batch's
                tensors by keyword, without labels, and returns logits or an output that has them.
            batch: local tensors, as `shard_batch` returned them.
            entropies: return the entropies of the predictions [B, S], too. They have a gradient as well.

        Raises:
            RingShapeError: the batch has no labels, or the output no logits.
        """
        return compute_logprobs(model, batch, self.batches.deferred, entropies)

    def mean_loss(self, loss: Tensor) -> Tensor:
        """Return the mean over the world's labelled tokens, out of every rank's `engine(**batch).loss`.
        Collective.
        """
        self.latest["loss"] = mean = world_mean(loss, self.gradient_divisor, self.run_mesh)
        return mean

    def document_losses(self, losses: Tensor, batch: Mapping[str, Tensor]) -> DocumentLosses:
        """Return mean loss and number of labelled tokens of each packed document. Collective.

            per_token = -engine.ring.logprobs(engine, batch)
            means, labelled_tokens = engine.ring.document_losses(per_token, batch)

        The same on all ranks of a ring, for every ring size: documents of all rows that these ranks share, as
        `gather` returns them. A row that is not packed is one document.

        Args:
            losses: one for each local token of the batch, [B, S]; those without a label are not read.
            batch: local tensors, as `shard_batch` returned them.

        Raises:
            RingShapeError, RingPatternError: other shapes, no labels, or a tree of rollouts; on every rank.
        """
        check_local("document_losses", batch, "shift_labels")
        sharding = self.batches.select(batch.values())
        with collective(sharding.mesh, "document_losses"):
            check_tensor("document_losses: losses", losses)
            check_losses(losses, batch, sharding.groups)
        labelled = batch["shift_labels"] != IGNORE
        both = torch.stack([losses.detach().where(labelled, 0.0), labelled.to(losses.dtype)], dim=-1)
        numbers = number_documents(sharding.groups, len(losses), sharding.layout.tokens)
        return sum_document_losses(self.gather(both), on_device(numbers, losses.device))

    def should_stop(self) -> bool:
        """Return whether the job is to end after this step: a rank got SIGTERM or SIGUSR1. Collective.

        Call it once before the first step, so that these signals no longer end the process, and after every
        step on every rank; all ranks get the same answer after the same step. Then save, and leave:

            if engine.ring.should_stop():
                engine.save_checkpoint(folder, client_state=state)
                sys.exit(os.EX_TEMPFAIL)  # 75, by which a launcher knows that nothing failed

        Raises:
            RingPeerError: a rank failed.
        """
        return self.stop_request.came_to_any(self.run_mesh, self.device)

    def gather(self, local: Tensor, dim: int = 1, *, encoder: bool = False) -> Tensor:
        """Return the whole sequence of a local result (logits, say) of the current batch, or of the samples
        of this rank's ring if it was divided. Collective.

        Of an encoder-decoder it is the decoder's sequence, with `encoder` the encoder's.
        """
        sharding = self.batches.current
        if encoder:
            if sharding.encoder is None:
                raise RingShapeError("gather: expected the batch of an encoder-decoder, got one sequence")
            sharding = sharding.encoder
        if sharding.mesh is not self.run_mesh and sharding.mesh.sequence_size == 1:
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
        pad_values: Mapping[str, float] | None = None,
    ) -> RingLoader:
        """Return a loader of sharded batches: one sequence group's ranks get the same samples.

        A data set with `slice(index, start, stop)`, which gives those tokens by name, and `length(index)`
        is read by slices: each rank reads the tokens that it keeps, in its own process. With
        `"dynamic_ring": true` each batch is divided among smaller rings ([Note: dynamic rings] in
        assignment.py), and a rank reads the samples of its own.

        Replicas get equally many samples: without `drop_last` some are repeated, which an evaluation counts
        twice (`wrap(loader, split=False)` repeats none).

        Args:
            dataset: samples by index, mappings of tensors.
            batch_size: samples per data replica.
            num_workers: processes that read whole samples; they end with their rank ([Note: workers] in
                loader.py).
            lengths: tokens by sample. Batches then have samples of similar length, padded to the longest.
            pack_tokens: pack the samples, documents of `lengths`, into rows of so many tokens.
            most_tokens: under `"dynamic_ring": true`, of one rank of a ring that is smaller than the whole
                one; None: what the whole ring's longest batch takes, and an eighth more.
            pad_values: with `lengths`, what padding has in tensors of your own, by name: an id that no token
                has, for example.

        Raises:
            RingConfigError: the arguments or the JSON's pattern do not go together.
            RingShapeError: (from an iteration) a tensor of your own has to be padded, and is not in
                `pad_values`.
        """
        return self._loaders.make(
            dataset, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, collate_fn=collate_fn,
            num_workers=num_workers, lengths=lengths, pack_tokens=pack_tokens, most_tokens=most_tokens,
            pad_values=pad_values,
        )  # fmt: skip

    def wrap(
        self, loader: Iterable[Any], *, split: bool | None = None, seed: int | None = None
    ) -> RingLoader:
        """Return a loader that shards the batches of a DataLoader, or of any iterable of whole batches.

        All ranks of a ring must get the same batches; every batch is compared, and so is the end of an
        epoch. Replicas that take turns get equally many: the last ones repeat the first batches, which an
        evaluation would count twice. With `split=False` each replica takes all, and none is repeated.

        Each epoch has the order of the loader in one process: of the sampler's generator, or without one of
        torch's, as it is when the epoch begins. Of torch's the first rank's counts. A loader's state
        continues its epoch; later ones follow the generators, which a script seeds or saves. The same loader
        gives the same wrapper, which counts its epochs; an epoch that the caller has set by
        `sampler.set_epoch` stays.

        Args:
            loader: gives mappings of tensors, as `shard_batch` takes them.
            split: whether data replicas take turns with its batches (True: it gives every rank the same
                ones) or take all of them, or have loaders of their own (False); None: by its sampler.
            seed: with the epoch, of the order of a shuffling sampler without a generator, in place of
                torch's.

        Raises:
            RingConfigError: it divides its samples among other replicas, or does not tell.
            RingMismatchError: (from an iteration) ranks of a ring got different batches, or not as many.
        """
        return self._loaders.wrap(loader, split, seed)


def end_session(session: RingSession, why: str) -> None:
    """Leave the model as it was before a session, whose engine and batches raise from now on."""
    if not session.ended:
        session.ended.append(why)
        undo(session.changes)
        session.attached.clear()


@contextmanager
def ending_on_error(session: RingSession) -> Iterator[None]:
    """End the session if the block raises, so that a second start finds a plain model."""
    try:
        yield
    except BaseException:
        end_session(session, "its start failed")
        raise

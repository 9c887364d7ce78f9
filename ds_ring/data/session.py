"""The interface of the ring for a training script, as one object: `engine.ring`.

Owns the path of a batch from the loader to the model (its layout, sharded or split by samples). Files that it
imports shift labels, compare batches, scale losses and look shardings up. Knows neither DeepSpeed nor
transformers.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from ds_ring.comm.collective import collective
from ds_ring.comm.device_tables import on_device
from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig, named_patterns
from ds_ring.data.batch import (
    IGNORE,
    LABEL_KEYS,
    LOSS_WEIGHTS,
    REAL_TOKENS,
    Batch,
    number_real_tokens,
    prepare_batch,
    split_samples,
    split_tokens,
    token_shape,
    whole_tensors,
)
from ds_ring.data.batch_sharding import (
    ENDED,
    REFUSED,
    REMEMBERED,
    BatchSharding,
    ReadyBatch,
    RecentBatches,
    RowsAttention,
    check_consistency,
    plan_passes,
    report_of,
)
from ds_ring.data.dynamic_ring.assignment import (
    Assigned,
    AssignedBatches,
    AssignedSamples,
    DynamicRing,
    joined,
)
from ds_ring.data.engine import DEEPSPEED
from ds_ring.data.layer_patterns import LayerPatterns
from ds_ring.data.loader import (
    RingLoader,
    SampleOrder,
    check_dataset,
    code_batch,
    is_sliced,
    ordered_loader,
    padded,
    read_slices,
    wrapped,
)
from ds_ring.data.loss import (
    DocumentLosses,
    RingLoss,
    UncomputedLogits,
    items_per_batch,
    local_loss,
    logprobs_and_entropies,
    losses_of_documents,
    world_mean,
    world_sum,
)
from ds_ring.data.model_needs import ModelNeeds
from ds_ring.data.packing import (
    DOCUMENT_IDS,
    PackedRows,
    RowGroup,
    check_losses,
    group_rows,
    number_documents,
    row_kind,
)
from ds_ring.data.whole_gradients import check_divisor, with_whole_gradients
from ds_ring.errors import RingConfigError, RingError, RingShapeError
from ds_ring.masks.catalog import Full
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import block_side
from ds_ring.ops.shard import gather_sequence
from ds_ring.patches import AppliedPatch, apply, describe, patch, undo
from ds_ring.registry import PASSES, ROW_KINDS, SESSION_METHODS, load
from ds_ring.schedule.choose import bound_to_one_head, work_of_ranks
from ds_ring.schedule.layout import Layout, in_whole_blocks, make_layout

PREEMPTED = 75  # sysexits.h's EX_TEMPFAIL: try again later
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # that ask the job to end (Slurm's `--signal=USR1@120`)
_NOT_OF_MODELS = (*LABEL_KEYS, "num_items_in_batch", LOSS_WEIGHTS)  # what `logprobs` keeps from a model
_SLACK = 1.125  # of the whole ring's tokens of a rank, for a ring that is smaller


# [Note: one step for all]
# A launcher signals ranks one after the other, DeepSpeed's with seconds between them, and a checkpoint is
# made by all ranks together. So a signal only sets a flag here, and the flags are added up after each step:
# every rank gets the sum of the same step, and all leave after that one.
class StopRequest:
    """Record a signal that requests the end of this process."""

    def __init__(self) -> None:
        self.came = self._listens = False

    def listen(self) -> None:
        """Handle the signals from here on, if this is the main thread: Python allows no others to."""
        if self._listens or threading.current_thread() is not threading.main_thread():
            return
        self._listens = True
        apply(self)

    @patch(
        DEEPSPEED.imported("signal"), "signal", stage="at_exit", kind="registered", feature="stop_request",
        reason="SIGTERM and SIGUSR1: leave after a step", when="engine.ring.should_stop() was called",
    )  # fmt: skip
    def _handle_signals(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self.came = True  # no lock and no logging: this may interrupt either


@dataclass(frozen=True, eq=False)
class RingSession:
    """Cut, place and weigh the batches of a model on a ring.

    Attributes:
        config: the "ring_attention" section.
        mesh: this process's place in the data x ring x ulysses grid.
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
        latest: "loss", the last mean loss that was read; for the report of run_report.py.
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
    changes: list[AppliedPatch] = field(default_factory=list, repr=False)
    ended: list[str] = field(default_factory=list, repr=False)
    latest: dict[str, Tensor] = field(default_factory=dict, repr=False)
    stop_request: StopRequest = field(default_factory=StopRequest, repr=False)
    speeds: list[float] = field(default_factory=list)  # of the ranks of the ring; empty for equal ones
    # of (tokens, greatest position, ring), the latest last; batches of others are placed anew
    _by_length: OrderedDict[tuple[int, int, RingMesh | None], BatchSharding] = field(
        default_factory=OrderedDict, repr=False
    )

    def __getattr__(self, name: str) -> Any:
        """Return a method that a capability adds: a row of `registry.SESSION_METHODS`."""
        if name not in SESSION_METHODS:
            raise AttributeError(f"engine.ring has no attribute {name!r}")
        return functools.partial(load(SESSION_METHODS[name]), self)

    def end(self, why: str) -> None:
        """Leave the model as it was before this session, whose engine and batches raise from now on."""
        if not self.ended:
            self.ended.append(why)
            undo(self.changes)
            self.attached.clear()

    @contextmanager
    def ending_on_error(self) -> Iterator[None]:
        """End the session if the block raises, so that a second start finds a plain model."""
        try:
            yield
        except BaseException:
            self.end("its start failed")
            raise

    def check_at_work(self) -> None:
        """Raise RingConfigError if the session has ended."""
        if self.ended:
            raise RingConfigError.wrong(
                "engine", "a ring", f"one that ended: {self.ended[0]}", "use the latest"
            )

    def set_speeds(self, speeds: tuple[float, ...]) -> None:
        """Place the batches that come next by these speeds of the ring's ranks, the same on all of them."""
        self.speeds[:] = speeds
        self._by_length.clear()

    def work_here(self) -> float:
        """Return the pairs of the current batch that this rank of the ring attends to; 0 if it is not cut."""
        current = self.batches.current
        if current.mesh.sequence_size == 1:
            return 0.0
        if "work" not in current._kept:
            mix = self.patterns.counted(current.layout.tokens, self.needs.layers)
            rows: list[Pattern] = [group.pattern for group in current.groups for _ in group.rows] or [Full()]
            works = [
                layers * work_of_ranks(bound_to_one_head(one & row), current.layout)[current.mesh.ring_rank]
                for one, layers in mix.items()
                for row in rows
            ]
            current._kept["work"] = float(sum(works))
        found: float = current._kept["work"]
        return found

    @functools.cached_property
    def patterns(self) -> LayerPatterns:
        """Return the patterns of layers in the JSON."""
        return LayerPatterns(self.pattern, named_patterns(self.config))

    @property
    def layout(self) -> Layout:
        """Return the layout of the batch that the model is working on (for attention modules of your own)."""
        return self.batches.current.layout

    def attention(self, scale: float | None = None, layer: int | None = None) -> RowsAttention:
        """Return attention over the batch that the model is working on, packed documents included.

        For modules of your own: `out = session.attention()(q, k, v)`, called in every forward pass.
        `layer` counts from 0; it is needed where the JSON names layers.
        """
        current = self.batches.current
        return current.attention(scale, current.pattern_of(layer=layer))

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

        One line for each change, by package, in the order in which they are applied.
        """
        return describe(self)

    def shard_batch(self, batch: Mapping[str, Tensor]) -> Batch:
        """Return this rank's part of a batch that every rank of its sequence group holds whole. Collective.

        Takes input_ids (or inputs_embeds) [B, T] and optionally labels, attention_mask, position_ids and
        other per-token tensors, document_ids among them if the JSON has "documents": true
        ([Note: packing] in packing.py). Returns local tensors [B, S] on `device`, with position_ids and, if
        there were labels, `labels` and `shift_labels` (both shifted already) and `num_items_in_batch`, so
        that `engine(**batch).loss` of a transformers model is the loss to hand to `engine.backward`.

        Of an encoder-decoder it takes input_ids and attention_mask [B, E], and labels or decoder_input_ids
        [B, D] or both. Labels are aligned with the decoder's tokens and stay so.

        A sequence shorter than `min_sequence_length` is not cut: each rank takes whole samples instead.

        Raises:
            RingShapeError, RingPatternError: the batch cannot be sharded.
            RingMismatchError: the ranks of a sequence hold different batches (raised on every rank).
        """
        return self._shard(lambda: batch)

    def shard_assigned(self, assigned: Assigned, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """Return this rank's part of the samples of its ring in a batch of `loader`, as `shard_batch`.
        Collective.
        """
        packed = self.config.pattern.documents
        return self._shard(lambda: joined(assigned, samples, packed), assigned)

    def _shard(self, batch: Callable[[], Mapping[str, Tensor]], assigned: Assigned | None = None) -> Batch:
        self.check_at_work()
        return self._shard_prepared(self._prepare(batch), assigned)

    def _shard_prepared(self, ready: ReadyBatch, assigned: Assigned | None = None) -> Batch:
        self.check_at_work()
        report, mesh, longest = ready.report, None, None
        if assigned is not None:
            assert self.dynamic.rings is not None, "a loader of dynamic rings"
            mesh, longest = self.dynamic.rings.of(assigned.places), assigned.longest
            first = self.mesh.global_rank_of(assigned.ring.first)
            report = report._replace(first_rank=first, division_crc=assigned.crc)
        labelled_tokens = check_consistency(report, ready.fault, self.mesh, self.device)
        local, sharding = self._cut(ready, mesh, longest)
        if "shift_labels" in local:
            local["num_items_in_batch"] = items_per_batch(labelled_tokens, self.gradient_divisor, self.device)
        self.batches.record(local, sharding)
        return local

    def _prepare_ahead(self, batch: Callable[[Any], Mapping[str, Tensor]], read: Any) -> ReadyBatch:
        """Prepare a batch, and plan its passes as those of the last batch; no collective. In a thread."""
        used, ready = self.batches.used, self._prepare(lambda: batch(read))
        if ready.fault is None and ready.report.tokens >= self.config.min_sequence_length:
            with suppress(RingError):  # raised again, where every rank raises it
                ready = ready._replace(groups=_groups_of(ready.tensors))
                layout = self.layout_for(ready.report.tokens, self.mesh, ready.groups)
                plan_passes(used, ready.groups, layout, self.mesh.ring_rank)
        return ready

    def _ahead(
        self, reads_ahead: bool, batch: Callable[[Any], Mapping[str, Tensor]] = lambda read: read
    ) -> Callable[[Any], ReadyBatch] | None:
        """Return what prepares the next batch in a thread; None where it is no use, or not allowed.

        Only documents are new in every batch. A model's own functions of whole batches run in its thread.
        """
        needs = self.needs.number_tokens or self.needs.whole or self.needs.batches
        if not (reads_ahead and self.config.pattern.documents) or needs:
            return None
        return functools.partial(self._prepare_ahead, batch)

    def loss(self, logits_BSV: Tensor | UncomputedLogits, batch: Mapping[str, Tensor]) -> RingLoss:
        """Return the loss of local logits on a batch from `shard_batch`. Collective: one number, for
        `mean_loss`.
        """
        if "shift_labels" not in batch:
            raise RingShapeError.wrong("loss", "labels", f"{sorted(batch)}", "shard_batch takes labels")
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
        if "shift_labels" not in batch:
            raise RingShapeError.wrong(
                "logprobs", "shift_labels", f"{sorted(batch)}", "shard a batch with labels"
            )
        inputs = {key: x for key, x in batch.items() if key not in _NOT_OF_MODELS}
        with self.batches.deferred():
            output = model(**inputs)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if logits is None:
            expected, advice = "logits, or an output with `.logits`", "let the model return its logits"
            raise RingShapeError.wrong("logprobs", expected, type(output).__name__, advice)
        labels = batch["shift_labels"]
        both = (
            logprobs_and_entropies(logits, labels)
            if isinstance(logits, Tensor)
            else logits.logprobs(labels, logprobs_and_entropies)
        )
        return (both[..., 0], both[..., 1]) if entropies else both[..., 0]

    def mean_loss(self, loss: Tensor) -> Tensor:
        """Return the mean over the world's labelled tokens, out of every rank's `engine(**batch).loss`.
        Collective.
        """
        self.latest["loss"] = mean = world_mean(loss, self.gradient_divisor, self.mesh)
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
        sharding = self.batches.select(batch.values())
        with collective(sharding.mesh, "document_losses"):
            check_losses(losses, batch, sharding.groups)
        labelled = batch["shift_labels"] != IGNORE
        both = torch.stack([losses.detach().where(labelled, 0.0), labelled.to(losses.dtype)], dim=-1)
        numbers = number_documents(sharding.groups, len(losses), sharding.layout.tokens)
        return losses_of_documents(self.gather(both), on_device(numbers, losses.device))

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
        self.stop_request.listen()
        asked = torch.tensor([float(self.stop_request.came)], device=self.device)
        return bool(world_sum(asked, self.mesh) > 0)

    def leave(self) -> NoReturn:
        """End this process with status 75 (EX_TEMPFAIL), by which a launcher knows that nothing failed."""
        raise SystemExit(PREEMPTED)

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
        assignment.py), and a rank reads the samples of its own.

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
        check_dataset(dataset)
        dynamic = self.config.dynamic_ring
        if dynamic and lengths is None and hasattr(dataset, "length"):
            lengths = [int(dataset.length(index)) for index in range(len(dataset))]  # type: ignore[arg-type]
        self._check_loader(lengths, collate_fn, pack_tokens, most_tokens)
        whole: Any = dataset if pack_tokens is None else PackedRows(dataset, lengths or (), pack_tokens)
        lengths = lengths if pack_tokens is None else None
        replica = self.mesh.data_rank, self.mesh.data_size
        order = SampleOrder(
            len(whole), batch_size, replica, shuffle=shuffle, seed=seed, drop_last=drop_last, lengths=lengths
        )
        if dynamic:
            row_tokens = pack_tokens or max(lengths or (), default=1)
            most = most_tokens or -(-round(_SLACK * batch_size * row_tokens) // self.mesh.ring_size)
            packed = self.config.pattern.documents
            parts = AssignedBatches(order, whole, lengths or (), most, packed, self)
            reads = ordered_loader(
                AssignedSamples(whole), parts, num_workers=num_workers, collate_fn=itemgetter(0)
            )
            return RingLoader(reads, lambda read: self.shard_assigned(*read), order, gather=self._gather)
        if is_sliced(whole):
            needs = self.needs.number_tokens or self.needs.whole or self.needs.batches
            if num_workers or collate_fn is not None or needs:
                raise RingConfigError(
                    "loader: expected no workers, no collate_fn and a model of one sequence without images,"
                    " since the data set is read by slices; give one without `slice`"
                )
            # of rows that ds_ring packed: the thread calls nothing of the data set
            ahead = self._ahead(isinstance(whole, PackedRows), functools.partial(code_batch, whole))
            shard = functools.partial(self._shard_slices, whole)
            return RingLoader(order, shard, order, gather=self._gather, ahead=ahead)
        collate_fn = padded if lengths is not None and collate_fn is None else collate_fn
        reads = ordered_loader(whole, order, num_workers=num_workers, collate_fn=collate_fn)
        ahead = self._ahead(num_workers > 0)
        return RingLoader(reads, self._shard_read, order, gather=self._gather, ahead=ahead)

    def _check_loader(
        self,
        lengths: Sequence[int] | None,
        collate_fn: Callable[..., Any] | None,
        pack_tokens: int | None,
        most_tokens: int | None,
    ) -> None:
        """Raise RingConfigError for arguments of `loader` that do not go together, or with the JSON."""
        dynamic = self.config.dynamic_ring
        if most_tokens is not None and not dynamic:
            raise RingConfigError.wrong("most_tokens", '"dynamic_ring": true', "false", "leave it out")
        if dynamic and lengths is None:
            raise RingConfigError.wrong("loader", "lengths=... under dynamic_ring", "none", "give them")
        if dynamic and collate_fn is not None:
            raise RingConfigError.wrong("loader", "no collate_fn under dynamic_ring", "one", "leave it out")
        if most_tokens is not None and (type(most_tokens) is not int or most_tokens < 1):
            raise RingConfigError(f"most_tokens: expected a whole number of at least 1, got {most_tokens!r}")
        if pack_tokens is not None and (lengths is None or not self.config.pattern.documents):
            raise RingConfigError.wrong(
                "pack_tokens", 'lengths=... and "documents": true', str(self.pattern), "give both"
            )
        if dynamic and self.needs.whole is not None:
            raise RingConfigError.wrong("loader", "no dynamic_ring with images", "both", "set it to false")

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
        check_end = functools.partial(check_consistency, ENDED, None, self.mesh, self.device)
        takes_turns = order.units_per_batch == self.mesh.data_size  # or else replicas have their own loaders
        gather = functools.partial(self._gather, takes_turns=takes_turns)
        ahead = self._ahead(bool(getattr(whole, "num_workers", 0)))
        return RingLoader(whole, self._shard_read, order, check_end, gather, ahead)

    def _gather(self, mine: tuple[str, Any], takes_turns: bool = True) -> list[tuple[str, Any]]:
        """Return (fault, position) of every rank's loader; other replicas' positions only where they must be
        this one's. Collective.
        """
        if self.mesh.grid.world_size == 1:
            return [mine]
        everyones: list[Any] = [None] * self.mesh.grid.world_size
        dist.all_gather_object(everyones, (self.mesh.data_rank, *mine))
        return [
            (fault, position if takes_turns or replica == self.mesh.data_rank else mine[1])
            for replica, fault, position in everyones
        ]

    def _prepare(self, batch: Callable[[], Mapping[str, Tensor]]) -> ReadyBatch:
        """Prepare a batch; keep a fault until the ranks have compared notes, so that all stop together."""
        try:
            documents, needs, given = self.config.pattern.documents, self.needs, batch()
            if isinstance(given, Mapping):  # what is none is refused below
                check_divisor(given, self.gradient_divisor, self.mesh.grid.world_size)
            if needs.batches is not None:
                prepared = needs.batches.prepare(given, needs.number_tokens)
                return ReadyBatch(prepared, report_of(prepared))
            by_token, whole = whole_tensors(given, needs.whole_names)
            mask_BT = by_token.get("attention_mask")
            if (
                needs.skips_padding
                and mask_BT is not None
                and not {"position_ids", DOCUMENT_IDS} & given.keys()
            ):
                by_token["position_ids"] = number_real_tokens(mask_BT)
            prepared = prepare_batch(by_token, self.pattern, documents, needs.real_tokens)
            if needs.check is not None:
                needs.check(prepared)
            if needs.number_tokens is not None and ("position_ids" not in given or row_kind(given)):
                prepared["position_ids"] = needs.number_tokens(prepared)
            if whole and needs.whole is not None:
                needs.whole.add_columns(prepared, given)
        except RingError as fault:
            return ReadyBatch({}, REFUSED, fault)
        return ReadyBatch(prepared | whole, report_of(prepared | whole))

    def _cut(
        self, ready: ReadyBatch, mesh: RingMesh | None = None, longest: int | None = None
    ) -> tuple[Batch, BatchSharding]:
        """Return this rank's part of a prepared batch, and its sharding; `document_ids` become patterns.

        `mesh` is a smaller ring that the batch is for, `longest` then the greatest position of the whole
        batch.
        """
        prepared = with_whole_gradients(ready.tensors, mesh or self.mesh)
        if self.needs.batches is not None:
            local, sharding = self.needs.batches.cut(prepared, self)
            return {key: tensor.to(self.device) for key, tensor in local.items()}, sharding
        _, tokens = token_shape(prepared)
        if longest is None:
            longest = int(prepared["position_ids"].max())  # before the cut: see positions.py
        whole_batch = prepared
        prepared, whole = whole_tensors(prepared, self.needs.whole_names)
        short = mesh is None and self.mesh.sequence_size > 1 and tokens < self.config.min_sequence_length
        short = short and row_kind(prepared) is None  # one row, for trees
        mesh = RingMesh.single() if short else mesh or self.mesh
        padded = REAL_TOKENS in prepared and (short or not bool(prepared[REAL_TOKENS].all()))
        if short:
            prepared = split_samples(prepared, self.mesh.sequence_rank, self.mesh.sequence_size)
        groups = () if short else ready.groups
        sharding = self._sharding(prepared, tokens, longest, mesh, groups)
        rest = {key: tensor for key, tensor in prepared.items() if key not in (DOCUMENT_IDS, *ROW_KINDS)}
        local = rest if short else split_tokens(rest, sharding.layout, mesh)
        local = {key: tensor.to(self.device) for key, tensor in (local | whole).items()}
        layout = None if short else sharding.layout
        real_tokens, kind = local.pop(REAL_TOKENS, None), self.needs.whole
        taken = None if kind is None else kind.take_columns(local, whole_batch, layout, mesh)
        if taken is not None:
            sharding = replace(sharding, whole=taken)
        if padded and real_tokens is not None:
            sharding = replace(sharding, real_tokens=real_tokens)
        return local, sharding

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
        layers = self.needs.layers if patterns is None else ()
        mix = (patterns or self.patterns).counted(tokens, layers)
        name = "contiguous" if mesh.sequence_size == 1 < self.mesh.sequence_size else config.layout
        speeds = self.speeds if self.speeds and name == config.layout else None
        layout = make_layout(
            name,
            tokens=tokens,
            ring_size=mesh.ring_size,
            pattern={groups[0].counted(one): layers for one, layers in mix.items()} if groups else mix,
            multiple_of=mesh.ulysses_size,
            block_size=block_side(config.kernel, self.device.type, mix, config.block_size),
            speeds=speeds,
        )
        whole = PASSES[config.transport].whole_blocks
        return in_whole_blocks(layout, config.block_size) if whole else layout

    def _sharding(
        self, prepared: Batch, tokens: int, longest: int, mesh: RingMesh, groups: tuple[RowGroup, ...] = ()
    ) -> BatchSharding:
        groups = groups or _groups_of(prepared)
        if not groups:
            return self.kept_by_length(
                (tokens, longest), mesh, lambda: self._new_sharding(tokens, longest, mesh)
            )
        return self._new_sharding(tokens, longest, mesh, groups)

    def _new_sharding(
        self, tokens: int, longest: int, mesh: RingMesh, groups: tuple[RowGroup, ...] = ()
    ) -> BatchSharding:
        greatest = torch.tensor(longest, device=self.device)
        layout = self.layout_for(tokens, mesh, groups)
        sharding = BatchSharding(self.config, layout, mesh, self.patterns, groups, greatest)
        return sharding.with_slots(self.device) if self.needs.slots else sharding

    def _shard_read(self, read: Any) -> Batch:
        """Return this rank's part of a whole batch of a loader, or of one that was prepared ahead."""
        return self._shard_prepared(read) if isinstance(read, ReadyBatch) else self.shard_batch(read)

    def _shard_slices(self, dataset: Any, read: Any) -> Batch:
        local = self._shard_read(read if isinstance(read, ReadyBatch) else code_batch(dataset, read))
        read_slices(dataset, local)
        # Labels of the data set may be -100, which codes do not tell.
        count = world_sum((local["labels"] != IGNORE).sum(), self.mesh)
        return local | {"num_items_in_batch": items_per_batch(int(count), self.gradient_divisor, self.device)}


def _groups_of(prepared: Batch) -> tuple[RowGroup, ...]:
    """Return the rows of a prepared batch by their documents, or trees; none without any."""
    kind = row_kind(prepared)
    ids = prepared.get(DOCUMENT_IDS if kind is None else kind.key)
    if ids is None:
        return ()
    return group_rows(ids, token_shape(prepared)[0], None if kind is None else kind.pattern_of)

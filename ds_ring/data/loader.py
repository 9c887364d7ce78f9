"""Load samples by data replica, and cut batches for this rank.

Owns the order of a rank's samples (shuffled, grouped by length, divided among replicas), its position in an
epoch, and the worker processes of loaders. Orders are index arithmetic that every rank of a ring repeats;
only `DrawnBatches` reads samples that it skips. DeepSpeed's own loader would give every rank of a ring other
samples: with `mpu=None` it takes all ranks of the world for data replicas.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from ds_ring.data.batch import IGNORE, LABEL_KEYS, PADDED_ALIKE, SAMPLER_SIZES, Batch, pad_value
from ds_ring.data.packing import DOCUMENT_IDS, read_part
from ds_ring.errors import RingConfigError, RingMismatchError, RingShapeError, shown
from ds_ring.limits import MAX_TOKENS

T = TypeVar("T")
Cut = Callable[[Any], dict[str, Tensor]]

# Samplers that know no replicas: seeded alike, they give every rank the same batches.
_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_ALIKE_EVERYWHERE = (*_SHUFFLING, SequentialSampler)
_KEPT = (
    "generator", "worker_init_fn",
    "num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor",
    "persistent_workers", "in_order",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1
_GROUPED = 50  # batches whose samples are sorted by length together: enough to be alike, few to shuffle


class Order:
    """Yield the batches of one replica.

    Attributes:
        epoch: gives another order, the same on all ranks.
        first: batches of the epoch that the next iteration leaves out.
        unit, units_per_batch: what a saved position counts: of all replicas together, so that it is true for
            another number of replicas, too.
    """

    unit = "batches"

    def __init__(self, units_per_batch: int) -> None:
        self.epoch, self.first, self.units_per_batch = 0, 0, units_per_batch

    @abstractmethod
    def __len__(self) -> int:
        """Return the batches of an epoch."""

    def state(self, done: int) -> dict[str, Any]:
        """Return the state of the order besides epoch and the `done` batches: empty."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back a `state`."""

    def begin(self) -> AbstractContextManager[None]:
        """Return a context in which an epoch's first batch is drawn. Collective."""
        return nullcontext()


class SampleOrder(Order):
    """Yield the batches of indices of one replica; a batch sampler.

    Without `lengths` it gives the samples of torch's `DistributedSampler`, which has neither a position to
    resume from nor groups by length. With `lengths`, a batch of all replicas has samples of similar length.
    `generator` seeds worker processes, the same on all ranks of a ring.
    """

    unit = "samples"

    def __init__(
        self,
        samples: int,
        batch_size: int,
        replica: tuple[int, int],
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """`replica` is (data_rank, data_size); `lengths` are tokens by sample."""
        super().__init__(batch_size * replica[1])
        self.generator = torch.Generator()
        self._samples, self._batch_size, self._replica = samples, batch_size, replica
        self._shuffle, self._seed, self._drop_last, self._lengths = shuffle, seed, drop_last, lengths

    def __len__(self) -> int:
        mine = self._rounds()
        return mine // self._batch_size if self._drop_last else -(-mine // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        rank, size = self._replica
        self.generator.manual_seed(self._seed + self.epoch + rank)
        # Wraps around at the end, or ends early with `drop_last`: all replicas get as many samples.
        mine = np.resize(self._order(), self._rounds() * size)[rank::size]
        batches = [mine[at : at + self._batch_size].tolist() for at in range(0, len(mine), self._batch_size)]
        return iter(batches[self.first : len(self)])

    def _rounds(self) -> int:
        """Return the samples of each replica."""
        size = self._replica[1]
        return self._samples // size if self._drop_last else -(-self._samples // size)

    def _order(self) -> np.ndarray:
        shuffled = np.arange(self._samples)
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        if self._shuffle:
            shuffled = torch.randperm(self._samples, generator=generator, device="cpu").numpy()
        if self._lengths is None:
            return shuffled
        lengths, batch = np.asarray(self._lengths), self.units_per_batch
        for at in range(0, self._samples, _GROUPED * batch):
            some = shuffled[at : at + _GROUPED * batch]
            shuffled[at : at + _GROUPED * batch] = some[np.argsort(-lengths[some], kind="stable")]
        if self._shuffle:  # the batches; a short one stays last
            whole = self._samples // batch
            places = torch.randperm(whole, generator=generator, device="cpu").numpy()
            shuffled[: whole * batch] = shuffled[: whole * batch].reshape(whole, batch)[places].ravel()
        return shuffled


class DrawnBatches(Order):
    """Yield this replica's turns of any iterable of batches; those left out are read and dropped.

    What it draws of torch's generator for an epoch's first batch, a whole permutation for torch's samplers,
    comes from the first rank's generator.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        turns: tuple[int, int],
        seed: int | None = None,
        read_first: Callable[[Tensor], Tensor] = lambda state: state,
    ) -> None:
        """`read_first` returns the first rank's tensor of all ranks'."""
        super().__init__(turns[1])
        self._batches, self._turns, self._seed, self._read_first = batches, turns, seed, read_first
        self._set = 0  # the epoch that a sampler has from here, or from its making
        self._drawn_from: Tensor | None = None  # the generator's state before the latest epoch's order
        self._resumed_from: Tensor | None = None

    def __len__(self) -> int:
        return -(-len(self._batches) // self._turns[1])  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_batches"), name)

    @property
    def _counting(self) -> Any:
        """What may have an epoch of its own."""
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        counting = self._counting
        if hasattr(counting, "set_epoch"):  # unless the caller has chosen another one since
            chosen = getattr(counting, "epoch", self._set)
            if chosen == self._set:
                counting.set_epoch(self.epoch)
            self._set = self.epoch if chosen == self._set else chosen
        return self._draw()

    def _draw(self) -> Iterator[Any]:
        # A generator: nothing is drawn before the first batch is requested, since a DataLoader draws its own
        # seed in between.
        generator = self._get_generator()
        if self._resumed_from is not None:
            generator.set_state(self._resumed_from)
        elif self._seed is not None and generator is torch.default_generator:
            generator.manual_seed(self._seed + self.epoch)
        before, self._resumed_from = generator.get_state(), None
        batches = _from(_turns(self._batches, self._turns), self.first)
        first = list(islice(batches, 1))
        self._drawn_from = None if torch.equal(before, generator.get_state()) else before
        yield from first
        yield from batches

    def _get_generator(self) -> torch.Generator:
        """Return the generator that the sampler draws from: its own one, or else torch's."""
        generator: torch.Generator | None = getattr(self._get_sampler(), "generator", None)
        return torch.default_generator if generator is None else generator

    def _get_sampler(self) -> Any:
        return getattr(self._batches, "sampler", None)

    # In one process a sampler without a generator draws from torch's. Here ranks may have seeded that one
    # otherwise, so all have the first rank's state while an epoch begins. Then a rank of another state gets
    # its own back. An order that a saved state or a seed gives takes nothing from it.
    @contextmanager
    def begin(self) -> Iterator[None]:
        """Let all ranks draw alike within the block. Collective."""
        mine = torch.get_rng_state()
        first = self._read_first(mine)
        differs = not torch.equal(mine, first)
        chosen = self._resumed_from is not None or self._seed is not None
        torch.set_rng_state(first)
        try:
            yield
        finally:
            if differs or (chosen and self._get_generator() is torch.default_generator):
                torch.set_rng_state(mine)

    def state(self, done: int) -> dict[str, Any]:
        """Return the state from which the order of a begun epoch was drawn; between epochs that of the
        sampler's own generator. Empty if nothing is drawn.
        """
        if done:
            return {} if self._drawn_from is None else {"order": self._drawn_from}
        generator = self._get_generator()
        return {} if generator is torch.default_generator else {"generator": generator.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Draw the next iteration's order from a `state`."""
        generator, order, own = self._get_generator(), state.get("order"), state.get("generator")
        if generator is torch.default_generator:
            own = None  # a script's own affair
        try:
            for saved in (order, own):
                if saved is not None:
                    torch.Generator().set_state(saved)
            shuffles = isinstance(self._get_sampler(), _SHUFFLING)
            if shuffles and state.get(self.unit) and order is None and own is None:
                raise TypeError("an order without its state")
        except (TypeError, RuntimeError):
            got = shown(own if order is None else order)
            raise RingConfigError.wrong(
                "loader state", "a torch.Generator's state", got, "pass its own, or begin the epoch anew"
            ) from None
        self._drawn_from = self._resumed_from = order
        if own is not None:
            generator.set_state(own)


class BatchTurns(DrawnBatches):
    """Yield this replica's turns of somebody's batch sampler: every data_size-th batch, or all of them."""

    @property
    def _counting(self) -> Any:
        return self._get_sampler()


def _turns(batches: Iterable[T], turns: tuple[int, int]) -> Iterator[T]:
    """Yield batches rank, rank + size, ...; a last round that is short is filled with the first batches."""
    (rank, size), first, number = turns, list[T](), 0
    for number, batch in enumerate(batches, start=1):
        if len(first) < size - 1:
            first.append(batch)
        if (number - 1) % size == rank:
            yield batch
    if 0 < number % size <= rank:
        yield first[(rank - number % size) % len(first)]


def _from(batches: Iterator[T], first: int) -> Iterator[T]:
    """Yield all batches but the first ones."""
    left_out = sum(1 for _ in islice(batches, first))
    if left_out < first:
        raise RingConfigError.wrong("loader state", f"over {first} batches a replica", left_out, "use less")
    yield from batches


def position_in(state: Mapping[str, Any], order: Order) -> tuple[int, int]:
    """Return (epoch, batches of this replica) of a loader's state.

    Raises:
        RingConfigError: it is another loader's, inside a batch of this one, or beyond its last one.
    """
    unit, batches = order.unit, count_batches(order)
    epoch, done = (state.get("epoch"), state.get(unit)) if isinstance(state, Mapping) else (None, None)
    if type(epoch) is not int or type(done) is not int or not (0 <= epoch < MAX_TOKENS and done >= 0):
        keys = sorted(map(str, state))[:8] if isinstance(state, Mapping) else shown(state)
        raise RingConfigError.wrong(
            "loader state", f"whole numbers 'epoch' and '{unit}'", str(keys), "pass state_dict()"
        )
    if done % order.units_per_batch:
        raise RingConfigError.wrong(
            "loader state", f"a multiple of {order.units_per_batch} {unit}", done, "keep the batch size"
        )
    first = done // order.units_per_batch
    if batches is not None and first > batches:
        most = batches * order.units_per_batch
        raise RingConfigError.wrong("loader state", f"at most {most} {unit}", done, "use its own data set")
    return epoch, first


def count_batches(order: Order) -> int | None:
    """Return the batches of an epoch; None where a stream does not say."""
    try:
        return len(order)
    except TypeError:
        return None


class NextBatch:
    """Read the next batch in a thread while the model works on this one; an iterator.

    Args:
        batches: of an iterable that reads nothing when the model does: numbers of samples, or the batches of
            worker processes, which read ahead anyway.
        prepare: what else is done in the thread; its error is raised where the batch would be returned.
    """

    def __init__(self, batches: Iterator[Any], prepare: Callable[[Any], Any]) -> None:
        self._batches, self._prepare = batches, prepare
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ds_ring-next-batch")
        self._next: Future[Any] | None = None

    def begin(self) -> None:
        """Begin to read."""
        self._next = self._thread.submit(lambda: self._prepare(next(self._batches)))

    def __iter__(self) -> NextBatch:
        return self

    def __next__(self) -> Any:
        if self._next is None:
            self.begin()
        assert self._next is not None
        future, self._next = self._next, None
        return future.result()

    def close(self) -> None:
        """End the thread after what it does now."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class RingLoader:
    """Yield this rank's share of every batch; otherwise a `DataLoader`.

    After a complete epoch the next one has another order, which `set_epoch` selects.
    `state_dict` between two batches and `load_state_dict` on a new loader continue in mid epoch: the same
    batches in the same order, if the data set gives a sample by its index alone.

    Attributes:
        loader: the loader of whole batches.
        shard_batch: makes this rank's share of a whole batch, or of what `ahead` returned.
        ahead: prepares a whole batch in a thread, while the model works on the one before; None: nothing is
            read before it is asked for.
        on_batch: called before each batch is fetched (DeepSpeed's throughput timer), if given.
        epoch: the one that the latest iteration reads, or the next one will.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        shard_batch: Cut,
        order: Order,
        check_end: Callable[[], object] = lambda: None,
        gather: Callable[[Any], list[Any]] = lambda mine: [mine],
        ahead: Callable[[Any], Any] | None = None,
    ) -> None:
        self.loader, self.ahead = loader, ahead
        self.on_batch: Callable[[], object] | None = None
        self.epoch = 0
        self.shard_batch, self._order, self._check_end, self._gather = shard_batch, order, check_end, gather
        self._done = self._first = 0  # batches: given out in this epoch, left out by the next iteration

    def __len__(self) -> int:
        return len(self._order)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "loader"), name)  # batch_size, dataset, ...

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self._order.epoch, self._order.first = self.epoch, self._first
        self._done, self._first = self._first, 0
        with ExitStack() as beginning, ExitStack() as reading:
            beginning.enter_context(self._order.begin())
            whole_batches = iter(self.loader)  # forks workers: in this thread, see [Note: workers]
            coming = None if self.ahead is None else NextBatch(whole_batches, self.ahead)
            if coming is not None:
                reading.callback(coming.close)
            while True:
                if self.on_batch is not None:
                    self.on_batch()
                try:
                    whole = next(coming or whole_batches)
                except StopIteration:
                    break
                beginning.close()
                self._done += 1
                local = self.shard_batch(whole)
                if coming is not None:
                    coming.begin()
                yield local
        self._check_end()
        self.epoch, self._done = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration, the same on all ranks.

        The epoch of a `load_state_dict` keeps its position, another one begins at its first batch.
        """
        if epoch != self.epoch:
            self.epoch, self._done, self._first = epoch, 0, 0
            self._order.restore({})

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch given out last: the same on all ranks, for a client state."""
        order = self._order
        return {"epoch": self.epoch, order.unit: self._done * order.units_per_batch} | order.state(self._done)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where a loader of the same data was. Collective.

        Samples per replica times replicas must be as before; the number of replicas, of ranks in a ring and
        of workers may be another.

        Raises:
            RingConfigError: not a state of such a loader, on some rank.
            RingMismatchError: the ranks of a ring have other positions, or replicas that share one order.
        """
        order, fault, position = self._order, "", (0, 0)
        try:
            position = position_in(state, order)
            order.restore(dict(state))
        except RingConfigError as error:
            fault = str(error)
        everyones = self._gather((fault, position))
        faults = {rank: text for rank, (text, _) in enumerate(everyones) if text}
        if faults:
            rank, text = next(iter(faults.items()))
            raise RingConfigError(fault or f"rank {rank}: {text}")
        different = next(
            (rank for rank, (_, position) in enumerate(everyones) if position != everyones[0][1]),
            None,
        )
        if different is not None:
            raise RingMismatchError(
                f"loader state: expected the same on all ranks, got (epoch, batches) {everyones[0][1]} on"
                f" rank 0 and {everyones[different][1]} on rank {different}"
            )
        self.epoch, self._first = position
        self._done = self._first


def check_dataset(dataset: object) -> None:
    """Raise RingConfigError for an iterable data set, which no sampler can divide."""
    if isinstance(dataset, IterableDataset):
        raise RingConfigError.wrong(
            "training_data", "a data set with indices", type(dataset).__name__, "wrap a DataLoader"
        )


def ordered_loader(dataset: Any, order: Any, **options: Any) -> DataLoader[Any]:
    """Return a DataLoader of the batches that `order` names, whose workers end with this rank.

    `order` is a batch sampler, whose `generator` seeds the workers unless the options name another one.
    """
    if options.get("collate_fn") in (None, default_collate):
        options["collate_fn"] = stacked
    workers = bool(options.get("num_workers")) and threading.current_thread() is threading.main_thread()
    if workers:
        options["worker_init_fn"] = partial(_end_with, os.getpid(), options.get("worker_init_fn"))
    if "generator" not in options:
        options["generator"] = order.generator
    return DataLoader(dataset, batch_sampler=order, **options)


def wrapped(
    loader: Any,
    replica: tuple[int, int],
    split: bool | None,
    seed: int | None,
    read_first: Callable[[Tensor], Tensor],
) -> tuple[Any, Order]:
    """Return a loader of the whole batches of this replica, and their order; see `RingSession.wrap`."""
    turns = replica if _splits(loader, replica[1], split) else (0, 1)
    ordered = type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)
    if not ordered or not isinstance(loader.batch_sampler, BatchSampler):
        drawn = DrawnBatches(loader, turns, seed, read_first)
        return drawn, drawn
    order = BatchTurns(loader.batch_sampler, turns, seed, read_first)
    options = {name: getattr(loader, name) for name in _KEPT}
    return ordered_loader(loader.dataset, order, **options), order


def _splits(loader: Any, replicas: int, split: bool | None) -> bool:
    """Return whether replicas take turns with the loader's batches.

    Raises:
        RingConfigError: its sampler counts other replicas, or does not tell.
    """
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        if sampler.num_replicas != replicas:
            raise RingConfigError(
                f"wrap: expected a DistributedSampler of {replicas} data replicas,"
                f" got {sampler.num_replicas}; give it {SAMPLER_SIZES}"
            )
        if split:
            raise RingConfigError(
                "wrap: expected no split=True with a DistributedSampler, which splits the samples, got both;"
                " leave split out"
            )
        return False
    if split is None and replicas > 1 and type(sampler) not in _ALIKE_EVERYWHERE:
        raise RingConfigError(
            f"wrap: expected torch's sampler or split=..., got {type(loader).__name__} with"
            f" {type(sampler).__name__} for {replicas} data replicas; pass split=True if all are alike"
        )
    return replicas > 1 and split is not False


# [Note: workers] A forked worker inherits the sockets of the process groups, and while it lives the peers do
# not notice that its rank is dead: torch's workers look for their parent every five seconds. So the kernel
# ends them with their rank. It would also end them with the thread that forked them, hence from the main
# thread only. Workers that were not forked (forkserver, spawn) inherit nothing and are left alone.
def _end_with(rank_pid: int, also: Callable[[int], object] | None, worker: int) -> None:
    """Make the kernel end this worker process when its rank ends ([Note: workers]); a worker_init_fn."""
    if sys.platform == "linux" and os.getppid() == rank_pid:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != rank_pid:  # it ended a moment ago
            os._exit(1)
    if also is not None:
        also(worker)


# Read only the tokens that this rank keeps, where the data set gives slices of its samples.

_MAX_TOKENS = 2**31  # of a sample; a code is its index and a position


def is_sliced(dataset: Any) -> bool:
    """Return whether the data set has `slice(index, start, stop)` and `length(index)`."""
    return hasattr(dataset, "slice") and hasattr(dataset, "length")


# [Note: token codes] A batch of codes (sample and position; 0 for padding) takes the path of tokens: labels
# are shifted, documents and padding read, the ranks' checksums compared, the codes sharded. The local codes
# are the tokens that this rank needs as inputs and as labels, and only these are read.
def code_batch(dataset: Any, indices: Sequence[int]) -> Batch:
    """Return the batch of codes of samples ([Note: token codes])."""
    lengths = torch.tensor([int(dataset.length(index)) for index in indices], device="cpu")
    tokens = int(lengths.max())
    if not 0 < tokens < _MAX_TOKENS or int(lengths.min()) < 1:
        raise RingShapeError.wrong(
            "length", f"samples of 1 to {_MAX_TOKENS - 1} tokens", lengths.tolist(), "leave others out"
        )
    positions_T = torch.arange(tokens, device="cpu")
    real_BT = positions_T < lengths[:, None]
    codes_BT = ((torch.tensor(indices, device="cpu")[:, None] + 1) * _MAX_TOKENS + positions_T) * real_BT
    batch = {"input_ids": codes_BT, "labels": codes_BT.masked_fill(~real_BT, IGNORE)}
    if not bool(real_BT.all()):
        batch["attention_mask"] = real_BT.long()
    if hasattr(dataset, DOCUMENT_IDS):
        batch[DOCUMENT_IDS] = torch.stack([dataset.document_ids(index) for index in indices])
    return batch


def read_slices(dataset: Any, local: Batch) -> None:
    """Replace the codes in this rank's part of a batch by the data set's tokens."""
    wanted = {"input_ids": local["input_ids"].cpu(), "labels": local["labels"].cpu()}
    codes = torch.cat([x.flatten() for x in wanted.values()]).unique()
    codes = codes[codes > 0]
    starts = torch.nn.functional.pad((codes.diff() != 1).nonzero().flatten() + 1, (1, 0)).tolist()
    parts: dict[str, list[Tensor]] = {"input_ids": []}
    for first, end in zip(starts, [*starts[1:], len(codes)], strict=True):  # one slice for each run of codes
        if first == end:  # nothing is wanted at all
            continue
        sample, position = divmod(int(codes[first]), _MAX_TOKENS)
        part = read_part(dataset, sample - 1, position, position + end - first)
        if others := sorted({*part} - {"input_ids", "labels", "attention_mask"}):
            advice = "leave it out, or shard batches of your own by engine.ring.wrap"
            raise RingConfigError.wrong(
                "samples of slices or packed rows", "input_ids and labels", ", ".join(others), advice
            )
        for name in ("input_ids", "labels"):
            if name in part:
                parts.setdefault(name, []).append(torch.as_tensor(part[name], device="cpu").long())
    for name, fill in (("input_ids", 0), ("labels", IGNORE)):
        tokens = torch.full_like(wanted[name], fill)
        if len(codes):
            values = torch.cat(parts.get(name, parts["input_ids"]))
            places = torch.searchsorted(codes, wanted[name]).clamp(max=len(codes) - 1)
            tokens = torch.where(wanted[name] > 0, values[places], fill)
        for key in LABEL_KEYS if name == "labels" else (name,):
            local[key].copy_(tokens)


def stacked(samples: list[Any]) -> Any:
    """Collate samples as torch does, which wants them equally long.

    Raises:
        RingShapeError: they are not.
    """
    try:
        return default_collate(samples)
    except RuntimeError as error:
        values = [x for sample in samples if isinstance(sample, dict) for x in sample.values()]
        shapes = {tuple(torch.as_tensor(x, device="cpu").shape) for x in values}
        if len(shapes) < 2:
            raise
        lengths = ", ".join(str(shape[0] if len(shape) == 1 else list(shape)) for shape in sorted(shapes))
        raise RingShapeError(
            f"samples of a batch: expected one length, got {lengths} tokens; give lengths=[...] to"
            " engine.ring.loader, which pads, or a collate_fn"
        ) from error


def padded(samples: Sequence[Mapping[str, Tensor]], pad_values: Mapping[str, float] | None = None) -> Batch:
    """Collate samples of different lengths, with padding on the right and an attention_mask.

    Args:
        samples: tensors by name.
        pad_values: what padding has in tensors of the caller's own.

    Raises:
        RingShapeError: a tensor of the caller's own has to be padded, and is not among them.
    """
    tokens, values = max(len(sample["input_ids"]) for sample in samples), pad_values or {}
    batch: Batch = {}
    for key in samples[0]:
        rows = [torch.as_tensor(sample[key], device="cpu") for sample in samples]
        if len({row.shape for row in rows}) == 1:  # labels of whole samples, say
            batch[key] = torch.stack(rows)
            continue
        if key not in PADDED_ALIKE and key not in values:
            got = ", ".join(map(str, sorted({len(row) for row in rows})))
            raise RingShapeError.wrong(
                f"samples: {key}", "one length, or the value of its padding", got,
                f"say it: engine.ring.loader(..., pad_values={{{key!r}: -1}})",
            )  # fmt: skip
        fill = values.get(key, pad_value(key))
        batch[key] = pad_sequence(rows, batch_first=True, padding_value=fill)
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples], device="cpu")
    batch.setdefault("attention_mask", (torch.arange(tokens, device="cpu") < lengths[:, None]).long())
    return batch

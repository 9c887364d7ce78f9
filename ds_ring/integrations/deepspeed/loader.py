"""Load samples by data replica, and cut batches for this rank.

Owns which samples a rank sees, where in an epoch it is, and the worker processes of loaders. DeepSpeed's own
loader would give every rank of a ring other samples: with `mpu=None` it takes all ranks of the world for data
replicas.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.integrations.deepspeed.batch import IGNORE, LABEL_KEYS, Batch
from ds_ring.integrations.deepspeed.packing import DOCUMENT_IDS, part_of
from ds_ring.integrations.deepspeed.sample_order import BatchTurns, DrawnBatches, SampleOrder, position_in

Cut = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
Order = SampleOrder | BatchTurns | DrawnBatches

# Samplers that know no replicas: seeded alike, they give every rank the same batches.
_ALIKE_EVERYWHERE = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor",
    "persistent_workers", "in_order",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1


class RingLoader:
    """Yield this rank's share of every batch; otherwise a `DataLoader`.

    After an epoch has been read to its end the next one has another order; `set_epoch` says which.
    `state_dict` between two batches and `load_state_dict` on a new loader continue in mid epoch: the same
    batches in the same order, if the data set gives a sample by its index alone.

    Attributes:
        loader: the loader of whole batches.
        on_batch: called before each batch is fetched (DeepSpeed's throughput timer), if given.
        epoch: the one that the latest iteration reads, or the next one will.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        shard_batch: Cut,
        order: Order,
        check_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.loader = loader
        self.on_batch: Callable[[], object] | None = None
        self.epoch = 0
        self._shard_batch, self._order, self._check_end = shard_batch, order, check_end
        self._done = self._first = 0  # batches: given out in this epoch, left out by the next iteration

    def __len__(self) -> int:
        return len(self._order)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "loader"), name)  # batch_size, dataset, ...

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self._order.epoch, self._order.first = self.epoch, self._first
        self._done, self._first = self._first, 0
        whole_batches = iter(self.loader)
        while True:
            if self.on_batch is not None:
                self.on_batch()
            try:
                whole = next(whole_batches)
            except StopIteration:
                break
            self._done += 1
            yield self._shard_batch(whole)
        self._check_end()
        self.epoch, self._done = self.epoch + 1, 0

    def keep_whole(self) -> None:
        """Yield batches as they are from now on: under `ds_ring.enable` the engine shards them."""
        self._shard_batch = dict

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration, the same on all ranks.

        The epoch of a `load_state_dict` keeps its position, another one begins at its first batch.
        """
        if epoch != self.epoch:
            self.epoch, self._done, self._first = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch given out last: the same on all ranks, for a client state."""
        order = self._order
        return {"epoch": self.epoch, order.unit: self._done * order.units_per_batch} | order.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where a loader of the same data was.

        Samples per replica times replicas must be as before; the number of replicas, of ranks in a ring and
        of workers may be another.

        Raises:
            RingConfigError: not a state of such a loader.
        """
        state, order = dict(state), self._order
        self.epoch, self._first = position_in(state, order.unit, order.units_per_batch)
        self._done = self._first
        order.restore(state)


def check_dataset(dataset: object) -> None:
    """Raise RingConfigError for an iterable data set, which no sampler can divide."""
    if isinstance(dataset, IterableDataset):
        raise RingConfigError(
            "training_data: expected a data set with length and index, got the iterable"
            f" {type(dataset).__name__}; build a DataLoader that gives all ranks of a ring the same batches"
            " (engine.ring.mesh.data_rank says which) and pass it to engine.ring.wrap"
        )


def ordered_loader(dataset: Any, order: Any, **options: Any) -> DataLoader[Any]:
    """Return a DataLoader of the batches that `order` names, whose workers end with this rank.

    `order` is a batch sampler with a `generator`, which seeds the workers.
    """
    workers = bool(options.get("num_workers")) and threading.current_thread() is threading.main_thread()
    if workers:
        options["worker_init_fn"] = partial(_end_with, os.getpid(), options.get("worker_init_fn"))
    return DataLoader(dataset, batch_sampler=order, generator=order.generator, **options)


def wrapped(loader: Any, replica: tuple[int, int], split: bool | None, seed: int) -> tuple[Any, Order]:
    """Return a loader of the whole batches of this replica, and their order; see `RingSession.wrap`."""
    turns = replica if _splits(loader, replica[1], split) else (0, 1)
    ordered = type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)
    if not ordered or not isinstance(loader.batch_sampler, BatchSampler):
        drawn = DrawnBatches(loader, turns)
        return drawn, drawn
    order = BatchTurns(loader.batch_sampler, turns, seed)
    options = {name: getattr(loader, name) for name in _KEPT}
    return ordered_loader(loader.dataset, order, worker_init_fn=loader.worker_init_fn, **options), order


def _splits(loader: Any, replicas: int, split: bool | None) -> bool:
    """Return whether replicas take turns with the loader's batches.

    Raises:
        RingConfigError: its sampler counts other replicas, or does not tell.
    """
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        if sampler.num_replicas != replicas or split:
            raise RingConfigError(
                f"wrap: expected a DistributedSampler of {replicas} data replicas and split=False, got"
                f" {sampler.num_replicas} and split={split}; all ranks of a ring read the same samples: give"
                " it num_replicas=engine.ring.mesh.data_size and rank=engine.ring.mesh.data_rank, or wrap a"
                " loader without it"
            )
        return False
    if split is None and replicas > 1 and type(sampler) not in _ALIKE_EVERYWHERE:
        raise RingConfigError(
            f"wrap: expected a DataLoader with torch's sampler, or split=..., got {type(loader).__name__}"
            f" with {type(sampler).__name__} for {replicas} data replicas; say split=True if every rank's has"
            " the same batches (replicas take turns), split=False if every replica's has its own"
        )
    return replicas > 1 and split is not False


# [Note: workers] A forked worker inherits the sockets of the process groups, and as long as it lives nobody
# sees that its rank is dead: torch's workers look for their parent every five seconds. So the kernel ends
# them with their rank. It would also end them with the thread that forked them, hence from the main thread
# only. Workers that were not forked (forkserver, spawn) inherit nothing and are left alone.
def _end_with(rank_pid: int, also: Callable[[int], object] | None, worker: int) -> None:
    """Make the kernel end this worker process when its rank ends ([Note: workers]); a worker_init_fn."""
    if sys.platform == "linux" and os.getppid() == rank_pid:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != rank_pid:  # it ended a moment ago
            os._exit(1)
    if also is not None:
        also(worker)


# Read only the tokens that this rank keeps, where the data set gives slices of its samples.

_MOST_TOKENS = 2**31  # of a sample; a code is its index and a position


def is_sliced(dataset: Any) -> bool:
    """Return whether the data set has `slice(index, start, stop)` and `length(index)`."""
    return hasattr(dataset, "slice") and hasattr(dataset, "length")


# [Note: stand-ins] A batch of codes (which sample, which position; 0 for padding) takes the path that tokens
# would take: labels are shifted, documents and padding looked at, the ranks' checksums compared, the codes
# sharded. What comes out says which tokens this rank needs as inputs and as labels, and only these are read.
def shard_slices(
    dataset: Any,
    indices: Sequence[int],
    shard_batch: Callable[[Batch], Batch],
    items_of: Callable[[Tensor], Tensor],
) -> Batch:
    """Return this rank's part of a batch, by `shard_batch`, with its tokens read ([Note: stand-ins]).

    `items_of` gives `num_items_in_batch` for local labels: those of the data set may be -100, which codes do
    not tell.
    """
    local = shard_batch(_stand_in(dataset, indices))
    input_codes, label_codes = local["input_ids"].cpu(), local["labels"].cpu()
    codes, found = _read(dataset, torch.cat([input_codes.flatten(), label_codes.flatten()]))
    local["input_ids"].copy_(_looked_up(input_codes, codes, found["input_ids"], 0))
    labels = _looked_up(label_codes, codes, found.get("labels", found["input_ids"]), IGNORE)
    for key in LABEL_KEYS:
        local[key].copy_(labels)
    return local | {"num_items_in_batch": items_of(labels)}


def _stand_in(dataset: Any, indices: Sequence[int]) -> Batch:
    lengths = torch.tensor([int(dataset.length(index)) for index in indices])
    tokens = int(lengths.max())
    if not 0 < tokens < _MOST_TOKENS or int(lengths.min()) < 1:
        raise RingShapeError(
            f"length: expected 1 to {_MOST_TOKENS - 1} tokens in a sample, got {lengths.tolist()} in the"
            f" samples {list(indices)}; leave such samples out"
        )
    positions_T = torch.arange(tokens)
    real_BT = positions_T < lengths[:, None]
    codes_BT = ((torch.tensor(indices)[:, None] + 1) * _MOST_TOKENS + positions_T) * real_BT
    batch = {"input_ids": codes_BT, "labels": codes_BT.masked_fill(~real_BT, IGNORE)}
    if not bool(real_BT.all()):
        batch["attention_mask"] = real_BT.long()
    if hasattr(dataset, DOCUMENT_IDS):
        batch[DOCUMENT_IDS] = torch.stack([dataset.document_ids(index) for index in indices])
    return batch


def _read(dataset: Any, wanted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the codes wanted, sorted, and the data set's tensors at each; one slice for each run of them."""
    codes = wanted[wanted > 0].unique()
    starts = torch.nn.functional.pad((codes.diff() != 1).nonzero().flatten() + 1, (1, 0)).tolist()
    parts: dict[str, list[Tensor]] = {"input_ids": []}
    for first, end in zip(starts, [*starts[1:], len(codes)], strict=True):
        if first == end:  # nothing is wanted at all
            continue
        sample, position = divmod(int(codes[first]), _MOST_TOKENS)
        part = part_of(dataset, sample - 1, position, position + end - first)
        for name in ("input_ids", "labels"):
            if name in part:
                parts.setdefault(name, []).append(torch.as_tensor(part[name]).long())
    return codes, {name: torch.cat(some) if some else codes for name, some in parts.items()}


def _looked_up(wanted: Tensor, codes: Tensor, values: Tensor, otherwise: int) -> Tensor:
    if not len(codes):
        return torch.full_like(wanted, otherwise)
    places = torch.searchsorted(codes, wanted).clamp(max=len(codes) - 1)
    return torch.where(wanted > 0, values[places], otherwise)


def padded(samples: Sequence[dict[str, Tensor]]) -> Batch:
    """Collate samples of different lengths: padding on the right, and an attention_mask that says so."""
    tokens = max(len(sample["input_ids"]) for sample in samples)
    batch: Batch = {}
    for key in samples[0]:
        fill = IGNORE if key in LABEL_KEYS else 0
        rows = [torch.as_tensor(sample[key]) for sample in samples]
        batch[key] = torch.stack(
            [torch.nn.functional.pad(row, (0, tokens - len(row)), value=fill) for row in rows]
        )
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    batch.setdefault("attention_mask", (torch.arange(tokens) < lengths[:, None]).long())
    return batch

"""Say which samples or batches this data replica takes of an epoch, from any batch on.

Owns the order of samples (shuffled, grouped by length), its division among replicas, and the position in an
epoch. Orders are index arithmetic that every rank of a ring repeats; only `DrawnBatches` reads what it leaves
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import BatchSampler

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.engine import DEEPSPEED

T = TypeVar("T")

_GROUPED = (
    50  # batches whose samples are sorted by length together: enough to be alike, few enough to shuffle
)


class SampleOrder:
    """Yield the batches of indices of one replica; a batch sampler.

    Without `lengths` it gives the samples of torch's `DistributedSampler`, which has neither a position to
    resume from nor groups by length. With `lengths`, a batch of all replicas has samples of similar length.

    Attributes:
        epoch: gives another order, the same on all ranks.
        first: batches of the epoch that the next iteration leaves out.
        unit, units_per_batch: what a saved position counts: samples of all replicas together, so that it is
            true for another number of replicas, too.
        generator: seeds worker processes, the same on all ranks of a ring.
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
        self.epoch, self.first, self.generator = 0, 0, torch.Generator()
        self._samples, self._batch_size, self._replica = samples, batch_size, replica
        self._shuffle, self._seed, self._drop_last, self._lengths = shuffle, seed, drop_last, lengths
        self.units_per_batch = batch_size * replica[1]

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

    def state(self) -> dict[str, Any]:
        """Return what the order depends on beside epoch and position: nothing."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back a `state`."""

    def _rounds(self) -> int:
        """Return the samples of each replica."""
        size = self._replica[1]
        return self._samples // size if self._drop_last else -(-self._samples // size)

    def _order(self) -> np.ndarray:
        shuffled = np.arange(self._samples)
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        if self._shuffle:
            shuffled = torch.randperm(self._samples, generator=generator).numpy()
        if self._lengths is None:
            return shuffled
        lengths, batch = np.asarray(self._lengths), self.units_per_batch
        for at in range(0, self._samples, _GROUPED * batch):
            some = shuffled[at : at + _GROUPED * batch]
            shuffled[at : at + _GROUPED * batch] = some[np.argsort(-lengths[some], kind="stable")]
        if self._shuffle:  # the batches; a short one stays last
            whole = self._samples // batch
            places = torch.randperm(whole, generator=generator).numpy()
            shuffled[: whole * batch] = shuffled[: whole * batch].reshape(whole, batch)[places].ravel()
        return shuffled


class BatchTurns:
    """Yield this replica's turns of somebody's batch sampler: every data_size-th batch, or all of them."""

    unit = "batches"

    def __init__(self, batches: BatchSampler, turns: tuple[int, int], seed: int) -> None:
        self.epoch, self.first, self.units_per_batch = 0, 0, turns[1]
        self._batches, self._turns, self._seed = batches, turns, seed
        sampler: Any = getattr(batches, "sampler", None)
        given = getattr(sampler, "generator", None)
        self.generator: torch.Generator = torch.Generator() if given is None else given
        self._reseeded = given is None
        if given is None and hasattr(sampler, "generator"):  # without one each rank would draw its own order
            order = SimpleNamespace(in_loader=self.generator)
            DEEPSPEED.apply({"one_order": order}, sampler=sampler)
        self._began = self._restored = self.generator.get_state() if given is not None else None

    def __len__(self) -> int:
        return -(-len(self._batches) // self._turns[1])

    def __iter__(self) -> Iterator[list[int]]:
        for one in (self._batches, getattr(self._batches, "sampler", None)):
            getattr(one, "set_epoch", lambda epoch: None)(self.epoch)
        if self._reseeded:
            self.generator.manual_seed(self._seed + self.epoch)
        elif self._restored is not None:
            self.generator.set_state(self._restored)
        self._began, self._restored = self.generator.get_state(), None
        return islice(_turns(self._batches, self._turns), self.first, None)

    def state(self) -> dict[str, Any]:
        """Return the state in which a generator of the caller's began the epoch."""
        return {} if self._reseeded else {"generator": self._began}

    def restore(self, state: dict[str, Any]) -> None:
        """Begin the next iteration with the generator of a `state`."""
        self._restored = state.get("generator")


class DrawnBatches:
    """Yield this replica's turns of any iterable of batches; those left out are read and dropped."""

    unit = "batches"

    def __init__(self, batches: Iterable[Any], turns: tuple[int, int]) -> None:
        self.epoch, self.first, self.units_per_batch = 0, 0, turns[1]
        self._batches, self._turns = batches, turns

    def __len__(self) -> int:
        return -(-len(self._batches) // self._turns[1])  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_batches"), name)

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(self.epoch)
        return islice(_turns(self._batches, self._turns), self.first, None)

    def state(self) -> dict[str, Any]:
        """Return nothing: the iterable must begin an epoch with the same batch each time."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back a `state`."""


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


def position_in(state: dict[str, Any], unit: str, units_per_batch: int) -> tuple[int, int]:
    """Return (epoch, batches of this replica) of a loader's state.

    Raises:
        RingConfigError: it is another loader's, or lies within a batch of this one.
    """
    epoch, done = state.get("epoch"), state.get(unit)
    if not isinstance(epoch, int) or not isinstance(done, int) or epoch < 0 or done < 0:
        raise RingConfigError(
            f'loader state: expected {{"epoch": ..., "{unit}": ...}}, whole numbers, got the keys'
            f" {sorted(state)}; hand over what state_dict() of such a loader returned"
        )
    if done % units_per_batch:
        raise RingConfigError(
            f"loader state: expected a multiple of the {units_per_batch} {unit} that all replicas take"
            f" together, got {done}; keep samples per replica times replicas as they were"
        )
    return epoch, done // units_per_batch

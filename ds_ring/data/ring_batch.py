"""This rank's part of a batch, whose tensors carry its sharding to the model, and the batches of a session.

`engine(**batch)` hands the model tensors and nothing else, so the tensors carry the sharding, as a DTensor
carries its placements. Copies carry none, and many global lengths pad to one local length: the sharding of
copies is that of the one recent batch of their local length, and an error if several have it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from ds_ring.data.batch_sharding import BatchSharding, UsedPass
from ds_ring.errors import RingShapeError
from ds_ring.memory.regions import running_regions

REMEMBERED = 64  # shardings by length, and those that a copied tensor may have

_BATCHES = "_ds_ring_batches"  # attribute of a region: its batches by the `RecentBatches` that was asked
_PLACEMENT = "_ds_ring_placement"  # attribute of a local tensor


@dataclass(frozen=True, eq=False)
class Placement:
    """What a local tensor carries. Views and copies of it carry none, but for `copy.deepcopy`.

    Attributes:
        name: of the tensor in its batch.
        batches: of the session that sharded the batch.
        number: of the batch in the session.
    """

    name: str
    sharding: BatchSharding
    batches: RecentBatches
    number: int

    def __deepcopy__(self, memo: Any) -> Placement:
        return self

    def __reduce__(self) -> Any:
        return set, ()  # a tensor that is saved leaves it behind; `weights_only=True` loads an empty set


def read_placement(x: Any) -> Placement | None:
    """Return what a tensor carries; None for any other object."""
    placement = getattr(x, _PLACEMENT, None)
    return placement if isinstance(placement, Placement) else None


class RingBatch(dict[str, Tensor]):
    """The local tensors of a batch by name: a dict, which is saved as one without shardings."""

    @classmethod
    def place(
        cls, tensors: Mapping[str, Tensor], sharding: BatchSharding, batches: RecentBatches, number: int
    ) -> RingBatch:
        """Return a batch whose tensors carry their sharding."""
        batch = cls(tensors)
        for name, x in tensors.items():
            placement = read_placement(x)
            if placement is not None and placement.batches is not batches:
                batch[name] = x = x.view_as(x)  # the caller's own tensor, which carries another session's
            setattr(x, _PLACEMENT, Placement(name, sharding, batches, number))
        return batch

    @property
    def sharding(self) -> BatchSharding | None:
        """Return the sharding that its tensors carry; None if they were replaced."""
        return next(
            (placement.sharding for placement in map(read_placement, self.values()) if placement is not None),
            None,
        )

    def to(self, *args: Any, **kwargs: Any) -> RingBatch:
        """Return the batch with each tensor as `Tensor.to` returns it; it carries its sharding, too."""
        return self._map({name: x.to(*args, **kwargs) for name, x in self.items()})

    def pin_memory(self) -> RingBatch:
        """Return the batch in pinned memory; its tensors carry their sharding."""
        return self._map({name: x.pin_memory() for name, x in self.items()})

    def _map(self, tensors: dict[str, Tensor]) -> RingBatch:
        for name, x in tensors.items():
            if (placement := read_placement(self[name])) is not None:
                setattr(x, _PLACEMENT, placement)
        return RingBatch(tensors)

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items())  # which `weights_only=True` loads


def _flatten(batch: RingBatch) -> tuple[list[Tensor], list[str]]:
    return list(batch.values()), list(batch)


def _unflatten(tensors: Iterable[Tensor], names: list[str]) -> RingBatch:
    return RingBatch(zip(names, tensors, strict=True))


register_pytree_node(
    RingBatch, _flatten, _unflatten, serialized_type_name="ds_ring.data.ring_batch.RingBatch"
)


class RecentBatches:
    """Keep the shardings of the latest batches, and the one that the model is working on."""

    def __init__(self) -> None:
        self._recent: deque[BatchSharding] = deque(maxlen=REMEMBERED)  # for copies of their tensors
        self._count = 0  # of batches so far
        self._current: BatchSharding | None = None
        self._labels: Tensor | None = None  # the shift_labels of the latest batch
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

    @property
    def has_current(self) -> bool:
        """Return whether there was a batch."""
        return self._current is not None

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
        batch = RingBatch.place(local, sharding, self, self._count)
        self._labels = batch.get("shift_labels")
        return batch

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
            sharding = max(placements, key=attrgetter("number")).sharding
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

    def get_labels(self, values: Iterable[Any]) -> Tensor | None:
        """Return the shift_labels of the batch whose tensors a model was called with; None for copies of
        them, for earlier batches, and without labels.
        """
        numbers = {placement.number for placement in self._placements(values)}
        return self._labels if numbers == {self._count} else None

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
                f" got {lengths or 'no tensor of [samples, tokens]'}; call"
                " engine(**engine.ring.shard_batch(batch))"
            )
        if len(fitting) > 1:
            totals = sorted(sharding.layout.tokens for sharding in fitting)
            raise RingShapeError(
                f"a batch of {lengths} local tokens was copied after shard_batch and may be of {totals}"
                " tokens in all; pass the model the very tensors that shard_batch returned"
            )
        return fitting.pop()

"""This rank's part of a batch, and the sharding that each of its tensors carries to the model.

`engine(**batch)` hands the model tensors and nothing else, so the tensors carry the sharding, as a DTensor
carries its placements.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import register_pytree_node

_PLACEMENT = "_ds_ring_placement"  # attribute of a local tensor


@dataclass(frozen=True, eq=False)
class Placement:
    """What a local tensor carries. Views and copies of it carry none, but for `copy.deepcopy`.

    Attributes:
        name: of the tensor in its batch.
        sharding: the `BatchSharding`.
        batches: the `RecentBatches` of the session that sharded the batch.
        number: of the batch in the session.
    """

    name: str
    sharding: Any
    batches: Any
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
    def place(cls, tensors: Mapping[str, Tensor], sharding: Any, batches: Any, number: int) -> RingBatch:
        """Return a batch whose tensors carry their sharding."""
        batch = cls(tensors)
        for name, x in tensors.items():
            placement = read_placement(x)
            if placement is not None and placement.batches is not batches:
                batch[name] = x = x.view_as(x)  # the caller's own tensor, which carries another session's
            setattr(x, _PLACEMENT, Placement(name, sharding, batches, number))
        return batch

    @property
    def sharding(self) -> Any:
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

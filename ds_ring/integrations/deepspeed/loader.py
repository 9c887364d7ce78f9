"""Load samples by data replica, and cut batches for this rank.

Owns which samples a rank sees. DeepSpeed's own loader would give every rank of a ring other samples: with
`mpu=None` it takes all ranks of the world for data replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ds_ring.errors import RingConfigError

Cut = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class RingLoader:
    """Yield this rank's share of every batch; otherwise a `DataLoader`.

    Attributes:
        loader: the loader of whole batches.
        on_batch: called before each batch is fetched (DeepSpeed's throughput timer), if given.
    """

    def __init__(self, loader: DataLoader[Any], shard_batch: Cut) -> None:
        self.loader = loader
        self.on_batch: Callable[[], object] | None = None
        self._shard_batch = shard_batch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        whole_batches = iter(self.loader)
        while True:
            if self.on_batch is not None:
                self.on_batch()
            try:
                whole = next(whole_batches)
            except StopIteration:
                return
            yield self._shard_batch(whole)

    def set_epoch(self, epoch: int) -> None:
        """Give a shuffling loader another order, the same on all ranks; call it before each epoch."""
        sampler = self.loader.sampler
        assert isinstance(sampler, DistributedSampler), type(sampler)
        sampler.set_epoch(epoch)


def check_dataset(dataset: object) -> None:
    """Raise RingConfigError for an iterable data set, which no sampler can divide."""
    if isinstance(dataset, IterableDataset):
        raise RingConfigError(
            "training_data: expected a data set with length and index, got the iterable"
            f" {type(dataset).__name__}; build a DataLoader that gives all ranks of a ring the same batches"
            " (engine.ring.mesh.data_rank says which) and pass each through engine.ring.shard_batch"
        )

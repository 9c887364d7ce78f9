"""Find which ranks see one folder alike, and act on all ranks so that they succeed or fail together.

Owns the collectives of saving and loading. Knows neither DeepSpeed nor what a checkpoint's files are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ds_ring.errors import RingCheckpointError, RingCheckpointMissingError

T = TypeVar("T")


class Storage(NamedTuple):
    """List the ranks that see one folder alike, by their number in the world, and this rank."""

    ranks: tuple[int, ...]
    rank: int

    @property
    def leads(self) -> bool:
        """Return True on the one rank that writes what is written once."""
        return self.rank == self.ranks[0]

    @property
    def share(self) -> int:
        """Return which part of the work on this storage is this rank's, of `len(ranks)`."""
        return self.ranks.index(self.rank)


def storage_of(local_rank: int, node_local: bool) -> Storage:
    """Return all ranks, or with node-local storage those of this host, which are consecutive. Collective
    then.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if not node_local:
        return Storage(tuple(range(world)), rank)
    local_ranks = together(lambda: local_rank)
    starts = [other for other in range(world) if local_ranks[other] == 0]
    first = max((start for start in starts if start <= rank), default=0)
    end = min((start for start in starts if start > rank), default=world)
    return Storage(tuple(range(first, end)), rank)


def together(act: Callable[[], T]) -> list[T]:
    """Return what `act` gives on every rank. Collective, so a barrier; an error of one is raised on all.

    Raises:
        RingCheckpointMissingError: so did `act`, on every rank on which it failed.
        RingCheckpointError: `act` could not read or write a file, or raised this error, on some rank.
    """
    mine: tuple[T | None, str, bool] = (None, "", False)
    try:
        mine = (act(), "", False)
    except (OSError, RingCheckpointError) as error:
        mine = (None, str(error), isinstance(error, RingCheckpointMissingError))
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    failed = [(rank, text, missing) for rank, (_, text, missing) in enumerate(everyones) if text]
    if failed:
        kind = RingCheckpointMissingError if all(missing for *_, missing in failed) else RingCheckpointError
        texts = "; ".join(f"rank {rank}: {text}" for rank, text, _ in failed)
        raise kind(f"checkpoint: expected every rank to succeed, got {texts}")
    return [value for value, *_ in everyones]

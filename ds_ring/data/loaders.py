"""Make the loaders of a session: of a data set, or around a loader of the user's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from torch.utils.data import Dataset

from ds_ring.comm.groups import gather_objects
from ds_ring.data.batch import IGNORE, PADDED_ALIKE, Batch
from ds_ring.data.batch_sharder import ENDED, BatchSharder, ReadyBatch, check_consistency, read_first_rank
from ds_ring.data.dynamic_ring.assignment import AssignedBatches, AssignedSamples
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
from ds_ring.data.loss import items_per_batch, world_sum
from ds_ring.data.packing import PackedRows
from ds_ring.errors import RingConfigError

_MOST_WRAPPED = 8  # loaders of a caller that are remembered
_SLACK = 1.125  # of the whole ring's tokens of a rank, for a ring that is smaller


@dataclass(frozen=True)
class Loaders:
    """Make loaders whose batches `sharder` shards."""

    sharder: BatchSharder
    # by id of a caller's loader and how it is wrapped: itself, and the wrapper, which counts its epochs
    _wrapped: dict[tuple[int, bool | None, int | None], tuple[Any, RingLoader]] = field(default_factory=dict)

    def make(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        collate_fn: Callable[..., Any] | None,
        num_workers: int,
        lengths: Sequence[int] | None,
        pack_tokens: int | None,
        most_tokens: int | None,
        pad_values: Mapping[str, float] | None,
    ) -> RingLoader:
        """Return the loader of a data set; see `RingSession.loader`."""
        sharder = self.sharder
        check_dataset(dataset)
        dynamic = sharder.config.get("dynamic_ring")
        if dynamic and lengths is None and hasattr(dataset, "length"):
            lengths = [int(dataset.length(index)) for index in range(len(dataset))]  # type: ignore[arg-type]
        self._check(lengths, collate_fn, pack_tokens, most_tokens)
        values = dict(pad_values or {})
        if pad_values is not None and (lengths is None or collate_fn is not None):
            got = "no lengths" if lengths is None else "a collate_fn, which pads by itself"
            raise RingConfigError.wrong("pad_values", "lengths=... and no collate_fn", got, "leave them out")
        if known := values.keys() & PADDED_ALIKE:
            raise RingConfigError.wrong(
                "pad_values", "keys of your own", str(sorted(known)), "leave them out"
            )
        whole: Any = dataset if pack_tokens is None else PackedRows(dataset, lengths or (), pack_tokens)
        lengths = lengths if pack_tokens is None else None
        replica = sharder.mesh.data_rank, sharder.mesh.data_size
        order = SampleOrder(
            len(whole), batch_size, replica, shuffle=shuffle, seed=seed, drop_last=drop_last, lengths=lengths
        )
        if dynamic:
            row_tokens = pack_tokens or max(lengths or (), default=1)
            most = most_tokens or -(-round(_SLACK * batch_size * row_tokens) // sharder.mesh.ring_size)
            packed = sharder.config.pattern.documents
            parts = AssignedBatches(order, whole, lengths or (), most, packed, sharder)
            reads = ordered_loader(
                AssignedSamples(whole), parts, num_workers=num_workers, collate_fn=itemgetter(0)
            )
            return RingLoader(
                reads, lambda read: sharder.shard_assigned(values, *read), order, gather=self._gather
            )
        if is_sliced(whole):
            if num_workers or collate_fn is not None or sharder.needs.whole_batches:
                raise RingConfigError(
                    "loader: expected no workers, no collate_fn and a model of one sequence without images,"
                    " since the data set is read by slices; give one without `slice`"
                )
            # of rows that ds_ring packed: the thread calls nothing of the data set
            ahead = sharder.make_ahead(isinstance(whole, PackedRows), functools.partial(code_batch, whole))
            shard = functools.partial(self._shard_slices, whole)
            return RingLoader(order, shard, order, gather=self._gather, ahead=ahead)
        if lengths is not None and collate_fn is None:
            collate_fn = functools.partial(padded, pad_values=values)
        reads = ordered_loader(whole, order, num_workers=num_workers, collate_fn=collate_fn)
        ahead = sharder.make_ahead(num_workers > 0)
        return RingLoader(reads, self._shard_read, order, gather=self._gather, ahead=ahead)

    def _check(
        self,
        lengths: Sequence[int] | None,
        collate_fn: Callable[..., Any] | None,
        pack_tokens: int | None,
        most_tokens: int | None,
    ) -> None:
        """Raise RingConfigError for arguments of `loader` that do not go together, or with the JSON."""
        config, needs = self.sharder.config, self.sharder.needs
        dynamic = config.get("dynamic_ring")
        if most_tokens is not None and not dynamic:
            raise RingConfigError.wrong("most_tokens", '"dynamic_ring": true', "false", "leave it out")
        if dynamic and lengths is None:
            raise RingConfigError.wrong("loader", "lengths=... under dynamic_ring", "none", "give them")
        if dynamic and collate_fn is not None:
            raise RingConfigError.wrong("loader", "no collate_fn under dynamic_ring", "one", "leave it out")
        if most_tokens is not None and (type(most_tokens) is not int or most_tokens < 1):
            raise RingConfigError(f"most_tokens: expected a whole number of at least 1, got {most_tokens!r}")
        if pack_tokens is not None and (lengths is None or not config.pattern.documents):
            raise RingConfigError.wrong(
                "pack_tokens",
                'lengths=... and "documents": true',
                str(self.sharder.patterns.pattern),
                "give both",
            )
        if dynamic and needs.whole is not None:
            raise RingConfigError.wrong("loader", "no dynamic_ring with images", "both", "set it to false")

    def wrap(self, loader: Iterable[Any], split: bool | None, seed: int | None) -> RingLoader:
        """Return a loader around another one; see `RingSession.wrap`."""
        key = (id(loader), split, seed)  # not of another one: the wrapped ones are held
        if key in self._wrapped:
            return self._wrapped[key][1]
        if len(self._wrapped) == _MOST_WRAPPED:
            self._wrapped.pop(next(iter(self._wrapped)))
        sharder, mesh = self.sharder, self.sharder.mesh
        read_first = functools.partial(read_first_rank, mesh=mesh, device=sharder.device)
        whole, order = wrapped(loader, (mesh.data_rank, mesh.data_size), split, seed, read_first)
        check_end = functools.partial(check_consistency, ENDED, None, mesh, sharder.device)
        takes_turns = order.units_per_batch == mesh.data_size  # or else replicas have their own loaders
        gather = functools.partial(self._gather, takes_turns=takes_turns)
        ahead = sharder.make_ahead(bool(getattr(whole, "num_workers", 0)))
        wrapper = RingLoader(whole, self._shard_read, order, check_end, gather, ahead)
        self._wrapped[key] = loader, wrapper
        return wrapper

    def _gather(self, mine: tuple[str, Any], takes_turns: bool = True) -> list[tuple[str, Any]]:
        """Return (fault, position) of every rank's loader; other replicas' positions only where they must be
        this one's. Collective.
        """
        mesh = self.sharder.mesh
        if mesh.grid.world_size == 1:
            return [mine]
        return [
            (fault, position if takes_turns or replica == mesh.data_rank else mine[1])
            for replica, fault, position in gather_objects((mesh.data_rank, *mine))
        ]

    def _shard_read(self, read: Any) -> Batch:
        """Return this rank's part of a whole batch of a loader, or of one that was prepared ahead."""
        return (
            self.sharder.shard_prepared(read)
            if isinstance(read, ReadyBatch)
            else self.sharder.shard(lambda: read)
        )

    def _shard_slices(self, dataset: Any, read: Any) -> Batch:
        sharder = self.sharder
        local = self._shard_read(read if isinstance(read, ReadyBatch) else code_batch(dataset, read))
        read_slices(dataset, local)
        # Labels of the data set may be -100, which codes do not tell.
        count = int(world_sum((local["labels"] != IGNORE).sum(), sharder.mesh))
        local["num_items_in_batch"] = items_per_batch(count, sharder.gradient_divisor, sharder.device)
        return local

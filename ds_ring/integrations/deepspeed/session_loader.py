"""Build the loader of a session: whole samples, slices of them, packed rows, or samples for smaller rings.

Owns which of these a data set is read by, and what does not go together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.batch import IGNORE, Batch
from ds_ring.integrations.deepspeed.dynamic_ring import AssignedBatches, AssignedSamples
from ds_ring.integrations.deepspeed.loader import RingLoader, check_dataset, ordered_loader
from ds_ring.integrations.deepspeed.loss import items_per_batch, world_sum
from ds_ring.integrations.deepspeed.packed_rows import PackedRows
from ds_ring.integrations.deepspeed.sample_order import SampleOrder
from ds_ring.integrations.deepspeed.sliced_data import is_sliced, padded, shard_slices

if TYPE_CHECKING:
    from ds_ring.integrations.deepspeed.session import RingSession

_SLACK = 1.125  # of the whole ring's tokens of a rank, for a ring that is smaller


@dataclass(frozen=True)
class LoaderArguments:
    """Hold the arguments of `RingSession.loader`."""

    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    collate_fn: Callable[..., Any] | None
    num_workers: int
    lengths: Sequence[int] | None
    pack_tokens: int | None
    most_tokens: int | None


def make_loader(session: RingSession, dataset: Any, given: LoaderArguments) -> RingLoader:
    """Return the loader that `RingSession.loader` describes.

    Raises:
        RingConfigError: the arguments or the JSON's pattern do not go together.
    """
    check_dataset(dataset)
    lengths, dynamic = given.lengths, session.config.dynamic_ring
    if given.most_tokens is not None and not dynamic:
        raise RingConfigError(
            f'most_tokens: expected "dynamic_ring": true in the section beside it, got {given.most_tokens}'
            " and false; leave it out"
        )
    if dynamic and lengths is None and hasattr(dataset, "length"):
        lengths = [int(dataset.length(index)) for index in range(len(dataset))]
    if dynamic:
        _check_dynamic(given, lengths)
    if given.pack_tokens is not None:
        if lengths is None or not session.config.pattern.documents:
            raise RingConfigError(
                'pack_tokens: expected lengths=... and "documents": true in the "pattern" section of the'
                f" JSON, got {'no' if lengths is None else 'the'} lengths and the pattern {session.pattern}"
            )
        dataset, lengths = PackedRows(dataset, lengths, given.pack_tokens), None
    order = SampleOrder(
        len(dataset),
        given.batch_size,
        (session.mesh.data_rank, session.mesh.data_size),
        shuffle=given.shuffle,
        seed=given.seed,
        drop_last=given.drop_last,
        lengths=lengths,
    )
    needs = session.needs
    if dynamic:
        if needs.images is not None:
            raise RingConfigError(
                "loader: expected a model that reads no images beside dynamic rings, got one: which of a"
                " batch's images a smaller ring has is not worked out; leave dynamic rings off"
            )
        return _dynamic_loader(session, dataset, order, given, lengths)
    if is_sliced(dataset):
        if given.num_workers or given.collate_fn is not None or needs.number_tokens or needs.images:
            raise RingConfigError(
                "loader: expected no workers, no collate_fn and a model that neither numbers tokens by"
                " their ids nor reads images, since the data set is read by slices; give one without"
                " `slice`"
            )
        return RingLoader(order, lambda some: _shard_slices(session, dataset, some), order)
    collate_fn = padded if lengths is not None and given.collate_fn is None else given.collate_fn
    whole = ordered_loader(dataset, order, num_workers=given.num_workers, collate_fn=collate_fn)
    return RingLoader(whole, session.shard_batch, order)


def _check_dynamic(given: LoaderArguments, lengths: Sequence[int] | None) -> None:
    if lengths is None:
        raise RingConfigError(
            "loader: expected lengths=..., the tokens of each sample, under dynamic_ring, got none: nobody"
            " knows which samples are short; give them, or a data set with length(index), or set dynamic_ring"
            " to false"
        )
    if given.collate_fn is not None:
        raise RingConfigError(
            "loader: expected no collate_fn under dynamic_ring, got one: the samples of each ring are padded,"
            " or packed with documents; do in the data set what it does to samples"
        )
    if given.most_tokens is not None and (type(given.most_tokens) is not int or given.most_tokens < 1):
        raise RingConfigError(
            f"most_tokens: expected a whole number of at least 1, got {given.most_tokens!r}; leave it out for"
            " what the whole ring's longest batch takes, and an eighth more"
        )


def _dynamic_loader(
    session: RingSession,
    dataset: Any,
    order: SampleOrder,
    given: LoaderArguments,
    lengths: Sequence[int] | None,
) -> RingLoader:
    packed = session.config.pattern.documents
    row = max(lengths, default=1) if lengths is not None else given.pack_tokens or 1
    most = given.most_tokens or -(-round(_SLACK * given.batch_size * row) // session.mesh.ring_size)
    batches = AssignedBatches(order, dataset, lengths or (), most, packed, session)
    whole = ordered_loader(
        AssignedSamples(dataset), batches, num_workers=given.num_workers, collate_fn=_only_one
    )

    def shard(read: Any) -> Batch:
        return session.shard_assigned(*read)

    return RingLoader(whole, shard, order)


def _only_one(read: Sequence[Any]) -> Any:
    """Return the one item of a batch: all that was assigned, read together."""
    return read[0]


def _shard_slices(session: RingSession, dataset: Any, indices: Any) -> Batch:
    def items_of(labels_BS: Tensor) -> Tensor:
        count = world_sum((labels_BS != IGNORE).sum().to(session.device), session.mesh)
        return items_per_batch(int(count), session.gradient_divisor, session.device)

    return shard_slices(dataset, indices, session.shard_batch, items_of)

"""Give the samples of a batch to smaller rings of the same ranks: `"dynamic_ring": true`.

Owns which samples a rank reads of each batch, and how they become one batch of its ring. The division is
`sub_rings.py`'s, the seconds of samples `sample_times.py`'s, the path from there to the model the session's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ds_ring.comm.mesh import RingMesh
from ds_ring.data.batch import IGNORE, LABEL_KEYS, Batch
from ds_ring.data.dynamic_ring.intervals import Place, SubRings
from ds_ring.data.dynamic_ring.sample_times import ModelSizes, measure_times
from ds_ring.data.dynamic_ring.sub_rings import BatchLengths as Lengths
from ds_ring.data.dynamic_ring.sub_rings import SampleSeconds, SubRing, divide
from ds_ring.data.loader import SampleOrder, is_sliced, padded
from ds_ring.data.packing import DOCUMENT_IDS, DocumentPart, PackedRows, read_part
from ds_ring.errors import RingPatternError, RingShapeError

# [Note: dynamic rings]
# Every rank runs one forward and one backward pass of each batch, in a ring of any size: ZeRO and gradient
# accumulation count calls. So a batch is divided as a whole, and a rank has one ring in it. The loss of each
# rank is its labelled tokens' sum over those of the world ([Note: gradient scale] in loss.py), so gradients
# do not depend on the division. A sum over all samples (a router's loss) is taken over the whole ring, as
# without division: each token is on one rank. Divisions are made from lengths alone, by the same arithmetic
# everywhere; a checksum of them travels with the report of every batch.


class Assigned(NamedTuple):
    """Hold a rank's part of a batch before it is read."""

    ring: SubRing  # the ranks that share it
    places: tuple[Place, ...]  # of all rings of the division
    # what they hold; of a ring without samples one of the others', to know names and types by
    pieces: tuple[DocumentPart, ...]
    longest: int  # the greatest position in the whole batch
    crc: int  # checksum of the division


@dataclass
class DynamicRing:
    """Hold what divisions are made with; empty until `start`."""

    sizes: ModelSizes | None = None  # of the model
    rings: SubRings | None = None
    times: SampleSeconds | None = None  # what samples take

    def start(self, session: Any, dtype: torch.dtype) -> None:
        """Measure the machine. Collective over the world."""
        assert self.sizes is not None
        self.rings = SubRings(session.run_mesh)
        if (ranks := session.run_mesh.ring_size) > 1:
            mesh = self.rings.get_ring([(0, ranks)])
            self.times = measure_times(self.sizes, session.config, mesh, session.device, dtype)

    def assign(
        self, pieces: Sequence[DocumentPart], most_tokens: int, packed: bool, mesh: RingMesh
    ) -> Assigned:
        lengths = tuple(piece.stop - piece.start for piece in pieces)
        if self.times is None or mesh.ring_size == 1:
            rings: tuple[SubRing, ...] = (SubRing(0, 1, tuple(range(len(pieces)))),)
        else:
            node = 0 if self.rings is None else self.rings.node
            rings = divide(Lengths(lengths, most_tokens, not packed), mesh.ring_size, self.times, node).rings
        mine = next(ring for ring in rings if ring.first <= mesh.ring_rank < ring.first + ring.ranks)
        held = tuple(pieces[sample] for sample in mine.samples) or (pieces[0],)
        places = tuple((ring.first, ring.ranks) for ring in rings)
        return Assigned(mine, places, held, max(lengths) - 1, zlib.crc32(repr((rings, lengths)).encode()))


class AssignedBatches:
    """Yield this rank's part of each batch of an order; a batch sampler of one item a batch."""

    def __init__(
        self,
        order: SampleOrder,
        dataset: Any,
        lengths: Sequence[int],
        most_tokens: int,
        packed: bool,
        session: Any,
    ) -> None:
        self.generator = order.generator
        self._order, self._rows, self._lengths = order, getattr(dataset, "rows", None), lengths
        self._most_tokens, self._packed, self._session = most_tokens, packed, session

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[list[Assigned]]:
        for indices in self._order:
            if self._rows is None:
                pieces = [DocumentPart(index, 0, int(self._lengths[index]), 0) for index in indices]
            else:
                pieces = [piece for index in indices for piece in self._rows[index]]
            session = self._session
            yield [session.dynamic.assign(pieces, self._most_tokens, self._packed, session.mesh)]


class AssignedSamples(Dataset[tuple[Assigned, list[Mapping[str, Any]]]]):
    """Read the samples of what was assigned; `dataset` may hold packed rows, of which pieces are read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, assigned: Assigned) -> tuple[Assigned, list[Mapping[str, Any]]]:
        return assigned, [self._read(piece) for piece in assigned.pieces]

    def _read(self, piece: DocumentPart) -> Mapping[str, Any]:
        packed = isinstance(self.dataset, PackedRows)
        documents = self.dataset.documents if packed else self.dataset
        if not packed and not is_sliced(documents):
            whole: Mapping[str, Any] = documents[piece.document]
            return whole
        tensors = dict(read_part(documents, piece.document, piece.start, piece.stop))
        return {"labels": tensors["input_ids"]} | tensors


def joined(
    assigned: Assigned,
    samples: Sequence[Mapping[str, Any]],
    packed: bool,
    pad_values: Mapping[str, float],
) -> Batch:
    """Return the samples of a ring as one batch: a packed row [1, N], or rows padded by `padded` [B, T].

    Raises:
        RingShapeError: a sample has another length than reported, or other tensors than the one before, or
            one that has to be padded by an unknown value.
        RingPatternError: a sample has positions or documents of its own.
    """
    rows: list[dict[str, Tensor]] = []
    for piece, sample in zip(assigned.pieces, samples, strict=True):
        rows.append(_checked(piece, sample))
        if rows[-1].keys() != rows[0].keys():
            raise RingShapeError.wrong(
                "data set", f"{sorted(rows[0])} in each sample", sorted(rows[-1]), "make them equal"
            )
    if not assigned.ring.samples:  # one token of padding, with the names and types of a sample
        rows = [{key: tensor[:1].clone() for key, tensor in rows[0].items()}]
        for key in rows[0].keys() & LABEL_KEYS:
            rows[0][key].fill_(IGNORE)
        rows[0]["attention_mask"] = torch.zeros(1, dtype=torch.int64, device="cpu")
    if not packed:
        return padded(rows, pad_values)
    ids = [torch.full((len(row["input_ids"]),), number, device="cpu") for number, row in enumerate(rows)]
    batch = {key: torch.cat([row[key] for row in rows])[None] for key in rows[0]}
    return batch | {DOCUMENT_IDS: torch.cat(ids)[None]}


def _checked(piece: DocumentPart, sample: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {key: torch.as_tensor(value, device="cpu") for key, value in sample.items()}
    tokens = piece.stop - piece.start
    for key, tensor in tensors.items():
        if key in ("position_ids", DOCUMENT_IDS):
            raise RingPatternError(
                f"data set: expected one document a sample, got {key} in sample {piece.document}"
            )
        if tensor.ndim == 0 or len(tensor) != tokens:
            raise RingShapeError(
                f"sample {piece.document}: {key}: expected {tokens} entries (lengths), got {[*tensor.shape]}"
            )
    if "input_ids" not in tensors:
        raise RingShapeError(f"data set: expected input_ids in sample {piece.document}, got {[*tensors]}")
    return tensors

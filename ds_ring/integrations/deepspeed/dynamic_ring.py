"""Give the samples of a batch to smaller rings of the same ranks: `"dynamic_ring": true`.

Owns which samples a rank reads of each batch, how they become one batch of its ring, and the start. The
division is `schedule/sub_rings.py`'s, its seconds `sample_times.py`'s; the path from there to the model is
the session's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.integrations.deepspeed.batch import IGNORE, LABEL_KEYS, Batch
from ds_ring.integrations.deepspeed.packed_rows import PackedRows, Piece, part_of
from ds_ring.integrations.deepspeed.packing import DOCUMENT_IDS
from ds_ring.integrations.deepspeed.sample_order import SampleOrder
from ds_ring.integrations.deepspeed.sample_times import ModelSizes, measure_times
from ds_ring.integrations.deepspeed.sliced_data import is_sliced, padded
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.sub_rings import make_sub_rings
from ds_ring.schedule.sub_rings import BatchLengths as Lengths
from ds_ring.schedule.sub_rings import SubRing, Times, divide

Sample = Mapping[str, Any]

# [Note: dynamic rings]
# Every rank runs one forward and one backward pass of each batch, whatever ring it is in: ZeRO and gradient
# accumulation count calls. So a batch is divided as a whole, and a rank has one ring in it. The loss of each
# rank is its labelled tokens' sum over those of the world ([Note: gradient scale] in loss.py), so gradients
# do not depend on the division. What a model needs of all samples (a router's loss) is summed over the whole
# ring, as ever: each token lies on one rank. Divisions are made from lengths alone, by the same arithmetic
# everywhere; a checksum of them travels with the report of every batch.


class Assigned(NamedTuple):
    """Hold a rank's part of a batch before it is read.

    Attributes:
        ring: the ranks that share it.
        pieces: what they hold; of a ring without samples one of the others', to know names and types by.
        longest: the greatest position in the whole batch.
        crc: checksum of the division.
    """

    ring: SubRing
    pieces: tuple[Piece, ...]
    longest: int
    crc: int


@dataclass
class DynamicRing:
    """Hold what divisions are made with; empty until `start`.

    Attributes:
        meshes: this rank's ring of every size.
        times: what samples take.
    """

    meshes: dict[int, RingMesh] = field(default_factory=dict)
    times: Times | None = None

    def start(self, sizes: ModelSizes, session: Any, dtype: torch.dtype) -> None:
        """Make the smaller rings and measure the machine. Collective over the world."""
        mesh = session.mesh
        self.meshes = make_sub_rings(mesh)
        if mesh.ring_size > 1:
            self.times = measure_times(sizes, session.config, mesh, session.device, dtype)

    def assign(self, pieces: Sequence[Piece], most_tokens: int, packed: bool, mesh: RingMesh) -> Assigned:
        """Return this rank's part of a batch."""
        lengths = tuple(piece.stop - piece.start for piece in pieces)
        if self.times is None or mesh.ring_size == 1:
            rings: tuple[SubRing, ...] = (SubRing(0, 1, tuple(range(len(pieces)))),)
        else:
            rings = divide(Lengths(lengths, most_tokens, not packed), mesh.ring_size, self.times).rings
        mine = next(one for one in rings if one.first <= mesh.ring_rank < one.first + one.ranks)
        held = tuple(pieces[sample] for sample in mine.samples) or (pieces[0],)
        return Assigned(mine, held, max(lengths) - 1, zlib.crc32(repr((rings, lengths)).encode()))


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
            session = self._session
            pieces = [piece for index in indices for piece in self._pieces(index)]
            yield [session.dynamic.assign(pieces, self._most_tokens, self._packed, session.mesh)]

    def _pieces(self, index: int) -> Sequence[Piece]:
        if self._rows is not None:
            pieces: Sequence[Piece] = self._rows[index]
            return pieces
        return [Piece(index, 0, int(self._lengths[index]), 0)]


class AssignedSamples(Dataset[tuple[Assigned, list[Sample]]]):
    """Read the samples of what was assigned; `dataset` may hold packed rows, of which pieces are read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, assigned: Assigned) -> tuple[Assigned, list[Sample]]:
        return assigned, [self._read(piece) for piece in assigned.pieces]

    def _read(self, piece: Piece) -> Sample:
        packed = isinstance(self.dataset, PackedRows)
        documents = self.dataset.documents if packed else self.dataset
        if not packed and not is_sliced(documents):
            whole: Sample = documents[piece.document]
            return whole
        found = dict(part_of(documents, piece.document, piece.start, piece.stop))
        return {"labels": found["input_ids"]} | found


def joined(assigned: Assigned, samples: Sequence[Sample], packed: bool) -> Batch:
    """Return the samples of a ring as one batch: a packed row [1, N], or padded rows [B, T].

    Raises:
        RingShapeError: a sample has not the length that was told, or other tensors than the one before.
        RingPatternError: a sample has positions or documents of its own.
    """
    rows: list[dict[str, Tensor]] = []
    for piece, sample in zip(assigned.pieces, samples, strict=True):
        rows.append(_checked(piece, sample))
        if rows[-1].keys() != rows[0].keys():
            raise RingShapeError(
                f"data set: expected the same tensors in all samples, got {sorted(rows[0])} and, in sample"
                f" {piece.document}, {sorted(rows[-1])}; give all of them the same"
            )
    if not assigned.ring.samples:
        rows = [_nothing(rows[0])]
    if not packed:
        return padded(rows)
    ids = [torch.full((len(row["input_ids"]),), number) for number, row in enumerate(rows)]
    batch = {key: torch.cat([row[key] for row in rows])[None] for key in rows[0]}
    return batch | {DOCUMENT_IDS: torch.cat(ids)[None]}


def _checked(piece: Piece, sample: Sample) -> dict[str, Tensor]:
    tensors = {key: torch.as_tensor(value) for key, value in sample.items()}
    tokens = piece.stop - piece.start
    for key, tensor in tensors.items():
        if key in ("position_ids", DOCUMENT_IDS):
            raise RingPatternError(
                f"data set: expected samples that are one document each under dynamic_ring, got {key} in"
                f" sample {piece.document}; take it out, or set dynamic_ring to false"
            )
        if tensor.ndim == 0 or len(tensor) != tokens:
            raise RingShapeError(
                f"data set: expected {tokens} entries, as lengths says, in {key} of sample {piece.document},"
                f" got {list(tensor.shape)}; under dynamic_ring every tensor has one entry for each token"
            )
    if "input_ids" not in tensors:
        raise RingShapeError(
            f"data set: expected input_ids in sample {piece.document} under dynamic_ring, got"
            f" {sorted(tensors)}; name the tokens so"
        )
    return tensors


def _nothing(row: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return one token of padding with the names and types of a sample."""
    first = {key: tensor[:1].clone() for key, tensor in row.items()}
    for key in LABEL_KEYS:
        if key in first:
            first[key].fill_(IGNORE)
    return first | {"attention_mask": torch.zeros(1, dtype=torch.int64)}


def sizes_of(model: torch.nn.Module) -> ModelSizes:
    """Return the sizes of a transformers model, which a sample's seconds follow from.

    Raises:
        RingConfigError: its configuration does not tell them.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes: dict[str, Any] = {
        "layers": getattr(config, "num_hidden_layers", None),
        "hidden": getattr(config, "hidden_size", None),
        "heads": getattr(config, "num_attention_heads", None),
        "vocab": getattr(config, "vocab_size", None),
    }
    missing = [name for name, value in sizes.items() if not isinstance(value, int) or value < 1]
    if missing:
        raise RingConfigError(
            f"dynamic_ring: expected a transformers model whose configuration tells its sizes, got"
            f" {type(model).__name__} without {', '.join(missing)}; set dynamic_ring to false"
        )
    heads, hidden = sizes["heads"], sizes["hidden"]
    return ModelSizes(
        **sizes,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or max(hidden // heads, 1),
        intermediate=getattr(config, "intermediate_size", None) or 4 * hidden,
    )

"""Check in one small collective per batch that the ranks of a sequence hold the same samples.

Owns the report that every rank gives of its batch, its exchange over the whole world, and the errors that
follow, raised on every rank alike: a ring whose ranks hold different samples would train on a mixture
without a word. Tokens themselves are not exchanged, only checksums of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ring.errors import RingError, RingMismatchError
from ds_ring.integrations.deepspeed.batch import LABEL_KEYS, token_shape, valid_tokens
from ds_ring.runtime.exchange import BATCH_TIMEOUT_S, Exchange
from ds_ring.runtime.mesh import RingMesh


class BatchReport(NamedTuple):
    """Describe one rank's prepared batch; whole numbers only, so that it travels as one tensor."""

    refused: int
    samples: int
    tokens: int
    keys_crc: int
    inputs_crc: int
    labels_crc: int
    valid_tokens: int
    first_rank: int = -1  # of those that hold this batch whole; -1: the first one of the sequence group
    division_crc: int = 0  # of a batch that is divided among smaller rings


REFUSED = BatchReport(1, 0, 0, 0, 0, 0, 0)
ENDED = BatchReport(0, 0, 0, 0, 0, 0, 0)  # no batch: the rank's loader is at the end of its epoch

_OF_A_SEQUENCE = {"division_crc": "lengths of the samples, and what was measured (checksum)"}
_COMPARED = {
    "samples": "samples in the batch",
    "tokens": "tokens in a sample",
    "keys_crc": "names of tensors",
    "inputs_crc": "input tokens (checksum)",
    "labels_crc": "labels (checksum)",
}


def report_of(tensors: Mapping[str, Tensor]) -> BatchReport:
    """Return the report of a prepared batch."""
    inputs_crc = labels_crc = 0
    for key in sorted(tensors):
        if key in LABEL_KEYS:
            labels_crc = _crc(tensors[key], labels_crc)
        else:
            inputs_crc = _crc(tensors[key], inputs_crc)
    samples, tokens = token_shape(tensors)
    keys_crc = zlib.crc32(" ".join(sorted(tensors)).encode())
    return BatchReport(0, samples, tokens, keys_crc, inputs_crc, labels_crc, valid_tokens(tensors))


def check_consistency(
    mine: BatchReport, fault: RingError | None, mesh: RingMesh, device: torch.device
) -> int:
    """Exchange the reports of all ranks; return the labelled tokens of the whole world, each counted once.

    Args:
        mine: this rank's report, `REFUSED` if it could not prepare its batch.
        fault: why it could not.
        mesh: the ranks that share a sequence are consecutive in the world.
        device: where collectives of the default group live.

    Raises:
        RingPeerError: another rank failed.
        RingError: `fault`, on the rank that has one.
        RingMismatchError: on all other ranks then, and on all ranks if any sequence group disagrees.
    """
    reports, sequence_size = _all_reports(mine, mesh, device), mesh.sequence_size
    # A rank that refused its batch reports so, or the others would wait for it in a hop.
    refusing = [rank for rank, report in enumerate(reports) if report.refused]
    if refusing:
        if fault is not None:
            raise fault
        raise RingMismatchError(f"rank {refusing[0]} refused its batch: see the error it raised")
    _check_ended(reports)
    sequences = [rank - rank % sequence_size for rank in range(len(reports))]
    _check_equal(reports, sequences, _OF_A_SEQUENCE)
    # Smaller rings are blocks of a sequence's ranks: whoever names a first rank is in its ring.
    firsts = [
        sequence if report.first_rank < 0 else report.first_rank
        for sequence, report in zip(sequences, reports, strict=True)
    ]
    _check_equal(reports, firsts, _COMPARED)
    return sum(report.valid_tokens for rank, report in enumerate(reports) if firsts[rank] == rank)


def _check_equal(reports: list[BatchReport], firsts: list[int], compared: dict[str, str]) -> None:
    """Raise RingMismatchError unless each rank reports what the first one of its group does."""
    for rank, (first, report) in enumerate(zip(firsts, reports, strict=True)):
        for name, words in compared.items():
            expected, got = getattr(reports[first], name), getattr(report, name)
            if expected != got:
                last = max(rank for rank, other in enumerate(firsts) if other == first)
                raise RingMismatchError(
                    f"{words}: expected the same on ranks {first} to {last}, which share"
                    f" each sequence, got {expected} on rank {first} and {got} on rank {rank}; take the"
                    " batches from the loader of ds_ring.initialize or from engine.ring.loader(dataset,"
                    " ...), or give your sampler num_replicas=engine.ring.mesh.data_size and"
                    " rank=engine.ring.mesh.data_rank; random data needs the same seed on every rank"
                )


def _check_ended(reports: list[BatchReport]) -> None:
    """Raise RingMismatchError if some ranks have a batch where others have no more."""
    ended = [rank for rank, report in enumerate(reports) if report == ENDED]
    if 0 < len(ended) < len(reports):
        more = next(rank for rank in range(len(reports)) if rank not in ended)
        raise RingMismatchError(
            f"batches in an epoch: expected the same number on all ranks, got one more on rank {more} than on"
            f" rank {ended[0]}; give all ranks loaders of the same length (engine.ring.wrap with split=True"
            " divides one evenly)"
        )


def _all_reports(mine: BatchReport, mesh: RingMesh, device: torch.device) -> list[BatchReport]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    row = torch.tensor(mine, dtype=torch.int64, device=device)
    exchange = Exchange(mesh, BATCH_TIMEOUT_S)
    rows = exchange.all_gather(row, dist.group.WORLD, dist.get_world_size())
    return [BatchReport(*values) for values in torch.stack(rows).tolist()]


def _crc(tensor: Tensor, start: int) -> int:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().tobytes(), start)

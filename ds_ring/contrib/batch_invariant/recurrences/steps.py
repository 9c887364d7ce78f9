"""Compute recurrent layers token by token, on all ranks as in a generation: `in_steps`.

A scan over chunks and a step of a generation are different formulas, so their bits differ. While the mode is
on, a prompt and a batch of training run the model's own code for one token, from token to token. A rank waits
for the states of the rank before it: P shards take P times as long as one. Only outputs are exchanged
otherwise as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ds_ring.contrib.batch_invariant.mode import BatchInvariant
from ds_ring.contrib.families.recurrent.scan import Recurrences, Steps, split_rows
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.session import RingSession
from ds_ring.layers.scan.context import ScanContext
from ds_ring.layers.scan.recurrence import on_every_rank
from ds_ring.layers.serial.serial_scan import serial_scan
from ds_ring.models.rows import in_order


@contextmanager
def in_steps(session: RingSession, mode: BatchInvariant) -> Iterator[None]:
    """Compute the recurrences of a session's mesh one token after the other, as long as this is on."""
    recurrences = session.mesh.owners[Recurrences]
    recurrences.by_steps, before = run_recurrence_in_steps, recurrences.by_steps
    try:
        yield
    finally:
        recurrences.by_steps = before


def run_recurrence_in_steps(
    sharding: BatchSharding, tensors: Sequence[Tensor], steps: Steps, dim: int, wants_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs of a recurrence, and its last state; arguments as those of `scan.recurrence`."""
    sets = split_rows(sharding)
    results = [
        _select_rows(context, [x[rows] if rows else x for x in tensors], steps, dim, wants_state)
        for context, rows in sets
    ]
    rows = [samples for _, samples in sets]
    out, states = (
        in_order([part for part, _ in results], rows),
        [part for _, part in results if part is not None],
    )
    return out, in_order(states, rows) if wants_state else None


def _select_rows(
    context: ScanContext, tensors: Sequence[Tensor], steps: Steps, dim: int, wants_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Return what `run_recurrence_in_steps` returns, of rows with the same documents."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    initial = last = tensors[0].new_zeros(len(tensors[0]), *steps.shape, dtype=dtype)

    def step(state: Tensor, pieces: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        nonlocal last
        out, last = steps.run(state, [x.movedim(1, dim) for x in pieces])
        last = last.to(dtype)
        return out.movedim(dim, 1), last

    out = serial_scan(
        step, initial, [x.movedim(dim, 1) for x in tensors], layout=context.layout, mesh=context.mesh,
        documents=context.documents, hop_timeout_s=context.hop_timeout_s,
    ).movedim(1, dim)  # fmt: skip
    if not wants_state:
        return out, None
    # The last run of the sequence is the last one that its rank computes.
    runs = context.runs.list_rank_runs(context.mesh.sequence_rank).tolist()
    state = last.clone() if len(context.runs.starts) - 1 in runs else torch.zeros_like(initial)
    return out, on_every_rank(context, state, "state after the sequence")

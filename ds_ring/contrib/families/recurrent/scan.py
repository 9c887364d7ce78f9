"""A linear recurrence, or a look-back of a few tokens, over the rows of a batch.

`layers/scan/recurrence.py` computes rows with the same documents. Here are the sets of rows of a batch.

Shapes: B samples, S local slots, L tokens of a piece, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_ring.data.batch import SHARDING
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.errors import RingConfigError
from ds_ring.layers.scan.context import ScanContext, scan_context
from ds_ring.layers.scan.halo import halo_op, shift_sequence
from ds_ring.layers.scan.recurrence import PieceKernel, padded, run_recurrence
from ds_ring.models.rows import in_order
from ds_ring.ops.eager import run_compared

Original = Callable[..., Any]


active: list[BatchSharding] = []  # of the layers that are being computed, innermost last


def get_sharding(kwargs: dict[str, Any]) -> BatchSharding | None:
    """Return the sharding of a call, and take it out of the arguments; None if each rank has all tokens."""
    sharding: BatchSharding | None = kwargs.pop(SHARDING, None)
    if sharding is None and active:
        sharding = active[-1]
    return None if sharding is None or sharding.is_replicated else sharding


def split_rows(sharding: BatchSharding) -> list[tuple[ScanContext, list[int]]]:
    """Return the context of each set of documents, and the rows that have them; [] for all rows."""
    layout, mesh, timeout = sharding.layout, sharding.mesh, float(sharding.config.hop_timeout_seconds)
    if not sharding.groups or sharding.masks_padding:
        return [(scan_context(layout, mesh, None, timeout), [])]
    return [
        (scan_context(layout, mesh, group.pattern, timeout), list(group.rows)) for group in sharding.groups
    ]


def by_rows(sharding: BatchSharding, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return `run(context, *tensors)` for the rows of each set of documents; dimension 0 is the batch."""
    sets = split_rows(sharding)
    outs = [run(context, *(x[rows] if rows else x for x in tensors)) for context, rows in sets]
    return in_order(outs, [rows for _, rows in sets])


def add_halo(context: ScanContext, x: Tensor, before: int, call: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what a causal convolution makes of x [B, C, S].

    `call` gets all pieces concatenated, each preceded by the `before` tokens before it (zeros where a
    document begins). Its result has one entry a token.
    """
    operands = (x, 2, before, 0, context.handle)
    beside = run_compared(context.mesh, "convolution", halo_op, *operands)  # [B, C, R, before]
    zeros = x.new_zeros((*x.shape[:2], before))
    parts: list[Tensor] = []
    for piece in context.pieces:
        front = beside[:, :, piece.run] if piece.is_first else zeros
        parts += [front, x[:, :, piece.slot : piece.slot + piece.length]]
    if not parts:  # no tokens, but the backward pass is every rank's, and so are gradients of weights
        of_padding = call(torch.cat([zeros, x[:, :, :1]], dim=2))
        return x + beside.flatten(2).sum() + of_padding[:, :, :0].sum()
    convolved = call(torch.cat(parts, dim=2))
    results, first = [], 0
    for piece in context.pieces:
        results.append(convolved[:, :, first + before : first + before + piece.length])
        first += before + piece.length
    return padded(torch.cat(results, dim=2), x.shape[2], 2)


def take_token_before(context: ScanContext, x: Tensor, first: Tensor) -> Tensor:
    """Return the token before each token of x [B, S, C], and `first` [C] where a document begins."""
    before = shift_sequence(
        x, -1, dim=1, layout=context.layout, mesh=context.mesh, documents=context.documents,
        hop_timeout_s=context.hop_timeout_s,
    )  # fmt: skip
    return torch.where(context.exists(-1, x.device)[:, None], before, first)


def recurrence(
    sharding: BatchSharding, tensors: Sequence[Tensor], call: PieceKernel, matrix: bool, dim: int,
    wants_state: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the outputs of a recurrence over all pieces, and the state after the last token of each sample.

    Args:
        sharding: of the batch.
        tensors: [B, ..., S, ...] with the slots in dimension `dim`.
        call: computes pieces of one length.
        matrix: see `ring_scan`.
        dim: 1 or 2.
        wants_state: the state is returned, on every rank; it has no gradient.
    """
    sets = split_rows(sharding)
    results = [
        run_recurrence(context, [x[rows] if rows else x for x in tensors], call, matrix, dim, wants_state)
        for context, rows in sets
    ]
    rows = [samples for _, samples in sets]
    out, states = (
        in_order([part for part, _ in results], rows),
        [part for _, part in results if part is not None],
    )
    return out, in_order(states, rows) if wants_state else None


def refuse_states(name: str, initial_state: Tensor | None, output_final_state: bool) -> None:
    if initial_state is not None or output_final_state:
        raise RingConfigError.wrong(name, "a call without a cache on a ring", "one", "pass use_cache=False")

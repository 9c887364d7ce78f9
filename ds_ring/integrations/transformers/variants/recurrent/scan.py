"""A linear recurrence, or a look-back of a few tokens, over the pieces of a shard.

A piece is a run of consecutive tokens of one document. A recurrence that is linear in its state S begins a
piece with S0. Its outputs are out_t + reach_t(S0), where out_t are the outputs for S0 = 0, and its final
state is M S0 + B. `scan_op` computes S0 from M and B of all runs.

Shapes: B samples, S local slots, L tokens of a piece, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.batch import SHARDING
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.transformers.rows import in_order, padded
from ds_ring.layers.scan.context import ScanContext, scan_context
from ds_ring.layers.scan.halo import halo_op, shift_sequence
from ds_ring.layers.scan.scan import compose, scan_op

Original = Callable[..., Any]


class Computed(NamedTuple):
    """What one kernel call returns of `b` pieces of one length that begin with zeros.

    Attributes:
        out: outputs, [b, ..., L, ...].
        final: B, the final states, [b, ...].
        transition: M over each piece, [b, ...], as `ring_scan` takes it; any values where no state comes.
        reach: S0 [b, ...] -> what the state before the pieces adds to the outputs; None where none comes.
    """

    out: Tensor
    final: Tensor
    transition: Tensor
    reach: Callable[[Tensor], Tensor] | None


# Takes the pieces' tensors, and whether a state comes.
PieceKernel = Callable[[Sequence[Tensor], bool], Computed]

active: list[BatchSharding] = []  # of the layers that are being computed, innermost last


def sharding_of(kwargs: dict[str, Any]) -> BatchSharding | None:
    """Return the sharding of a call, and take it out of the arguments; None if each rank has all tokens."""
    sharding: BatchSharding | None = kwargs.pop(SHARDING, None)
    if sharding is None and active:
        sharding = active[-1]
    return None if sharding is None or sharding.is_replicated else sharding


def rows_of(sharding: BatchSharding) -> list[tuple[ScanContext, list[int]]]:
    """Return the context of each set of documents, and the rows that have them; [] for all rows."""
    layout, mesh, timeout = sharding.layout, sharding.mesh, float(sharding.config.hop_timeout_seconds)
    if not sharding.groups or sharding.masks_padding:
        return [(scan_context(layout, mesh, None, timeout), [])]
    return [
        (scan_context(layout, mesh, group.pattern, timeout), list(group.rows)) for group in sharding.groups
    ]


def by_rows(sharding: BatchSharding, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return `run(context, *tensors)` for the rows of each set of documents; dimension 0 is the batch."""
    sets = rows_of(sharding)
    outs = [run(context, *(x[rows] if rows else x for x in tensors)) for context, rows in sets]
    return in_order(outs, [rows for _, rows in sets])


def with_halo(context: ScanContext, x: Tensor, before: int, call: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what a causal convolution makes of x [B, C, S].

    `call` gets all pieces concatenated, each preceded by the `before` tokens before it (zeros where a
    document begins). Its result has one entry a token.
    """
    beside = halo_op(x, 2, before, 0, context.handle)  # [B, C, R, before]
    zeros = x.new_zeros((*x.shape[:2], before))
    parts: list[Tensor] = []
    for piece in context.pieces:
        front = beside[:, :, piece.run] if piece.is_first else zeros
        parts += [front, x[:, :, piece.slot : piece.slot + piece.length]]
    if not parts:  # no tokens, but the backward pass is every rank's, and so are gradients of weights
        of_padding = call(torch.cat([zeros, x[:, :, :1]], dim=2))
        return x + beside.flatten(2).sum() + of_padding[:, :, :0].sum()
    convolved = call(torch.cat(parts, dim=2))
    found, first = [], 0
    for piece in context.pieces:
        found.append(convolved[:, :, first + before : first + before + piece.length])
        first += before + piece.length
    return padded(torch.cat(found, dim=2), x.shape[2], 2)


def token_before(context: ScanContext, x: Tensor, first: Tensor) -> Tensor:
    """Return the token before each token of x [B, S, C], and `first` [C] where a document begins."""
    before = shift_sequence(
        x, -1, dim=1, layout=context.layout, mesh=context.mesh, documents=context.documents,
        hop_timeout_s=context.hop_timeout_s,
    )  # fmt: skip
    return torch.where(context.exists(-1, x.device)[:, None], before, first)


def kinds_of(context: ScanContext) -> dict[tuple[int, bool], list[int]]:
    """Return the numbers of this rank's pieces by their length, and whether they get a state."""
    kinds: dict[tuple[int, bool], list[int]] = {}
    for number, piece in enumerate(context.pieces):
        kinds.setdefault((piece.length, piece.continues), []).append(number)
    if not kinds:
        with collective(context.mesh, "recurrence"):
            raise RingConfigError(
                f"{context.layout}: expected tokens on every rank of a model with recurrent layers, got none"
                f" on rank {context.mesh.sequence_rank} of the sequence; use fewer ranks"
            )
    return kinds


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
    sets = rows_of(sharding)
    found = [
        _recurrence_of_rows(
            context, [x[rows] if rows else x for x in tensors], call, matrix, dim, wants_state
        )
        for context, rows in sets
    ]
    rows = [one for _, one in sets]
    out, states = in_order([one for one, _ in found], rows), [one for _, one in found if one is not None]
    return out, in_order(states, rows) if wants_state else None


def _recurrence_of_rows(
    context: ScanContext,
    tensors: Sequence[Tensor],
    call: PieceKernel,
    matrix: bool,
    dim: int,
    wants_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return what `recurrence` does, of rows with the same documents."""
    batch, slots = tensors[0].shape[0], tensors[0].shape[dim]
    kinds = kinds_of(context) if context.pieces else {}
    outs: dict[int, Tensor] = {}
    finals: dict[int, tuple[Tensor, Tensor]] = {}  # M and B by run
    reaches: list[tuple[list[int], Tensor, Callable[[Tensor], Tensor]]] = []
    for (length, continues), numbers in kinds.items():
        first = [context.pieces[number].slot for number in numbers]
        found = call([torch.cat([x.narrow(dim, slot, length) for slot in first]) for x in tensors], continues)
        for place, number in enumerate(numbers):
            rows = slice(place * batch, (place + 1) * batch)
            outs[number] = found.out[rows]
            if context.pieces[number].is_last:
                finals[context.pieces[number].run] = found.transition[rows], found.final[rows]
        if found.reach is not None:
            reaches.append((numbers, found.out, found.reach))
    if kinds:
        moves, increments = (torch.stack([finals[run][i] for run in range(context.own_runs)]) for i in (0, 1))
    else:  # no token is here: a padding slot gives the shape of the states
        found = call([x.narrow(dim, 0, 1) for x in tensors], False)
        moves, increments = found.transition[None, :][:0], found.final[None, :][:0]
        outs[0] = found.out.narrow(dim, 0, 0)
    states = scan_op(moves, increments, matrix, context.handle)
    for numbers, out, reach in reaches:
        reached = out + reach(torch.cat([states[context.pieces[number].run] for number in numbers])).to(
            out.dtype
        )
        for place, number in enumerate(numbers):
            outs[number] = reached[place * batch : (place + 1) * batch]
    whole = torch.cat([outs[number] for number in sorted(outs)], dim=dim)
    if not reaches:  # every rank takes part in the backward pass of the scan
        whole = whole + states.flatten()[:0].sum().to(whole.dtype)
    last = _state_after(context, moves, increments, states, matrix) if wants_state else None
    return padded(whole, slots, dim), last


def _state_after(
    context: ScanContext, moves: Tensor, increments: Tensor, states: Tensor, matrix: bool
) -> Tensor:
    """Return the state after the last token of the sequence, on every rank.

    Args:
        context: of the layout.
        moves, increments, states: M and B of this rank's runs, and the states with which they begin.
        matrix: see `ring_scan`.
    """
    last = len(context.runs.starts) - 1
    found = increments.new_zeros(increments.shape[1:])
    for place, run in enumerate(context.runs.of_rank(context.mesh.sequence_rank).tolist()):
        if run == last:
            passes, _ = context.masks(increments)
            found = compose((moves * passes, increments), (None, states), matrix)[1][place].contiguous()
    with collective(context.mesh, "state after the sequence", context.exchange) as call:
        context.agree(call, shape=tuple(found.shape), dtype=found.dtype)
        if context.mesh.sequence_group is not None:
            call.exchange.all_reduce(found, context.mesh.sequence_group)
    return found


def refuse_states(name: str, initial_state: Tensor | None, output_final_state: bool) -> None:
    if initial_state is not None or output_final_state:
        raise RingConfigError.wrong(name, "a call without a cache on a ring", "one", "pass use_cache=False")

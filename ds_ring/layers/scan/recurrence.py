"""A recurrence that is linear in its state, over the pieces of a shard: `run_recurrence`.

A piece is a run of consecutive tokens of one document. The recurrence begins a piece with S0. Its outputs are
out_t + reach_t(S0), where out_t are the outputs for S0 = 0, and its final state is M S0 + B. `scan_op`
computes S0 from M and B of all runs.

Shapes: B samples, S local slots, L tokens of a piece, R runs of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.errors import RingConfigError
from ds_ring.layers.scan.context import ScanContext
from ds_ring.layers.scan.scan import compose, scan_op
from ds_ring.ops.eager import run_compared


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


def group_pieces(context: ScanContext) -> dict[tuple[int, bool], list[int]]:
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


def padded(x: Tensor, slots: int, dim: int = 1) -> Tensor:
    """Append zeros for the padding slots at the end of a shard, or cut slots off."""
    if x.shape[dim] >= slots:
        return x if x.shape[dim] == slots else x.narrow(dim, 0, slots)
    shape = list(x.shape)
    shape[dim] = slots - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim=dim)


def run_recurrence(
    context: ScanContext, tensors: Sequence[Tensor], call: PieceKernel, matrix: bool, dim: int,
    wants_state: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the outputs of a recurrence over all pieces, and the state after the last token of the sequence.

    Args:
        context: of a layout and the documents of all samples.
        tensors: [B, ..., S, ...] with the slots in dimension `dim`.
        call: computes pieces of one length; its tensors are those of the pieces, [b, ..., L, ...].
        matrix: see `ring_scan`.
        dim: 1 or 2.
        wants_state: the state is returned, on every rank; it has no gradient.
    """
    batch, slots = tensors[0].shape[0], tensors[0].shape[dim]
    kinds = group_pieces(context) if context.pieces else {}
    outs: dict[int, Tensor] = {}
    finals: dict[int, tuple[Tensor, Tensor]] = {}  # M and B by run
    reaches: list[tuple[list[int], Tensor, Callable[[Tensor], Tensor]]] = []
    for (length, continues), numbers in kinds.items():
        first = [context.pieces[number].slot for number in numbers]
        cut = [torch.cat([x.narrow(dim, slot, length) for slot in first]) for x in tensors]
        result = call(cut, continues)
        for place, number in enumerate(numbers):
            rows = slice(place * batch, (place + 1) * batch)
            outs[number] = result.out[rows]
            if context.pieces[number].is_last:
                finals[context.pieces[number].run] = result.transition[rows], result.final[rows]
        if result.reach is not None:
            reaches.append((numbers, result.out, result.reach))
    if kinds:
        moves, increments = (torch.stack([finals[run][i] for run in range(context.own_runs)]) for i in (0, 1))
    else:  # no token is here: a padding slot gives the shape of the states
        result = call([x.narrow(dim, 0, 1) for x in tensors], False)
        moves, increments = result.transition[None, :][:0], result.final[None, :][:0]
        outs[0] = result.out.narrow(dim, 0, 0)
    states = run_compared(context.mesh, "recurrence", scan_op, moves, increments, matrix, context.handle)
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
    passes, _ = context.masks(increments)
    return take_last_run(context, compose((moves * passes, increments), (None, states), matrix)[1])


def take_last_run(context: ScanContext, x: Tensor) -> Tensor:
    """Return what is computed of each own run, [R, ...], of the sequence's last run, on every rank."""
    last = len(context.runs.starts) - 1
    result = x.new_zeros(x.shape[1:])
    for place, run in enumerate(context.runs.list_rank_runs(context.mesh.sequence_rank).tolist()):
        if run == last:
            result = x[place].clone()
    return on_every_rank(context, result, "state after the sequence")


def on_every_rank(context: ScanContext, x: Tensor, name: str) -> Tensor:
    """Return the sum of all ranks' x: what one of them has, as the others have zeros. `x` is changed."""
    with collective(context.mesh, name, context.exchange) as call:
        context.agree(call, shape=tuple(x.shape), dtype=x.dtype)
        if context.mesh.sequence_group is not None:
            call.exchange.all_reduce(x, context.mesh.sequence_group)
    return x

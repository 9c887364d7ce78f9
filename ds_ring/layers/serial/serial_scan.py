"""A recurrence that is not linear in its state, over a sharded sequence: `serial_scan`.

Such a state cannot be composed from the runs' own maps, so each run waits for the run before it in its
document. Runs of different documents, and parts of the batch, overlap.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.streams import is_fake
from ds_ring.errors import RingShapeError, check_whole_number
from ds_ring.layers.scan.context import ScanContext, check_blocks, scan_context
from ds_ring.layers.scan.recurrence import padded
from ds_ring.layers.serial.hand_over import hand_over_op, turns
from ds_ring.ops.checks import DTYPES, check_operand
from ds_ring.ops.gradients import run_compared
from ds_ring.ops.handles import forbid_tracing
from ds_ring.patterns.documents.pattern import Documents, Tree
from ds_ring.schedule.layout import Layout

# Takes the state [b, ...] and the tensors [b, L, ...] of a piece; returns outputs and the state after it.
CellStep = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]


@forbid_tracing
def serial_scan(
    step: CellStep, initial: Tensor, tensors: Sequence[Tensor], *, layout: Layout, mesh: RingMesh,
    documents: Documents | Tree | None = None, block_size: int = 1, batch_parts: int = 1,
    hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Compute a recurrence of any kind over a sharded sequence, run after run. Differentiable.

    For a recurrence that is linear in its state use `ring_scan`, which is parallel. This one is serial: with
    contiguous shards of one document, rank p computes when rank p - 1 is done. The whole takes as long as on
    one rank, but for memory. Packed documents inside a shard, and `batch_parts`, overlap.

    Args:
        step: computes consecutive tokens of one document from a state [b, ...] and tensors [b, L, ...];
            returns outputs [b, L, ...] and the state after the last token. It may not call other ranks.
        initial: the state with which documents begin, [B, ...]; equal on all ranks.
        tensors: local [B, S, ...].
        layout: the rank and slot of each token; its runs have no gaps (zigzag, contiguous, balanced).
        mesh: this process's place; every rank of the sequence must call, also in the backward pass.
        documents: each document, or path of a tree, begins with `initial`.
        block_size: tokens that `step` takes at once (the mini-batch of TTT): runs inside a document begin at
            multiples of it.
        batch_parts: parts of the batch that are computed one after the other, so that ranks overlap.
        hop_timeout_s: seconds that a run may wait for the runs before it.

    Returns:
        out [B, S, ...]; zeros for padding.

    Raises:
        RingShapeError: `batch_parts` does not divide the batch; tensors are not the layout's.
        RingLayoutError: a run begins inside a block; and as `halo`.
        RingPatternError, RingMismatchError, RingPeerError: as `halo`.
    """
    context = scan_context(layout, mesh, documents, hop_timeout_s)
    with collective(mesh, "serial_scan", alone=is_fake(initial)) as call:
        if not callable(step):
            raise RingShapeError.wrong(
                "serial_scan: step", "a function", step, "pass one of state and tensors"
            )
        _check(context, initial, tensors, block_size, batch_parts)
        call.agree({"block_size": block_size, "batch_parts": batch_parts, "initial": tuple(initial.shape)})
    batch = len(initial) // batch_parts
    begin = list(initial.split(batch))
    of_run = context.runs.list_rank_runs(mesh.sequence_rank).tolist()
    turn_of = turns(layout, mesh.ulysses_size, documents)
    last_turn = int(turn_of.max(initial=0)) + batch_parts - 1
    # A node of every hand-over on every rank, also on one whose first runs come later; see
    # [Note: nodes of all ranks].
    got = initial.new_zeros(context.own_runs, *begin[0].shape) + _anchor(step, initial, tensors, block_size)
    outs: dict[tuple[int, int], Tensor] = {}
    for turn in range(last_turn + 1):
        after = []
        for number, run in enumerate(of_run):
            part = turn - int(turn_of[run])
            state = torch.zeros_like(begin[0])
            if 0 <= part < batch_parts:
                rows = slice(part * batch, (part + 1) * batch)
                state = got[number]
                for piece in (item for item in context.pieces if item.run == number):
                    state = state if piece.continues else begin[part]
                    cut = [x[rows, piece.slot : piece.slot + piece.length] for x in tensors]
                    outs[part, piece.slot], state = step(state, cut)
            after.append(state)
        if turn < last_turn:
            waiting = got.flatten()[:0].sum()
            finals = torch.stack(after) + waiting if after else got
            operands = (finals, turn, batch_parts, False, context.handle)
            got = run_compared(mesh, "serial_scan", hand_over_op, *operands)
    slots = [piece.slot for piece in context.pieces]
    if not slots:  # no token is here: padding gives the shape of the outputs
        for part, state in enumerate(begin):
            outs[part, 0] = step(state, [x[:batch, :block_size] for x in tensors])[0][:, :0]
        slots = [0]
    parts = [torch.cat([outs[part, slot] for slot in slots], dim=1) for part in range(batch_parts)]
    return padded(torch.cat(parts), context.runs.local_tokens, 1) + got.flatten()[:0].sum()


def _anchor(step: CellStep, initial: Tensor, tensors: Sequence[Tensor], block_size: int) -> Tensor:
    """Return 0, computed from all that a step is computed from, the tensors that it captured among them."""
    if not torch.is_grad_enabled():
        return initial.new_zeros(())
    none = [x[:0, :block_size] for x in tensors]  # of no sample: it costs nothing, and its gradient is 0
    try:
        with warnings.catch_warnings():  # of means of nothing
            warnings.simplefilter("ignore")
            result = step(initial[:0], none)
    except Exception:  # a step that takes no empty batch
        result = step(initial[:1], [x[:1, :block_size] for x in tensors])
    return torch.stack([x.flatten()[:0].sum().to(initial.dtype) for x in (initial, *tensors, *result)]).sum()


def _check(
    context: ScanContext, initial: Tensor, tensors: Sequence[Tensor], block_size: int, batch_parts: int
) -> None:
    check_operand("serial_scan: initial", initial)
    if initial.dtype not in (*DTYPES, torch.complex64, torch.complex128):
        expected = "a floating or complex dtype (float64 to float16)"
        raise RingShapeError.wrong("serial_scan: initial", expected, f"{initial.dtype}", "cast it")
    for x in tensors:
        check_operand("serial_scan: tensors", x)
    for name, value in (("block_size", block_size), ("batch_parts", batch_parts)):
        check_whole_number(value, f"serial_scan: {name}", RingShapeError)
    slots, batch = context.runs.local_tokens, len(initial)
    for x in tensors:
        if x.shape[:2] != (batch, slots):
            raise RingShapeError.wrong(
                "serial_scan: tensors", f"[{batch}, {slots}, ...]", list(x.shape), "pass this rank's shard"
            )
    if batch % batch_parts:
        raise RingShapeError.wrong(
            "serial_scan: batch_parts", f"a divisor of {batch} samples", batch_parts, "take fewer parts"
        )
    check_blocks("serial_scan", context, block_size)

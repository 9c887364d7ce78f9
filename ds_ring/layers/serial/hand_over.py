"""Hand states from run to run, one step at a time: the operator `ds_ring::hand_over`, and its steps.

Owns which run hands its state over in which step. A run takes part once for each part of the batch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.compat.torch import operator
from ds_ring.layers.scan.context import ScanContext
from ds_ring.layers.scan.scan import Letter, deliver
from ds_ring.layers.scan.sequence_runs import sequence_runs
from ds_ring.masks.slots import IntArray
from ds_ring.ops.gradients import run_gradient
from ds_ring.ops.handles import get_object
from ds_ring.ops.layer_gradients import has_run_again, note_call
from ds_ring.ops.passes import count_forward_pass
from ds_ring.patterns.documents.pattern import Documents, Tree
from ds_ring.schedule.layout import Layout


@lru_cache(maxsize=64)
def turns(layout: Layout, parts: int, documents: Documents | Tree | None) -> IntArray:
    """Return for each run how many runs of its document, or path, are before it, [N]: its turn."""
    runs = sequence_runs(layout, parts, documents if isinstance(documents, Tree) else None)
    begins = runs.previous < 0
    if isinstance(documents, Documents):
        begins |= np.isin(runs.starts, documents.starts)
    result = np.zeros(len(begins), dtype=np.int64)
    for run in np.flatnonzero(~begins).tolist():
        result[run] = result[runs.previous[run]] + 1
    return result


@operator("ds_ring::hand_over")
def hand_over_op(states: Tensor, turn: int, batch_parts: int, reverse: bool, handle: int) -> Tensor:
    """Return the states that this rank's runs get, [R, ...], zeros for none.

    Args:
        states: of this rank's runs after a step, [R, ...].
        turn: the step: a run of turn r has computed part `turn` - r of the batch.
        batch_parts: number of these parts.
        reverse: send gradients: from each run to the one before it, where they are added up.
        handle: of a `ScanContext`.
    """
    context = get_object(handle, ScanContext)
    mesh, rank, runs = context.mesh, context.mesh.sequence_rank, context.runs
    with collective(mesh, "hand over", context.exchange) as call:
        context.agree(call, shape=tuple(states.shape[1:]), dtype=states.dtype, turn=turn, reverse=reverse)
        if not reverse:
            count_forward_pass()
        turn_of = turns(context.layout, mesh.ulysses_size, context.documents)
        to = np.flatnonzero((turn_of > turn - batch_parts + 1) & (turn_of > 0) & (turn_of <= turn + 1))
        pairs = [(int(runs.previous[run]), run) for run in to.tolist()]
        if reverse:
            pairs = [(to, of) for of, to in pairs]
        place = {run: at for at, run in enumerate(runs.list_rank_runs(rank).tolist())}
        shapes = (states.shape[1:],)
        letters = [Letter(of, to, shapes, (states[place[of]],) if of in place else ()) for of, to in pairs]
        arrived, messages = torch.zeros_like(states), deliver(letters, runs.ranks.tolist(), rank, states)
        context.swap(*next(messages))
        try:
            next(messages)
        except StopIteration as end:
            for letter, (state,) in end.value:
                arrived[place[letter.to]] += state
        return arrived


hand_over_op.register_fake(lambda states, *_: states.new_empty(states.shape))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    states, ctx.turn, ctx.batch_parts, ctx.reverse, handle = inputs
    ctx.context = get_object(handle, ScanContext)  # alive until the backward pass
    note_call(ctx, ctx.context.exchange, states)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    operands = (grad.contiguous(), ctx.turn, ctx.batch_parts, not ctx.reverse, ctx.context.handle)
    back = run_gradient(ctx.context.mesh, has_run_again(ctx), hand_over_op, *operands)
    return back, None, None, None, None


hand_over_op.register_autograd(_backward, setup_context=_setup)

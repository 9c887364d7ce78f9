"""Compute the state with which each run begins, for layers that are linear in their state: `ring_scan`.

A recurrence (linear attention, a state-space model, a gated delta rule) maps a state S to M S + B over a run.
Such maps compose associatively, so the states of all runs are an exclusive scan over the pairs (M, B)
(Blelloch 1990, "Prefix sums and their applications"; Martin and Cundy 2018, "Parallelizing linear recurrent
neural nets over sequence length"). Its messages do not depend on the length of the sequence.

Owns the operator `ds_ring::scan`. Its gradient is the scan of the transposed maps in reverse order.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingShapeError
from ds_ring.layers.scan.context import ByRank, ScanContext, handle_of
from ds_ring.layers.scan.sequence_runs import ScanStep, SequenceRuns
from ds_ring.ops.checks import check_operand
from ds_ring.ops.handles import constant, object_of, operator
from ds_ring.ops.passes import count_forward_pass
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.schedule.layout import Layout


def ring_scan(
    transition: Tensor, increment: Tensor, *, layout: Layout, mesh: RingMesh, matrix: bool = False,
    documents: Documents | None = None, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Return the state with which each run of this rank begins. Differentiable.

    A layer that is linear in its state ends a run with the state M S + B, where S is the state with which the
    run begins, B the final state of the run if it begins with zeros, and M the transition over the whole run.

    Args:
        transition: M of this rank's R runs, in slot order. Elementwise: [R, ...], broadcast against
            `increment` (a scalar for each head, or a diagonal). With `matrix`: [R, ..., K, K].
        increment: B of this rank's runs: [R, ...], with `matrix` [R, ..., K, V]. Float32 or float64.
        layout: the rank and slot of each token; its runs have no gaps (zigzag, contiguous, balanced).
        mesh: this process's place; every rank of the sequence must call, also in the backward pass.
        matrix: multiply states by the transition as matrices.
        documents: the state is zero where a document begins. `increment` is then of the run's last document.
        hop_timeout_s: seconds after which a message that has not arrived raises.

    Returns:
        States like `increment`: zeros for the first run of the sequence, and for runs that begin a document.
        Use them on every rank, even where they are zeros: each rank takes part in the backward pass.

    Raises:
        RingShapeError: other shapes or dtypes than above.
        RingLayoutError, RingPatternError, RingMismatchError, RingPeerError: as `halo`.
    """
    handle = handle_of(layout, mesh, documents, constant(hop_timeout_s))
    return scan_op(transition, increment, matrix, handle)


@operator("ds_ring::scan")
def scan_op(transition: Tensor, increment: Tensor, matrix: bool, handle: int) -> Tensor:
    """Return the states of `ring_scan`."""
    context = object_of(handle, ScanContext)
    with collective(context.mesh, "scan forward", context.exchange) as call:
        _check_scan(transition, increment, matrix, context)
        context.agree(call, **_fields(transition, increment, matrix))
        count_forward_pass()
        passes, continues = context.masks(increment)
        states = _exclusive_scan(context, transition * passes, increment, matrix, reverse=False)
        return states if context.documents is None else states * continues


@operator("ds_ring::scan_backward")
def scan_backward_op(
    grad: Tensor, transition: Tensor, states: Tensor, matrix: bool, handle: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of transition and increment; the states are those of the forward pass."""
    context = object_of(handle, ScanContext)
    with collective(context.mesh, "scan backward", context.exchange) as call:
        context.agree(call, **_fields(transition, grad, matrix))
        passes, continues = context.masks(grad)
        transposed = (transition.mT if matrix else transition) * passes
        # The gradient of a run's final state is what all later runs make of it.
        of_increment = _exclusive_scan(context, transposed, grad * continues, matrix, reverse=True)
        if matrix:
            return (of_increment @ states.mT) * passes, of_increment
        return (of_increment * states).sum_to_size(transition.shape) * passes, of_increment


def _fields(transition: Tensor, increment: Tensor, matrix: bool) -> dict[str, object]:
    """Return what ranks compare. The number of runs may differ by rank."""
    shapes = {"transition": tuple(transition.shape[1:]), "increment": tuple(increment.shape[1:])}
    return {"matrix": matrix, **shapes, "dtype": increment.dtype}


def _check_scan(transition: Tensor, increment: Tensor, matrix: bool, context: ScanContext) -> None:
    for name, x in (("transition", transition), ("increment", increment)):
        check_operand(f"ring_scan: {name}", x)
        if x.dtype not in (torch.float32, torch.float64) or x.dtype != increment.dtype:
            raise RingShapeError.wrong(
                f"ring_scan: {name}", "float32 or float64", f"{x.dtype}", "cast both operands"
            )
    runs, shape = context.own_runs, tuple(increment.shape)
    fits = transition.dim() == increment.dim() and len(transition) == len(increment) == runs
    if fits and matrix:
        fits = transition.shape == (*shape[:-1], shape[-2])
    elif fits:
        fits = all(m in (1, b) for m, b in zip(transition.shape[1:], shape[1:], strict=True))
    if not fits:
        form = "[R, ..., K, K] and [R, ..., K, V]" if matrix else "[R, ...] and [R, ...], broadcast"
        raise RingShapeError(
            f"ring_scan: expected transition and increment {form} for this rank's R = {runs} runs, got"
            f" {tuple(transition.shape)} and {shape}; one entry for each run of the layout, in slot order"
        )


def compose(
    later: tuple[Tensor, Tensor], earlier: tuple[Tensor | None, Tensor], matrix: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the map (M, B) of two runs, one after the other; no M if the earlier one needs none."""
    transition, increment = later
    before, state = earlier
    if matrix:
        return None if before is None else transition @ before, transition @ state + increment
    return None if before is None else transition * before, transition * state + increment


def scan_messages(
    runs: SequenceRuns, rank: int, transition: Tensor, increment: Tensor, matrix: bool, reverse: bool
) -> Generator[tuple[ByRank, ByRank], None, Tensor]:
    """Compute the state before each run of a rank: `SequenceRuns.rounds`, then one shift by a run.

    Yields the tensors that the rank sends and receives in each round, by the other rank; continues once the
    tensors to receive are filled. Real ranks exchange them (`scan_op`), virtual ranks copy them
    (simulation/scans.py).

    Returns:
        The states, like `increment`.
    """
    count, ranks = len(runs.starts), runs.ranks.tolist()
    if reverse:
        ranks.reverse()
    numbers = [count - 1 - run if reverse else run for run in runs.of_rank(rank).tolist()]
    found: dict[int, tuple[Tensor | None, Tensor]] = {
        number: (transition[place], increment[place]) for place, number in enumerate(numbers)
    }
    shapes = transition.shape[1:], increment.shape[1:]
    sizes = shapes[0].numel(), shapes[1].numel()
    states = torch.zeros_like(increment)
    shift = [ScanStep(number - 1, number, True) for number in range(1, count)]
    for steps in [*runs.rounds(), shift]:
        arrived: dict[int, tuple[Tensor | None, Tensor]] = {}
        sends: dict[int, list[Tensor]] = {}
        due: dict[int, list[ScanStep]] = {}
        for step in steps:
            of, to = ranks[step.of], ranks[step.to]
            if of == rank:
                before, state = found[step.of]
                if to == rank:
                    arrived[step.to] = None if step.is_complete else before, state
                else:
                    parts = [state] if step.is_complete or before is None else [before, state]
                    sends.setdefault(to, []).extend(part.reshape(-1) for part in parts)
            elif to == rank:
                due.setdefault(of, []).append(step)
        receives = {
            peer: increment.new_empty(sum(sizes[1] + (not step.is_complete) * sizes[0] for step in due_steps))
            for peer, due_steps in due.items()
        }
        yield {peer: torch.cat(parts) for peer, parts in sends.items()}, receives
        for peer, due_steps in due.items():
            rest = receives[peer]
            for step in due_steps:
                before = None
                if not step.is_complete:
                    before, rest = rest[: sizes[0]].view(shapes[0]), rest[sizes[0] :]
                arrived[step.to] = before, rest[: sizes[1]].view(shapes[1])
                rest = rest[sizes[1] :]
        for number, (before, state) in arrived.items():
            if steps is shift:
                states[numbers.index(number)] = state
                continue
            own, increment_ = found[number]
            assert own is not None  # a run that has the whole state gets nothing more
            found[number] = compose((own, increment_), (before, state), matrix)
    return states


def _exclusive_scan(
    context: ScanContext, transition: Tensor, increment: Tensor, matrix: bool, reverse: bool
) -> Tensor:
    """Run `scan_messages` over the exchange."""
    rounds = scan_messages(context.runs, context.mesh.sequence_rank, transition, increment, matrix, reverse)
    while True:
        try:
            sends, receives = next(rounds)
        except StopIteration as end:
            states: Tensor = end.value
            return states
        context.swap(sends, receives)


scan_op.register_fake(lambda transition, increment, *_: increment.new_empty(increment.shape))
scan_backward_op.register_fake(
    lambda grad, transition, *_: (transition.new_empty(transition.shape), grad.new_empty(grad.shape))
)


def _setup_scan(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    transition, _, ctx.matrix, handle = inputs
    ctx.save_for_backward(transition, output)
    ctx.context = object_of(handle, ScanContext)  # alive until the backward pass


def _backward_scan(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    transition, states = ctx.saved_tensors
    return *scan_backward_op(grad, transition, states, ctx.matrix, ctx.context.handle), None, None


scan_op.register_autograd(_backward_scan, setup_context=_setup_scan)

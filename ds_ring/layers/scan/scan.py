"""Compute the state with which each run begins, for layers that are linear in their state: `ring_scan`.

A recurrence (linear attention, a state-space model, a gated delta rule) maps a state S to M S + B over a run.
Such maps compose associatively, so the states of all runs are an exclusive scan over the pairs (M, B)
(Blelloch 1990, "Prefix sums and their applications"; Martin and Cundy 2018, "Parallelizing linear recurrent
neural nets over sequence length"). Its messages do not depend on the length of the sequence.

Owns the operator `ds_ring::scan`. Its gradient is the scan of the transposed maps from last to first.

[Note: the paths of a tree]
In a tree of rollouts the state at the start of a node is the one at the end of the node above, so the runs
are a forest instead of a list. Pointers double as on a list: in round i a run composes its map with that of
the run 2^i above it. In the gradient a run adds up what all runs 2^i below it make of its final state.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.compat.torch import operator
from ds_ring.errors import RingShapeError, check_bool
from ds_ring.layers.scan.context import ByRank, ScanContext, get_scan_handle
from ds_ring.layers.scan.sequence_runs import SequenceRuns
from ds_ring.ops.checks import check_operand
from ds_ring.ops.context import get_object
from ds_ring.ops.eager import run_compared
from ds_ring.ops.passes import count_forward_pass, get_forward_call, refuse_second_derivative, run_gradient
from ds_ring.ops.tracing import constant
from ds_ring.patterns.documents.pattern import Documents, Tree
from ds_ring.schedule.layout import Layout


def ring_scan(
    transition: Tensor, increment: Tensor, *, layout: Layout, mesh: RingMesh, matrix: bool = False,
    documents: Documents | Tree | None = None, hop_timeout_s: float = 60.0,
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
            With a `Tree` each run of a node begins with the state at the end of the run before it on its
            path; the runs are cut where nodes begin.
        hop_timeout_s: seconds after which a message that has not arrived raises.

    Returns:
        States like `increment`: zeros for the first run of the sequence, and for runs that begin a document.
        Use them on every rank, even where they are zeros: each rank takes part in the backward pass.

    Raises:
        RingShapeError: other shapes or dtypes than above.
        RingLayoutError, RingPatternError, RingMismatchError, RingPeerError: as `halo`.
    """
    handle = get_scan_handle(layout, mesh, documents, constant(hop_timeout_s))
    if not torch.compiler.is_compiling():
        with collective(mesh, "ring_scan"):  # else the dispatcher refuses it alone, and prints every number
            check_operand("ring_scan: transition", transition)
            check_operand("ring_scan: increment", increment)
            check_bool(matrix, "ring_scan: matrix", RingShapeError)
    return run_compared(mesh, "ring_scan", scan_op, transition, increment, matrix, handle)


@operator("ds_ring::scan")
def scan_op(transition: Tensor, increment: Tensor, matrix: bool, handle: int) -> Tensor:
    """Return the states of `ring_scan`."""
    context = get_object(handle, ScanContext)
    with collective(context.mesh, "scan forward", context.exchange) as call:
        _check_scan(transition, increment, matrix, context)
        context.agree(call, **_fields(transition, increment, matrix))
        count_forward_pass()
        passes, continues = context.masks(increment)
        states = _run(context, scan_messages, transition * passes, increment, matrix)
        return states if context.documents is None else states * continues


@operator("ds_ring::scan_backward")
def scan_backward_op(
    grad: Tensor, transition: Tensor, states: Tensor, matrix: bool, handle: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of transition and increment; the states are those of the forward pass."""
    context = get_object(handle, ScanContext)
    with collective(context.mesh, "scan backward", context.exchange) as call:
        context.agree(call, **_fields(transition, grad, matrix))
        passes, continues = context.masks(grad)
        # The gradient of a run's final state is what all later runs make of it.
        of_increment = _run(context, gradient_messages, transition * passes, grad * continues, matrix)
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


class Letter(NamedTuple):
    """Tensors that one run has for another one.

    Attributes:
        of, to: the runs.
        shapes: of the tensors.
        tensors: on the rank of the first run; () elsewhere.
    """

    of: int
    to: int
    shapes: tuple[torch.Size, ...]
    tensors: Sequence[Tensor]


Messages = Generator[tuple[ByRank, ByRank], None, Tensor]


def deliver(
    letters: Sequence[Letter], ranks: Sequence[int], rank: int, like: Tensor
) -> Generator[tuple[ByRank, ByRank], None, list[tuple[Letter, list[Tensor]]]]:
    """Yield what a rank sends and receives of letters; return those to its own runs with their tensors."""
    sends: dict[int, list[Tensor]] = {}
    due: dict[int, list[Letter]] = {}
    arrived: list[tuple[Letter, list[Tensor]]] = []
    for letter in letters:
        of, to = ranks[letter.of], ranks[letter.to]
        if of == rank == to:
            arrived.append((letter, list(letter.tensors)))
        elif of == rank:
            sends.setdefault(to, []).extend(x.reshape(-1) for x in letter.tensors)
        elif to == rank:
            due.setdefault(of, []).append(letter)
    receives = {
        peer: like.new_empty(sum(shape.numel() for letter in some for shape in letter.shapes))
        for peer, some in due.items()
    }
    yield {peer: torch.cat(parts) for peer, parts in sends.items()}, receives
    for peer, some in due.items():
        rest = receives[peer]
        for letter in some:
            *parts, rest = rest.split(
                [*(n := [shape.numel() for shape in letter.shapes]), len(rest) - sum(n)]
            )
            arrived.append((letter, [x.view(shape) for x, shape in zip(parts, letter.shapes, strict=True)]))
    return arrived


def scan_messages(
    runs: SequenceRuns, rank: int, transition: Tensor, increment: Tensor, matrix: bool
) -> Messages:
    """Compute the state before each run of a rank: `SequenceRuns.rounds`, then one shift by a run.

    Yields the tensors that the rank sends and receives in each round, by the other rank; continues once the
    tensors to receive are filled. Real ranks exchange them (`scan_op`).

    Returns:
        The states, like `increment`.
    """
    place = {run: place for place, run in enumerate(runs.list_rank_runs(rank).tolist())}
    ranks, state_shape = runs.ranks.tolist(), increment.shape[1:]
    composites: dict[int, tuple[Tensor | None, Tensor]] = {
        run: (transition[at], increment[at]) for run, at in place.items()
    }

    def write_letter(of: int, to: int, done: bool) -> Letter:
        parts = tuple(x for x in composites[of][done:] if x is not None) if of in composites else ()
        return Letter(of, to, (transition.shape[1:], state_shape)[done:], parts)

    for steps in runs.rounds():
        letters = [write_letter(*step) for step in steps]
        arrived = yield from deliver(letters, ranks, rank, increment)
        composed = {}
        for letter, parts in arrived:
            transition_, increment_ = composites[letter.to]
            assert transition_ is not None  # a run that has the whole state gets nothing more
            before = parts[0] if len(parts) == 2 else None
            composed[letter.to] = compose((transition_, increment_), (before, parts[-1]), matrix)
        composites |= composed
    letters = [write_letter(*step) for step in runs.shift()]
    states = torch.zeros_like(increment)
    for letter, (state,) in (yield from deliver(letters, ranks, rank, increment)):
        states[place[letter.to]] = state
    return states


def gradient_messages(
    runs: SequenceRuns, rank: int, transition: Tensor, grad: Tensor, matrix: bool
) -> Messages:
    """Compute the gradient of the final state of each run of a rank, from the gradients of the states.

    The transpose of `scan_messages`, and yields as it does: a shift, then the same rounds. In a round a run
    gets what the runs below it make of its final state, and they get its transition.
    """
    place = {run: place for place, run in enumerate(runs.list_rank_runs(rank).tolist())}
    ranks, gradient = runs.ranks.tolist(), torch.zeros_like(grad)
    move = {run: transition[at] for run, at in place.items()}
    letters = [
        Letter(to, of, (grad.shape[1:],), (grad[place[to]],) if to in place else ())
        for of, to, _ in runs.shift()
    ]
    for letter, (part,) in (yield from deliver(letters, ranks, rank, grad)):
        gradient[place[letter.to]] += part

    def made(run: int) -> tuple[Tensor, ...]:
        if run not in place:
            return ()
        return (move[run].mT @ gradient[place[run]] if matrix else move[run] * gradient[place[run]],)

    for steps in runs.rounds():
        up = [Letter(to, of, (grad.shape[1:],), made(to)) for of, to, _ in steps]
        down = [
            Letter(of, to, (transition.shape[1:],), (move[of],) if of in move else ())
            for of, to, done in steps
            if not done
        ]
        arrived = yield from deliver([*up, *down], ranks, rank, grad)
        for letter, (part,) in arrived:
            if letter.of > letter.to:  # from a run below: numbers rise along each path
                gradient[place[letter.to]] += part
            else:  # one a run and round
                move[letter.to] = move[letter.to] @ part if matrix else move[letter.to] * part
    return gradient


def _run(
    context: ScanContext, messages: Callable[..., Messages], transition: Tensor, operand: Tensor, matrix: bool
) -> Tensor:
    """Return what a generator of messages returns, run over the exchange."""
    rounds = messages(context.runs, context.mesh.sequence_rank, transition, operand, matrix)
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
    ctx.context = get_object(handle, ScanContext)  # alive until the backward pass
    ctx.call = get_forward_call(ctx.context.exchange)


def _backward_scan(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    transition, states = ctx.saved_tensors
    operands = (grad, transition, states, ctx.matrix, ctx.context.handle)
    return *run_gradient(ctx.context.mesh, ctx.call, scan_backward_op, *operands), None, None


scan_op.register_autograd(_backward_scan, setup_context=_setup_scan)
scan_backward_op.register_autograd(
    refuse_second_derivative("ring_scan"), setup_context=lambda ctx, inputs, output: None
)

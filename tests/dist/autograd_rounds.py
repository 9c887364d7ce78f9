"""Every operator of the table under every way of asking for gradients, on ranks, against one process.

Owns the cases of `tools/campaign.py autograd`. A case is an operator and a mode. It must end in the values of one
process, or in one refusal on all ranks; then the mesh works. No rank may wait for a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from ds_ring import RingMesh
from tests.dist.harness import RankPool
from tests.operator_table import (
    OPERATORS,
    Grid,
    Inputs,
    Operator,
    Place,
    Result,
    T,
    alone,
    errors,
    longer,
    loss_of,
)
from tests.operator_table import weight_of as weight

LIMIT_S = 20.0  # a case takes milliseconds: what takes so long has waited for a deadline
TOLERANCE = 1e-9
REFUSALS = ("RingConfigError", "RingMismatchError", "RingShapeError")
DTYPE = torch.float64


class Call(NamedTuple):
    """One operator on one rank."""

    row: Operator
    place: Place
    rank: int
    whole: Inputs

    @classmethod
    def of(cls, row: Operator, mesh: RingMesh, rank: int, tokens: int = T) -> Call:
        whole = row.inputs(DTYPE)
        return cls(row, Place(mesh, row.layout, tokens), rank, longer(row, whole) if tokens > T else whole)

    def inputs(self, names: Sequence[str] | None = None) -> Inputs:
        """The shards; those of `names` (None: all) require a gradient."""
        wanted = self.row.gradients if names is None else names
        shards = self.row.shards(self.place.grid, self.whole, self.rank)
        return {name: x.requires_grad_(name in wanted) for name, x in shards.items()}

    def out(self, arguments: Inputs) -> Tensor:
        return self.row.call(self.place, **arguments)

    def loss(self, out: Tensor) -> Tensor:
        of_all = alone(self.row, self.whole, (), self.place.tokens).out
        return loss_of(self.row, self.place, out, self.rank, weight(of_all))


def _result(out: Tensor, arguments: Inputs) -> Result:
    return Result(out.detach(), {name: x.grad for name, x in arguments.items() if x.grad is not None})


def backward(call: Call, names: Sequence[str] | None = None) -> list[Result]:
    """Gradients of the inputs `names` (None: of all)."""
    arguments = call.inputs(names)
    out = call.out(arguments)
    call.loss(out).backward()
    return [_result(out, arguments)]


def grad(call: Call) -> list[Result]:
    arguments, names = call.inputs(), call.row.gradients
    out = call.out(arguments)
    answer = torch.autograd.grad(call.loss(out), [arguments[name] for name in names])
    return [Result(out.detach(), dict(zip(names, answer, strict=True)))]


def one_input(call: Call) -> list[Result]:
    """backward(inputs=[...]) for each input by itself."""
    answer = []
    for name in call.row.gradients:
        arguments = call.inputs()
        out = call.out(arguments)
        call.loss(out).backward(inputs=[arguments[name]])
        answer.append(_result(out, arguments))
    return answer


def some_inputs(call: Call) -> list[Result]:
    """One input requires a gradient, the others do not, for each input."""
    return [result for name in call.row.gradients for result in backward(call, [name])]


def other_inputs(call: Call) -> list[Result]:
    """On each rank another input requires a gradient."""
    names = call.row.gradients
    return backward(call, [names[call.rank % len(names)]])


def none_on_a_rank(call: Call) -> list[Result]:
    """Nothing requires a gradient on the last rank."""
    arguments = call.inputs([] if call.rank == call.place.mesh.sequence_size - 1 else None)
    out = call.out(arguments)
    loss = call.loss(out)
    if loss.requires_grad:
        loss.backward()
    return [_result(out, arguments)]


def twice(call: Call) -> list[Result]:
    arguments = call.inputs()
    out = call.out(arguments)
    loss = call.loss(out)
    loss.backward(retain_graph=True)
    loss.backward()
    return [Result(out.detach(), {name: x.grad / 2 for name, x in arguments.items() if x.grad is not None})]


def checkpointed(call: Call, reentrant: bool) -> list[Result]:
    arguments, names = call.inputs(), tuple(call.whole)

    def region(*tensors: Tensor) -> Tensor:
        return call.out(dict(zip(names, tensors, strict=True)))

    out = checkpoint(region, *arguments.values(), use_reentrant=reentrant)
    call.loss(out).backward()
    return [_result(out, arguments)]


def two_calls(call: Call, second: Call, backward: Callable[[list[Tensor]], None]) -> list[Result]:
    """Two forward passes, then the backward passes of both losses."""
    calls = [call, second]
    arguments = [item.inputs() for item in calls]
    outs = [item.out(x) for item, x in zip(calls, arguments, strict=True)]
    backward([item.loss(out) for item, out in zip(calls, outs, strict=True)])
    return [_result(out, x) for out, x in zip(outs, arguments, strict=True)]


def two_lengths(call: Call) -> list[Result]:
    """Two forward passes of other lengths, then one backward pass of both."""
    longer_call = Call.of(call.row, call.place.mesh, call.rank, 2 * T)
    return two_calls(call, longer_call, lambda losses: (losses[0] + losses[1]).backward())


def halved(whole: Inputs) -> Inputs:
    """Inputs of other values."""
    return {name: x / 2 if x.is_floating_point() else x for name, x in whole.items()}


def other_order(call: Call) -> list[Result]:
    """Two calls of equal shapes, whose backward passes rank 0 runs in another order."""

    def in_turn(losses: list[Tensor]) -> None:
        for loss in losses if call.rank else losses[::-1]:
            loss.backward()

    return two_calls(call, call._replace(whole=halved(call.whole)), in_turn)


def forward_mode(call: Call) -> list[Result]:
    """A tangent of ones: the tangent of the output takes the output's place."""
    arguments = call.inputs([])
    with forward_ad.dual_level():
        arguments = {
            name: forward_ad.make_dual(x, torch.ones_like(x)) if name in call.row.gradients else x
            for name, x in arguments.items()
        }
        primal, tangent = forward_ad.unpack_dual(call.out(arguments))
    return [Result(torch.zeros_like(primal) if tangent is None else tangent, {})]


def second_derivative(call: Call) -> list[Result]:
    """The gradients of a sum of squared gradients, which depends on the output's square.

    Of inputs that are sharded: a rank has a part of the gradient of others, and the squares of parts are no sum.
    """
    sharded = tuple(name for name in call.row.gradients if call.row.dims[name] is not None)
    names = sharded or call.row.gradients
    arguments = call.inputs(names)
    out = call.out(arguments)
    loss = call.loss(out * out)
    firsts = torch.autograd.grad(loss, [arguments[name] for name in names], create_graph=True)
    squares = sum(x.square().sum() for x in firsts)
    seconds = torch.autograd.grad(squares, [arguments[name] for name in names], allow_unused=True)  # type: ignore[arg-type]
    return [Result(out.detach(), {name: x for name, x in zip(names, seconds, strict=True) if x is not None})]


MODES: dict[str, Callable[[Call], list[Result]]] = {
    "backward": backward, "grad": grad, "backward(inputs=[one])": one_input, "some inputs": some_inputs,
    "another input on each rank": other_inputs, "no input on the last rank": none_on_a_rank, "twice": twice,
    "reentrant": partial(checkpointed, reentrant=True), "non-reentrant": partial(checkpointed, reentrant=False), "two lengths": two_lengths,
    "another order on rank 0": other_order, "forward mode": forward_mode, "second derivative": second_derivative,
}  # fmt: skip
SELF = ("second derivative",)  # one process plays the mode, too
# Modes in which every input gets a gradient on every rank.
OF_ALL_INPUTS = (
    "backward",
    "grad",
    "twice",
    "reentrant",
    "non-reentrant",
    "two lengths",
    "another order on rank 0",
)
STEP, TOLERANCE_OF_STEPS = 1e-5, 1e-6  # of finite differences


class Outcome(NamedTuple):
    """What became of a case on one rank."""

    results: list[Result]
    said: str
    seconds: float


def play_on_rank(rank: int, world_size: int, ulysses: int, cases: Sequence[tuple[str, str]]) -> list[Outcome]:
    """Play cases one after the other; ranks make a new mesh together after one that broke it."""
    mesh, answer = RingMesh.from_world(world_size // ulysses, ulysses), []
    for name, mode in cases:
        started, results, said = time.monotonic(), [], ""
        try:
            results = MODES[mode](Call.of(OPERATORS[name], mesh, rank))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        if not said or said.startswith(REFUSALS):
            try:  # the mesh works afterwards
                grad(Call.of(OPERATORS["halo"], mesh, rank))
            except Exception as error:
                said = f"the mesh is lost: {type(error).__name__}: {error} after {said or 'a result'}"
        answer.append(Outcome(results, said, seconds))
        told: list[Any] = [None] * world_size
        dist.all_gather_object(told, not said or said.startswith(REFUSALS))
        if not all(told):
            mesh = RingMesh.from_world(world_size // ulysses, ulysses)
    return answer


def wanted(row: Operator, mode: str) -> list[Result]:
    """What one process gets."""
    whole = row.inputs(DTYPE)
    if mode in SELF:
        try:
            return MODES[mode](Call.of(row, RingMesh.single(), 0))
        except Exception:
            return []
    if mode == "forward mode":
        ahead, behind = (
            alone(row, {name: x + step if name in row.gradients else x for name, x in whole.items()}, ()).out
            for step in (STEP, -STEP)
        )
        return [Result((ahead - behind) / (2 * STEP), {})]
    first = alone(row, whole)
    if mode == "another order on rank 0":
        return [first, alone(row, halved(whole))]
    if mode == "two lengths":
        return [first, alone(row, longer(row, whole), tokens=2 * T)]
    return [first] * max(len(row.gradients), 2)


def judge(name: str, mode: str, grid: Grid, answer: Sequence[Outcome]) -> str:
    """Return "equal", "refused", or what is wrong."""
    if max(item.seconds for item in answer) > LIMIT_S:
        return f"waited: {max(item.seconds for item in answer):.0f} s, {[item.said[:200] for item in answer]}"
    if all(item.said for item in answer):
        is_refused = all(item.said.startswith(REFUSALS) for item in answer)
        return "refused" if is_refused else f"raw: {[item.said[:300] for item in answer]}"
    if any(item.said for item in answer):
        return f"on some ranks: {[item.said[:300] for item in answer]}"
    row, worst = OPERATORS[name], 0.0
    want = wanted(row, mode)
    for place, item in enumerate(want):
        results = [outcome.results[place] for outcome in answer if place < len(outcome.results)]
        if results:
            worst = max(worst, *errors(row, grid, results, item).values())
        if mode in OF_ALL_INPUTS and any({*result.gradients} != {*item.gradients} for result in results):
            return (
                f"wrong: expected gradients of {[*item.gradients]}, got {[[*x.gradients] for x in results]}"
            )
    tolerance = TOLERANCE_OF_STEPS if mode == "forward mode" else TOLERANCE
    return "equal" if want and worst < tolerance else f"wrong: off by {worst:.2g}"


def cases(names: Sequence[str], modes: Sequence[str], ulysses: int) -> list[tuple[str, str]]:
    """The cases of a grid: every operator that has gradients and takes it, every mode."""
    rows = [
        name
        for name in names
        if OPERATORS[name].gradients and (ulysses == 1 or OPERATORS[name].ulysses == "any")
    ]
    return [(name, mode) for name in rows for mode in modes]


def play(
    pool: RankPool, names: Sequence[str], modes: Sequence[str], ulysses: int = 1, timeout_s: float = 300.0
) -> dict[tuple[str, str], str]:
    """Play the cases on the ranks of a pool; return what `judge` says of each."""
    requested, world_size = cases(names, modes, ulysses), pool.world_size
    by_rank = pool.run(play_on_rank, ulysses, requested, timeout_s=timeout_s)
    answer = {}
    for number, (name, mode) in enumerate(requested):
        grid = Grid(world_size // ulysses, ulysses, OPERATORS[name].layout)
        answer[name, mode] = judge(name, mode, grid, [outcomes[number] for outcomes in by_rank])
    return answer

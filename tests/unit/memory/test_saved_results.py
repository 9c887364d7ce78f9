"""Results of checkpointed regions: the second run takes them where its calls are the same, or runs again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ds_ring.memory.regions import ResultStore
from ds_ring.memory.saved_results.keep_results import (
    KeepResults,
    SavedRows,
    reuse_or_run,
)


class Pass(torch.autograd.Function):
    """Stand for the operator: out is 2 x and lse 3 x, and a region's second run may take them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        out, lse = keep(lambda: (2 * x, 3 * x[..., 0]))
        ctx.save_for_backward(out, lse)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        out, lse = ctx.saved_tensors
        return gradient * out * lse[..., None], None  # tells which results were taken


class Counted:
    """Two passes in a checkpointed region; counts how often each is run."""

    def __init__(
        self, calls: Callable[[int], tuple[object, object]] = lambda run: ("a", "b"), **how: Any
    ) -> None:
        self.ran, self.regions, self.calls, self.how = [0, 0], 0, calls, how

    def __call__(self, x: Tensor) -> Tensor:
        calls = self.calls(self.regions)
        self.regions += 1
        for number, call in enumerate(calls):
            x = Pass.apply(x, partial(self.keep, number, call))
        return x

    def keep(self, number: int, call: object, results: Callable[[], Any]) -> Any:
        def run() -> Any:
            self.ran[number] += 1
            return results()

        return reuse_or_run(call, run, **self.how)


def leaf() -> Tensor:
    return torch.arange(1.0, 25).reshape(1, 2, 4, 3).requires_grad_()


def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
    x = leaf()
    run(x).sum().backward()
    return x.grad


class Shelf:
    """Keep copies by number."""

    def __init__(self) -> None:
        self.copies: list[Tensor] = []

    def put(self, tensor: Tensor) -> int:
        self.copies.append(tensor.detach().clone())
        return len(self.copies) - 1

    def get(self, ticket: int) -> Tensor:
        return self.copies[ticket]


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_runs_each_pass_once(reentrant: bool, elsewhere: bool) -> None:
    counted = Counted(store=Shelf() if elsewhere else None)
    want = gradient(Counted())
    assert torch.equal(gradient(lambda x: checkpoint(counted, x, use_reentrant=reentrant)), want)
    assert counted.ran == [1, 1] and counted.regions == 2
    # graphs of two regions at once keep theirs apart
    x, y = leaf(), (2 * leaf()).detach().requires_grad_()
    losses = [checkpoint(counted, one, use_reentrant=reentrant).sum() for one in (x, y)]
    for loss in losses:
        loss.backward()
    assert counted.ran == [3, 3] and x.grad is not None and torch.equal(x.grad, want)


def test_a_call_of_another_kind_runs_again() -> None:
    counted = Counted(lambda run: ("a", "b") if run == 0 else ("a", "c"))
    gradient(lambda x: checkpoint(counted, x, use_reentrant=False))
    assert counted.ran == [1, 2]


def test_a_second_way_back_through_a_graph_runs_again() -> None:
    counted, x = Counted(), leaf()
    loss = checkpoint(counted, x, use_reentrant=False).sum()
    loss.backward(retain_graph=True)
    first, x.grad = x.grad, None
    loss.backward()
    assert counted.ran == [2, 2] and torch.equal(first, x.grad)


def test_results_that_the_first_way_back_left_are_no_ones() -> None:
    """Its run of the region ended when all saved tensors were there again, before the second pass."""
    ran = []

    def passed(y: Tensor) -> tuple[Tensor, Tensor]:
        ran.append(1)
        return 2 * y, 3 * y[..., 0]

    def region(x: Tensor) -> Tensor:
        y = Pass.apply(x, partial(reuse_or_run, "a"))
        return y + reuse_or_run("a", lambda: passed(y.detach()))[0]

    x = leaf()
    loss = checkpoint(region, x, use_reentrant=False).sum()
    loss.backward(retain_graph=True)
    first, x.grad = x.grad, None
    loss.backward()
    assert len(ran) == 1 and torch.equal(first, x.grad)


def test_results_that_a_model_wrote_to_are_made_again() -> None:
    ran = []

    def region(x: Tensor) -> Tensor:
        def run() -> tuple[Tensor, Tensor]:
            ran.append(1)
            return x * 2, x[..., 0] * 2

        out, _lse = reuse_or_run("a", run)
        if len(ran) == 1 and not torch.is_grad_enabled():
            out += 1.0
        return out * x

    x = leaf()
    checkpoint(region, x, use_reentrant=True).sum().backward()
    assert len(ran) == 2 and x.grad is not None and torch.equal(x.grad, 4 * x.detach())


def test_rows_that_are_not_kept_are_made_again() -> None:
    slots, others = torch.tensor([1, 3]), []

    def run_others() -> tuple[Tensor, Tensor]:
        others.append(1)
        return torch.full((1, 2, 4, 3), 7.0), torch.full((1, 2, 4), 5.0)

    rows, results = SavedRows(slots, run_others), (torch.ones(1, 2, 4, 3), torch.ones(1, 2, 4))
    seen = []

    def region(x: Tensor) -> Tensor:
        seen.append([one.clone() for one in reuse_or_run("a", lambda: results, None, rows)])
        return x * x

    checkpoint(region, leaf(), use_reentrant=False).sum().backward()
    assert len(others) == 1
    for whole, part, other in zip(results, seen[1], (7.0, 5.0), strict=True):
        assert torch.equal(part[:, :, slots], whole[:, :, slots]) and bool(
            (part[:, :, [0, 2]] == other).all()
        )


def test_fake_tensors_are_not_kept() -> None:
    """A compiler runs a region with them: they are no results of its real run."""
    ran, mesh = [], SimpleNamespace(owners={ResultStore: SimpleNamespace(store=None)})
    context: Any = SimpleNamespace(options=SimpleNamespace(recompute_attention=0), mesh=mesh, handle=0)
    keeps = KeepResults()

    def region(x: Tensor) -> Tensor:
        return Pass.apply(  # type: ignore[no-any-return]
            x, lambda results: keeps.run(context, lambda _: ran.append(1) or results(), x, ("a",))
        )

    with FakeTensorMode():
        gradient(lambda x: checkpoint(region, x, use_reentrant=False, preserve_rng_state=False))
    assert len(ran) == 2


def test_without_a_region_nothing_is_kept() -> None:
    counted = Counted()
    gradient(counted)
    gradient(counted)
    assert counted.ran == [2, 2]

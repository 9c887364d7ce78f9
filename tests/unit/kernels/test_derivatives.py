"""Scales of every sign are right; derivatives that the operator does not have are refused, never dropped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ds_ring import Causal, RingConfigError, RingMesh, make_layout
from tests import calls
from tests.reference import attend_by_counts

MESH, TOKENS = RingMesh.single(), 9
LAYOUT = make_layout("contiguous", tokens=TOKENS, ring_size=1)


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, TOKENS, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4)
    ]


def attend(q: Tensor, k: Tensor, v: Tensor, **rest: object) -> Tensor:
    return calls.attend(q, k, v, pattern=Causal(), layout=LAYOUT, mesh=MESH, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("scale", [0, 0.0, -0.0, -0.3, -2, 1e-30, 0.7])
def test_any_finite_scale_is_right(scale: float, kernel: str) -> None:
    """Zero is uniform attention; below it the CPU kernel returned NaN."""
    *qkv, grad = operands()
    leaves = [x.requires_grad_() for x in qkv]
    out = attend(*leaves, scale=scale, kernel=kernel)
    got = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    want, _, *gradients = attend_by_counts(*qkv, grad, torch.ones(TOKENS, TOKENS).tril(), scale=scale)
    torch.testing.assert_close(got, (want, *gradients))


def dual() -> None:
    q, k, v, _ = operands()
    with forward_ad.dual_level():
        attend(forward_ad.make_dual(q, q), k, v)


def twice(**rest: object) -> None:
    q, k, v, _ = operands()
    q.requires_grad_()
    (first,) = torch.autograd.grad(attend(q, k, v, **rest).sum(), q, create_graph=True)
    first.sum().backward()


def transform(name: str) -> Callable[[], object]:
    q, k, v, _ = operands()
    return {
        "jvp": lambda: torch.func.jvp(lambda x: attend(x, k, v), (q,), (q,)),
        "grad": lambda: torch.func.grad(lambda x: attend(x, k, v).sum())(q),
        "vjp": lambda: torch.func.vjp(lambda x: attend(x, k, v), q),
        "dual": dual,
        "second derivative": twice,
        "second derivative, replicated queries": lambda: twice(queries="replicated"),
    }[name]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("jvp", "got forward mode"),
        ("dual", "got forward mode"),
        ("grad", "got a torch.func transform"),
        ("vjp", "got a torch.func transform"),
        ("second derivative", "a request for the second one"),
        ("second derivative, replicated queries", "a request for the second one"),
    ],
)
def test_derivatives_that_there_are_none_of_are_refused(name: str, says: str) -> None:
    with pytest.raises(RingConfigError, match=says):
        transform(name)()


def test_vmap_is_one_sample_after_the_other() -> None:
    q, k, v, _ = operands()
    several = torch.stack([q, 2 * q])
    got = torch.func.vmap(lambda x: attend(x, k, v))(several)
    torch.testing.assert_close(got, torch.stack([attend(x, k, v) for x in several]))


def test_a_captured_tensor_that_needs_a_gradient_is_refused_in_compiled_code_too() -> None:
    (q, k, v, _), bias = operands(), torch.zeros(8)

    def moved(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + bias[head]

    compiled = torch.compile(lambda *qkv: attend(*qkv, score_mod=moved), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    bias.requires_grad_()
    for call in (compiled, lambda *qkv: attend(*qkv, score_mod=moved)):
        with pytest.raises(RingConfigError, match="captured tensors that require no gradient"):
            call(q, k, v)

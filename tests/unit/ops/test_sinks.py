"""`add_sinks` and its gradient against a softmax with one more column, rows without keys among them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_ring.ops.sinks import add_sinks, compute_sinks_gradient

INF = float("inf")
HEADS, SLOTS, WIDTH = 3, 5, 4


def results(scores: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a softmax over keys, and over a key of value 0 whose score is the sink."""
    if sinks is not None:
        column = sinks[:, None, None].expand(1, -1, SLOTS, 1)
        scores, v = torch.cat([scores, column], dim=-1), torch.cat([v, torch.zeros_like(v[:, :, :1])], dim=2)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1))
    return weights @ v, lse


def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, HEADS, SLOTS, 7, generator=generator, dtype=torch.float64)
    scores[:, :, 1] = -INF  # a row without keys
    return scores, torch.randn(1, HEADS, 7, WIDTH, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("sinks", [(0.0, -3.0, 40.0), (-INF, 0.5, 1e300)], ids=str)
def test_sinks_are_a_key_whose_value_is_zero(sinks: tuple[float, ...]) -> None:
    scores, v = operands()
    select_heads = torch.tensor(sinks, dtype=torch.float64)
    out, lse = results(scores, v, None)
    got = add_sinks(out, lse, select_heads)
    assert got[0].data_ptr() == out.data_ptr(), "in place"
    for found, want in zip(got, results(scores, v, select_heads), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-14, atol=1e-14)


def test_the_gradient_of_sinks_with_that_of_the_lse() -> None:
    scores, v = operands()
    sinks = torch.tensor([0.0, -3.0, 2.0], dtype=torch.float64, requires_grad=True)
    out, lse = results(scores, v, sinks)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    (want,) = torch.autograd.grad([out, lse], sinks, [grad_out, grad_lse])
    got = compute_sinks_gradient(sinks.detach(), slice(None), grad_out, out.detach(), lse.detach(), grad_lse)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_of_other_heads_the_gradient_is_zero() -> None:
    """This rank's heads are 1 and 2 of six."""
    scores, v = operands()
    out, lse = add_sinks(*results(scores[:, :2], v[:, :2], None), torch.zeros(2, dtype=torch.float64))
    sinks = torch.tensor([9.0, 0.0, 0.0, 9.0, 9.0, 9.0], dtype=torch.float64)
    got = compute_sinks_gradient(sinks, slice(1, 3), out, out, lse, None)
    want = compute_sinks_gradient(sinks[1:3], slice(None), out, out, lse, None)
    assert got is not None and want is not None and got.shape == (6,)
    assert want.lt(0).all() and torch.equal(got, torch.nn.functional.pad(want, (1, 3)))


def test_without_sinks_nothing_changes() -> None:
    out, lse = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1)
    assert add_sinks(out, lse, None) == (out, lse)
    assert compute_sinks_gradient(None, slice(None), out, out, lse, None) is None

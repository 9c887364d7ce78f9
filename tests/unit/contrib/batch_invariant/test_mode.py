"""`BatchInvariant`: the bits of a token's numbers do not depend on the tokens beside it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ds_ring.contrib.batch_invariant.mode import ROWS, BatchInvariant
from ds_ring.contrib.batch_invariant.session import generated_logprobs
from ds_ring.errors import RingConfigError, RingShapeError

WIDTH = 37
torch.manual_seed(0)
OF_CHANNELS, OF_GROUPS = torch.randn(4, 1, 3), torch.randn(6, 2, 3)
WEIGHT, BIAS, EXPERTS = torch.randn(19, WIDTH), torch.randn(19), torch.randn(3, 32, 8)


def grouped(x: Tensor) -> Tensor:
    """Each token by the expert that it would have in any batch: rows 0, 3, 6 ... by the first one."""
    which = (x[:, 0] * 1000).long() % 3
    order = which.argsort(stable=True)
    ends = torch.bincount(which, minlength=3).cumsum(0).to(torch.int32)
    found = torch._grouped_mm(x[order, :32].contiguous(), EXPERTS, offs=ends)
    return found[order.argsort()]


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Each row as 9 tokens of 4 channels."""
    tokens = x[:, :36].unflatten(1, (4, 9))
    return functional.conv1d(tokens, weight, bias, padding=2, groups=groups).flatten(1)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: functional.linear(x, WEIGHT, BIAS),
    "float64": lambda x: functional.linear(x.double(), WEIGHT.double()),
    "bfloat16": lambda x: functional.linear(x.bfloat16(), WEIGHT.bfloat16()),
    "RMS norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "fused RMS norm": lambda x: functional.rms_norm(x, (WIDTH,), WEIGHT[0]),
    "layer norm": lambda x: functional.layer_norm(x, (WIDTH,), WEIGHT[0], WEIGHT[1]),
    "softmax": lambda x: x.softmax(-1),
    "log-probabilities": lambda x: x.log_softmax(-1),
    "SiLU": functional.silu,
    "GELU": lambda x: functional.gelu(x, approximate="tanh"),
    "in place": lambda x: x.clone().exp_(),
    "sines": lambda x: torch.cat([x.sin(), x.cos()], -1),
    "sum": lambda x: x.sum(1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "cumulative sum": lambda x: x.cumsum(-1),
    "products of a batch": lambda x: (x[:, None] @ WEIGHT.t())[:, 0],
    "products of a batch, added": lambda x: torch.baddbmm(
        x[:, None, :19], x[:, None], WEIGHT.t().expand(len(x), -1, -1), beta=0.5, alpha=2.0
    )[:, 0],
    "products, added": lambda x: torch.addmm(x[:, :19], x, WEIGHT.t(), beta=0.5, alpha=2.0),
    "products without a sum": lambda x: (
        torch.bmm(x[:, :1, None], x[:, None])[:, 0] + x[:, :1] @ BIAS[None, :1]
    ),
    "sum of all": lambda x: torch.stack([row.sum() for row in x]),
    "experts": grouped,
    "convolution of channels": lambda x: convolved(x, OF_CHANNELS, BIAS[:4], 4),
    "convolution of groups": lambda x: convolved(x, OF_GROUPS, None, 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    x, function = torch.randn(2 * ROWS + 5, WIDTH), FUNCTIONS[name]
    with BatchInvariant(), torch.no_grad():
        whole = function(x)
        for first, end in ((0, 1), (3, 4), (ROWS, ROWS + 7), (len(x) - 2, len(x))):
            assert torch.equal(function(x[first:end].clone()), whole[first:end]), (first, end)
    assert torch.allclose(whole, function(x), atol=1e-5, rtol=1e-2 if name == "bfloat16" else 1e-5)


def test_without_the_mode_the_bits_do_depend_on_it() -> None:
    x = torch.randn(2 * ROWS + 5, WIDTH)
    differ = [name for name, one in FUNCTIONS.items() if not torch.equal(one(x)[:1], one(x[:1].clone()))]
    assert differ  # which ones depends on the machine


def test_gradients_are_those_without_the_mode() -> None:
    x = torch.randn(9, WIDTH, requires_grad=True)
    with BatchInvariant():
        out = FUNCTIONS["linear"](x).softmax(-1)
    found = torch.autograd.grad(out[:, 0].sum(), x)[0]
    want = torch.autograd.grad(FUNCTIONS["linear"](x).softmax(-1)[:, 0].sum(), x)[0]
    assert torch.allclose(found, want, atol=1e-6)


def test_a_convolution_of_one_token_has_the_bits_of_one_of_many() -> None:
    x = torch.randn(2, 4, 70)
    with BatchInvariant():
        whole = functional.conv1d(x, OF_CHANNELS, BIAS[:4], groups=4)
        one = functional.conv1d(x[:, :, 41:44].clone(), OF_CHANNELS, BIAS[:4], groups=4)
        with pytest.raises(RingConfigError, match="expected convolutions over tokens"):
            functional.conv2d(x[None], torch.randn(1, 2, 3, 3))
    assert torch.equal(one[..., 0], whole[..., 41])


def test_what_is_not_known_is_refused() -> None:
    with BatchInvariant(), pytest.raises(RingConfigError, match="got _fft_r2c"):
        torch.fft.rfft(torch.randn(4, 8))
    with BatchInvariant(), pytest.raises(RingConfigError, match="expected groups of rows, got other groups"):
        torch._grouped_mm(torch.randn(3, 4, 32), EXPERTS)


def test_a_greatest_of_groups_is_computed_in_any_order() -> None:
    x, index = torch.randn(4, 6), torch.randint(3, (4, 6))
    zeros = torch.zeros(4, 3)
    with BatchInvariant():
        found = zeros.scatter_reduce(1, index, x, "amax", include_self=False)
        with pytest.raises(RingConfigError, match="scatter_reduce"):
            zeros.scatter_reduce(1, index, x, "sum")
    assert torch.equal(found, zeros.scatter_reduce(1, index, x, "amax", include_self=False))


def test_a_product_whose_rows_differ_by_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.mm

    def by_place(a: Tensor, b: Tensor, **more: Tensor) -> Tensor:
        return plain(a, b, **more).add_(torch.arange(float(len(a)))[:, None])

    monkeypatch.setattr(torch, "mm", by_place)
    with BatchInvariant(), pytest.raises(RingConfigError, match="expected equal rows of a product"):
        functional.linear(torch.randn(4, WIDTH), WEIGHT)


def test_a_generation_without_logits_is_refused() -> None:
    with pytest.raises(RingShapeError, match="output_logits=True"):
        generated_logprobs(SimpleNamespace(), SimpleNamespace(logits=None))  # type: ignore[arg-type]

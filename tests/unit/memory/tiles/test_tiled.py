"""The loss and token-by-token functions in tiles, against the same computed at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy, gelu, linear
from torch.utils.checkpoint import checkpoint

from ds_ring.data.loss import logprobs_and_entropies
from ds_ring.errors import RingConfigError
from ds_ring.memory.tiles.deferred_logits import DeferredLogits, NoLogitsError
from ds_ring.memory.tiles.tiled_call import tiled_call
from ds_ring.memory.tiles.tiled_loss import tiled_loss

WIDTH, WORDS, ITEMS = 6, 11, 3.5


@pytest.fixture(autouse=True)
def _memory_that_nobody_wrote_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def labels_of(*shape: int) -> Tensor:
    labels = torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(9))
    labels.flatten()[::4] = -100
    labels.flatten()[5:10] = -100  # a whole tile
    return labels


def capped(logits: Tensor) -> Tensor:
    return (logits / 3).tanh() * 2


@pytest.mark.parametrize("tile", [5, 26, 100])
@pytest.mark.parametrize("change", [None, capped])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_tiled_loss_and_its_gradients(
    tile: int, change: Callable[[Tensor], Tensor] | None, has_bias: bool
) -> None:
    hidden, weight, bias = drawn(2, 13, WIDTH), drawn(WORDS, WIDTH, seed=1), drawn(WORDS, seed=2)
    given = (hidden, weight, bias) if has_bias else (hidden, weight)
    labels = labels_of(2, 13)
    logits = linear(hidden, weight, bias if has_bias else None)
    logits = logits if change is None else change(logits)
    want = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / ITEMS
    got = tiled_loss(hidden, weight, bias if has_bias else None, labels, ITEMS, tile, change)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for found, right in zip(
        torch.autograd.grad(0.7 * got, given), torch.autograd.grad(0.7 * want, given), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-14)


def test_a_loss_goes_back_once_and_only_to_what_wants_a_gradient() -> None:
    hidden, weight = drawn(1, 13, WIDTH), drawn(WORDS, WIDTH, seed=1).detach()
    loss = tiled_loss(hidden, weight, None, labels_of(1, 13), ITEMS, 5)
    loss.backward(retain_graph=True)
    assert hidden.grad is not None and weight.grad is None
    with pytest.raises(RingConfigError, match="expected one backward pass"):
        loss.backward()
    with torch.no_grad():
        torch.testing.assert_close(
            tiled_loss(hidden, weight, None, labels_of(1, 13), ITEMS, 5), loss.detach()
        )


def test_the_logits_of_a_tile_are_gone_before_those_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, gone = list[StorageWeakRef](), list[bool]()

    def watched(*inputs: Any) -> Tensor:
        gone.extend(ref.expired() for ref in logits)
        logits[:] = [StorageWeakRef((made := linear(*inputs)).untyped_storage())]
        return made

    monkeypatch.setattr(sys.modules[tiled_loss.__module__], "linear", watched)
    tiled_loss(drawn(1, 13, WIDTH), drawn(WORDS, WIDTH), None, labels_of(1, 13), ITEMS, 5)
    assert gone == [True, True]


def test_sums_over_many_tiles_are_made_in_float32() -> None:
    """Of 600 tiles: sums in bfloat16 would stop growing."""
    hidden, weight = (torch.ones(600, 2, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.bfloat16))
    bias = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    weight.requires_grad_()
    loss = tiled_loss(hidden, weight, bias, torch.ones(600, dtype=torch.int64), 1.0, 1)
    loss.backward()
    assert loss.dtype == torch.float32 and weight.grad is not None and bias.grad is not None
    assert weight.grad.dtype == bias.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad[1].float(), torch.full((2,), -450.0), rtol=0.01, atol=0)
    torch.testing.assert_close(bias.grad.float(), torch.tensor([150.0, -450, 150, 150]), rtol=0.01, atol=0)
    weight.grad = None
    tiled_call(lambda rows: linear(rows, weight), [hidden], [weight], 1).sum().backward()
    assert weight.grad.dtype == torch.bfloat16 and weight.grad.eq(600).all()


def mixture(first: Tensor, second: Tensor) -> Callable[..., Tensor]:
    """Two experts; which one a token takes is a number, and how much of it another."""

    def function(x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        weights = torch.stack([first, second])[chosen.squeeze(-1)]
        return gelu(torch.einsum("...h,...oh->...o", x, weights)) * share

    return function


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("tile", [4, 13, 100])
def test_a_tiled_call_and_its_gradients(tile: int, checkpointed: bool) -> None:
    x, share, ignored = drawn(2, 13, WIDTH), drawn(2, 13, 1, seed=3), drawn(2, 13, 2, seed=4)
    chosen = (torch.arange(26).reshape(2, 13, 1) > 16).long()
    parameters = [drawn(WIDTH, WIDTH, seed=seed) for seed in (1, 2)]
    unused = drawn(3)
    shapes: list[Any] = []

    def run(*inputs: Tensor) -> Tensor:
        shapes.append([one.shape for one in inputs])
        return mixture(*parameters)(*inputs[:3])

    def call(*inputs: Tensor) -> Tensor:
        return tiled_call(run, inputs, [*parameters, unused], tile)

    inputs = (x, chosen, share, ignored)
    got = checkpoint(call, *inputs, use_reentrant=False) if checkpointed else call(*inputs)
    want = mixture(*parameters)(x, chosen, share)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    given, weight = (x, share, *parameters), drawn(*want.shape, seed=5).detach()
    found = torch.autograd.grad((got * weight).sum(), (*given, unused, ignored))
    for one, right in zip(found, torch.autograd.grad((want * weight).sum(), given), strict=False):
        torch.testing.assert_close(one, right, rtol=1e-10, atol=1e-14)
    assert not found[-1].any() and not found[-2].any()
    assert max(one[0][-2] for one in shapes) == min(tile, 26) and all(len(one[0]) == 3 for one in shapes)


def test_both_passes_of_a_tiled_call_run_under_the_callers_autocast() -> None:
    x, weight = drawn(8, WIDTH, dtype=torch.float32), drawn(WIDTH, WIDTH, seed=1, dtype=torch.float32)
    dtypes = []

    def function(rows: Tensor) -> Tensor:
        out = linear(rows, weight)
        dtypes.append(out.dtype)
        return out

    with torch.autocast("cpu", torch.bfloat16):
        out = tiled_call(function, [x], [weight], 3)
    out.float().sum().backward()
    assert len(dtypes) == 6 and set(dtypes) == {torch.bfloat16}
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_what_is_done_to_deferred_logits_is_done_to_each_tile() -> None:
    hidden, weight, bias = drawn(2, 13, WIDTH), drawn(WORDS, WIDTH, seed=1), drawn(WORDS, seed=2)
    labels = labels_of(2, 13)

    def made(strict: bool = True) -> DeferredLogits:
        return DeferredLogits(hidden, lambda x, job: job(x, weight, bias), 5, WORDS, strict)

    def changed(logits: Any) -> Any:
        logits = logits[:, :, :] / 3.0
        logits = 2.0 * torch.tanh(logits) - 0.5
        logits *= 1.5
        return (-logits + torch.tensor(0.25)).clamp(min=-3.0).to(torch.float64)

    whole = changed(linear(hidden, weight, bias))
    deferred = changed(made())
    torch.testing.assert_close(deferred.tensor(), whole)
    assert deferred.shape == whole.shape and deferred.size(-1) == WORDS and deferred.dim() == 3
    want = cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum") / ITEMS
    torch.testing.assert_close(deferred.loss(labels, ITEMS), want)
    log_shares = whole.log_softmax(-1)
    chosen = log_shares.gather(-1, labels.clamp_min(0)[..., None])[..., 0] * (labels >= 0)
    both = torch.stack([chosen, -(log_shares.exp() * log_shares).sum(-1)], dim=-1)
    torch.testing.assert_close(deferred.logprobs(labels, logprobs_and_entropies), both)
    assert isinstance(scaled := made().mul_(2.0), DeferredLogits) and scaled.mul_(1.0) is scaled
    for other_way_round in (lambda x: 1.0 - x, lambda x: 1.0 / x):
        with pytest.raises(TypeError, match="unsupported operand"):
            other_way_round(made())
    refused: dict[str, Callable[[Any], Any]] = {
        r"logits\[": lambda x: x[:, -1],
        "sum": lambda x: x.sum(),
        "argmax": lambda x: torch.argmax(x, -1),
        "mul": lambda x: x * torch.ones(WORDS),
        "add": lambda x: x + x,
    }
    for name, use in refused.items():
        with pytest.raises(NoLogitsError, match=name):
            use(made())
        torch.testing.assert_close(use(made(strict=False)), use(linear(hidden, weight, bias)))

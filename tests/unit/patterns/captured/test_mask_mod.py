"""What a trace says about a mask function: what it depends on, how it may be called, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_mask
from torch.testing import assert_close

from ds_ring import MaskMod, RingConfigError, RingError, RingPatternError
from ds_ring.masks.pattern import QueryHead
from ds_ring.patterns.captured.mask_mod import trace_mask
from ds_ring.patterns.captured.score_mod import ScoreMod
from tests.masks import MaskFunction, causal

IDS = torch.arange(64)
EXACT = torch.arange(64.0)
SMALLER = torch.tensor(1e-10, dtype=torch.float64)


def first_heads(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (h < 2) & (q >= k)


def adds_to_its_own(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    own = q.new_zeros(())
    own += b
    return q + own >= k


def own_sample(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (torch.arange(64)[q] >= k) & (q >= b)


def own_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(64)[q] >= k + h


def promotes(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Hide the diagonal: q - 1e-10 is float64 for 0-d tensors, but float32, and so q, for others."""
    return EXACT[q] - SMALLER >= k


def own_table(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(64)[q] > k  # not a captured one


@pytest.mark.parametrize(
    ("function", "by_batch", "by_head", "elementwise"),
    [
        (and_masks(causal, lambda b, h, q, k: IDS[q] == IDS[k]), False, False, True),
        (first_heads, False, True, True),
        (adds_to_its_own, True, False, True),
        (own_sample, True, False, False),
        (own_head, False, True, False),
        (promotes, False, False, False),
        (own_table, False, False, False),
    ],
)
def test_facts_of_a_mask(function: MaskFunction, by_batch: bool, by_head: bool, elementwise: bool) -> None:
    facts = trace_mask(function)
    found = facts.by_batch, facts.by_head, facts.elementwise
    assert found == (by_batch, by_head, elementwise)


@pytest.mark.parametrize("function", [first_heads, own_sample, own_head, promotes, own_table])
def test_a_mask_is_flex_attentions(function: MaskFunction) -> None:
    samples, heads, at = 2, (0, 1, 2), torch.arange(8)
    (branch,) = MaskMod(function).branches(QueryHead(0, 3, 3))
    found = branch.masks[0].for_heads(heads)(samples, at, at)
    expected = create_mask(function, samples, len(heads), 8, 8, device="cpu")
    assert found.dim() in (2, 4)
    assert_close(found.expand_as(expected), expected)


@pytest.mark.situation("masks", "a mask function writes to a captured tensor")
@pytest.mark.parametrize(
    "write",
    [lambda q: IDS.view(8, 8).add_(0), lambda q: IDS.add_(q), lambda q: q.add_(1), lambda q: q.sub_(q)],
)
def test_a_mask_that_writes_to_what_is_not_its_own_is_refused(write: MaskFunction) -> None:
    def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        write(q)
        return q >= k

    with pytest.raises(RingPatternError, match="writes to no tensor but its own"):
        trace_mask(function)


@pytest.mark.situation("masks", "a mask function with tensors as defaults")
@pytest.mark.parametrize("where", ["default", "after a star"])
def test_what_a_default_holds_is_captured(where: str) -> None:
    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor, width: int = 9) -> Tensor:
        return q - k <= width

    def wide(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, width: int = 9) -> Tensor:
        return q - k <= width

    pattern = MaskMod(near if where == "default" else wide)
    pattern.check_unchanged()
    if where == "default":
        near.__defaults__ = (8,)
    else:
        wide.__kwdefaults__ = {"width": 8}
    with pytest.raises(RingPatternError, match="make a new MaskMod"):
        pattern.check_unchanged()


def changed_score_mod() -> None:
    captured = SimpleNamespace(factors=[1.0])
    mod = ScoreMod(lambda score, b, h, q, k: score * captured.factors[0])
    captured.factors[0] = 2.0
    mod.check_unchanged()


def dense(function: MaskFunction) -> None:
    MaskMod(function).mask(np.arange(4), np.arange(4))


@pytest.mark.situation("masks", "a function that is no mask")
@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: MaskMod(3), RingPatternError, "MaskMod: expected a mask_mod.* got 3"),  # type: ignore[arg-type]
        (lambda: dense(lambda b, h, q, k: q >= k - b), RingPatternError, "the same for all samples here"),
        (lambda: dense(lambda b, h, q, k: (q >= k).int()), RingPatternError, "got torch.int32 of shape"),
        (lambda: dense(lambda b, h, q, k: 1 / 0), RingPatternError, "got ZeroDivisionError"),
        (changed_score_mod, RingConfigError, "captured values that stay as they were, got others"),
    ],
)
def test_what_is_no_mask_or_has_changed_is_refused(
    call: Callable[[], None], error: type[RingError], said: str
) -> None:
    with pytest.raises(error, match=said):
        call()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_mask_function_gets_arrays_of_its_own(tokens: int) -> None:
    """A broadcast array of one pair is contiguous and read-only; torch warns where it shares such memory."""
    pattern, positions = MaskMod(lambda b, h, q, k: q >= k), np.arange(tokens)
    np.testing.assert_array_equal(pattern.mask(positions, positions), np.tri(tokens, dtype=bool))

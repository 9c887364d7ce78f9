"""What a trace says about a mask function, what is refused, and its JSON keys."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_mask
from torch.testing import assert_close

from ds_ring import (
    Causal,
    MaskMod,
    RingConfig,
    RingConfigError,
    RingError,
    RingPatternError,
    SlidingWindow,
    build_plan,
    make_layout,
)
from ds_ring.config.section import pattern_from_config
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.patterns.captured.mask_mod import trace_mask
from ds_ring.patterns.captured.score_mod import ScoreMod
from tests.masks import MaskFunction, causal, every_third

IDS = torch.arange(64)
EXACT = torch.arange(64.0)
SMALLER = torch.tensor(1e-10, dtype=torch.float64)


def first_heads(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (h < 2) & (q >= k)


def adds_to_its_own(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    local = q.new_zeros(())
    local += b
    return q + local >= k


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
    result = facts.by_batch, facts.by_head, facts.elementwise
    assert result == (by_batch, by_head, elementwise)


@pytest.mark.parametrize("function", [first_heads, own_sample, own_head, promotes, own_table])
def test_a_mask_is_flex_attentions(function: MaskFunction) -> None:
    samples, heads, at = 2, (0, 1, 2), torch.arange(8)
    (branch,) = MaskMod(function).branches(QueryHead(0, 3, 3))
    result = branch.masks[0].for_heads(heads)(samples, at, at)
    expected = create_mask(function, samples, len(heads), 8, 8, device="cpu")
    assert result.dim() in (2, 4)
    assert_close(result.expand_as(expected), expected)


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    name: getattr(torch, name)
    for name in (
        "add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "maximum", "minimum",
        "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift",
        "logical_and", "logical_or", "logical_xor", "gt", "ge", "lt", "le", "eq", "ne", "gcd", "lcm",
        "hypot", "copysign",
    )
} | {
    "where": lambda x, y: torch.where(x > 2, x, y),
    "clamp": lambda x, y: torch.clamp(x, min=y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "neg": lambda x, y: -x - y,
}  # fmt: skip
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
TABLES = torch.tensor([100, 255, 3, 7]), torch.tensor([5, 2, 60, 33])
NUMBERS = torch.tensor(201), torch.tensor(77)


def of_types(name: str, left: torch.dtype, right: torch.dtype) -> dict[str, MaskFunction]:
    """Masks by an operator of two types: of a table and a number, the reverse, and of two tables."""
    (a, b), (x, y) = [(item.to(left), second.to(right)) for item, second in (TABLES, NUMBERS)]
    operator, later = BINARY[name], torch.tensor(40, dtype=torch.int64)

    def mask(read: Callable[..., tuple[Tensor, Tensor]]) -> MaskFunction:
        return lambda batch, h, q, k: operator(*read(q, k)) * 3 > later + k * 0

    return {
        "table and number": mask(lambda q, k: (a[q], y)),
        "number and table": mask(lambda q, k: (x, b[q])),
        "two tables": mask(lambda q, k: (a[k], b[q])),
    }


def evaluated(call: Callable[[], Tensor]) -> Tensor | None:
    """What a mask is; None for one that cannot be evaluated."""
    try:
        return call().expand(1, 1, 4, 4)
    except (RuntimeError, RingError):
        return None


@pytest.mark.night
@pytest.mark.parametrize("left", WHOLE, ids=str)
@pytest.mark.parametrize("name", BINARY)
@pytest.mark.day("mul-torch.uint8", "mul-torch.int64", "mul-torch.int32")
@pytest.mark.situation(
    "dtypes", "a mask_mod of a uint8 table and an int64 number: every operator and two types"
)
def test_types_of_an_operator_are_those_of_flex_attention(name: str, left: torch.dtype) -> None:
    at, wrong, fast, refused = torch.arange(4), [], 0, 0
    for right in WHOLE:
        for how, function in of_types(name, left, right).items():
            want = evaluated(lambda f=function: create_mask(f, 1, 1, 4, 4, device="cpu"))
            pattern = MaskMod(function)
            (branch,) = pattern.branches(QueryHead())
            got = evaluated(lambda mask=branch.masks[0]: mask(1, at, at))
            # torch subtracts no booleans, and the trace says so; under vmap it does
            is_refused = got is None and name in ("sub", "neg") and torch.bool in (left, right)
            refused += is_refused
            if got is None or want is None:
                if got is not want and not is_refused:
                    wrong.append(f"{how} {left} {right}")
            elif not torch.equal(got, want):
                wrong.append(f"{how} {left} {right}")
            else:
                fast += pattern.facts.elementwise
    assert not wrong
    if name == "sub" and left == torch.bool:
        assert refused == 3 * len(WHOLE)
    else:
        assert fast or name not in ("sub", "mul", "gt", "where")  # where types agree, tensors broadcast


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
    with pytest.raises(RingPatternError, match="give each call of ring_attention a new MaskMod"):
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


# --- JSON keys -------------------------------------------------------------------------------------------


NAME = "tests.masks:every_third"


def pattern_of(**keys: Any) -> Pattern:
    json = {"sequence_parallel_size": 2, "ring_attention": {"pattern": keys}}
    return pattern_from_config(RingConfig.from_deepspeed(json))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, MaskMod(every_third) & Causal()),
        ({"causal": False}, MaskMod(every_third)),
        ({"window": 8}, SlidingWindow(8) & MaskMod(every_third)),
    ],
)
def test_a_function_is_combined_with_the_other_keys(keys: dict[str, Any], expected: Pattern) -> None:
    assert pattern_of(mask_mod=NAME, **keys) == expected


NO_NAME = r'pattern\.mask_mod: expected "module:function", got'
GONE = "expected a function that can be imported, got"


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        *((value, RingConfigError, NO_NAME) for value in ("every_third", "tests.masks:", "a b:c", 3, [NAME])),
        *(
            (f"{name}", RingPatternError, f"{GONE} '{name}'")
            for name in ("no_such_module:fn", "tests.masks:gone")
        ),
    ],
)
def test_what_is_no_name_or_gone_is_refused(value: Any, error: type[RingError], words: str) -> None:
    with pytest.raises(error, match=words):
        pattern_of(mask_mod=value)


def test_a_function_that_is_said_to_be_causal_is() -> None:
    near = lambda batch, head, q, k: (q >= k) & (q - k < 4)  # noqa: E731
    said, unsaid = MaskMod(near, is_known_causal=True), MaskMod(near)
    assert (said.is_causal, unsaid.is_causal) == (True, False)
    assert said.mask(np.arange(0), np.arange(4)).shape == (0, 4)


def test_a_score_mod_that_fails_far_out_is_refused_before_it_runs() -> None:
    table = torch.zeros(4)
    mod = ScoreMod(lambda score, b, h, q, k: score + table[q])
    mod.check(4, 1, 1)
    with pytest.raises(RingConfigError, match=r"expected scores at positions up to 7 and 7, got .*out of"):
        mod.check(8, 1, 1)


def test_a_mask_function_makes_pairs_and_tokens_upper_bounds() -> None:
    """(They looked exact, while the function hid half of them.)"""
    layout = make_layout("contiguous", tokens=64, ring_size=4)
    near = MaskMod(lambda batch, head, q, k: (q - k >= 0) & (q - k < 4))
    plan = build_plan(near, layout)
    assert "pairs and tokens are upper bounds" in plan.summary().splitlines()[0]
    assert plan.tokens_needed > build_plan(SlidingWindow(4), layout).tokens_needed
    assert "upper bounds" not in build_plan(SlidingWindow(4), layout).summary()

"""Functions whose captured values change: a new MaskMod attends with the new ones, the old one is refused.

The truth of each moment is FlexAttention's own create_mask. A kind of value that can be captured is a row of
KINDS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

from ds_ring import (
    Causal,
    MaskMod,
    RingAttention,
    RingConfigError,
    RingMesh,
    RingPatternError,
    decode_attention,
    max_logits,
    ring_attention,
    simulate,
)
from ds_ring.layers.scores import Alibi, Softcap
from ds_ring.patterns.captured.mask_mod import trace_mask
from ds_ring.patterns.captured.score_mod import ScoreMod
from ds_ring.patterns.captured.traced import CapturedValues
from ds_ring.schedule.layout import make_layout
from ds_ring.schedule.plan import build_plan
from tests import calls
from tests.reference import relative_error

TOKENS = 32
NUMBER = 9
Function = Callable[..., Tensor]
Change = Callable[[Any], None]


class Holder:
    """An object with a window, and a class with one."""

    of_class = 9

    def __init__(self) -> None:
        self.window = 9
        self.inner = SimpleNamespace(window=9)

    def mask(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < self.window

    @property
    def width(self) -> int:
        return self.window

    def read(self) -> int:
        return self.inner.window


class Slotted:
    __slots__ = ("window",)

    def __init__(self) -> None:
        self.window = 9


def within(read: Callable[[], Any]) -> Function:
    return lambda b, h, q, k: q - k < read()


def by_attribute() -> tuple[Function, Change]:
    config = SimpleNamespace(window=9)
    return lambda b, h, q, k: q - k < config.window, lambda x: setattr(config, "window", x)


def two_levels_down() -> tuple[Function, Change]:
    config = SimpleNamespace(model=SimpleNamespace(attention=SimpleNamespace(window=9)))
    attention = config.model.attention
    return lambda b, h, q, k: q - k < config.model.attention.window, lambda x: setattr(attention, "window", x)


def by_dict() -> tuple[Function, Change]:
    table = {"window": 9}
    return lambda b, h, q, k: q - k < table["window"], lambda x: table.update(window=x)


def by_list() -> tuple[Function, Change]:
    table = [3, [9]]
    return lambda b, h, q, k: q - k < table[1][0], lambda x: table.__setitem__(1, [x])  # type: ignore[index]


def by_array() -> tuple[Function, Change]:
    array = np.array([3, 9])
    return lambda b, h, q, k: q - k < int(array[1]), lambda x: array.__setitem__(1, x)


def by_global() -> tuple[Function, Change]:
    globals()["NUMBER"] = 9
    return lambda b, h, q, k: q - k < NUMBER, lambda x: globals().update(NUMBER=x)


def by_method() -> tuple[Function, Change]:
    holder = Holder()
    return holder.mask, lambda x: setattr(holder, "window", x)


def by_property() -> tuple[Function, Change]:
    holder = Holder()
    return lambda b, h, q, k: q - k < holder.width, lambda x: setattr(holder, "window", x)


def by_called_method() -> tuple[Function, Change]:
    holder = Holder()
    return lambda b, h, q, k: q - k < holder.read(), lambda x: setattr(holder.inner, "window", x)


def by_class() -> tuple[Function, Change]:
    Holder.of_class = 9
    return lambda b, h, q, k: q - k < Holder.of_class, lambda x: setattr(Holder, "of_class", x)


def by_slot() -> tuple[Function, Change]:
    slotted = Slotted()
    return lambda b, h, q, k: q - k < slotted.window, lambda x: setattr(slotted, "window", x)


def by_attribute_of_function() -> tuple[Function, Change]:
    def helper() -> None: ...

    helper.width = NUMBER  # type: ignore[attr-defined]
    return within(lambda: helper.width), lambda x: setattr(helper, "width", x)  # type: ignore[attr-defined]


def by_cell() -> tuple[Function, Change]:
    window = 9

    def change(x: int) -> None:
        nonlocal window
        window = x

    return lambda b, h, q, k: q - k < window, change


def by_tensor() -> tuple[Function, Change]:
    window = torch.tensor(9)
    return lambda b, h, q, k: q - k < window, lambda x: window.fill_(x)


def by_ids() -> tuple[Function, Change]:
    """Document ids of a batch in a buffer that is used again."""
    ids = torch.arange(TOKENS) // 9
    return lambda b, h, q, k: ids[q] == ids[k], lambda x: ids.copy_(torch.arange(TOKENS) // x)


def by_buffer() -> tuple[Function, Change]:
    module = nn.Module()
    module.register_buffer("ids", torch.arange(TOKENS) // 9)
    return lambda b, h, q, k: module.ids[q] == module.ids[k], lambda x: module.ids.copy_(
        torch.arange(TOKENS) // x
    )


def by_nested_function() -> tuple[Function, Change]:
    config = SimpleNamespace(window=9)
    return within(lambda: config.window), lambda x: setattr(config, "window", x)


@dataclass(frozen=True)
class Frozen:
    """A frozen value that holds a function."""

    inner: Function

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.inner(b, h, q, k)


def by_function_of_frozen() -> tuple[Function, Change]:
    config = SimpleNamespace(window=9)
    return Frozen(lambda b, h, q, k: q - k < config.window), lambda x: setattr(config, "window", x)


KINDS = {
    one.__name__: one
    for one in (
        by_attribute, two_levels_down, by_dict, by_list, by_array, by_global, by_method, by_property,
        by_called_method, by_class, by_slot, by_attribute_of_function, by_cell, by_tensor, by_ids, by_buffer,
        by_nested_function, by_function_of_frozen,
    )
}  # fmt: skip


LAYOUT = make_layout("contiguous", tokens=TOKENS, ring_size=1)


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, TOKENS, 8, generator=generator, dtype=torch.float64) for _ in range(3)]


def attended(**options: Any) -> Tensor:
    out: Tensor = calls.attend(*inputs(), layout=LAYOUT, mesh=RingMesh.single(), **options)
    return out


def causally(function: Function) -> Function:
    return lambda b, h, q, k: function(b, h, q, k) & (q >= k)


def truth(function: Function) -> Tensor:
    q, k, v = inputs()
    mask = create_mask(lambda b, h, q, k: function(b, h, q, k), 1, 2, TOKENS, TOKENS, device="cpu")
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v


@pytest.mark.situation("masks", "a mask is made anew after what its function captured has changed")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.day(
    "two_levels_down", "by_method", "by_property", "by_slot", "by_array", "by_attribute_of_function"
)
def test_a_new_mask_has_what_was_captured_now_and_the_old_one_is_refused(kind: str) -> None:
    function, change = KINDS[kind]()
    first, plans = MaskMod(function), []
    for width in (9, 5, 9):
        change(width)
        pattern = MaskMod(function) & Causal()
        assert relative_error(attended(pattern=pattern), truth(causally(function))) < 1e-12
        plans.append(build_plan(pattern, LAYOUT))
    assert plans[0] is plans[2] and plans[0] is not plans[1]
    change(6)
    with pytest.raises(RingPatternError, match="give each call of ring_attention a new MaskMod"):
        attended(pattern=first)


@pytest.mark.situation("masks", "a score_mod whose captured values have changed")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["call", "module"])
@pytest.mark.day("call-by_ids", "module-two_levels_down")
def test_a_score_mod_has_what_was_captured_now(kind: str, how: str) -> None:
    function, change = KINDS[kind]()

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(function(b, h, q, k), score, -torch.inf)

    module = RingAttention(Causal(), mesh=RingMesh.single(), layout=LAYOUT, score_mod=score_mod)
    for width in (9, 5, 9):
        change(width)
        got = attended(pattern=Causal(), score_mod=score_mod) if how == "call" else module(*inputs())
        assert relative_error(got, truth(causally(function))) < 1e-12


UNCOUNTED: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda table: table.data.mul_(3),
    "numpy": lambda table: np.multiply(table.numpy(), 3, table.numpy()),
}


@pytest.mark.situation("modules", "tensors that a module's functions captured are written by .data or numpy")
@pytest.mark.parametrize("how", UNCOUNTED)
def test_a_write_that_torch_does_not_count_is_a_change(how: str) -> None:
    table, ids = torch.linspace(0, 2, TOKENS, dtype=torch.float64), torch.arange(TOKENS) // 5
    scored = lambda score, b, h, q, k: score + table[q - k]  # noqa: E731
    where: dict[str, Any] = {"mesh": RingMesh.single(), "layout": LAYOUT}
    module, pattern = (
        RingAttention(Causal(), **where, score_mod=scored),
        MaskMod(lambda b, h, q, k: ids[q] == ids[k]),
    )
    masked = RingAttention(pattern & Causal(), **where)
    module(*inputs()), masked(*inputs())
    UNCOUNTED[how](table), UNCOUNTED[how](ids)
    want = attended(pattern=Causal(), score_mod=scored)
    assert relative_error(module(*inputs()), want) < 1e-12
    for call in (lambda: masked(*inputs()), lambda: attended(pattern=pattern)):
        with pytest.raises(RingPatternError, match="give each call of ring_attention a new MaskMod"):
            call()


def test_contents_are_compared_bit_by_bit() -> None:
    table = torch.tensor([torch.nan, -0.0])
    held = CapturedValues.by(lambda: table)
    assert held.is_same(lambda: table) is False  # another function has other code
    function = lambda: table  # noqa: E731
    held = CapturedValues.by(function)
    assert held.is_same(function)
    table.data[1] = 0.0
    assert not held.is_same(function)


Q = torch.zeros(1, 1, TOKENS, 4)
WHERE: Any = {"layout": LAYOUT, "mesh": RingMesh.single()}
ENTRIES: dict[str, Callable[[MaskMod], object]] = {
    "simulate": lambda pattern: simulate(Q, Q, Q, pattern=pattern, layout=LAYOUT),
    "a dense mask": lambda pattern: pattern.mask(np.arange(TOKENS), np.arange(TOKENS)),
    "decode_attention": lambda pattern: decode_attention(
        Q[:, :, :1], Q, Q, positions=[1], pattern=pattern, **WHERE
    ),
    "max_logits": lambda pattern: max_logits(Q, Q, pattern=pattern, **WHERE),
}


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.situation("masks", "a captured tensor is changed in place: each call that takes a pattern")
def test_each_call_that_evaluates_a_mask_refuses_one_that_has_changed(name: str) -> None:
    ids = torch.arange(TOKENS) // 4
    pattern = MaskMod(lambda b, h, q, k: ids[q] == ids[k])
    ENTRIES[name](pattern)
    ids.zero_()
    with pytest.raises(RingPatternError, match="expected unchanged captured values"):
        ENTRIES[name](pattern)


@pytest.mark.situation("compile", "a mask or score function is itself a compiled function, or calls one")
@pytest.mark.parametrize("nested", [False, True])
def test_a_compiled_function_is_what_it_was_compiled_of(nested: bool) -> None:
    tilt = lambda score, b, h, q, k: score + 0.3 * (q - k)  # noqa: E731
    near = lambda b, h, q, k: q - k < 5  # noqa: E731
    fast_tilt, fast_near = torch.compile(tilt, backend="eager"), torch.compile(near, backend="eager")
    score_mod = (lambda *given: fast_tilt(*given)) if nested else fast_tilt
    mask_mod = (lambda *given: fast_near(*given)) if nested else fast_near
    got = attended(pattern=MaskMod(mask_mod) & Causal(), score_mod=score_mod)
    assert relative_error(got, attended(pattern=MaskMod(near) & Causal(), score_mod=tilt)) < 1e-12


def test_a_list_that_is_cut_elsewhere_is_a_change() -> None:
    """[[1], [2]] and [[1, 2]] have the same items."""
    groups = [[1], [2]]

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q % len(groups) == k % len(groups)

    first = MaskMod(mask)
    first.check_unchanged()
    groups[:] = [[1, 2]]
    with pytest.raises(RingPatternError, match="give each call of ring_attention a new MaskMod"):
        first.check_unchanged()
    assert MaskMod(mask) != first


def test_masks_of_equal_code_and_values_are_one_plan() -> None:
    """Of another function each, as a model makes one in every layer; the ids of one change later."""

    def of_documents(ids: Tensor) -> MaskMod:
        def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return ids[q] == ids[k]

        return MaskMod(documents)

    ids = torch.arange(TOKENS) // 9
    mine, yours = ids.clone(), ids.clone()
    first, second = of_documents(mine), of_documents(yours)
    assert build_plan(first, LAYOUT) is build_plan(second, LAYOUT)
    attended(pattern=first)
    mine.zero_()
    want = truth(lambda b, h, q, k: ids[q] == ids[k])
    assert relative_error(attended(pattern=second), want) < 1e-12
    with pytest.raises(RingPatternError, match="give each call of ring_attention a new MaskMod"):
        attended(pattern=first)


@pytest.mark.situation("masks", "a captured value changes between forward and backward")
def test_the_backward_pass_has_the_values_of_the_forward_pass() -> None:
    """Two batches whose ids lie in one buffer, forward before backward."""
    ids, mesh = torch.zeros(TOKENS, dtype=torch.long), RingMesh.single()

    def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[q] == ids[k]) & (q >= k)

    def bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * (1 + ids[q])

    for options in ({}, {"score_mod": bias}):
        outs, wanted, leaves = [], [], []
        for width in (9, 5):
            ids.copy_(torch.arange(TOKENS) // width)
            given = [x.requires_grad_() for x in inputs()]
            outs.append(calls.attend(*given, pattern=MaskMod(documents), layout=LAYOUT, mesh=mesh, **options))
            leaves.append(given)
            q, k, v = inputs()
            q.requires_grad_()
            hidden = (ids[:, None] != ids) | torch.ones(TOKENS, TOKENS).triu(1).bool()
            scores = q @ k.mT / q.shape[-1] ** 0.5 * (1 + ids[:, None] if options else 1)
            out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
            wanted.append(torch.autograd.grad(out.square().sum(), q)[0])
        for out, given, want in zip(outs, leaves, wanted, strict=True):
            assert relative_error(torch.autograd.grad(out.square().sum(), given[0])[0], want) < 1e-12


# --- gradients of captured tensors ---------------------------------------------------------------------


def parameter(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + BIAS[h]


def leaf(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + LEAF[h] * 2


def product(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score * MADE[h]


class Relative(nn.Module):
    """T5's bias of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 2)

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + self.table((q - k).clamp(0, TOKENS - 1))[h]


BIAS = nn.Parameter(torch.tensor([0.5, 1.5], dtype=torch.float64))
LEAF = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
MADE = LEAF * 2  # no leaf
RELATIVE = Relative().double()
LEARNED: dict[str, Any] = {
    "a parameter": parameter,
    "a leaf": leaf,
    "a tensor that was computed": product,
    "a module": RELATIVE,
    "a module's method": RELATIVE.forward,
    "slopes": Alibi(torch.nn.Parameter(torch.ones(4))),
}


@pytest.mark.situation("masks", "a score_mod captures a parameter, a leaf tensor or a module")
@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("how", ["call", "module", "replicated"])
@pytest.mark.day("call-a module", "module-a tensor that was computed", "call-slopes")
def test_a_captured_tensor_that_requires_a_gradient_is_refused(name: str, how: str) -> None:
    function = LEARNED[name]
    module = RingAttention(Causal(), mesh=RingMesh.single(), layout=LAYOUT, score_mod=function)

    def run() -> Any:
        if how == "module":
            return module(*inputs())
        queries = {"queries": "replicated"} if how == "replicated" else {}
        return attended(pattern=Causal(), score_mod=function, **queries)

    with pytest.raises(RingConfigError, match=r"require no gradient.*detach it"):
        run()
    with torch.no_grad():  # nobody asks for one
        want = run()
    detached = lambda score, b, h, q, k: function(score, b, h, q, k).detach() + score - score.detach()  # noqa: E731
    if how == "call" and name != "a tensor that was computed":
        assert relative_error(attended(pattern=Causal(), score_mod=detached), want) < 1e-12


# --- derivatives ----------------------------------------------------------------------------------------


def far(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score / (q - k + 1)


def root(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + (score * 0 + q - k + 0.5).sqrt()


class FiveTimes(torch.autograd.Function):
    """A function whose derivative its operators do not say."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 5


def five_times(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return FiveTimes.apply(score)  # type: ignore[no-any-return]


@pytest.mark.situation("masks", "a score_mod whose derivative is not finite at hidden pairs")
@pytest.mark.parametrize("function", [far, root, five_times])
def test_derivatives_are_masked_and_are_those_of_the_function(function: Function) -> None:
    """(FlexAttention masks after the derivative.)"""
    given = [x.requires_grad_() for x in inputs()]
    q, k, v = given
    at = torch.arange(TOKENS)
    seen = (at[:, None] >= at).expand(1, 2, TOKENS, TOKENS)
    i, j = (x.expand(1, 2, TOKENS, TOKENS)[seen] for x in (at[:, None], at))
    scores = (q @ k.mT / q.shape[-1] ** 0.5)[seen]
    changed = torch.full(seen.shape, -torch.inf, dtype=q.dtype).masked_scatter(
        seen, function(scores, 0, 0, i, j)
    )
    out = changed.softmax(-1) @ v
    want = [out, *torch.autograd.grad(out.square().sum(), given)]
    got = ring_attention(*given, pattern=Causal(), layout=LAYOUT, mesh=RingMesh.single(), score_mod=function)
    for a, b in zip([got, *torch.autograd.grad(got.square().sum(), given)], want, strict=True):
        assert relative_error(a.detach(), b.detach()) < 1e-12


# --- what is traced -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "look_up",
    [
        lambda table: lambda s, b, h, q, k: s + table[b],
        lambda table: lambda s, b, h, q, k: s + table[h],
        lambda table: lambda s, b, h, q, k: s + table[q],
        lambda table: lambda s, b, h, q, k: s + table[k],
    ],
    ids=["sample", "head", "query", "key"],
)
def test_a_table_that_ends_before_the_last_index_is_refused(look_up: Callable[[Tensor], Function]) -> None:
    ScoreMod(look_up(torch.zeros(5))).check(tokens=5, samples=5, query_heads=5)
    with pytest.raises(RingConfigError, match="index"):
        ScoreMod(look_up(torch.zeros(4))).check(tokens=5, samples=5, query_heads=5)


OF_SAMPLES: dict[str, Callable[[Tensor], Function]] = {
    "one index": lambda table: lambda s, b, h, q, k: s + table[b],
    "an index for each dimension": lambda table: lambda s, b, h, q, k: s + table[b, q],
    "one index after the other": lambda table: lambda s, b, h, q, k: s + table[b][k],
    "columns": lambda table: lambda s, b, h, q, k: s + table.T[q, b],
    "the last dimension": lambda table: lambda s, b, h, q, k: s + table.T.index_select(-1, b)[q, 0],
    "another type": lambda table: lambda s, b, h, q, k: s + table[b.int(), k],
    "a changed table": lambda table: lambda s, b, h, q, k: s + (table * 2)[b, q],
    "embedding": lambda table: lambda s, b, h, q, k: s + torch.nn.functional.embedding(b, table)[q],
    "gather": lambda table: lambda s, b, h, q, k: s + table.gather(0, b.expand(1, 5))[0, q],
}


@pytest.mark.parametrize("name", OF_SAMPLES)
@pytest.mark.situation("masks", "a table of the whole batch, where this rank has some of its samples")
def test_a_table_of_more_samples_than_there_are_is_refused(name: str) -> None:
    table = torch.zeros(3) if name == "one index" else torch.zeros(3, 5)
    function = OF_SAMPLES[name](table)
    ScoreMod(function).check(tokens=5, samples=3, query_heads=5)
    mask = MaskMod(lambda *pair: function(pair[2], *pair) > 0)
    mask.check(5, 3, 5, "cpu")
    for samples in (1, 2):
        says = f"one row for each of this rank's {samples} samples.*got 3 rows.*batch_mask.py"
        with pytest.raises(RingConfigError, match=f"score_mod .*{says}"):
            ScoreMod(function).check(tokens=5, samples=samples, query_heads=5)
        with pytest.raises(RingPatternError, match=f"MaskMod .*{says}"):
            mask.check(5, samples, 5, "cpu")


def test_tables_of_heads_and_of_kinds_of_samples_may_have_more_rows() -> None:
    table = torch.zeros(8, 8)
    for function in (lambda s, b, h, q, k: s + table[h, q], lambda s, b, h, q, k: s + table[b % 2, q]):
        ScoreMod(function).check(tokens=5, samples=3, query_heads=2)


def test_heads_and_positions_are_told_apart() -> None:
    """(A trace with one tensor for all indices gave score + head and score + query one digest.)"""
    mods = [ScoreMod(lambda s, b, h, q, k: s + h), ScoreMod(lambda s, b, h, q, k: s + q)]
    assert len({mod.traced(torch.float32).digest for mod in mods}) == 2


def writes(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    LEAF.detach().add_(0)
    return score


def draws(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + torch.rand(())


COUNT: list[int] = []


def counts(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    COUNT.append(1)
    return score + len(COUNT)


def throws_dice(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    np.random.rand()
    return score


def conditional(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.cond(q >= k, lambda x: x + 1, lambda x: x * 2, (score,))  # type: ignore[no-any-return]


NO_SCORES: dict[str, tuple[Any, str]] = {
    "a number": (3, "expected a function"),
    "a class": (Softcap, "expected a function"),
    "takes three": (lambda s, q, k: s, "got TypeError"),
    "branches": (lambda s, b, h, q, k: s if q > k else -s, "got .*Error"),
    "a row": (lambda s, b, h, q, k: s + torch.arange(3), r"a score without dimensions, got .*\(3,\)"),
    "writes": (writes, "got RuntimeError: .*in-place"),
    "draws": (draws, "without random numbers, got a call of aten.rand"),
    "draws in numpy": (throws_dice, "without random numbers, got one that draws"),
    "is another one each time": (counts, "the same at every call"),
    "has control flow": (conditional, "got .*"),
}


@pytest.mark.parametrize("name", NO_SCORES)
def test_what_is_no_score_mod_is_refused(name: str) -> None:
    function, says = NO_SCORES[name]
    with pytest.raises(RingConfigError, match=f"score_mod.*{says}"):
        attended(pattern=Causal(), score_mod=function)


def test_control_flow_in_a_mask_is_refused() -> None:
    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.cond(h > 0, lambda q, k: q >= k, lambda q, k: q > k, (q, k))  # type: ignore[no-any-return]

    with pytest.raises(RingPatternError, match="control flow"):
        trace_mask(mask)


def test_a_score_mod_of_numbers_is_traced_once() -> None:
    cap = Softcap(2.0)
    assert CapturedValues.by(cap).is_all and ScoreMod.lookup(cap) is ScoreMod.lookup(cap)
    bias = torch.ones(2)
    function = lambda s, b, h, q, k: s + bias[h]  # noqa: E731
    first = ScoreMod.lookup(function)
    assert not CapturedValues.by(function).is_all and ScoreMod.lookup(function) is not first
    assert ScoreMod.lookup(function) == first
    bias.data[0] = 3  # no write that torch counts
    assert ScoreMod.lookup(function) != first

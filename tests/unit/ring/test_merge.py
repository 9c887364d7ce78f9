"""Merging partial results: exact and finite at any gap between the two log-sum-exps."""

from __future__ import annotations

import math

import pytest
import torch

from ds_ring.kernels.interface import Rows
from ds_ring.plugin import DEVICES
from ds_ring.ring import merge
from ds_ring.ring.accumulator import Accumulator, UnwrittenSlots
from ds_ring.ring.merge import merge_, merge_parts_by_operators_
from tests.merge_cases import cases, wrong, wrong_parts

INF = float("inf")


def partial(lse: float, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((1, 1, 1, 4), value), torch.full((1, 1, 1), lse)


@pytest.mark.parametrize("gap", [0.0, 1.0, -1.0, 88.0, 89.0, -89.0, 1000.0, -1000.0, INF, -INF])
@pytest.mark.parametrize("base", [0.0, -500.0, 500.0])
def test_merge_is_exact_and_finite_at_any_gap(gap: float, base: float) -> None:
    if gap == INF:  # the accumulator has seen nothing
        (out, lse), (part, part_lse) = partial(-INF, 0.0), partial(base, 3.0)
    elif gap == -INF:
        (out, lse), (part, part_lse) = partial(base, 2.0), partial(-INF, 0.0)
    else:
        (out, lse), (part, part_lse) = partial(base, 2.0), partial(base + gap, 3.0)
    old, new = lse.double(), part_lse.double()
    weight = torch.sigmoid(new - old) if math.isfinite(gap) else torch.tensor(1.0 if gap > 0 else 0.0)
    want_out = out.double() * (1 - weight) + part.double() * weight
    want_lse = torch.logaddexp(old, new)
    merge_(out, lse, part, part_lse)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    torch.testing.assert_close(out.double(), want_out, rtol=2e-7 * max(1.0, abs(base)), atol=0)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-7, atol=1e-7)


def test_the_published_formula_overflows_where_ours_does_not() -> None:
    """The formula of popular ring implementations, to show what the gap of 89 means."""
    lse, block_lse = torch.tensor(0.0), torch.tensor(89.0)
    assert torch.isinf(lse + torch.log1p(torch.exp(block_lse - lse)))
    out, total = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1)
    merge_(out, total, torch.ones(1, 1, 1, 4), torch.full((1, 1, 1), 89.0))
    assert total.item() == 89.0 and out.eq(1.0).all()


def test_a_row_that_saw_no_key_stays_zero_without_nan() -> None:
    out, lse = partial(-INF, 0.0)
    merge_(out, lse, *partial(-INF, 0.0))
    assert out.eq(0).all() and lse.eq(-INF).all()
    merge_(out, lse, *partial(1.5, 7.0))
    assert out.eq(7.0).all() and lse.eq(1.5).all()


def test_many_bfloat16_parts_do_not_lose_precision() -> None:
    """64 parts of equal weight: an accumulator in bfloat16 would be off by percents."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 1, 1, 1, 8, generator=generator).bfloat16()
    out, lse = torch.zeros(1, 1, 1, 8), torch.full((1, 1, 1), -INF)
    for value in values:
        merge_(out, lse, value, torch.zeros(1, 1, 1))
    torch.testing.assert_close(out, values.float().mean(0), rtol=1e-5, atol=1e-6)


def test_every_view_and_dtype_merges_as_float64() -> None:
    """The cases that the Triton kernel is held against as well."""
    found = [what for case in cases() for what in wrong(case, merge_)]
    assert not found, found


def test_the_first_part_of_rows_is_assigned_and_nothing_is_left_unwritten() -> None:
    """Random parts over memory full of NaN: sums are those over zeros, and no slot is filled twice."""
    generator = torch.Generator().manual_seed(0)

    def number(end: int) -> int:
        return int(torch.randint(end, (), generator=generator))

    assigned = 0
    for _ in range(300):
        got, want = torch.full((1, 2, 40), math.nan), torch.zeros(1, 2, 40)
        filled = torch.zeros(40)

        def fill(start: int, end: int, got: torch.Tensor = got, filled: torch.Tensor = filled) -> None:
            got[:, :, start:end] = 0
            filled[start:end] += 1

        parts = UnwrittenSlots(40, fill)
        for _ in range(1 + number(4)):
            step, length, repeats = 1 + number(2), 1 + number(8), 1 + number(3)
            stride = 0 if repeats == 1 else step * length + number(2)
            span = (repeats - 1) * stride + step * length
            rows = Rows(number(41 - min(span, 40)), step, length, repeats, stride)
            heads = slice(None) if number(4) else slice(0, None, 2)
            if rows.start + span > 41:
                continue
            part = torch.rand(rows.select(got[:, heads]).shape, generator=generator)
            first = parts.claim(rows, heads)
            into = rows.select(got[:, heads])
            (into.copy_ if first else into.add_)(part)
            rows.select(want[:, heads]).add_(part)
            assigned += first
        parts.finish()
        assert torch.equal(got, want) and filled.max() <= 1
    assert assigned > 50


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.day("True-0", "False-0", "True-1")
def test_parts_that_wait_are_merged_a_few_at_a_time(merged: bool, seed: int) -> None:
    """However many a hop has, before or after an accumulator is made; six in one merge have no kernel."""
    generator = torch.Generator().manual_seed(seed)
    most, made_after = 13, seed % 7
    parts = torch.randn(most, 1, 2, 6, 4, generator=generator).bfloat16()
    lses = torch.randn(most, 1, 2, 6, generator=generator)
    out, lse = torch.full((1, 2, 6, 4), math.nan).bfloat16(), torch.full((1, 2, 6), math.nan)
    total = Accumulator(lambda: [out], lses, [out.shape], torch.float32, lse if merged else None, True)
    for number in range(most):
        if number == made_after:
            total.so_far()  # from here on there is an accumulator
        total.add(Rows(0, 1, 6), slice(None), parts[number], *([lses[number]] if merged else []))
    total.finish()
    want = parts.double().sum(0)
    if merged:
        want = (lses.double().softmax(0).unsqueeze(-1) * parts.double()).sum(0)
        torch.testing.assert_close(lse, lses.logsumexp(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)


def test_operators_merge_and_add_several_parts_as_float64() -> None:
    found = [what for case in cases() for what in wrong_parts(case, merge_parts_by_operators_)]
    assert not found, found


def test_operators_merge_where_the_kernel_of_a_device_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(merge, "DEVICES", {})
    assert merge._load_cuda_merge.__wrapped__() is merge_parts_by_operators_
    row = DEVICES["cuda"]._replace(merge="ds_ring.no_such_module.launch")
    monkeypatch.setattr(merge, "DEVICES", {"cuda": row})
    assert merge._load_cuda_merge.__wrapped__() is merge_parts_by_operators_
    assert caplog.text.count("26 bytes an element instead of 10") == 2 and "no_such_module" in caplog.text

"""Which kernel "auto" takes where rates were measured: the faster one of those that can, and why."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.gpu_rates import tile_kinds
from benchmarks.measuring import ResultRow
from gpu_rows import machine

from ds_ring import Causal, Dilated, Documents, Full, MaskMod, SlidingWindow
from ds_ring.kernels.select import KernelNeeds, get_kernel
from ds_ring.masks.pattern import Pattern
from ds_ring.measure.rates import fastest
from tests.cases import not_one_of_three

IDS = np.repeat(np.arange(4), 8)
RATES = {"causal": {"flash": (300.0, 250.0), "flex": (330.0, 120.0)}, "full": {"flex": (300.0, 200.0)}}


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        (Full(), "full"),
        (Causal(), "causal"),
        (SlidingWindow(5), "window"),
        (SlidingWindow(5, causal=False), "window"),
        (Documents(IDS) & Causal(), "documents"),
        (Dilated((4, 8), (1, 2)), "LongNet"),
    ],
)
def test_patterns_have_the_kinds_that_are_measured(pattern: Pattern, kind: str) -> None:
    assert pattern.tile_kind == kind
    assert kind in tile_kinds(1024)


def test_the_least_time_of_both_passes_is_taken() -> None:
    found = fastest(RATES, "causal", ["flex", "flash", "reference"])
    assert found is not None and found.kernel == "flash"
    assert "1.79 times as fast as 'flex' on causal tiles" in found.why
    assert fastest(RATES, "causal", ["flex"]) is None  # nothing to compare with
    assert fastest(RATES, "full", ["flex", "flash"]) is None and fastest({}, "causal", ["flex"]) is None


def test_auto_takes_it_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def auto(pattern: Pattern, dtype: torch.dtype = torch.bfloat16) -> str:
        return get_kernel("auto", "cuda", needs=KernelNeeds("cuda", dtype, 64, pattern)).name

    # nothing was measured
    assert [auto(one) for one in (Causal(), Full(), SlidingWindow(9))] == ["flash"] * 3
    assert [auto(one) for one in (Dilated((8, 16), (1, 2)), Documents([0, 0, 1]))] == ["flex"] * 2
    assert auto(Causal(), torch.float32) == auto(MaskMod(not_one_of_three) & Causal()) == "flex"
    monkeypatch.setattr("ds_ring.measure.rates.rates_here", lambda: RATES)
    assert auto(Causal()) == "flash"
    assert auto(Causal(), torch.float32) == "flex"  # which "flash" refuses
    assert auto(MaskMod(not_one_of_three) & Causal()) == "flex"
    assert get_kernel("auto", "cpu", needs=KernelNeeds("cpu", torch.float32, 64, Full())).name == "cpu"


def test_one_kernel_serves_all_patterns() -> None:
    asked = [KernelNeeds("cuda", torch.bfloat16, 64, pattern) for pattern in (Causal(), Full())]
    first, second = (get_kernel("flex", "cuda", needs=one) for one in asked)
    assert first is second


def test_measured_rates_are_written_beside_those_of_other_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, known = tmp_path / "rates.json", tmp_path / "known.json"
    known.write_text(json.dumps({"another": {}}))
    monkeypatch.setattr(machine, "RATES", known)
    rows = [
        ResultRow({"tiles": "causal", "kernel": "flash"}, {"forward_tflops": 300, "backward_tflops": 2e2}),
        ResultRow({"tiles": "causal", "kernel": "torch SDPA"}, {"forward_tflops": 1, "backward_tflops": 1}),
        ResultRow({"tiles": "causal", "kernel": "flex"}, {"refused": "why"}),
    ]
    machine.write_rates("a device", rows, path)
    assert json.loads(path.read_text()) == {"another": {}, "a device": {"causal": {"flash": [300.0, 200.0]}}}

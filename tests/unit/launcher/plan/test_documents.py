"""Packed documents of drawn lengths: `auto` is never slower than "balanced", and the fullest rank counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.document_lengths import DISTRIBUTIONS, draws, make_document_pattern, read_lengths

from ds_ring import Causal, RingConfigError, build_plan, make_layout
from ds_ring.schedule.choose import bind_one_head, count_rank_work, timed
from ds_ring_launcher.plan.layer_passes import looked_at, sampled_ranks


@pytest.mark.parametrize("source", DISTRIBUTIONS)
def test_auto_is_never_slower_than_balanced(source: str) -> None:
    others = 0
    for lengths in draws(read_lengths(source), 16 * 8192, 5):
        pattern = make_document_pattern(lengths)
        auto, balanced = (
            make_layout(name, tokens=16 * 8192, ring_size=16, pattern=pattern)
            for name in ("auto", "balanced")
        )
        first, second = timed(((bind_one_head(pattern), 1),), (auto, balanced))
        assert first.time <= second.time * (1 + 1e-9) and first.imbalance >= 1
        others += auto != balanced
    assert others > 0


@pytest.mark.parametrize("text", ["5 70\n900", "[5, 70, 900]"])
def test_lengths_of_a_file_fill_every_sequence(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "lengths").write_text(text)
    for lengths in draws(read_lengths(str(file)), 10_000, 3):
        assert lengths.sum() == 10_000
        assert set(lengths[:-1].tolist()) <= {5, 70, 900}
    assert max(next(draws(read_lengths(str(file)), 1000, 1))) <= 250  # a quarter


@pytest.mark.parametrize("text", ["5 x", "[1, [2]]", "", "0 5", "[-1]"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "lengths").write_text(text)
    with pytest.raises(RingConfigError, match="one positive integer for each document"):
        read_lengths(str(file))
    with pytest.raises(RingConfigError, match="expected lognormal"):
        read_lengths("lognorml")


def test_the_fullest_rank_counts() -> None:
    """One long document beside many short ones: its few ranks are none of those that represent all."""
    ranks, short = 48, np.full(40, 1024)
    lengths = np.concatenate([short, [8192], short])
    pattern = make_document_pattern(lengths)
    layout = make_layout("contiguous", tokens=int(lengths.sum()), ring_size=ranks)
    plan = build_plan(pattern, layout)
    works = count_rank_work(bind_one_head(pattern), layout)
    sampled, found = sampled_ranks(ranks), looked_at([plan], layout)
    assert works[sampled].max() < works.max() == works[found].max()
    assert found[:-1] == sampled
    assert looked_at([build_plan(Causal(), layout)], layout)[-1] == ranks - 1  # which was there

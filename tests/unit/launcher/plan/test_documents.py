"""`ds-ring plan --documents`: lengths, percentiles, and that `auto` is never slower than "balanced"."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ds_ring import Causal, RingConfigError, build_plan, make_layout
from ds_ring.schedule.choose import bound_to_one_head, work_of_ranks
from ds_ring_launcher.cli import main
from ds_ring_launcher.plan.documents import DISTRIBUTIONS, draws, lengths_of, packed_figures, pattern_of
from ds_ring_launcher.plan.layer_passes import looked_at, sampled_ranks


@pytest.mark.parametrize("source", DISTRIBUTIONS)
def test_a_short_round(source: str) -> None:
    """`ds-ring plan --documents` prints these figures."""
    found = packed_figures(source, 16 * 8192, 16, 5)
    assert found.slower == 0 < found.other
    assert found.rows["time auto / balanced"][-1] <= 1 + 1e-9
    assert found.rows["auto: work max/mean"][0] >= 1


@pytest.mark.parametrize("text", ["5 70\n900", "[5, 70, 900]"])
def test_lengths_of_a_file_fill_every_sequence(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "lengths").write_text(text)
    for lengths in draws(lengths_of(str(file)), 10_000, 3):
        assert lengths.sum() == 10_000
        assert set(lengths[:-1].tolist()) <= {5, 70, 900}
    assert max(next(draws(lengths_of(str(file)), 1000, 1))) <= 250  # a quarter


@pytest.mark.parametrize("text", ["5 x", "[1, [2]]", "", "0 5", "[-1]"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "lengths").write_text(text)
    with pytest.raises(RingConfigError, match="one positive integer for each document"):
        lengths_of(str(file))
    with pytest.raises(RingConfigError, match="expected lognormal"):
        lengths_of("lognorml")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--documents", "uniform", "--tokens", "65536", "--devices", "8", "--draws", "2"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ring_size"], found["draws"], found["slower"]) == (8, 2, 0)
    assert np.all(np.diff(found["rows"]["auto: modelled time"]) >= 0)
    assert main(words) == 0
    assert "auto / balanced" in capsys.readouterr().out
    assert main(words[:3]) == 2
    assert "--tokens" in capsys.readouterr().err


def test_the_fullest_rank_counts() -> None:
    """One long document beside many short ones: its few ranks are none of those that represent all."""
    ranks, short = 48, np.full(40, 1024)
    lengths = np.concatenate([short, [8192], short])
    pattern = pattern_of(lengths)
    layout = make_layout("contiguous", tokens=int(lengths.sum()), ring_size=ranks)
    plan = build_plan(pattern, layout)
    works = work_of_ranks(bound_to_one_head(pattern), layout)
    sampled, found = sampled_ranks(ranks), looked_at([plan], layout)
    assert works[sampled].max() < works.max() == works[found].max()
    assert found[:-1] == sampled
    assert looked_at([build_plan(Causal(), layout)], layout)[-1] == ranks - 1  # which was there

"""A picture of a plan: hops go the way of the picture in the README; an error names matplotlib."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ds_ring import Causal, RingConfigError, build_plan, make_layout
from ds_ring.schedule.plan import Plan
from ds_ring_launcher.plan.picture import describe_hop, draw_plan, list_hops, new_figure


@pytest.fixture(scope="module")
def plan() -> Plan:
    layout = make_layout("auto", tokens=64, ring_size=4, pattern=Causal())
    return build_plan(Causal(), layout, query_heads=2, kv_heads=2)


def test_keys_travel_as_in_the_picture_of_readme(plan: Plan) -> None:
    """(They went the other way, in a legend of "hop 1 down".)"""
    origins = {(abs(hop), rank): part.origin for rank in range(4) for hop, part in list_hops(plan, rank)}
    svg = (Path(__file__).resolve().parents[4] / "tools/results/ring.svg").read_text()
    drawn = [int(origin) for origin in re.findall(r">K(\d) V\d<", svg)]
    assert origins == {(step, rank): drawn[4 * step + rank] for step in range(4) for rank in range(4)}
    assert [describe_hop(plan, hop) for hop in (0, -1, 2)] == [
        "hop 0: own K/V", "hop 1: K/V of rank r + 1", "hop 2: K/V of rank r - 2"
    ]  # fmt: skip


def test_a_plan_is_drawn(plan: Plan, tmp_path: Path) -> None:
    draw_plan(plan, "causal", 4, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RingConfigError, match=r"ds_ring\[plot\]"):
        new_figure(1, 1)

"""The printed schedule: what ds_ring/DESIGN.md shows is what the code prints."""

from __future__ import annotations

from pathlib import Path

from ds_ring import Causal, build_plan, make_layout
from ds_ring.measure.schedule_text import format_schedule
from ds_ring.schedule.lowering import lower_pass

DESIGN = Path(__file__).resolve().parents[3] / "ds_ring" / "DESIGN.md"


def printed(backward: bool, chunk: bool = False) -> str:
    """Rank 1 of a causal ring of four."""
    plan = build_plan(Causal(), make_layout("zigzag", tokens=4096, ring_size=4), query_heads=2, kv_heads=2)
    return format_schedule(lower_pass(plan.rank(1).classes, 1, backward=backward, head_bytes=int(chunk)))


def test_the_design_shows_what_is_printed() -> None:
    both = f"{printed(False)}\n{printed(True)}"
    assert f"```\n{both}\n```" in DESIGN.read_text(encoding="utf-8")
    assert len(both.splitlines()) <= 40


def test_a_second_head_chunk_sets_out_before_the_first_one_is_done() -> None:
    lines = printed(backward=True, chunk=True).splitlines()
    begins = next(line for line in lines if line.split()[1:2] == ["1:2"])
    assert begins.startswith("4 ") and "hop 0: shard -> results" in begins
    assert sum("results are done" in line for line in lines) == 2

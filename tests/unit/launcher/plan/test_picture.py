"""Pictures of a plan: hops go the way of README's, memory is the plan's; an error names matplotlib."""

from __future__ import annotations

import re
import sys
from html import unescape
from pathlib import Path

import pytest
import torch

from ds_ring import Causal, RingConfigError, build_plan, make_layout
from ds_ring.ops.ulysses import SWAPS, UlyssesAllToAll
from ds_ring.schedule.plan import Plan
from ds_ring_launcher import cli
from ds_ring_launcher.plan.estimate import Estimate, estimate
from ds_ring_launcher.plan.inputs import make_request
from ds_ring_launcher.plan.picture import (
    describe_hop,
    draw_plan,
    list_hops,
    new_figure,
    plot_memory,
    save_figure,
)

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def plan() -> Plan:
    layout = make_layout("auto", tokens=64, ring_size=4, pattern=Causal())
    return build_plan(Causal(), layout, query_heads=2, kv_heads=2)


def test_keys_travel_as_in_the_picture_of_readme(plan: Plan) -> None:
    """(They went the other way, in a legend of "hop 1 down".)"""
    origins = {(abs(hop), rank): part.origin for rank in range(4) for hop, part in list_hops(plan, rank)}
    svg = (ROOT / "tools/results/ring.svg").read_text()
    drawn = [int(origin) for origin in re.findall(r">K(\d) V\d<", svg)]
    assert origins == {(step, rank): drawn[4 * step + rank] for step in range(4) for rank in range(4)}
    assert [describe_hop(plan, hop) for hop in (0, -1, 2)] == [
        "hop 0: own K/V", "hop 1: K/V of rank r + 1", "hop 2: K/V of rank r - 2"
    ]  # fmt: skip


def swap_cells(shards: list[torch.Tensor], swap: UlyssesAllToAll) -> list[torch.Tensor]:
    """Return what each rank has after an all-to-all, as `ds_ring::swap_heads_tokens` cuts and joins."""
    parts = [shard.chunk(len(shards), dim=swap.split_dim) for shard in shards]
    return [torch.cat(of_ranks, dim=swap.join_dim) for of_ranks in zip(*parts, strict=True)]


def test_heads_travel_as_in_the_picture_of_readme() -> None:
    svg = (ROOT / "tools/results/ring.svg").read_text()
    drawn = [(int(tokens), int(head)) for tokens, head in re.findall(r">(\d)\.(\d)<", svg)]
    # [sample, head, quarter of the tokens], the number of the quarter and of the head in each
    before = [torch.tensor([[[[rank, head]] for head in range(4)]]) for rank in range(4)]
    between = swap_cells(before, SWAPS["Ulysses of q, k, v"])
    after = swap_cells(between, SWAPS["Ulysses of out"])
    cells = [tuple(cell) for shard in (*before, *between, *after) for cell in shard.reshape(4, 2).tolist()]
    assert drawn == cells and cells[16:20] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for page in ("README.md", "ds_ring/TUTORIAL.md"):
        assert re.search(r"!\[[^]]*Ulysses[^]]*\]\([./]*tools/results/ring.svg\)", (ROOT / page).read_text())


def test_a_plan_is_drawn(plan: Plan, tmp_path: Path) -> None:
    draw_plan(plan, "causal", 4, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def read_plan(tokens: str = "128k") -> Estimate:
    """Return the plan of the worked case, as its command makes it."""
    text = (ROOT / "configs/recipes/README.md").read_text()
    command = re.search(r"^ds-ring (plan .*) --compare$", text, re.MULTILINE)
    assert command is not None and " --tokens 128k " in command[1]
    words = command[1].replace("128k", tokens).replace("configs/", f"{ROOT}/configs/").split()
    return estimate(make_request(cli._parser().parse_args(words), lambda text: None).setting)


def read_texts(path: Path) -> list[str]:
    return [unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())]


def test_memory_is_drawn_as_it_is_planned(tmp_path: Path) -> None:
    planned = read_plan()
    (axes,) = plot_memory(planned).axes
    drawn = {
        bars.get_label().partition(":")[0]: [bar.get_width() * 2**30 for bar in bars]
        for bars in axes.containers
    }
    names = {part for moment in planned.moments for part, size in moment.components.items() if size}
    assert {*drawn} == names and [text.get_text() for text in axes.get_yticklabels()] == [
        moment.name for moment in planned.moments
    ]
    for part, sizes in drawn.items():
        assert sizes == pytest.approx([moment.components.get(part, 0) for moment in planned.moments])
    # The committed picture says the same; with another plan it would be another one.
    committed = read_texts(ROOT / "configs/recipes/8_gpus.svg")
    assert f"{planned.peak.total / 2**30:.2f}" in " ".join(committed)
    for tokens, is_same in (("128k", True), ("64k", False)):
        save_figure(plot_memory(read_plan(tokens)), tmp_path / "plan.svg")
        assert (read_texts(tmp_path / "plan.svg") == committed) is is_same


def test_a_command_draws_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*["plan", "--hf-config", "qwen3-0.6b", "--tokens", "4k", "--devices", "2", "--picture"]]
    assert cli.main([*command, str(tmp_path / "memory.png")]) == 0
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    for name, words in (("none/a.svg", "got no folder"), ("a.bmq", "got bmq; rename it")):
        assert cli.main([*command, str(tmp_path / name)]) == 2
        assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["memory.png"]


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RingConfigError, match=r"ds_ring\[plot\]"):
        new_figure(1, 1)

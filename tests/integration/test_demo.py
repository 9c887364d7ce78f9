"""`ds-ring demo` as a stranger runs it: away from the checkout, with the report opened in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ring import Causal, build_plan, make_layout
from ds_ring.simulation.rank import GlobalSizes
from ds_ring_launcher.demo import measure as measuring
from ds_ring_launcher.demo.report import write_report
from ds_ring_launcher.profile.measure import ProfileJob, measure_virtual
from ds_ring_launcher.profile.plan_picture import hops_of, label_of
from ds_ring_launcher.profile.timeline import timeline_of
from tests.dist.harness import run_ranks
from tests.machine import CHROMIUM

DS_RING = str(Path(sys.executable).with_name("ds-ring"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, started in an empty folder."""
    place = tmp_path_factory.mktemp("demo")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [DS_RING, "demo", "--steps", "4", "--output", "out"],
        cwd=place, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"written in \d+ s: .*/out/report.html\n$", run.stdout)
    return place / "out"


LOG: dict[str, Any] = {
    "title": "a model, ring 2",
    "losses": [5.5, 4.25],
    "peak_mib": [1.0, 1.0],
    "comparison": {
        "samples": 1, "tokens": 8,
        "loss_alone": 4.5, "loss_on_ring": 4.500001, "gradients": 3, "worst": "head",
        "gradient_difference": 1e-6, "alone_mib": 10.0, "ranks_mib": [5.0, 5.0], "exact": True,
    },
}  # fmt: skip


def check_report(report: str, comparison: dict[str, Any]) -> None:
    assert f"{comparison['loss_on_ring']:.6f}" in report
    assert report.count('src="data:image/png;base64,iVBOR') == 3  # loss, plan, timeline
    assert "K2[" in report, "the schedule of rank 1"
    assert not re.findall(r'(?:src|href)="(?!data:)', report), "nothing is loaded from elsewhere"
    assert "<script" not in report


def on_a_rank(rank: int, world_size: int, function: Any, arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


@pytest.mark.slow
@pytest.mark.night
def test_rings_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real ones, on ranks that have torch loaded."""
    monkeypatch.setattr(
        measuring, "run_ranks", lambda call, size, values, **_: run_ranks(on_a_rank, size, call, values)
    )
    found = measuring.measure(tokens=256, ring_sizes=(1, 4))
    ring, gathered = found.peaks_bytes["ring"], found.peaks_bytes["all_gather"]
    assert ring[4] < ring[1]
    assert ring[4] < gathered[4]


def test_the_report_says_what_was_measured(tmp_path: Path) -> None:
    """Of virtual ranks; a comparison that differs (a seeded fault) is not exact."""
    job = ProfileJob(GlobalSizes(1, 2, 2, 256, 16, torch.float32), Causal())
    four = measure_virtual(job, measuring.DRAWN_RING, times=True, progress=False)
    timeline = timeline_of(four.traces, where="a desk")
    plan = build_plan(job.pattern, job.layout(measuring.DRAWN_RING), query_heads=2, kv_heads=2)
    peaks = {1: 4 * four.peak_bytes, 4: four.peak_bytes}
    found = measuring.DemoRings(job, {"ring": peaks, "all_gather": peaks}, timeline, plan)
    report = write_report(tmp_path / "report.html", LOG, found, {"sequence_parallel_size": 2}).read_text()
    check_report(report, LOG["comparison"])
    assert "NOT exact" not in report
    assert "The training loss is 5.500 in step 1, and 4.875 on average of the last 2 steps." in report
    assert "loss of the trained model on 1 x 8 tokens, one process" in report
    assert "to the one before it" in report and ">1 rank<" in report
    differs = LOG | {"comparison": LOG["comparison"] | {"exact": False}}
    assert "NOT exact" in write_report(tmp_path / "other.html", differs, found, {}).read_text()


def test_keys_travel_in_the_demo_as_in_the_picture_of_readme() -> None:
    """(They went the other way, in a legend of "hop 1 down".)"""
    pattern = Causal()
    layout = make_layout("auto", tokens=64, ring_size=4, pattern=pattern)
    plan = build_plan(pattern, layout, query_heads=2, kv_heads=2)
    origins = {(abs(hop), rank): part.origin for rank in range(4) for hop, part in hops_of(plan, rank)}
    svg = (Path(__file__).resolve().parents[2] / "tools/results/ring.svg").read_text()
    drawn = [int(origin) for origin in re.findall(r">K(\d) V\d<", svg)]
    assert origins == {(step, rank): drawn[4 * step + rank] for step in range(4) for rank in range(4)}
    assert [label_of(plan, hop) for hop in (0, -1, 2)] == [
        "hop 0: own K/V", "hop 1: K/V of rank r + 1", "hop 2: K/V of rank r - 2"
    ]  # fmt: skip


@pytest.mark.night
def test_a_run_writes_the_report(folder: Path) -> None:
    report, log = (folder / "report.html").read_text(), json.loads((folder / "log.json").read_text())
    assert len(log["losses"]) == 4
    assert log["comparison"]["exact"] is True
    check_report(report, log["comparison"])


@pytest.mark.night
@pytest.mark.needs("chromium")
def test_a_browser_shows_the_report(folder: Path, tmp_path: Path) -> None:
    browser = next(found for name in CHROMIUM if (found := shutil.which(name)))
    page = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{folder}/report.html"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "exact: rounding explains all differences" in page.stdout
    assert page.stdout.count("<img ") == 3


@pytest.mark.parametrize(
    ("command", "hidden", "words"),
    [
        (["demo"], "matplotlib", "expected transformers and matplotlib, got no matplotlib"),
        (["check-model", "llama"], "transformers", "expected transformers, got no transformers"),
    ],
)
def test_what_is_missing_is_named_with_how_to_install_it(
    tmp_path: Path, command: list[str], hidden: str, words: str
) -> None:
    """Python that cannot import a package stands in for an environment that lacks the extra `train`."""
    hide = f"import sys; sys.modules[{hidden!r}] = None; from ds_ring_launcher.cli import main; "
    run = subprocess.run(
        [sys.executable, "-c", hide + f"sys.exit(main({command}))"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 2
    assert f"{words}; pip install 'ds_ring[train]'" in run.stderr

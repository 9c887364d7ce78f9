"""`ds-ring demo` as a stranger runs it: away from the checkout, with the report opened in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ds_ring_launcher.demo.report import _comparison
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


@pytest.mark.slow
def test_the_report_says_what_was_measured(folder: Path) -> None:
    report, log = (folder / "report.html").read_text(), json.loads((folder / "log.json").read_text())
    assert len(log["losses"]) == 4
    assert log["comparison"]["exact"] is True
    assert f"{log['comparison']['loss_on_ring']:.6f}" in report
    assert report.count('src="data:image/png;base64,iVBOR') == 4  # loss, memory, plan, timeline
    assert "K2[1024] from 2 in b3" in report, "the schedule of rank 1"
    assert not re.findall(r'(?:src|href)="(?!data:)', report), "nothing is loaded from elsewhere"
    assert "<script" not in report


def test_a_difference_is_no_success(folder: Path) -> None:
    """A seeded fault: what the comparison found to differ is not called exact."""
    log = json.loads((folder / "log.json").read_text())
    assert "NOT exact" in _comparison(log["comparison"] | {"exact": False, "gradient_difference": 0.5})
    assert "NOT exact" not in _comparison(log["comparison"])


@pytest.mark.night
@pytest.mark.needs("chromium")
def test_a_browser_shows_the_report(folder: Path, tmp_path: Path) -> None:
    browser = next(found for name in CHROMIUM if (found := shutil.which(name)))
    page = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{folder}/report.html"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "exact: rounding explains all differences" in page.stdout
    assert page.stdout.count("<img ") == 4


def test_what_is_missing_is_named_with_how_to_install_it(tmp_path: Path) -> None:
    """Python itself without site-packages stands in for an environment that lacks the extra `train`."""
    hide = "import sys; sys.modules['matplotlib'] = None; from ds_ring_launcher.cli import main; "
    run = subprocess.run(
        [sys.executable, "-c", hide + "sys.exit(main(['demo']))"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 2
    assert (
        "expected transformers and matplotlib, got no matplotlib; pip install 'ds_ring[train]'" in run.stderr
    )

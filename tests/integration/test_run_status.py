"""What is known of a run from its folder: while it trains, after a rank was killed, and at the end.

With a script of plain Python that writes the files of `run_folder.py`, and with real training, whose imports
are most of the time.
"""

from __future__ import annotations

import json
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from ds_ring_launcher.run.run_folder import RunFolder, write_json
from ds_ring_launcher.status.page import write_page
from tests.clock import wait_until
from tests.integration.test_launch import DS_RING, Workplace, workplace  # noqa: F401  a fixture

ROOT = Path(__file__).resolve().parents[2]
STEPS, KILLED = 24, 12
YAML = """engine: {engine}
device: cpu
hosts: local
slots: 2
script: {script}
deepspeed_config: ds.json
run_folder: run
relaunch: {{checkpoints: out/checkpoints, backoff_seconds: 0.1}}
"""
# Steps with a loss that falls, in the layout of `run_folder.py`; `latest` is its checkpoint.
PLAIN = """
import argparse, json, os, pathlib, signal, time
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("--output", "--steps", "--step-seconds", "--fault-step", "--deepspeed_config"):
    parser.add_argument(name)
options, _ = parser.parse_known_args()
rank, out = int(os.environ["RANK"]), pathlib.Path(options.output)
folder, latest = pathlib.Path(os.environ["DS_RING_RUN_FOLDER"]), out / "checkpoints" / "latest"
latest.parent.mkdir(exist_ok=True)
first = int(latest.read_text()) if latest.exists() else 0
for step in range(first + 1, int(options.steps) + 1):
    time.sleep(float(options.step_seconds))
    if rank == 1 and step == int(options.fault_step) and (out / "armed").exists():
        (out / "armed").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    link = {"from": 1 - rank, "hops": 2, "hop_seconds": 0.01, "wait_seconds": 0.002, "bytes": 4096}
    figures = {"rank": rank, "at": time.time(), "step": step, "loss": 5 / step, "step_seconds": 0.2,
               "tokens_per_second": 1e4 + step, "memory_bytes": 2**28, "ring_rank": rank, "links": [link]}
    part = folder / f".{rank}.part"
    part.write_text(json.dumps(figures))
    part.rename(folder / f"rank-{rank}.metrics.json")
    if rank == 0:
        with open(folder / "history.jsonl", "a") as file:
            file.write(json.dumps(figures) + "\\n")
        with open(out / "losses.jsonl", "a") as file:
            file.write(json.dumps(figures) + "\\n")
        if step % 2 == 0:
            latest.with_suffix(".part").write_text(str(step))
            latest.with_suffix(".part").rename(latest)
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "sequence_parallel_size": 2,
    "ring_attention": {},
}


def objects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.needs("chromium", "mpirun")
@pytest.mark.parametrize("script", ["plain", "training"])
@pytest.mark.night
def test_a_run_its_fault_and_its_end_are_known(workplace: Workplace, script: str) -> None:  # noqa: F811
    place, run = workplace.folder, RunFolder(workplace.folder / "run")
    (place / "out").mkdir()
    (place / "out/armed").touch()
    (place / "ds.json").write_text(json.dumps(CONFIG))
    (place / "plain.py").write_text(PLAIN)
    train = ROOT / "tests/dist/relaunch_train.py" if script == "training" else place / "plain.py"
    engine = "torchrun" if script == "training" else "mpirun"  # which starts without torch
    (place / "cluster.yaml").write_text(YAML.format(engine=engine, script=train))
    fault = ["--fault", "kill", "--fault-step", str(KILLED), "--fault-rank", "1"]
    options = ["--output", str(place / "out"), "--steps", str(STEPS), "--step-seconds", "0.2", *fault]
    started = workplace.start([*DS_RING, str(place / "cluster.yaml"), "--", *options])
    history = run.attempt(1) / "history.jsonl"
    wait_until(lambda: history.exists() and history.read_text().count("\n") >= 3, 120.0)
    write_page(run.path)
    shutil.copy(run.path / "status.html", place / "during.html")
    dom = browse(place / "during.html", place / "profile")
    assert "<title>run: running</title>" in dom and re.search(r'id="age"[^>]*>\d+ s ago<', dom)
    assert len(lines_of(dom)) == 2 and min(lines_of(dom)) >= 3
    assert "Hop times by link, the slowest first" in dom and "at work" in dom

    wait_until(lambda: any(item["event"] == "start" and item["attempt"] == 2 for item in run.events()), 120.0)
    said = "rank 1 on localhost was lost"
    wait_until(lambda: said in (run.path / "status.html").read_text(), 120.0)  # by the launcher, at once
    shutil.copy(run.path / "status.html", place / "after.html")
    dom = browse(place / "after.html", place / "profile")
    assert said in dom and 'class="fault"' in dom and 'http-equiv="refresh"' in dom

    status, output = workplace.finish(started)
    assert status == 0, output
    dom = browse(run.path / "status.html", place / "profile")
    assert "<title>run: done</title>" in dom and len(lines_of(dom)) == 4 and f"<b>{STEPS}</b>" in dom
    losses = {item["step"]: item["loss"] for item in objects(place / "out/losses.jsonl")}
    for attempt in (1, 2):
        course = objects(run.attempt(attempt) / "history.jsonl")
        assert course and all(
            item["loss"] == pytest.approx(losses[item["step"]], rel=1e-6) for item in course
        )


@pytest.mark.needs("chromium")
@pytest.mark.night
def test_a_fault_that_is_html_does_nothing_in_a_browser(tmp_path: Path) -> None:
    run, nasty = RunFolder(tmp_path / "run"), "</td></table><script>document.title='owned'</script><img src=x"
    run.record("start", run.start_attempt(), hosts={nasty: 1}, missing={nasty: nasty}, world_size=1)
    run.record("fault", 1, what=nasty)
    write_json(run.attempt(1) / "rank-0.metrics.json", {"rank": 0, "step": 1, "at": time.time() - 600})
    write_page(run.path)
    page = run.path / "status.html"
    page.write_text(re.sub(r'data-at="\d+"', f'data-at="{time.time() - 600:.0f}"', page.read_text()))
    dom = browse(page, tmp_path / "profile")
    assert "<title>run: running</title>" in dom and "<img" not in dom and nasty in unescape(dom)
    assert "the launcher no longer renews this page" in dom
    # And where escaping had failed: the policy lets no other script run.
    page.write_text(page.read_text().replace("</body>", "<script>document.title='owned'</script></body>"))
    assert "<title>run: running</title>" in browse(page, tmp_path / "profile")

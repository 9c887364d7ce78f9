"""What ranks write for the status page of a run: the loss of the right step, tokens, links."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ring.comm.messages import Observers
from tests.dist.conftest import RankPools
from tests.dist.deepspeed_ranks import Size, build_batch, build_model, json_config, start_engine

SIZE = Size(hidden=16, layers=2, tokens=48, samples=2)
STEPS, LOADING = 4, 0.2  # seconds before each batch


def train(rank: int, world_size: int, folder: str, asks: str, monitor: bool) -> dict[str, Any]:
    """Steps with an evaluation after the second; `asks` for the loss before or after `engine.step()`."""
    from ds_ring.data import run_folder
    from ds_ring.measure import run_report

    patch = pytest.MonkeyPatch()
    patch.setenv(run_folder.FOLDER_VARIABLE, folder)
    patch.setattr(run_report, "_LEAST_SECONDS", 0.0)
    patch.setattr(run_report, "_LINK_SECONDS", 0.0)
    try:
        model = build_model(SIZE, "sdpa")
        config = json_config(world_size, SIZE.samples, 0)
        if monitor:
            config["csv_monitor"] = {"enabled": True, "output_path": folder, "job_name": "ring"}
            config["ring_attention"] = {"monitor": True}
        engine = start_engine(model, config)
        losses = []
        for step in range(1, STEPS + 1):
            time.sleep(LOADING)
            loss = engine(**engine.ring.shard_batch(build_batch(SIZE))).loss
            engine.backward(loss)
            if asks == "before":
                losses.append(float(engine.ring.mean_loss(loss)))
            engine.step()
            if asks == "after":
                losses.append(float(engine.ring.mean_loss(loss)))
            if step == 2:
                engine.eval()
                with torch.no_grad():
                    engine.ring.mean_loss(engine(**engine.ring.shard_batch(build_batch(SIZE))).loss * 100)
                engine.train()
        run_report._finish_reports()
        return {"losses": losses, "traces": len(engine.ring.run_mesh.owners[Observers])}
    finally:
        patch.undo()


@pytest.mark.day("after-False")
@pytest.mark.parametrize(("asks", "monitor"), [("before", True), ("after", False)])
def test_each_step_has_its_own_loss_and_links(
    rank_pool: RankPools, tmp_path: Path, asks: str, monitor: bool
) -> None:
    result = rank_pool(2).run(train, str(tmp_path), asks, monitor)
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == result[0]["losses"]
    # Steps begin where the one before, or an evaluation, ended. (The first one was from its first forward pass
    # on, as was the one after an evaluation: without the time of loading they were the fastest.)
    first, *others = [line["step_seconds"] for line in lines]
    assert first is None and lines[0]["tokens_per_second"] is None
    assert min(others) >= LOADING, others
    assert result[0]["traces"] == int(monitor), "a trace that nobody reads stays on the mesh"
    for rank in range(2):
        assert (tmp_path / f"rank-{rank}.ring").exists()  # a rank that has made a ring says so
        figures = json.loads((tmp_path / f"rank-{rank}.metrics.json").read_text())
        assert figures["step"] == STEPS
        tokens = figures["tokens_per_second"] * figures["step_seconds"]
        assert tokens == pytest.approx(SIZE.samples * SIZE.tokens)
        (link,) = figures["links"]
        assert link["from"] == 1 - rank and link["hops"] > 0 and link["bytes"] > 0
        assert 0 <= link["wait_seconds"] <= link["hop_seconds"]

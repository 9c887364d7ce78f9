"""Example scripts that only a ring can run: two ranks against a ring of one. GRPO: against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.dist.harness import RankPool
from tests.dist.test_trainers import run_example, run_script
from tests.dist.trainer_logs import EXAMPLES, check_logs, configs


@pytest.mark.day("own_mask.py-4")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "steps"), [("longnet.py", 4), ("own_mask.py", 4), ("batch_mask.py", 4), ("packed.py", 7)]
)
def test_a_script_trains_as_on_a_ring_of_one(rank_pool: Any, script: str, steps: int) -> None:
    alone = RankPool(1)  # one that other tests use stays without a ring
    expected = alone.run(run_example, script, ["--ring", "1"], False)[0]
    alone.close()
    got, nothing = rank_pool(2).run(run_example, script, [], False)
    assert len(expected) == steps and not nothing
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.5
    check_logs(got, expected)


@pytest.mark.slow
@pytest.mark.night
def test_a_loop_with_an_own_loader_trains_evaluates_and_resumes(rank_pool: Any, tmp_path: Path) -> None:
    config = ["--config", str(EXAMPLES / "ds_config.json")]
    alone = RankPool(1)
    expected = alone.run(
        run_example, "own_loop.py", [*config, "--ring", "1", "--output", str(tmp_path / "one")], False
    )[0]
    alone.close()
    ring = [*config, "--output", str(tmp_path / "ring")]
    check_logs(rank_pool(2).run(run_example, "own_loop.py", ring, False)[0], expected)
    assert len(expected) == 18 and expected[-1]["held out"] < expected[8]["held out"] - 0.5
    (tmp_path / "ring/latest").write_text("global_step4")  # the end of the first epoch
    resumed = rank_pool(2).run(run_example, "own_loop.py", [*ring, "--resume", str(tmp_path / "ring")], False)
    check_logs(resumed[0], expected[9:])


def evaluate_own_loop(rank: int, world_size: int, arguments: list[str]) -> list[tuple[float, float]]:
    """Return what the script's `evaluate` gives after its training, and the plain model on all samples."""
    source = (EXAMPLES / "own_loop.py").read_text()
    script = run_script("own_loop.py", source, arguments)[1]
    engine, samples, results = script["engine"], script["held_out"], []
    for number, batch_size in ((4, 1), (3, 1), (4, 3)):  # three batches do not divide among two replicas
        script["held_out_loader"] = DataLoader(samples[:number], batch_size)
        result, total, tokens = script["evaluate"](), 0.0, 0
        with engine.ring.off(), torch.no_grad():
            for sample in samples[:number]:
                labelled = int((sample["labels"][1:] != -100).sum())
                loss = engine.module(**{name: x[None] for name, x in sample.items()}).loss
                total, tokens = total + loss.item() * labelled, tokens + labelled
        results.append((result, total / tokens))
    return results


@pytest.mark.slow
@pytest.mark.night
def test_each_replica_of_an_own_loop_evaluates_as_one_process(rank_pool: Any, tmp_path: Path) -> None:
    """(Replicas took turns, and each weighted by its own labelled tokens: 4.9514 and 4.9788 for one figure.)"""
    arguments = ["--config", str(EXAMPLES / "ds_config.json"), "--output", str(tmp_path)]
    by_rank = rank_pool(4).run(evaluate_own_loop, arguments)
    assert all(results == by_rank[0] for results in by_rank)
    for result, expected in by_rank[0]:
        assert result == pytest.approx(expected, rel=2e-6)


@pytest.mark.slow
@pytest.mark.night
def test_grpo_samples_and_learns_as_one_process(rank_pool: Any, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    plain = ["--config", configs(tmp_path)[0], "--output", str(tmp_path / "plain")]
    expected = rank_pool(1).run(run_example, "trl_grpo.py", plain, True)[0]
    ring = ["--config", str(EXAMPLES / "ds_config.json"), "--output", str(tmp_path / "ring")]
    got = rank_pool(2).run(run_example, "trl_grpo.py", ring, False)[0]
    assert len(expected) >= 3 and expected[0]["reward"] > 0
    check_logs(got, expected)

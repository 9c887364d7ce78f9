"""One real search on two ranks: what is written is accepted, and is one of the candidates. And refusals."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ds_ring.config.section import RingConfig
from ds_ring.errors import RingMeshError
from ds_ring_launcher import cli
from ds_ring_launcher.tune.candidates import candidates, read_section
from ds_ring_launcher.tune.request import request_from
from ds_ring_launcher.tune.search import tune
from tests.dist.harness import RankPool


@pytest.mark.slow
@pytest.mark.night  # by day tests/unit/launcher/tune races candidates by a clock of its own, and writes what won
def test_a_search_on_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, tuned, hardware = (tmp_path / name for name in ("ds.json", "tuned.json", "here.yaml"))
    whole = {"zero_optimization": {"stage": 1}, "ring_attention": {"pattern": {"window": 256}}}
    source.write_text(json.dumps(whole))
    sizes = ["--tokens", "1024", "--heads", "2", "--head-dim", "32", "--processes", "2"]
    files = ["--config", str(source), "--output", str(tuned), "--hardware-output", str(hardware)]
    started = time.perf_counter()
    assert cli.main(["tune", *sizes, *files, "--json", "--deadline-seconds", "120"]) == 0
    seconds = time.perf_counter() - started

    report = json.loads(capfd.readouterr().out)
    print(f"{seconds:.1f} s: {report['chosen']}: {report['measured_s']:.4f} s")
    config = RingConfig.from_deepspeed(tuned)
    request = request_from(whole, tokens=1024, heads=2, head_dim=32, world_size=2)
    by_name = {str(item): item for item in candidates(request)}
    assert config == read_section(by_name[report["chosen"]], request, 1024)
    assert 0 < report["measured_s"] < 10 and report["expected_s"] > 0
    assert report["passes"] < 3 * report["candidates"] and report["default"] in by_name

    assert json.loads(source.read_text()) == whole  # not touched
    assert json.loads(tuned.read_text())["zero_optimization"] == {"stage": 1}
    described = yaml.safe_load(hardware.read_text())
    assert described["kind"] == "cpu" and described["devices_per_node"] == 2
    assert described["intra_node_bytes_per_s"] > 0 and described["peak_flops"]["float32"] > 0


def ask(rank: int, world_size: int, tokens: list[int], ranks: int) -> None:
    tune(request_from({}, tokens=tokens[rank], heads=2, head_dim=32, world_size=ranks))


@pytest.mark.parametrize(
    ("tokens", "ranks", "error", "words"),
    [
        ([2048, 1024], 2, "RingMismatchError", ["tokens=2048", "on rank 0 and", "tokens=1024", "on rank 1"]),
        ([2048, 2048], 4, "RingMeshError", ["expected 4 ranks (the request's), got 2"]),
    ],
)
def test_requests_that_do_not_fit(
    rank_pool: Callable[[int], RankPool], tokens: list[int], ranks: int, error: str, words: list[str]
) -> None:
    for outcome in rank_pool(2).collect(ask, tokens, ranks):
        assert outcome.error_type == error and all(word in outcome.report for word in words), outcome.report


def test_without_a_process_group() -> None:
    with pytest.raises(RingMeshError, match=r"expected a process group, got none; use `ds-ring tune`"):
        tune(request_from({}, tokens=2048, heads=2, head_dim=32, world_size=1))

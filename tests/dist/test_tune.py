"""One real measurement on two ranks: what is written is a hardware file of `ds-ring plan`. And refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ds_ring.errors import RingMeshError
from ds_ring_launcher import cli
from ds_ring_launcher.plan.hardware import read_hardware
from ds_ring_launcher.tune.measurements import measure
from ds_ring_launcher.tune.request import request_from
from tests.dist.harness import RankPool


@pytest.mark.slow
@pytest.mark.night  # by day the quick start of launcher/README.md measures
def test_a_measurement_on_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, path = tmp_path / "ds.json", tmp_path / "here.yaml"
    whole = {"zero_optimization": {"stage": 1}, "ring_attention": {"pattern": {"window": 256}}}
    source.write_text(json.dumps(whole))
    sizes = ["--tokens", "1k", "--heads", "2", "--head-dim", "32", "--processes", "2"]
    files = ["--config", str(source), "--hardware-output", str(path)]
    assert cli.main(["tune", *sizes, *files, "--json", "--deadline-seconds", "120"]) == 0

    description = json.loads(capfd.readouterr().out)
    assert yaml.safe_load(path.read_text()) == description
    assert json.loads(source.read_text()) == whole  # not touched
    hardware = read_hardware(str(path))
    assert hardware.kind == "cpu" and hardware.devices_per_node == 2
    assert hardware.intra_node_bytes_per_s > 0 and hardware.flops("float32") > 0
    assert "a pass of 1024 tokens" in description["source"]["attention_efficiency"]


def ask(rank: int, world_size: int, tokens: list[int], ranks: int) -> None:
    measure(request_from({}, tokens=tokens[rank], heads=2, head_dim=32, world_size=ranks))


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
        measure(request_from({}, tokens=2048, heads=2, head_dim=32, world_size=1))

"""The two files that a result becomes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_ring.config.section import RingConfig
from ds_ring.errors import RingConfigError
from ds_ring.schedule.lowering import chunk_bytes_on
from ds_ring.written_files import write_at_once
from ds_ring_launcher.plan.hardware import hardware_from
from ds_ring_launcher.plan.layer_passes import slowest_pass
from ds_ring_launcher.plan.pass_memory import PassShape
from ds_ring_launcher.tune.candidates import TuningCandidate, candidates
from ds_ring_launcher.tune.model import Model, build_candidate_plan
from ds_ring_launcher.tune.request import TuningRequest
from ds_ring_launcher.tune.result import (
    Finalist,
    TuningResult,
    _describe,
    describe_hardware,
    require_writable,
)
from tests.unit.launcher.tune.cases import machine, request

HARDWARE = {
    *("name", "kind", "memory_bytes", "devices_per_node", "peak_flops", "attention_efficiency"),
    *("matmul_efficiency", "call_overhead_s", "intra_node_bytes_per_s", "inter_node_bytes_per_s"),
    *("link_latency_s", "hop_overhead_s", "source"),
}


def result(asked: TuningRequest, chosen: TuningCandidate) -> TuningResult:
    measured, default = machine(asked), candidates(asked)[0]
    model = Model(asked, measured)
    finals = tuple(Finalist(one, 1.0, (1.0, 3.0, 2.0)) for one in dict.fromkeys([chosen, default]))
    predicted = model.predict(chosen, asked.tokens)
    return TuningResult(asked, measured, chosen, predicted, finals, default, 100, 16, 50, 9.0, 2)


def test_all_else_is_kept() -> None:
    asked = request(4, section={"check_finite": True, "layout": "striped"})
    whole = {"optimizer": {"type": "Adam"}, "ring_attention": {"check_finite": True, "layout": "striped"}}
    chosen = replace(candidates(asked)[0], heads_per_message=2, overlap=False)
    merged = result(asked, chosen).merged(whole)
    assert merged["optimizer"] == {"type": "Adam"} and merged["sequence_parallel_size"] == 4
    assert merged["ring_attention"] == {
        "check_finite": True, "layout": "zigzag", "ring_size": 4, "ulysses_size": 1, "overlap": False,
        "chunk_bytes": 2 * 2048 * 64 * 4,
    }  # fmt: skip
    assert whole["ring_attention"] == {"check_finite": True, "layout": "striped"}


def test_every_choice_is_accepted_and_means_itself() -> None:
    asked = request(4, section={"kernel_options": {"block": 512, "triangle": 64}, "chunk_bytes": 77})
    whole = {"ring_attention": {"kernel_options": {"block": 512, "triangle": 64}, "chunk_bytes": 77}}
    for chosen in candidates(asked):
        config = RingConfig.from_deepspeed(result(asked, chosen).merged(whole))
        assert config.ring_size == chosen.ring_size and config.overlap == chosen.overlap
        options = {"block": 2048, "triangle": 128} | config.kernel_options
        assert options == dict(chosen.kernel.options)


def test_the_description_of_the_hardware_has_its_fields() -> None:
    asked = request(2)
    found = describe_hardware(result(asked, candidates(asked)[0]))
    assert set(found) == HARDWARE
    assert hardware_from(found, "tune").model_dump(exclude_none=True) == found  # what `ds-ring plan` reads
    assert found["kind"] == "cpu" and found["devices_per_node"] == 2 and found["memory_bytes"] > 0
    shares = [*found["attention_efficiency"].values(), found["matmul_efficiency"]]
    assert all(0 < share <= 1 for share in shares) and set(found["peak_flops"]) == {"float32"}


@pytest.mark.parametrize("pattern", [{}, {"window": 1024}])
def test_the_description_gives_back_the_pass_that_was_timed(pattern: dict[str, int]) -> None:
    """The kernel alone was faster, or slower, than it was in the pass of this pattern."""
    asked = request(2, section={"pattern": pattern})
    found = result(asked, candidates(asked)[0])

    def planned_s(description: dict[str, Any]) -> float:
        hardware = hardware_from(description, "tune")
        plan = build_candidate_plan(found.chosen, asked, asked.tokens, asked.mix[0][0])
        shape = PassShape(1, 1, plan.layout.local_tokens, asked.head_dim, 4, chunk_bytes_on("cpu", 2), "cpu")
        return slowest_pass(plan, shape, hardware, "float32", hardware.inter_node_bytes_per_s).seconds

    alone_s = planned_s(_describe(found, 1.0))
    for times in (0.8, 1.6):
        timed = replace(found, finalists=(Finalist(found.chosen, alone_s, (times * alone_s,)),))
        description = describe_hardware(timed)
        assert planned_s(description) == pytest.approx(times * alone_s, rel=0.02)
        assert "8192 tokens" in description["source"]["attention_efficiency"]


def test_median_and_times_of_the_choice() -> None:
    asked = request(2)
    chosen = candidates(asked)[3]
    found = result(asked, chosen)
    assert found.chosen_s == found.default_s == 2.0
    assert found.as_json()["measured_s"] == 2.0 and found.as_json()["passes"] == 50


@pytest.mark.parametrize("name", ["", "missing/tuned.json"])
def test_a_place_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(RingConfigError, match=r"--output .* expected a file in a folder to write to"):
        require_writable(tmp_path / name, "--output")


def test_files_are_written_as_a_whole(tmp_path: Path) -> None:
    write_at_once(tmp_path / "a.json", "{}")
    assert (tmp_path / "a.json").read_text() == "{}" and len(list(tmp_path.iterdir())) == 1

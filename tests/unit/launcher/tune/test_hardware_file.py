"""The file that a measurement becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_ring.errors import RingConfigError
from ds_ring.schedule.lowering import chunk_bytes_on
from ds_ring.written_files import write_at_once
from ds_ring_launcher.commands.parsers import require_writable
from ds_ring_launcher.plan.hardware import hardware_from
from ds_ring_launcher.plan.layer_passes import slowest_pass
from ds_ring_launcher.plan.pass_memory import PassShape
from ds_ring_launcher.tune.hardware_file import (
    MAX_CHANGE,
    _describe,
    build_pass_plans,
    describe_hardware,
)
from ds_ring_launcher.tune.measurements import KernelSample, fit_rate
from tests.unit.launcher.tune.cases import machine, request

HARDWARE = {
    *("name", "kind", "memory_bytes", "devices_per_node", "peak_flops", "attention_efficiency"),
    *("matmul_efficiency", "call_overhead_s", "intra_node_bytes_per_s", "inter_node_bytes_per_s"),
    *("link_latency_s", "hop_overhead_s", "source"),
}


def test_the_description_of_the_hardware_has_its_fields() -> None:
    description = describe_hardware(request(2), machine())
    assert set(description) == HARDWARE
    # what `ds-ring plan` reads
    of_a_switch = {"intra_node_links": 1}
    assert hardware_from(description, "tune").model_dump(exclude_none=True) == description | of_a_switch
    assert description["kind"] == "cpu" and description["devices_per_node"] == 2
    assert description["memory_bytes"] > 0 and set(description["peak_flops"]) == {"float32"}
    shares = [*description["attention_efficiency"].values(), description["matmul_efficiency"]]
    assert all(0 < share <= 1 for share in shares)


def test_one_rank_says_nothing_of_links() -> None:
    description = describe_hardware(request(1), machine(links=None))
    assert not {name for name in description if "bytes_per_s" in name or "hop" in name}
    assert "attention_efficiency" not in description["source"]


def test_of_two_links_the_slower_is_between_nodes() -> None:
    links = machine().links
    description = describe_hardware(request(2), machine(links=type(links)(1e9, 2e9, 1e-4)))
    assert (description["inter_node_bytes_per_s"], description["intra_node_bytes_per_s"]) == (1e9, 2e9)


@pytest.mark.parametrize("pattern", [{}, {"window": 1024}, {"layers": {"0": {"window": 512}, "1": {}}}])
def test_the_description_gives_back_the_pass_that_was_timed(pattern: dict[str, Any]) -> None:
    """The kernel alone was faster, or slower, than it was in the pass of this pattern."""
    asked = request(2, section={"pattern": pattern})

    def planned_s(description: dict[str, Any]) -> float:
        hardware, total = hardware_from(description, "tune"), 0.0
        plans = build_pass_plans(asked)
        for plan, layers in plans:
            tokens = plan.layout.local_tokens
            shape = PassShape(1, 1, tokens, asked.head_dim, 4, chunk_bytes_on("cpu", 2), "cpu")
            link = hardware.inter_node_bytes_per_s
            total += layers * slowest_pass(plan, shape, hardware, "float32", link).seconds
        return total / sum(layers for _, layers in plans)

    alone_s = planned_s(_describe(asked, machine(), 1.0))
    for times in (0.8, 1.6):
        description = describe_hardware(asked, machine(pass_s=times * alone_s))
        assert planned_s(description) == pytest.approx(times * alone_s, rel=0.02)
        assert "8192 tokens" in description["source"]["attention_efficiency"]


def test_a_pass_that_was_something_else_moves_the_rate_no_further() -> None:
    alone = _describe(request(2), machine(), 1.0)["attention_efficiency"]["forward"]
    slow = describe_hardware(request(2), machine(pass_s=1e6))["attention_efficiency"]["forward"]
    assert slow == pytest.approx(alone / MAX_CHANGE)


def test_launches_are_not_taken_for_speed() -> None:
    """1.72 and 1.78 ms on an H200: the rise alone gave 2,335 TFLOP/s, more than twice what it can do."""
    few, many = 2.1e9, 1.37e11
    small, large = ([KernelSample((n, 2.5 * n), (s, s))] for n, s in ((few, 1.72e-3), (many, 1.78e-3)))
    for way, factor in ((0, 1.0), (1, 2.5)):
        assert fit_rate(small, large, way) == (factor * many / 1.78e-3, 0.0)
    rising = [KernelSample((many, many), (10e-3, 10e-3))]
    rate, fixed = fit_rate(small, rising, 0)
    assert rate > many / 10e-3 and fixed > 0


def test_each_way_is_fitted_to_its_own_seconds() -> None:
    small = [KernelSample((1e6, 3e6), seconds) for seconds in ((1.5, 2.5), (1.6, 2.6))]
    large = [KernelSample((4e6, 12e6), (4.5, 7.0))]
    assert fit_rate(small, large, 0) == pytest.approx((1e6, 0.5))
    assert fit_rate(small, large, 1) == pytest.approx((2e6, 1.0))


@pytest.mark.parametrize("name", ["", "missing/here.yaml"])
def test_a_place_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(RingConfigError, match=r"--output .* expected a file in a folder to write to"):
        require_writable(tmp_path / name, "--output")


def test_files_are_written_as_a_whole(tmp_path: Path) -> None:
    write_at_once(tmp_path / "a.json", "{}")
    assert (tmp_path / "a.json").read_text() == "{}" and len(list(tmp_path.iterdir())) == 1

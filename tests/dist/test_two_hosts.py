"""Two hosts with a cable between them: healthy, slow, cut in the middle of a hop, and out for two seconds."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.namespaces import Hosts, two_hosts

pytestmark = [pytest.mark.needs("namespaces"), pytest.mark.slow, pytest.mark.alone, pytest.mark.night]

TOKENS = 1 << 14  # K and V of 4 MiB each: 0.7 s a hop at 100 Mbit/s
PASSES = 3
HEARTBEAT_S = 2.0
MODULE = ("-m", "tests.dist.namespace_rank")


def run(
    folder: Path,
    act: Callable[[Hosts], object] = lambda hosts: None,
    mbit: float | None = None,
    heartbeat_s: float = HEARTBEAT_S,
    passes: int = PASSES,
) -> list[dict[str, Any]]:
    """What both ranks wrote down; `act` happens in the middle of the second pass."""
    with two_hosts() as hosts:
        if mbit is not None:
            hosts.limit(mbit)
        arguments = (str(passes), str(TOKENS), str(heartbeat_s), "30")
        ranks = [
            hosts.start(n, *MODULE, str(folder / f"{n}.json"), *arguments, log=folder / f"{n}.log")
            for n in (0, 1)
        ]
        wait_for_pass(folder, 1, ranks)
        time.sleep(0.3)  # its first hop is under way
        act(hosts)
        for rank in ranks:
            rank.wait(timeout=90)
    logs = "\n".join((folder / f"{n}.log").read_text()[-2000:] for n in (0, 1))
    assert all((folder / f"{n}.json").exists() for n in (0, 1)), logs
    return [json.loads((folder / f"{n}.json").read_text()) for n in (0, 1)]


def wait_for_pass(folder: Path, number: int, ranks: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and all(rank.poll() is None for rank in ranks):
        texts = [path.read_text() for path in (folder / f"{n}.json.pass" for n in (0, 1)) if path.exists()]
        if len(texts) == 2 and all(text and int(text.split()[0]) >= number for text in texts):
            return
        time.sleep(0.02)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("healthy"))


def test_a_healthy_cable(healthy: list[dict[str, Any]]) -> None:
    assert all(len(result["seconds"]) == PASSES for result in healthy), healthy


def test_a_slow_cable_changes_nothing_but_the_time(healthy: list[dict[str, Any]], tmp_path: Path) -> None:
    slow = run(tmp_path, mbit=100)
    assert [result["digest"] for result in slow] == [result["digest"] for result in healthy]
    assert min(slow[0]["seconds"]) > max(healthy[0]["seconds"])


def test_a_cable_cut_in_mid_hop_is_an_error_on_both_sides(tmp_path: Path) -> None:
    cut_at: list[float] = []

    def cut(hosts: Hosts) -> None:
        hosts.cut()
        cut_at.append(time.time())

    result = run(tmp_path, cut, mbit=100)
    assert [item.get("error") for item in result] == ["RingPeerError"] * 2, result
    assert [item["peer"] for item in result] == [1, 0], result
    seconds = [item["at"] - cut_at[0] for item in result]
    assert max(seconds) < 2 * HEARTBEAT_S + 1, seconds


def test_an_outage_of_two_seconds_is_survived_exactly(healthy: list[dict[str, Any]], tmp_path: Path) -> None:
    def out_for_two_seconds(hosts: Hosts) -> None:
        hosts.cut()
        time.sleep(2.0)
        hosts.mend()

    result = run(tmp_path, out_for_two_seconds, mbit=100, heartbeat_s=10.0)
    assert [item.get("digest") for item in result] == [item["digest"] for item in healthy], result
    assert max(result[0]["seconds"]) > 2.0

"""A small cluster of ranks without torch, by the code of `tools/simulate_cluster.py`: a host is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_cluster.figures import Of
from simulated_cluster.job import ClusterSetting, play
from simulated_cluster.store import serve

pytestmark = pytest.mark.alone


@pytest.mark.night  # by day a host of two is gone, in test_relaunch.py
def test_a_host_is_gone_and_half_of_the_ranks_go_on(tmp_path: Path) -> None:
    setting = ClusterSetting(ranks=32, hosts=4, heartbeat_s=10.0, deadline_s=60.0)
    store = serve()
    story = play(tmp_path, setting, "host", store.port)
    first, second = story.attempts
    assert first.ranks == 32 and len(first.known(Of.JOINED)) == 32
    assert not any(first.all(Of.HAS_TORCH))
    told = first.known(Of.TOLD)
    assert told.keys() >= set(range(24)) and max(told.values()) - story.struck < 1.0
    assert set(first.known(Of.BLAMED).values()) <= set(story.culprits)
    fault, again = story.event("fault", 1), story.event("start", 2)
    assert fault["host"] == setting.names[-1] and fault["at"] - story.struck < 5.0
    assert (again["world_size"], again["sequence_parallel_size"], second.ranks) == (16, 16, 16)
    assert "No route to host" in again["missing"][setting.names[-1]]
    assert story.status == 0 and not story.left

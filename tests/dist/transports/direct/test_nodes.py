"""A direct exchange between hosts: eight ranks in network namespaces, each a node of its own addresses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.namespaces import Hosts
from tests.dist.transports.direct.test_direct import BESIDE, PATTERNS

pytestmark = [pytest.mark.needs("namespaces"), pytest.mark.slow, pytest.mark.alone, pytest.mark.night]
MODULE = ("-m", "tests.dist.transports.direct.node_rank")
WORLD = 8


@pytest.mark.parametrize("nodes", [4, 2])
def test_nodes_of_ranks_are_exact_and_send_what_is_planned(nodes: int, tmp_path: Path) -> None:
    """Each rank checks its bytes against the plan's; rank 0 compares with dense attention in float64."""
    inner = WORLD // nodes
    with Hosts(nodes) as hosts:
        ranks = [
            hosts.start(
                rank // inner, *MODULE, str(tmp_path / f"{rank}.json"), str(inner),
                log=tmp_path / f"{rank}.log", rank=rank, world_size=WORLD,
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        codes = [rank.wait(timeout=150) for rank in ranks]
    logs = "\n".join((tmp_path / f"{rank}.log").read_text()[-1500:] for rank in range(WORLD))
    assert not any(codes), logs
    errors = json.loads((tmp_path / "0.json").read_text())
    assert len(errors) == len(PATTERNS) * len(BESIDE[:3])
    assert all(error < 1e-12 for _, error in errors), errors

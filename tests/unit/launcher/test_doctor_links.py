"""What the doctor says of links: each is compared with those of its kind, inside a host or between two."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ring_launcher.doctor.findings import OK, WARNING, WRONG, _links


def ring(**bytes_per_s: float) -> list[dict[str, Any]]:
    """Eight ranks on two hosts, 10 GB/s inside a host and 1 GB/s between them, but for links named."""
    ranks = []
    for rank in range(8):
        crosses = rank % 4 == 3
        rate = bytes_per_s.get(f"r{rank}", 1e9 if crosses else 1e10)
        link = {"source": rank, "target": (rank + 1) % 8, "bytes_per_s": rate, "latency_s": 5e-5}
        host = f"node-{rank // 4}"
        ranks.append({"rank": rank, "host": host, "place": rank // 4, "ring_size": 8, "link": link})
    return ranks


@pytest.mark.parametrize(
    ("slow", "state", "says"),
    [
        ({}, OK, "slowest rank 3 (node-0) to rank 4 (node-1): 1000 MB/s, 50 us"),
        ({"r1": 1e9}, WARNING, "(node-0): 1000 MB/s, 50 us; its kind has 10000 MB/s in the middle"),
        ({"r3": 5e7}, WRONG, "slow link rank 3 (node-0) to rank 4 (node-1): 50 MB/s, 50 us"),
        ({"r2": 0.0}, WRONG, "rank 2 of node-0 measured no link to the next rank"),
    ],
)  # fmt: skip
def test_a_link_is_compared_with_those_of_its_kind(slow: dict[str, float], state: str, says: str) -> None:
    finding = _links(ring(**slow))
    assert (finding.state, says in finding.says) == (state, True), finding

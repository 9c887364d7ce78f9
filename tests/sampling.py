"""Choose which cases of a test a run takes: of `sampled(n)` one of n, others after each change.

Owns the choice. Tests that start ranks or programs and have no mark are sampled(2). Tables of cases (patterns
x layouts x ranks, families of models) are longer than CI has time for. A run takes the n-th part of each such
test's cases, at least one, chosen by a seed that changes with the code of ds_ring: the same commit takes the
same cases everywhere, the next change takes others. DS_RING_ROUNDS=3 takes three times as many,
DS_RING_ROUNDS=5 all of them, and five times as many random cases.
A file, a folder or a test that is named on the command line (or by -k) is run whole.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SLOW_FOLDERS = ("tests/dist/", "tests/integration/")


def rounds() -> int:
    """How many n-ths of the cases a run takes."""
    return int(os.environ.get("DS_RING_ROUNDS", "1"))


def seed_of_the_code() -> str:
    """What git calls the content of ds_ring/; "0" outside of a clone."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD:ds_ring"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "0"
    return found.stdout.strip() or "0"


def chosen(cases: Sequence[str], one_of: int, seed: str, times: int = 1) -> set[str]:
    """`times` n-ths of the cases, rounded up, by their checksums with the seed."""
    count = -(-len(cases) * times // one_of)
    return set(sorted(cases, key=lambda case: zlib.crc32(f"{seed} {case}".encode()))[:count])


def one_of(item: pytest.Item) -> int:
    """Of how many cases of its test a run takes one."""
    marker = item.get_closest_marker("sampled")
    if marker is not None:
        return int(marker.args[0])
    return 2 if item.nodeid.startswith(SLOW_FOLDERS) else 1


def left_out(items: Sequence[pytest.Item], seed: str, times: int) -> list[pytest.Item]:
    """The items that a run does not take."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    skipped = []
    for group in tests.values():
        kept = chosen([item.nodeid for item in group], one_of(group[0]), seed, times)
        skipped += [item for item in group if item.nodeid not in kept]
    return skipped

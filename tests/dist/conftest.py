"""The pools of ranks that the tests of a module share, until one of them fails."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.dist.harness import RankPool


class RankPools:
    """One pool for each world size, started on its first call."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        return self._pools.setdefault(world_size, RankPool(world_size))

    def discard(self) -> None:
        """Kill every rank at once; the next call on a pool starts new ones."""
        for pool in self._pools.values():
            pool.discard()

    def close(self) -> None:
        """End every rank."""
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def rank_pool() -> Iterator[RankPools]:
    """`rank_pool(4).run(fn, ...)`: one pool for each world size, alive until the module's last test.

    Starting one is cheap, keeping one is not: gloo's threads wake a hundred times a second.
    """
    pools = RankPools()
    yield pools
    pools.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Use no rank of a failed test again: what it left half done there would fail the next one, too."""
    report = yield
    pools = getattr(item, "funcargs", {}).get("rank_pool")
    if report.failed and isinstance(pools, RankPools):
        pools.discard()
    return report

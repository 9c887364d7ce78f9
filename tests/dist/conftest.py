"""The pools of ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.dist.harness import RankPool


@pytest.fixture(scope="package")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """`rank_pool(4).run(fn, ...)`: one pool for each world size, alive until this folder's last test."""
    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool_of
    for pool in pools.values():
        pool.close()

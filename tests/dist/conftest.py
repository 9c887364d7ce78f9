"""The pools of ranks that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.dist.harness import RankPool


@pytest.fixture(scope="module")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """`rank_pool(4).run(fn, ...)`: one pool for each world size, alive until the module's last test.

    Starting one is cheap, keeping one is not: gloo's threads wake a hundred times a second.
    """
    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool_of
    for pool in pools.values():
        pool.close()

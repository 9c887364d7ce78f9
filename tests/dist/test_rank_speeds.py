"""Ranks of different speed: layouts that give a slow one less work, and engines that measure who is slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ds_ring
from ds_ring import (
    Causal,
    Documents,
    RingConfig,
    RingConfigError,
    RingLayoutError,
    SlidingWindow,
    make_layout,
)
from ds_ring.masks.pattern import Pattern
from ds_ring.measure.rank_speeds import MeasuredSpeeds
from ds_ring.schedule.choose import bind_one_head, count_rank_work
from tests.dist.deepspeed_ranks import Run, Size, json_config, train_alone, train_on_ring
from tests.dist.harness import RankPool
from tests.dist.test_deepspeed_parity import check_parity

TOKENS = 4096
IDS = np.repeat(np.arange(9), [1500, 50, 250, 1000, 196, 500, 400, 100, 100])
SIZE, STEPS = Size(hidden=32, layers=2, tokens=256, samples=2), 3


@pytest.mark.parametrize("speeds", [(1, 0.5), (0.5, 1), (1, 1, 0.5, 1), (1,) * 7 + (0.25,)], ids=str)
@pytest.mark.parametrize("pattern", [Causal(), Causal() & Documents(IDS)], ids=["causal", "documents"])
@pytest.mark.parametrize("name", ["auto", "balanced"])
def test_work_is_dealt_out_by_speed(name: str, pattern: Pattern, speeds: tuple[float, ...]) -> None:
    layout = make_layout(name, tokens=TOKENS, ring_size=len(speeds), pattern=pattern, speeds=speeds)
    work = count_rank_work(bind_one_head(pattern), layout)
    ideal = work.sum() / sum(speeds)
    assert max(work / np.array(speeds)) < 1.06 * ideal, "without the speeds it is 1.5 to 3.6 times"
    assert sorted(np.concatenate([layout.positions(r) for r in range(len(speeds))])) == [*range(TOKENS)]


def test_equal_speeds_are_no_speeds() -> None:
    sizes: dict[str, Any] = {"tokens": 1000, "ring_size": 4, "pattern": SlidingWindow(90)}
    assert make_layout("auto", speeds=(2, 2, 2, 2), **sizes) is make_layout("auto", **sizes)


@pytest.mark.parametrize(
    ("name", "speeds", "says"),
    [
        ("auto", (1, 2, 3), "expected 2 numbers above 0"),
        ("auto", (1, 0), "expected 2 numbers above 0"),
        ("zigzag", (1, 2), 'expected the layout "auto" or "balanced"'),
    ],
)
def test_speeds_that_cannot_be_honoured_are_refused(name: str, speeds: tuple[float, ...], says: str) -> None:
    with pytest.raises(RingLayoutError, match=says):
        make_layout(name, tokens=64, ring_size=2, pattern=Causal(), speeds=speeds)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"rank_speeds": [1.0, 2.0, 3.0]}, r"2 numbers \(ring_size\)"),
        ({"rank_speeds": "guessed"}, '"measured", a number above 0 for each ring rank'),
        ({"rank_speeds": "measured", "layout": "zigzag"}, "deals out no work"),
        ({"rank_speeds": "measured", "dynamic_ring": True}, "smaller rings have other ranks"),
    ],
)
def test_a_section_that_cannot_be_honoured_is_refused(section: dict[str, Any], says: str) -> None:
    with pytest.raises(RingConfigError, match=says):
        RingConfig.from_deepspeed({"sequence_parallel_size": 2, "ring_attention": section})


def test_hops_on_a_gpu_are_not_timed_by_the_hosts_clock() -> None:
    session = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(RingConfigError, match="expected numbers on cuda"):
        MeasuredSpeeds(None, session)  # type: ignore[arg-type]


def train_slowed(
    rank: int, world_size: int, slow: int | None, speeds: Any
) -> tuple[Run, list[float], set[float]]:
    """Train; each hop of rank `slow` takes longer, by as much as its pairs. Also the pairs of each step."""
    from ds_ring.kernels.cpu.kernel import CpuKernel

    sessions: list[Any] = []
    pairs: set[float] = set()
    adopt = MeasuredSpeeds._adopt

    def count(self: Any, table: Any) -> None:
        pairs.add(float(table[:, 0].sum()))
        adopt(self, table)

    start, forward = ds_ring.initialize, CpuKernel.forward

    def remember(**options: Any) -> Any:
        built = start(**options)
        sessions.append(built[0].ring)
        return built

    def late(self: Any, q: Any, k: Any, v: Any, tiles: Any, scale: float) -> Any:
        time.sleep(2e-6 * int(tiles.pairs.sum()))  # much longer than what the machine adds
        return forward(self, q, k, v, tiles, scale)

    config = json_config(world_size, SIZE.samples, 1, ring_attention={"rank_speeds": speeds})
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(ds_ring, "initialize", remember)
        patched.setattr(MeasuredSpeeds, "_adopt", count)
        if rank == slow:
            patched.setattr(CpuKernel, "forward", late)
        run = train_on_ring(rank, world_size, SIZE, config, STEPS)
    return run, list(sessions[0].speeds), pairs


@pytest.mark.parametrize(
    ("slow", "speeds"), [(None, [1.0, 0.25]), (1, "measured")], ids=["given", "measured"]
)
@pytest.mark.day("measured")
def test_training_equals_one_process(
    rank_pool: Callable[[int], RankPool], slow: int | None, speeds: Any
) -> None:
    result = rank_pool(2).run(train_slowed, slow, speeds)
    check_parity([run for run, *_ in result], train_alone(SIZE, STEPS))
    of_ranks = [measured for _, measured, _ in result]
    assert all(len(pairs) == (speeds == "measured") for *_, pairs in result), "each step has as many pairs"
    assert of_ranks[0] == of_ranks[1]
    assert of_ranks[0][1] < 0.7 * of_ranks[0][0], of_ranks

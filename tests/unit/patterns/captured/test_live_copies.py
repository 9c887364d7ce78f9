"""How many batches' captured tensors stay in memory: a mask or a score_mod is made for each batch."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from ds_ring import Causal, MaskMod, PassOptions, RingMesh, make_layout, ring_attention
from ds_ring.kernels.flex.block_mask import HopMasks
from ds_ring.masks.pattern import SMALL_BYTES, Pattern
from ds_ring.patterns.captured.traced import Traced
from ds_ring.schedule.plan import build_plan

TOKENS, BATCHES = 32, 18
MESH = RingMesh.single()
NUMBERS = itertools.count()  # no two masks are equal


def make_mask(batch: int) -> Pattern:
    speakers = torch.full((SMALL_BYTES // 8 + 1,), next(NUMBERS)).index_fill(0, torch.arange(batch % 8), -1)
    return MaskMod(lambda b, h, q, k: speakers[q] == speakers[k]) & Causal()


def attend(pattern: Pattern, score_mod: Any = None, **keywords: Any) -> None:
    q, k, v = (torch.ones(1, 2, TOKENS, 8, requires_grad=True) for _ in range(3))
    keywords = {"layout": make_layout("contiguous", tokens=TOKENS, ring_size=1)} | keywords
    ring_attention(q, k, v, pattern=pattern, mesh=MESH, score_mod=score_mod, **keywords).sum().backward()


def change_scores(batch: int) -> None:
    bias = torch.full((SMALL_BYTES // 4 + 1,), float(batch))
    attend(Causal(), lambda score, b, h, q, k: score + bias[q])


def call_flex(batch: int) -> None:
    """Make the tables of a hop, which hold copies on the device."""
    layout = make_layout("contiguous", tokens=TOKENS, ring_size=1)
    (part,) = build_plan(make_mask(batch), layout, query_heads=2, kv_heads=2).classes
    tiles = next(hop.tiles for hop in part.rank(0).directions[0].hops if hop is not None)
    MASKS.get(tiles, 16, torch.device("cpu"))


REPRODUCIBLE = PassOptions(transport="reproducible", block_size=16)
MASKS = HopMasks()
USES: dict[str, Callable[[int], None]] = {
    "the cpu kernel": lambda batch: attend(make_mask(batch)),
    "a layout's name": lambda batch: attend(make_mask(batch), layout="balanced"),
    "the reference kernel": lambda batch: attend(make_mask(batch), kernel="reference"),
    "reproducible": lambda batch: attend(make_mask(batch), options=REPRODUCIBLE),
    "flex": call_flex,
    "a score_mod": change_scores,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.day("the cpu kernel", "flex", "a score_mod")
def test_captured_tensors_of_a_few_batches_stay(use: str) -> None:
    traces = weakref.WeakSet[Traced]()
    init = Traced.__init__

    def noted(self: Traced, *arguments: Any) -> None:
        init(self, *arguments)
        traces.add(self)

    with mock.patch.object(Traced, "__init__", noted):
        for batch in range(BATCHES):
            USES[use](batch)
    gc.collect()
    copies = [x for trace in traces for x in trace.constants]
    assert len(copies) <= 16, f"{len(copies)} copies after {BATCHES} batches"

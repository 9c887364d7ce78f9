"""Documents that `auto` keeps whole or shares among few ranks: float64 on real ranks, bytes as planned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from ds_ring import Causal, Documents, RingMesh, make_layout, ring_attention
from ds_ring.patterns.documents.shared import whole_and_shared
from ds_ring.schedule.choose import bind_one_head
from tests.cases import Shape, tensors
from tests.dist.harness import RankPool
from tests.parity import errors, gathered_pass
from tests.reference import dense_attention

LENGTHS = {
    "one long": [150, 3, 40, 11, 29, 7, 1, 16],
    "short": [13, 21, 8, 30, 17, 40, 9, 25, 33, 6, 55],
    "padding": [70, 20, 90, 30, 47],  # the second and the fourth are padding
}


def pass_on(rank: int, world_size: int, ids: list[int]) -> list[float]:
    """The largest relative error of each layout, out and gradients."""
    mesh = RingMesh.from_world(ring_size=world_size)
    pattern = Documents(ids) & Causal()
    whole = tensors(Shape(1, 4, 2, len(ids), 8), torch.float64)
    want = dense_attention(*whole, pattern)
    mix = ((bind_one_head(pattern), 1),)
    layouts = whole_and_shared(len(ids), mesh.ring_size, 1, mix)
    layouts.append(make_layout("auto", tokens=len(ids), ring_size=mesh.ring_size, pattern=pattern))
    result = []
    for layout in layouts:
        attend = partial(ring_attention, pattern=pattern, layout=layout, mesh=mesh, kernel="reference")
        result.append(max(errors(gathered_pass(attend, whole, layout, mesh), want).values()))
    return result


@pytest.mark.day("padding-4")
@pytest.mark.parametrize("ring_size", [2, 4])
@pytest.mark.parametrize("name", LENGTHS)
def test_out_and_gradients_are_those_of_one_process(
    rank_pool: Callable[[int], RankPool], name: str, ring_size: int
) -> None:
    ids = np.repeat(np.arange(len(LENGTHS[name])), LENGTHS[name])
    if name == "padding":
        ids = np.where(ids % 2 == 1, -1, ids)
    for result in rank_pool(ring_size).run(pass_on, ids.tolist(), timeout_s=120):
        assert len(result) > 1 and max(result) < 1e-12

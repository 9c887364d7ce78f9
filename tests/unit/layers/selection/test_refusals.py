"""What choices of keys and sharded rows refuse, on one rank."""

from __future__ import annotations

from typing import Any

import torch

from ds_ring import Dilated, Full, RingConfig, RingMesh, SlidingWindow, halo, make_layout
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.layers.distance_bias.attention import DistanceBiasAttention
from ds_ring.layers.ngrams.sharded_rows import sharded_rows
from ds_ring.layers.selection.attention import selected_attention
from ds_ring.layers.selection.block_layout import BlockLayout
from ds_ring.layers.selection.context import selection_context
from ds_ring.layers.selection.max_logits import max_logits
from ds_ring.layers.selection.select import ring_select
from ds_ring.schedule.grid import Grid
from tests.refusals import Refusals, refuse

T = 8
LAYOUT = make_layout("contiguous", tokens=T, ring_size=1)
PLACE: Any = {"layout": LAYOUT, "mesh": RingMesh.single()}
Q, K = torch.ones(1, 4, T, 4), torch.ones(1, 2, T, 4)


def scores(rows: slice, keys: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(keys), len(range(T)[rows]), keys.shape[1])


def select(keys: torch.Tensor = K[:, 0], **changes: Any) -> Any:
    return ring_select(scores, 2, keys, **PLACE | changes)


def attend(chosen: torch.Tensor) -> Any:
    return selected_attention(Q, K, K, chosen, **PLACE)


def biased(transport: str) -> Any:
    config = RingConfig(ring_size=1, transport=transport)
    attention = DistanceBiasAttention(config, pattern=SlidingWindow(3), scale=1.0, **PLACE)
    return attention(torch.ones(1, 2, T, 6), K, K, profiles=torch.ones(2, 3))


REFUSED: Refusals = {
    "a layout of blocks of other tokens": (
        lambda: select(blocks=BlockLayout.from_tokens(make_layout("contiguous", tokens=4, ring_size=1), 2)),
        RingConfigError, "ring_select: expected blocks of the contiguous layout"),
    "keys of fewer slots": (lambda: select(K[:, 0, :5]), RingShapeError,
        r"keys: expected \[batch, 8, ...\], got \[1, 5, 4\]; use ds_ring.shard_sequence"),
    "Ulysses ranks": (
        lambda: selection_context(Full(), LAYOUT, RingMesh(Grid(2, 1, 2), 0), 1.0), RingConfigError,
        "ring_select: expected ulysses_size 1, got 2"),
    "heads that see other keys": (
        lambda: select(pattern=Dilated((4,), (2,))), RingPatternError,
        "pattern: expected one that is the same for all heads, got"),
    "chosen floats": (lambda: attend(torch.zeros(1, T, 2)), RingShapeError,
        "chosen: expected int64 or int32 on cpu, got torch.float32 on cpu"),
    "chosen beyond the sequence": (lambda: attend(torch.full((1, T, 2), T)), RingShapeError,
        "chosen: expected positions -1 to 7, got 8 to 8"),
    "chosen before it": (lambda: attend(torch.full((1, T, 2), -2)), RingShapeError, "got -2 to -2"),
    "query heads that K/V heads do not divide": (lambda: max_logits(Q[:, :3], K, **PLACE), RingShapeError,
        r"expected H a multiple of G in q and k, got \[1, 3, 8, 4\], \[1, 2, 8, 4\]"),
    "keys of other tokens": (lambda: max_logits(Q, K[:, :, :5], **PLACE), RingShapeError, "a multiple of G"),
    "a table of one dimension": (
        lambda: sharded_rows(torch.ones(3), torch.zeros(1, 2).long(), mesh=PLACE["mesh"]), RingShapeError,
        r"sharded_rows: table: expected \[N, D\]"),
    "profiles where nothing is added over hops": (lambda: biased("reproducible"), RingConfigError,
        'profiles: expected transport "ring", got "reproducible", which'),
}  # fmt: skip
test_it_is_refused = refuse(REFUSED)


def test_a_dimension_may_be_counted_from_the_end() -> None:
    x = torch.arange(float(2 * T)).view(1, T, 2)
    named: Any = {"before": 2, **PLACE}
    assert torch.equal(halo(x, dim=-2, **named), halo(x, dim=1, **named))

"""Refusals of blocks that an indexer selects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ds_ring.contrib.families.indexed_blocks import layers as indexed_blocks
from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.masks.catalog import Full
from ds_ring.models import layer_masks
from tests.refusals import Refusals, refuse
from tests.unit.models.calls import IDS, ON, sharding


def chosen_by(current: Any, pattern: Any = None) -> Any:
    self: Any = SimpleNamespace(_layer=ON, _sharding=current, _indexer=nn.Linear(1, 1), _mask=None)
    if pattern is not None:
        self._mask = layer_masks.LayerMask(pattern)
    return indexed_blocks.BlockIndexedLayer.choose(self, lambda x: x, torch.zeros(1))


CASES: Refusals = {
    "no local blocks": (
        lambda: indexed_blocks.minimax_m3(
            SimpleNamespace(block_size=1, local_blocks=0, head_dim=2, topk_blocks=1), sharding(), IDS, (IDS,)
        ),
        RingConfigError,
        "expected index_local_blocks from 1",
    ),
    "blocks of no batch": (lambda: chosen_by(None), RingPatternError, "expected the batch's sharding"),
    "blocks of all tokens": (
        lambda: chosen_by(sharding(Full()), Full()), RingPatternError, "expected a causal pattern"
    ),
}  # fmt: skip


test_it_is_refused = refuse(CASES)

"""`transport="all_gather"`, the yardstick: exact as a ring."""

from __future__ import annotations

import torch

from tests.cases import Shape
from tests.dist.test_ring_attention import CHUNKS, KINDS, Pool, parity


def test_it_is_exact(rank_pool: Pool) -> None:
    shape, options = Shape(batch=1, tokens=130), {"transport": "all_gather"}
    errors = rank_pool(3).run(parity, shape, torch.float32, KINDS, CHUNKS[1:], **options)[0]
    assert max(errors.values()) < 1e-5, errors

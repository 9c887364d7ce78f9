"""Buffers: used again, never more kept than was in use at once, released on demand."""

from __future__ import annotations

import torch

from ds_ring.runtime.buffers import Buffers, PooledPair, kind_of
from ds_ring.runtime.views import Pair

LIKE = Pair(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 6))
BYTES = 8 * 2 * (4 + 6) * 4  # of two buffers of 8 slots


def take(buffers: Buffers, slots: int = 8, dtype: torch.dtype = torch.float32) -> PooledPair:
    return buffers.take(kind_of(LIKE, slots, dtype), LIKE)


def test_a_pair_comes_with_its_shapes_and_dtype() -> None:
    buffers = Buffers()
    pair = take(buffers)
    assert pair.first.shape == (1, 2, 8, 4) and pair.second.shape == (1, 2, 8, 6)
    assert pair.first.is_contiguous() and pair.second.is_contiguous()
    assert buffers.held_bytes == pair.first.nbytes + pair.second.nbytes == BYTES
    buffers.give(pair)
    assert take(buffers, 8, torch.float16).first.dtype == torch.float16
    assert take(buffers, 4).first.shape[2] == 4


def test_an_equal_pair_is_used_again_with_its_views() -> None:
    buffers = Buffers()
    pair = take(buffers)
    pair.made["view"] = pair.first[:1]
    buffers.give(pair)
    assert take(buffers) is pair and "view" in pair.made
    assert take(buffers) is not pair, "one in use is given to nobody else"


def test_never_more_is_kept_than_was_in_use_at_once() -> None:
    buffers = Buffers()
    for slots in range(1, 100):
        pairs = [take(buffers, slots) for _ in range(2)]
        for pair in pairs:
            buffers.give(pair)
        assert buffers.free_bytes <= 2 * slots * BYTES // 8
    buffers.give(take(buffers, 1))
    assert buffers.free_bytes <= 2 * 99 * BYTES // 8


def test_release_frees_everything() -> None:
    buffers = Buffers()
    held = take(buffers)
    buffers.give(take(buffers))
    assert buffers.free_bytes == BYTES
    buffers.release()
    assert buffers.free_bytes == 0
    buffers.give(held)
    assert buffers.free_bytes <= BYTES


def test_buffers_of_an_inference_pass_serve_training() -> None:
    buffers = Buffers()
    with torch.inference_mode():
        pair = take(buffers)
    assert not pair.first.is_inference()
    pair.first.zero_()

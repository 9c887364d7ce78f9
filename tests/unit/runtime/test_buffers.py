"""Buffers: used again, never more kept than was in use at once, released on demand."""

from __future__ import annotations

import torch

from ds_ring.runtime.buffers import Buffers

LIKE = torch.zeros(1, 2, 8, 4)
BYTES = 8 * 2 * 4 * 4  # of 8 slots


def test_a_buffer_comes_back_with_its_shape_and_dtype() -> None:
    buffers = Buffers()
    first = buffers.take(LIKE, 8, torch.float32)
    assert first.shape == (1, 2, 8, 4) and first.is_contiguous()
    buffers.give(first)
    assert buffers.take(LIKE, 8, torch.float16).dtype == torch.float16
    assert buffers.take(LIKE, 4, torch.float32).shape[2] == 4


def test_an_equal_buffer_is_used_again() -> None:
    buffers = Buffers()
    first = buffers.take(LIKE, 8, torch.float32)
    address = first.data_ptr()
    buffers.give(first)
    assert buffers.take(LIKE, 8, torch.float32).data_ptr() == address


def test_never_more_is_kept_than_was_in_use_at_once() -> None:
    buffers = Buffers()
    for slots in range(1, 100):
        pair = [buffers.take(LIKE, slots, torch.float32) for _ in range(2)]
        for tensor in pair:
            buffers.give(tensor)
        assert buffers.free_bytes <= 2 * slots * BYTES // 8
    buffers.give(buffers.take(LIKE, 1, torch.float32))
    assert buffers.free_bytes <= 2 * 99 * BYTES // 8


def test_release_frees_everything() -> None:
    buffers = Buffers()
    held = buffers.take(LIKE, 8, torch.float32)
    buffers.give(buffers.take(LIKE, 8, torch.float32))
    assert buffers.free_bytes == BYTES
    buffers.release()
    assert buffers.free_bytes == 0
    buffers.give(held)
    assert buffers.free_bytes <= BYTES


def test_buffers_of_an_inference_pass_serve_training() -> None:
    buffers = Buffers()
    with torch.inference_mode():
        tensor = buffers.take(LIKE, 8, torch.float32)
    assert not tensor.is_inference()
    tensor.zero_()

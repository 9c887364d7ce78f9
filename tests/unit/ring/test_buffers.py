"""Buffers: used again, never more kept than was in use at once, released on demand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ds_ring.comm import device_tables as device
from ds_ring.ring import pool
from ds_ring.ring.buffers import select_some_heads
from ds_ring.ring.pool import ALIGNMENT, Block, BufferKind, Buffers, Pair, make_buffer_kind

LIKE = Pair(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 6))
BYTES = 8 * 2 * (4 + 6) * 4  # of two buffers of 8 slots
CPU = torch.device("cpu")


def kind(slots: int = 8, dtype: torch.dtype = torch.float32) -> BufferKind:
    return make_buffer_kind(LIKE, slots, dtype, apart=False)


def take(buffers: Buffers, slots: int = 8) -> Block:
    return buffers.take(kind(slots), 0)


def test_a_pair_has_its_shapes_and_dtype_and_its_own_memory() -> None:
    for one, slots in ((kind(), 8), (kind(3, torch.bfloat16), 3)):
        block = Block(one.nbytes, CPU)
        first, second = (pair := block.pair(one)).k, pair.v
        assert first.shape == (1, 2, slots, 4) and second.shape == (1, 2, slots, 6)
        assert first.dtype == second.dtype == one.dtype
        (both,) = pair.memory
        assert both.is_contiguous()
        assert both.shape == (slots, 1, 2, 4 + 6) and both.data_ptr() % ALIGNMENT == 0
        first.fill_(1)
        second.fill_(2)
        assert (first.unique().tolist(), second.unique().tolist()) == ([1], [2])
        assert block.pair(one) is pair


def test_a_block_keeps_few_pairs(monkeypatch: Any) -> None:
    monkeypatch.setattr(pool, "MAX_PAIRS_PER_BLOCK", 2)
    kinds = [kind(slots) for slots in (8, 7, 6)]
    block = Block(kinds[0].nbytes, CPU)
    first = [block.pair(one) for one in kinds[:2]]
    assert block.pair(kinds[1]) is first[1]
    last = block.pair(kinds[2])
    assert len(block._kept) == 1 and block.pair(kinds[2]) is last and block.pair(kinds[1]) is not first[1]


def test_a_block_is_used_again_and_given_to_nobody_else_meanwhile() -> None:
    buffers = Buffers()
    block = take(buffers)
    assert buffers.held_bytes == block.nbytes == BYTES
    buffers.give(block)
    assert take(buffers) is block
    assert take(buffers) is not block


def test_never_more_is_kept_than_was_in_use_at_once() -> None:
    buffers = Buffers()
    for slots in range(1, 100):
        blocks = [take(buffers, slots) for _ in range(2)]
        for block in blocks:
            buffers.give(block)
        assert buffers.free_bytes <= 2 * kind(slots).nbytes
    buffers.give(take(buffers, 1))
    assert buffers.free_bytes <= 2 * kind(99).nbytes


def test_release_frees_everything() -> None:
    buffers = Buffers()
    held = take(buffers)
    buffers.give(take(buffers))
    assert buffers.free_bytes == BYTES
    buffers.release()
    assert buffers.free_bytes == 0
    buffers.give(held)
    assert buffers.free_bytes == BYTES
    take(buffers, 4)
    assert buffers.free_bytes == 0, "what was in use before the release is no bound any more"


def test_buffers_of_an_inference_pass_serve_training() -> None:
    with torch.inference_mode():
        pair = take(Buffers()).pair(kind())
    assert not pair.k.is_inference()
    pair.k.zero_()


def test_a_table_on_a_device_is_kept_by_stream(monkeypatch: Any) -> None:
    """Its copy is ordered before later work of the stream that made it, and of no other stream."""
    found, tables = [], device.DeviceTables()
    for stream in (0, 1, 0):
        monkeypatch.setattr(device, "get_stream_number", lambda _, stream=stream: stream)
        found.append((tables.numbers((1, 2), CPU), tables.slot_index(np.array([[0, 2]]), CPU)))
    assert all(a is b for a, b in zip(found[0], found[2], strict=True))
    assert not any(a is b for a, b in zip(found[0], found[1], strict=True))


def test_every_second_head_is_not_all_heads() -> None:
    x = torch.zeros(1, 4, 2)
    assert select_some_heads(slice(0, 4), x)[0] is x and select_some_heads(slice(0, 4, 1), x)[0] is x
    assert (
        select_some_heads(slice(0, 4, 2), x)[0].shape[1] == 2
        and select_some_heads(slice(0, 3), x)[0].shape[1] == 3
    )

"""Buffers: used again, never more kept than was in use at once, released on demand."""

from __future__ import annotations

import torch

from ds_ring.runtime.buffers import ALIGNMENT, Block, BufferKind, Buffers, kind_of
from ds_ring.runtime.views import Pair

LIKE = Pair(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 6))
BYTES = 8 * 2 * (4 + 6) * 4  # of two buffers of 8 slots
CPU = torch.device("cpu")


def kind(slots: int = 8, dtype: torch.dtype = torch.float32) -> BufferKind:
    return kind_of(LIKE, slots, dtype)


def take(buffers: Buffers, slots: int = 8) -> Block:
    return buffers.take(kind(slots).nbytes, CPU)


def test_a_pair_has_its_shapes_and_dtype_and_its_own_memory() -> None:
    two = [(kind(), 0), (kind(3, torch.bfloat16), kind().nbytes)]
    block = Block(two[0][0].nbytes + two[1][0].nbytes, CPU)
    pairs = block.pairs("two", two)
    for (one, _), pair, slots in zip(two, pairs, (8, 3), strict=True):
        assert pair.first.shape == (1, 2, slots, 4) and pair.second.shape == (1, 2, slots, 6)
        assert pair.first.dtype == pair.second.dtype == one.dtype
        assert pair.first.is_contiguous() and pair.second.is_contiguous()
    tensors = [x for pair in pairs for x in (pair.first, pair.second)]
    for number, x in enumerate(tensors):
        assert x.data_ptr() % ALIGNMENT == 0
        x.fill_(number)
    assert [x.unique().tolist() for x in tensors] == [[0], [1], [2], [3]]
    assert block.pairs("two", two) is pairs


def test_a_write_to_one_tensor_of_a_block_is_none_to_another() -> None:
    """By its count of writes a batch in flight finds out that one of its tensors was written to."""
    first, second = Block(2 * kind().nbytes, CPU).pairs(0, [(kind(), 0), (kind(), kind().nbytes)])
    before = second.first._version
    first.first.zero_()
    assert second.first._version == before


def test_a_block_is_used_again_and_given_to_nobody_else_meanwhile() -> None:
    buffers = Buffers()
    block = take(buffers)
    assert buffers.held_bytes == block.nbytes == BYTES
    buffers.give(block)
    assert take(buffers) is block
    assert take(buffers) is not block


def test_a_larger_block_is_taken_where_it_may_be() -> None:
    buffers = Buffers()
    blocks = [take(buffers, slots) for slots in (8, 16, 32)]
    for block in blocks:
        buffers.give(block)
    assert buffers.take(BYTES - 1, CPU).nbytes == BYTES - 1, "exactly as large, if nothing else is said"
    assert buffers.take(BYTES + 1, CPU, or_larger=True) is blocks[1], "the smallest that is large enough"
    assert buffers.held_bytes <= 56 * BYTES // 8
    assert buffers.take(99 * BYTES, CPU, or_larger=True).nbytes == 99 * BYTES


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
    assert buffers.free_bytes <= BYTES


def test_buffers_of_an_inference_pass_serve_training() -> None:
    with torch.inference_mode():
        (pair,) = take(Buffers()).pairs(0, [(kind(), 0)])
    assert not pair.first.is_inference()
    pair.first.zero_()

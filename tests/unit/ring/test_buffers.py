"""Buffers: used again, never more kept than was in use at once, released on demand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ds_ring.comm import device_tables as device
from ds_ring.ring import buffers as module
from ds_ring.ring.buffers import some_heads
from ds_ring.ring.float8_rows import pack_scaled, unpack_scaled
from ds_ring.ring.pair import ALIGNMENT, BufferKind, Pair, kind_of
from ds_ring.ring.pool import Block, Buffers
from ds_ring.schedule.steps import Payload

LIKE = Pair(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 6))
BYTES = 8 * 2 * (4 + 6) * 4  # of two buffers of 8 slots
CPU = torch.device("cpu")


def kind(slots: int = 8, dtype: torch.dtype = torch.float32) -> BufferKind:
    return kind_of(LIKE, slots, Payload.KEYS, dtype)


def take(buffers: Buffers, slots: int = 8) -> Block:
    return buffers.take(kind(slots), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_rows_in_float8_are_rounded_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1/16 of an element, or 2^-10 of the row's power of two; any magnitude, zeros, odd widths."""
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 7)
    magnitudes = torch.tensor([1.0, 1e-7, 1e4, 448.0, 0.0], dtype=torch.float64).view(5, 1)
    k, v = (
        (torch.randn(2, 3, 5, width, generator=torch.Generator().manual_seed(width)) * magnitudes).to(dtype)
        for width in (7, 20)
    )
    k[0, 0, 3, 0] = 448.0  # the largest one of float8
    k[0, 0, 0, :3] = torch.tensor([1.0, 1.5 * 2**-18, 0.0])  # the second one is below the least of float8
    k[0, 0, 0, 3:] = 0.0
    k[1, 0, 2, 0] = 65000.0  # rounds to 65536, which float16 does not have
    rows = torch.full((5, 2, 3, 7 + 20 + 2), 99, dtype=torch.uint8)
    pack_scaled(k, v, rows)
    found = torch.empty_like(k), torch.empty_like(v)
    unpack_scaled(rows, *found)
    most = torch.finfo(dtype).max
    for x, got in zip((k, v), found, strict=True):
        x, got = x.double(), got.double()
        power = 2.0 ** torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True) / 448))
        want = (x / power).nan_to_num().float().to(torch.float8_e4m3fn).double() * power
        assert torch.equal(got, want.clamp(-most, most).to(dtype).double())
        ulp = torch.finfo(torch.float16).smallest_normal * 2**-10 if dtype == torch.float16 else 0.0
        assert ((x - got).abs() <= torch.maximum(x.abs() / 16, power * 2**-10) + ulp).all()
        assert (got == 0)[:, :, 4].all() and not torch.equal(x, got)
    assert found[0][0, 0, 0, :3].tolist() == [1.0, 2**-17, 0.0], "rounded to 2^-9 of the power 2^-8"
    assert found[0][0, 0, 3, 0] == 448.0 and found[0].isfinite().all()
    v[1, 1, 1, 1], k[0, 1, 2, 3] = torch.inf, torch.nan
    pack_scaled(k, v, rows)
    unpack_scaled(rows, *found)
    assert not found[1][1, 1, 1].isfinite().any() and not found[0][0, 1, 2].isfinite().any()
    assert found[1][1, 1, 0].isfinite().all()


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
    found = []
    for stream in (0, 1, 0):
        monkeypatch.setattr(device, "stream_of", lambda _, stream=stream: stream)
        found.append((device.numbers_on((1, 2), CPU), device.slot_index(np.array([[0, 2]]), CPU)))
    assert all(a is b for a, b in zip(found[0], found[2], strict=True))
    assert not any(a is b for a, b in zip(found[0], found[1], strict=True))


def test_every_second_head_is_not_all_heads() -> None:
    x = torch.zeros(1, 4, 2)
    assert some_heads(slice(0, 4), x)[0] is x and some_heads(slice(0, 4, 1), x)[0] is x
    assert some_heads(slice(0, 4, 2), x)[0].shape[1] == 2 and some_heads(slice(0, 3), x)[0].shape[1] == 3

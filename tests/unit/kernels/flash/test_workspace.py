"""What the kernel "flash" allocates, by hand."""

from __future__ import annotations

import numpy as np

from ds_ring import Chunked, Documents, Full
from ds_ring.kernels.workspace import HopShape, get_workspace_bytes
from ds_ring.masks.tiles import Tiles


def test_workspace_of_flash_by_hand() -> None:
    """`mha_bwd`: 8 query and 2 K/V heads, 1000 queries (1024 rounded), 500 keys, D 80 (96 rounded), bf16."""
    tiles, shape = (
        Tiles.rectangles(*(build_runs(n) for n in (1000, 500))),
        HopShape(8, 2, 1000, 500, 80, 2, 80),
    )
    accumulators = 8 * 1024 * (96 + 1) * 4
    results = 2 * 80 * (8 * 1000 + 2 * 2 * 500 + 2 * 8 * 500)
    kept = 2 * 8 * 1000 * 80 * 2 + 8 * 1000 * 4
    assert get_workspace_bytes("flash", tiles, shape, True) == accumulators + results + kept
    assert get_workspace_bytes("flash", tiles, shape, False) == 8 * 1000 * (80 * (2 + 4) + 24)
    for narrow in (shape._replace(value_dim=64), shape._replace(head_dim=64)):  # widened for the operators
        for backward in (False, True):
            bytes_here = get_workspace_bytes("flash", tiles, narrow, backward)
            assert bytes_here == get_workspace_bytes("flash", tiles, shape, backward)
    alone = shape._replace(rows=2)
    expanded = 2 * 80 * 2 * 2 * 500
    assert (
        get_workspace_bytes("flash", tiles, alone, True)
        == (2 * (accumulators + kept + 160 * 8000) // 8) + expanded
    )


def test_every_sequence_of_a_packed_call_has_rows_of_its_own() -> None:
    """`mha_varlen_bwd`: total_q + 128 * batch_size rows of float32 dQ, and as many sums; D 128, bf16."""
    tokens, runs = 2048, [np.array([[0, 1, 2048]])] * 2
    shape = HopShape(1, 1, tokens, tokens, 128, 2, 128)
    lengths = [5, 11] * (tokens // 16)
    packed, chunks, whole = (
        get_workspace_bytes("flash", pattern.tiles(*runs), shape, True)
        for pattern in (Documents(np.repeat(np.arange(256), lengths)), Chunked(8, False), Full())
    )
    assert packed - whole == 256 * 128 * (128 + 1) * 4
    assert chunks - whole == 256 * (128 - 8) * (128 + 1) * 4


def build_runs(length: int) -> np.ndarray:
    return np.array([[0, 1, length]])

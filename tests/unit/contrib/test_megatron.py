"""Packed sequences of Megatron: which tokens are documents, and which are padding between them."""

from __future__ import annotations

import pytest

from ds_ring import Documents

megatron = pytest.importorskip("ds_ring.contrib.megatron.core_attention", exc_type=ImportError)


def test_padding_after_each_sequence_belongs_to_no_document() -> None:
    """Three tokens of four, then five of eight, in rings of two: multiples of four."""
    layout, documents = megatron._packing((0, 3, 8), (0, 4, 12), 2)
    assert documents == Documents([0, 0, 0, -1, 1, 1, 1, 1, 1, -1, -1, -1])
    assert (layout.tokens, layout.ring_size) == (12, 2)

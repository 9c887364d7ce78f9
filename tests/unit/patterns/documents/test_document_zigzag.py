"""The layout that cuts every document."""

from __future__ import annotations

import pytest

from ds_ring import Causal, Documents, RingLayoutError, make_layout
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.choose import count_rank_work
from tests.cases import document_ids


def test_document_zigzag_cuts_every_document() -> None:
    layout = make_layout("document_zigzag", tokens=16, ring_size=2, pattern=Documents([0] * 4 + [1] * 12))
    assert layout.positions(0).tolist() == [0, 3, 4, 5, 6, 13, 14, 15]
    assert layout.positions(1).tolist() == [1, 2, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("ring_size", [2, 3, 8])
@pytest.mark.parametrize("mean", [3, 100, 1500])
def test_document_zigzag_is_even_whatever_the_lengths(ring_size: int, mean: int) -> None:
    tokens = 12_345
    pattern = Documents(document_ids(tokens, mean)) & Causal()
    layout = make_layout("document_zigzag", tokens=tokens, ring_size=ring_size, pattern=pattern)
    work = count_rank_work(pattern, layout)
    assert work.max() / work.mean() < (1.02 if mean > 3 else 1.1)  # of 3 tokens each has few of its 2P chunks
    assert layout.local_tokens - min(map(layout.valid_tokens, range(ring_size))) <= 2
    if mean == 1500:  # which is what zigzag over the whole sequence is not
        plain = count_rank_work(pattern, make_layout("zigzag", tokens=tokens, ring_size=ring_size))
        assert plain.max() / plain.mean() > 1.1


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (None, "expected a pattern with Documents.*got None"),
        (Causal(), r'with Documents.*in the JSON "documents": true, got Causal\(\)'),
        (Documents([0] * 7) & Causal(), "expected documents of 8 tokens, got 7"),
    ],
)
def test_document_zigzag_needs_documents_of_the_sequence(pattern: Pattern | None, said: str) -> None:
    with pytest.raises(RingLayoutError, match=said):
        make_layout("document_zigzag", tokens=8, ring_size=2, pattern=pattern)

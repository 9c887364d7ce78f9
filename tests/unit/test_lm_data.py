"""The data of the quick start: real text, the same every time, held-out documents never trained on."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from ds_ring_launcher.demo import lm_data
from ds_ring_launcher.demo.lm_data import END_OF_DOCUMENT, PackedBytes, source_files


@cache
def packed(tokens: int, **arguments: Any) -> PackedBytes:
    """The data of these arguments, which takes half a second to read."""
    return PackedBytes(tokens, **arguments)


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the files, where a test needs no more: all of them take half a second."""
    paths = source_files()[::8]
    monkeypatch.setattr(lm_data, "source_files", lambda: paths)


def test_documents_are_the_standard_library_without_its_tests():
    paths = source_files()
    assert paths == sorted(paths), "each host has the same order"
    names = [path.name for path in paths]
    assert "argparse.py" in names
    assert not any(name.startswith("test_") and name.endswith("grammar.py") for name in names)


def test_samples_are_pieces_of_one_stream():
    data = packed(1000)
    first, second = data[0]["input_ids"], data[1]["input_ids"]
    assert first.shape == (1000,)
    assert np.array_equal(np.concatenate([first.numpy(), second.numpy()]), data.stream[:2000])
    assert data[0]["labels"].equal(first), "labels are shifted where the whole batch is seen, not here"
    with pytest.raises(IndexError):
        data[len(data)]


@pytest.mark.usefixtures("few_files")
def test_a_seed_is_an_order_of_the_documents():
    item, again, another = PackedBytes(1000), PackedBytes(1000), PackedBytes(1000, seed=1)
    assert np.array_equal(item.stream, again.stream)
    assert not np.array_equal(item.stream, another.stream)
    assert np.array_equal(np.sort(item.stream), np.sort(another.stream))


def test_held_out_documents_are_others():
    def documents(data: PackedBytes) -> list[bytes]:
        ends = np.flatnonzero(data.stream == END_OF_DOCUMENT)
        return [part[part < 256].astype(np.uint8).tobytes() for part in np.split(data.stream, ends + 1)]

    trained, held_out = (documents(item) for item in (packed(1000), PackedBytes(1000, held_out=True)))
    assert 0.03 < len(held_out) / len(trained) < 0.08
    assert not {text for text in held_out if len(text) > 200} & set(trained)


def test_every_token_is_told_its_document():
    plain, data = packed(1000), PackedBytes(5000, document_ids=True)
    assert set(plain[0]) == {"input_ids", "labels"}
    last = -1
    for index in range(20):
        tokens, documents = data[index]["input_ids"], data[index]["document_ids"]
        assert documents.shape == (5000,) and documents.dtype == tokens.dtype
        if last >= 0:
            assert documents[0] == last
        ends = (tokens == END_OF_DOCUMENT).int()
        assert documents.equal(documents[0] + ends.cumsum(0) - ends)
        last = int(documents[-1] + ends[-1])
    assert last > 3


@pytest.mark.usefixtures("few_files")
def test_samples_longer_than_the_text_are_refused():
    with pytest.raises(ValueError, match="expected samples of at most"):
        PackedBytes(10**9, held_out=True)

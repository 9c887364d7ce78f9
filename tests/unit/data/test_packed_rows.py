"""Documents in rows: each token once, little room left, nothing read that nobody asks for."""

from __future__ import annotations

import numpy as np
import torch

from ds_ring.data.batch import IGNORE
from ds_ring.data.loader import code_batch, read_slices
from ds_ring.data.packing import PackedRows
from ds_ring.errors import RingConfigError
from tests.refusals import refuse
from tests.sessions import session_of

LENGTHS = np.random.default_rng(1).lognormal(5, 1, 300).astype(int) + 1
TEXTS = [{"input_ids": torch.arange(length) + 10_000 * index} for index, length in enumerate(LENGTHS)]
IMAGES = PackedRows([{"input_ids": torch.ones(3), "image_ids": torch.ones(3)}], [3], 4)


def test_every_token_lies_in_one_row():
    rows = PackedRows(TEXTS, LENGTHS, 512)
    whole = [rows.slice(row, 0, 512)["input_ids"] for row in range(len(rows))]
    ids = [rows.document_ids(row) for row in range(len(rows))]
    real = torch.cat([tokens[local >= 0] for tokens, local in zip(whole, ids, strict=True)])
    assert torch.equal(real.sort().values, torch.cat([text["input_ids"] for text in TEXTS]))
    assert len(rows) <= -(-sum(LENGTHS) // 512) + 1, "rows have room for other documents"
    for tokens, local in zip(whole, ids, strict=True):
        same = local.diff() == 0
        assert bool((tokens.diff()[same & (local[1:] >= 0)] == 1).all()), "a document is torn"
        assert bool((tokens[local < 0] == 0).all())
    assert torch.equal(rows.slice(3, 100, 411)["input_ids"], whole[3][100:411])


def test_a_document_goes_where_it_leaves_least_room():
    """Of rows with 4, 3 and 2 tokens left the one of 3 goes into the second, and that of 4 into the first."""
    lengths = [6, 7, 8, 3, 4, 2, 1]
    texts = [{"input_ids": torch.full((length,), length)} for length in lengths]
    rows = PackedRows(texts, lengths, 10)
    whole = sorted(rows.slice(row, 0, 10)["input_ids"].tolist() for row in range(len(rows)))
    assert whole == [[1] + [0] * 9, [6] * 6 + [4] * 4, [7] * 7 + [3] * 3, [8] * 8 + [2] * 2]


def test_a_part_without_tokens_of_the_data_set_reads_nothing() -> None:
    local = {"input_ids": torch.zeros(1, 3).long(), "labels": torch.zeros(1, 3).long()}
    local["shift_labels"] = local["labels"].clone()
    read_slices(None, local)
    assert local["input_ids"].tolist() == [[0] * 3] and local["shift_labels"].tolist() == [[IGNORE] * 3]


test_what_does_not_go_together_is_refused = refuse({
    "fewer lengths": (lambda: PackedRows(TEXTS, LENGTHS[1:], 512), RingConfigError,
        "of 300 documents, got a row of 512 and 299 lengths"),
    "a length of 0": (lambda: PackedRows(TEXTS, LENGTHS * (np.arange(300) > 0), 512), RingConfigError,
        "lengths from 0 on"),
    "a pattern without documents": (
        lambda: session_of().loader(TEXTS, 2, lengths=LENGTHS, pack_tokens=512), RingConfigError,
        '"documents": true'),
    "workers": (lambda: session_of().loader(PackedRows(TEXTS, LENGTHS, 512), 2, num_workers=2),
        RingConfigError, "no workers"),
    "a key that would be lost": (lambda: read_slices(IMAGES, code_batch(IMAGES, [0])), RingConfigError,
        "expected input_ids and labels, got image_ids; leave it out"),
})  # fmt: skip

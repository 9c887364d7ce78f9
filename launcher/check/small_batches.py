"""Give one batch three forms: plain, padded on the right, packed with documents.

Owns what the ring is given of each form, what one process is given instead (documents unpacked into rows that
are padded), and which tokens of both are compared.

Shapes: B samples, T tokens, D rows of one process, L tokens in such a row, N tokens that are compared.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ds_ring.integrations.deepspeed.batch import IGNORE, Batch

Form = Literal["plain", "padded", "packed"]
FORMS: tuple[Form, ...] = ("plain", "padded", "packed")


class Given(NamedTuple):
    """Hold one form of a batch."""

    form: Form
    ring: Batch  # whole, [B, T]
    alone: Batch  # [D, L]
    rows: tuple[Tensor, Tensor] | None  # of the ring's and of one process's tokens that are compared, [N]

    def of_ring(self, x: Tensor) -> Tensor:
        """Return the tokens [1, N, ...] of a result [B, T, ...] that are compared; all of one of samples."""
        return _taken(x, self.rows and self.rows[0], self.ring)

    def of_one(self, x: Tensor) -> Tensor:
        """Return the same of a result [D, L, ...] of one process."""
        return _taken(x, self.rows and self.rows[1], self.alone)


def _taken(x: Tensor, rows: Tensor | None, batch: Batch) -> Tensor:
    shape = batch["input_ids"].shape
    return x if rows is None or x.shape[:2] != shape else x.flatten(0, 1)[rows][None]


def needs_documents(form: Form, causal: bool) -> bool:
    """Return whether a form takes "documents": true; a causal pattern hides padding by itself."""
    return form == "packed" or (form == "padded" and not causal)


def make_form(form: Form, plain: Batch, padding: int, causal: bool) -> Given:
    """Return a form of a plain batch.

    Args:
        form: which.
        plain: input_ids [B, T], and labels or shift_labels [B, T], or labels [B] of samples.
        padding: the id of tokens that are none.
        causal: whether the model is: then no document's last token has a label.
    """
    if form == "plain":
        return Given(form, plain, plain, None)
    ids_BT = plain["input_ids"]
    documents_BT = _documents(ids_BT.shape[1]) if form == "packed" else _lengths(ids_BT.shape[1])
    real_BT = documents_BT >= 0
    ends_BT = torch.nn.functional.pad(documents_BT.diff(dim=1) != 0, (0, 1), value=True)
    batch: Batch = {"input_ids": ids_BT.masked_fill(~real_BT, padding)}
    for key, labels in plain.items():
        if key == "input_ids":
            continue
        batch[key] = labels if labels.ndim == 1 else labels.masked_fill(~real_BT, IGNORE)
        if key == "shift_labels" and causal:
            batch[key] = batch[key].masked_fill(ends_BT, IGNORE)
    if form == "padded":
        batch["attention_mask"] = real_BT.long()
        return Given(form, batch, batch, (real_BT.flatten().nonzero()[:, 0],) * 2)
    ring_rows, alone_rows, alone = _unpacked(batch, documents_BT, padding)
    return Given(form, batch | {"document_ids": documents_BT}, alone, (ring_rows, alone_rows))


def _lengths(tokens: int) -> Tensor:
    """Return 0 for tokens of two samples, and -1 for padding: a little, and nearly half."""
    ends = torch.tensor([[tokens - 3], [tokens // 2 + 2]])
    return torch.where(torch.arange(tokens) < ends, 0, -1)


def _documents(tokens: int) -> Tensor:
    """Return the documents of two rows, some across the ranks' borders; the second row ends with padding."""
    starts = [[tokens // 3, tokens // 2 + 4], [tokens // 4, tokens - tokens // 8]]
    at = torch.arange(tokens)
    documents_BT = torch.stack([sum((at >= start).long() for start in row) + 0 * at for row in starts])
    documents_BT[1, starts[1][1] :] = -1
    return documents_BT


def _unpacked(batch: Batch, documents_BT: Tensor, padding: int) -> tuple[Tensor, Tensor, Batch]:
    """Return where tokens stand in the packed batch, where in one row for each document, and those rows."""
    tokens = documents_BT.shape[1]
    spans = [
        (document_ids == number).nonzero()[:, 0] + row * tokens
        for row, document_ids in enumerate(documents_BT)
        for number in range(int(document_ids.max()) + 1)
    ]
    longest = max(map(len, spans))
    ring_rows = torch.cat(spans)
    alone_rows = torch.cat([torch.arange(len(span)) + row * longest for row, span in enumerate(spans)])
    alone: Batch = {"attention_mask": torch.zeros(len(spans) * longest, dtype=torch.int64)}
    alone["attention_mask"][alone_rows] = 1
    for key, values in batch.items():
        alone[key] = torch.full((len(spans) * longest,), padding if key == "input_ids" else IGNORE)
        alone[key][alone_rows] = values.flatten()[ring_rows]
    return ring_rows, alone_rows, {key: x.view(len(spans), longest) for key, x in alone.items()}

"""Batches for block diffusion: rows [clean; corrupted] of any causal language model.

Owns how the blocks of a row are written into a batch's tensors and read again. The pattern is
`BlockDiffusion` (BD3-LM, arXiv 2503.09573).

[Note: blocks of a row]
A batch describes its blocks by `diffusion_blocks` [B, T]: the number of its block, from 1 on, for a clean
token, and minus that for the corrupted one; 0 marks padding at the end. Documents of a packed row follow each
other, and the numbers skip one where a document begins. Both copies of a token have its position within its
document.

Shapes: B samples, C clean tokens, T tokens of the row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.device_tables import on_device
from ds_ring.data.batch import IGNORE, Batch
from ds_ring.data.packing import (
    DOCUMENT_IDS,
    RowKind,
    check_ids,
    positions_in_documents,
)
from ds_ring.data.session import RingSession
from ds_ring.errors import RingPatternError, RingShapeError, check_whole_number
from ds_ring.masks.catalog import Causal
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import IntArray
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.patterns.private.pattern import BlockDiffusion

BLOCKS = "diffusion_blocks"


class DiffusionRows(RowKind):
    """Rows for block diffusion, by `diffusion_blocks`; see [Note: blocks of a row]."""

    key = BLOCKS

    def check(self, tensors: Batch, pattern: Pattern, has_more: bool) -> None:
        """Refuse what does not go with block diffusion."""
        if pattern != Causal() or has_more or DOCUMENT_IDS in tensors:
            raise RingPatternError.wrong(
                f"batch[{BLOCKS!r}]", "Causal() and no other documents or attention_mask", str(pattern),
                "number blocks by engine.ring.diffusion_batch",
            )  # fmt: skip
        for key, there in (
            ("no labels", "labels" not in tensors),
            ("position_ids", "position_ids" in tensors),
        ):
            if not there:
                raise RingShapeError.wrong("batch", f"{key} with {BLOCKS}", "other", "use diffusion_batch")

    def make_row_pattern(self, row_T: IntArray) -> BlockDiffusion:
        """Return the pattern of a row.

        Raises:
            RingPatternError: numbers that are not those of `diffusion_batch`.
        """
        clean = int((row_T > 0).sum())
        numbers, padding = row_T[:clean], len(row_T) - 2 * clean
        if clean and padding >= 0 and numbers[0] == 1 and not row_T[2 * clean :].any():
            documents = np.cumsum(np.diff(numbers, prepend=1) > 1)
            block = int(np.bincount(numbers).max())
            many = Documents(documents) if documents[-1] else None
            result = BlockDiffusion(block, clean, many, padding=padding)
            if np.array_equal(make_block_numbers(result), row_T):
                return result
        raise RingPatternError.wrong(
            f"batch[{BLOCKS!r}]", "block numbers, the same ones negative, then 0", row_T.tolist(),
            "use engine.ring.diffusion_batch",
        )  # fmt: skip


def make_block_numbers(pattern: BlockDiffusion) -> IntArray:
    """Return `diffusion_blocks` [T] of a pattern; see [Note: blocks of a row]."""
    first, end, document = pattern.blocks.T
    number = 1 + np.arange(len(first)) + np.unique(document, return_inverse=True)[1]
    numbers = np.repeat(number, end - first)
    return np.concatenate([numbers, -numbers, np.zeros(pattern.padding, dtype=np.int64)])


def diffusion_batch(
    session: RingSession,
    clean: Tensor,
    corrupted: Tensor,
    block: int,
    *,
    document_ids: Tensor | None = None,
    predicted: Tensor | None = None,
) -> Batch:
    """Return a batch of rows [clean; corrupted] for block diffusion, for a causal language model as it is.

        batch = engine.ring.diffusion_batch(clean, corrupted, block=32)
        loss = engine(**engine.ring.shard_batch(batch)).loss

    The label of a corrupted token is the clean one at its place, not the next one.

    Args:
        clean, corrupted: token ids [B, C].
        block: tokens of a block.
        document_ids: integers [C], rising where a packed document begins; the same for all rows.
        predicted: bool [B, C], the corrupted tokens that have a label; None: those that differ.

    Raises:
        RingShapeError: tensors of different shapes.
        RingPatternError: ids that fall, or a block below 1.
    """
    block = check_whole_number(block, "diffusion_batch: block", RingPatternError)
    if clean.ndim != 2 or clean.shape != corrupted.shape:
        raise RingShapeError.wrong(
            "diffusion_batch",
            f"both [samples, tokens], {list(clean.shape)}",
            list(corrupted.shape),
            "cut them",
        )
    samples, tokens = clean.shape
    ids = (
        torch.zeros(1, tokens, dtype=torch.int64, device="cpu")
        if document_ids is None
        else document_ids.reshape(1, -1)
    )
    check_ids(ids)
    if bool((ids.diff(dim=1) < 0).any()):
        raise RingPatternError.wrong("diffusion_batch", "ids that rise", ids[0].tolist(), "number anew")
    pattern = BlockDiffusion(
        block, tokens, Documents(ids[0].cpu().numpy()) if document_ids is not None else None
    )
    places = positions_in_documents(ids).to(clean.device)
    predicted = clean != corrupted if predicted is None else predicted.bool()
    labels = torch.cat([torch.full_like(clean, IGNORE), clean.masked_fill(~predicted, IGNORE)], dim=1)
    numbers = on_device(make_block_numbers(pattern), clean.device)
    return {
        "input_ids": torch.cat([clean, corrupted], dim=1), "shift_labels": labels,
        "position_ids": places.repeat(samples, 2), BLOCKS: numbers.repeat(samples, 1),
    }  # fmt: skip

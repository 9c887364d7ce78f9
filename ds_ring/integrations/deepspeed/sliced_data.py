"""Read of a batch only the tokens that this rank keeps, where the data set gives slices of its samples.

Owns the stand-in batch that is sharded in place of tokens, and the reading of what came out. Knows no ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_ring.errors import RingShapeError
from ds_ring.integrations.deepspeed.batch import IGNORE, LABEL_KEYS, Batch
from ds_ring.integrations.deepspeed.packed_rows import part_of
from ds_ring.integrations.deepspeed.packing import DOCUMENT_IDS

_MOST_TOKENS = 2**31  # of a sample; a code is its index and a position


def is_sliced(dataset: Any) -> bool:
    """Return whether the data set has `slice(index, start, stop)` and `length(index)`."""
    return hasattr(dataset, "slice") and hasattr(dataset, "length")


# [Note: stand-ins] A batch of codes (which sample, which position; 0 for padding) takes the path that tokens
# would take: labels are shifted, documents and padding looked at, the ranks' checksums compared, the codes
# sharded. What comes out says which tokens this rank needs as inputs and as labels, and only these are read.
def shard_slices(
    dataset: Any,
    indices: Sequence[int],
    shard_batch: Callable[[Batch], Batch],
    items_of: Callable[[Tensor], Tensor],
) -> Batch:
    """Return this rank's part of a batch, by `shard_batch`, with its tokens read ([Note: stand-ins]).

    `items_of` gives `num_items_in_batch` for local labels: those of the data set may be -100, which codes do
    not tell.
    """
    local = shard_batch(_stand_in(dataset, indices))
    input_codes, label_codes = local["input_ids"].cpu(), local["labels"].cpu()
    codes, found = _read(dataset, torch.cat([input_codes.flatten(), label_codes.flatten()]))
    local["input_ids"].copy_(_looked_up(input_codes, codes, found["input_ids"], 0))
    labels = _looked_up(label_codes, codes, found.get("labels", found["input_ids"]), IGNORE)
    for key in LABEL_KEYS:
        local[key].copy_(labels)
    return local | {"num_items_in_batch": items_of(labels)}


def _stand_in(dataset: Any, indices: Sequence[int]) -> Batch:
    lengths = torch.tensor([int(dataset.length(index)) for index in indices])
    tokens = int(lengths.max())
    if not 0 < tokens < _MOST_TOKENS or int(lengths.min()) < 1:
        raise RingShapeError(
            f"length: expected 1 to {_MOST_TOKENS - 1} tokens in a sample, got {lengths.tolist()} in the"
            f" samples {list(indices)}; leave such samples out"
        )
    positions_T = torch.arange(tokens)
    real_BT = positions_T < lengths[:, None]
    codes_BT = ((torch.tensor(indices)[:, None] + 1) * _MOST_TOKENS + positions_T) * real_BT
    batch = {"input_ids": codes_BT, "labels": codes_BT.masked_fill(~real_BT, IGNORE)}
    if not bool(real_BT.all()):
        batch["attention_mask"] = real_BT.long()
    if hasattr(dataset, DOCUMENT_IDS):
        batch[DOCUMENT_IDS] = torch.stack([dataset.document_ids(index) for index in indices])
    return batch


def _read(dataset: Any, wanted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the codes wanted, sorted, and the data set's tensors at each; one slice for each run of them."""
    codes = wanted[wanted > 0].unique()
    starts = torch.nn.functional.pad((codes.diff() != 1).nonzero().flatten() + 1, (1, 0)).tolist()
    parts: dict[str, list[Tensor]] = {"input_ids": []}
    for first, end in zip(starts, [*starts[1:], len(codes)], strict=True):
        if first == end:  # nothing is wanted at all
            continue
        sample, position = divmod(int(codes[first]), _MOST_TOKENS)
        part = part_of(dataset, sample - 1, position, position + end - first)
        for name in ("input_ids", "labels"):
            if name in part:
                parts.setdefault(name, []).append(torch.as_tensor(part[name]).long())
    return codes, {name: torch.cat(some) if some else codes for name, some in parts.items()}


def _looked_up(wanted: Tensor, codes: Tensor, values: Tensor, otherwise: int) -> Tensor:
    if not len(codes):
        return torch.full_like(wanted, otherwise)
    places = torch.searchsorted(codes, wanted).clamp(max=len(codes) - 1)
    return torch.where(wanted > 0, values[places], otherwise)


def padded(samples: Sequence[dict[str, Tensor]]) -> Batch:
    """Collate samples of different lengths: padding on the right, and an attention_mask that says so."""
    tokens = max(len(sample["input_ids"]) for sample in samples)
    batch: Batch = {}
    for key in samples[0]:
        fill = IGNORE if key in LABEL_KEYS else 0
        rows = [torch.as_tensor(sample[key]) for sample in samples]
        batch[key] = torch.stack(
            [torch.nn.functional.pad(row, (0, tokens - len(row)), value=fill) for row in rows]
        )
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    batch.setdefault("attention_mask", (torch.arange(tokens) < lengths[:, None]).long())
    return batch

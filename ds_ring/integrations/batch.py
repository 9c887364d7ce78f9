"""One global batch of a causal language model, and the part of it that one rank trains on.

Owns what must happen to labels, position ids and padding masks *before* the tokens are cut apart, and the
two ways of cutting: along the sequence, or (a short batch) along the samples. Pure: no collective, no model.
Which layout is used, and whether the ranks hold the same batch, is `session.py`'s.

Shapes: B samples, T global tokens, S local tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ds_ring.errors import RingPatternError, RingShapeError
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.shard import shard_sequence
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.pattern import Pattern

IGNORE = -100  # the label that cross entropy skips (PyTorch's and Hugging Face's default)
LABEL_KEYS = ("labels", "shift_labels")

Batch = dict[str, Tensor]


def prepare_batch(batch: Mapping[str, Tensor], pattern: Pattern) -> Batch:
    """The batch with everything that looks across token borders done, so that it may be cut anywhere.

    Labels come out aligned with the logits that predict them, under both names (`shift_labels` is
    what transformers' loss takes as already shifted). `attention_mask` is checked and gone. Position ids are
    there. Every tensor of the result is [B, T, ...] or [1, T, ...].
    """
    tensors = _as_tensors(batch)
    batch_rows, tokens = token_shape(tensors)
    tensors.setdefault("position_ids", torch.arange(tokens, device=_tokens_of(tensors).device)[None])
    mask_BT = tensors.pop("attention_mask", None)
    for key, tensor in tensors.items():
        rows_fit = tensor.ndim >= 2 and (
            tensor.shape[0] == batch_rows or (tensor.shape[0] == 1 and key not in LABEL_KEYS)
        )
        if not rows_fit or tensor.shape[1] != tokens:
            raise RingShapeError(
                f"batch[{key!r}]: expected [{batch_rows}, {tokens}, ...], one entry per token, got"
                f" {list(tensor.shape)}; take it out of the batch and hand it to the model yourself"
            )
    labels_BT = _aligned_labels(tensors, pattern)
    if labels_BT is not None:
        tensors.update(dict.fromkeys(LABEL_KEYS, labels_BT))
    _check_positions(tensors["position_ids"], pattern)
    if mask_BT is not None:
        _check_padding(mask_BT, (batch_rows, tokens), labels_BT, pattern)
    return tensors


def token_shape(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """(B, T) of a batch."""
    tokens = _tokens_of(tensors)
    if tokens.ndim < 2 or 0 in tokens.shape[:2]:
        raise RingShapeError(
            "batch: expected input_ids [samples, tokens] with at least one of each, got"
            f" {list(tokens.shape)}; a single sequence is [1, tokens]"
        )
    return tokens.shape[0], tokens.shape[1]


def valid_tokens(tensors: Mapping[str, Tensor]) -> int:
    """How many tokens of a prepared batch count in the loss."""
    labels_BT = tensors.get("labels")
    return 0 if labels_BT is None else int((labels_BT != IGNORE).sum())


def split_tokens(tensors: Mapping[str, Tensor], layout: Layout, mesh: RingMesh) -> Batch:
    """This rank's tokens of every sample: [B, T, ...] -> [B, S, ...]. Padding slots carry no label."""
    return {
        key: shard_sequence(tensor, layout, mesh=mesh, dim=1, pad_value=_pad_value(key))
        for key, tensor in tensors.items()
    }


def split_samples(tensors: Mapping[str, Tensor], place: int, places: int) -> Batch:
    """This rank's samples, whole: [B, T, ...] -> [ceil(B / places), T, ...].

    Every rank gets the same number of rows (ZeRO wants the same calls on all ranks); rows beyond the batch
    are zeros without labels.
    """
    batch_rows, _ = token_shape(tensors)
    rows = -(-batch_rows // places)
    mine = slice(place * rows, min((place + 1) * rows, batch_rows))
    local: Batch = {}
    for key, tensor in tensors.items():
        if tensor.shape[0] == 1 and batch_rows > 1:  # the same for every sample: position ids, mostly
            local[key] = tensor
            continue
        part = tensor[mine]
        missing = part.new_full((rows - part.shape[0], *part.shape[1:]), _pad_value(key))
        local[key] = torch.cat([part, missing])
    return local


def _pad_value(key: str) -> int:
    return IGNORE if key in LABEL_KEYS else 0


def _as_tensors(batch: Mapping[str, Tensor]) -> Batch:
    if not isinstance(batch, Mapping):
        raise RingShapeError(
            f"batch: expected a mapping of names to tensors, got {type(batch).__name__}; let the data set or"
            ' the collate_fn return {"input_ids": ..., "labels": ...}'
        )
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise RingShapeError(
                f"batch[{key!r}]: expected a tensor, got {type(value).__name__}; take it out of the batch"
            )
    return dict(batch)


def _tokens_of(tensors: Mapping[str, Tensor]) -> Tensor:
    for key in ("input_ids", "inputs_embeds"):
        if key in tensors:
            return tensors[key]
    raise RingShapeError(f"batch: expected input_ids or inputs_embeds, got the keys {sorted(tensors)}")


def _aligned_labels(tensors: Mapping[str, Tensor], pattern: Pattern) -> Tensor | None:
    """Labels where the logits that predict them are: shifted here unless the caller has done it."""
    if "shift_labels" in tensors:
        return tensors["shift_labels"]
    labels_BT = tensors.get("labels")
    if labels_BT is None:
        return None
    if not pattern.is_causal:
        raise RingPatternError(
            "labels: under a pattern that is not causal the next token can be seen, so predicting it"
            ' teaches nothing; set "causal": true, or give "shift_labels", aligned with their logits'
        )
    return torch.nn.functional.pad(labels_BT[:, 1:], (0, 1), value=IGNORE)


def _check_positions(position_ids: Tensor, pattern: Pattern) -> None:
    """Positions that restart mean packed documents (transformers reads them so, too): never ignore them."""
    if position_ids.ndim != 2:
        raise RingShapeError(
            f"position_ids: expected [samples, tokens], got {list(position_ids.shape)}; multi-axis rotary"
            " positions cannot be sharded yet"
        )
    jumps = (position_ids.diff(dim=1) != 1).nonzero()
    if len(jumps):
        row, token = jumps[0].tolist()
        raise RingPatternError(
            f"position_ids: expected positions that rise by one, got {position_ids[row, token].item()}"
            f" followed by {position_ids[row, token + 1].item()} in sample {row} at token {token + 1}: packed"
            f" documents, which the pattern {pattern} would let see each other; leave position_ids out for"
            " that"
        )


def _check_padding(
    mask_BT: Tensor, shape: tuple[int, int], labels_BT: Tensor | None, pattern: Pattern
) -> None:
    """A causal pattern ignores padding on the right by itself; any other padding it cannot express."""
    if tuple(mask_BT.shape) != shape:
        raise RingShapeError(
            f"attention_mask: expected {list(shape)}, got {list(mask_BT.shape)}; a mask over query and key"
            " pairs belongs into the pattern, which every rank can read"
        )
    real_BT = mask_BT.bool()
    if bool(real_BT.all()):
        return
    if not pattern.is_causal:
        raise RingPatternError(
            f"attention_mask: {int((~real_BT).sum())} positions are masked, and the pattern {pattern} lets"
            " every query see them; use batches without padding, or a causal pattern"
        )
    restarts = (real_BT[:, 1:] & ~real_BT[:, :-1]).nonzero()
    if len(restarts):
        row, token = restarts[0].tolist()
        raise RingPatternError(
            f"attention_mask: expected padding on the right only, got a masked token {token} before the real"
            f" token {token + 1} in sample {row}; set the tokenizer's padding_side to 'right'"
        )
    if labels_BT is not None and bool(((labels_BT != IGNORE) & ~real_BT).any()):
        count = int(((labels_BT != IGNORE) & ~real_BT).sum())
        raise RingPatternError(
            f"labels: {count} of them are predicted from masked positions; set the labels of padding to"
            f" {IGNORE}"
        )

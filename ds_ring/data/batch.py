"""Prepare one global batch of a causal language model, and cut out the part of one rank.

Owns what must happen to labels, position ids and padding masks *before* the tokens are cut apart, and the
two ways of cutting: along the sequence, or (a short batch) along the samples. Pure: no collective, no model.
Which layout is used, and whether the ranks hold the same batch, is `batch_sharder.py`'s.

Shapes: B samples, T global tokens, S local tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.data.packing import (
    DOCUMENT_IDS,
    check_ids,
    has_no_label,
    ids_from_positions,
    positions_in_documents,
    row_kind,
    without_padding,
)
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.shard import shard_sequence
from ds_ring.schedule.layout import Layout

_log = logging.getLogger(__name__)
IGNORE = -100  # the label that cross entropy skips (PyTorch's and Hugging Face's default)
LABEL_KEYS = ("labels", "shift_labels")
_FEW_LABELS = 8  # may be the next tokens by chance
EMBEDS = "inputs_embeds"  # [B, T, E], in place of input_ids
LOSS_WEIGHTS = "loss_weights"  # of tokens in a loss of the caller's: no model takes them
# Keys whose padding is `pad_value`: the mask hides it, or it counts nothing.
PADDED_ALIKE = (
    "input_ids", EMBEDS, "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids",
    DOCUMENT_IDS, LOSS_WEIGHTS, *LABEL_KEYS,
)  # fmt: skip
# of a DistributedSampler: the ranks of a ring take the same samples
SAMPLER_SIZES = "num_replicas=engine.ring.run_mesh.data_size, rank=engine.ring.run_mesh.data_rank"
REAL_TOKENS = "ds_ring_real_tokens"  # of prepared batches only: 1 for tokens, 0 for padding

Batch = dict[str, Tensor]


SHARDING = "ds_ring_sharding"  # the keyword by which a model hands its batch's sharding down to attention
# By which it takes a cache: from transformers 5.24 on, before, Mamba's and RWKV's.
CACHES = ("cache", "past_key_values", "cache_params", "state")


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call, by any name; None without one."""
    return next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)


def cache_name(names: Container[str]) -> str:
    """Return the name by which a function takes a cache, given the names of its parameters."""
    return next((name for name in CACHES if name in names), "past_key_values")


def prepare_batch(
    batch: Mapping[str, Tensor], pattern: Pattern, documents: bool = False, real_tokens: bool = False
) -> Batch:
    """Return the batch with everything that looks across token borders done, so that it can be cut anywhere.

    Labels come out aligned with the logits that predict them, under both names (`shift_labels` is what
    transformers' loss takes as already shifted). `attention_mask` is checked and gone. Position ids are
    there. With `documents`, `document_ids` are there as well: see [Note: packing] in packing.py. With
    `real_tokens` so is `REAL_TOKENS`. Every tensor of the result is [B, T, ...] or [1, T, ...], but for
    labels [B] of whole samples, which stay as they are.
    """
    tensors = _as_tensors(batch)
    shape = token_shape(tensors)
    of_samples: Batch = {}  # labels [B] of whole samples: a sequence classifier's
    if "labels" in tensors and tuple(tensors["labels"].shape) == shape[:1]:
        of_samples["labels"] = tensors.pop("labels")
    mask_BT = tensors.pop("attention_mask", None)
    _check_rows(tensors, shape)
    if mask_BT is not None and tuple(mask_BT.shape) != shape:
        advice = 'leave it out: "pattern" of the JSON says which token attends to which, or an attention'
        advice += " function of yours (configs/examples/batch_mask.py)"
        raise RingShapeError.wrong("attention_mask", f"{list(shape)}", list(mask_BT.shape), advice)
    kind = row_kind(tensors)
    if kind is not None:
        kind.check(tensors, pattern, documents or mask_BT is not None)
    elif documents:
        _find_documents(tensors, mask_BT)
    elif DOCUMENT_IDS in tensors:
        raise RingPatternError.wrong(
            f"batch[{DOCUMENT_IDS!r}]", f"none with {pattern}", "some", 'set "documents": true in "pattern"'
        )
    tensors.setdefault("position_ids", torch.arange(shape[1], device=_get_tokens(tensors).device)[None])
    # Labels shift before the cut: a shard's last label is its neighbour's first token.
    labels_BT = _aligned_labels(tensors, pattern)
    if labels_BT is not None:
        tensors.update(dict.fromkeys(LABEL_KEYS, labels_BT))
    if real_tokens:
        real_BT = torch.ones(shape, dtype=torch.int64, device=_get_tokens(tensors).device)
        if mask_BT is not None:
            real_BT = real_BT * mask_BT.bool()
        if documents:
            real_BT = real_BT * (tensors[DOCUMENT_IDS] >= 0)
        tensors[REAL_TOKENS] = real_BT
    if not documents and kind is None:
        _check_positions(tensors["position_ids"], mask_BT, pattern)
        if mask_BT is not None:
            _check_padding(mask_BT, labels_BT, pattern)
    return tensors | of_samples


def number_real_tokens(mask_BT: Tensor) -> Tensor:
    """Return position ids [B, T] that count the tokens of an attention_mask; its padding has -1."""
    real_BT = mask_BT.bool().long()
    return real_BT.cumsum(dim=1) * real_BT - 1


def token_shape(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return (B, T) of a batch."""
    tokens = _get_tokens(tensors)
    if tokens.ndim < 2 or 0 in tokens.shape[:2]:
        raise RingShapeError.wrong("batch", "input_ids [samples, tokens]", list(tokens.shape), "give some")
    return tokens.shape[0], tokens.shape[1]


def valid_tokens(tensors: Mapping[str, Tensor]) -> int:
    """Count the tokens of a prepared batch that count in the loss."""
    labels_BT = tensors.get("labels")
    return 0 if labels_BT is None else int((labels_BT != IGNORE).sum())


def split_tokens(tensors: Mapping[str, Tensor], layout: Layout, mesh: RingMesh) -> Batch:
    """Return this rank's tokens of every sample: [B, T, ...] -> [B, S, ...]. Padding slots carry no label."""
    local = {
        key: tensor
        if tensor.ndim == 1
        else shard_sequence(tensor, layout, mesh=mesh, dim=1, pad_value=pad_value(key))
        for key, tensor in tensors.items()
    }
    embeds_BTE = tensors.get(EMBEDS)
    if embeds_BTE is not None and layout.local_tokens * layout.ring_size > layout.tokens:
        # An embedding of zeros belongs to no token: Gemma 3n's norms have no gradient there, and Gemma 4
        # finds no id for it. So padding slots have the first token's.
        ones_1T = torch.ones(1, layout.tokens, dtype=torch.bool, device=embeds_BTE.device)
        is_token_1S = shard_sequence(ones_1T, layout, mesh=mesh, dim=1)
        local[EMBEDS] = torch.where(is_token_1S[..., None], local[EMBEDS], embeds_BTE[:, :1].detach())
    return local


def split_samples(tensors: Mapping[str, Tensor], place: int, places: int) -> Batch:
    """Return this rank's samples, whole: [B, T, ...] -> [ceil(B / places), T, ...]."""
    # Every rank gets the same number of rows (ZeRO wants the same calls on all ranks); rows beyond the batch
    # are zeros without labels.
    batch_rows = len(_get_tokens(tensors))
    if any(tensor.ndim == 1 for tensor in tensors.values()):
        raise RingShapeError.wrong(
            "labels", "one for each token", "one for each sample", 'set "min_sequence_length": 0'
        )
    rows = -(-batch_rows // places)
    mine = slice(place * rows, min((place + 1) * rows, batch_rows))
    local: Batch = {}
    for key, tensor in tensors.items():
        if tensor.shape[0] == 1 and batch_rows > 1:  # the same for every sample: position ids, mostly
            local[key] = tensor
            continue
        part = tensor[mine]
        missing = part.new_full((rows - part.shape[0], *part.shape[1:]), pad_value(key))
        if key == EMBEDS:  # as in `split_tokens`
            missing = tensor[:1].detach().expand_as(missing)
        local[key] = torch.cat([part, missing])
    return local


def pad_value(key: str) -> int:
    """Return what padding has in a tensor of a batch."""
    return IGNORE if key in LABEL_KEYS else 0


def _as_tensors(batch: Mapping[str, Tensor]) -> Batch:
    if not isinstance(batch, Mapping):
        raise RingShapeError.wrong("batch", "a mapping of names to tensors", type(batch).__name__, "use one")
    for key, value in batch.items():
        check_tensor(f"batch[{key!r}]", value)
    return dict(batch)


def check_tensor(name: str, value: object) -> None:
    """Raise RingShapeError for what is no tensor, such as a list of ids."""
    if not isinstance(value, Tensor):
        advice = "convert it with torch.as_tensor (in the data set, if it is from one)"
        raise RingShapeError.wrong(name, "a tensor", type(value).__name__, advice)


def check_local(function: str, batch: object, expected: str) -> None:
    """Raise RingShapeError for what `shard_batch` has not returned for a batch with labels."""
    if not isinstance(batch, Mapping):
        advice = "pass all that engine.ring.shard_batch returned"
        raise RingShapeError.wrong(function, "a batch by names", type(batch).__name__, advice)
    if "shift_labels" not in batch:
        advice = "shard a batch with labels by engine.ring.shard_batch"
        raise RingShapeError.wrong(function, expected, f"{sorted(map(str, batch))}", advice)
    check_tensor(f"{function}: batch['shift_labels']", batch["shift_labels"])


def check_keywords(arguments: Mapping[str, Any]) -> None:
    """Raise RingShapeError where a model is called with a list in place of a tensor of tokens."""
    for name in ("input_ids", EMBEDS, *LABEL_KEYS, "position_ids"):
        if arguments.get(name) is not None:
            check_tensor(name, arguments[name])


def _get_tokens(tensors: Mapping[str, Tensor]) -> Tensor:
    for key in ("input_ids", EMBEDS):
        if key in tensors:
            return tensors[key]
    raise RingShapeError(f"batch: expected input_ids or inputs_embeds, got the keys {sorted(tensors)}")


def _check_rows(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
    batch_rows, tokens = shape
    for key, tensor in tensors.items():
        rows_fit = tensor.ndim >= 2 and (
            tensor.shape[0] == batch_rows or (tensor.shape[0] == 1 and key not in LABEL_KEYS)
        )
        if not rows_fit or tensor.shape[1] != tokens:
            raise RingShapeError.wrong(
                f"batch[{key!r}]", f"[{batch_rows}, {tokens}, ...]", list(tensor.shape),
                "expand a value of each sample to its tokens, or leave it out of the batch",
            )  # fmt: skip
    position_ids = tensors.get("position_ids")
    if position_ids is not None and position_ids.ndim != 2:
        raise RingShapeError.wrong(
            "position_ids", "[samples, tokens]", list(position_ids.shape), "pass one axis"
        )


@lru_cache(maxsize=1)  # once a process
def _warn_about_whole_rows() -> None:
    _log.warning(
        'ds_ring: "documents": true, but a batch has neither document_ids nor position_ids: each of its rows'
        " counts as one document"
    )


@lru_cache(maxsize=1)  # once a process
def warn_about_shifted_padding() -> None:
    """Say that padding loses the label that the shift of labels gives it."""
    _log.warning(
        "ds_ring: labels: shifted by one, the first token of a sample is the label of the padding in front of"
        " it; that label is left out, since padding predicts nothing"
    )


def _find_documents(tensors: Batch, mask_BT: Tensor | None) -> None:
    """Add `document_ids` (from positions if there are none) and positions (from ids if there are none)."""
    position_ids = tensors.get("position_ids")
    if DOCUMENT_IDS in tensors:
        check_ids(tensors[DOCUMENT_IDS])
        if position_ids is None:
            tensors["position_ids"] = positions_in_documents(tensors[DOCUMENT_IDS])
    elif position_ids is not None:
        tensors[DOCUMENT_IDS] = ids_from_positions(position_ids)
    else:
        _warn_about_whole_rows()
        tokens = _get_tokens(tensors)
        tensors[DOCUMENT_IDS] = torch.zeros(1, tokens.shape[1], dtype=torch.int64, device=tokens.device)
    if mask_BT is not None:
        tensors[DOCUMENT_IDS] = without_padding(tensors[DOCUMENT_IDS], mask_BT)


def _aligned_labels(tensors: Mapping[str, Tensor], pattern: Pattern) -> Tensor | None:
    """Return labels where the logits that predict them are: shifted here unless the caller has done it."""
    # Labels that were shifted before lose those at document borders, too, if the pattern is causal; if it is
    # not they need not be next tokens.
    document_ids = tensors.get(DOCUMENT_IDS)
    labels_BT = tensors.get("shift_labels")
    if labels_BT is None and "labels" in tensors:
        if not pattern.is_causal:
            raise RingPatternError.wrong(
                "labels", "a causal pattern", f"{pattern}", 'set "causal": true, or give "shift_labels"'
            )
        _check_not_shifted(tensors["labels"], tensors.get("input_ids"))
        labels_BT = torch.nn.functional.pad(tensors["labels"][:, 1:], (0, 1), value=IGNORE)
        if document_ids is not None and bool(((labels_BT != IGNORE) & (document_ids < 0)).any()):
            warn_about_shifted_padding()
    if labels_BT is None or document_ids is None:
        return labels_BT
    # Without a causal pattern labels need not be next tokens: only padding loses its own.
    unlabelled = has_no_label(document_ids) if pattern.is_causal else document_ids < 0
    return labels_BT.masked_fill(unlabelled, IGNORE)


def _check_not_shifted(labels_BT: Tensor, ids_BT: Tensor | None) -> None:
    """Refuse labels that are the next tokens already: shifted twice, they are those after the next."""
    if ids_BT is None or ids_BT.shape != labels_BT.shape:
        return
    labelled = labels_BT != IGNORE
    next_ones = (labels_BT[:, :-1] == ids_BT[:, 1:]) | ~labelled[:, :-1]
    if not bool(next_ones.all()) or int(labelled[:, :-1].sum()) < _FEW_LABELS:
        return
    if not bool(((labels_BT == ids_BT) | ~labelled).all()):  # a sequence of one token has the same labels
        raise RingConfigError.wrong(
            "labels", "labels[i] of token i, which are shifted here", "labels[i] of token i + 1",
            'leave the shift out, or pass them as "shift_labels"',
        )  # fmt: skip


def _check_positions(position_ids: Tensor, mask_BT: Tensor | None, pattern: Pattern) -> None:
    """Refuse positions that restart: they mean packed documents, as transformers reads them, too."""
    are_jumps = position_ids.diff(dim=1) != 1
    if mask_BT is not None:  # padding may have any
        are_jumps = are_jumps & mask_BT[:, 1:].bool()
    jumps = are_jumps.nonzero()
    if len(jumps):
        row, token = jumps[0].tolist()
        before, after = position_ids[row % len(position_ids), token : token + 2].tolist()
        raise RingPatternError(
            f"position_ids: expected positions that rise by one, got {before}, {after} at token {token + 1}"
            f' of sample {row}: packed documents; set "pattern": {{"documents": true}}, or leave ids out'
        )


def _check_padding(mask_BT: Tensor, labels_BT: Tensor | None, pattern: Pattern) -> None:
    """Refuse padding that the pattern lets tokens see; on the right a causal pattern hides it by itself."""
    real_BT = mask_BT.bool()
    if bool(real_BT.all()):
        return
    if not pattern.is_causal:
        raise RingPatternError(
            f"attention_mask: expected no padding under {pattern}, got {int((~real_BT).sum())} masked"
        )
    restarts = (real_BT[:, 1:] & ~real_BT[:, :-1]).nonzero()
    if len(restarts):
        row, token = restarts[0].tolist()
        raise RingPatternError(
            f"attention_mask: expected padding on the right only, got a masked token {token} before a real"
            f" one in sample {row}; set padding_side to 'right', or \"documents\": true"
        )
    if labels_BT is not None and bool(((labels_BT != IGNORE) & ~real_BT).any()):
        count = int(((labels_BT != IGNORE) & ~real_BT).sum())
        raise RingPatternError(f"labels: expected {IGNORE} in padding, got {count} others; set them to it")


def whole_tensors(batch: Mapping[str, Tensor], names: frozenset[str]) -> tuple[Batch, Batch]:
    """Return a batch's tensors by token, and those of `names`, which go whole to every rank."""
    tensors = _as_tensors(batch)
    whole = {key: tensors.pop(key) for key in names & tensors.keys()}
    return tensors, whole

"""Batches for training a drafter beside a frozen trunk: EAGLE-3's steps and DFlash's blocks.

Owns what is in such a batch and how it is cut: a rank gets the private tokens that belong to its trunk
tokens. `attention.py` has attention and loss.

Private tokens follow each other in the tensors `draft_*` as in the pattern `Drafter`. Without anchors
(EAGLE-3) these are steps 0, 1, .. of all trunk tokens, and step 0 has the keys that the pattern calls the
trunk's. The drafter reads state t and token t + 1 + step, and predicts token t + 2 + step. With anchors
(DFlash) these are the blocks: block b has token anchor[b] and masks, and predicts what follows. The labels of
a document end with it.

Shapes: B samples, T trunk tokens, N blocks, D steps or tokens of a block, M private tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.device_tables import on_device
from ds_ring.comm.mesh import RingMesh
from ds_ring.data.batch import IGNORE, Batch
from ds_ring.data.model_needs import WholeTensors
from ds_ring.data.packing import DOCUMENT_IDS, positions_in_documents
from ds_ring.data.session import RingSession
from ds_ring.errors import RingPatternError, RingShapeError, check_whole_number
from ds_ring.ops.shard import shard_sequence
from ds_ring.schedule.layout import Layout

TOKENS, LABELS, WEIGHTS = "draft_input_ids", "draft_labels", "draft_weights"
ANCHORS = "draft_anchors"
_BY_TOKEN = (TOKENS, "draft_position_ids", LABELS, WEIGHTS)


@dataclass(frozen=True, eq=False)
class LocalDrafts:
    """Hold what attention needs of the drafts of a batch: `BatchSharding.whole`.

    Attributes:
        anchors: of the blocks of each row, those of all ranks; empty for EAGLE-3.
        draft: tokens of a block; of EAGLE-3 the number of steps.
        slots: local slots of the blocks.
        blocks: by row, how many of its blocks are this rank's.
    """

    anchors: tuple[tuple[int, ...], ...]
    draft: int
    slots: int = 0
    blocks: tuple[int, ...] = ()
    for_modules: ClassVar[bool] = True  # a module around the trunk takes private tokens as a rank's part


class Drafts(WholeTensors):
    """The private tokens of batches of `drafter_batch`."""

    names = frozenset((*_BY_TOKEN, ANCHORS))

    def take_columns(
        self, local: Batch, prepared: Mapping[str, Tensor], layout: Layout | None, mesh: RingMesh
    ) -> LocalDrafts | None:
        """Replace the private tokens in `local` by this rank's; return what attention needs of them.

        Raises:
            RingShapeError: a batch of whole samples, or Ulysses ranks.
        """
        if TOKENS not in local:
            return None
        if layout is None or mesh.ulysses_size > 1:
            got = "whole samples" if layout is None else "Ulysses ranks"
            advice = 'leave "min_sequence_length" and "ulysses_size" out'
            raise RingShapeError.wrong("drafts", "a trunk that is cut along its tokens", got, advice)
        anchors_BN = local.pop(ANCHORS, None)
        private = {key: local.pop(key) for key in _BY_TOKEN}
        if anchors_BN is None:
            cut = partial(shard_sequence, layout=layout, mesh=mesh, dim=1)
            for key, x in private.items():
                steps = [cut(step, pad_value=_fill(key)) for step in x.split(layout.tokens, dim=1)]
                local[key] = torch.cat(steps, dim=1)
            return LocalDrafts((), len(steps))
        ids_BT = prepared.get(DOCUMENT_IDS)
        rank = mesh.ring_rank
        is_mine = np.zeros(layout.tokens, dtype=bool)
        is_mine[layout.positions(rank)[: layout.valid_tokens(rank)]] = True
        anchors, mine = list[tuple[int, ...]](), list[np.ndarray]()
        for row, starts in enumerate(prepared[ANCHORS].cpu().numpy()):
            held = starts >= 0
            if ids_BT is not None:  # a block in padding takes no part
                held &= ids_BT[row % len(ids_BT)].cpu().numpy()[starts] >= 0
            anchors.append(tuple(starts[held].tolist()))
            mine.append(np.flatnonzero(held & is_mine[starts]))
        blocks, draft = max(map(len, mine)), private[TOKENS].shape[1] // anchors_BN.shape[1]
        index = np.stack([np.pad(blocks_of_row, (0, blocks - len(blocks_of_row))) for blocks_of_row in mine])
        unused = np.arange(blocks) >= np.array([[len(blocks_of_row)] for blocks_of_row in mine])
        for key, x in private.items():
            index_BN, unused_BN = on_device(index, x.device), on_device(unused, x.device)
            of_blocks = x.unflatten(1, (-1, draft)).take_along_dim(index_BN[..., None], dim=1)
            local[key] = of_blocks.masked_fill(unused_BN[..., None], _fill(key)).flatten(1)
        return LocalDrafts(tuple(anchors), draft, blocks * draft, tuple(map(len, mine)))


def _fill(key: str) -> int:
    return IGNORE if key == LABELS else 0


def drafter_batch(
    session: RingSession,
    input_ids: Tensor,
    draft: int,
    *,
    anchors: Tensor | None = None,
    mask_token: int | None = None,
    document_ids: Tensor | None = None,
    predicted: Tensor | None = None,
    weights: Sequence[float] | None = None,
) -> Batch:
    """Return a batch for a drafter beside a trunk: EAGLE-3's, or with `anchors` DFlash's.

        batch = engine.ring.drafter_batch(input_ids, 16, anchors=anchors, mask_token=mask_token)
        local = engine.ring.shard_batch(batch)
        loss = engine.ring.draft_loss(engine(**local), local)  # the module returns logits [B, M, V]
        engine.backward(loss.backward_loss)

    The module gets the trunk's input_ids and position_ids, and draft_input_ids and draft_position_ids of the
    private tokens. Its attention is `engine.ring.draft_attention`.

    Args:
        input_ids: [B, T], of the trunk.
        draft: EAGLE-3's steps of the training-time test, or tokens of a block, its anchor among them.
        anchors: positions [B, N] of the first token of each block; -1 for none.
        mask_token: id of the tokens of a block after its first one; needed with anchors.
        document_ids: integers [T] or [B, T] of packed documents, negative for padding. The section needs
            `"pattern": {"documents": true}`.
        predicted: bool [B, T], tokens that are labels; None: all.
        weights: of the labels of each step, or of each token of a block, D numbers; None: 1.

    Raises:
        RingPatternError: a draft below 1, or anchors outside the trunk.
        RingShapeError: tensors of other shapes, weights or mask_token missing.
    """
    draft = check_whole_number(draft, "drafter_batch: draft", RingPatternError)
    if input_ids.ndim != 2:
        raise RingShapeError.wrong(
            "drafter_batch", "input_ids [samples, tokens]", list(input_ids.shape), "add a dimension"
        )
    samples, tokens = input_ids.shape
    documents = (
        torch.zeros(1, tokens, dtype=torch.int64, device="cpu") if document_ids is None else document_ids
    )
    ids_BT = documents.reshape(-1, tokens).to(input_ids.device).expand(samples, tokens)
    places_BT = positions_in_documents(ids_BT)
    if anchors is None:
        reads = torch.arange(1, draft + 1, device=input_ids.device)[:, None]
        base = torch.arange(tokens, device=input_ids.device).expand(samples, 1, tokens)
        at, labels_at, after = base + reads, base + reads + 1, (reads - 1).expand(draft, tokens)
    else:
        after = torch.arange(draft, device=input_ids.device)
        base = _checked(anchors, input_ids, mask_token)[..., None]
        at = labels_at = base + after
    document = _at(ids_BT, base.expand_as(at), -1)
    same, known = (document == _at(ids_BT, places, -1) for places in (at, labels_at))
    known = known & (document >= 0)
    found_ids, labels = _at(input_ids, at, 0) * same, _at(input_ids, labels_at, IGNORE)
    if predicted is not None:
        known = known & (_at(predicted.long(), labels_at, 0) > 0)
    if anchors is not None:
        known = known & (after > 0)
        found_ids = torch.where((after == 0) & same, found_ids, mask_token or 0)
    of_place = torch.tensor([1.0] * draft if weights is None else list(weights), device=input_ids.device)
    if len(of_place) != draft:
        raise RingShapeError.wrong("drafter_batch", f"{draft} weights", len(of_place), "give one for each")
    of_place = of_place[:, None] if anchors is None else of_place
    session.needs.whole = session.needs.whole or Drafts()
    if not isinstance(session.needs.whole, Drafts):
        raise RingShapeError.wrong("drafter_batch", "a trunk of texts", "one of images", "take its text part")
    batch: dict[str, Any] = {
        "input_ids": input_ids, TOKENS: found_ids, LABELS: labels.masked_fill(~known, IGNORE),
        "draft_position_ids": _at(places_BT, base.expand_as(at), 0) + after, WEIGHTS: of_place * known,
    }  # fmt: skip
    batch = {key: x.flatten(1) for key, x in batch.items()} | {"position_ids": places_BT}
    if anchors is not None:
        batch[ANCHORS] = anchors.to(input_ids.device)
    return batch if document_ids is None else batch | {DOCUMENT_IDS: ids_BT}


def _checked(anchors: Tensor, input_ids: Tensor, mask_token: int | None) -> Tensor:
    samples, tokens = input_ids.shape
    if mask_token is None or anchors.ndim != 2 or len(anchors) != samples or not anchors.numel():
        raise RingShapeError.wrong(
            "drafter_batch", f"anchors [{samples}, blocks] and a mask_token",
            f"{list(anchors.shape)} and {mask_token}", "give both",
        )  # fmt: skip
    if int(anchors.min()) < -1 or int(anchors.max()) >= tokens:
        raise RingPatternError.wrong(
            "drafter_batch: anchors", f"positions from -1 (none) to {tokens - 1}",
            f"{int(anchors.min())} to {int(anchors.max())}", "draw them from the trunk",
        )  # fmt: skip
    return anchors.to(input_ids.device)


def _at(x_BT: Tensor, at: Tensor, outside: int) -> Tensor:
    """Return x at positions [B, ...] of each row; `outside` where there is none."""
    inside = (at >= 0) & (at < x_BT.shape[1])
    flat = at.clamp(0, x_BT.shape[1] - 1).flatten(1)
    return torch.where(inside, x_BT.gather(1, flat).view(at.shape), outside)

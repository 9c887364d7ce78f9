"""Attention and loss of a drafter on the ring of its trunk.

Shapes: B samples, H query heads, G K/V heads, Q and K local slots of queries and keys, M local private
tokens, V vocabulary, D and E head dims.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ds_ring.contrib.drafter.batch import LABELS, WEIGHTS, LocalDrafts
from ds_ring.data.batch import Batch
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.loss import RingLoss, world_sum
from ds_ring.data.session import RingSession
from ds_ring.errors import RingShapeError
from ds_ring.patterns.private.attention import PrivateAttention, RowsPass, attend_by_rows
from ds_ring.patterns.private.pattern import Drafter
from ds_ring.patterns.private.private_layout import beside


def draft_attention(
    session: RingSession, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, *,
    scale: float | None = None, causal: bool = False,
) -> Tensor:  # fmt: skip
    """Return attention [B, H, Q, E] of a drafter over the batch that its trunk works on. Collective.

    EAGLE-3: queries are those of the latest step, keys those of all steps so far, one after the other.
    DFlash: queries are those of the blocks; keys those of the trunk's states, and then those of the blocks.

    Args:
        q_BHQD, k_BGKD, v_BGKE: local, of the tokens that `shard_batch` returned.
        scale: factor of the scores; None is 1 / sqrt(D).
        causal: tokens of a block see no later ones of it (JetSpec).

    Raises:
        RingShapeError: the batch has no drafts, or other local tokens.
    """
    sharding = session.batches.current
    drafts = sharding.whole
    if not isinstance(drafts, LocalDrafts):
        raise RingShapeError.wrong(
            "draft_attention", "a batch of drafter_batch", "another one", "use engine.ring.drafter_batch"
        )
    trunk, rank = sharding.layout, sharding.mesh.ring_rank
    parts = [(sharding.local_tokens, trunk.valid_tokens(rank))]
    if not drafts.anchors:
        step = k_BGKD.shape[2] // sharding.local_tokens - 1
        if not step:
            out: Tensor = sharding.attention(scale)(q_BHQD, k_BGKD, v_BGKE)
            return out
        parts *= step + 1
    passes = []
    for pattern, rows in _patterns(sharding, drafts, len(parts) - 1, len(q_BHQD), causal).items():
        attend = sharding.cached((pattern, scale), partial(_attention, sharding, pattern, scale))
        if drafts.anchors:
            parts = [parts[0], (drafts.slots, drafts.blocks[rows[0]] * drafts.draft)]
        passes.append(RowsPass(attend, parts, rows))
    return attend_by_rows(passes, q_BHQD, k_BGKD, v_BGKE)


def _attention(sharding: BatchSharding, pattern: Drafter, scale: float | None) -> PrivateAttention:
    layout = beside(sharding.layout, ((pattern, 1),))
    return PrivateAttention(sharding.config, pattern, layout, sharding.mesh, scale)


def _patterns(
    sharding: BatchSharding, drafts: LocalDrafts, step: int, samples: int, causal: bool
) -> dict[Drafter, list[int]]:
    """Return the rows of each pattern, in the same order on all ranks."""
    documents = {row: group.documents for group in sharding.groups for row in group.rows}
    tokens, rows_by_drafter = sharding.layout.tokens, dict[Drafter, list[int]]()
    for row in range(samples):
        if not drafts.anchors:
            pattern = Drafter(tokens, step, documents=documents.get(row)).step(step)
        elif drafts.anchors[row]:
            pattern = Drafter(tokens, drafts.draft, drafts.anchors[row], documents.get(row), causal)
        else:
            continue  # no block in this row
        rows_by_drafter.setdefault(pattern, []).append(row)
    return rows_by_drafter


def draft_loss(
    session: RingSession, logits_BMV: Tensor, batch: Batch, targets_BMV: Tensor | None = None
) -> RingLoss:
    """Return the weighted mean cross entropy over the private tokens of the world's batch. Collective.

    Args:
        logits_BMV: of the local private tokens.
        batch: from `shard_batch`.
        targets_BMV: distributions to learn (the trunk's, say) in place of the labels.

    Raises:
        RingShapeError: the batch has no drafts, or other local tokens.
    """
    labels = batch.get(LABELS)
    if labels is None or logits_BMV.shape[:2] != labels.shape:
        got = f"{list(logits_BMV.shape)} and {'none' if labels is None else list(labels.shape)}"
        raise RingShapeError.wrong(
            "draft_loss", "logits of the batch's draft_labels", got, "pass draft tokens"
        )
    logprobs = logits_BMV.to(torch.promote_types(logits_BMV.dtype, torch.float32)).log_softmax(dim=-1)
    if targets_BMV is None:
        losses = -logprobs.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    else:
        losses = -(targets_BMV * logprobs).sum(dim=-1)
    weights = batch[WEIGHTS]
    total = world_sum(weights.sum(), session.run_mesh)
    loss = (losses * weights).sum() * session.gradient_divisor / total.clamp_min(1e-12)
    return RingLoss(loss, session.mean_loss(loss), total)

"""Let TRL's GRPO compute the rollouts of a batch as trees: a prompt, and what answers share, once.

    ds_ring.enable()
    trainer = GRPOTrainer(model=model, args=GRPOConfig(deepspeed="ds_config.json", ...), ...)
    use_trees(trainer)
    trainer.train()

Owns the one method of a trainer that computes log-probabilities, new, old and of the reference. The loss
stays TRL's: it gets [samples, tokens of completions], as from rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_ring.contrib.policies.trees import TreeBatch
from ds_ring.data.batch import IGNORE
from ds_ring.engines.deepspeed.enable import find_whole_batches
from ds_ring.errors import RingConfigError
from ds_ring.patches import PatchTable, apply, patch

GRPO = PatchTable("trl", ">=1.16")
_LOGPS = "_get_per_token_logps_and_entropies"


def use_trees(trainer: Any) -> None:
    """Make a GRPOTrainer of TRL on a ring compute the rollouts of each batch as one tree.

    Samples of one prompt have to be in one batch: "per_device_train_batch_size" is a multiple of
    "num_generations". Batches with images and auxiliary losses of experts go on as rows.

    Raises:
        RingConfigError: no GRPOTrainer.
    """
    if not hasattr(trainer, _LOGPS) or not hasattr(trainer, "num_generations"):
        raise RingConfigError.wrong("use_trees", "a GRPOTrainer of TRL", type(trainer).__name__, "pass one")
    apply(_Trees(trainer), trainer=trainer)


class _Trees:
    """Compute the log-probabilities of a trainer's rollouts."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @patch(
        GRPO.given("trainer", "trl.trainer.grpo_trainer.GRPOTrainer"), _LOGPS, stage="around_forward",
        feature="trees", when="use_trees(trainer)", reason="computes common prefixes of rollouts once",
    )  # fmt: skip
    def logps(
        self, of_rows: Callable[..., Any], model: Any, input_ids: Tensor, attention_mask: Tensor,
        logits_to_keep: int, batch_size: int | None = None, compute_entropy: bool = False,
        compute_aux_loss: bool = False, **further: Any,
    ) -> Any:  # fmt: skip
        """Return log-probabilities, entropies and auxiliary loss as the trainer's method does."""
        named = {"batch_size": batch_size, "compute_entropy": compute_entropy}
        if (
            compute_aux_loss
            or any(x is not None for x in further.values())
            or find_whole_batches(model) is None
        ):
            named["compute_aux_loss"] = compute_aux_loss
            return of_rows(model, input_ids, attention_mask, logits_to_keep, **named, **further)
        each: list[tuple[Tensor, Tensor]] = []
        size = batch_size or len(input_ids)
        for ids, mask in zip(input_ids.split(size), attention_mask.bool().split(size), strict=True):
            with self._trainer.accelerator.autocast():
                each.append(_compute_tree_logps(model, ids, mask, logits_to_keep, compute_entropy))
        logps, entropies = zip(*each, strict=True)
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None


def _compute_tree_logps(
    model: Any, ids_BT: Tensor, mask_BT: Tensor, count_kept: int, entropies: bool
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the last `kept` tokens of each row, and entropies, zeros for padding.

    Without `entropies` the second tensor is empty.
    """
    tree = TreeBatch([ids[mask] for ids, mask in zip(ids_BT, mask_BT, strict=True)])
    counted_BK = mask_BT[:, -count_kept:]
    lengths = counted_BK.sum(dim=1).tolist()
    labels_T = torch.full_like(tree.batch["shift_labels"][0], IGNORE)
    for places, length in zip(tree.places, lengths, strict=True):
        predicting = torch.from_numpy(places)[-length - 1 : -1]  # the tokens before those of the completion
        labels_T[predicting] = tree.batch["shift_labels"][0, predicting]
    batch = {name: x.to(ids_BT.device) for name, x in (tree.batch | {"shift_labels": labels_T[None]}).items()}
    output = model(**batch, fused_lm_head=True)

    def join_rollouts(whole: Tensor) -> Tensor:
        each = tree.of_rollouts(whole)
        joined = torch.cat([row[len(row) - count :] for row, count in zip(each, lengths, strict=True)])
        return whole.new_zeros(counted_BK.shape).masked_scatter(counted_BK, joined)

    logps = join_rollouts(output.log_probs)
    return logps, join_rollouts(output.entropy) if entropies else logps.new_zeros(0)

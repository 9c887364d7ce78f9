"""TRL's GRPO on a ring with rollouts as trees, against TRL on one process without a ring."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ds_ring import RingConfigError
from ds_ring.contrib.policies.grpo import _compute_tree_logps, use_trees
from ds_ring.data.batch import IGNORE
from tests.dist.harness import Pool
from tests.dist.test_trainers import run_trl, save_model
from tests.dist.trainer_logs import Logs, check_logs, configs

OF_ONE_PROCESS: list[Logs] = []
# The gradients of a shared prompt all but cancel, and Adam would divide their rounding by itself.
SETTINGS = {"optim": "sgd", "learning_rate": 1.0}


def run_on_trees(rank: int, world_size: int, model: str, config: str) -> tuple[Logs, list[tuple[int, int]]]:
    """Logs of a trainer that uses trees, and the tokens of each batch as a tree and as rows without padding."""
    import trl

    from ds_ring.contrib.policies import grpo

    begin, of_one_tree, seen = trl.GRPOTrainer.__init__, grpo._compute_tree_logps, list[tuple[int, int]]()

    def begin_with_trees(trainer: Any, *inputs: Any, **named: Any) -> None:
        begin(trainer, *inputs, **named)
        use_trees(trainer)

    def noted(engine: Any, ids: Any, mask: Any, *inputs: Any) -> Any:
        tree = grpo.TreeBatch([item[real] for item, real in zip(ids, mask, strict=True)]).tree
        seen.append((tree.tokens or 0, int(mask.sum())))
        return of_one_tree(engine, ids, mask, *inputs)

    with (
        patch.object(trl.GRPOTrainer, "__init__", begin_with_trees),
        patch.object(grpo, "_compute_tree_logps", noted),
    ):
        return run_trl(rank, world_size, "GRPO", model, config, True, SETTINGS), seen


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("ring", [2, 4])
@pytest.mark.night  # by day steps on trees in test_trees.py, and TRL's DPO in test_trainers.py
def test_grpo_on_trees_is_grpo_on_one_process(rank_pool: Pool, tmp_path: Path, ring: int, stage: int) -> None:
    pytest.importorskip("trl")
    model = str(save_model(tmp_path))
    plain = configs(tmp_path)[0]
    if not OF_ONE_PROCESS:
        OF_ONE_PROCESS.append(rank_pool(1).run(run_trl, "GRPO", model, plain, False, SETTINGS)[0])
    on_ring = configs(tmp_path, ring, zero_optimization={"stage": stage})[1]
    for logs, tokens in rank_pool(ring).run(run_on_trees, model, on_ring):
        moved = [item.pop("moved") for item in logs if "moved" in item]  # from old log-probabilities
        assert moved[0] <= 1e-5 < 1e-3 < max(moved)
        check_logs(
            logs, [{key: x for key, x in item.items() if key != "moved"} for item in OF_ONE_PROCESS[0]]
        )
        trees, rows = (sum(item) for item in zip(*tokens, strict=True))
        assert len(tokens) >= 4 and trees < 0.8 * rows, tokens


def test_another_object_is_refused() -> None:
    with pytest.raises(RingConfigError, match="use_trees: expected a GRPOTrainer of TRL, got str"):
        use_trees("no trainer")


class OfRows:
    """As much of a trainer as `use_trees` reads: it computes rows."""

    num_generations = 2

    def _get_per_token_logps_and_entropies(self, *inputs: Any, **named: Any) -> str:
        return f"rows of {len(inputs)}, {sorted(named)}"


def test_without_a_ring_rollouts_stay_rows() -> None:
    trainer: Any = OfRows()
    use_trees(trainer)
    result = trainer._get_per_token_logps_and_entropies(
        torch.nn.Linear(1, 1), None, None, 3, pixel_values=None
    )
    assert result == "rows of 4, ['batch_size', 'compute_aux_loss', 'compute_entropy', 'pixel_values']"


class Chain(torch.nn.Module):
    """A model whose next token depends on the latest alone: rows and trees have the same log-probabilities."""

    def forward(self, input_ids: Tensor, shift_labels: Tensor, **_: Any) -> Any:
        logits = torch.randn(9, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)[input_ids]
        labelled = shift_labels != IGNORE
        picked = logits.gather(-1, (shift_labels * labelled)[..., None])[..., 0]
        return SimpleNamespace(
            log_probs=picked * labelled, entropy=-(logits.exp() * logits).sum(-1) * labelled
        )


@pytest.mark.parametrize("entropies", [False, True])
def test_the_tokens_of_a_completion_are_labelled_and_no_others(entropies: bool) -> None:
    """Two prompts, completions of one to four tokens, and padding on both sides."""
    ids_BT = torch.tensor([
        [0, 1, 2, 3, 4, 5, 6, 0], [0, 1, 2, 3, 4, 7, 0, 0], [0, 1, 2, 3, 8, 0, 0, 0], [5, 6, 7, 1, 1, 2, 3, 4],
    ])  # fmt: skip
    mask_BT = torch.tensor([
        [0, 1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0], [1] * 8,
    ]).bool()  # fmt: skip
    logps_BK, entropy_BK = _compute_tree_logps(Chain(), ids_BT, mask_BT, 4, entropies)
    rows = Chain()(ids_BT[:, :-1], ids_BT[:, 1:])
    torch.testing.assert_close(logps_BK, rows.log_probs[:, -4:] * mask_BT[:, -4:])
    wanted = rows.entropy[:, -4:] * mask_BT[:, -4:] if entropies else torch.zeros(0)
    torch.testing.assert_close(entropy_BK, wanted)

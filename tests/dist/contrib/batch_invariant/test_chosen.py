"""Log-probabilities of a rollout and of its update where queries choose their keys: the same bits."""

from __future__ import annotations

import pytest
import torch

from tests.dist.contrib.batch_invariant.test_rollouts import BLOCK, Pool, digests, numbers_of
from tests.dist.deepspeed_ranks import json_config, start_engine
from tests.dist.test_generation import build

PROMPT = 41
MODELS = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "doge", "minimax_m3_vl_text")


def bits(rank: int, world_size: int, name: str, ring_size: int, seeded: bool = False) -> set[str]:
    """Return the different bits of the generation, of the update, and of the update of each sample.

    Args:
        seeded: without the mode: the passes merge what each rank has.
    """
    section = {"transport": "reproducible", "block_size": BLOCK}
    engine = start_engine(build(name), json_config(ring_size, 1, 0, ring_attention=section))
    engine.eval()
    ids = torch.randint(1, 50, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    result = numbers_of(engine, ids, torch.no_grad() if seeded else engine.ring.batch_invariant())
    # One query by itself computes what all of them do.
    plain = numbers_of(engine, ids, torch.no_grad()) if ring_size == 1 else result
    assert all(torch.allclose(x, result[0], atol=1e-4) for x in (*result, plain[0]))
    return digests(result)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.day("deepseek_v32")
def test_one_number_for_rollout_and_update(rank_pool: Pool, name: str) -> None:
    result: set[str] = set()
    for ring_size in (1, 2, 4) if name != "deepseek_v32" else (2,):
        result |= set().union(*rank_pool(ring_size).run(bits, name, ring_size))
    assert len(result) == 1


@pytest.mark.night
def test_the_usual_passes_have_other_bits(rank_pool: Pool) -> None:
    assert len(set().union(*rank_pool(2).run(bits, "deepseek_v32", 2, True))) > 1

"""Log-probabilities of encoder-decoders, of a rollout and of its update: the same bits on rings of any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.dist.contrib.batch_invariant.test_rollouts import Pool, digests, numbers_of
from tests.dist.deepspeed_ranks import json_config, start_engine
from tests.dist.test_generation import build

BLOCK, TEXT, BEGUN = 16, 41, 14  # answers begin, and end, inside a block; so do texts
MODELS = ("bart", "t5", "marian", "m2m_100", "blenderbot")


def bits(rank: int, world_size: int, name: str, ring_size: int, padded: bool) -> set[str]:
    """Return the different bits of the generation, of the update, and of the update of each sample."""
    section = {"transport": "reproducible", "block_size": BLOCK}
    model = build(f"{name}/seq2seq-lm")
    engine = start_engine(model, json_config(ring_size, 1, 0, ring_attention=section))
    engine.eval()
    text = -(-TEXT // BLOCK) * BLOCK if padded else TEXT  # of padded texts in whole blocks
    texts_BE = torch.randint(3, 50, (2, text), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([text, text - 7 if padded else text])
    mask_BE = (torch.arange(text) < lengths[:, None]).long()

    def of_rows(rows: Tensor) -> dict[str, Tensor]:
        return {"input_ids": texts_BE[rows], "attention_mask": mask_BE[rows]}

    begun = texts_BE[:, :BEGUN].flip(1)
    result = numbers_of(engine, begun, engine.ring.batch_invariant(), of_rows)
    assert all(torch.allclose(x, result[0], atol=1e-4) for x in result)
    return digests(result)


@pytest.mark.night
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.day("bart-True")
def test_one_number_for_rollout_and_update(rank_pool: Pool, name: str, padded: bool) -> None:
    result: set[str] = set()
    for ring_size in (1, 2, 4) if name != "bart" or not padded else (2,):
        result |= set().union(*rank_pool(ring_size).run(bits, name, ring_size, padded))
    assert len(result) == 1

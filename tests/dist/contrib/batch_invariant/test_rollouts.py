"""Log-probabilities of a rollout and of its update: the same bits, on rings of 1, 2 and 4.

`tools/check_rollouts.py` does it for random models.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ring.errors import RingConfigError
from tests.dist.deepspeed_ranks import json_config, start_engine
from tests.dist.harness import Pool
from tests.dist.test_generation import build

BLOCK, PROMPT, NEW = 16, 77, 5  # generated tokens are in two blocks
MODELS = ("Llama", "gpt-oss", "Mixtral", "qwen3", "gemma3_text", "lfm2")
# Layers that are not softmax attention: what the mode says of them.
REFUSED = {
    "mamba2": "got a layer that calls scan",
    "rwkv": "got a layer that calls scan",
    "qwen3_next": "got linalg_solve_triangular",  # of its kernel
    "kimi_linear": "got a layer that calls scan",
    "deepseek_v3": "got a layer that calls latent_attention",
    "deepseek_v32": "got layers that choose theirs",
}


def bits(rank: int, world_size: int, name: str, ring_size: int, invariant: bool) -> set[str]:
    """Return the different bits of the generation, of the update, and of the update of each sample."""
    section = {"transport": "reproducible", "block_size": BLOCK}
    engine = start_engine(build(name), json_config(ring_size, 1, 0, ring_attention=section))
    engine.eval()
    ids = torch.randint(1, 50, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    result = numbers_of(engine, ids, engine.ring.batch_invariant() if invariant else torch.no_grad())
    assert all(torch.allclose(x, result[0], atol=1e-4) for x in result)
    return digests(result)


def digests(result: list[Tensor]) -> set[str]:
    return {hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest() for x in result}


def numbers_of(engine: Any, ids: Tensor, mode: Any) -> list[Tensor]:
    """Return log-probabilities [B, NEW]: of a generation, of an update, of an update of each sample."""
    torch.manual_seed(2)
    with mode, torch.no_grad():
        output = engine.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=True, top_k=8, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        result, tokens = [engine.ring.generated_logprobs(output)], output.sequences
        first = tokens.shape[1] - NEW - 1
        rows_BS = torch.arange(len(ids)).split(1)
        for batches in ([torch.arange(len(ids))], rows_BS):
            each = []
            for rows in batches:
                batch = engine.ring.shard_batch({"input_ids": tokens[rows], "labels": tokens[rows]})
                numbers = engine.ring.gather(engine.ring.logprobs(engine, batch))
                each.append(numbers[:, first : first + NEW].contiguous())
            result.append(torch.cat(each))
    return result


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.day("Llama")
def test_one_number_for_rollout_and_update(rank_pool: Pool, name: str) -> None:
    result: set[str] = set()
    for ring_size in (1, 2, 4) if name != "Llama" else (1, 2):
        result |= set().union(*rank_pool(ring_size).run(bits, name, ring_size, True))
    assert len(result) == 1


@pytest.mark.night
def test_without_the_mode_there_are_several(rank_pool: Pool) -> None:
    assert len(set().union(*rank_pool(2).run(bits, "Llama", 2, False))) > 1


def refused_layer(rank: int, world_size: int, name: str, ring_size: int) -> str:
    section = {"transport": "reproducible", "block_size": BLOCK}
    engine = start_engine(build(name), json_config(ring_size, 1, 0, ring_attention=section))
    engine.eval()
    with pytest.raises(RingConfigError) as raised, engine.ring.batch_invariant():
        engine.generate(torch.ones(1, PROMPT, dtype=torch.int64), max_new_tokens=NEW, pad_token_id=0)
    return str(raised.value)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.day("mamba2")
def test_other_layers_are_refused_by_name(rank_pool: Pool, name: str) -> None:
    for ring_size in (1, 2) if name != "deepseek_v3" else (2,):  # one rank has keys, no latents
        for text in rank_pool(ring_size).run(refused_layer, name, ring_size):
            assert REFUSED[name] in text


def refused(rank: int, world_size: int) -> str:
    engine = start_engine(build("Llama"), json_config(world_size, 1, 0))
    with pytest.raises(RingConfigError) as raised, engine.ring.batch_invariant():
        pass
    return str(raised.value)


def test_another_transport_is_refused(rank_pool: Pool) -> None:
    for text in rank_pool(2).run(refused):
        assert 'expected "transport": "reproducible", got "ring"' in text

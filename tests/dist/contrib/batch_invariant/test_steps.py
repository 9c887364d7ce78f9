"""Log-probabilities of a rollout and of its update for recurrent layers: the same bits on rings of 1, 2 and 4.

`tools/check_rollouts.py` does it for random models of all families.
"""

from __future__ import annotations

import pytest
import torch

from ds_ring.contrib.batch_invariant import mode
from ds_ring.contrib.batch_invariant.mode import BatchInvariant
from ds_ring.errors import RingConfigError
from tests.dist.contrib.batch_invariant.test_rollouts import BLOCK, NEW, Pool, digests, numbers_of
from tests.dist.deepspeed_ranks import json_config, start_engine
from tests.dist.test_generation import build

PROMPT = 41
MODELS = ("mamba2", "qwen3_next", "lfm2", "mamba", "minimax", "recurrent_gemma", "falcon_h1", "olmo_hybrid")


def bits(rank: int, world_size: int, name: str, ring_size: int, seeded: bool = False) -> set[str]:
    """Return the different bits of the generation, of the update, and of the update of each sample.

    Args:
        seeded: scan over chunks in place of steps, as without the mode.
    """
    section = {"transport": "reproducible", "block_size": BLOCK}
    engine = start_engine(build(name), json_config(ring_size, 1, 0, ring_attention=section))
    engine.eval()
    ids = torch.randint(1, 50, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    mode._MOVES.update({"scan"} if seeded else ())
    try:
        result = numbers_of(engine, ids, BatchInvariant() if seeded else engine.ring.batch_invariant())
        # The steps compute what the scan does.
        with torch.no_grad():
            plain = numbers_of(engine, ids, torch.no_grad()) if ring_size == 1 else result
    finally:
        mode._MOVES.discard("scan")
    assert all(torch.allclose(x, result[0], atol=1e-4) for x in (*result, plain[0]))
    return digests(result)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.day("mamba2")
def test_one_number_for_rollout_and_update(rank_pool: Pool, name: str) -> None:
    result: set[str] = set()
    for ring_size in (1, 2, 4) if name != "mamba2" else (2,):
        result |= set().union(*rank_pool(ring_size).run(bits, name, ring_size))
    assert len(result) == 1


@pytest.mark.night
@pytest.mark.parametrize("name", ["mamba2", "minimax"])
def test_a_scan_over_chunks_has_other_bits(rank_pool: Pool, name: str) -> None:
    assert len(set().union(*rank_pool(2).run(bits, name, 2, True))) > 1


def refused(rank: int, world_size: int, name: str) -> str:
    section = {"transport": "reproducible", "block_size": BLOCK}
    model = build(name)
    if name == "mamba2":
        for module in model.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = (0.0, 0.5)
    engine = start_engine(model, json_config(world_size, 1, 0, ring_attention=section))
    engine.eval()
    extra = {"prefill_chunk_size": 16} if name == "lfm2" else {}
    with pytest.raises(RingConfigError) as raised, engine.ring.batch_invariant():
        engine.generate(torch.ones(1, PROMPT, dtype=torch.int64), max_new_tokens=NEW, pad_token_id=0, **extra)
    return str(raised.value)


REFUSED = {
    "rwkv": "a layer that calls scan",
    "kimi_linear": "a layer that calls latent_attention",
    "mamba2": "time_step_limit (0.0, 0.5)",
    "lfm2": "leave prefill_chunk_size out",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.day("mamba2")
def test_what_has_no_such_bits_is_refused(rank_pool: Pool, name: str) -> None:
    for text in rank_pool(2).run(refused, name):
        assert REFUSED[name] in text

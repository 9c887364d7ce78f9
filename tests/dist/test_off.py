"""`with engine.ring.off():` makes the model plain and local: it generates, evaluates and is saved as without a ring."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.dist.deepspeed_ranks import (
    Size,
    build_batch,
    build_model,
    json_config,
    start_deepspeed,
    start_engine,
    take_step,
    train_alone,
)
from tests.dist.harness import catch_refusal

SIZE = Size(hidden=32, layers=2, tokens=21, samples=2)
PROMPT = torch.arange(1, 8)[None]


def train_generate_save(rank: int, world_size: int, stage: int, folder: str) -> dict[str, Any]:
    deepspeed = start_deepspeed()

    model = build_model(SIZE, "sdpa")
    extra = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    engine = start_engine(model, json_config(2, 2, stage, zero_optimization={"stage": stage, **extra}))
    result: dict[str, Any] = {"losses": []}
    for step in range(3):
        if step == 2:  # off and on again between two steps
            engine.eval()
            with engine.ring.off(), torch.no_grad():
                result["names"] = {part._attn_implementation for part in [engine.module.config]}
                result["ids"] = engine.module.generate(PROMPT, max_new_tokens=12, do_sample=False)
                result["loss"] = float(engine(**build_batch(SIZE)).loss)
            engine.train()
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                state = {name: x.detach().clone() for name, x in engine.module.state_dict().items()}
                if rank == 0:
                    torch.save(state, os.path.join(folder, "state.pt"))
                    engine.module.save_pretrained(os.path.join(folder, "pretrained"), state_dict=dict(state))
            engine.save_16bit_model(folder, "weights.bin")
            result["state"] = state
            with engine.ring.off():
                result["refused"] = catch_refusal(engine, **build_batch(SIZE))
        result["losses"].append(take_step(engine, build_batch(SIZE)))
    return result


@pytest.mark.situation("models", "the model without the ring: generate, export")
@pytest.mark.parametrize("stage", [1, 3], ids=lambda stage: f"zero{stage}")
@pytest.mark.day("zero3")
def test_the_model_is_plain_while_the_ring_is_off(rank_pool: Any, tmp_path: Path, stage: int) -> None:
    results = rank_pool(2).run(train_generate_save, stage, str(tmp_path))
    plain = build_model(SIZE, "sdpa").eval()
    plain.load_state_dict(results[0]["state"])
    expected = plain.generate(PROMPT, max_new_tokens=12, do_sample=False)
    with torch.no_grad():
        loss = float(plain(**build_batch(SIZE)).loss)
    losses = train_alone(SIZE, 3).losses
    for result in results:
        assert result["names"] == {"sdpa"}
        assert result["ids"].tolist() == expected.tolist()
        assert result["loss"] == pytest.approx(loss, rel=1e-6)
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        assert "each rank would train on its own tokens only" in result["refused"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained").eval()
    assert model.config._attn_implementation == "sdpa"
    assert model.generate(PROMPT, max_new_tokens=12, do_sample=False).tolist() == expected.tolist()
    for file in ("weights.bin", "state.pt"):
        saved = torch.load(tmp_path / file)
        for name, x in results[0]["state"].items():
            assert torch.equal(saved[name], x), name

"""Unmodified transformers models of several families on a ring, without DeepSpeed: logits, loss, gradients.

What they may not ask of a ring is tested on one rank, in tests/unit/integrations/test_transformers.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

SAMPLES, TOKENS, VOCABULARY = 2, 45, 61
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED: dict[str, Any] = COMMON | {"num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("Qwen2Config", GROUPED),
    "Mistral": ("MistralConfig", GROUPED | {"sliding_window": None}),
    "GPT-NeoX": ("GPTNeoXConfig", COMMON),
    "Gemma 3": ("Gemma3TextConfig", GROUPED | {"head_dim": 8}),  # its own scale of the scores
    "GPT-2": (  # learned position embeddings
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
        | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
}
CASES = list(zip(FAMILIES, ["zigzag", "striped", "contiguous"] * 2, strict=False))


class Result(NamedTuple):
    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]


def build(family: str, implementation: str) -> Any:
    import transformers

    name, values = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**values)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def whole_batch() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def on_one_process(family: str) -> Result:
    model = build(family, "sdpa")
    output = model(**whole_batch())
    output.loss.backward()
    return Result(output.logits.detach(), output.loss.item(), gradients_of(model))


def on_a_ring(rank: int, world_size: int, family: str, layout: str) -> Result:
    """Gradients are summed by hand here: nobody divides them, so the session is told a divisor of one."""
    from ds_ring.comm.mesh import RingMesh
    from ds_ring.config.section import RingConfig, pattern_from_config
    from ds_ring.integrations.deepspeed.session import RingSession
    from ds_ring.integrations.transformers.attach import attach

    config = RingConfig(ring_size=world_size, layout=layout)
    mesh = RingMesh.from_world(world_size)
    session = RingSession(
        config, mesh, pattern_from_config(config), torch.device("cpu"), gradient_divisor=1.0
    )
    model = build(family, "ds_ring")
    attach(model, session)
    output = model(**session.shard_batch(whole_batch()))
    output.loss.backward()
    gradients = gradients_of(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    loss = session.mean_loss(output.loss).item()
    return Result(session.gather(output.logits.detach()), loss, gradients)


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_family_on_a_ring_equals_one_process(rank_pool, family, layout):
    expected = on_one_process(family)
    for got in rank_pool(2).run(on_a_ring, family, layout):
        assert torch.allclose(got.logits, expected.logits, atol=1e-5)
        assert got.loss == pytest.approx(expected.loss, rel=1e-5)
        assert got.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            error = float((got.gradients[name] - gradient).norm() / gradient.norm())
            assert error < 1e-4, f"gradient of {name}: relative error {error:.3e}"

"""Long-sequence options on a ring against plain one-process training: what tools/check_long.py tabulates.

Owns the models, the options, a step of each on real ranks and on one process, and the difference of both. Tiles are
so small that every rank has many, the last of them short.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.dist.deepspeed_ranks import Run, fit_alone, fit_on_ring, json_config, start_engine

VOCABULARY, TOKENS, SAMPLES = 97, 53, 4
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip

# Tied and untied heads, a bias, a soft cap, scaled logits, experts with their router's loss.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 8, "final_logit_softcapping": 3.0, "sliding_window": 16,
                    "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "granite": {"logits_scaling": 4.0},
    "phi": {},
}  # fmt: skip

OPTIONS: dict[str, dict[str, Any]] = {
    "tiled_loss": {"tiled_loss": 7},
    "tiled_mlp": {"tiled_mlp": 5},
    "offload_checkpoints": {"offload_checkpoints": True},
    "offload_attention": {"offload_attention": True},
    "all": {"tiled_loss": 7, "tiled_mlp": 5, "offload_checkpoints": True, "offload_attention": True},
}


def build(family: str) -> torch.nn.Module:
    """A small model with random weights; the same on every rank."""
    import transformers

    config = transformers.AutoConfig.for_model(family, **(_SIZES | FAMILIES[family]))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():  # norms and biases that are not 1 and 0
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def batch() -> dict[str, Tensor]:
    """Samples with labels here and there: whole tiles are without."""
    ids_BT = torch.randint(1, VOCABULARY, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    labels_BT = ids_BT.clone()
    labels_BT[0, 9:40] = -100
    labels_BT[1, ::3] = -100
    return {"input_ids": ids_BT, "labels": labels_BT}


def step_alone(family: str) -> Run:
    """One process, transformers' own attention and loss, nothing in tiles."""
    return fit_alone(build(family).train(), batch(), 1)


def step_on_ring(
    rank: int, world_size: int, family: str, stage: int, option: str, ring: int, checkpointing: bool = False
) -> Run:
    """The same through `ds_ring.initialize`, with an option."""
    section = {"long_sequence": OPTIONS.get(option, option)}
    model = build(family).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    config = json_config(ring, SAMPLES * ring // world_size, stage, ring_attention=section)
    return fit_on_ring(rank, start_engine(model, config), batch(), 1)

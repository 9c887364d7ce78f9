"""The options of "long_sequence": gradients against one process, tensors that never exist, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist.deepspeed_ranks import Run, json_config, start_engine
from tests.dist.harness import catch_refusals, check_texts
from tests.dist.long_table import step_alone, step_on_ring
from tests.dist.training_table import errors

# Family, ZeRO stage, option, whether layers are checkpointed: each option alone, every stage, every family.
CELLS = [
    ("llama", 0, "all", False),
    ("llama", 2, "tiled_mlp", True),
    ("llama", 3, "offload_checkpoints", False),
    ("qwen3", 1, "all", False),
    ("gemma3_text", 1, "offload_attention", True),
    ("gemma3_text", 3, "tiled_loss", True),
    ("mixtral", 3, "all", False),
    ("granite", 3, "tiled_loss", False),
    ("phi", 2, "all", False),
]
MORE_CELLS = [
    ("qwen3", 3, "all", False),
    ("qwen3", 0, "offload_attention", False),
    ("gemma3_text", 2, "all", False),
    ("mixtral", 0, "tiled_mlp", False),
]


def steps(rank: int, world_size: int, cells: list[Any]) -> list[Run]:
    return [
        step_on_ring(rank, world_size, family, stage, option, world_size, checkpointing)
        for family, stage, option, checkpointing in cells
    ]


@pytest.mark.parametrize(
    "cells", [CELLS, pytest.param(MORE_CELLS, marks=pytest.mark.night)], ids=["few", "more"]
)
def test_gradients_are_those_of_one_process(rank_pool: Any, cells: list[Any]) -> None:
    outcome = rank_pool(2).run(steps, cells)
    alone = {family: step_alone(family) for family, *_ in cells}
    for cell, *runs in zip(cells, *outcome, strict=True):
        loss, gradient = errors(runs, alone[cell[0]])
        assert loss < 1e-6, cell
        assert gradient < 1e-5, cell


# --- what never exists -------------------------------------------------------------------------------

LOCAL, HIDDEN, INTERMEDIATE, VOCABULARY = 512, 16, 256, 512  # everything but tokens x wide is smaller


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outcome = result if isinstance(result, (tuple, list)) else [result]
        sizes = [x.numel() for x in outcome if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def largest(rank: int, world_size: int, long_sequence: Any) -> int:
    """Of a training step of a Llama."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096,
    )  # fmt: skip
    section = {"long_sequence": long_sequence, "pattern": {"window": 32}, "layout": "contiguous"}
    model = transformers.LlamaForCausalLM(config)
    engine = start_engine(model, json_config(2, 1, 0, ring_attention=section))
    ids = torch.arange(2 * LOCAL)[None] % VOCABULARY
    local = engine.ring.shard_batch({"input_ids": ids, "labels": ids})
    with Largest() as seen:
        engine.backward(engine(**local).loss)
    return seen.elements


def test_no_tensor_of_tokens_by_vocabulary_or_intermediate_exists(rank_pool: Any) -> None:
    pool = rank_pool(2)
    assert pool.run(largest, "off") == [LOCAL * VOCABULARY] * 2
    assert pool.run(largest, {"tiled_loss": 32}) == [LOCAL * INTERMEDIATE] * 2
    both = pool.run(largest, {"tiled_loss": 32, "tiled_mlp": 32, "offload_checkpoints": True})
    assert max(both) < LOCAL * INTERMEDIATE // 2, both  # all parameters, in one buffer of DeepSpeed's


# --- refusals ----------------------------------------------------------------------------------------


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What each wrong use says."""
    import transformers

    def engine_of(part: Any, kind: str = "LlamaForCausalLM", **extra: Any) -> Any:
        family = kind.removesuffix("ForCausalLM").removesuffix("Model")
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
        config = getattr(transformers, f"{family}Config")(**sizes, **extra)
        model = getattr(transformers, kind)(config)
        return start_engine(model, json_config(2, 1, 0, ring_attention={"long_sequence": part}))

    llama = {"intermediate_size": 32}
    ids = torch.arange(16)[None]
    engine = engine_of({"tiled_loss": 4}, **llama)
    local = engine.ring.shard_batch({"input_ids": ids, "labels": ids})
    logits = engine(**local).logits
    opt = {"ffn_dim": 32, "word_embed_proj_dim": 16}
    outcome = catch_refusals(
        {
            "no head": lambda: engine_of({"tiled_loss": True}, "LlamaModel", **llama),
            "no MLP": lambda: engine_of({"tiled_mlp": True}, "OPTForCausalLM", **opt),
            "dropout": lambda: engine_of({"tiled_mlp": True}, "GPT2Model"),
            "sum": lambda: logits.sum(),
            "argmax": lambda: torch.argmax(logits, -1),
            "a part": lambda: logits[:, -1],
        }
    )
    scaled = (logits[:, 0:, :].float() * 2.0 / 4).tanh()
    assert list(scaled.shape) == [1, 8, 64]
    assert abs(engine.ring.loss(logits, local).mean_loss - engine.ring.mean_loss(engine(**local).loss)) < 1e-6
    engine.eval()
    with torch.no_grad():
        inputs = {k: x for k, x in local.items() if "label" not in k and k != "num_items_in_batch"}
        assert type(engine(**inputs).logits) is torch.Tensor
    return outcome


def test_what_is_refused_and_what_is_not(rank_pool: Any) -> None:
    words = {
        "no head": "LlamaModel: long_sequence.tiled_loss: it has no language model's head",
        "no MLP": "long_sequence.tiled_mlp: expected MLPs",
        "dropout": "GPT2MLP has a dropout",
        "sum": "given to the loss, got sum: they are computed in tiles",
        "argmax": "given to the loss, got argmax: they are computed in tiles",
        "a part": "got logits[",
    }
    check_texts(rank_pool(2).run(refused), words)

"""Nothing of transformers' own models is watched: their modules are known, and cost nothing."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ring.errors import RingConfigError
from ds_ring.models.module_watch import ModuleWatch
from ds_ring.models.wrappers import WrappedModel
from ds_ring_launcher.check.small_model import build, read_config, shrink

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gemma3n_text",
    "gpt_oss", "gpt2", "gpt_neox", "phi3", "mixtral", "deepseek_v2", "deepseek_v3", "olmo3",
    "cohere2", "falcon", "bloom", "mpt", "opt", "mamba", "mamba2", "jamba", "bamba", "qwen3_next",
    "recurrent_gemma", "minimax", "rwkv", "xlstm", "zamba2", "lfm2", "granitemoehybrid",
    "nemotron_h", "llama4_text", "modernbert-decoder", "doge", "stablelm", "xglm", "codegen",
)  # fmt: skip


def watched(model: Any) -> list[str]:
    watch: Any = ModuleWatch.__new__(ModuleWatch)
    watch._models, watch._engine = [model], SimpleNamespace(module=model)
    return [name for name, _, _ in watch._watched()]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_module_of_transformers_is_watched(family: str) -> None:
    assert watched(build(shrink(read_config(family), 40, 2, {}), "causal-lm", 0)) == []


@pytest.mark.situation(
    "modules", "LoRA of peft in a Llama, and a torch.nn module that the model does not have."
)
def test_what_a_user_adds_is_watched() -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = build(shrink(read_config("llama"), 40, 2, {}), "causal-lm", 0)
    tuned = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"]))
    assert watched(tuned.base_model.model) == []
    inner = tuned.base_model.model.model
    inner.layers[0].mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.BatchNorm1d(4))
    inner.layers[1].register_forward_hook(lambda *_: None)
    torch.nn.utils.parametrizations.weight_norm(inner.layers[1].mlp.up_proj)
    assert watched(tuned.base_model.model) == ["model.layers.0.mlp.2", "model.layers.1"]


class OneRank:
    """A session of a rank with 4 tokens of a sequence."""

    needs, device, off = SimpleNamespace(real_tokens=False), torch.device("cpu"), nullcontext
    batches = SimpleNamespace(is_off=False, current=SimpleNamespace(local_tokens=4, whole=None))


class Counting(nn.Module):
    """Count the passes of a module."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes, self.passes = mixes, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x - x.mean(dim=1, keepdim=True) if self.mixes else x * 2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mixes", [True, False])
def test_a_compiled_wrapper_is_looked_at_once_in_each_mode_and_refused_each_time(
    mixes: bool, training: bool
) -> None:
    """(A script that went on after the error trained on what each rank made of its own tokens.)"""
    module = Counting(mixes).train(training)
    wrapper = WrappedModel(module, OneRank(), [])  # type: ignore[arg-type]
    engine = SimpleNamespace(is_compiled=True, module=module)
    for _ in range(2):
        with pytest.raises(RingConfigError, match="do not compile it") if mixes else nullcontext():
            wrapper.before_forward(engine, (torch.zeros(2, 4, 3),), {})
    assert module.passes == 1 + mixes

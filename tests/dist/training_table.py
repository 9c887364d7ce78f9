"""Training variants on a ring against one process: what tools/check_training.py tabulates, and tests run a part of.

Owns the variants, a run of each on real ranks, the plain run on one process, and the difference of both. SGD, and no
clipping but where that is the variant: Adam and clipping hide a wrong gradient scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.dist.deepspeed_ranks import (
    Run,
    Size,
    build_batch,
    build_model,
    fit_alone,
    fit_on_ring,
    json_config,
    start_engine,
)
from tests.reference import worst

SIZE = Size(hidden=32, layers=2, tokens=97, samples=8)  # every sample has labels
STEPS = 3
CLIP = 0.1  # a quarter of the norm of the first gradients

# Ranks of the world, ranks of a sequence, and more of the section.
MESHES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "ring 2": (2, 2, {}),
    "ring 2 x data 2": (4, 2, {}),
    "ring 2 x Ulysses 2": (4, 4, {"ulysses_size": 2}),
}


class Variant(NamedTuple):
    """What is added to the JSON, and done to the model; how much rounding explains."""

    changes: dict[str, Any] = {}  # noqa: RUF012
    model: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model
    zero: dict[str, Any] = {}  # of "zero_optimization"  # noqa: RUF012
    least_stage: int = 0
    errors: tuple[float, float] = (1e-5, 1e-4)  # of losses, of gradients
    micro_batches: int = 1


def reentrant(model: torch.nn.Module) -> torch.nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


def not_reentrant(model: torch.nn.Module) -> torch.nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def by_deepspeed(model: torch.nn.Module) -> torch.nn.Module:
    """DeepSpeed's own checkpointing where transformers calls torch's."""
    import deepspeed

    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # two minutes of compiling
        deepspeed.init_distributed("gloo")
        deepspeed.checkpointing.configure(None, deepspeed_config=None, partition_activations=False)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = deepspeed.checkpointing.checkpoint
        model.enable_input_require_grads()
    return model


def with_lora(model: torch.nn.Module) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )


def divided(model: torch.nn.Module) -> torch.nn.Module:
    """Parameters that are divided before `initialize` sees them, as models made under `zero.Init` are."""
    import deepspeed

    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # two minutes of compiling
        deepspeed.init_distributed("gloo")
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
        assert all(parameter.numel() == 0 for parameter in model.parameters())
    return model


VARIANTS = {
    "plain": Variant(),
    "accumulation 4": Variant({"gradient_accumulation_steps": 4}, micro_batches=4),
    "bf16": Variant({"bf16": {"enabled": True}}, errors=(1e-2, 5e-2)),
    "offload": Variant(
        {"zero_force_ds_cpu_optimizer": False}, zero={"offload_optimizer": {"device": "cpu"}}, least_stage=1
    ),
    "checkpoint reentrant": Variant(model=reentrant),
    "checkpoint not reentrant": Variant(model=not_reentrant),
    "checkpoint by DeepSpeed": Variant(model=by_deepspeed),
    "clip": Variant({"gradient_clipping": CLIP}),
    "LoRA": Variant(model=with_lora),
    "zero.Init": Variant(model=divided, least_stage=3),
}


def train_alone(name: str) -> Run:
    """One process, torch's own loop, transformers' attention and loss."""
    variant, model = VARIANTS[name], build_model(SIZE, "sdpa")
    if name == "LoRA":
        model = variant.model(model)
    clip = variant.changes.get("gradient_clipping", 0.0)
    return fit_alone(model, build_batch(SIZE), STEPS, variant.micro_batches, clip)


def train_on_ring(rank: int, world_size: int, name: str, stage: int, mesh: str) -> Run:
    """The same through `ds_ring.initialize`, on the ranks of a mesh."""
    variant, (_, sequence, section) = VARIANTS[name], MESHES[mesh]
    samples = SIZE.samples * sequence // world_size // variant.micro_batches
    config = json_config(sequence, samples, stage, ring_attention=dict(section), **variant.changes)
    offload = {"offload_param": {"device": "cpu"}} if stage == 3 and variant.zero else {}
    config["zero_optimization"] |= {**variant.zero, **offload}
    engine = start_engine(variant.model(build_model(SIZE, "sdpa")), config)
    return fit_on_ring(rank, engine, build_batch(SIZE), STEPS)


def errors(runs: list[Run], expected: Run) -> tuple[float, float]:
    """The largest relative errors: of a loss on any rank, of a parameter's gradient by its norm."""
    assert runs[0].gradients.keys() == expected.gradients.keys()
    losses = [
        abs(item - second) / abs(second)
        for run in runs
        for item, second in zip(run.losses, expected.losses, strict=True)
    ]
    typical = torch.stack([gradient.norm() for gradient in expected.gradients.values()]).mean()
    gradients = [
        float((runs[0].gradients[key] - gradient).norm() / gradient.norm().clamp_min(1e-2 * typical))
        for key, gradient in expected.gradients.items()
    ]
    return worst(losses), worst(gradients)

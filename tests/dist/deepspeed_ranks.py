"""What the ranks of the DeepSpeed tests do, and the plain one-process run that they are compared with.

Owns tiny models, their batches and the training loops; which cases there are and what must hold stands in
the tests. Rank functions are called by the harness as fn(rank, world_size, ...).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.machine import skip_without

VOCABULARY = 61
LEARNING_RATE = 0.1

# Of `generate`, greedy and of a known length.
GENERATION: dict[str, Any] = {
    "max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 1,
}  # fmt: skip

Batch = dict[str, Tensor]


class Size(NamedTuple):
    """A model and its batch."""

    hidden: int
    layers: int
    tokens: int
    samples: int  # of the whole world


class Run(NamedTuple):
    """What training leaves behind: the logged loss of every step, and the gradients of the first."""

    losses: list[float]
    gradients: dict[str, Tensor]


def build_model(size: Size, implementation: str, **changes: Any) -> torch.nn.Module:
    """A Llama with random weights, grouped-query attention and no dropout; the same on every rank."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        **changes,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def build_latent_model(size: Size, implementation: str = "sdpa", **changes: Any) -> torch.nn.Module:
    """A DeepSeek V3 without experts, with random weights; the same on every rank."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    config = DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=size.hidden, intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers, first_k_dense_replace=size.layers, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4,
        v_head_dim=5, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def build_bart(size: Size, implementation: str = "sdpa", **changes: Any) -> torch.nn.Module:
    """A BART of as many layers in its encoder as in its decoder; the same on every rank."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCABULARY, d_model=size.hidden, encoder_layers=size.layers, decoder_layers=size.layers,
        encoder_ffn_dim=2 * size.hidden, decoder_ffn_dim=2 * size.hidden, encoder_attention_heads=4,
        decoder_attention_heads=4, max_position_embeddings=128, dropout=0.0, eos_token_id=2,
        forced_eos_token_id=2, attn_implementation=implementation, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    return BartForConditionalGeneration(config).train()


def build_t5(size: Size, implementation: str = "sdpa", **changes: Any) -> torch.nn.Module:
    """A T5 with large biases of distances; the same on every rank."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=size.hidden, d_kv=size.hidden // 4, d_ff=2 * size.hidden,
        num_layers=size.layers, num_heads=4, relative_attention_num_buckets=12,
        relative_attention_max_distance=20, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
        attn_implementation=implementation, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.mul_(5)
    return model


def build_pairs(size: Size, answers: int, padded: bool) -> dict[str, Tensor]:
    """Texts of `size.tokens` tokens, some with padding on the right, and answers of so many."""
    generator = torch.Generator().manual_seed(1)
    ids_BE = torch.randint(3, VOCABULARY, (size.samples, size.tokens), generator=generator)
    labels_BD = torch.randint(3, VOCABULARY, (size.samples, answers), generator=generator)
    mask_BE = torch.ones_like(ids_BE)
    for sample in range(size.samples):
        labels_BD[sample, answers - 3 * sample :] = -100
        if padded:
            mask_BE[sample, size.tokens - 7 * sample :] = 0
    return {"input_ids": ids_BE.masked_fill(mask_BE == 0, 1), "labels": labels_BD, "attention_mask": mask_BE}


def build_batch(size: Size) -> dict[str, Tensor]:
    """Samples whose labelled tokens differ in number from shard to shard, and with padding on the right."""
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(1, VOCABULARY, (size.samples, size.tokens), generator=generator)
    labels_BT, mask_BT = ids_BT.clone(), torch.ones_like(ids_BT)
    for sample in range(size.samples):
        labels_BT[sample, : size.tokens * sample // (size.samples + 1)] = -100
        mask_BT[sample, size.tokens - 3 * sample :] = 0
    labels_BT[mask_BT == 0] = -100
    return {"input_ids": ids_BT, "labels": labels_BT, "attention_mask": mask_BT}


def train_alone(
    size: Size, steps: int, micro_batches: int = 1, batch: Batch | None = None, implementation: str = "sdpa",
    build: Callable[..., torch.nn.Module] = build_model,
) -> Run:  # fmt: skip
    """Plain PyTorch: the whole batch on one process, transformers' own attention and loss."""
    batch = build_batch(size) if batch is None else batch
    return fit_alone(build(size, implementation), batch, steps, micro_batches)


def fit_alone(
    model: torch.nn.Module, batch: Batch, steps: int, micro_batches: int = 1, clip: float = 0.0
) -> Run:
    """Train a model with torch's own loop; a part of its parameters may be frozen."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parts = [
        {key: value.chunk(micro_batches)[part] for key, value in batch.items()}
        for part in range(micro_batches)
    ]
    losses, gradients = list[float](), dict[str, Tensor]()
    for _ in range(steps):
        model.zero_grad()
        values = [model(**part).loss / micro_batches for part in parts]
        for value in values:
            value.backward()
        reached = {name: p.grad for name, p in trained.items() if p.grad is not None}
        gradients = gradients or {name: grad.clone() for name, grad in reached.items()}
        if clip:
            torch.nn.utils.clip_grad_norm_(trained.values(), clip)
        with torch.no_grad():
            for name, grad in reached.items():
                trained[name] -= LEARNING_RATE * grad
        losses.append(sum(float(value.detach()) for value in values))
    return Run(losses, gradients)


def train_by_sgd(
    parameters: Iterable[torch.nn.Parameter], loss_of: Callable[[int], Tensor], steps: int,
    rate: float = LEARNING_RATE,
) -> list[float]:  # fmt: skip
    """Take steps of plain SGD on one process, and return the loss of each."""
    sgd, losses = torch.optim.SGD(parameters, lr=rate), []
    for step in range(steps):
        loss = loss_of(step)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(float(loss.detach()))
    return losses


@contextmanager
def listen(logger: str = "ds_ring") -> Iterator[list[str]]:
    """Collect what is logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(logger).removeHandler(handler)


def start_deepspeed() -> Any:
    """DeepSpeed as in a new process: the harness has removed the groups that it remembers."""
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.utils.logger.setLevel(logging.ERROR)
    getattr(groups, "_release_process_group_references", lambda: None)()  # not before 0.19
    return deepspeed


def json_config(ring_size: int, samples_per_replica: int, stage: int, **changes: Any) -> dict[str, Any]:
    """A DeepSpeed configuration that hides no wrong scale: no clipping."""
    return {
        "train_micro_batch_size_per_gpu": samples_per_replica,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "sequence_parallel_size": ring_size,
        "ring_attention": {},
    } | changes


def train_on_ring(
    rank: int,
    world_size: int,
    size: Size,
    config: dict[str, Any],
    steps: int,
    wrong_scale: float = 1.0,
    checkpointing: bool = False,
    batch: Batch | None = None,
    build: Callable[..., torch.nn.Module] = build_model,
) -> Run:
    """The same training through `ds_ring.initialize`, in an ordinary DeepSpeed loop."""
    skip_without(*({"fp16", "bf16"} & config.keys()))
    model = build(size, "sdpa")  # ds_ring.initialize gives it the ring's attention
    if checkpointing:
        model.gradient_checkpointing_enable()
    whole = build_batch(size) if batch is None else batch
    return fit_on_ring(rank, start_engine(model, config), whole, steps, wrong_scale)


def fit_on_ring(rank: int, engine: Any, batch: Batch, steps: int, wrong_scale: float = 1.0) -> Run:
    """Train an engine with an ordinary loop; rank 0 has the gradients of the first step."""
    import deepspeed

    micro_batches = engine.gradient_accumulation_steps()
    parts = [_mine(batch, engine.ring.run_mesh, part, micro_batches) for part in range(micro_batches)]
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    losses, gradients = list[float](), dict[str, Tensor]()
    for _ in range(steps):
        logged = 0.0
        for part in parts:
            loss = engine(**engine.ring.shard_batch(part)).loss
            engine.backward(loss * wrong_scale)
            logged += float(engine.ring.mean_loss(loss)) / micro_batches
            if not gradients and engine.is_gradient_accumulation_boundary():
                scale = getattr(engine.optimizer, "loss_scale", 1.0)
                gradients = {name: full_gradient(deepspeed, p) / scale for name, p in trained.items()}
            engine.step()
        losses.append(logged)
    return Run(losses, gradients if rank == 0 else {})


def gradient_errors(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], least: float = 0.0
) -> dict[str, float]:
    """The relative error of each gradient by its norm; those below `least` of the largest norm are rounding."""
    assert got.keys() == want.keys()
    floor = least * max(float(x.norm()) for x in want.values())
    return {name: float((got[name] - x).norm() / x.norm().clamp(min=floor)) for name, x in want.items()}


def check_gradients(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], bound: float, least: float = 0.0
) -> None:
    """Each gradient by itself: an average over parameters would hide a wrong one."""
    for name, error in gradient_errors(got, want, least).items():
        assert error < bound, f"gradient of {name}: relative error {error:.3e}"


def start_engine(model: torch.nn.Module, config: dict[str, Any], rate: float = LEARNING_RATE) -> Any:
    """An engine of `ds_ring.initialize` that trains by plain SGD what is not frozen, as in a new process."""
    start_deepspeed()
    import ds_ring

    sgd = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=rate)
    return ds_ring.initialize(model=model, optimizer=sgd, config=config)[0]


def take_step(engine: Any, batch: Batch) -> float:
    """The logged loss of a training step with this replica's batch."""
    loss = engine(**engine.ring.shard_batch(batch)).loss
    engine.backward(loss)
    engine.step()
    return float(engine.ring.mean_loss(loss))


def full_gradient(deepspeed: Any, parameter: torch.nn.Parameter) -> Tensor:
    """The whole averaged gradient, at any ZeRO stage, times the loss scale of fp16. Collective."""
    gradient = deepspeed.utils.safe_get_full_grad(parameter)
    assert gradient is not None, "no gradient"
    return gradient.detach().float().clone()


def _mine(whole: dict[str, Tensor], mesh: Any, part: int, micro_batches: int) -> dict[str, Tensor]:
    """This replica's samples of one micro-batch of the world's batch."""
    return {
        key: value.chunk(micro_batches)[part].chunk(mesh.data_size)[mesh.data_rank]
        for key, value in whole.items()
    }

"""DeepSpeed's other features beside a ring, one row each: exact, or refused by name, by us or by DeepSpeed itself."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_ring
from tests.dist.deepspeed_ranks import (
    Size,
    build_batch,
    build_model,
    json_config,
    start_deepspeed,
    start_engine,
    train_alone,
    train_on_ring,
)
from tests.dist.harness import Failure, catch_failure, catch_refusal
from tests.dist.test_deepspeed_parity import check_parity

SIZE = Size(hidden=32, layers=2, tokens=21, samples=2)
OURS = "RingConfigError"
THEIRS = "DeepSpeedConfigError"

# What is added to the JSON, who refuses it, and in which words.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "AutoTP": ({"tensor_parallel": {"autotp_size": 2}}, OURS,
        "tensor_parallel.autotp_size: expected at most 1"),
    "AutoEP": ({"expert_parallel": {"autoep_size": 2}}, OURS,
        "expert_parallel.autoep_size: expected at most 1"),
    "hybrid engine": ({"hybrid_engine": {"enabled": True}}, OURS, "hybrid_engine.enabled"),
    "random-LTD": ({"data_efficiency": {"enabled": True}}, OURS, "data_efficiency.enabled.*random-LTD"),
    "curriculum": ({"curriculum_learning": {"enabled": True}}, OURS, "other samples"),
    "AutoSP": ({"compile": {"deepcompile": True, "passes": ["autosp"]}}, OURS, "it would shard twice"),
    "data_parallel_size": ({"data_parallel_size": 1}, OURS, "data_parallel_size: expected no such key"),
    "predivided gradients at ZeRO 3": ({"zero_optimization": {"stage": 3}, "gradient_predivide_factor": 2.0},
        OURS, "gradient_predivide_factor: expected 1.0 at ZeRO 3"),
    "auto": ({"steps_per_print": "auto"}, OURS, "steps_per_print: got"),
    "sparse attention": ({"sparse_attention": {"mode": "fixed"}}, THEIRS,
        "Sparse Attention has been removed"),
    "compression": ({"compression_training": {}}, THEIRS, "compression library has been removed"),
    "MiCS": ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, THEIRS, "MiCS"),
}  # fmt: skip


def sharded_by_autotp(model: torch.nn.Module) -> None:
    from deepspeed.module_inject.layers import LinearLayer

    model.lm_head = LinearLayer(model.lm_head, mp_group=None)


def mixture_of_deepspeed(model: torch.nn.Module) -> None:
    from deepspeed.moe.layer import MoE

    model.model.layers[0].mlp = MoE.__new__(MoE)
    torch.nn.Module.__init__(model.model.layers[0].mlp)


def prompt_tuned(model: torch.nn.Module) -> None:
    """A part that is one; such a model is not asked for its hooks, since it is refused by its class."""
    peft = pytest.importorskip("peft")
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model.tuned = peft.get_peft_model(build_model(SIZE, "sdpa"), prompts)


MODELS = {
    "peft's virtual tokens": (prompt_tuned, "got a PeftModelForCausalLM with PromptTuningConfig.*use LoRA"),
    "AutoTP's layers": (sharded_by_autotp, "got a TensorParallel_Layer of deepspeed.module_inject.layers"),
    "DeepSpeed's MoE": (mixture_of_deepspeed, "got a MoE of deepspeed.moe.layer"),
}


def error_of(config: dict[str, Any], change: Any = lambda model: None) -> Failure:
    start_deepspeed()
    model = build_model(SIZE, "sdpa")
    change(model)
    return catch_failure(start_engine, model, config)


def all_refused(rank: int, world_size: int) -> dict[str, Failure]:
    config = json_config(2, 2, 1)
    result = {name: error_of(config | copy.deepcopy(extra)) for name, (extra, _, _) in REFUSED.items()}
    result |= {name: error_of(config, change) for name, (change, _) in MODELS.items()}

    from deepspeed.runtime.tensor_parallel import init_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def of_ulysses() -> None:
        """What UlyssesSPAttentionHF.register_with_transformers leaves behind (it wants flash attention or a group)."""

    of_ulysses.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    try:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = of_ulysses
        result["Ulysses"] = error_of(config)
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        init_utils.record_tp_model_init_args(2, torch.float32, None, None)
        result["tp_model_init"] = error_of(config)
    finally:
        init_utils._TP_MODEL_INIT_ARGS = None
    result["nothing of it"] = error_of(config)
    return result


def test_what_would_not_be_exact_is_refused_by_name(rank_pool: Any) -> None:
    rows = {name: row[1:] for name, row in REFUSED.items()}
    rows |= {name: (OURS, words) for name, (_, words) in MODELS.items()}
    rows |= {
        "Ulysses": (OURS, "'sdpa' is DeepSpeed's Ulysses.*set ulysses_size in the section"),
        "tp_model_init": (OURS, "deepspeed.tp_model_init"),
        "nothing of it": ("", "^None$"),
    }
    for result in rank_pool(2).run(all_refused, timeout_s=120):
        assert result.keys() == rows.keys()
        for name, (error, words) in rows.items():
            assert result[name].error == error, (name, result[name])
            assert re.search(words, result[name].text), (name, result[name])


EXACT: dict[str, tuple[int, dict[str, Any]]] = {
    "hpZ": (3, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}),
    "profilers": (0, {"flops_profiler": {"enabled": True, "detailed": False}, "wall_clock_breakdown": True}),
    "buckets": (2, {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 500}}),
    "float32 sums": (1, {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}),
    "auto": (
        1,
        {"train_batch_size": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}},
    ),
}


@pytest.mark.day("hpZ", "auto")
@pytest.mark.parametrize("feature", EXACT)
def test_what_is_exact(rank_pool: Any, feature: str) -> None:
    stage, changes = EXACT[feature]
    config = json_config(2, SIZE.samples, stage, **changes)
    check_parity(rank_pool(2).run(train_on_ring, SIZE, config, 2, timeout_s=60), train_alone(SIZE, 2))


def direct_backward(rank: int, world_size: int, stage: int, steps: int) -> tuple[str, float]:
    """`loss.backward()` in place of `engine.backward(loss)`: the error, or how much a weight changed."""
    model = build_model(SIZE, "sdpa")
    engine = start_engine(model, json_config(2, 2, stage, gradient_accumulation_steps=steps))
    batch = engine.ring.shard_batch(build_batch(SIZE))

    def train() -> None:
        for _ in range(steps):
            engine(**batch).loss.backward()
            engine.step()

    return catch_refusal(train), float(
        (model.lm_head.weight - build_model(SIZE, "sdpa").lm_head.weight).norm()
    )


def test_a_direct_backward_is_exact_or_refused(rank_pool: Any) -> None:
    alone = build_model(SIZE, "sdpa")
    alone(**build_batch(SIZE)).loss.backward()
    expected = 0.1 * float(alone.lm_head.weight.grad.norm())
    for text, change in rank_pool(2).run(direct_backward, 1, 1):
        assert not text and change == pytest.approx(expected, rel=1e-4)
    for stage in (1, 2):
        for text, _ in rank_pool(2).run(direct_backward, stage, 2):
            assert "expected engine.backward(loss), got a direct call" in text


def weighted_by_tokens(rank: int, world_size: int) -> tuple[list[str], Tensor]:
    """Refusals of an own num_items_in_batch; a step whose micro-batches are weighted by their tokens."""
    model = build_model(SIZE, "sdpa")
    engine = start_engine(model, json_config(2, 2, 1, gradient_accumulation_steps=2))
    batches = list(map(engine.ring.shard_batch, uneven_batches()))
    texts = [
        catch_refusal(
            engine.ring.shard_batch, uneven_batches()[0] | {"num_items_in_batch": torch.tensor(40)}
        ),
        catch_refusal(engine.ring.shard_batch, uneven_batches()[0] | {"num_items_in_batch": 40}),
        catch_refusal(engine, **(batches[0] | {"num_items_in_batch": torch.tensor(40)})),
        catch_refusal(engine, **(batches[0] | {"num_items_in_batch": 40})),
    ]
    items = [batch["num_items_in_batch"] for batch in batches]
    for batch, own in zip(batches, items, strict=True):
        engine.backward(engine(**batch).loss * 2 * own / sum(items))
        engine.step()
    return texts, model.lm_head.weight.detach().clone()


def uneven_batches() -> list[dict[str, Tensor]]:
    first, second = build_batch(SIZE), build_batch(SIZE)
    labels = second["labels"].clone()
    labels[:, 5:] = -100
    return [first, second | {"labels": labels}]


def test_an_own_number_of_tokens_is_refused_with_what_serves_instead(rank_pool: Any) -> None:
    """(The batch's was taken for a tensor of tokens; the model's call divided by it on each rank: 1 / P.)"""
    alone = build_model(SIZE, "sdpa")
    count = sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in uneven_batches())
    for batch in uneven_batches():
        alone(**batch, num_items_in_batch=count).loss.backward()
    expected = alone.lm_head.weight - 0.1 * alone.lm_head.weight.grad
    for texts, weight in rank_pool(2).run(weighted_by_tokens):
        for text in texts:
            assert "multiply each loss by steps * n / (the sum of n over the step)" in text, text
            assert "num_items_in_batch" in text and "got " in text
        assert torch.allclose(weight, expected, atol=1e-6)


def optimizer_on_rank_0(rank: int, world_size: int) -> str:
    start_deepspeed()
    model = build_model(SIZE, "sdpa")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1) if rank == 0 else None
    return catch_refusal(ds_ring.initialize, model=model, optimizer=sgd, config=json_config(2, 2, 1))


def test_ranks_of_which_one_has_an_optimizer_all_stop(rank_pool: Any) -> None:
    for text in rank_pool(2).run(optimizer_on_rank_0):
        assert text.startswith("RingMismatchError")
        assert 'optimizer=: "SGD" on rank 0, "NoneType" on rank 1' in text


# --- engines without an optimizer -------------------------------------------------------------------


def evaluate(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    start_deepspeed()
    engine = ds_ring.initialize(model=build_model(SIZE, "sdpa"), config=json_config(2, 2, stage))[0]
    engine.eval()
    batch = engine.ring.shard_batch(build_batch(SIZE))
    with torch.no_grad():
        output = engine(**batch)
    errors = {}
    for name, call in {
        "backward": lambda: engine.backward(output.loss),
        "step": lambda: engine.step(),
        "save": lambda: engine.save_checkpoint("nowhere") if stage == 3 else engine.backward(output.loss),
    }.items():
        errors[name] = catch_refusal(call)
    loss = float(engine.ring.mean_loss(output.loss))
    return {"loss": loss, "logits": engine.ring.gather(output.logits), "errors": errors}


@pytest.mark.parametrize("stage", [0, 1, 2, 3], ids=lambda stage: f"zero{stage}")
def test_an_engine_without_an_optimizer_evaluates_like_one_process(rank_pool: Any, stage: int) -> None:
    batch = build_batch(SIZE)
    with torch.no_grad():
        expected = build_model(SIZE, "sdpa")(**batch)
    real = batch["attention_mask"].bool()
    for result in rank_pool(2).run(evaluate, stage):
        assert result["loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
        assert torch.allclose(result["logits"][real], expected.logits[real], atol=1e-5)
        assert result["errors"].keys() == {"backward", "step", "save"}
        assert all('add {"optimizer"' in text for text in result["errors"].values())

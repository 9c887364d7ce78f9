"""What some families need of the whole sequence beside attention, on 2 ranks against one process.

Queries scaled by their place in the sequence (Llama 4, its layers computed twice), the router's load balancing loss (its gradient was up to 1.3 % off), the token that a classifier pools (it was
another one on each rank), the positions of RoBERTa (they were overwritten: 95 % off), and the ways out that
refusals name. Rotary embeddings are in test_rotary.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.harness import RankPool

Pool = Callable[[int], RankPool]

SAMPLES, TOKENS, VOCABULARY = 3, 45, 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 1,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
ROUTED = GROUPED | {"output_router_logits": True, "router_aux_loss_coef": 0.5}
BERT = SIZES | {
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mixtral": ("CausalLM", "MixtralConfig", ROUTED | {"num_local_experts": 4, "sliding_window": None}),
    "Olmoe": ("CausalLM", "OlmoeConfig", ROUTED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3 MoE": ("CausalLM", "Qwen3MoeConfig",
        ROUTED | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "Granite MoE": ("CausalLM", "GraniteMoeConfig",
        ROUTED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Llama classifier": ("SequenceClassification", "LlamaConfig", GROUPED | {"num_labels": 3}),
    "Qwen2 reward": ("SequenceClassification", "Qwen2Config", GROUPED | {"num_labels": 1}),
    "Llama 4": (
        "CausalLM",
        "Llama4TextConfig",
        GROUPED
        | {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 9}
        | {"no_rope_layers": [1, 0], "floor_scale": 5, "attn_scale": 0.7, "interleave_moe_layer_step": 2},
    ),
    "Falcon": ("CausalLM", "FalconConfig", SIZES | {"bos_token_id": 2, "eos_token_id": 2}),
    "Nemotron": ("CausalLM", "NemotronConfig", GROUPED),
    "RoBERTa": ("MaskedLM", "RobertaConfig", BERT),
    "XLM-R": ("MaskedLM", "XLMRobertaConfig", BERT),
}  # fmt: skip


class Result(NamedTuple):
    losses: list[float]
    gradients: dict[str, Tensor]


def build(family: str, implementation: str) -> Any:
    import transformers

    head, config, values = FAMILIES[family]
    torch.manual_seed(0)
    kind = getattr(transformers, f"AutoModelFor{head}")
    model = kind.from_config(getattr(transformers, config)(**values), attn_implementation=implementation)
    with torch.no_grad():  # at their first values routers choose almost at random, and biases are 0
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    return model


def batches(family: str) -> list[dict[str, Tensor]]:
    """One without padding and one with some on the right, as a tokenizer makes them."""
    head, found = FAMILIES[family][0], []
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(2, VOCABULARY, (SAMPLES, TOKENS), generator=generator)
        if number and head != "MaskedLM":
            for row, end in enumerate((30, 17, TOKENS)):
                ids[row, end:] = 1
        if number and head == "MaskedLM":
            ids[:, -7:] = 1  # seen by all, since no mask says otherwise; numbered as padding
        batch = {"input_ids": ids}
        if head == "SequenceClassification":
            labels = torch.arange(SAMPLES) % FAMILIES[family][2]["num_labels"]
            batch["labels"] = labels + (0.5 if "reward" in family else 0)
        elif head == "CausalLM":
            batch |= {"labels": ids.masked_fill(ids == 1, -100), "attention_mask": (ids != 1).long()}
        found.append(batch)
    return found


def loss_alone(model: Any, batch: dict[str, Tensor]) -> Tensor:
    if "labels" in batch:
        loss: Tensor = model(**batch, use_cache=False).loss
        return loss
    logits = model(**batch).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())


def on_one_process(family: str) -> Result:
    model, losses = build(family, "sdpa"), []
    for batch in batches(family):
        loss = loss_alone(model, batch)
        loss.backward()
        losses.append(loss.item())
    return Result(losses, gradients_of(model))


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def on_a_ring(
    rank: int, world_size: int, family: str, layout: str, ulysses_size: int, divisor: float
) -> Result:
    """Gradients are summed by hand and divided, as DeepSpeed does. Llama 4's layers are checkpointed."""
    from ds_ring.comm.mesh import RingMesh
    from ds_ring.config.section import RingConfig, pattern_from_config
    from ds_ring.integrations.deepspeed.session import RingSession
    from ds_ring.integrations.transformers.attach import attach

    masked = FAMILIES[family][0] == "MaskedLM"
    ring_size = world_size // ulysses_size
    config = RingConfig(
        ring_size=ring_size, ulysses_size=ulysses_size, layout=layout, pattern={"causal": not masked}
    )
    mesh = RingMesh.from_world(ring_size, ulysses_size)
    session = RingSession(config, mesh, pattern_from_config(config), torch.device("cpu"), divisor)
    model, losses = build(family, "ds_ring"), []
    attach(model, session)
    if family == "Llama 4":
        model.gradient_checkpointing_enable({"use_reentrant": ulysses_size > 1})
    for whole in batches(family):
        if masked:
            batch = session.shard_batch(whole | {"shift_labels": whole["input_ids"]})
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
            loss = session.loss(logits, batch).backward_loss
        else:
            loss = model(**session.shard_batch(whole)).loss
        loss.backward()
        losses.append(session.mean_loss(loss).item())
    gradients = gradients_of(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= divisor
    return Result(losses, gradients)


CASES = [
    ("Mixtral", "zigzag", 1, 2.0), ("Olmoe", "striped", 2, 1.0), ("Qwen3 MoE", "contiguous", 1, 1.0),
    ("Granite MoE", "zigzag", 1, 2.0), ("Llama 4", "zigzag", 1, 2.0), ("Llama 4", "contiguous", 2, 1.0),
    ("Llama classifier", "zigzag", 1, 2.0), ("Qwen2 reward", "contiguous", 2, 1.0),
    ("RoBERTa", "contiguous", 1, 2.0), ("XLM-R", "striped", 2, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("family", "layout", "ulysses_size", "divisor"), CASES)
@pytest.mark.day(
    "Mixtral-zigzag-1-2.0", "Llama 4-zigzag-1-2.0", "Llama classifier-zigzag-1-2.0", "XLM-R-striped-2-1.0"
)
def test_a_family_equals_one_process(
    rank_pool: Pool, family: str, layout: str, ulysses_size: int, divisor: float
) -> None:
    expected = on_one_process(family)
    for got in rank_pool(2).run(on_a_ring, family, layout, ulysses_size, divisor):
        check(got, expected)


def check(got: Result, expected: Result) -> None:
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert got.gradients.keys() == expected.gradients.keys()
    least = 1e-4 * max(float(gradient.norm()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        # The gradient of a key's bias is zero but for rounding: softmax does not see it.
        error = float((got.gradients[name] - gradient).norm() / gradient.norm().clamp(min=least))
        assert error < 1e-5, f"gradient of {name}: relative error {error:.3e}"


def sdpa_alone(family: str) -> Result:
    model = build(family, "sdpa")
    ids = batches(family)[0]["input_ids"]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return Result([loss.item()], gradients_of(model))


def sdpa_as_is(rank: int, world_size: int, family: str) -> Result:
    from ds_ring.comm.mesh import RingMesh
    from ds_ring.config.section import RingConfig, pattern_from_config
    from ds_ring.integrations.compile.backend import backend_of
    from ds_ring.integrations.deepspeed.session import RingSession
    from ds_ring.integrations.transformers.attach import attach

    torch._dynamo.reset()
    config = RingConfig(ring_size=world_size, layout="zigzag", attention="as_is")
    mesh = RingMesh.from_world(world_size)
    session = RingSession(config, mesh, pattern_from_config(config), torch.device("cpu"), 1.0)
    model = build(family, "sdpa")
    attach(model, session)
    compiled = torch.compile(model, backend=backend_of(session), options={"inner": "eager"})
    ids = batches(family)[0]["input_ids"]
    loss = compiled(**session.shard_batch({"input_ids": ids, "labels": ids})).loss
    loss.backward()
    gradients = gradients_of(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return Result([session.mean_loss(loss).item()], gradients)


@pytest.mark.parametrize("family", ["Falcon", "Nemotron"])
@pytest.mark.day("Nemotron")
def test_a_model_runs_as_is_as_its_refusal_says(rank_pool: Pool, family: str) -> None:
    """The one has no attention interface, the other tells it nothing: both refusals name this way."""
    expected = sdpa_alone(family)
    for got in rank_pool(2).run(sdpa_as_is, family, timeout_s=200):
        check(got, expected)


class Classifier(torch.nn.Module):
    """BERT without its pooler, and a head on the first token of what `gather` makes whole."""

    def __init__(self, implementation: str, gather: Callable[[Tensor], Tensor]) -> None:
        import transformers

        super().__init__()
        torch.manual_seed(0)
        config = transformers.BertConfig(**BERT)
        self.bert = transformers.AutoModel.from_config(
            config, add_pooling_layer=False, attn_implementation=implementation
        )
        self.head = torch.nn.Linear(config.hidden_size, 3)
        self.gather = gather

    def forward(self, labels: Tensor, **batch: Tensor) -> Tensor:
        hidden_BTE = self.gather(self.bert(**batch).last_hidden_state)
        return torch.nn.functional.cross_entropy(self.head(hidden_BTE[:, 0]), labels)


def own_head(rank: int, world_size: int) -> Result:
    from ds_ring.comm.mesh import RingMesh
    from ds_ring.config.section import RingConfig, pattern_from_config
    from ds_ring.integrations.deepspeed.session import RingSession
    from ds_ring.integrations.transformers.attach import attach

    config = RingConfig(ring_size=world_size, layout="zigzag", pattern={"causal": False})
    mesh = RingMesh.from_world(world_size)
    session = RingSession(config, mesh, pattern_from_config(config), torch.device("cpu"), float(world_size))
    model = Classifier("ds_ring", session.gather)
    attach(model, session)
    local = session.shard_batch({"input_ids": batches("RoBERTa")[0]["input_ids"]})
    loss = model(torch.arange(SAMPLES) % 3, **local)
    loss.backward()
    gradients = gradients_of(model)
    for gradient in gradients.values():  # as DeepSpeed does
        dist.all_reduce(gradient)
        gradient /= world_size
    return Result([loss.item()], gradients)


def test_a_head_on_the_first_token_trains_as_the_refusal_of_berts_says(rank_pool: Pool) -> None:
    alone = Classifier("sdpa", lambda hidden: hidden)
    loss = alone(torch.arange(SAMPLES) % 3, input_ids=batches("RoBERTa")[0]["input_ids"])
    loss.backward()
    for got in rank_pool(2).run(own_head):
        check(got, Result([loss.item()], gradients_of(alone)))

"""What some families need of the whole sequence beside attention, on 2 ranks against one process.

Queries scaled by their place in the sequence (Llama 4, its layers computed twice), the router's load balancing loss
(its gradient was up to 1.3 % off), the token that a classifier pools (it was another one on each rank), the positions
of RoBERTa (they were overwritten: 95 % off), and the ways out that refusals name. Rotary embeddings are in
test_rotary.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.dist import family_ranks
from tests.dist.deepspeed_ranks import Run
from tests.dist.family_ranks import attached, gradients_of, start_session, train_alone, train_on_ring
from tests.dist.harness import Pool

SAMPLES, TOKENS, VOCABULARY = 3, 45, 61
SIZES = family_ranks.SIZES | {"pad_token_id": 1}
GROUPED = SIZES | {"num_key_value_heads": 2}
ROUTED = GROUPED | {"output_router_logits": True, "router_aux_loss_coef": 0.5}
BERT = SIZES | {
    "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mixtral": ("CausalLM", "MixtralConfig", ROUTED | {"num_local_experts": 4, "sliding_window": None}),
    "Olmoe": ("CausalLM", "OlmoeConfig", ROUTED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3 MoE": ("CausalLM", "Qwen3MoeConfig", ROUTED |
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "Granite MoE": ("CausalLM", "GraniteMoeConfig", ROUTED |
        {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Llama classifier": ("SequenceClassification", "LlamaConfig", GROUPED | {"num_labels": 3}),
    "Qwen2 reward": ("SequenceClassification", "Qwen2Config", GROUPED | {"num_labels": 1}),
    "Llama 4": ("CausalLM", "Llama4TextConfig", GROUPED
        | {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 9}
        | {"no_rope_layers": [1, 0], "floor_scale": 5, "attn_scale": 0.7, "interleave_moe_layer_step": 2}),
    "Falcon": ("CausalLM", "FalconConfig", SIZES | {"bos_token_id": 2, "eos_token_id": 2}),
    "Nemotron": ("CausalLM", "NemotronConfig", GROUPED),
    "RoBERTa": ("MaskedLM", "RobertaConfig", BERT),
    "XLM-R": ("MaskedLM", "XLMRobertaConfig", BERT),
}  # fmt: skip
# The gradient of a key's bias is zero but for rounding: softmax does not see it.
check = partial(family_ranks.check, least=1e-4)


def build(family: str, implementation: str) -> Any:
    head, config, values = FAMILIES[family]
    model = family_ranks.build(config, values, implementation, head)
    with torch.no_grad():  # at their first values routers choose almost at random, and biases are 0
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    return model


def batches(family: str) -> list[dict[str, Tensor]]:
    """One without padding and one with some on the right, as a tokenizer makes them."""
    head, result = FAMILIES[family][0], []
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
        result.append(batch)
    return result


def masked_alone(model: Any, ids: list[Tensor]) -> Run:
    """Every token's own id is its label."""
    losses = []
    for entry in ids:
        loss = functional.cross_entropy(model(input_ids=entry).logits.flatten(0, 1), entry.flatten())
        loss.backward()
        losses.append(loss.item())
    return Run(losses, gradients_of(model))


def masked_on_ring(model: Any, session: Any, ids: list[Tensor]) -> Run:
    losses = []
    for entry in ids:
        batch = session.shard_batch({"input_ids": entry, "shift_labels": entry})
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        loss = session.loss(logits, batch)
        loss.backward_loss.backward()
        losses.append(loss.mean_loss.item())
    return Run(losses, gradients_of(model, session.gradient_divisor))


def on_a_ring(rank: int, world_size: int, family: str, layout: str, ulysses_size: int, divisor: float) -> Run:
    """Llama 4's layers are checkpointed."""
    masked, wholes = FAMILIES[family][0] == "MaskedLM", batches(family)
    session = start_session(
        world_size, divisor, ulysses_size=ulysses_size, layout=layout, pattern={"causal": not masked}
    )
    model = attached(build(family, "ds_ring"), session)
    if family == "Llama 4":
        model.gradient_checkpointing_enable({"use_reentrant": ulysses_size > 1})
    if masked:
        return masked_on_ring(model, session, [whole["input_ids"] for whole in wholes])
    return train_on_ring(model, session, wholes)


@pytest.mark.day("Llama classifier-zigzag-1-2.0", "XLM-R-striped-2-1.0", "Llama 4-zigzag-1-2.0")
@pytest.mark.parametrize(
    ("family", "layout", "ulysses_size", "divisor"),
    [
        ("Mixtral", "zigzag", 1, 2.0),
        ("Olmoe", "striped", 2, 1.0),
        ("Qwen3 MoE", "contiguous", 1, 1.0),
        ("Granite MoE", "zigzag", 1, 2.0),
        ("Llama 4", "zigzag", 1, 2.0),
        ("Llama 4", "contiguous", 2, 1.0),
        ("Llama classifier", "zigzag", 1, 2.0),
        ("Qwen2 reward", "contiguous", 2, 1.0),
        ("RoBERTa", "contiguous", 1, 2.0),
        ("XLM-R", "striped", 2, 1.0),
    ],
)
def test_a_family_equals_one_process(
    rank_pool: Pool, family: str, layout: str, ulysses_size: int, divisor: float
) -> None:
    model, wholes = build(family, "sdpa"), batches(family)
    if FAMILIES[family][0] == "MaskedLM":
        expected = masked_alone(model, [whole["input_ids"] for whole in wholes])
    else:
        expected = train_alone(model, wholes)
    for got in rank_pool(2).run(on_a_ring, family, layout, ulysses_size, divisor):
        check(got, expected)


def labelled(family: str) -> list[dict[str, Tensor]]:
    ids = batches(family)[0]["input_ids"]
    return [{"input_ids": ids, "labels": ids}]


def sdpa_as_is(rank: int, world_size: int, family: str) -> Run:
    from ds_ring.contrib.compile.backend import backend_of

    torch._dynamo.reset()
    session = start_session(world_size, layout="zigzag", attention="as_is")
    model = attached(build(family, "sdpa"), session)
    compiled = torch.compile(model, backend=backend_of(session), options={"inner": "eager"})
    return train_on_ring(model, session, labelled(family), compiled)


@pytest.mark.situation("models", "a model that is refused, changed as its refusal says")
@pytest.mark.parametrize("family", ["Falcon", "Nemotron"])
@pytest.mark.night  # by day test_backend.py runs a model as it is
def test_a_model_runs_as_is_as_its_refusal_says(rank_pool: Pool, family: str) -> None:
    """The one has no attention interface, the other tells it nothing: both refusals name this way."""
    expected = train_alone(build(family, "sdpa"), labelled(family))
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

    def forward(self, **batch: Tensor) -> Tensor:
        hidden_BTE = self.gather(self.bert(**batch).last_hidden_state)
        return functional.cross_entropy(self.head(hidden_BTE[:, 0]), torch.arange(SAMPLES) % 3)


def own_head(rank: int, world_size: int) -> Run:
    session = start_session(world_size, float(world_size), layout="zigzag", pattern={"causal": False})
    model = attached(Classifier("ds_ring", session.gather), session)
    loss = model(**session.shard_batch({"input_ids": batches("RoBERTa")[0]["input_ids"]}))
    loss.backward()
    return Run([loss.item()], gradients_of(model, world_size))


def test_a_head_on_the_first_token_trains_as_the_refusal_of_berts_says(rank_pool: Pool) -> None:
    alone = Classifier("sdpa", lambda hidden: hidden)
    loss = alone(input_ids=batches("RoBERTa")[0]["input_ids"])
    loss.backward()
    for got in rank_pool(2).run(own_head):
        check(got, Run([loss.item()], gradients_of(alone)))

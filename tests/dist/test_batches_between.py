"""A forward pass of another batch between a forward pass and its backward pass, with checkpointed layers.

The layers that run again must get the batch of their first run. Compared with one batch after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.dist.deepspeed_ranks import gradient_errors, start_deepspeed
from tests.dist.family_ranks import GROUPED, attached, build, start_session
from tests.dist.harness import Pool
from tests.reference import worst

REENTRANT = {"none": None, "reentrant": {"use_reentrant": True}, "not reentrant": {"use_reentrant": False}}


class Case(NamedTuple):
    """A family, what is between the passes of its batch, and how its layers are checkpointed."""

    family: str
    between: str  # "documents": other ones at equal length; "length": another one
    kind: str  # of REENTRANT
    head: str | None = None


def prepared(case: Case) -> tuple[Any, list[dict[str, Tensor]], bool, dict[str, Any]]:
    """The model, two batches, whether it computes its own loss, and the section."""
    from ds_ring_launcher.check import small_model as small

    images = case.head == "image-text"
    config = small.shrink(small.read_config(case.family), 61, 2, {}, images, False)
    head = case.head or small.usual_head(config)
    if head == "causal-lm" and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    if head == "causal-lm" and getattr(config, "causal", None) is False:
        config.causal = config.is_decoder = True
    model = small.build(config, head, 0)
    own_loss = small.has_a_loss(model, head)
    section = small.section_for(model, head)
    causal = section["pattern"]["causal"]
    batches = []
    for number, tokens in enumerate((61, 61 if case.between == "documents" else 44)):
        batch = small.make_batch(config, head, tokens, number, own_loss)
        if images:
            from ds_ring_launcher.check.small_images import add_images

            batch = add_images(batch, model, number)
        if case.between == "documents":
            packed = small.make_form("packed", batch, getattr(config, "pad_token_id", None) or 0, causal).ring
            if number:  # documents of other lengths
                packed["document_ids"] = packed["document_ids"].flip(0).contiguous()
            batch = packed
        batches.append(batch)
    if case.between == "documents":
        section = section | {"pattern": section["pattern"] | {"documents": True}}
    return model, batches, own_loss, section


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradients(rank: int, world_size: int, case: Case) -> dict[str, float]:
    """The largest relative error of a gradient of this rank, by batch and by what it is compared with."""
    model, batches, own_loss, section = prepared(case)
    session = start_session(world_size, **section)
    model = attached(model.train(), session)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        local = session.shard_batch(batch)
        if own_loss:
            return model(**local).loss
        labels = ("labels", "shift_labels", "num_items_in_batch")
        output = model(**{key: value for key, value in local.items() if key not in labels})
        logits = output.logits if hasattr(output, "logits") else output.last_hidden_state
        return session.loss(logits, local)[0]

    backward = partial(gradients_of, model)
    plain = [backward(loss_of(batch)) for batch in batches]
    if case.kind != "none":
        model.gradient_checkpointing_enable(REENTRANT[case.kind])
        assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    in_turn = [backward(loss_of(batch)) for batch in batches]
    first, second = [loss_of(batch) for batch in batches]
    between = [backward(first), backward(second)]
    result = {}
    for what, got, want in (("in turn", in_turn, plain), ("between", between, in_turn)):
        for number in range(2):
            result[f"{what} {number}"] = worst(gradient_errors(got[number], want[number], 1e-3).values())
    return result


# Of each way in which layers look their batch up; the others run at night.
DAY = (("length", "not reentrant"), ("documents", "reentrant"))
NIGHT = """
    llama bloom gpt2 big_bird gemma4_text deepseek_v32 deepseek_v4 minimax_m3_vl_text doge rwkv xlstm
    zaya minimax recurrent_gemma qwen4_exp_text kimi_linear jamba falcon_h1 lfm2
"""
CASES = [
    *(Case("mamba", *how) for how in DAY),
    *(
        pytest.param(Case("mamba2", *how), marks=pytest.mark.night)  # as mamba by day
        for how in (("length", "reentrant"), ("documents", "not reentrant"))
    ),
    *(
        pytest.param(Case(family, between, kind), marks=pytest.mark.night)
        for family in NIGHT.split()
        for between, kind in (("documents", "reentrant"), ("length", "not reentrant"))
    ),
    *(
        pytest.param(Case(family, "length", "reentrant", "image-text"), marks=pytest.mark.night)
        for family in ("qwen2_vl", "qwen3_vl", "gemma3")
    ),
]


@pytest.mark.day("mamba-length-not reentrant")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[:3]))
@pytest.mark.situation("checkpointing", "ran two batches forward before the first one's backward pass")
def test_layers_run_again_with_the_batch_of_their_first_run(rank_pool: Pool, case: Case) -> None:
    for errors in rank_pool(2).run(gradients, case):
        assert max(errors.values()) < 1e-4, errors


class OwnLayer(nn.Module):
    """A layer of the user's around the session's attention."""

    def __init__(self, session: Any) -> None:
        super().__init__()
        self.qkv, self.session = nn.Linear(16, 48), session

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + self.session.attention()(q, k, v).transpose(1, 2).flatten(2)


def by(kind: str, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a layer by a kind of checkpointing."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    def nested(x: Tensor) -> Tensor:
        return by("not reentrant", layer, x)

    ways: dict[str, Callable[[], Any]] = {
        "none": lambda: layer(x),
        "reentrant": lambda: checkpoint(layer, x, use_reentrant=True),
        "not reentrant": lambda: checkpoint(layer, x, use_reentrant=False),
        "nested": lambda: checkpoint(nested, x, use_reentrant=False),
        "nested in a reentrant one": lambda: checkpoint(nested, x, use_reentrant=True),
        "DeepSpeed": lambda: checkpointing.checkpoint(layer, x),
        "DeepSpeed, not reentrant": lambda: checkpointing.non_reentrant_checkpoint(layer, x),
    }
    out = ways[kind]()
    return out[0] if isinstance(out, tuple) else out


KINDS = (
    "reentrant", "not reentrant", "nested", "nested in a reentrant one", "DeepSpeed",
    "DeepSpeed, not reentrant",
)  # fmt: skip


def between_and_in_turn(
    model: nn.Module, loss_of: Callable[..., Tensor], batches: list[Any], plain: Any, kinds: Iterable[Any]
) -> dict[Any, float]:
    """How far gradients of two batches, one forward pass between, are from plain ones in turn, by kind."""
    want, result = [gradients_of(model, loss_of(batch, plain)) for batch in batches], {}
    for kind in kinds:
        losses = [loss_of(batch, kind) for batch in batches]
        got = [gradients_of(model, loss) for loss in losses]
        result[kind] = max(
            float((a[name] - b[name]).abs().max() / b[name].abs().max())
            for a, b in zip(got, want, strict=True)
            for name in a.keys() | b.keys()
        )
    return result


def of_own_layers(rank: int, world_size: int) -> dict[str, float]:
    """The largest difference of gradients of two layers, two batches in turn and one between, by kind."""
    start_deepspeed()
    session = start_session(world_size, pattern={"documents": True})
    layers = nn.Sequential(OwnLayer(session), OwnLayer(session))
    batches = [
        {"inputs_embeds": torch.randn(1, 24, 16), "document_ids": (torch.arange(24) >= border).long()[None]}
        for border in (5, 17)
    ]

    def loss_of(batch: dict[str, Tensor], kind: str) -> Tensor:
        x = session.shard_batch(batch)["inputs_embeds"].requires_grad_()
        for layer in layers:
            x = by(kind, layer, x)
        return x.square().sum()

    return between_and_in_turn(layers, loss_of, batches, "none", KINDS)


@pytest.mark.night
@pytest.mark.situation(
    "checkpointing", "checkpointed own layers around engine.ring.attention(), two batches before one backward"
)
def test_own_layers_run_again_with_the_batch_of_their_first_run(rank_pool: Pool) -> None:
    for result in rank_pool(2).run(of_own_layers):
        assert result.keys() == set(KINDS) and max(result.values()) < 1e-5, result


def of_a_checkpointed_model(rank: int, world_size: int) -> float:
    """The largest difference of gradients where the whole model is one reentrant region."""
    session = start_session(world_size, pattern={"documents": True})
    model = attached(build("LlamaConfig", GROUPED, "sdpa").train(), session)
    batches = [
        {
            "inputs_embeds": torch.randn(1, 24, 32),
            "document_ids": (torch.arange(24) >= border).long()[None],
            "labels": torch.arange(24)[None],
        }
        for border in (5, 17)
    ]

    def loss_of(batch: dict[str, Tensor], checkpointed: bool) -> Tensor:
        local = session.shard_batch(batch)
        items = local.pop("num_items_in_batch")
        names = list(local)

        def run(*tensors: Tensor) -> Tensor:
            return model(**dict(zip(names, tensors, strict=True)), num_items_in_batch=items).loss

        local["inputs_embeds"].requires_grad_()
        return checkpoint(run, *local.values(), use_reentrant=True) if checkpointed else run(*local.values())

    return between_and_in_turn(model, loss_of, batches, False, (True,))[True]


@pytest.mark.situation("checkpointing", "checkpointed a whole model, two batches before one backward pass")
def test_a_model_that_is_one_region_runs_again_with_its_batch(rank_pool: Pool) -> None:
    assert max(rank_pool(2).run(of_a_checkpointed_model)) < 1e-5

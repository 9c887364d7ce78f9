"""Gradients of what a model is given, against one process: right for whole tensors, refused for shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.deepspeed_ranks import (
    Size,
    build_batch,
    build_model,
    full_gradient,
    json_config,
    start_deepspeed,
    start_engine,
)
from tests.dist.harness import Failure, Pool, catch_failure, catch_refusal

SIZE = Size(hidden=16, layers=2, tokens=29, samples=2)
TOLERANCE = 2e-6


class Alone:
    """The model on one process, called as an engine is."""

    def __init__(self, model: Any, samples: int) -> None:
        self.module, self._samples = model, samples

    def __call__(self, **batch: Tensor) -> Any:
        labels = batch["labels"]
        return self.module(**batch, num_items_in_batch=(labels[:, 1:] != -100).sum())

    def backward(self, loss: Tensor) -> None:
        loss.backward()


def saliency(engine: Any, shard: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    ids = batch.pop("input_ids")
    torch.manual_seed(1)
    embeds = torch.randn(*ids.shape, SIZE.hidden, requires_grad=True)
    engine.backward(engine(**shard(batch | {"inputs_embeds": embeds})).loss)
    return [embeds.grad]


def projector(engine: Any, shard: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """A module outside of the engine makes the inputs of it, twice before its gradient is read."""
    ids = batch.pop("input_ids")
    torch.manual_seed(1)
    outside, features = (
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16)),
        torch.randn(*ids.shape, 8),
    )
    for _ in range(2):
        engine.backward(engine(**shard(batch | {"inputs_embeds": outside(features)})).loss)
    return [parameter.grad for parameter in outside.parameters() if parameter.grad is not None]


def free_lb(engine: Any, shard: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Adversarial training: a perturbation of the embedding's results ascends, and parameters descend."""
    ids = batch.pop("input_ids")
    torch.manual_seed(1)
    table = torch.randn(100, SIZE.hidden)
    delta = 0.01 * torch.randn(*ids.shape, SIZE.hidden)
    for _ in range(3):
        delta.requires_grad_()
        engine.backward(engine(**shard(batch | {"inputs_embeds": table[ids] + delta})).loss)
        norm = delta.grad.flatten(1).norm(dim=1)[:, None, None]
        delta = (delta + 0.1 * delta.grad / norm).detach()
    return [delta]


WAYS = {"saliency": saliency, "a projector": projector, "FreeLB": free_lb}


def samples_of(batch: dict[str, Tensor], replica: int, replicas: int) -> dict[str, Tensor]:
    return {key: x.chunk(replicas)[replica] for key, x in batch.items()}


def engine_of(stage: int, enabled: bool, **section: Any) -> tuple[Any, Any]:
    model, config = build_model(SIZE, "sdpa"), json_config(2, 2, stage, ring_attention=section)
    if not enabled:
        engine = start_engine(model, config, 0.0)
        return engine, engine.ring.shard_batch
    import ds_ring

    deepspeed = start_deepspeed()
    ds_ring.enable()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    return deepspeed.initialize(model=model, optimizer=sgd, config=config)[0], dict


def of_whole_tensors(
    rank: int, world_size: int, stage: int, enabled: bool, **section: Any
) -> dict[str, float]:
    """The largest relative error of each way's gradients."""
    engine, shard = engine_of(stage, enabled, **section)
    result = {}
    for name, way in WAYS.items():
        ring = way(engine, shard, dict(build_batch(SIZE)))
        alone = way(Alone(build_model(SIZE, "sdpa"), SIZE.samples), dict, dict(build_batch(SIZE)))
        pairs = zip(ring, alone, strict=True)
        result[name] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return result


@pytest.mark.day("False-2", "True-3")
@pytest.mark.situation(
    "autograd", "Saliency, a trainable projector, and FreeLB, through whole inputs_embeds."
)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("enabled", [False, True])
def test_gradients_of_whole_tensors_are_those_of_one_process(
    rank_pool: Pool, stage: int, enabled: bool
) -> None:
    for result in rank_pool(2).run(of_whole_tensors, stage, enabled):
        assert max(result.values()) < TOLERANCE, result


@pytest.mark.parametrize("section", [{"min_sequence_length": 40}, {"ulysses_size": 2}])
def test_gradients_of_whole_samples_or_heads_on_each_rank(rank_pool: Pool, section: dict[str, int]) -> None:
    for result in rank_pool(2).run(of_whole_tensors, 0, False, **section):
        assert max(result.values()) < TOLERANCE, result


def with_replicas(rank: int, world_size: int) -> tuple[float, float]:
    """Errors of an outer module's and of the embedding's gradient, where replicas average the first one."""

    def whole(model: Any, ids: Tensor, outside: Any) -> Tensor:
        embeds: Tensor = model.get_input_embeddings()(ids)
        return embeds + outside(embeds)

    size = SIZE._replace(samples=4)
    torch.manual_seed(1)
    outside = nn.Linear(16, 16)
    engine, shard = engine_of(0, False)
    mesh = engine.ring.run_mesh
    batch = samples_of(build_batch(size), mesh.data_rank, mesh.data_size)
    batch["inputs_embeds"] = whole(engine.module, batch.pop("input_ids"), outside)
    engine.backward(engine(**shard(batch)).loss)
    mine: Any = outside.weight.grad
    torch.distributed.all_reduce(mine)
    embedding = full_gradient(start_deepspeed(), engine.module.get_input_embeddings().weight)
    torch.manual_seed(1)
    outside, model, batch = nn.Linear(16, 16), build_model(SIZE, "sdpa"), build_batch(size)
    embeds = whole(model, batch.pop("input_ids"), outside)
    Alone(model, 4)(**batch, inputs_embeds=embeds).loss.backward()
    theirs: Any = model.get_input_embeddings().weight.grad  # type: ignore[operator]
    errors = (mine / world_size, outside.weight.grad), (embedding, theirs)
    return tuple(float((a - b).norm() / b.norm()) for a, b in errors)  # type: ignore[return-value]


@pytest.mark.night
def test_replicas_average_gradients_of_modules_outside(rank_pool: Pool) -> None:
    for errors in rank_pool(4).run(with_replicas):
        assert max(errors) < TOLERANCE, errors


# What is of a rank's tokens.


def a_leaf(engine: Any, local: Any, embeds: Tensor) -> None:
    engine(**local, inputs_embeds=embeds.detach().requires_grad_())


def a_perturbation(engine: Any, local: Any, embeds: Tensor) -> None:
    engine(**local, inputs_embeds=embeds + torch.zeros_like(embeds, requires_grad=True))


def a_local_projector(engine: Any, local: Any, embeds: Tensor) -> None:
    engine(**local, inputs_embeds=nn.Linear(16, 16)(embeds))


def retained(engine: Any, local: Any, embeds: Tensor) -> None:
    embeds.retain_grad()
    engine(**local, inputs_embeds=embeds)


def hidden_retained(engine: Any, local: Any, embeds: Tensor) -> None:
    output = engine(**local, inputs_embeds=embeds, output_hidden_states=True)
    output.hidden_states[1].retain_grad()
    engine.backward(output.loss)


def grad_of_hidden(engine: Any, local: Any, embeds: Tensor) -> None:
    output = engine(**local, inputs_embeds=embeds, output_hidden_states=True)
    torch.autograd.grad(output.loss, output.hidden_states[1])


def grad_of_embeddings(engine: Any, local: Any, embeds: Tensor) -> None:
    torch.autograd.grad(engine(**local, inputs_embeds=embeds).loss, embeds)


REFUSED = {
    a_leaf: "inputs_embeds: expected a tensor from engine.ring.shard_batch",
    a_perturbation: "inputs_embeds: expected a tensor from engine.ring.shard_batch",
    a_local_projector: "inputs_embeds: expected a tensor from engine.ring.shard_batch",
    retained: "inputs_embeds: expected a tensor from engine.ring.shard_batch",
    hidden_retained: "retain_grad: expected none on results of a forward pass",
    grad_of_hidden: "torch.autograd.grad: expected gradients of parameters",
    grad_of_embeddings: "torch.autograd.grad: expected gradients of parameters",
}


def ways_at(stage: int) -> list[Callable[..., None]]:
    """ZeRO 3 puts copies of hidden states into the graph, and those that the model returns get no gradient."""
    return [way for way in REFUSED if stage < 3 or way is not hidden_retained]


def of_local_tensors(rank: int, world_size: int, stage: int) -> list[Failure]:
    engine, shard = engine_of(stage, False)
    result = []
    for way in ways_at(stage):
        local = shard(build_batch(SIZE))
        embeds = engine.module.get_input_embeddings()(local.pop("input_ids"))
        result.append(catch_failure(way, engine, local, embeds))
    # The mesh lives, and what parameters of the engine's alone have made is taken.
    local = shard(build_batch(SIZE))
    embeds = engine.module.get_input_embeddings()(local.pop("input_ids"))
    engine.backward(engine(**local, inputs_embeds=embeds).loss)
    return result


@pytest.mark.situation("autograd", "Gradients of embeddings and hidden states of a rank's tokens.")
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_of_a_ranks_tokens_are_refused_on_every_rank(rank_pool: Pool, stage: int) -> None:
    for result in rank_pool(2).run(of_local_tensors, stage):
        for way, failure in zip(ways_at(stage), result, strict=True):
            assert failure.error == "RingConfigError" and REFUSED[way] in failure.text
            assert failure.seconds < 1


def other_calls(rank: int, world_size: int) -> list[str]:
    """A gradient that only one rank asks for; summed gradients; and autograd.grad of a whole tensor."""
    batch = dict(build_batch(SIZE))
    batch["inputs_embeds"] = torch.ones(*batch.pop("input_ids").shape, SIZE.hidden, requires_grad=rank == 0)
    engine, shard = engine_of(3, False)
    mismatch = catch_refusal(shard, batch)
    batch["inputs_embeds"].requires_grad_()
    (gradient,) = torch.autograd.grad(engine(**shard(batch)).loss, batch["inputs_embeds"])
    alone = Alone(build_model(SIZE, "sdpa"), 2)
    alone(**batch).loss.backward()
    assert float((gradient - batch["inputs_embeds"].grad).norm() / gradient.norm()) < TOLERANCE
    engine = start_engine(build_model(SIZE, "sdpa"), json_config(2, 2, 0, gradient_allreduce_op="sum"))
    return [mismatch, catch_refusal(engine.ring.shard_batch, batch)]


def test_calls_that_ranks_make_together(rank_pool: Pool) -> None:
    for mismatch, summed in rank_pool(2).run(other_calls):
        assert mismatch.startswith("RingMismatchError") and "names of tensors" in mismatch
        assert "gradient_allreduce_op 'sum'" in summed

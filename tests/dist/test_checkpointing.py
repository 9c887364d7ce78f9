"""Activation checkpointing, three kinds: passes counted, gradients bit by bit, on gloo ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_ring import Causal, RingAttention, RingConfig, RingMesh, make_layout
from ds_ring.ring.ring_pass import RingPass
from tests.dist.deepspeed_ranks import gradient_errors, start_deepspeed
from tests.dist.harness import Pool
from tests.reference import worst

LAYERS, TOKENS, WIDTH, HEADS = 8, 48, 32, 4
KINDS = ("reentrant", "not reentrant", "DeepSpeed")


class Layer(nn.Module):
    """A residual block around ring attention."""

    def __init__(self, attention: RingAttention, writes: bool) -> None:
        super().__init__()
        self.attention, self.writes = attention, writes
        self.qkv, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = self.attention(q, k, v)
        if self.writes and not torch.is_grad_enabled():  # in the first run of a reentrant region
            out.mul_(1.0)
        return x + self.join(out.transpose(1, 2).flatten(2)).tanh()


class Model(nn.Module):
    def __init__(self, attention: RingAttention, kind: str, writes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer(attention, writes) for _ in range(LAYERS))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = run_by(self.kind)(layer, x)
        return x


def run_by(kind: str) -> Callable[..., Any]:
    if kind == "none":
        return lambda function, x: function(x)
    if kind == "DeepSpeed":
        from deepspeed.runtime.activation_checkpointing import checkpointing

        return checkpointing.checkpoint
    return partial(checkpoint, use_reentrant=kind == "reentrant")


def steps(
    rank: int, world_size: int, kind: str, recompute: float | bool = False, writes: bool = False
) -> tuple[list[int], list[Tensor]]:
    """Forward passes of two steps at once and of a graph that goes back twice; gradients of the former."""
    if kind == "DeepSpeed":
        start_deepspeed()
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=world_size)
    json = {"ring_size": world_size, "recompute_attention": recompute}
    config = RingConfig.from_deepspeed({"sequence_parallel_size": world_size, "ring_attention": json})
    attention = RingAttention(config, mesh=mesh, layout=layout, pattern=Causal())
    model = Model(attention, kind, writes)
    inputs = [torch.randn(2, TOKENS // world_size, WIDTH, requires_grad=True) for _ in range(2)]
    counts, forward = [0], RingPass.forward

    def counting(self: RingPass, *args: Tensor | None) -> tuple[Tensor, Tensor]:
        counts[-1] += 1
        return forward(self, *args)  # type: ignore[arg-type]

    with mock.patch.object(RingPass, "forward", counting):
        # Two graphs alive at once; the first one goes back last.
        losses = [model(x).square().sum() for x in inputs]
        for loss in reversed(losses):
            loss.backward()
        counts.append(0)
        grads = [x.grad.clone() for x in (*inputs, *model.parameters()) if x.grad is not None]
        if kind == "not reentrant":
            loss = model(inputs[0]).sum()
            loss.backward(retain_graph=True)
            loss.backward()
    return counts, grads


def test_a_step_has_as_many_passes_as_without(rank_pool: Pool) -> None:
    plain = rank_pool(2).run(steps, "none")
    assert [counts for counts, _ in plain] == [[2 * LAYERS, 0]] * 2
    for kind in KINDS:
        result = rank_pool(2).run(steps, kind)
        # The second time that one graph goes back nothing is kept any more.
        again = 2 * LAYERS if kind == "not reentrant" else 0
        assert [counts for counts, _ in result] == [[2 * LAYERS, again]] * 2, kind
        for (_, got), (_, want) in zip(result, plain, strict=True):
            assert len(got) == len(want) == 2 + 4 * LAYERS
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), kind


@pytest.mark.parametrize("options", [{"recompute": True}, {"writes": True}], ids=str)
@pytest.mark.day("{'writes': True}")
def test_passes_run_again_where_they_are_told_to_or_must(rank_pool: Pool, options: dict[str, bool]) -> None:
    plain = rank_pool(2).run(steps, "none")
    result = rank_pool(2).run(steps, "reentrant", **options)
    assert [counts for counts, _ in result] == [[4 * LAYERS, 0]] * 2
    for (_, got), (_, want) in zip(result, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.night
def test_the_first_half_is_computed_again_and_the_other_kept(rank_pool: Pool) -> None:
    plain = rank_pool(2).run(steps, "none")
    result = rank_pool(2).run(steps, "reentrant", recompute=0.5)
    for (counts, got), (_, want) in zip(result, plain, strict=True):
        assert counts[0] == 4 * LAYERS
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # sums of other tiles


def pairs_of_passes(rank: int, world_size: int) -> list[int]:
    """Pairs of every forward pass of a checkpointed layer's step."""
    mesh = RingMesh.from_world(world_size)
    json = {"ring_size": world_size, "recompute_attention": 0.5}
    config = RingConfig.from_deepspeed({"sequence_parallel_size": world_size, "ring_attention": json})
    layout = make_layout("striped", tokens=TOKENS, ring_size=world_size)
    layer = Layer(RingAttention(config, mesh=mesh, layout=layout, pattern=Causal()), writes=False)
    result, forward = [], RingPass.forward

    def noting(self: RingPass, *args: Tensor | None) -> tuple[Tensor, Tensor]:
        result.append(self.plan.pairs)
        return forward(self, *args)  # type: ignore[arg-type]

    with mock.patch.object(RingPass, "forward", noting):
        x = torch.randn(1, TOKENS // world_size, WIDTH, requires_grad=True)
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    return result


def test_the_first_half_of_the_rows_is_a_quarter_of_the_pairs(rank_pool: Pool) -> None:
    for pairs, pairs_again in rank_pool(4).run(pairs_of_passes):
        assert 0.2 * pairs < pairs_again < 0.3 * pairs


# Their later layers take keys and values of earlier ones; stock loses gradients of these where it is reentrant.
SHARED: dict[str, dict[str, Any]] = {"gemma4_text": {"num_kv_shared_layers": 20}, "gemma3n_text": {}}


def against_stock(rank: int, world_size: int, family: str, reentrant: bool) -> tuple[float, float, list[str]]:
    """Greatest errors of gradients: of a ring against stock with the same switch, of stock without it."""
    from ds_ring.models import model_call
    from ds_ring_launcher.check import small_model as small
    from tests.dist.family_ranks import attached, gradients_of, start_session

    config = small.shrink(small.read_config(family), TOKENS, 2, SHARED[family], False, False)
    batch = small.make_batch(config, "causal-lm", TOKENS, 0, True)
    session = start_session(world_size)
    alone, model = (small.build(copy.deepcopy(config), "causal-lm", 0).train() for _ in "ab")
    alone.set_attn_implementation("eager")

    def gradients(model: Any, batch: dict[str, Tensor], divisor: float) -> dict[str, Tensor]:
        model.zero_grad()
        model(**batch).loss.backward()
        return {name: item.clone() for name, item in gradients_of(model, divisor).items()}

    plain = gradients(alone, batch, 0.0)
    attached(model, session)
    for item in (alone, model):
        item.gradient_checkpointing_enable({"use_reentrant": reentrant})
    warned: list[str] = []
    with mock.patch.object(model_call.log, "warning", lambda text, *words: warned.append(text % words)):
        result = gradients(model, session.shard_batch(batch), session.gradient_divisor)
    stock = gradients(alone, batch, 0.0)
    errors = gradient_errors(result, stock, 1e-3), gradient_errors(stock, plain, 1e-3)
    return *(worst(item.values()) for item in errors), warned


@pytest.mark.night
@pytest.mark.parametrize("family", SHARED)
@pytest.mark.situation("checkpointing", "trained Gemma 3n or 4, whose layers share K/V, with checkpoints")
def test_layers_that_share_keys_have_the_gradients_of_stock(rank_pool: Pool, family: str) -> None:
    for error, of_stock, warned in rank_pool(2).run(against_stock, family, reentrant=True):
        assert error < 1e-4 and of_stock > 0.3  # stock loses them, too
        assert len(warned) == 1 and "use_reentrant" in warned[0]
    for error, of_stock, warned in rank_pool(2).run(against_stock, family, reentrant=False):
        assert error < 1e-4 and of_stock < 1e-5 and not warned

"""A model that does not use the ring is noticed in its first forward pass, on every rank; one that does trains on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ds_ring
from tests.dist.deepspeed_ranks import Size, build_batch, build_model, json_config, listen, start_engine
from tests.dist.harness import catch_refusal

SIZE = Size(hidden=16, layers=2, tokens=24, samples=2)
HEADS = 2
Attend = Callable[["Own", Tensor, Tensor, Tensor], Tensor]


class Own(nn.Module):
    """A decoder of one's own: its attention is a function that each case brings."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.embed = nn.Embedding(61, SIZE.hidden)
        self.qkv = nn.ModuleList(nn.Linear(SIZE.hidden, 3 * SIZE.hidden) for _ in range(SIZE.layers))
        self.head = nn.Linear(SIZE.hidden, 61)
        self.session: Any = None
        self.ring: Any = None
        self.layer = 0

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        x = self.embed(input_ids)
        for self.layer, qkv in enumerate(self.qkv):  # noqa: B020
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            x = x + self.attend(self, q, k, v).transpose(1, 2).flatten(-2)
        out: Tensor = self.head(x)
        return out


def plain(model: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def written_out(model: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -1e9).softmax(-1) @ v


def written_out_by_name(model: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch and heads in one dimension, and the scores given by name, beside a ring pass."""
    weights = functional.softmax(input=(q @ k.transpose(-1, -2)).flatten(0, 1), dim=-1)
    return of_the_session(model, q, k, weights.unflatten(0, k.shape[:2]) @ v)


def multihead(model: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's module beside a ring pass: it calls scaled_dot_product_attention where nobody sees it."""
    module = nn.MultiheadAttention(SIZE.hidden, HEADS, bias=False, batch_first=True)
    flat = of_the_session(model, q, k, v).transpose(1, 2).flatten(-2)
    return module(flat, flat, flat, need_weights=False)[0].unflatten(-1, (HEADS, -1)).transpose(1, 2)


def of_the_session(model: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = model.session.attention()(q, k, v)
    return out


def by_its_parts(model: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As configs/examples/own_mask.py does."""
    ring = model.session
    return ds_ring.ring_attention(q, k, v, pattern=ring.pattern, layout=ring.layout, mesh=ring.mesh)


def a_module_on_the_mesh(model: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = model.ring(q, k, v)
    return out


def recomputed(model: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = checkpoint(of_the_session, model, q, k, v, use_reentrant=False)
    return out


def every_second_layer(model: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (plain if model.layer else of_the_session)(model, q, k, v)


def replicated_queries(model: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A few queries, equal on all ranks, attend to everybody's keys; their gradient must be equal, too."""
    mesh = model.session.mesh

    def summed(grad: Tensor) -> Tensor:
        grad = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(grad, group=mesh.ring_group)
        return grad

    few = torch.ones_like(q[:, :, :3])
    out = ds_ring.decode_attention(few, k, v, pattern=ds_ring.Full(), layout=model.session.layout, mesh=mesh)
    if out.requires_grad:
        out.register_hook(summed)
    return q + out.mean(2, keepdim=True)


def over_a_few_latents(model: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention between other things than this rank's tokens is nobody's business."""
    latents = torch.ones_like(q[:, :, :4])
    local = functional.scaled_dot_product_attention(latents, latents, latents)
    return of_the_session(model, q, k, v) + local.mean(2, keepdim=True)


def start(model: nn.Module, sequence_parallel_size: int = 2, section: dict[str, Any] | None = None) -> Any:
    engine = start_engine(
        model, json_config(sequence_parallel_size, 2, 1, ring_attention=section or {"layout": "zigzag"})
    )
    if isinstance(model, Own):
        model.session = engine.ring
        model.ring = ds_ring.RingAttention(engine.ring.config, mesh=engine.ring.mesh, layout="zigzag")
    return engine


def step(engine: Any, tokens: int = SIZE.tokens) -> str:
    """One training step; the error, "" for none."""
    batch = {key: value[:, :tokens] for key, value in build_batch(SIZE).items()}

    def train() -> None:
        engine.backward(engine(**engine.ring.shard_batch(batch)).sum())
        engine.step()

    return catch_refusal(train)


NO_PASS = "got no ring pass in its forward pass: attention saw the 12 tokens of this rank only, of 24"
LOCAL = "got scaled_dot_product_attention over the 12 tokens of this rank, of 24"
ATTENTIONS: dict[str, tuple[Attend, str]] = {
    "plain": (plain, LOCAL),
    "written out": (written_out, "got softmax over the 12 tokens of this rank"),
    "written out by name": (written_out_by_name, "got softmax over the 12 tokens of this rank"),
    "nn.MultiheadAttention": (multihead, "got multi_head_attention_forward over the 12 tokens of this rank"),
    "every second layer": (every_second_layer, LOCAL),
    "nothing": (lambda model, q, k, v: v, NO_PASS),
    "the session's": (of_the_session, ""),
    "by its parts": (by_its_parts, ""),
    "a module's": (a_module_on_the_mesh, ""),
    "recomputed": (recomputed, ""),
    "replicated": (replicated_queries, ""),
    "beside latents": (over_a_few_latents, ""),
}


def every_attention(rank: int, world_size: int) -> dict[str, list[str]]:
    """Two steps with each; the first is one of a short batch where parts of a batch are asked for."""
    result = {}
    for name, (attend, _) in ATTENTIONS.items():
        engine = start(Own(attend))
        result[name] = [step(engine), step(engine)]
    engine = start(Own(by_its_parts), section={"layout": "zigzag", "min_sequence_length": 24})
    result["by its parts"] = [step(engine, tokens=20), step(engine)]
    return result


@pytest.mark.situation("models", "a model with attention of its own")
def test_attention_of_ones_own_is_the_rings_or_an_error(rank_pool: Any) -> None:
    for result in rank_pool(2).run(every_attention, timeout_s=120):
        for name, (_, words) in ATTENTIONS.items():
            first, second = result[name]
            assert (words in first and 'engine.compile(backend="ds_ring")' in first) if words else not first
            assert bool(second) == bool(words), "an engine that was refused stays so"


def in_other_orders(rank: int, world_size: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    engine = start(Own(plain), section={"layout": "zigzag", "min_sequence_length": 24})
    result["short batches"] = [step(engine, 20), step(engine, 20), step(engine, 24)]
    engine = start(Own(plain))
    engine.eval()
    with torch.no_grad():
        result["evaluation first"] = [step(engine)]
    engine = start(Own(lambda m, q, k, v: (plain if m.training else of_the_session)(m, q, k, v)))
    engine.eval()
    with torch.no_grad():
        engine(**engine.ring.shard_batch(build_batch(SIZE)))
    engine.train()
    result["right in evaluation"] = [step(engine)]
    result["replicas"] = [step(start(Own(plain), 1))]
    result["replicas, a window"] = [step(start(Own(plain), 1, {"pattern": {"window": 5}}))]
    result["replicas, a window, the session's"] = [
        step(start(Own(of_the_session), 1, {"pattern": {"window": 5}}))
    ]
    engine = start(Own(plain))
    engine.compile(backend="aot_eager")
    result["another backend"] = [step(engine)]
    return result


@pytest.mark.night
def test_when_the_model_is_looked_at(rank_pool: Any) -> None:
    for result in rank_pool(2).run(in_other_orders, timeout_s=120):
        short, short_again, whole = result.pop("short batches")
        assert not short and not short_again, "whole samples on each rank need no ring"
        assert LOCAL in whole
        assert LOCAL in result.pop("evaluation first")[0]
        assert LOCAL in result.pop("right in evaluation")[0]
        assert "the pattern SlidingWindow(window=5" in result.pop("replicas, a window")[0]
        assert NO_PASS in result.pop("another backend")[0]
        assert result == {"replicas": [""], "replicas, a window, the session's": [""]}


class Losing(Own):
    """Returns its mean over the local labels, as a loop without a ring wants it."""

    def forward(self, input_ids: Tensor, shift_labels: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        return functional.cross_entropy(super().forward(input_ids).flatten(0, 1), shift_labels.flatten())


def warned(rank: int, world_size: int) -> dict[str, list[str]]:
    """The warnings of two steps of a model that gets these tensors of a batch."""
    result: dict[str, list[str]] = {}

    everything = ("input_ids", "position_ids", "shift_labels", "num_items_in_batch")
    for case, model, names in (
        ("all", Own, everything),
        ("no positions", Own, ("input_ids",)),
        ("its loss", Losing, everything[:3]),
        ("its loss, the items given", Losing, everything),
        ("copies", Losing, ("input_ids", "shift_labels")),
    ):
        engine = start(model(of_the_session))
        with listen("ds_ring.engines.deepspeed.refusals") as result[case]:
            for _ in range(2):
                whole = build_batch(SIZE)
                whole["labels"][:, SIZE.tokens // 2 :] = -100
                batch = engine.ring.shard_batch(whole)
                inputs = {name: batch[name].clone() if case == "copies" else batch[name] for name in names}
                out = engine(**inputs)
                engine.backward(out if out.ndim == 0 else out.mean())
                engine.step()
    return result


def test_positions_and_a_loss_of_ones_own_are_a_warning(rank_pool: Any) -> None:
    first, *others = rank_pool(2).run(warned, timeout_s=120)
    (positions,) = first.pop("no positions")
    assert positions.startswith("Own was called without the batch's position_ids")
    assert "the 12 of each rank from 0 on, of 24" in positions
    (loss,) = first.pop("its loss")
    assert loss.startswith("Losing returned a loss of its own without num_items_in_batch")
    assert not any(first.values())
    assert not any(item for peer in others for item in peer.values()), "rank 0 says it"


def switched(rank: int, world_size: int, implementation: str) -> tuple[str, Tensor]:
    engine = start(build_model(SIZE, implementation))
    batch = engine.ring.shard_batch(build_batch(SIZE))
    with torch.no_grad():
        return engine.module.config._attn_implementation, engine.ring.gather(engine(**batch).logits)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
def test_a_transformers_model_gets_the_rings_attention(rank_pool: Any, implementation: str) -> None:
    batch = build_batch(SIZE)
    with torch.no_grad():
        expected = build_model(SIZE, "sdpa")(**batch).logits
    real = batch["attention_mask"].bool()
    for name, logits in rank_pool(2).run(switched, implementation):
        assert name == "ds_ring"
        assert torch.allclose(logits[real], expected[real], atol=1e-5)

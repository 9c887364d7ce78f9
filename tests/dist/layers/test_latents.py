"""Latents on the wire: multi-head latent attention against one process, and against absorbed projections.

Two references: keys and values that are expanded before dense attention, and the up-projection absorbed into
queries and outputs, so that attention runs among latents (DeepSeek-V2, section 2.1.2). In float64 outputs and
each gradient by itself, on several rings, layouts and patterns.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ds_ring
from ds_ring import (
    Alibi,
    Causal,
    Documents,
    RingMesh,
    SlidingWindow,
    latent_attention,
    make_layout,
    shard_sequence,
)
from ds_ring.layers.latents.kernel import LatentKernel
from ds_ring.layers.latents.latent_op import latent_attention_op
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.patterns.captured.score_mod import ScoreMod
from tests import calls
from tests.dist.deepspeed_ranks import (
    Size,
    build_batch,
    build_latent_model,
    build_model,
    json_config,
    start_deepspeed,
    start_engine,
    take_step,
)
from tests.dist.harness import Pool, catch_refusal
from tests.dist.one_process import Layer, attend_densely, same_as_one_process
from tests.reference import relative_error

B, T, H = 2, 61, 4
NOPE, ROPE, VALUE, LATENT = 6, 4, 5, 8
IDS = [0] * 9 + [1] * 20 + [2] * 2 + [3] * 30
PATTERNS: dict[str, Pattern] = {
    "causal": Causal(),
    "documents": Causal() & Documents(IDS),
    "window": SlidingWindow(13),
}


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Global tensors of a layer."""
    torch.manual_seed(0)
    shapes = {
        "q": (B, H, T, NOPE + ROPE), "latent": (B, 1, T, LATENT), "rope": (B, 1, T, ROPE),
        "up": (H * (NOPE + VALUE), LATENT),
    }  # fmt: skip
    return {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def expanded(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, pattern: Pattern) -> Tensor:
    """The output of dense attention over expanded keys and values, in float64."""
    q, latent, rope, weight = (x.double() for x in (q, latent, rope, up))
    both = torch.einsum("bsl,hdl->bhsd", latent[:, 0], weight.unflatten(0, (H, -1)))
    k = torch.cat([both[..., :NOPE], rope.expand(-1, H, -1, -1)], dim=-1)
    return attend_densely(q, k, both[..., NOPE:], pattern)[0].to(up.dtype)


def absorbed(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, pattern: Pattern) -> Tensor:
    """The output of attention among latents, whose up-projection is in queries and output."""
    of_keys, of_values = up.unflatten(0, (H, -1)).split([NOPE, VALUE], dim=1)
    inner = torch.einsum("bhsd,hdl->bhsl", q[..., :NOPE], of_keys)
    q = torch.cat([inner, q[..., NOPE:]], dim=-1)
    # the scale of the scores is that of the layer's head_dim
    q = q * (q.shape[-1] / (NOPE + ROPE)) ** 0.5
    out = attend_densely(q, torch.cat([latent, rope], dim=-1), latent, pattern)[0]
    return torch.einsum("bhsl,hel->bhse", out, of_values)


def on_a_ring(
    mesh: RingMesh,
    layout_name: str,
    pattern_name: str,
    compiled: bool = False,
    chunk_bytes: int | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Layer:
    pattern, sizes = PATTERNS[pattern_name], {"ring_size": mesh.ring_size, "multiple_of": mesh.ulysses_size}
    layout = make_layout(layout_name, tokens=T, pattern=pattern, **sizes)

    def call(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
        if chunk_bytes is not None:  # an option of the JSON only
            context = make_ring_context(pattern, layout, mesh, Options(chunk_bytes=chunk_bytes))
            return latent_attention_op(q, latent, rope, up, context.handle)[0]
        named = {"pattern": pattern, "layout": layout, "mesh": mesh, "up_projection": up}
        return calls.attend(q, latent, rope, **named, **options)  # type: ignore[no-any-return]

    attend: Any = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    return Layer(inputs(dtype), partial(expanded, pattern=pattern), attend, mesh, layout, parameters=["up"])


def with_options(mesh: RingMesh, options: dict[str, Any]) -> Layer:
    return on_a_ring(mesh, "zigzag", **({"pattern_name": "causal"} | options))


def test_the_two_references_agree() -> None:
    for pattern in PATTERNS.values():
        arguments = inputs()
        assert (
            relative_error(absorbed(**arguments, pattern=pattern), expanded(**arguments, pattern=pattern))
            < 1e-12
        )


@pytest.mark.parametrize("pattern", list(PATTERNS))
@pytest.mark.parametrize(
    ("world_size", "layout", "ulysses"),
    [(1, "contiguous", 1), (2, "zigzag", 1), (4, "zigzag", 1), (4, "striped", 1), (4, "zigzag", 2)],
)
@pytest.mark.covering(1)
def test_exact(rank_pool: Pool, world_size: int, layout: str, ulysses: int, pattern: str) -> None:
    same_as_one_process(rank_pool(world_size), on_a_ring, (layout, pattern), ulysses=ulysses, count=5)


@pytest.mark.day(
    "{'transport': 'all_gather'}",
    "{'chunk_bytes': 1, 'pattern_name': 'documents'}",
    "{'kernel': 'flash', 'dtype': torch.float32}",
)
@pytest.mark.parametrize(
    "options",
    [
        {"transport": "all_gather"},
        {"kernel": "reference"},
        {"kernel": "flash", "dtype": torch.float32},
        {"chunk_bytes": 1},
        {"chunk_bytes": 1, "pattern_name": "documents"},
        {"compiled": True},
        {"ulysses": 2, "compiled": True},
        {"dtype": torch.float32},
    ],
    ids=str,
)
def test_every_way_of_doing_it_gives_the_same(rank_pool: Pool, options: dict[str, Any]) -> None:
    bound, options = 1e-12 if "dtype" not in options else 1e-5, dict(options)
    ulysses = options.pop("ulysses", 1)
    same_as_one_process(rank_pool(2), with_options, (options,), ulysses=ulysses, bound=bound, count=5)


# --- beside other arguments, against the ring with expanded keys -----------------------------------


def beside(rank: int, world_size: int) -> dict[str, float]:
    """Worst relative difference, by what stands beside the latents."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=T, ring_size=world_size)
    whole = inputs()
    up, grad = whole.pop("up"), torch.randn(B, H, T, VALUE, dtype=torch.float64)
    *shards, grad = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in (*whole.values(), grad))
    sinks = torch.linspace(-1, 1, H, dtype=torch.float64).requires_grad_()
    leaves = [x.requires_grad_() for x in (*shards, up, sinks)]

    def call(
        latents: bool, *arguments: Tensor, by_heads: bool = False, **options: Any
    ) -> tuple[Tensor, Tensor]:
        q, k, v, up, sinks = arguments
        if latents:
            options |= {"up_projection": up}
        else:
            both = torch.nn.functional.linear(k[:, 0], up).unflatten(-1, (H, -1)).transpose(1, 2)
            k, v = torch.cat([both[..., :NOPE], v.expand(-1, H, -1, -1)], dim=-1), both[..., NOPE:]
        named = {"pattern": Causal(), "layout": layout, "mesh": mesh, "return_lse": True, "sinks": sinks}
        if latents and by_heads:  # an option of the JSON only
            few = Options(chunk_bytes=1, score_mod=ScoreMod(options["score_mod"]))
            handle = make_ring_context(Causal(), layout, mesh, few).handle
            return latent_attention_op(q, k, v, up, handle, sinks)
        result: tuple[Tensor, Tensor] = calls.attend(q, k, v, **named, **options)
        return result

    def results(latents: bool, again: bool, **options: Any) -> list[Tensor]:
        run = partial(call, latents, **options)
        out, lse = checkpoint(run, *leaves, use_reentrant=False) if again else run(*leaves)
        loss = (out * grad).sum() + (lse.nan_to_num(neginf=0.0) ** 2).sum()
        *grads, of_up, of_sinks = torch.autograd.grad(loss, leaves)
        dist.all_reduce(of_up)  # here a rank's part is its queries', there its keys'
        return [out.detach(), lse.detach(), *grads, of_up, of_sinks]

    cases: dict[str, dict[str, Any]] = {
        "sinks, lse": {"again": False},
        "a checkpointed region": {"again": True},
        "scores by head, expanded one by one": {
            "again": False,
            "by_heads": True,
            "score_mod": Alibi((0.1, 0.2, 0.3, 0.4)),
        },
    }
    return {
        name: max(map(relative_error, results(True, **case), results(False, **case)))
        for name, case in cases.items()
    }


def test_latents_beside_other_arguments(rank_pool: Pool) -> None:
    for errors in rank_pool(2).run(beside):
        assert len(errors) == 3
        assert max(errors.values()) < 1e-12, errors


# --- a transformers model --------------------------------------------------------------------------

SIZE = Size(hidden=32, layers=2, tokens=61, samples=2)


def train(rank: int, world_size: int, stage: int, latents: object, **model: Any) -> dict[str, Any]:
    """Losses of two steps, how many passes took latents, and the loss of the model off the ring."""
    passes, forward = [0], LatentKernel.forward

    def counting(kernel: LatentKernel, *arguments: Any) -> Any:
        passes[0] += 1
        return forward(kernel, *arguments)

    built = build_latent_model(SIZE, **model)
    section = {"layout": "zigzag", "latents": latents}
    engine = start_engine(built, json_config(world_size, 2, stage, ring_attention=section))
    engine.module.gradient_checkpointing_enable()
    losses = []
    with mock.patch.object(LatentKernel, "forward", counting):
        for _ in range(2):
            losses.append(take_step(engine, build_batch(SIZE)))
        on = passes[0]
        engine.eval()
        with engine.ring.off(), torch.no_grad():
            off = float(engine(**build_batch(SIZE)).loss)
            assert passes[0] == on, "off the ring nothing travels"
        ids = engine.module.generate(torch.arange(1, 8)[None], max_new_tokens=3, do_sample=False)
    return {"losses": losses, "off": off, "passes": on, "ids": ids.tolist()}


@pytest.mark.parametrize(("stage", "latents"), [(1, "auto"), (3, True)])
@pytest.mark.day("3-True")
def test_a_model_trains_as_with_expanded_keys(rank_pool: Pool, stage: int, latents: object) -> None:
    expanded = rank_pool(2).run(train, stage, False)
    for result, second in zip(rank_pool(2).run(train, stage, latents), expanded, strict=True):
        assert second["passes"] == 0 and result["passes"] >= 2 * 2 * 2  # steps, layers, hops
        assert result["losses"] == pytest.approx(second["losses"], rel=1e-5)
        assert result["losses"][1] != pytest.approx(result["losses"][0], rel=1e-3)
        assert result["off"] == pytest.approx(second["off"], rel=1e-5)
        assert result["ids"] == second["ids"]


def refused(rank: int, world_size: int) -> list[str]:
    start_deepspeed()

    def message(model: Any, pattern: dict[str, Any]) -> str:
        section = {"latents": True, "pattern": pattern}
        config = json_config(world_size, 2, 0, ring_attention=section)
        return catch_refusal(ds_ring.initialize, model=model, config=config)

    dilated = {"segment_lengths": [16, 64], "dilation_rates": [1, 4]}
    return [message(build_model(SIZE, "sdpa"), {}), message(build_latent_model(SIZE), dilated)]


def test_latents_that_cannot_travel_are_refused(rank_pool: Pool) -> None:
    for none, by_head in rank_pool(2).run(refused):
        assert '"latents": expected layers that expand a latent' in none and "LlamaForCausalLM" in none
        assert "DeepseekV3Attention" in by_head and "differs between heads" in by_head


# --- DeepSeek V3's sizes ---------------------------------------------------------------------------

HEADS, SIZES = 128, {"nope": 128, "rope": 64, "value": 128, "latent": 512}
FEW = 8  # tokens


def wrong_shapes(rank: int, world_size: int, what: str, compiled: bool) -> str:
    """The error of this rank, of two that share the heads, if rank 1 passes what is no latent."""
    mesh = RingMesh.from_world(1, world_size)
    layout = make_layout("contiguous", tokens=T, ring_size=1, multiple_of=world_size)
    q, latent, rope, up = inputs().values()
    q, latent, rope = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in (q, latent, rope))
    wrong = {
        "heads": (q, latent.expand(-1, 2, -1, -1), rope.expand(-1, 2, -1, -1)),
        "dimensions": (q, latent[0], rope),
        "queries": (q[:, :-1], latent, rope),
    }
    arguments = wrong[what] if rank == 1 else (q, latent, rope)
    place = {"pattern": PATTERNS["causal"], "layout": layout, "mesh": mesh}
    attend = lambda *arguments: latent_attention(*arguments, **place)  # noqa: E731
    run = torch.compile(attend, fullgraph=True, backend="eager") if compiled else attend
    return catch_refusal(run, *arguments, up)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("heads", "latent: expected [batch, 1, tokens, L], got several heads"),
        ("dimensions", "latent: expected [batch, 1, tokens, L], got 3 dimensions"),
        ("queries", "a multiple of K/V heads, got 3 and 2"),
    ],
)
def test_what_is_no_latent_is_refused_beside_ulysses(
    rank_pool: Pool, what: str, words: str, compiled: bool
) -> None:
    """A latent of two heads would be taken for two copies."""
    second, local = rank_pool(2).run(wrong_shapes, what, compiled)
    assert local.startswith("RingShapeError") and words in local, local
    assert second.startswith("RingMismatchError") and words in second, second


def bytes_of_deepseek(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Payload bytes of a forward and a backward pass, with latents and with expanded keys."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=FEW, ring_size=world_size)
    context = make_ring_context(Causal(), layout, mesh, Options())
    nope, rope, value, latent = SIZES.values()

    def shard(heads: int, width: int) -> Tensor:
        return torch.randn(1, heads, FEW // world_size, width, requires_grad=True)

    def count(operator: Any, *operands: Tensor) -> list[int]:
        out = operator(*operands, context.handle)[0]
        counters = context.exchange.counters
        forward, counters.bytes_sent = counters.bytes_sent, 0
        out.sum().backward()
        backward, counters.bytes_sent = counters.bytes_sent, 0
        return [forward, backward]

    q, up = shard(HEADS, nope + rope), torch.randn(HEADS * (nope + value), latent, requires_grad=True)
    return (
        count(latent_attention_op, q, shard(1, latent), shard(1, rope), up),
        count(ring_attention_op, q, shard(HEADS, nope + rope), shard(HEADS, value)),
    )


@pytest.mark.night
def test_deepseek_v3_sends_a_71st(rank_pool: Pool) -> None:
    for latents, expanded in rank_pool(2).run(bytes_of_deepseek):
        for item, second in zip(latents, expanded, strict=True):
            assert item * 71 <= second < item * 72

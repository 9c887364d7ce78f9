"""Sinks, values of another head dimension, a differentiable lse: against dense float64 on gloo ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_ring import (
    Causal,
    RingMesh,
    SlidingWindow,
    make_layout,
    ring_attention,
    shard_sequence,
)
from ds_ring.layers.scores import Alibi, Softcap
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.schedule.plan import build_plan
from tests import calls
from tests.dist.harness import Pool, RankPool, catch_refusal
from tests.dist.one_process import Layer, compare, same_as_one_process

TOKENS, HEADS, KV_HEADS = 131, 8, 4
WIDTHS = ((24, 16), (16, 24))  # of keys and of values: DeepSeek's proportion, and the other way round


def inputs(width: int, v_width: int, dtype: torch.dtype, queries: int = TOKENS) -> dict[str, Tensor]:
    """q, k, v and the sinks, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    sizes = {
        "q": (2, HEADS, queries, width), "k": (2, KV_HEADS, TOKENS, width),
        "v": (2, KV_HEADS, TOKENS, v_width), "sinks": (HEADS,),
    }  # fmt: skip
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}


def dense(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, pattern: Pattern, positions: range
) -> tuple[Tensor, Tensor]:
    """Out and lse, computed in float64."""
    dtype = q.dtype
    q, k, v = (x.double() for x in (q, k, v))
    k_all, v_all = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    seen = pattern.multiplicity(0, HEADS, KV_HEADS, np.array(positions)[:, None], np.arange(TOKENS)[None])
    scores = (q @ k_all.mT / q.shape[-1] ** 0.5).masked_fill(torch.from_numpy(seen == 0), -torch.inf)
    if sinks is not None:  # as transformers' gpt-oss: one more column, which is dropped after the softmax
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    out, lse = scores.softmax(-1)[..., :TOKENS] @ v_all, scores.logsumexp(-1)
    return out.to(dtype), lse.to(torch.promote_types(dtype, torch.float32))


def attention(
    mesh: RingMesh,
    widths: tuple[int, int],
    with_sinks: bool,
    with_lse: bool,
    dtype: torch.dtype = torch.float32,
    pattern: Pattern | None = None,
    **options: Any,
) -> Layer:
    pattern, arguments = pattern or Causal(), inputs(*widths, dtype)
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=mesh.ring_size, multiple_of=mesh.ulysses_size)
    results = slice(None if with_lse else 1)
    if not with_sinks:
        del arguments["sinks"]

    def attend(q: Tensor, k: Tensor, v: Tensor, **sinks: Tensor) -> tuple[Tensor, ...]:
        place: dict[str, Any] = {"pattern": pattern, "layout": layout, "mesh": mesh, "return_lse": True}
        return calls.attend(q, k, v, **place, **sinks, **options)[results]  # type: ignore[no-any-return]

    def alone(**x: Tensor) -> tuple[Tensor, ...]:
        return dense(**x, pattern=pattern, positions=range(TOKENS))[results]

    return Layer(arguments, alone, attend, mesh, layout, parameters=["sinks"])


def with_options(mesh: RingMesh, options: dict[str, Any], *case: Any) -> Layer:
    return attention(mesh, *case, **options)


CASES = [(widths, *which) for widths in WIDTHS for which in ((True, False), (False, True), (True, True))]


def check(pool: RankPool, bound: float, ulysses_size: int = 1, **options: Any) -> None:
    cases = [(options, *case) for case in CASES]
    same_as_one_process(pool, with_options, *cases, ulysses=ulysses_size, bound=bound)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (3, {}),
        (2, {"pattern": SlidingWindow(20)}),
        (4, {"ulysses_size": 2}),
        (2, {"ulysses_size": 2, "kernel": "reference"}),
        (3, {"transport": "all_gather", "kernel": "reference"}),
    ],
    ids=str,
)
@pytest.mark.day("4-{'ulysses_size': 2}")
def test_float32_is_within_1e_5_of_float64(rank_pool: Pool, world_size: int, options: dict[str, Any]) -> None:
    check(rank_pool(world_size), 1e-5, **options)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
@pytest.mark.day("dtype1-0.01")
def test_other_dtypes(rank_pool: Pool, dtype: torch.dtype, bound: float) -> None:
    check(rank_pool(2), bound, dtype=dtype)


def bytes_sent(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Bytes counted forward and back, and those of keys of width 24 and values of width 16 in the plan."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=world_size)
    arguments = inputs(24, 16, torch.bfloat16)
    q, k, v = (shard_sequence(arguments[name], layout, mesh=mesh, dim=2).requires_grad_() for name in "qkv")
    exchange = make_ring_context(Causal(), layout, mesh, Options()).exchange
    out = ring_attention(q, k, v, pattern=Causal(), layout=layout, mesh=mesh)
    forward = exchange.counters.bytes_sent
    out.backward(torch.ones_like(out))
    owned = build_plan(Causal(), layout, query_heads=HEADS, kv_heads=KV_HEADS).rank(rank)
    token = 2 * (24 + 16)  # samples x both widths; elements of 2 bytes, gradients of 4
    planned = [token * owned.tokens_sent * 2, token * (owned.tokens_sent * 2 + owned.tokens_received * 4)]
    return [forward, exchange.counters.bytes_sent - forward], planned


def test_no_padded_byte_is_sent(rank_pool: Pool) -> None:
    for counted, planned in rank_pool(3).run(bytes_sent):
        assert counted == planned and counted[0] > 0


def slopes_and_cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Every index has a say; as FlexAttention's users write it."""
    return Alibi(SLOPES)(2.0 * torch.tanh(score / 2.0), batch, head, query, key) + 0.1 * (batch + query % 3)


SLOPES = tuple(2.0**-n for n in range(HEADS))
SCORE_MODS = {"softcap": Softcap(1.5), "ALiBi": Alibi(SLOPES), "both": slopes_and_cap}


def modified(
    rank: int, world_size: int, which: str, ulysses_size: int = 1, **options: Any
) -> tuple[dict[str, float], list[str]]:
    """Errors of out and gradients in float64; then what a rank with another function hears."""
    mesh = RingMesh.from_world(world_size // ulysses_size, ulysses_size)
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=mesh.ring_size, multiple_of=ulysses_size)
    whole, function = inputs(16, 16, torch.float64), SCORE_MODS[which]
    del whole["sinks"]
    rest: dict[str, Any] = {"pattern": Causal(), "layout": layout, "mesh": mesh} | options

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        scores = q @ k.mT / 4
        b, h, i, j = (torch.arange(n) for n in scores.shape)
        scores = function(scores, b[:, None, None, None], h[:, None, None], i[:, None], j)
        return scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1) > 0, -torch.inf).softmax(-1) @ v

    def attend(q: Tensor, k: Tensor, v: Tensor, **extra: Any) -> Any:
        return calls.attend(q, k, v, **({"score_mod": function} | rest | extra))

    errors = compare(Layer(whole, alone, attend, mesh, layout))
    local = [shard_sequence(x, layout, mesh=mesh, dim=2) for x in whole.values()]
    wrong = {"score_mod": Softcap(rank + 1.0)}, {"score_mod": function, "kernel": "cpu"}
    return errors, [catch_refusal(attend, *local, **mine) for mine in wrong]


@pytest.mark.day("both-2-options4")
@pytest.mark.parametrize(
    ("which", "world_size", "options"),
    [
        ("softcap", 3, {}),
        ("ALiBi", 4, {"ulysses_size": 2}),
        ("both", 3, {}),
        ("both", 2, {"transport": "all_gather"}),
        ("both", 2, {"kernel": "auto"}),
    ],
)
def test_changed_scores(rank_pool: Pool, which: str, world_size: int, options: dict[str, Any]) -> None:
    for errors, heard in rank_pool(world_size).run(modified, which, **{"kernel": "reference"} | options):
        assert max(errors.values()) < 1e-12, errors
        assert heard[0].startswith("RingMismatchError") and "score_mod" in heard[0]
        assert heard[1].startswith("RingConfigError") and '"reference"' in heard[1]


def wrong_sinks(rank: int, world_size: int, which: str) -> str:
    mesh = RingMesh.from_world(world_size // 2, 2)
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=mesh.ring_size, multiple_of=2)
    arguments = inputs(16, 16, torch.float32)
    q, k, v = (shard_sequence(arguments[name], layout, mesh=mesh, dim=2) for name in "qkv")
    sinks: Any = arguments["sinks"]
    if rank == 0 and which == "none on the first":
        sinks = None
    elif rank == 1:
        sinks = {
            "of one rank's heads": sinks[:4], "of two dimensions": sinks[None], "integers": sinks.long(),
            "a list": [0.0] * HEADS, "none": None, "bfloat16": sinks.bfloat16(),
        }.get(which, sinks)  # fmt: skip
    attend = partial(ring_attention, q, k, v, pattern=Causal(), layout=layout, mesh=mesh)
    result = catch_refusal(attend, sinks=sinks)
    attend(sinks=arguments["sinks"])  # the ring goes on after a refusal
    return result


@pytest.mark.parametrize(
    "which",
    [
        "of one rank's heads", "of two dimensions", "integers", "a list", "none", "none on the first",
        "bfloat16",
    ],
)  # fmt: skip
def test_wrong_sinks_raise_on_every_rank(rank_pool: Pool, which: str) -> None:
    result = rank_pool(4).run(wrong_sinks, which)
    refused = which in ("of one rank's heads", "of two dimensions", "integers", "a list")
    owned = "RingShapeError" if refused else "RingMismatchError"
    names = ["RingMismatchError", owned, *["RingMismatchError"] * 2]
    assert [text.partition(":")[0] for text in result] == names
    assert all("sinks" in text for text in result), result

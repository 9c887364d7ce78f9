"""Sinks, values of another head dimension, a differentiable lse: against dense float64 on gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_ring import (
    Causal,
    RingMesh,
    SlidingWindow,
    gather_sequence,
    make_layout,
    ring_attention,
    shard_sequence,
)
from ds_ring.layers.scores import Alibi, Softcap
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import context_for
from ds_ring.ops.options import Options
from ds_ring.schedule.plan import build_plan
from tests import calls
from tests.dist.harness import RankPool
from tests.reference import relative_error

Pool = Callable[[int], RankPool]
TOKENS, HEADS, KV_HEADS = 131, 8, 4
WIDTHS = ((24, 16), (16, 24))  # of keys and of values: DeepSeek's proportion, and the other way round


def inputs(width: int, v_width: int, dtype: torch.dtype, queries: int = TOKENS) -> list[Tensor]:
    """q, k, v, the sinks, and the gradients of out and lse, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    b, h, g, t = 2, HEADS, KV_HEADS, TOKENS
    sizes = [
        (b, h, queries, width), (b, g, t, width), (b, g, t, v_width), (h,), (b, h, queries, v_width),
        (b, h, queries),
    ]  # fmt: skip
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def dense(
    pattern: Pattern, given: list[Tensor], with_sinks: bool, with_lse: bool, positions: range
) -> list[Tensor]:
    """out, lse, dq, dk, dv and dsinks in float64."""
    q, k, v, sinks = (x.double().requires_grad_() for x in given[:4])
    grad_out, grad_lse = (x.double() for x in given[4:])
    k_all, v_all = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    seen = pattern.multiplicity(0, HEADS, KV_HEADS, np.array(positions)[:, None], np.arange(TOKENS)[None])
    scores = (q @ k_all.mT / q.shape[-1] ** 0.5).masked_fill(torch.from_numpy(seen == 0), -torch.inf)
    if with_sinks:  # as transformers' gpt-oss does it: one more column, which is dropped after the softmax
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    out, lse = scores.softmax(-1)[..., :TOKENS] @ v_all, scores.logsumexp(-1)
    loss = (out * grad_out).sum() + (lse * grad_lse).sum() * with_lse
    loss.backward()
    of_sinks = sinks.grad if sinks.grad is not None else torch.zeros_like(sinks)
    return [x.detach() for x in (out, lse, q.grad, k.grad, v.grad, of_sinks) if x is not None]


def errors_of(got: list[Tensor], want: list[Tensor]) -> list[float]:
    """Relative error of each of out, lse, dq, dk, dv, dsinks."""
    return [
        relative_error(a, b) if b.abs().max() > 0 else float(a.abs().max())
        for a, b in zip(got, want, strict=True)
    ]


def sharded(
    rank: int,
    world_size: int,
    ulysses_size: int = 1,
    dtype: torch.dtype = torch.float32,
    pattern: Pattern | None = None,
    **options: Any,
) -> dict[str, list[float]]:
    """Errors by case; dsinks are summed over the ranks as an engine sums them."""
    mesh = RingMesh.from_world(world_size // ulysses_size, ulysses_size)
    pattern = pattern or Causal()
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=mesh.ring_size, multiple_of=ulysses_size)
    found = {}
    for width, v_width in WIDTHS:
        for with_sinks, with_lse in ((True, False), (False, True), (True, True)):
            given = inputs(width, v_width, dtype)
            q, k, v = (shard_sequence(x, layout, mesh=mesh, dim=2).requires_grad_() for x in given[:3])
            sinks = given[3].clone().requires_grad_()
            grad_out, grad_lse = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in given[4:])
            out, lse = calls.attend(
                q, k, v, pattern=pattern, layout=layout, mesh=mesh, sinks=sinks if with_sinks else None,
                return_lse=True, **options,
            )  # fmt: skip
            assert out.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)
            loss = (out * grad_out).sum() + ((lse * grad_lse).sum() if with_lse else 0)
            loss.backward()
            dsinks = sinks.grad if sinks.grad is not None else torch.zeros_like(sinks)
            assert dsinks.dtype == dtype
            dist.all_reduce(dsinks)
            local = [x for x in (out, lse, q.grad, k.grad, v.grad) if x is not None]
            got = [gather_sequence(x.detach(), layout, mesh=mesh, dim=2) for x in local] + [dsinks]
            if rank == 0:
                want = dense(pattern, given, with_sinks, with_lse, range(TOKENS))
                found[f"{width}/{v_width} sinks {with_sinks} lse {with_lse}"] = errors_of(got, want)
    return found


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
    errors = rank_pool(world_size).run(sharded, **options)[0]
    assert len(errors) == 6
    assert max(max(one) for one in errors.values()) < 1e-5, errors


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
@pytest.mark.day("dtype1-0.01")
def test_other_dtypes(rank_pool: Pool, dtype: torch.dtype, bound: float) -> None:
    errors = rank_pool(2).run(sharded, dtype=dtype)[0]
    assert max(max(one) for one in errors.values()) < bound, errors


def replicated(rank: int, world_size: int) -> list[float]:
    """Errors with queries that every rank has; dq and dsinks are whole everywhere."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("contiguous", tokens=TOKENS, ring_size=world_size)
    given = inputs(24, 16, torch.float32, queries=7)
    q, sinks = given[0].requires_grad_(), given[3].requires_grad_()
    k, v = (shard_sequence(x, layout, mesh=mesh, dim=2).requires_grad_() for x in given[1:3])
    out, lse = calls.attend(
        q, k, v, pattern=Causal(), layout=layout, mesh=mesh, queries="replicated", sinks=sinks,
        return_lse=True,
    )  # fmt: skip
    ((out * given[4]).sum() + (lse * given[5]).sum()).backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None and sinks.grad is not None
    whole = [gather_sequence(x, layout, mesh=mesh, dim=2) for x in (k.grad, v.grad)]
    given = [x.detach() for x in given]
    want = dense(Causal(), given, True, True, range(TOKENS - 7, TOKENS))
    return errors_of([out, lse, q.grad, *whole, sinks.grad], want)


def test_replicated_queries(rank_pool: Pool) -> None:
    assert max(max(one) for one in rank_pool(3).run(replicated)) < 1e-5


def bytes_sent(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Bytes counted forward and back, and those of keys of width 24 and values of width 16 in the plan."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=world_size)
    given = inputs(24, 16, torch.bfloat16)
    q, k, v, grad = (
        shard_sequence(x, layout, mesh=mesh, dim=2).requires_grad_() for x in (*given[:3], given[4])
    )
    exchange = context_for(Causal(), layout, mesh, Options()).exchange
    assert exchange is not None
    out = ring_attention(q, k, v, pattern=Causal(), layout=layout, mesh=mesh)
    forward = exchange.counters.bytes_sent
    out.backward(grad)
    own = build_plan(Causal(), layout, query_heads=HEADS, kv_heads=KV_HEADS).rank(rank)
    token = 2 * (24 + 16)  # samples x both widths; elements of 2 bytes, gradients of 4
    planned = [token * own.tokens_sent * 2, token * (own.tokens_sent * 2 + own.tokens_received * 4)]
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
) -> tuple[list[float], list[str]]:
    """Errors of out and gradients in float64; then what a rank with another function hears."""
    mesh = RingMesh.from_world(world_size // ulysses_size, ulysses_size)
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=mesh.ring_size, multiple_of=ulysses_size)
    given = inputs(16, 16, torch.float64)
    q, k, v = (x.requires_grad_() for x in given[:3])
    function, k_all = SCORE_MODS[which], k.repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = q @ k_all.mT / 4
    at = (
        torch.arange(n).view(shape)
        for n, shape in zip(scores.shape, ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,)), strict=True)
    )
    scores = function(scores, *at).masked_fill(torch.ones(TOKENS, TOKENS).triu(1) > 0, -torch.inf)
    wanted = scores.softmax(-1) @ v.repeat_interleave(HEADS // KV_HEADS, dim=1)
    want = [wanted.detach(), *torch.autograd.grad(wanted, (q, k, v), given[4])]
    local = [shard_sequence(x.detach(), layout, mesh=mesh, dim=2).requires_grad_() for x in (q, k, v)]
    rest: dict[str, Any] = {"pattern": Causal(), "layout": layout, "mesh": mesh} | options
    out = calls.attend(*local, score_mod=function, **rest)
    grads = torch.autograd.grad(out, local, shard_sequence(given[4], layout, mesh=mesh, dim=2))
    got = [gather_sequence(x.detach(), layout, mesh=mesh, dim=2) for x in (out, *grads)]
    heard = []
    for mine in ({"score_mod": Softcap(rank + 1.0)}, {"score_mod": function, "kernel": "cpu"}):
        try:
            calls.attend(*local, **rest | mine)
        except Exception as error:
            heard.append(f"{type(error).__name__}: {error}")
    return errors_of(got, want), heard


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
@pytest.mark.day("ALiBi-4-options1", "both-3-options2", "both-2-options4")
def test_changed_scores(rank_pool: Pool, which: str, world_size: int, options: dict[str, Any]) -> None:
    for errors, heard in rank_pool(world_size).run(modified, which, **{"kernel": "reference"} | options):
        assert max(errors) < 1e-12, errors
        assert heard[0].startswith("RingMismatchError") and "score_mod" in heard[0]
        assert heard[1].startswith("RingConfigError") and '"reference"' in heard[1]


def wrong_sinks(rank: int, world_size: int, which: str) -> tuple[str, str]:
    mesh = RingMesh.from_world(world_size // 2, 2)
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=mesh.ring_size, multiple_of=2)
    given = inputs(16, 16, torch.float32)
    q, k, v = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in given[:3])
    sinks: Any = given[3]
    if rank == 0 and which == "none on the first":
        sinks = None
    elif rank == 1:
        sinks = {
            "of one rank's heads": sinks[:4], "of two dimensions": sinks[None], "integers": sinks.long(),
            "a list": [0.0] * HEADS, "none": None, "bfloat16": sinks.bfloat16(),
        }.get(which, sinks)  # fmt: skip
    try:
        ring_attention(q, k, v, pattern=Causal(), layout=layout, mesh=mesh, sinks=sinks)
    except Exception as error:
        found = type(error).__name__, str(error)
    # The ring goes on after a refusal.
    ring_attention(q, k, v, pattern=Causal(), layout=layout, mesh=mesh, sinks=given[3])
    return found


@pytest.mark.parametrize(
    "which",
    [
        "of one rank's heads", "of two dimensions", "integers", "a list", "none", "none on the first",
        "bfloat16",
    ],
)  # fmt: skip
def test_wrong_sinks_raise_on_every_rank(rank_pool: Pool, which: str) -> None:
    found = rank_pool(4).run(wrong_sinks, which)
    refused = which in ("of one rank's heads", "of two dimensions", "integers", "a list")
    own = "RingShapeError" if refused else "RingMismatchError"
    assert [name for name, _ in found] == ["RingMismatchError", own, *["RingMismatchError"] * 2]
    assert all("sinks" in text for _, text in found), found

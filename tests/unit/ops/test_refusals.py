"""Refusals that no other test triggers, each by its shortest call, on one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ds_ring
from ds_ring import Causal, RingAttention, RingMesh, SlidingWindow
from ds_ring.contrib.compile.graph_attention import Scope, _values
from ds_ring.contrib.compile.graph_sharding import check_positions
from ds_ring.errors import RingConfigError, RingLayoutError, RingPatternError, RingShapeError
from ds_ring.kernels.flash.executors import Flash
from ds_ring.kernels.flash.kernel import _get_padded_dims
from ds_ring.kernels.flex.kernel import FlexKernel
from ds_ring.kernels.select import get_kernel
from ds_ring.layers.scores import Softcap
from ds_ring.memory.tiles.deferred_logits import DeferredLogits
from ds_ring.models.backend_mark import needs_backend_op
from ds_ring.ops import prepare
from ds_ring.ops.checks import check_finite, check_not_captured, sees_plain
from ds_ring.ops.compiled import _OBJECT, _make_again
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options, as_value
from ds_ring.ops.shard import _ReduceScatter
from ds_ring.ops.tracing import constant, read_number
from ds_ring.patterns.captured.score_mod import ScoreMod
from ds_ring.plugin import TRACERS
from ds_ring.schedule.grid import Grid
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.pieces import round_to_blocks
from ds_ring.schedule.plan import build_plan
from ds_ring.transports.reproducible.blocks import check_blocks, is_in_blocks
from tests import calls
from tests.fake_cuda import fake_gpu, fake_tensors
from tests.refusals import Refusals, refuse

TOKENS = 32
LAYOUT = ds_ring.make_layout("contiguous", tokens=TOKENS, ring_size=1)
Q, K = torch.ones(1, 2, TOKENS, 8), torch.ones(1, 2, TOKENS, 8)
CHOSEN = torch.zeros(1, TOKENS, 2, dtype=torch.int64)


def place() -> dict[str, Any]:
    return {"layout": LAYOUT, "mesh": RingMesh.single()}


def attend(**options: Any) -> Any:
    q, k, v = (options.pop(name, K) for name in "qkv")
    return calls.attend(q, k, v, **{"pattern": Causal(), **place(), **options})


def latents_reproducible() -> Any:
    extra = {"up_projection": torch.ones(2 * 10, 6), "transport": "reproducible"}
    layout = ds_ring.make_layout("contiguous", tokens=128, ring_size=1)
    q, latent, rope = (torch.ones(1, heads, 128, width) for heads, width in ((2, 9), (1, 6), (1, 4)))
    return attend(q=q, k=latent, v=rope, layout=layout, **extra)


def of_two(layout: str) -> Layout:
    return ds_ring.make_layout(layout, tokens=TOKENS, ring_size=2)


def untraced() -> Any:
    with mock.patch.dict(TRACERS, clear=True):
        return as_value(Softcap(2.0))


def batched_gradient(act: Any) -> Any:
    """Act on a gradient that `is_grads_batched=True` hands over."""

    class Acts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            act(grad, RingMesh.single(), 0)
            return grad

    x = torch.ones(2, requires_grad=True)
    return torch.autograd.grad(Acts.apply(x), x, torch.ones(3, 2), is_grads_batched=True)


def other_values() -> Any:
    bias = [1.0]
    mod = ScoreMod(lambda s, b, h, q, k: s + bias[0])
    bias[0] = 2.0
    return mod.traced(torch.float64)


def a_module_whose_score_mod_is_none_now() -> Any:
    bias = [torch.ones(())]
    module = RingAttention(Causal(), **place(), score_mod=lambda s, b, h, q, k: s + bias[0])
    bias[0] = torch.ones(3)
    return module(Q, K, K)


def small_heads_of_flex() -> Any:
    tiles = build_plan(Causal(), LAYOUT).rank(0).classes[0].hops[0].tiles
    with FakeTensorMode():
        return FlexKernel()._get_mask(torch.empty(1, 1, TOKENS, 8, device="cuda"), tiles)


def sparse() -> Tensor:
    return torch.ones(1, TOKENS, 2).to_sparse()


def in_a_graph(**wrong: Any) -> Any:
    torch._dynamo.reset()
    run = torch.compile(
        lambda q: ds_ring.ring_attention(q, K, K, pattern=Causal(), **place(), **wrong), backend="eager"
    )
    return run(Q)


ROWS: Refusals = {
    "payloads without hops": (
        lambda: Options(transport="all_gather", gradient_payload="bfloat16"),
        RingConfigError,
        "which has no hops",
    ),
    "stages without hops": (
        lambda: Options(transport="reproducible", stage_bytes=1 << 20), RingConfigError, "passes nothing on"
    ),
    "offload of all heads": (
        lambda: Options(transport="all_gather", offload_attention=True),
        RingConfigError,
        'expected transport "ring".*got "all_gather".*takes all of them at once',
    ),
    "twice recomputed": (
        lambda: Options(recompute_attention=2.0), RingConfigError, "recompute_attention: .*between 0 and 1"
    ),
    "latents, reproducible": (latents_reproducible, RingConfigError, 'latents: .*got "reproducible"'),
    "keys that are no shard": (
        lambda: attend(k=K[:, :, 1:], v=K[:, :, 1:], queries="replicated"), RingShapeError, "k with 31 local"
    ),
    "a kernel that is none, in a graph": (
        lambda: in_a_graph(kernel="pigeon"), RingConfigError, 'kernel: expected one of .*got "pigeon"'
    ),
    "a transport that is none": (
        lambda: attend(transport="pigeon"), RingConfigError, 'transport: expected one of .*got "pigeon"'
    ),
    "options that are none": (
        lambda: attend(options={"transport": "ring"}), RingConfigError, "options: expected PassOptions"
    ),
    "options that are none, in a graph": (
        lambda: in_a_graph(options="ring"), RingConfigError, "options: expected PassOptions"
    ),
    "a device without a kernel": (lambda: get_kernel("auto", "xpu"), RingConfigError, "which has none"),
    "scores by cpu": (
        lambda: get_kernel("cpu", "cpu", scores=ScoreMod(Softcap(2.0)).for_heads(range(2))),
        RingConfigError, "expected a kernel that changes scores",
    ),
    "small heads of flex": (small_heads_of_flex, RingShapeError, "head_dim 16 or more, got 8"),
    "captured values that changed": (other_values, RingConfigError, "captured values that stay as they were"),
    "a score_mod that is none any more": (
        a_module_whose_score_mod_is_none_now, RingConfigError, "score_mod.*without dimensions"
    ),
    "keys in a list": (
        lambda: ds_ring.ring_select(lambda rows, keys: keys, 2, [1], **place()), RingShapeError, "got list"
    ),
    "a choice in a list": (
        lambda: ds_ring.selected_attention(Q, K, K, [1], **place()), RingShapeError, "expected a tensor"
    ),
    "blocks of nothing": (
        lambda: ds_ring.selected_attention(Q, K, K, CHOSEN, block_size=0, **place()),
        RingShapeError, "block_size",
    ),
    "blocks of keys in a list": (
        lambda: ds_ring.moba_attention([1], K, K, block_size=4, top_k=2, **place()),
        RingShapeError, "got list",
    ),
    "a halo of nothing": (
        lambda: ds_ring.halo(torch.ones(1, TOKENS, 2), 0, dim=1, **place()), RingShapeError, "got 0 for both"
    ),
    "a sparse halo": (lambda: ds_ring.halo(sparse(), 1, dim=1, **place()), RingShapeError, "a dense tensor"),
    "a sparse scan": (
        lambda: ds_ring.ring_scan(sparse(), sparse(), **place()), RingShapeError, "expected a dense tensor"
    ),
    "a choice of keys under vmap": (
        lambda: torch.func.vmap(lambda x: ds_ring.ring_select(lambda rows, keys: keys, 2, x, **place()))(
            torch.ones(2, 1, TOKENS, 2)
        ),
        RingConfigError, "ring_select.*outside of torch.func",
    ),
    "a layout of another ring": (
        lambda: attend(layout=ds_ring.make_layout("contiguous", tokens=64, ring_size=2)),
        RingLayoutError, "1 ranks",
    ),
    "an attention that is not rewritten": (
        lambda: needs_backend_op(torch.zeros(1, TOKENS)), RingConfigError, "does not go through the backend"
    ),
    "positions of fewer tokens, for a backend": (
        lambda: check_positions(torch.arange(TOKENS - 1)[None], SimpleNamespace(pattern=Causal(), **place())),
        RingShapeError, "position_ids: expected 32 local tokens",
    ),
    "values that a backend cannot read": (
        lambda: _values("x", Scope(torch.fx.GraphModule({}, torch.fx.Graph()))), RingPatternError,
        "made of str",
    ),
    "heads that no operator of flash takes": (
        lambda: _get_padded_dims((Flash(),), 256, 300, True), RingShapeError,
        "got 300 with the gradient of the log-sum-exp",
    ),
    "a score_mod that no module traces": (untraced, RingConfigError,
        "score_mod: expected none, as no module traces one, got"),
    "a pattern that a compiled function made": (
        lambda: _make_again((_OBJECT, 0), (SimpleNamespace(value=object.__new__(SlidingWindow)),)),
        RingConfigError,
        "SlidingWindow: expected one that is made outside of the compiled function, got .*make the SlidingW",
    ),
    "blocks of shards with gaps": (
        lambda: round_to_blocks(of_two("striped"), 4), RingLayoutError,
        "expected shards of consecutive positions for blocks of 4 tokens, got others; use the layout",
    ),
    "blocks that runs cut": (
        lambda: check_blocks(of_two("contiguous"), 5), RingLayoutError,
        r"expected runs that begin at multiples of 5 tokens \(block_size\), got others",
    ),
    "a gradient of several at once": (lambda: batched_gradient(_ReduceScatter.apply), RingConfigError,
        r"gather_sequence: expected one gradient at a time, got several \(is_grads_batched=True\); call"),
    "an attribute that deferred logits lack": (
        lambda: DeferredLogits(torch.ones(1, 4, 2), lambda x, job: job(x), 2, 3, True).nothing,
        AttributeError, "nothing",
    ),
}  # fmt: skip


test_it_is_refused = refuse(ROWS)


def test_gradients_of_several_at_once_are_seen() -> None:
    seen: list[bool] = []
    batched_gradient(lambda grad, *_: seen.append(sees_plain([grad])) or grad)
    assert seen == [False] and sees_plain([torch.ones(1), None])


def test_fake_values_are_not_looked_at() -> None:
    with FakeTensorMode():
        check_finite(0, None, q=torch.ones(2))


def test_numbers_are_written_as_texts_for_graphs() -> None:
    """And what is none stays what it is, in tuples, too."""
    written = (constant(3), constant(True), ("text", constant(0.1)), (_OBJECT, 0))
    assert _make_again(written, (SimpleNamespace(value=Q),)) == (3, True, ("text", 0.1), Q)
    assert constant(1e301) == 1e301 and read_number(constant(-0.1)) == -0.1


def test_a_named_layout_has_whole_blocks_where_the_transport_needs_them() -> None:
    options = Options(transport="reproducible", block_size=16)
    context = make_ring_context(Causal(), "contiguous", RingMesh(Grid(2, 2), 0), options)
    layout = context.layout_for(30, "cpu")
    assert [layout.runs(rank).tolist() for rank in range(2)] == [[[0, 1, 32]], [[32, 1, 28]]]
    assert is_in_blocks(layout, 16) and not is_in_blocks(layout, 5)
    assert not is_in_blocks(of_two("striped"), 4)


def test_the_latest_reasons_and_descriptions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "KEPT_DESCRIPTIONS", 2)
    reasons = prepare.PlanReasons()
    for text in "abac":
        reasons.add(text)
    assert list(reasons.texts) == ["a", "c"]
    attention = RingAttention(Causal(), **place())
    for heads in (1, 2, 3):
        x = torch.ones(1, heads, TOKENS, 8)
        attention(x, x, x)
        assert len(attention.context.prepared) == (1, 2, 1)[heads - 1]


def test_a_captured_stream_is_refused() -> None:
    with fake_tensors():
        on_gpu = torch.empty(1, device="cuda")
    not_captured = pytest.raises(RingConfigError, match="a stream that is not captured")
    with fake_gpu(is_current_stream_capturing=True), not_captured:
        check_not_captured(on_gpu)

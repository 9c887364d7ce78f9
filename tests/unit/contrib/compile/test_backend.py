"""The backend on a ring of one: what it rewrites, which masks a pattern may stand for, what it refuses.

Everything runs with inner="eager" and in one process: what a mask means does not depend on the ring. Several
ranks, models and gradients are in tests/dist/test_backend.py.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from ds_ring import (
    Causal,
    Documents,
    Full,
    RingConfig,
    RingConfigError,
    RingError,
    RingMesh,
    RingMeshError,
    RingPatternError,
    RingShapeError,
    SlidingWindow,
    make_layout,
)
from ds_ring.contrib.compile import backend as backend_module
from ds_ring.contrib.compile.backend import BackendOptions, backend
from ds_ring.schedule.grid import Grid

BATCH, HEADS, KV_HEADS, TOKENS, HEAD_DIM = 2, 4, 2, 24, 8
POSITIONS = torch.arange(TOKENS)[None]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def qkv(kv_heads: int = HEADS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(BATCH, heads, TOKENS, HEAD_DIM, generator=generator)
        for heads in (HEADS, kv_heads, kv_heads)
    ]


def compiled(fn: Callable[..., Tensor], pattern: Any = None, **options: Any) -> Callable[..., Tensor]:
    """`fn` through the backend, on a ring of one."""
    known = {"mesh": RingMesh.single(), "pattern": pattern or Causal(), "layout": "contiguous"}
    return torch.compile(fn, backend=backend, fullgraph=True, options={**known, "inner": "eager", **options})


def documents_of(position_ids: Tensor, first: Tensor | None = None) -> Tensor:
    """As transformers finds packed documents."""
    first = position_ids if first is None else first
    diff = torch.diff(position_ids, prepend=first[:, :1] - 1, dim=-1)
    return (diff != 1).cumsum(-1)


def hf_mask(position_ids: Tensor, window: int | None = None, hide: Tensor | None = None) -> Tensor:
    """The mask that transformers' masking_utils makes of position ids, in its own operations."""
    position_ids = position_ids.expand(BATCH, -1)
    packed = documents_of(position_ids)
    batch = torch.arange(BATCH)[:, None, None, None]
    slots = torch.arange(TOKENS) + 0
    q, k = slots[None, None, :, None], slots[None, None, None, :]
    mask = q.new_ones((), dtype=torch.bool)
    mask = mask & (packed[batch, q] == packed[batch, k])
    q_at, k_at = position_ids[batch, q], position_ids[batch, k]
    if window is not None:
        mask = mask & (k_at > q_at - window)
    mask = mask & (k_at <= q_at)
    if hide is not None:
        mask = mask & hide[batch, k]
    return mask.expand(BATCH, -1, TOKENS, TOKENS)


def sdpa_with_mask(
    q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor, window: int | None = None
) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=hf_mask(position_ids, window), scale=0.3)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])


def masked(make: Callable[[], Tensor]) -> Callable[..., Tensor]:
    """Attention by a mask that is made in the graph."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, make())


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention by a mask that comes into the graph from outside."""
    return F.scaled_dot_product_attention(q, k, v, mask)


def make_triangle() -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def compare_slots(compare: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Attention by a comparison of the queries' and the keys' slots."""

    def make() -> Tensor:
        slots = torch.arange(TOKENS)
        return compare(slots[None, None, :, None], slots[None, None, None, :])

    return masked(make)


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = hf_mask(torch.arange(TOKENS)[None])
    out: Tensor = checkpoint(
        lambda *x: F.scaled_dot_product_attention(*x, mask), q, k, v, use_reentrant=False
    )
    return checkpoint(lambda *x: F.scaled_dot_product_attention(*x, mask), out, k, v, use_reentrant=False)


def near(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 5)


NEAR = create_block_mask(near, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=8)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, block_mask=NEAR)  # type: ignore[return-value]


HONOURED = {
    "is_causal": (causal, Causal(), HEADS),
    "grouped queries": (causal, Causal(), KV_HEADS),
    "a triangle": (masked(make_triangle), Causal(), HEADS),
    "no mask": (full, Full(), HEADS),
    "differences": (
        compare_slots(lambda q, k: (q - k >= 0) & (q - k < 7)),
        SlidingWindow(7),
        HEADS,
    ),
    "flex": (flex, SlidingWindow(5), HEADS),
    "inside a checkpoint": (checkpointed, Causal(), HEADS),
}


@pytest.mark.parametrize("case", HONOURED)
def test_the_ring_computes_what_was_asked_for(case: str) -> None:
    fn, pattern, kv_heads = HONOURED[case]
    tensors = qkv(kv_heads)
    expected = fn(*tensors)
    assert torch.allclose(compiled(fn, pattern)(*tensors), expected, atol=1e-6)


@pytest.mark.parametrize("window", [None, 7])
def test_masks_of_position_ids_are_read(window: int | None) -> None:
    tensors = qkv()
    pattern = Causal() if window is None else SlidingWindow(window)
    expected = sdpa_with_mask(*tensors, POSITIONS, window)
    got = compiled(sdpa_with_mask, pattern)(*tensors, POSITIONS, window)
    assert torch.allclose(got, expected, atol=1e-6)


def test_documents_in_the_pattern_are_those_of_the_mask() -> None:
    tensors = qkv()
    packed = torch.cat([torch.arange(10), torch.arange(TOKENS - 10)])[None]
    pattern = Causal() & Documents(position_ids=packed)
    expected = sdpa_with_mask(*tensors, packed)
    assert torch.allclose(compiled(sdpa_with_mask, pattern)(*tensors, packed), expected, atol=1e-6)


def test_documents_that_begin_by_other_positions_are_not_read() -> None:
    """Whether the first slot begins one is then no matter of the positions that are compared."""

    def fn(q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor, others: Tensor) -> Tensor:
        packed = documents_of(position_ids.expand(BATCH, -1), others.expand(BATCH, -1))
        batch = torch.arange(BATCH)[:, None, None, None]
        slots = torch.arange(TOKENS) + 0
        q_at, k_at = slots[None, None, :, None], slots[None, None, None, :]
        mask = (packed[batch, q_at] == packed[batch, k_at]) & (k_at <= q_at)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(BATCH, -1, TOKENS, TOKENS))

    with pytest.raises(RingPatternError, match="cannot be honoured"):
        compiled(fn)(*qkv(), POSITIONS, POSITIONS + 1)


def test_gradients_of_a_checkpoint_are_the_same() -> None:
    grads = []
    for fn in (checkpointed, compiled(checkpointed, inner="aot_eager")):
        tensors = [x.requires_grad_() for x in qkv()]
        fn(*tensors).square().sum().backward()
        grads.append([x.grad for x in tensors])
    for got, want in zip(*grads, strict=True):
        assert torch.allclose(got, want, atol=1e-5)


def graph_of(fn: Callable[..., Tensor], *tensors: Any, **options: Any) -> torch.fx.Graph:
    """The rewritten graph."""
    seen: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, inputs: Any, **extra: Any) -> Any:
        run = backend(module, inputs, **extra)
        seen.append(module.graph)
        return run

    known = {"mesh": RingMesh.single(), "pattern": Causal(), "layout": "contiguous", "inner": "eager"}
    torch.compile(fn, backend=keep, fullgraph=True, options={**known, **options})(*tensors)
    assert len(seen) == 1
    return seen[0]


def grown(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """A factor of the sequence's length, as dynamic rotary embeddings have, made in a checkpoint."""

    def region(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * (positions.max() + 1), k, v, is_causal=True)

    return checkpoint(region, q, use_reentrant=False)  # type: ignore[no-any-return]


def test_the_greatest_position_is_that_of_all_ranks_in_a_checkpoint_too() -> None:
    module = graph_of(grown, *(x.requires_grad_() for x in qkv()), POSITIONS).owning_module
    parts = [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    targets = [node.target for part in parts for node in part.graph.nodes]
    assert targets.count(torch.ops.ds_ring.greatest_position.default) == 1


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """transformers' repeat_kv, which it uses beside a mask."""
    k, v = (
        x[:, :, None].expand(BATCH, KV_HEADS, 2, TOKENS, HEAD_DIM).reshape(BATCH, HEADS, TOKENS, HEAD_DIM)
        for x in (k, v)
    )
    mask = hf_mask(torch.arange(TOKENS)[None])
    first = F.scaled_dot_product_attention(q, k, v, mask)
    return F.scaled_dot_product_attention(first, k, v, mask)


def test_repeated_heads_do_not_travel_and_no_mask_is_made() -> None:
    tensors = qkv(KV_HEADS)
    graph = graph_of(repeated, *tensors)
    attention = [n for n in graph.nodes if n.target is torch.ops.ds_ring.placed_attention.default]
    assert len(attention) == 2
    assert all(n.args[1].meta["example_value"].shape[1] == KV_HEADS for n in attention)
    shapes = [
        n.meta["example_value"].shape for n in graph.nodes if hasattr(n.meta.get("example_value"), "shape")
    ]
    assert not [shape for shape in shapes if shape[-2:] == (TOKENS, TOKENS)]
    places = [n for n in graph.nodes if n.target is torch.ops.ds_ring.place_attention.default]
    assert len(places) == 1  # asked once for all layers
    assert torch.allclose(compiled(repeated)(*tensors), repeated(*tensors), atol=1e-6)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * 0.3
    return torch.softmax(scores, dim=-1) @ v


def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


def make_added_ones() -> Tensor:
    return torch.ones(TOKENS, TOKENS).tril()


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def cap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.tanh(score)

    return flex_attention(q, k, v, score_mod=cap)  # type: ignore[return-value]


def cross(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[:, :, :5], k, v)


def two_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    position_ids = torch.arange(TOKENS)[None]
    return sdpa_with_mask(sdpa_with_mask(q, k, v, position_ids, 5), k, v, position_ids)


def with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = flex_attention(q, k, v, return_lse=True)
    return out * lse.unsqueeze(-1)


def without_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True)


def inside_cond(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cond(q.sum() > 0, full, full, (q, k, v))  # type: ignore[no-any-return]


def by_an_operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]  # type: ignore[no-any-return]


FIRST, SECOND = torch.arange(TOKENS)[None], torch.arange(TOKENS)[None]


def masked_in_a_checkpoint(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    fn = masked(lambda: hf_mask(torch.arange(TOKENS)[None]))
    return checkpoint(fn, q, k, v, use_reentrant=False)  # type: ignore[no-any-return]


ONE = torch.ones(1, 1, 1, dtype=torch.int32)
BY_HAND = BlockMask.from_kv_blocks(ONE, torch.zeros_like(ONE)[None], seq_lengths=(TOKENS, TOKENS))


def blocks_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, block_mask=BY_HAND)  # type: ignore[return-value]


def scaled_by_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=q.shape[2] ** -0.5)


REFUSED: dict[str, tuple[Callable[..., Tensor], Any, type[RingError], str]] = {
    "another mask": (masked(lambda: torch.rand(TOKENS, TOKENS) > 0.5),
        Causal(), RingPatternError, r"its mask \[24, 24\] .* made by rand"),
    "a float mask": (masked(make_added_ones), Causal(), RingPatternError, r"added to the scores \(float32\)"),
    "padding": (
        masked(lambda: hf_mask(
            torch.arange(TOKENS)[None], hide=(torch.arange(TOKENS) < 20).expand(BATCH, -1))),
        Causal(), RingPatternError, r"hides single tokens \(padding\)"),
    "numbers of slots": (compare_slots(lambda i, j: j.bool() & (i >= j)),
        Causal(), RingPatternError, "made by and_.* not known to be causal"),
    "a window of later keys": (compare_slots(lambda i, j: i - j < 5),
        Causal(), RingPatternError, "has a window and is not causal"),
    "a log-sum-exp": (with_lse, Full(), RingPatternError, "its log-sum-exp is used"),
    "no batch": (without_batch, Causal(), RingShapeError, r"expected \[batch, heads, tokens, head_dim\]"),
    "a branch": (inside_cond, Full(), RingPatternError, "attention inside cond.*move it out"),
    "an operator of aten": (by_an_operator, Full(), RingPatternError, "to this rank's tokens only"),
    "two positions": (masked(lambda: hf_mask(FIRST) & hf_mask(SECOND)),
        Causal(), RingPatternError, "two different tensors of positions"),
    "a mask in a checkpoint": (masked_in_a_checkpoint, Causal(), RingPatternError,
        "computed inside an activation checkpoint"),
    "blocks by hand": (blocks_by_hand, Full(), RingPatternError, "use create_block_mask"),
    "the other triangle": (compare_slots(lambda i, j: i < j),
        Causal(), RingPatternError, "cannot be honoured: it is made by lt"),
    "dropout": (with_dropout, Causal(), RingConfigError, "expected dropout_p 0, got 0.1"),
    "written out": (written_out, Causal(), RingPatternError, "attention written out"),
    "a soft cap": (capped, Full(), RingPatternError, "score_mod changes the scores"),
    "cross attention": (cross, Full(), RingShapeError, "as many keys as queries, 5, got 24"),
    "no mask, causal pattern": (full, Causal(), RingPatternError, "model is not causal, the pattern"),
    "causal, full pattern": (causal, Full(), RingPatternError, "model is causal, the pattern"),
    "a window that is not the pattern's": (flex, Causal(), RingPatternError, "layout.* of known length"),
    "windows in some layers": (two_windows, SlidingWindow(5), RingPatternError, "every layer takes its own"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_raises_as_it_is(case: str) -> None:
    fn, pattern, error, words = REFUSED[case]
    run = compiled(fn, pattern)
    for _ in range(2):  # a refusal is not forgotten
        with pytest.raises(error, match=words):
            run(*qkv())


def test_a_scale_of_symbols_is_refused() -> None:
    tensors = qkv()
    for x in tensors:
        torch._dynamo.mark_dynamic(x, 2)
    with pytest.raises(RingPatternError, match="its scale is computed in the graph"):
        compiled(scaled_by_length)(*tensors)


@pytest.mark.parametrize(
    ("mask", "replaced", "words"),
    [
        (make_triangle(), {}, r"comes into the graph from outside.*'masks': 'replace'"),
        (torch.full((TOKENS, TOKENS), float("-inf")).triu(1), {"masks": "replace"},
            r"from outside, where its values .* make it of booleans"),
    ],
    ids=["of booleans", "which may be a bias"],
)  # fmt: skip
def test_a_mask_from_outside_raises_unless_it_is_of_booleans_and_replaced(
    mask: Tensor, replaced: dict[str, str], words: str
) -> None:
    with pytest.raises(RingPatternError, match=words):
        compiled(attend, **replaced)(*qkv(), mask)
    torch._dynamo.reset()
    got = compiled(attend, masks="replace")(*qkv(), make_triangle())
    assert torch.allclose(got, attend(*qkv(), mask), atol=1e-6)


def make_alibi() -> Tensor:
    slots = torch.arange(TOKENS)
    distance = (slots[None, :] - slots[:, None]).float()
    bias = 0.5 * distance.masked_fill(distance > 0, float("-inf"))
    return bias.expand(BATCH, HEADS, -1, -1)


def make_many_values() -> Tensor:
    bias = torch.zeros(TOKENS, TOKENS)
    for power in range(12):
        bias = bias + torch.full((TOKENS, TOKENS), float(2**power)).tril()
    return bias


BIASES = {
    "many values": (make_many_values, "with many values"),
    "ALiBi": (make_alibi, "is made by arange"),
    "ones that hide nothing": (make_added_ones, "with 1 among its values"),
    "some scores lower": (
        lambda: torch.where(make_triangle(), 0.0, -2.0),
        "with -2 among its values",
    ),
}


@pytest.mark.parametrize("case", BIASES)
def test_a_bias_is_not_replaced_by_the_pattern(case: str) -> None:
    """It was dropped without a word."""
    make, words = BIASES[case]
    with pytest.raises(RingPatternError, match=f"its mask is added to the scores, .*{words}.*would be lost"):
        compiled(masked(make), masks="replace")(*qkv())


FLOAT_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "full and triu": lambda seen: torch.full((TOKENS, TOKENS), float("-inf")).triu(1),
    "zeros, filled": lambda seen: torch.zeros(TOKENS, TOKENS).masked_fill(
        ~seen, torch.finfo(torch.float).min
    ),
    "where": lambda seen: torch.where(seen, 0.0, float("-inf"))[None, None].expand(BATCH, HEADS, -1, -1),
    "one minus, times the least": lambda seen: (1.0 - seen.float()) * torch.finfo(torch.float).min,
    "a tensor of the least": lambda seen: torch.where(seen, torch.tensor(0.0), torch.tensor(-1e9)),
}


@pytest.mark.parametrize("built", FLOAT_MASKS)
def test_a_float_mask_that_hides_tokens_is_replaced(built: str) -> None:
    fn = masked(lambda: FLOAT_MASKS[built](make_triangle()))
    assert torch.allclose(compiled(fn, masks="replace")(*qkv()), fn(*qkv()), atol=1e-6)


def test_replaced_masks_need_a_layout_of_known_length() -> None:
    """A name stands for any length: 45 tokens on 2 ranks were taken for 48, gradients 2.3 % off."""
    known = {"mesh": RingMesh(Grid(2, 2), 0), "pattern": Causal(), "masks": "replace"}
    with pytest.raises(RingConfigError, match="a Layout with masks"):
        BackendOptions.read(known | {"layout": "zigzag"})
    layout = make_layout("zigzag", tokens=45, ring_size=2, pattern=Causal())
    assert BackendOptions.read(known | {"layout": layout}).masks == "replace"


def test_positions_that_restart_are_not_silently_one_document() -> None:
    packed = torch.cat([torch.arange(10), torch.arange(TOKENS - 10)])[None]
    run = compiled(sdpa_with_mask)
    run(*qkv(), POSITIONS)
    with pytest.raises(RingPatternError, match=r"10 in slot 10\), got 0 in sample 0.*packed documents"):
        run(*qkv(), packed)
    run(*qkv(), POSITIONS)  # in the same graph


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    tensors = qkv()
    got = compiled(sdpa_with_mask)(*tensors, POSITIONS, TOKENS)
    assert torch.allclose(got, sdpa_with_mask(*tensors, POSITIONS), atol=1e-6)


MESH = RingMesh.single()
WRONG_OPTIONS: dict[str, tuple[dict[str, Any], type[RingError], str]] = {
    "none at all": ({}, RingMeshError, "expected to be told the mesh, got none; pass options="),
    "no mesh": ({"mesh": 3, "pattern": Causal()}, RingMeshError, "the mesh, got int"),
    "no pattern": ({"mesh": MESH}, RingConfigError, "expected pattern and layout, got none"),
    "typing error": ({"mesh": MESH, "patern": Causal()}, RingConfigError, "did you mean 'pattern'"),
    "no such layout": ({"mesh": MESH, "pattern": Causal(), "layout": "zagzig"}, RingError, "zagzig"),
    "layout of another ring": (
        {"mesh": MESH, "pattern": Causal(), "layout": make_layout("zigzag", tokens=8, ring_size=2)},
        RingError,
        "got one for 2 ranks",
    ),
    "no pattern at all": ({"mesh": MESH, "pattern": "causal", "layout": "zigzag"}, RingPatternError,
        "causal"),
    "inner": ({"mesh": MESH, "inner": "magic"}, RingConfigError, "expected .*inductor.* got magic"),
    "masks": ({"mesh": MESH, "masks": "ignore"}, RingConfigError, "one of check, replace, got 'ignore'"),
    "session": ({"session": MESH}, RingConfigError, "an engine.ring, got RingMesh"),
    "config": ({"mesh": MESH, "config": {}}, RingConfigError, "expected a RingConfig"),
    "timeout": ({"mesh": MESH, "pattern": Causal(), "layout": "zigzag", "hop_timeout_s": -1}, RingConfigError,
        "hop_timeout_s"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_wrong_options_raise_and_say_what_to_pass(case: str) -> None:
    options, error, words = WRONG_OPTIONS[case]
    run = torch.compile(causal, backend=backend, options=options)
    with pytest.raises(error, match=words):
        run(*qkv())


def test_a_config_is_pattern_layout_and_options() -> None:
    tensors, config = qkv(), RingConfig(ring_size=1, layout="contiguous", kernel="reference")
    run = torch.compile(
        causal, backend=backend, options={"mesh": RingMesh.single(), "config": config, "inner": "eager"}
    )
    assert torch.allclose(run(*tensors), causal(*tensors), atol=1e-6)


def test_the_entry_point_names_the_backend() -> None:
    """What is written in pyproject.toml; an installed copy may be another one, so that is read here."""
    root = Path(__file__).resolve().parents[4]
    written = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    point = importlib.metadata.EntryPoint("ds_ring", written["torch_dynamo_backends"]["ds_ring"], "")
    assert point.load() is backend


def test_a_failed_rewriting_is_an_error_and_never_a_local_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise KeyError("a bug")

    monkeypatch.setattr(backend_module.Rewriting, "run", broken)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a bug"):
        compiled(causal)(*qkv())

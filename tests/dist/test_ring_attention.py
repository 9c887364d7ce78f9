"""Ring attention against dense float64 attention: outputs and each gradient by itself, on real gloo ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from ds_ring import Causal, RingMesh, gather_sequence, make_layout, shard_sequence
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from tests.calls import attend
from tests.cases import LAYOUTS, LENGTHS, PATTERNS, RING_SIZES, Shape, layout_for, tensors
from tests.dist.harness import Pool
from tests.parity import errors, gathered_pass
from tests.reference import dense_attention, relative_error

SMALL = Shape(batch=1, query_heads=4, kv_heads=2, tokens=257)
CHUNKS = ("contiguous", "zigzag", "striped")
# One pattern for each way in which a mask is told: everything, bands, many small tiles, head by head.
KINDS = tuple(name for name in ("full", "window", "documents, causal", "dilated") if name in PATTERNS)


def run_ring(
    mesh: RingMesh, layout_name: str, pattern_name: str, shape: Shape, dtype: torch.dtype, **options: object
) -> list[Tensor]:
    """The gathered output and gradients of a sharded pass."""
    pattern = PATTERNS[pattern_name](shape.tokens)
    sizes = {"tokens": shape.tokens, "ring_size": mesh.ring_size, "multiple_of": mesh.ulysses_size}
    layout = layout_for(layout_name, pattern, **sizes)
    call = partial(attend, pattern=pattern, layout=layout, mesh=mesh, **options)
    result = gathered_pass(call, tensors(shape, dtype), layout, mesh)
    assert {x.dtype for x in result} == {dtype}
    return result


def parity(
    rank: int,
    world_size: int,
    shape: Shape,
    dtype: torch.dtype,
    patterns: tuple[str, ...] = tuple(PATTERNS),
    layouts: tuple[str, ...] = LAYOUTS,
    ulysses_size: int = 1,
    **options: object,
) -> dict:
    """Relative errors of every layout and pattern; on rank 0 (the others hold the same gathered tensors)."""
    mesh = RingMesh.from_world(world_size // ulysses_size, ulysses_size)
    result = {}
    for pattern_name in patterns:
        if rank == 0:
            want = dense_attention(*tensors(shape, dtype), PATTERNS[pattern_name](shape.tokens))
        for layout_name in layouts:
            got = run_ring(mesh, layout_name, pattern_name, shape, dtype, **options)
            if rank == 0:
                named = errors(got, want).items()
                result |= {(layout_name, pattern_name, name): error for name, error in named}
    return result


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("ring_size", RING_SIZES)
@pytest.mark.day("4-511")
def test_float32_is_within_1e_5_of_float64(rank_pool: Pool, ring_size: int, tokens: int) -> None:
    shape, dense, layouts = (
        Shape(batch=1, query_heads=4, tokens=tokens),
        ("causal", "full"),
        CHUNKS if tokens % 2 or ring_size == 8 else LAYOUTS,
    )
    errors = rank_pool(ring_size).run(parity, shape, torch.float32, dense, layouts, timeout_s=120)[0]
    assert len(errors) == len(layouts) * len(dense) * 4
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.night
@pytest.mark.parametrize(("ring_size", "layouts"), [(1, CHUNKS), (3, ("zigzag",)), (3, CHUNKS), (8, CHUNKS)])
def test_bfloat16_is_within_1e_2(rank_pool: Pool, ring_size: int, layouts: tuple[str, ...]) -> None:
    errors = rank_pool(ring_size).run(parity, SMALL, torch.bfloat16, layouts=layouts)[0]
    assert max(errors.values()) < 1e-2, errors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.day("dtype1")
def test_other_dtypes(rank_pool: Pool, dtype: torch.dtype) -> None:
    errors = rank_pool(2).run(parity, Shape(tokens=130), dtype, KINDS, CHUNKS[1:])[0]
    assert max(errors.values()) < (1e-12 if dtype == torch.float64 else 2e-3), errors


@pytest.mark.parametrize("options", [{"kernel": "reference"}, {"overlap": False}, {"prune": False}], ids=str)
@pytest.mark.day("{'prune': False}")  # test_registry.py has the kernel by day, test_patterns.py the overlap
def test_every_way_of_doing_it_gives_the_same(rank_pool: Pool, options: dict[str, object]) -> None:
    shape = Shape(batch=1, tokens=130)
    errors = rank_pool(3).run(parity, shape, torch.float32, KINDS, CHUNKS[1:], **options)[0]
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("patterns", [KINDS, tuple(PATTERNS)], ids=["kinds", "all"])
@pytest.mark.parametrize(
    ("world_size", "layouts"), [(2, ("zigzag", "auto")), (4, ("auto",)), (4, ("zigzag",))]
)
@pytest.mark.day("4-layouts1-kinds")
def test_ulysses_around_the_ring(
    rank_pool: Pool, world_size: int, layouts: tuple[str, ...], patterns: tuple[str, ...]
) -> None:
    options = {"patterns": patterns, "layouts": layouts, "ulysses_size": 2}
    errors = rank_pool(world_size).run(parity, Shape(tokens=203), torch.float32, **options)[0]
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("patterns", [KINDS, tuple(PATTERNS)], ids=["kinds", "all"])
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.day("1-kinds")  # test_patterns.py draws 1 and 5 tokens of every pattern
def test_fewer_tokens_than_ranks(rank_pool: Pool, tokens: int, patterns: tuple[str, ...]) -> None:
    shape = Shape(batch=1, tokens=tokens)
    errors = rank_pool(4).run(parity, shape, torch.float32, patterns, CHUNKS)[0]
    assert max(error for (_, _, name), error in errors.items() if name in ("out", "dv")) < 1e-5, errors


def grouped(rank: int, world_size: int) -> bool:
    """Heads in groups give the same bits as all heads at once."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=130, ring_size=world_size)
    results = []
    for chunk_bytes in (1, 1 << 40):
        context = make_ring_context(Causal(), layout, mesh, Options(chunk_bytes=chunk_bytes))
        q, k, v, grad = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in tensors(Shape(tokens=130)))
        for x in (q, k, v):
            x.requires_grad_()
        out, _ = ring_attention_op(q, k, v, context.handle)
        out.backward(grad)
        results.append([out.detach(), q.grad, k.grad, v.grad])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_heads_in_groups_change_no_bit(rank_pool: Pool) -> None:
    assert all(rank_pool(3).run(grouped))


def gather_gradient(rank: int, world_size: int, same_loss: bool, ulysses: int) -> float:
    """A gathered tensor's gradient with a non-contiguous gradient coming in (silently wrong in torch)."""
    mesh = RingMesh.from_world(world_size // ulysses, ulysses)
    layout = make_layout("striped", tokens=21, ring_size=mesh.ring_size, multiple_of=ulysses)
    whole = torch.randn(2, 21, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = torch.randn(3, 21, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    local = shard_sequence(whole, layout, mesh=mesh, dim=1).requires_grad_()
    gathered = gather_sequence(local, layout, mesh=mesh, dim=1, same_loss=same_loss)
    assert torch.equal(gathered, whole)
    gathered.backward(weight.permute(2, 1, 0))
    losses = 1 if same_loss else world_size  # without it, the sum of the losses of all ranks
    want = shard_sequence(weight.permute(2, 1, 0) * losses, layout, mesh=mesh, dim=1)
    return relative_error(local.grad, want)


@pytest.mark.parametrize(("ranks", "ulysses"), [(3, 1), (4, 2)])
@pytest.mark.parametrize("same_loss", [False, True])
def test_gather_is_the_inverse_of_shard_and_its_gradient_exact(
    rank_pool: Pool, same_loss: bool, ranks: int, ulysses: int
) -> None:
    assert max(rank_pool(ranks).run(gather_gradient, same_loss, ulysses)) < 1e-12


def rows_without_keys(rank: int, world_size: int) -> bool:
    """Padding slots see nothing: out 0, lse -inf, gradients finite."""
    mesh = RingMesh.from_world(world_size)
    shape = Shape(tokens=5)
    layout = make_layout("contiguous", tokens=5, ring_size=world_size)
    q, k, v, grad = (shard_sequence(x, layout, mesh=mesh, dim=2, pad_value=7.0) for x in tensors(shape))
    for x in (q, k, v):
        x.requires_grad_()
    context = make_ring_context(Causal(), layout, mesh, Options())
    out, lse = ring_attention_op(q, k, v, context.handle)
    out.backward(grad)
    valid = layout.valid_tokens(rank)
    assert out[:, :, valid:].eq(0).all() and lse[:, :, valid:].eq(-torch.inf).all()
    for x in (q, k, v):
        assert x.grad is not None and x.grad[:, :, valid:].eq(0).all() and x.grad.isfinite().all()
    return bool(out.isfinite().all())


def test_padding_sees_nothing_and_nobody_sees_it(rank_pool: Pool) -> None:
    assert all(rank_pool(4).run(rows_without_keys))

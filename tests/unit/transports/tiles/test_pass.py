"""The pass on threads: exact in float64 under every mask of the table; its bytes are the plan's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from ds_ring import Causal, make_layout
from ds_ring.comm.messages import Message
from ds_ring.kernels.cpu.kernel import CpuKernel
from ds_ring.transports.tiles import plan as plans
from ds_ring.transports.tiles.grid import PassGrid
from ds_ring.transports.tiles.plan import TokenBytes, list_grids, tile_plan
from tests.cases import LAYOUTS, Shape, layout_for, tensors
from tests.mask_table import HEADS, KV_HEADS, MASKS, TOKENS, dense
from tests.reference import Dense, dense_attention, relative_error
from tests.unit.transports.tiles.threads import on_threads

SHAPE = Shape(batch=1, query_heads=HEADS, kv_heads=KV_HEADS, tokens=TOKENS, head_dim=8)
EXACT = 1e-12
DAY = [name for name in LAYOUTS if name != "residue"]  # which has many runs: four times as long


def whole(shape: Shape = SHAPE) -> list[Tensor]:
    return [x.double() for x in tensors(shape)]


def truth(mask: str, given: Sequence[Tensor]) -> list[Tensor]:
    """Out, dq, dk and dv by the formula of the table, one softmax over all keys."""
    q, k, v = (x.clone().requires_grad_() for x in given[:3])
    m = torch.from_numpy(dense(mask)).double()
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = q @ keys.mT / q.shape[-1] ** 0.5
    weights = m * torch.exp(scores - scores.amax(-1, keepdim=True).detach())
    out = weights @ values / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3])]


def worst(found: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    differences = [float((a - b).abs().max()) for a, b in zip(found, want, strict=True)]
    return max(x if x == x else float("inf") for x in differences)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.day(*(f"{DAY[n // 3 % len(DAY)]}-{mask}" for n, mask in enumerate(MASKS) if n % 3 == 0))
def test_every_mask_is_its_formula_on_every_grid(
    mask: str, layout_name: str, request: pytest.FixtureRequest
) -> None:
    """By day each mask takes the next grid."""
    ranks, pattern, given = 4, MASKS[mask].pattern, whole()
    layout, want = layout_for(layout_name, pattern, tokens=TOKENS, ring_size=ranks), truth(mask, given)
    grids = list_grids(ranks)
    if not request.config.getoption("night"):
        turn = list(MASKS).index(mask) // 3 % len(grids)
        grids = grids[turn : turn + 1]
    for grid in grids:
        found, sent = on_threads(grid, pattern, layout, given)
        assert worst([found[0], *found[2:]], want) < EXACT, grid
        plan = tile_plan(pattern, layout, HEADS, KV_HEADS, grid)
        sizes = [TokenBytes.for_pass(backward, 8, 8, 8, 8) for backward in (False, True)]
        assert sent == [tuple(plan.traffic(rank, size).sent for size in sizes) for rank in range(ranks)]


def compared(found: Sequence[Tensor], want: Dense) -> float:
    return max(relative_error(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 30])
@pytest.mark.covering(1)
def test_grouped_heads_batches_and_a_gradient_of_the_lse(heads: tuple[int, int], chunk_bytes: int) -> None:
    given = whole(Shape(batch=2, query_heads=heads[0], kv_heads=heads[1], tokens=101, head_dim=8))
    grad_lse = torch.randn(
        given[0].shape[:3], dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    layout = make_layout("zigzag", tokens=101, ring_size=4, multiple_of=4)
    want = dense_attention(*given, Causal(), grad_lse)
    for grid in list_grids(4):
        found, _ = on_threads(grid, Causal(), layout, given, grad_lse, CpuKernel, chunk_bytes)
        assert compared(found, want) < EXACT, grid


@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_ranks_without_tokens(tokens: int) -> None:
    given = whole(Shape(batch=1, query_heads=2, kv_heads=1, tokens=tokens, head_dim=8))
    layout = make_layout("zigzag", tokens=tokens, ring_size=6)
    for grid in list_grids(6):
        found, _ = on_threads(grid, Causal(), layout, given)
        assert worst(found, dense_attention(*given, Causal())) < EXACT, grid  # dq of one key is 0


def test_a_part_of_the_own_shard_is_kept_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LEAST_KEPT", 4)
    tile_plan.cache_clear()
    given = whole(Shape(batch=1, query_heads=2, kv_heads=1, tokens=90, head_dim=8))
    layout, grid = make_layout("zigzag", tokens=90, ring_size=4), PassGrid(2, 2)
    found, _ = on_threads(grid, Causal(), layout, given)
    assert compared(found, dense_attention(*given, Causal())) < EXACT
    kept = tile_plan(Causal(), layout, 2, 1, grid).tiles(0, 1).make_block_tiles(plans.GridBlock(0, 0, 2))
    assert len(kept)
    tile_plan.cache_clear()


def test_low_precision_is_as_good_as_one_rank() -> None:
    shape = Shape(batch=1, query_heads=4, kv_heads=2, tokens=512, head_dim=32)
    given = [x.bfloat16() for x in tensors(shape)]
    want = dense_attention(*given, Causal())
    layout = [make_layout("zigzag", tokens=512, ring_size=ranks) for ranks in (1, 4)]
    alone, _ = on_threads(PassGrid(1, 1), Causal(), layout[0], given, None, CpuKernel)
    found, _ = on_threads(PassGrid(2, 2), Causal(), layout[1], given, None, CpuKernel)
    for name, one, four, exact in zip(Dense._fields, alone, found, want, strict=True):
        assert relative_error(four, exact) < 1.5 * relative_error(one, exact) + 1e-6, name


def zeroed(names: Sequence[str]) -> Callable[[Message], Tensor]:
    return lambda message: torch.zeros_like(message.tensor) if message.what in names else message.tensor


def empty(message: Message) -> Tensor:
    """A partial result that is left out: its lse says that no key was seen."""
    return torch.full_like(message.tensor, float("-inf")) if message.what == "lse" else message.tensor


@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [(empty, 0), (zeroed(["dQ"]), 2), (zeroed(["dK"]), 3), (zeroed(["dV"]), 4)],
    ids=["a partial result", "dQ", "dK", "dV"],
)
def test_a_part_that_is_left_out_is_found(spoil: Callable[[Message], Tensor], wrong: int) -> None:
    given = whole()
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=4)
    found, _ = on_threads(PassGrid(2, 2), Causal(), layout, given, spoil=spoil)
    assert relative_error(found[wrong], dense_attention(*given, Causal())[wrong]) > 1e-3

"""What shard_sequence, gather_sequence and the check of finite results refuse on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_ring import (
    Causal,
    Full,
    RingAttention,
    RingConfigError,
    RingError,
    RingLayoutError,
    RingMesh,
    RingMeshError,
    RingShapeError,
    build_plan,
    gather_sequence,
    make_layout,
    shard_sequence,
)
from ds_ring.comm.mesh import check_mesh
from ds_ring.errors import RingFiniteError, check_bool, check_whole_number
from ds_ring.kernels.reference import ReferenceKernel
from ds_ring.limits import MAX_TOKENS
from ds_ring.ops.finite import FiniteKernel
from ds_ring.schedule.grid import Grid
from ds_ring.schedule.lowering import get_kernel_calls

MESH, LAYOUT, X = RingMesh.single(), make_layout("contiguous", tokens=8, ring_size=1), torch.zeros(1, 8, 2)
OTHER: Any = make_layout("contiguous", tokens=8, ring_size=2)


def shard(x: Any = X, layout: Any = LAYOUT, dim: Any = 1, **extra: Any) -> Callable[[], object]:
    return lambda: shard_sequence(x, layout, dim=dim, **({"mesh": MESH} | extra))


def gather(x: Any = X, layout: Any = LAYOUT, dim: Any = 1) -> Callable[[], object]:
    return lambda: gather_sequence(x, layout, mesh=MESH, dim=dim)


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (shard(mesh=None), RingShapeError, "expected one of the two, got neither"),
        (shard(ring_rank=0), RingShapeError, "expected one of the two, got both"),
        (shard(mesh=7), RingMeshError, "mesh: expected a RingMesh, got 7"),
        (shard([1, 2]), RingShapeError, "the tensor: expected"),
        (shard(layout="zigzag"), RingLayoutError, "layout: expected a layout, got 'zigzag'"),
        (shard(dim="1"), RingShapeError, "dim: expected the number of a dimension, got '1'"),
        (shard(dim=True), RingShapeError, "dim: expected the number of a dimension"),
        (shard(dim=7), RingShapeError, "expected 8 tokens"),
        (shard(pad_value="x"), RingShapeError, "pad_value: expected a number"),
        (shard(layout=OTHER), RingLayoutError, "ring"),
        (shard(X[:, :7]), RingShapeError, r"expected 8 tokens \(the layout's\), got 7"),
        (shard(mesh=None, ring_rank=1), RingShapeError, r"expected a rank of the layout, 0..0, got 1"),
        (gather(layout=OTHER), RingLayoutError, "ring"),
        (gather(X[:, :7]), RingShapeError, r"expected 8 slots \(the layout's shard\), got 7"),
        (gather(7), RingShapeError, "the tensor: expected"),
        (lambda: check_mesh("mesh"), RingMeshError, "expected a RingMesh, got 'mesh'"),
        (lambda: Grid(1 << 21, 1 << 21), RingMeshError, "expected a positive integer of at most 1048576"),
        (
            lambda: check_whole_number(MAX_TOKENS + 1, "x", RingConfigError),
            RingConfigError,
            "x: .* of at most",
        ),
        (lambda: check_whole_number(0, "x", RingConfigError), RingConfigError, "x: .* got 0; pass an int"),
        (lambda: check_bool(1, "x", RingConfigError), RingConfigError, "x: expected True or False, got"),
    ],
)
def test_what_does_not_fit_is_refused(act: Callable[[], object], kind: type[RingError], message: str) -> None:
    with pytest.raises(kind, match=message):
        act()


def test_what_fits_is_cut_and_put_together() -> None:
    whole = torch.arange(16.0).view(1, 8, 2)
    assert shard_sequence(whole, OTHER, ring_rank=1, dim=1).tolist() == whole[:, 4:].tolist()
    assert gather_sequence(whole, LAYOUT, mesh=MESH, dim=1).tolist() == whole.tolist()


def test_a_layout_of_another_ring_is_refused() -> None:
    """Also where a shard of it has as many tokens as the tensor."""
    for call, tokens in ((gather_sequence, 4), (shard_sequence, 8)):
        with pytest.raises(RingLayoutError, match=r"layout: expected one for 1 ranks .*got one for 2"):
            call(torch.zeros(tokens, 3), OTHER, mesh=MESH, dim=0)


# --- the check of finite results -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "calls"), [({}, 4), ({"stage_shards": 3}, 2), ({"ranks_per_node": 2}, 4)]
)
def test_the_hop_is_named_forward_and_backward(options: dict[str, int], calls: int) -> None:
    plan = build_plan(Full(), make_layout("contiguous", tokens=16, ring_size=4), **options).rank(1)
    kernel = FiniteKernel(ReferenceKernel(), plan).select_heads(slice(0, 1))
    tables = [step.tiles for step in get_kernel_calls(plan.classes[0], backward=False)]
    assert len(tables) == calls and kernel.name == "reference"
    for hop, tiles in enumerate(tables):
        q, k = torch.ones(1, 1, 4, 8), torch.ones(1, 1, int(tiles.k.slot.max() + tiles.k.length.max()), 8)
        (part, *_) = kernel.forward(q, k, k, tiles, 1.0)
        assert part.out_BHSD.isfinite().all()
        with pytest.raises(
            RingFiniteError, match=f'in out of ring rank 1 after hop {hop}.*look at kernel "reference"'
        ):
            list(kernel.forward(q, k, k * torch.inf, tiles, 1.0))
        lse = torch.zeros(1, 1, 4)
        with pytest.raises(RingFiniteError, match=f"in dq of ring rank 1 after hop {hop}"):
            list(kernel.backward(q * torch.inf, q, k, k, q, lse, tiles, 1.0))


@pytest.mark.parametrize(("batch_dim_idx", "order"), [(0, (0, 2, 1, 3)), (1, (2, 0, 1, 3))])
def test_a_module_takes_the_layouts_of_deepspeed(batch_dim_idx: int, order: tuple[int, ...]) -> None:
    """[B, S, H, D] and [S, B, H, D]; the log-sum-exp is [B, H, S] in all."""
    q, k, v = (torch.randn(2, heads, 8, 4) for heads in (4, 2, 2))
    layout = make_layout("contiguous", tokens=8, ring_size=1)
    attention = RingAttention(Causal(), mesh=RingMesh.single(), layout=layout)
    out, lse = attention(q, k, v, return_lse=True)
    inputs = [x.permute(order) for x in (q, k, v)]
    assert torch.equal(attention(*inputs, batch_dim_idx), out.permute(order))
    ours = attention(*inputs, batch_dim_idx, return_lse=True)
    assert torch.equal(ours[0], out.permute(order)) and torch.equal(ours[1], lse)

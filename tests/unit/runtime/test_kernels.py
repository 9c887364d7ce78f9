"""Every kernel against dense float64 mathematics, tile kind by tile kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_ring.errors import RingConfigError
from ds_ring.runtime.kernels import get_kernel
from ds_ring.runtime.kernels.cpu import CpuKernel, leaves
from ds_ring.runtime.merge import merge_
from ds_ring.schedule.pattern import Causal
from ds_ring.schedule.tiles import UNBOUNDED, Kind, Tiles, cut_by_distance
from tests.reference import relative_error

KERNELS = [get_kernel("reference", "cpu"), CpuKernel(), CpuKernel(block=48, triangle=32)]


def tiles_of(kind: str, queries: int, keys: int) -> Tiles:
    whole = Tiles.rectangles(np.array([[0, 1, queries]]), np.array([[0, 1, keys]]))
    bounds = {
        "full": (-UNBOUNDED, UNBOUNDED),
        "causal": (0, UNBOUNDED),
        "strict": (1, UNBOUNDED),
        "anticausal": (-UNBOUNDED, 20),
        "band": (-10, 70),
    }
    return cut_by_distance(whole, *bounds[kind])


def mask_of(kind: str, queries: int, keys: int) -> torch.Tensor:
    gap = torch.arange(queries)[:, None] - torch.arange(keys)[None, :]
    rules = {
        "full": gap == gap,
        "causal": gap >= 0,
        "strict": gap >= 1,
        "anticausal": gap <= 20,
        "band": (gap >= -10) & (gap <= 70),
    }
    return rules[kind]


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu", "cpu-small-blocks"])
@pytest.mark.parametrize("kind", ["full", "causal", "strict", "anticausal", "band"])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (130, 259), (259, 130), (1, 1)])
def test_forward_and_gradients(kernel: CpuKernel, kind: str, queries: int, keys: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16, dtype=torch.float64) for h, n in ((4, queries), (2, keys), (2, keys)))
    grad = torch.randn_like(q)
    for x in (q, k, v):
        x.requires_grad_()
    mask = mask_of(kind, queries, keys)
    sees = mask.any(-1)
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.25).masked_fill(~mask, -torch.inf)
    weights = torch.softmax(scores.masked_fill(~sees[:, None], 0), -1) * sees[:, None]
    want = weights @ v.repeat_interleave(2, 1)
    want.backward(grad)

    tiles = tiles_of(kind, queries, keys)
    q32, k32, v32, grad32 = (x.detach().float() for x in (q, k, v, grad))
    out, lse = torch.zeros_like(q32), torch.full(q32.shape[:-1], -torch.inf)
    for part in kernel.forward(q32, k32, v32, tiles, 0.25):
        merge_(out[:, :, part.q_slots], lse[:, :, part.q_slots], part.out_BHSD, part.lse_BHS)
    dq, dk, dv = (torch.zeros_like(x) for x in (q32, k32, v32))
    for grads in kernel.backward(grad32, q32, k32, v32, out, lse, tiles, 0.25):
        dq[:, :, grads.q_slots] += grads.dq_BHSD
        dk[:, :, grads.k_slots] += grads.dk_BGSD
        dv[:, :, grads.k_slots] += grads.dv_BGSD
    if mask.any():
        assert relative_error(out, want) < 3e-6
        want_lse = torch.logsumexp(scores, -1)
        assert relative_error(lse[:, :, sees], want_lse[:, :, sees]) < 3e-6
        for got, x in ((dq, q), (dk, k), (dv, v)):
            assert x.grad is not None
            assert relative_error(got, x.grad) < 5e-6 or float(x.grad.abs().max()) < 1e-12
    assert out[:, :, ~sees].eq(0).all() and lse[:, :, ~sees].eq(-torch.inf).all()


@pytest.mark.parametrize("side", [256, 257, 1000, 4096])
def test_small_triangles_compute_little_more_than_the_pairs(side: int) -> None:
    tiles = Causal().tiles(np.array([[0, 1, side]]), np.array([[0, 1, side]]))
    executed = CpuKernel().executed_pairs(tiles)
    assert executed <= side * (side + 256) // 2 + 256
    covered = np.zeros((side, side), dtype=bool)
    for leaf in leaves(tiles):
        assert not covered[leaf.q_slots, leaf.k_slots].any(), "a pair is computed twice"
        covered[leaf.q_slots, leaf.k_slots] = True
    assert covered[np.tril_indices(side)].all()


def test_low_precision_results_are_partial_sums_in_float32() -> None:
    q, k, v = (torch.randn(1, 2, 64, 16).bfloat16() for _ in range(3))
    tiles = tiles_of("causal", 64, 64).of_kind(Kind.FULL)
    part = next(iter(CpuKernel().forward(q, k, v, tiles, 1.0)))
    assert part.out_BHSD.dtype == torch.float32 and part.lse_BHS.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "device", "options", "said"),
    [
        ("flesh", "cpu", (), "expected one of auto, cpu, reference"),
        ("cpu", "cuda", (), "got cuda tensors"),
        ("cpu", "cpu", (("blok", 3),), "blok"),
    ],
)
def test_kernels_that_cannot_be(
    name: str, device: str, options: tuple[tuple[str, int], ...], said: str
) -> None:
    with pytest.raises(RingConfigError, match=said):
        get_kernel(name, device, options)

"""Every kernel against dense float64 mathematics: tiles, scales; derivatives that there are none of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ds_ring import Dilated, Documents, RingMesh, SlidingWindow, make_layout
from ds_ring.errors import RingConfigError
from ds_ring.kernels.select import Kernel, _choose_kernel, get_kernel
from ds_ring.masks.catalog import Causal
from ds_ring.masks.joins import select_distances
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import UNBOUNDED, Tiles
from ds_ring.plugin import FAST_KERNELS, load, unmeasured
from ds_ring.plugin import KERNELS as KERNEL_ROWS
from ds_ring.ring.merge import merge_
from ds_ring.schedule.layout import expand_runs
from ds_ring.schedule.lowering import get_query_heads
from ds_ring.schedule.plan import find_head_classes
from tests import calls
from tests.cases import document_ids
from tests.reference import attend_by_counts, dense_attention, relative_error

KERNELS = [name for name, row in KERNEL_ROWS.items() if row.runs_on("cpu")]
KINDS = ["full", "causal", "strict", "inverse-causal", "band"]
SIDES = [(300, 300), (130, 259), (259, 130), (1, 1)]
PATTERNS = [
    Dilated((32, 64, 256), (1, 2, 4)),
    Dilated((30, 60), (3, 5), False, "torchscale"),
    Dilated((16, 48), (2, 3), True, "zero") & SlidingWindow(40),
    Documents(np.repeat(np.arange(10), 26)) & Causal(),
    Documents(document_ids(260, mean=20)),
]


def tiles_of(kind: str, queries: int, keys: int) -> Tiles:
    whole = Tiles.rectangles(np.array([[0, 1, queries]]), np.array([[0, 1, keys]]))
    bounds = {
        "full": (-UNBOUNDED, UNBOUNDED),
        "causal": (0, UNBOUNDED),
        "strict": (1, UNBOUNDED),
        "inverse-causal": (-UNBOUNDED, 20),
        "band": (-10, 70),
    }
    return select_distances(whole, *bounds[kind])


def mask_of(kind: str, queries: int, keys: int) -> torch.Tensor:
    gap = torch.arange(queries)[:, None] - torch.arange(keys)[None, :]
    rules = {
        "full": gap == gap,
        "causal": gap >= 0,
        "strict": gap >= 1,
        "inverse-causal": gap <= 20,
        "band": (gap >= -10) & (gap <= 70),
    }
    return rules[kind]


def run_kernel(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, tiles: Tiles
) -> tuple[Tensor, ...]:
    """Out, lse, dq, dk, dv: the parts added up as the ring pass does."""
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf)
    for part in kernel.forward(q, k, v, tiles, 0.25):
        rows = part.q_rows
        merge_(rows.select(out[:, part.heads]), rows.select(lse[:, part.heads]), part.out_BHSD, part.lse_BHS)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for grads in kernel.backward(grad_out, q, k, v, out, lse, tiles, 0.25):
        grads.add_to(dq, dk, dv)
    return out, lse, dq, dk, dv


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys"), SIDES)
def test_forward_and_gradients(name: str, kind: str, queries: int, keys: int) -> None:
    check_forward_and_gradients(get_kernel(name, "cpu"), kind, queries, keys)


def check_forward_and_gradients(kernel: Kernel, kind: str, queries: int, keys: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16, dtype=torch.float64) for h, n in ((4, queries), (2, keys), (2, keys)))
    grad, mask = torch.randn_like(q), mask_of(kind, queries, keys)
    sees = mask.any(-1)
    want = attend_by_counts(q, k, v, grad, mask)
    result = run_kernel(kernel, *(x.float() for x in (q, k, v, grad)), tiles_of(kind, queries, keys))
    out, lse, *gradients = result
    if mask.any():
        assert relative_error(out, want.out) < 3e-6
        assert relative_error(lse[:, :, sees], want.lse[:, :, sees]) < 3e-6
        for got, exact in zip(gradients, want[2:], strict=True):
            assert relative_error(got, exact) < 5e-6 or float(exact.abs().max()) < 1e-12
    assert out[:, :, ~sees].eq(0).all() and lse[:, :, ~sees].eq(-torch.inf).all()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.covering(1)
def test_heads_of_their_own_and_multiplicities(name: str, pattern: Pattern, strided: bool) -> None:
    check_heads_of_their_own(get_kernel(name, "cpu"), pattern, strided)


def check_heads_of_their_own(kernel: Kernel, pattern: Pattern, strided: bool) -> None:
    """Tables by head, log m, and equal tiles that repeat, against a dense softmax with log m added."""
    tokens, (heads, kv_heads) = 260, (4, 2)
    torch.manual_seed(0)
    sizes = [(2, heads), (2, kv_heads), (2, kv_heads), (2, heads)]
    q, k, v, grad = (torch.randn(*size, tokens, 16, dtype=torch.float64) for size in sizes)
    want = dense_attention(q, k, v, grad, pattern)
    result = [torch.zeros_like(x) for x in (want.out, want.lse, want.dq, want.dk, want.dv)]
    runs = np.array([[0, 1, tokens]])
    if strided:
        runs = np.array([[0, 2, tokens // 2], [1, 2, tokens // 2]])
    order = torch.from_numpy(expand_runs(runs))
    for local, bound in find_head_classes(pattern, heads, kv_heads):
        tiles = bound.tiles(runs, runs)
        queries = get_query_heads(local, heads // kv_heads)
        which = (queries, local, local, queries)
        parts = [x[:, h][:, :, order].float() for x, h in zip((q, k, v, grad), which, strict=True)]
        results = run_kernel(kernel, *parts, tiles)
        for whole, part, h in zip(result, results, (queries, queries, queries, local, local), strict=True):
            whole[:, h] = whole[:, h].index_copy(2, order, part.double())
    assert relative_error(result[0], want.out) < 3e-6
    sees = want.lse.isfinite()
    assert torch.equal(result[1].isfinite(), sees) and result[0][~sees].eq(0).all()
    assert relative_error(result[1][sees], want.lse[sees]) < 3e-6
    for got, expected in zip(result[2:], want[2:], strict=True):
        assert relative_error(got, expected) < 5e-6


def test_a_name_that_is_no_kernel() -> None:
    with pytest.raises(RingConfigError, match=f"expected one of auto, {', '.join(sorted(KERNEL_ROWS))}"):
        get_kernel("flesh", "cpu")


@pytest.mark.parametrize("name", KERNEL_ROWS)
def test_a_row_of_the_registry_is_a_kernel_of_its_name(name: str) -> None:
    row = KERNEL_ROWS[name]
    assert load(row.home).name == name
    # what `ds-ring plan` must know; "reference" is for comparisons and is never planned
    assert (name == "reference") == (row.workspace is None) and (row.workspace is None or load(row.workspace))


# --- scales and derivatives ------------------------------------------------------------------------------


MESH, TOKENS = RingMesh.single(), 9
LAYOUT = make_layout("contiguous", tokens=TOKENS, ring_size=1)


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, TOKENS, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4)
    ]


def attend(q: Tensor, k: Tensor, v: Tensor, **rest: object) -> Tensor:
    return calls.attend(q, k, v, pattern=Causal(), layout=LAYOUT, mesh=MESH, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("scale", [0, 0.0, -0.0, -0.3, -2, 1e-30, 0.7])
def test_any_finite_scale_is_right(scale: float, kernel: str) -> None:
    """Zero is uniform attention; below it the CPU kernel returned NaN."""
    *qkv, grad = operands()
    leaves = [x.requires_grad_() for x in qkv]
    out = attend(*leaves, scale=scale, kernel=kernel)
    got = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    want, _, *gradients = attend_by_counts(*qkv, grad, torch.ones(TOKENS, TOKENS).tril(), scale=scale)
    torch.testing.assert_close(got, (want, *gradients))


def dual() -> None:
    q, k, v, _ = operands()
    with forward_ad.dual_level():
        attend(forward_ad.make_dual(q, q), k, v)


def twice(**rest: object) -> None:
    q, k, v, _ = operands()
    q.requires_grad_()
    (first,) = torch.autograd.grad(attend(q, k, v, **rest).sum(), q, create_graph=True)
    first.sum().backward()


def transform(name: str) -> Callable[[], object]:
    q, k, v, _ = operands()
    return {
        "jvp": lambda: torch.func.jvp(lambda x: attend(x, k, v), (q,), (q,)),
        "grad": lambda: torch.func.grad(lambda x: attend(x, k, v).sum())(q),
        "vjp": lambda: torch.func.vjp(lambda x: attend(x, k, v), q),
        "dual": dual,
        "second derivative": twice,
        "second derivative, replicated queries": lambda: twice(queries="replicated"),
    }[name]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("jvp", "got forward mode"),
        ("dual", "got forward mode"),
        ("grad", "got a torch.func transform"),
        ("vjp", "got a torch.func transform"),
        ("second derivative", "a request for the second one"),
        ("second derivative, replicated queries", "a request for the second one"),
    ],
)
def test_derivatives_that_there_are_none_of_are_refused(name: str, says: str) -> None:
    with pytest.raises(RingConfigError, match=says):
        transform(name)()


def test_vmap_is_one_sample_after_the_other() -> None:
    q, k, v, _ = operands()
    several = torch.stack([q, 2 * q])
    got = torch.func.vmap(lambda x: attend(x, k, v))(several)
    torch.testing.assert_close(got, torch.stack([attend(x, k, v) for x in several]))


def test_a_captured_tensor_that_needs_a_gradient_is_refused_in_compiled_code_too() -> None:
    (q, k, v, _), bias = operands(), torch.zeros(8)

    def moved(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + bias[head]

    compiled = torch.compile(lambda *qkv: attend(*qkv, score_mod=moved), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    bias.requires_grad_()
    for call in (compiled, lambda *qkv: attend(*qkv, score_mod=moved)):
        with pytest.raises(RingConfigError, match="captured tensors that require no gradient"):
            call(q, k, v)


def test_on_a_device_without_a_kernel_of_its_own_auto_is_one_that_runs_anywhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert _choose_kernel("xpu", None, None) == "reference"
    assert "for xpu tensors, since no kernel for them is installed: it is slow" in caplog.text


@pytest.mark.parametrize("device_type", FAST_KERNELS)
def test_without_rates_auto_is_a_kernel_of_the_device(device_type: str) -> None:
    for kinds in [(), *((kind,) for row in KERNEL_ROWS.values() for kind in row.first_for)]:
        assert KERNEL_ROWS[unmeasured(device_type, kinds, KERNEL_ROWS)].device == device_type

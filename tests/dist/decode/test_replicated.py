"""`decode_attention` against dense float64 attention: outputs, gradients, bytes, agreement."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_ring import (
    Causal,
    Dilated,
    Documents,
    Full,
    RingConfigError,
    RingError,
    RingMesh,
    RingMismatchError,
    RingShapeError,
    SlidingWindow,
    gather_sequence,
    make_layout,
    shard_sequence,
)
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from tests import calls
from tests.cases import PATTERNS
from tests.dist.harness import Pool
from tests.reference import dense_attention, relative_error

LAYOUTS = ("contiguous", "zigzag", "striped")  # those that any pattern can have
LONGNET = Dilated((2048, 8192, 32768, 131072), (1, 4, 16, 64), head_offsets="paper")


@dataclass(frozen=True)
class Case:
    """A pattern, global sizes, and the positions of the queries (None: the default)."""

    pattern: Pattern
    queries: int
    keys: int
    positions: tuple[int, ...] | None = None
    batch: int = 1
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32

    def tensors(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """q, k, v and the gradient of the output."""
        generator = torch.Generator().manual_seed(3)
        b, h, g, d = self.batch, self.query_heads, self.kv_heads, self.head_dim
        sizes = [(b, h, self.queries, d), (b, g, self.keys, d), (b, g, self.keys, d), (b, h, self.queries, d)]
        return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


class At:
    """A pattern whose query rows stand at given positions, for the dense reference."""

    def __init__(self, case: Case) -> None:
        self.pattern = case.pattern
        default = range(case.keys - case.queries, case.keys)
        self.positions = np.array(default if case.positions is None else case.positions)

    def multiplicity(self, head: int, query_heads: int, kv_heads: int, q: Any, k: Any) -> Any:
        return self.pattern.multiplicity(head, query_heads, kv_heads, self.positions[q], k)


def attend(mesh: RingMesh, layout_name: str, case: Case, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """out, dq (whole on every rank), dk, dv (gathered)."""
    layout = make_layout(
        layout_name, tokens=case.keys, ring_size=mesh.ring_size, pattern=case.pattern, multiple_of=4
    )
    q, k, v, grad = case.tensors(dtype)
    # what lies in padding slots must not matter
    k, v = (shard_sequence(x, layout, mesh=mesh, dim=2, pad_value=float("nan")) for x in (k, v))
    for x in (q, k, v):
        x.requires_grad_()
    out = calls.attend(
        q, k, v, pattern=case.pattern, layout=layout, mesh=mesh, queries="replicated",
        positions=case.positions, **options,
    )  # fmt: skip
    out.backward(grad)
    assert out.dtype == dtype and q.grad is not None and k.grad is not None and v.grad is not None
    assert q.grad.dtype == k.grad.dtype == v.grad.dtype == dtype
    return [out.detach(), q.grad, *(gather_sequence(x, layout, mesh=mesh, dim=2) for x in (k.grad, v.grad))]


def parity(
    rank: int,
    world_size: int,
    cases: Sequence[Case],
    layouts: Sequence[str] = LAYOUTS,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[dict[tuple[str, str, str], float], list[int]]:
    """Errors of every case on rank 0, and on every rank a checksum of every out and dq."""
    mesh = RingMesh.from_world(world_size)
    errors, checksums = {}, []
    for case in cases:
        if rank == 0:
            want = dense_attention(*case.tensors(dtype), At(case))  # type: ignore[arg-type]
        for layout_name in layouts:
            result = attend(mesh, layout_name, case, dtype, **options)
            checksums += [zlib.crc32(x.view(torch.uint8).contiguous().numpy().tobytes()) for x in result[:2]]
            if rank == 0:
                names = ("out", "dq", "dk", "dv")
                for name, got in zip(names, result, strict=True):
                    where = f"{case.pattern}, {case.queries} queries, {case.keys} keys"
                    errors[where, layout_name, name] = relative_error(got, getattr(want, name))
    return errors, checksums


def check(results: list[tuple[dict[Any, float], list[int]]], expected: int, tolerance: float) -> None:
    errors = results[0][0]
    assert len(errors) == expected * 4
    assert max(errors.values()) < tolerance, {key: e for key, e in errors.items() if not e < tolerance}
    assert all(checksums == results[0][1] for _, checksums in results), "ranks have different bits"


@pytest.mark.parametrize("ring_size", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 7, 403])
@pytest.mark.day("7-2")
def test_every_pattern_and_layout_at_a_ragged_length(rank_pool: Pool, ring_size: int, queries: int) -> None:
    cases = [Case(make(403), queries, 403, batch=2, head_dim=16) for make in PATTERNS.values()]
    check(rank_pool(ring_size).run(parity, cases), len(cases) * len(LAYOUTS), 1e-5)


@pytest.mark.night
def test_layouts_that_are_made_for_the_pattern(rank_pool: Pool) -> None:
    cases = [Case(Dilated((64, 128, 256), (1, 2, 4)), queries, 700) for queries in (3, 700)]
    check(rank_pool(3).run(parity, cases, ["auto"]), len(cases), 1e-5)


def cross(rank: int, world_size: int, case: Case) -> float:
    """The largest error of a `Full` case: positions have no meaning there."""
    mesh = RingMesh.from_world(world_size)
    want = dense_attention(*case.tensors(), case.pattern)
    result = attend(mesh, "striped", case, torch.float32)
    return max(relative_error(a, b) for a, b in zip(result, (want.out, *want[2:]), strict=True))


@pytest.mark.parametrize("queries", [3, 300, 603])
@pytest.mark.day("3", "603")
def test_cross_attention_takes_any_number_of_queries(rank_pool: Pool, queries: int) -> None:
    # an odd number of rows: the parts of an all-reduce are padded
    errors = rank_pool(4).run(cross, Case(Full(), queries, 301, query_heads=3, kv_heads=1))
    assert max(errors) < 1e-5, errors


SCATTERED = (999, 0, 5, 5, 500, 501, 502, 503, 10, 8, 6, 4, 1, 4, 7, 10, 13, 16, 19, 250, 600, 998)


@pytest.mark.night
def test_positions_in_any_order(rank_pool: Pool) -> None:
    rows = range(100, 1000, 50)
    cases = [Case(make(1000), len(SCATTERED), 1000, SCATTERED) for make in PATTERNS.values()]
    cases += [
        Case(Causal(), len(rows), 1000, tuple(rows)),
        Case(Causal(), 400, 1000, tuple(range(0, 800, 2))),
    ]
    check(rank_pool(4).run(parity, cases, ["striped"]), len(cases), 1e-5)


@pytest.mark.parametrize("keys", [1, 2, 5])
@pytest.mark.day("1")
def test_fewer_keys_than_ranks(rank_pool: Pool, keys: int) -> None:
    cases = [Case(SlidingWindow(10, causal=False), 1, keys, (0,)), Case(LONGNET, keys, keys)]
    errors = rank_pool(4).run(parity, cases)[0][0]
    assert max(e for (_, _, name), e in errors.items() if name in ("out", "dv")) < 1e-5, errors


@pytest.mark.night
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float64, 1e-12)])
def test_other_dtypes(rank_pool: Pool, dtype: torch.dtype, tolerance: float) -> None:
    cases = [Case(make(503), 9, 503) for make in PATTERNS.values()]
    check(rank_pool(3).run(parity, cases, ["zigzag"], dtype), len(cases), tolerance)


@pytest.mark.night
def test_the_reference_kernel_agrees(rank_pool: Pool) -> None:
    cases = [Case(make(203), 9, 203) for make in PATTERNS.values()]
    check(rank_pool(2).run(parity, cases, ["zigzag"], kernel="reference"), len(cases), 1e-5)


def count_bytes(rank: int, world_size: int, queries: int, keys: int) -> tuple[int, int, int]:
    """Bytes that left this rank forward, and forward and backward; and those of its own K and V."""
    mesh = RingMesh.from_world(world_size)
    case = Case(Causal(), queries, keys)
    layout = make_layout("zigzag", tokens=keys, ring_size=world_size)
    q, k, v, grad = case.tensors()
    k, v = (shard_sequence(x, layout, mesh=mesh, dim=2).requires_grad_() for x in (k, v))
    out = calls.attend(
        q.requires_grad_(), k, v, pattern=case.pattern, layout=layout, mesh=mesh, queries="replicated"
    )
    exchange = make_ring_context(case.pattern, layout, mesh, Options()).exchange
    forward_bytes = exchange.counters.bytes_sent
    out.backward(grad)
    return forward_bytes, exchange.counters.bytes_sent, k.nbytes + v.nbytes


@pytest.mark.parametrize("queries", [1, 16])
def test_bytes_follow_the_queries_and_not_the_keys(rank_pool: Pool, queries: int) -> None:
    ranks, rows, head_dim = 4, 4 * queries, 32
    few, many = (rank_pool(ranks).run(count_bytes, queries, keys) for keys in (1 << 13, 1 << 16))
    assert [result[:2] for result in few] == [result[:2] for result in many]
    part_bytes = rows // ranks * 4
    for forward_bytes, both_bytes, kv_bytes in many:
        assert forward_bytes == 2 * (ranks - 1) * part_bytes * (head_dim + 1)
        assert both_bytes - forward_bytes == 2 * (ranks - 1) * part_bytes * head_dim
        assert both_bytes < kv_bytes / 100


def parameters(rank: int, world_size: int) -> list[float]:
    """Errors of weight gradients under the documented convention: one loss, computed by every rank."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("contiguous", tokens=90, ring_size=world_size)
    generator = torch.Generator().manual_seed(5)
    x, y, w_q, w_k = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in [(1, 2, 6, 8), (1, 2, 90, 8), (8, 8), (8, 8)]
    )
    dense_q, dense_k = w_q.clone().requires_grad_(), w_k.clone().requires_grad_()
    keys = y @ dense_k
    (torch.softmax((x @ dense_q) @ keys.mT / 8**0.5, -1) @ keys).square().sum().backward()
    w_q.requires_grad_(), w_k.requires_grad_()
    local = shard_sequence(y, layout, mesh=mesh, dim=2) @ w_k
    out = calls.attend(x @ w_q, local, local, pattern=Full(), layout=layout, mesh=mesh, queries="replicated")
    out.square().sum().backward()
    summed_q, summed_k = w_q.grad.clone(), w_k.grad.clone()
    torch.distributed.all_reduce(summed_q)
    torch.distributed.all_reduce(summed_k)
    return [
        relative_error(w_q.grad, dense_q.grad),  # whole on every rank
        relative_error(summed_q, world_size * dense_q.grad),
        relative_error(summed_k, dense_k.grad),  # the parts of the shards add up
    ]


def test_the_gradient_convention(rank_pool: Pool) -> None:
    assert max(max(errors) for errors in rank_pool(3).run(parameters)) < 1e-12


def sees_nothing(rank: int, world_size: int) -> bool:
    """Odd positions of head 0 and even ones of head 1 are in no branch; documents below 0 are padding."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=64, ring_size=world_size)
    ids = np.where(np.arange(64) < 50, 0, -1)
    for pattern, hidden in [
        (Dilated((64,), (2,)), torch.tensor([[0, 1, 0, 1], [1, 0, 1, 0]], dtype=torch.bool)),
        (Documents(ids), torch.tensor([[0, 0, 1, 1]] * 2, dtype=torch.bool)),
    ]:
        case = Case(pattern, 4, 64, (4, 5, 50, 51), query_heads=2)
        q, k, v, grad = case.tensors()
        k, v = (shard_sequence(x, layout, mesh=mesh, dim=2).requires_grad_() for x in (k, v))
        out = calls.attend(
            q.requires_grad_(), k, v, pattern=pattern, layout=layout, mesh=mesh, queries="replicated",
            positions=case.positions,
        )  # fmt: skip
        out.backward(grad)
        for x in (out.detach(), q.grad):
            assert x is not None and x.isfinite().all()
            assert x[0][hidden].eq(0).all() and x[0][~hidden].ne(0).all()
        assert k.grad is not None and v.grad is not None and (k.grad + v.grad).isfinite().all()
    return True


def test_a_query_that_sees_no_key(rank_pool: Pool) -> None:
    assert all(rank_pool(4).run(sees_nothing))


def compiled(rank: int, world_size: int) -> tuple[float, int]:
    """The error of a compiled decoding step with its gradients, and how often it was compiled."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=130, ring_size=world_size)
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        nonlocal graphs
        graphs += 1
        return aot_eager(graph, inputs)

    def step(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None) -> Tensor:
        out = calls.attend(
            2 * q, k, v, pattern=Causal(), layout=layout, mesh=mesh, queries="replicated", positions=positions
        )
        return out + 1

    run, worst = torch.compile(step, fullgraph=True, backend=backend), 0.0
    for positions in ((0, 40), (41, 42), (128, 129)):
        case = Case(Causal(), 2, 130, positions)
        q, k, v, grad = case.tensors()
        want = dense_attention(2 * q, k, v, grad, At(case))  # type: ignore[arg-type]
        k, v = (shard_sequence(x, layout, mesh=mesh, dim=2).requires_grad_() for x in (k, v))
        out = run(q.requires_grad_(), k, v, torch.tensor(positions))
        out.backward(grad)
        result = [
            out - 1,
            q.grad / 2,
            *(gather_sequence(x, layout, mesh=mesh, dim=2) for x in (k.grad, v.grad)),
        ]
        worst = max(worst, *map(relative_error, result, (want.out, want.dq, want.dk, want.dv)))
    assert torch.equal(run(q, k, v, None), out)
    assert torch.equal(torch.compile(step, fullgraph=True, backend=backend)(q, k, v, [128, 129]), out)
    return worst, graphs


@pytest.mark.night
def test_compiles_in_one_graph_for_all_positions(rank_pool: Pool) -> None:
    for error, graphs in rank_pool(2).run(compiled, timeout_s=120):
        assert error < 1e-5
        assert graphs == 3, "positions given as a tensor, none, and a list: one graph each"


def call(case: Case, mesh: RingMesh, **changes: Any) -> Tensor:
    """A call in which single arguments can be replaced."""
    layout = make_layout("contiguous", tokens=case.keys, ring_size=mesh.ring_size)
    q, k, v, _ = case.tensors()
    k, v = (shard_sequence(x, layout, ring_rank=mesh.ring_rank, dim=2) for x in (k, v))
    arguments = {"q": q, "k": k, "v": v, "pattern": case.pattern, "layout": layout, "queries": "replicated"}
    arguments |= {"mesh": mesh} | changes
    arguments.setdefault("sinks", torch.zeros(arguments["q"].shape[1]))
    return calls.attend(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def words_of(value: object) -> str:
    """What a case is called: its message; of tensors only the names, whose digits differ from run to run."""
    if isinstance(value, dict):
        return "-".join(value)
    return value.__name__ if isinstance(value, type) else str(value)[:40]


WRONG: list[tuple[dict[str, Any], type[RingError], str]] = [
    ({"transport": "all_gather"}, RingConfigError, 'transport "ring", got "all_gather"; leave it out'),
    ({"gradient_payload": "bfloat16"}, RingConfigError, 'gradient_payload "float32", got "bfloat16"'),
    ({"positions": [1, 2]}, RingShapeError, "expected 3 positions.*got 2"),
    ({"positions": [1, 2, 40]}, RingShapeError, "positions: expected 0 to 39.*got 40"),
    ({"positions": [1, -1, 2]}, RingShapeError, "positions: expected 0 to 39.*got -1"),
    ({"positions": [[1, 2, 3]]}, RingShapeError, r"integers \[Q\], got int64 \[1, 3\]"),
    ({"positions": [0.5, 1.0, 2.0]}, RingShapeError, r"integers \[Q\], got float"),
    ({"positions": torch.ones(3, dtype=torch.bfloat16)}, RingShapeError, r"integers \[Q\]"),
    ({"positions": ["a", "b", "c"]}, RingShapeError, r"integers \[Q\]"),
    ({"q": torch.randn(1, 4, 41, 32)}, RingShapeError, "at most 40 queries .*got 41"),
    ({"q": torch.randn(1, 4, 3, 16)}, RingShapeError, "head_dim"),
    ({"q": torch.randn(1, 4, 0, 32)}, RingShapeError, "empty"),
    ({"q": torch.randn(1, 4, 3, 32).bfloat16()}, RingShapeError, "cast or move"),
    ({"k": torch.randn(1, 2, 7, 32), "v": torch.randn(1, 2, 7, 32)}, RingShapeError,
        "40 slots.*got k with 7"),
    ({"queries": "sharded"}, RingShapeError, "decode_attention takes queries that every rank has"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=words_of)
def test_wrong_arguments(changes: dict[str, Any], error: type[RingError], message: str) -> None:
    with pytest.raises(error, match=message):
        call(Case(Causal(), 3, 40), RingMesh.single(), **changes)


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.randn(1, 4, 5, 32)}, "local tokens: ring rank 0 has 3, ring rank 1 has 5"),
    ({"q": torch.randn(1, 2, 3, 32)}, "query heads: ring rank 0 has 4, ring rank 1 has 2"),
    ({"positions": [1, 2, 3]}, "positions of the queries: ring rank . has checksum"),
    ({"scale": 2.0}, "scale: ring rank 0 has None, ring rank 1 has 2.0"),
    ({"sinks": torch.ones(4)}, "values of sinks: ring rank 0 has checksum"),
    ({"positions": [1, 2, 99]}, "refused its own input"),
]


def one_differs(rank: int, world_size: int, changes: dict[str, Any], message: str) -> bool:
    """Rank 1 calls differently: every rank raises, at once, and the next call works."""
    mesh = RingMesh.from_world(world_size)
    case = Case(Causal(), 3, 40)
    mine = rank == 1 and changes.get("positions") == [1, 2, 99]
    wanted, text = (RingShapeError, "positions: expected 0 to 39") if mine else (RingMismatchError, message)
    with pytest.raises(wanted, match=text):
        call(case, mesh, **(changes if rank == 1 else {}))
    return bool(call(case, RingMesh.from_world(world_size)).isfinite().all())


@pytest.mark.parametrize(("changes", "message"), DIFFERENT, ids=words_of)
def test_ranks_that_differ(rank_pool: Pool, changes: dict[str, Any], message: str) -> None:
    assert all(rank_pool(2).run(one_differs, changes, message, timeout_s=20))


def with_ulysses(rank: int, world_size: int) -> bool:
    mesh = RingMesh.from_world(1, 2)
    with pytest.raises(RingConfigError, match=r"ulysses_size 1, got 2; use ring_size"):
        call(Case(Causal(), 3, 40), mesh)
    return True


def test_ulysses_ranks_are_refused(rank_pool: Pool) -> None:
    assert all(rank_pool(2).run(with_ulysses))

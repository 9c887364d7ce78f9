"""Rings of ranks that are threads: both passes against dense float64 attention, in seconds.

Every rank runs the production ring pass with its own schedule; messages are copied from one thread to another
in the order in which both ends post them. Processes, deadlines and headers are tests/dist's.
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ring import Causal, build_plan, make_layout
from ds_ring.comm.messages import Message, check_messages
from ds_ring.kernels.flash.kernel import FlashKernel
from ds_ring.kernels.interface import Kernel, PartialGrads
from ds_ring.kernels.reference import ReferenceKernel
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import count_slots
from ds_ring.ring.buffers import RingBuffers
from ds_ring.ring.pool import Block, BufferKind, Buffers, PreparedPasses
from ds_ring.ring.ring_pass import RingPass
from ds_ring.schedule import stages
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.lowering import lower_rank
from ds_ring.schedule.plan import _build_plan
from ds_ring.schedule.rank_plan import Direction, StagePlan, make_two_levels
from tests.cases import PATTERNS, Shape, layout_for, tensors
from tests.reference import Dense, dense_attention, relative_error

SHAPE = Shape(batch=2, query_heads=4, kv_heads=2, tokens=83, head_dim=8)
Channels = dict[tuple[int, int], "queue.SimpleQueue[Tensor]"]


class ThreadExchange:
    """Move messages between the threads of a ring.

    Args:
        rank: whose exchange this is.
        channels: of all ranks, by sender and receiver.
    """

    def __init__(self, rank: int, channels: Channels) -> None:
        self.rank, self.channels = rank, channels

    def route(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[int], list[int]]:
        check_messages(sends)
        check_messages(receives)
        return [one.peer for one in sends], [one.peer for one in receives]

    def start(
        self, route: tuple[list[int], list[int]], sent: list[Tensor], received: list[Tensor], hop: int
    ) -> Delivery:
        for peer, tensor in zip(route[0], sent, strict=True):
            self.channels[self.rank, peer].put(tensor.clone())
        return Delivery(
            [(self.channels[peer, self.rank], x) for peer, x in zip(route[1], received, strict=True)]
        )


class Delivery:
    """A batch of messages in flight."""

    def __init__(self, due: list[tuple[queue.SimpleQueue[Tensor], Tensor]]) -> None:
        self.due = due

    def wait(self) -> None:
        for channel, tensor in self.due:
            came = channel.get(timeout=10)
            assert came.shape == tensor.shape and came.dtype == tensor.dtype
            tensor.copy_(came)
        self.due = []


def ring_of_threads(
    pattern: Pattern, layout: Layout, shape: Shape = SHAPE, dtype: torch.dtype = torch.float64,
    kernel: Kernel | None = None, pool: type[Buffers] = Buffers, dense: bool = True,
    grad_lse: Tensor | None = None, **planned: Any,
) -> list[Dense]:  # fmt: skip
    """Out, lse and gradients in the order of positions, of the first and of the second pass of a shape.

    Not `dense`: the heads of a token lie side by side, as a projection returns them.
    """
    size = layout.ring_size
    plan = build_plan(pattern, layout, query_heads=shape.query_heads, kv_heads=shape.kv_heads, **planned)
    whole, channels = tensors(shape, dtype), defaultdict(queue.SimpleQueue)
    order = [torch.from_numpy(layout.positions(rank)) for rank in range(size)]

    def rank_of(rank: int) -> list[tuple[Tensor, ...]]:
        where = order[rank]
        q, k, v, grad = (torch.where((where >= 0)[:, None], x[:, :, where], 7.0) for x in whole)
        local_grad_lse = None if grad_lse is None else torch.where(where >= 0, grad_lse[:, :, where], 7.0)
        if not dense:
            k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
        run = RingPass(
            plan.rank(rank),
            kernel or ReferenceKernel(),
            ThreadExchange(rank, channels),
            shape.head_dim**-0.5,
            chunk_bytes=1,
            buffers=pool(),
        )
        found = []
        for _ in range(2):
            out, lse = run.forward(q, k, v)
            found.append((out, lse, *run.backward(grad, q, k, v, out, lse, local_grad_lse)))
        return found

    with ThreadPoolExecutor(size) as threads:
        ranks = list(threads.map(rank_of, range(size)))
    assert all(channel.empty() for channel in channels.values())
    passes = []
    for number in range(2):
        parts = zip(*(found[number] for found in ranks), strict=True)
        wholes = [x.new_zeros(*x.shape[:2], shape.tokens, *x.shape[3:]) for x in ranks[0][number]]
        for joined, of_ranks in zip(wholes, parts, strict=True):
            for part, where in zip(of_ranks, order, strict=True):
                joined[:, :, where[where >= 0]] = part[:, :, where >= 0]
        passes.append(Dense(*wholes))
    return passes


def check(
    passes: list[Dense], pattern: Pattern, shape: Shape = SHAPE, grad_lse: Tensor | None = None,
    **most: float,
) -> None:  # fmt: skip
    want = dense_attention(*tensors(shape, torch.float64), pattern, grad_lse)
    for number, got in enumerate(passes):
        for name in ("out", "dq", "dk", "dv"):
            error = relative_error(getattr(got, name), getattr(want, name))
            assert error < most.get(name, 1e-12), (number, name, error)


@pytest.mark.parametrize(
    ("name", "layout_name", "ring_size"),
    [
        ("causal", "zigzag", 4), ("causal", "striped", 3), ("full", "contiguous", 3), ("window", "zigzag", 4),
        ("window both ways", "balanced", 4), ("dilated", "zigzag", 4), ("dilated", "residue", 3),
        ("documents, causal", "contiguous", 4), ("causal", "contiguous", 2),
    ],
)  # fmt: skip
def test_a_ring_is_dense_attention(name: str, layout_name: str, ring_size: int) -> None:
    pattern = PATTERNS[name](SHAPE.tokens)
    layout = layout_for(layout_name, pattern, tokens=SHAPE.tokens, ring_size=ring_size)
    check(ring_of_threads(pattern, layout), pattern)


def test_a_gradient_of_the_lse_is_of_the_query_heads() -> None:
    """Where they outnumber the K/V heads, and these go around the ring one after the other."""
    grad_lse, layout = tensors(SHAPE, torch.float64)[0][..., 0], make_layout("zigzag", tokens=83, ring_size=3)
    check(ring_of_threads(Causal(), layout, grad_lse=grad_lse), Causal(), grad_lse=grad_lse)


@pytest.mark.parametrize(("name", "layout_name", "stages"), [
    ("causal", "zigzag", None), ("window both ways", "balanced", None), ("dilated", "residue", None),
    ("causal", "zigzag", 2),
])  # fmt: skip
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.day("True-causal-zigzag-None", "False-dilated-residue-None", "True-causal-zigzag-2")
def test_keys_of_one_head_and_sample_travel_apart(
    monkeypatch: pytest.MonkeyPatch, name: str, layout_name: str, stages: int | None, dense: bool
) -> None:
    """K and V are two messages, those of the own shard in place where its tokens lie densely in it."""
    shape, sent = replace(SHAPE, batch=1), list[str]()
    route = ThreadExchange.route

    def counted(self: ThreadExchange, sends: Any, receives: Any) -> Any:
        sent.extend(one.what for one in sends)
        return route(self, sends, receives)

    monkeypatch.setattr(ThreadExchange, "route", counted)
    pattern = PATTERNS[name](shape.tokens)
    layout = layout_for(layout_name, pattern, tokens=shape.tokens, ring_size=4)
    check(ring_of_threads(pattern, layout, shape, dense=dense, stage_shards=stages), pattern, shape)
    assert {"K", "V"} <= set(sent) <= {"K", "V", "dK", "dV", "dK/dV"} and sent.count("K") == sent.count("V")


class AsOnCuda(FlashKernel):
    """Its parts have the inputs' dtype, and those of keys tokens before heads in memory."""

    def backward(self, grad_out: Tensor, *more: Any) -> Iterator[PartialGrads]:
        for part in super().backward(grad_out, *more):
            grads = (x.to(grad_out.dtype).transpose(-3, -2).contiguous() for x in part.heads_first)
            yield PartialGrads(*part[:3], *grads, True)

    def select_heads(self, heads: slice) -> FlashKernel:
        return AsOnCuda()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("name", "ring_size"), [("causal", 8), ("full", 4), ("documents, causal", 4)])
@pytest.mark.covering(1)
def test_gradients_of_a_stage_are_sent_as_the_kernel_returns_them(
    name: str, ring_size: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a copy where a stage is one call and a token's heads lie side by side: in a batch of one."""
    adopted, real = [], RingBuffers.adopt

    def adopt(self: RingBuffers, *given: Any) -> bool:
        adopted.append(real(self, *given))
        return adopted[-1]

    monkeypatch.setattr(RingBuffers, "adopt", adopt)
    shape = replace(SHAPE, batch=batch)
    pattern = PATTERNS[name](shape.tokens)
    layout = layout_for("zigzag", pattern, tokens=shape.tokens, ring_size=ring_size)
    got = ring_of_threads(
        pattern, layout, shape, dtype=torch.bfloat16, kernel=AsOnCuda(), stage_shards=ring_size
    )
    check(got, pattern, shape, out=2e-2, dq=2e-2, dk=2e-2, dv=2e-2)
    assert any(adopted) == (batch == 1)
    adopted.clear()
    planned = {"stage_shards": 2, "gradient_payload": "bfloat16"}
    got = ring_of_threads(pattern, layout, shape, dtype=torch.bfloat16, kernel=AsOnCuda(), **planned)
    check(got, pattern, shape, out=2e-2, dq=2e-2, dk=2e-2, dv=2e-2)
    assert adopted and not any(adopted)


class Overwritten(Buffers):
    """Whoever takes memory may get any that was given back: here all of that is written to."""

    def take(self, kind: BufferKind, stream: int) -> Block:
        for block in (block for free in self._free.values() for block in free):
            torch.empty(0, dtype=torch.uint8).set_(block._storage).fill_(255)
        return super().take(kind, stream)


@pytest.mark.parametrize("payload", ["float32", "bfloat16"])
@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize(("name", "layout_name"), [("causal", "striped"), ("dilated", "balanced")])
@pytest.mark.day("causal-striped-None-float32", "causal-striped-3-float32", "dilated-balanced-3-float32")
def test_nothing_reads_memory_that_was_given_back(
    name: str, layout_name: str, most: int | None, payload: str
) -> None:
    """Gradients that return wait for one another; meanwhile keys of another direction are put together."""
    pattern = PATTERNS[name](SHAPE.tokens)
    layout = layout_for(layout_name, pattern, tokens=SHAPE.tokens, ring_size=8)
    ways = {"directions": (Direction(1, 4), Direction(-1, 3))} if most is None else {"stage_shards": most}
    given = {"dtype": torch.bfloat16, "kernel": AsOnCuda(), "pool": Overwritten}
    got = ring_of_threads(pattern, layout, gradient_payload=payload, **given, **ways)
    check(got, pattern, out=2e-2, dq=2e-2, dk=2e-2, dv=2e-2)


def test_keys_that_nobody_reads_have_no_gradients() -> None:
    """Without pruning rank 0 gets keys of later tokens: their sums wait for parts that never come."""
    shape = replace(SHAPE, batch=1)
    pattern = PATTERNS["causal"](shape.tokens)
    for layout_name in ("contiguous", "zigzag"):
        layout = layout_for(layout_name, pattern, tokens=shape.tokens, ring_size=3)
        given = {"dtype": torch.bfloat16, "kernel": AsOnCuda(), "stage_shards": 2, "prune": False}
        got = ring_of_threads(pattern, layout, shape, **given)
        check(got, pattern, shape, out=2e-2, dq=2e-2, dk=2e-2, dv=2e-2)


def keys_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Keys of a stage arrive where those of another owner belong."""
    real = StagePlan.from_hops
    patch.setattr(
        StagePlan, "from_hops", lambda hops: (found := real(hops))._replace(first=found.first[::-1])
    )


def gradients_to_another_owner(patch: pytest.MonkeyPatch) -> None:
    """Of a stage of two owners each gets what belongs to the other one."""
    real = stages.Stages._send

    def send(self: Any, buffer: int, needs: int, peer: int, origin: int, slots: Any, at: Any = None) -> Any:
        other = None if at is None else self.buffers[buffer].slots - count_slots(slots) - at
        return real(self, buffer, needs, peer, origin, slots, other)

    patch.setattr(stages.Stages, "_send", send)


def dk_for_dv(patch: pytest.MonkeyPatch) -> None:
    real = RingBuffers.adopt
    patch.setattr(RingBuffers, "adopt", lambda self, buffer, parts: real(self, buffer, parts and parts[::-1]))


@pytest.mark.parametrize(
    ("fault", "name", "wrong"),
    [
        (keys_in_another_order, "causal", {"out", "dq", "dk", "dv"}),
        (gradients_to_another_owner, "full", {"dk", "dv"}),
        (dk_for_dv, "full", {"dk", "dv"}),
    ],
)
def test_faults_in_stages_show(
    fault: Callable[[pytest.MonkeyPatch], None], name: str, wrong: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPE, batch=1, tokens=96)
    pattern = PATTERNS[name](shape.tokens)
    layout = layout_for("zigzag", pattern, tokens=shape.tokens, ring_size=3)
    want = dense_attention(*tensors(shape, torch.float64), pattern)
    given = {"dtype": torch.bfloat16, "kernel": AsOnCuda(), "stage_shards": 2}
    for faults in (set(), wrong):
        _build_plan.cache_clear()  # plans keep their steps
        if faults:
            fault(monkeypatch)
        got = ring_of_threads(pattern, layout, shape, **given)[0]
        names = ("out", "dq", "dk", "dv")
        far = {x for x in names if not relative_error(getattr(got, x), getattr(want, x)) < 0.1}
        assert far == faults
    _build_plan.cache_clear()


@pytest.mark.parametrize("kernel", [ReferenceKernel(), FlashKernel()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("ring_size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("name", "layout_name"),
    [
        ("causal", "zigzag"), ("full", "contiguous"), ("window", "zigzag"), ("window both ways", "balanced"),
        ("dilated", "residue"), ("dilated", "zigzag"), ("documents, causal", "contiguous"),
        ("documents, causal", "zigzag"), ("causal", "striped"),
    ],
)  # fmt: skip
@pytest.mark.day(
    "causal-zigzag-2-reference",
    "full-contiguous-3-flash",
    "window-zigzag-2-reference",
    "window both ways-balanced-4-reference",
    "documents, causal-contiguous-2-reference",
    "causal-striped-2-reference",
)
def test_stages_are_dense_attention(name: str, layout_name: str, ring_size: int, kernel: Kernel) -> None:
    """In the inputs' dtype and in float64, with sums of float32 and rounded parts."""
    pattern = PATTERNS[name](SHAPE.tokens)
    layout = layout_for(layout_name, pattern, tokens=SHAPE.tokens, ring_size=ring_size)
    for most in (1, 7):
        check(ring_of_threads(pattern, layout, kernel=kernel, stage_shards=most), pattern)
    rounded = ring_of_threads(pattern, layout, kernel=kernel, stage_shards=3, gradient_payload="bfloat16")
    check(rounded, pattern, dk=4e-3, dv=4e-3)
    lower = ring_of_threads(pattern, layout, dtype=torch.bfloat16, kernel=kernel, stage_shards=3)
    check(lower, pattern, out=2e-2, dq=2e-2, dk=2e-2, dv=2e-2)


@pytest.mark.parametrize("payload", ["float32", "bfloat16"])
@pytest.mark.day("bfloat16")
def test_messages_of_many_ranges(payload: str) -> None:
    """Of 12 ranges, which are sliced, and of 21, which are indexed (`FEW_RANGES`)."""
    shape = replace(SHAPE, tokens=332)
    pattern = PATTERNS["dilated"](shape.tokens)
    layout = layout_for("contiguous", pattern, tokens=shape.tokens, ring_size=4)
    most = {} if payload == "float32" else {"dk": 1e-2, "dv": 1e-2}
    for stage in (None, 2):
        planned = {"gradient_payload": payload, "stage_shards": stage}
        check(ring_of_threads(pattern, layout, shape, **planned), pattern, shape, **most)
        lower = ring_of_threads(pattern, layout, shape, torch.bfloat16, AsOnCuda(), **planned)
        check(lower, pattern, shape, out=2e-2, dq=2e-2, dk=2e-2, dv=2e-2)


@pytest.mark.parametrize("name", ["causal", "window both ways"])
@pytest.mark.parametrize(("ring_size", "node"), [(6, 2), (6, 3)])
@pytest.mark.day("6-3-window both ways")
def test_nodes_of_a_ring_are_dense_attention(name: str, ring_size: int, node: int) -> None:
    pattern = PATTERNS[name](SHAPE.tokens)
    layout = layout_for("zigzag", pattern, tokens=SHAPE.tokens, ring_size=ring_size)
    check(ring_of_threads(pattern, layout, directions=make_two_levels(ring_size, node)), pattern)
    rounded = ring_of_threads(
        pattern, layout, directions=make_two_levels(ring_size, node, -1), gradient_payload="bfloat16"
    )
    check(rounded, pattern, dk=1e-2, dv=1e-2)


def test_gradients_that_travel_in_bfloat16_are_rounded_once() -> None:
    """Each part by at most half a unit in its last place, 2**-9."""
    pattern = PATTERNS["full"](SHAPE.tokens)
    layout = layout_for("contiguous", pattern, tokens=SHAPE.tokens, ring_size=4)
    check(ring_of_threads(pattern, layout, gradient_payload="bfloat16"), pattern, dk=4e-3, dv=4e-3)


def test_sums_are_rounded_to_the_dtype_of_the_inputs() -> None:
    pattern = PATTERNS["causal"](SHAPE.tokens)
    layout = layout_for("striped", pattern, tokens=SHAPE.tokens, ring_size=3)
    passes = ring_of_threads(pattern, layout, dtype=torch.bfloat16)
    check(passes, pattern, out=2e-2, dq=2e-2, dk=2e-2, dv=2e-2)
    assert {getattr(passes[1], name).dtype for name in ("out", "dq", "dk", "dv")} == {torch.bfloat16}


class AtOnce(FlashKernel):
    """Parts of this kernel are merged as they come."""

    few_parts = False


@pytest.mark.parametrize(
    ("name", "layout_name", "ring_size"),
    [
        ("causal", "zigzag", 8),  # more parts than may wait
        ("causal", "contiguous", 3),
        ("full", "contiguous", 6),
        ("window both ways", "striped", 4),
        ("dilated", "zigzag", 4),
        ("documents, causal", "contiguous", 4),
    ],
)
def test_parts_that_wait_give_what_parts_merged_at_once_do(
    name: str, layout_name: str, ring_size: int
) -> None:
    """Results differ by a rounding to bfloat16 where float32 sums in another order lie beside its middle."""
    pattern = PATTERNS[name](SHAPE.tokens)
    layout = layout_for(layout_name, pattern, tokens=SHAPE.tokens, ring_size=ring_size)
    waiting, at_once = (
        ring_of_threads(pattern, layout, dtype=torch.bfloat16, kernel=kernel)
        for kernel in (FlashKernel(), AtOnce())
    )
    check(waiting, pattern, out=2e-2, dq=2e-2, dk=2e-2, dv=2e-2)
    for got, want in zip(waiting, at_once, strict=True):
        seen = want.lse.isfinite()
        assert torch.equal(got.lse.isfinite(), seen)
        assert torch.allclose(got.lse[seen], want.lse[seen], rtol=0, atol=2e-6)
        for x, y in ((got.out, want.out), (got.dq, want.dq)):
            assert x.dtype == torch.bfloat16 and relative_error(x, y.double()) < 4e-3
        assert torch.equal(got.dk, want.dk) or relative_error(got.dk, want.dk.double()) < 4e-3


def test_passes_of_other_tensors_or_schedules_share_nothing() -> None:
    layout = layout_for("contiguous", PATTERNS["causal"](8), tokens=8, ring_size=2)
    plan = build_plan(PATTERNS["causal"](8), layout).rank(0)
    schedules = [lower_rank(plan, backward=backward) for backward in (False, True)]
    passes, k = PreparedPasses(), torch.zeros(1, 1, 4, 8)
    tensors_of = [
        (k, k), (k, k[..., :4]), (k[:, :, :2], k), (k.double(), k.double()), (k.to("meta"), k.to("meta")),
    ]  # fmt: skip
    found = [passes.get(schedule, *both) for schedule in schedules for both in tensors_of]
    assert len(set(map(id, found))) == 10
    assert passes.get(schedules[0], k.clone(), k) is found[0]

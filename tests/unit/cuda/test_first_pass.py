"""Which pass has the long deadline: whatever flex compiles, and a rank says so in its header.

Ranks are fake and compute on the CPU, where Dynamo traces flex for a backend that counts its graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_ring import Causal, Dilated, Documents, MaskMod, RingMesh, SlidingWindow
from ds_ring.comm import exchange
from ds_ring.comm.collective import collective
from ds_ring.kernels.flex import block_mask
from ds_ring.kernels.flex.kernel import FlexKernel, _compiled_calls
from ds_ring.layers.scores import Softcap
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import RingContext, make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.patterns.captured.score_mod import ScoreMod
from ds_ring.plugin import DEVICES
from tests.cases import document_ids
from tests.host_waits import DeviceWork, HostWaits, fake_ring

HOP_S, FIRST_S, RING = 5, 50, 4
BACKEND = "counting"
graphs: list[torch.fx.GraphModule] = []


@torch._dynamo.register_backend(name=BACKEND)
def counting(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    graphs.append(module)
    return module.forward


class Call(NamedTuple):
    """One call of attention, forward and backward; its shard has 64 tokens for a factor of 1."""

    pattern: Pattern = Causal()
    batch: int = 1
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    block: int = 16
    longer: int = 1
    chunk_bytes: int = 1 << 30
    options: tuple[tuple[str, Any], ...] = ()
    score_mod: ScoreMod | None = None
    grad_lse: bool = False


class Pass(NamedTuple):
    graphs: int
    deadline_s: float
    asked_s: int  # by the header


@pytest.fixture
def mesh() -> Iterator[RingMesh]:
    with fake_ring(1, RING) as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    torch._dynamo.reset()
    _compiled_calls.clear()
    graphs.clear()


def masked(ids: Tensor) -> MaskMod:
    """A mask of the same code, of other documents."""
    return MaskMod(lambda batch, head, query, key: ids[query] == ids[key])


def kernel_of(context: RingContext, q: Tensor) -> FlexKernel:
    options = context.options
    scores = None if options.score_mod is None else options.score_mod.for_heads(range(q.shape[1]))
    made = options.kernel_options
    return FlexKernel(options.block_size, BACKEND, scores=scores, **made)


def passes(mesh: RingMesh, call: Call, backward: bool = True) -> list[Pass]:
    """Run a call; what each of its passes compiled, their deadlines, and what their headers asked for."""
    options = Options(
        scale=call.scale, hop_timeout_seconds=HOP_S, first_pass_timeout_seconds=FIRST_S,
        block_size=call.block, chunk_bytes=call.chunk_bytes, kernel_options=dict(call.options),
        score_mod=call.score_mod,
    )  # fmt: skip
    context = make_ring_context(call.pattern, "zigzag", mesh, options)
    found: list[Pass] = []

    def spread(made: exchange.Exchange, header: Tensor) -> Tensor:
        found.append(Pass(len(graphs), made.deadline_s, int(header[2])))
        return torch.stack([header, header])

    works = mock.patch.object(exchange, "start_batch", side_effect=lambda *_: [DeviceWork(HostWaits())])
    heads = ((call.heads, call.head_dim), (call.kv_heads, call.head_dim), (call.kv_heads, call.value_dim))
    shapes = [(call.batch, count, 64 * call.longer, width) for count, width in heads]
    q, k, v = (torch.zeros(shape, dtype=call.dtype, requires_grad=True) for shape in shapes)
    with (
        works,
        mock.patch.object(exchange.Exchange, "spread", spread),
        mock.patch.dict(DEVICES, cpu=DEVICES["cuda"]),  # as if the CPU were a GPU
        mock.patch.object(RingContext, "choose_kernel", kernel_of),
    ):
        out, lse = ring_attention_op(q, k, v, context.handle)
        if backward:
            (out.sum() + lse.sum() if call.grad_lse else out.sum()).backward()
    ends = [one.graphs for one in found[1:]] + [len(graphs)]
    return [one._replace(graphs=end - one.graphs) for one, end in zip(found, ends, strict=True)]


IDS = [torch.from_numpy(document_ids(64 * RING, seed=seed)) for seed in range(2)]
NEW = [  # each compiles something, by its one difference from what was there
    Call(),
    Call(heads=4, kv_heads=2),
    Call(heads=1, kv_heads=1),
    Call(scale=0.5),
    Call(value_dim=24),
    Call(block=32),
    Call(dtype=torch.bfloat16),
    Call(batch=2),
    Call(pattern=Dilated((32, 64), (1, 2), True, "zero")),
    Call(pattern=masked(IDS[0])),
    Call(score_mod=ScoreMod(Softcap(2.0))),
    Call(heads=12, kv_heads=12, chunk_bytes=3 << 12),  # in chunks of 3 heads
    Call(grad_lse=True),
    Call(longer=4),
]
KNOWN = [  # nothing that a compiled function takes for a constant is new
    *NEW,
    Call(longer=3),
    Call(batch=3),
    Call(pattern=SlidingWindow(2)),  # one key arrives
    Call(pattern=Documents(IDS[0].numpy()) & Causal()),
    Call(pattern=Documents(IDS[1].numpy()) & Causal()),
    Call(pattern=masked(IDS[1])),
]


# By night alone: more numbers that are constants of a graph, and backward passes of other calls than these.
AT_NIGHT = [Call(heads=4, kv_heads=2), Call(scale=0.5), Call(value_dim=24), Call(block=32)]
BACK = [Call(), Call(dtype=torch.bfloat16), Call(score_mod=ScoreMod(Softcap(2.0))), Call(grad_lse=True)]


@pytest.mark.night
@pytest.mark.parametrize("every_pass", [False, True])
def test_whatever_compiles_has_the_long_deadline_and_nothing_else(mesh: RingMesh, every_pass: bool) -> None:
    """So many combinations in one process, each compiled once, its heads and widths constants."""
    before, left_out = 0, [] if every_pass else AT_NIGHT
    calls = [(False, call) for call in NEW] + [(True, call) for call in KNOWN]
    for known, call in [one for one in calls if one[1] not in left_out]:
        for one in passes(mesh, call, every_pass or call in BACK):
            if one.graphs:
                assert (one.asked_s, one.deadline_s) == (FIRST_S, FIRST_S), (call, one)
            if known:
                assert (one.graphs, one.asked_s) == (0, 0), (call, one)
            # A rank may compile at the last hop of a pass: the header of the next one is waited for as long.
            assert one.deadline_s == (FIRST_S if before or one.asked_s else HOP_S), (call, one)
            before = one.asked_s
        assert known or one.graphs, call
    sizes = [size for graph in graphs for size in constants(graph)]
    assert len(graphs) == len(_compiled_calls) > 9 * (1 + every_pass) and sizes
    assert all(isinstance(size, int) for size in sizes), sizes


def constants(module: torch.fx.GraphModule) -> list[object]:
    """Heads and widths of all inputs of a graph but the mask's."""
    inputs = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
    tensors = [x for x in inputs if isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 3]
    return [size for x in tensors for size in (x.shape[1], *x.shape[3:])]


def test_the_most_patience_that_a_rank_asks_for_is_every_ranks(mesh: RingMesh) -> None:
    """This rank compiles nothing, another one does; refusals and differences are compared as before."""
    made = exchange.Exchange(mesh, HOP_S)

    def heard(patience: int, refused: int = 0) -> Callable[..., Tensor]:
        def spread(_: object, header: Tensor) -> Tensor:
            other = torch.tensor([refused or int(header[0]), int(header[1]), patience, 0])
            rows = sorted(tuple(x.tolist()) for x in (header, other))
            return torch.tensor(rows)

        return spread

    found = []
    for others, own in ((FIRST_S, 0), (0, 0), (0, FIRST_S), (FIRST_S, FIRST_S), (0, 0)):
        patched = mock.patch.object(exchange.Exchange, "spread", heard(others))
        with patched, collective(mesh, "attention forward", made) as call:
            call.agree({}, patience_s=own)
        found.append(made.deadline_s)
    assert found == [FIRST_S, HOP_S, FIRST_S, FIRST_S, HOP_S]


def test_hops_whose_tables_are_too_large_say_what_they_compile_once_their_side_is_known(
    mesh: RingMesh,
) -> None:
    with mock.patch.object(block_mask, "TABLE_BYTES", 100):
        found = [one for _ in range(3) for one in passes(mesh, Call(block=16, longer=4))]
    assert [one.graphs > 0 for one in found] == [True, True, False, False, False, False]
    assert [one.asked_s for one in found] == [FIRST_S, FIRST_S, 0, 0, 0, 0]

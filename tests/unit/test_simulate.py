"""Virtual ranks against dense float64 attention; what arrives, what is counted, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_ring import (
    Causal,
    Dilated,
    Full,
    RingConfigError,
    RingError,
    RingLayoutError,
    RingMesh,
    RingPatternError,
    RingShapeError,
    make_layout,
    ring_attention,
    simulate,
)
from ds_ring.comm.messages import Message, Observers, PostedBatch
from ds_ring.masks.slots import progressions_at
from ds_ring.measure.trace import tracing
from ds_ring.schedule.layout import expand_runs
from ds_ring.schedule.steps import Payload
from ds_ring.simulation import rank as rank_module
from ds_ring.simulation.generate import GAMMA, GeneratedSource, _mixed
from ds_ring.simulation.rank import COMPONENTS, VirtualExchange, VirtualRoute, VirtualWork
from ds_ring.simulation.simulate import SimulationOptions
from tests.cases import PATTERNS, Shape, layout_for, tensors
from tests.reference import dense_attention, relative_error

NAMES = ("out", "lse", "dq", "dk", "dv")
RAGGED = Shape(tokens=257)  # batch 2, 8 query heads on 2 K/V heads
CASES = [
    ("causal", "zigzag", 3),
    ("causal", "striped", 16),
    ("causal", "residue", 3),
    ("full", "contiguous", 3),
    ("window", "contiguous", 16),
    ("window both ways", "balanced", 4),
    ("dilated", "zigzag", 3),
    ("dilated", "residue", 5),
    ("dilated, not nested, not causal", "striped", 3),
    ("documents, causal", "contiguous", 16),
    ("mask function, causal", "zigzag", 4),
    ("causal", "zigzag", 1),
]


@pytest.mark.day(
    "causal-residue-3",
    "full-contiguous-3",
    "window both ways-balanced-4",
    "dilated-zigzag-3",
    "dilated-residue-5",
    "documents, causal-contiguous-16",
    "mask function, causal-zigzag-4",
    "causal-zigzag-1",
)
@pytest.mark.parametrize(("pattern_name", "layout_name", "ring_size"), CASES)
def test_virtual_ranks_are_within_1e_5_of_float64(
    pattern_name: str, layout_name: str, ring_size: int
) -> None:
    pattern = PATTERNS[pattern_name](RAGGED.tokens)
    layout = layout_for(layout_name, pattern, tokens=RAGGED.tokens, ring_size=ring_size)
    q, k, v, grad = tensors(RAGGED)
    got = simulate(
        q,
        k,
        v,
        pattern=pattern,
        layout=layout,
        grad_out=grad,
        measure_memory=False,
        options=SimulationOptions(chunk_bytes=1),
    )
    want = dense_attention(q, k, v, grad, pattern)
    nothing = want.lse.isneginf()  # rows that see no key
    assert torch.equal(got.lse.isneginf(), nothing)
    errors = {
        name: relative_error(getattr(got, name), getattr(want, name)) for name in NAMES if name != "lse"
    }
    errors["lse"] = relative_error(got.lse[~nothing], want.lse[~nothing])
    assert max(errors.values()) < 1e-5, errors
    assert sorted(got.bytes_sent) == list(range(ring_size))
    assert (sum(sent.forward for sent in got.bytes_sent.values()) > 0) == (ring_size > 1)


@pytest.mark.parametrize(
    ("pattern_name", "layout_name", "ring_size"),
    [
        ("causal", "zigzag", 3),
        ("window both ways", "balanced", 4),
        ("dilated", "zigzag", 5),
        ("mask function, causal", "zigzag", 4),
    ],
)
@pytest.mark.day("causal-zigzag-3", "dilated-zigzag-5")
def test_virtual_ranks_in_stages_send_as_many_bytes(
    pattern_name: str, layout_name: str, ring_size: int
) -> None:
    """And are the same attention; a forward pass sends each token once to each reader either way."""
    pattern = PATTERNS[pattern_name](RAGGED.tokens)
    layout = layout_for(layout_name, pattern, tokens=RAGGED.tokens, ring_size=ring_size)
    q, k, v, grad = tensors(RAGGED)
    inputs = {"pattern": pattern, "layout": layout, "grad_out": grad, "measure_memory": False}
    options = (SimulationOptions(chunk_bytes=1, stage_bytes=most) for most in (0, 1 << 30))
    hops, stages = (simulate(q, k, v, **inputs, options=item) for item in options)
    for name in NAMES:
        got, want = (getattr(item, name).nan_to_num(neginf=0) for item in (stages, hops))
        assert relative_error(got, want.double()) < 1e-6, name
    sent = [sum(item.forward for item in results.bytes_sent.values()) for results in (hops, stages)]
    assert sent[0] == sent[1] > 0


def test_float64_stays_float64() -> None:
    q, k, v, grad = tensors(RAGGED, torch.float64)
    layout = make_layout("zigzag", tokens=RAGGED.tokens, ring_size=3)
    got = simulate(q, k, v, pattern=Causal(), layout=layout, grad_out=grad, measure_memory=False)
    want = dense_attention(q, k, v, grad, Causal())
    for name in NAMES:
        assert getattr(got, name).dtype == torch.float64
        assert relative_error(getattr(got, name), getattr(want, name)) < 1e-13, name


def test_low_precision_gradients_are_rounded_once() -> None:
    """Eight gradient returns to every token: rounding each would cost several bits."""
    q, k, v, grad = tensors(RAGGED, torch.bfloat16)
    layout = make_layout("zigzag", tokens=RAGGED.tokens, ring_size=8)
    got = simulate(q, k, v, pattern=Full(), layout=layout, grad_out=grad, measure_memory=False)
    wide = simulate(
        *(x.float() for x in (q, k, v)),
        pattern=Full(),
        layout=layout,
        grad_out=grad.float(),
        measure_memory=False,
    )
    assert got.dv.dtype == torch.bfloat16
    gap = (got.dv.float() - wide.dv).abs()
    # one rounding to 8 bits is half of 2^-8 of a value, and `out` in bf16 does not enter dV
    assert bool((gap <= wide.dv.abs() * 2**-8 + 1e-6).all()), gap.max()


def test_what_is_sent_is_what_the_origin_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """K/V that a rank hands on are, bit for bit, the tokens that the receiver looks up for itself."""
    compared = []

    class Checking(VirtualExchange):
        def start(self, route: VirtualRoute, sent: Sequence[Tensor], *rest: Any) -> VirtualWork:
            for tensor, label in zip(sent, route.sends, strict=True):
                if label.what != Payload.KEYS.names:
                    continue
                there = torch.empty_like(tensor)
                self.look_up(Message(there, *label))
                assert torch.equal(there, tensor), label
                compared.append(there.numel())
            return super().start(route, sent, *rest)

    monkeypatch.setattr(rank_module, "VirtualExchange", Checking)
    q, k, v, grad = tensors(RAGGED)
    for pattern_name, layout_name in (("dilated", "zigzag"), ("window", "striped"), ("full", "balanced")):
        pattern = PATTERNS[pattern_name](RAGGED.tokens)
        layout = layout_for(layout_name, pattern, tokens=RAGGED.tokens, ring_size=5)
        before = sum(compared)
        result = simulate(q, k, v, pattern=pattern, layout=layout, grad_out=grad, measure_memory=False)
        sent = sum(sum(both) for both in result.bytes_sent.values())
        assert 0 < 4 * (sum(compared) - before) < sent  # the rest are gradients


def test_tensors_may_be_mapped_from_files(tmp_path: Path) -> None:
    layout = make_layout("zigzag", tokens=RAGGED.tokens, ring_size=3)
    plain = tensors(RAGGED)
    mapped = []
    for number, x in enumerate(plain):
        x.numpy().tofile(tmp_path / f"{number}.bin")
        file = np.memmap(tmp_path / f"{number}.bin", dtype=np.float32, mode="r+", shape=tuple(x.shape))
        mapped.append(torch.from_numpy(file))
    item, second = (
        simulate(q, k, v, pattern=Causal(), layout=layout, grad_out=grad, measure_memory=False)
        for q, k, v, grad in (plain, mapped)
    )
    for name in NAMES:
        assert torch.equal(getattr(item, name), getattr(second, name))


def test_a_sample_of_ranks_leaves_the_rest_open() -> None:
    q, k, v, grad = tensors(RAGGED)
    layout = make_layout("striped", tokens=RAGGED.tokens, ring_size=4)
    some = simulate(q, k, v, pattern=Causal(), layout=layout, grad_out=grad, ranks=[2])
    whole = simulate(q, k, v, pattern=Causal(), layout=layout, grad_out=grad)
    mine = torch.arange(RAGGED.tokens) % 4 == 2
    for sample, all_of_it in ((some.out, whole.out), (some.lse, whole.lse), (some.dq, whole.dq)):
        assert torch.equal(sample[:, :, mine], all_of_it[:, :, mine])
        assert bool(sample[:, :, ~mine].isnan().all())
    assert some.dk is None and some.dv is None
    assert set(some.memory) == {2} and some.memory[2].peak_bytes == whole.memory[2].peak_bytes


def test_the_profile_adds_up() -> None:
    shape = Shape(batch=1, query_heads=4, kv_heads=4, tokens=2048, head_dim=32)
    q, k, v, grad = tensors(shape, torch.bfloat16)
    layout = make_layout("zigzag", tokens=shape.tokens, ring_size=4)
    result = simulate(
        q, k, v, pattern=Causal(), layout=layout, grad_out=grad, options=SimulationOptions(chunk_bytes=1)
    )
    shard_bytes = 4 * 512 * 32 * 2
    for memory in result.memory.values():
        assert memory.peak_bytes == memory.at_peak.total
        assert {step.phase for step in memory.steps} == {"forward", "backward"}
        for step in memory.steps:
            assert sum(getattr(step, name) for name in COMPONENTS) == step.total
            assert step.workspace >= 0, step
            assert (step.q, step.kv, step.out) == (shard_bytes, 2 * shard_bytes, shard_bytes)
            assert step.lse == 4 * 512 * 4
            back = step.phase == "backward"
            assert (step.grad_out, step.gradients) == (back * shard_bytes, back * 3 * shard_bytes)
        # heads go round one by one: float32 accumulators of one head's out, or of its dq, dk and dv
        most = {p: max(s.accumulators for s in memory.steps if s.phase == p) for p in ("forward", "backward")}
        assert shard_bytes / 2 <= most["forward"] <= shard_bytes
        assert 3 * shard_bytes / 2 <= most["backward"] <= 3 * shard_bytes
        assert max(step.in_flight for step in memory.steps) > 0


def test_a_sixteenth_of_the_tokens_needs_a_sixteenth_of_the_memory() -> None:
    """8192 tokens, 8 heads of 64, float32, forward; an earlier project needed this many MB.

    (Rings of 2 to 16 ranks: the peak of the table, below.)
    """
    earlier_mb = {1: 2096.1, 16: 176.1}
    source = GeneratedSource(8192, heads=8, head_dim=64)
    peaks = {}
    for ring_size, mb in earlier_mb.items():
        layout = make_layout("zigzag", tokens=8192, ring_size=ring_size)
        sample = {ring_size - 1}  # every rank has the same shapes
        result = simulate(source, pattern=Causal(), layout=layout, ranks=sample)
        peaks[ring_size] = result.peak_bytes
        assert result.peak_bytes < 0.05 * mb * 1e6, ring_size
    assert 1 - peaks[16] / peaks[1] > 0.93, peaks


def test_traces_of_virtual_ranks_have_all_messages() -> None:
    """What one rank's trace says it sends is what the other's says it receives, and what is counted."""
    layout = make_layout("zigzag", tokens=RAGGED.tokens, ring_size=3)
    q, k, v, grad = tensors(RAGGED)
    arguments: dict[str, Any] = {"pattern": Causal(), "layout": layout, "grad_out": grad}
    arguments["options"] = SimulationOptions(chunk_bytes=1)
    assert simulate(q, k, v, **arguments, measure_memory=False).traces == {}
    result = simulate(q, k, v, **arguments, measure_memory=False, trace=True)
    assert result.memory == {} and sorted(result.traces) == [0, 1, 2]
    posted = {
        rank: [span for span in trace.spans if span.what == "send"] for rank, trace in result.traces.items()
    }
    for rank, spans in posted.items():
        assert all(
            span.batch == PostedBatch() for span in result.traces[rank].spans if span.what == "compute"
        )
        for phase, sent in zip(("forward", "backward"), result.bytes_sent[rank], strict=True):
            assert sent == sum(span.batch.bytes_sent for span in spans if span.phase == phase) > 0
        for second in posted:
            to = [p.payload_bytes for span in spans for p in span.batch.sends if p.peer == second]
            there = [p for span in posted[second] for p in span.batch.receives if p.peer == rank]
            assert to == [p.payload_bytes for p in there]


def test_a_trace_of_real_passes() -> None:
    mesh = RingMesh.single()
    layout = make_layout("zigzag", tokens=64, ring_size=1)
    q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
    with tracing(mesh) as trace:
        ring_attention(q, k, v, pattern=Causal(), layout=layout, mesh=mesh).sum().backward()
    noted = len(trace.spans)
    ring_attention(q, k, v, pattern=Causal(), layout=layout, mesh=mesh)
    assert not mesh.owners[Observers] and len(trace.spans) == noted
    assert [span.phase for span in trace.spans] == sorted((s.phase for s in trace.spans), reverse=True)
    for before, after in zip(trace.spans, trace.spans[1:], strict=False):
        assert before.start_ns <= before.end_ns <= after.start_ns
    for phase in ("forward", "backward"):
        steps = [span for span in trace.spans if span.phase == phase]
        assert [span.what for span in steps[:3]] == ["send", "compute", "wait"]
        assert [span.step for span in steps] == [index // 3 for index in range(len(steps))]
        assert steps[1].hop == 0 and steps[1].end_ns > steps[1].start_ns


def on_cuda(*shape: int) -> Tensor:
    """A tensor of a GPU that need not be there."""
    with FakeTensorMode():
        return torch.empty(shape, device="cuda")


GOOD = dict(zip(("q", "k", "v"), tensors(RAGGED), strict=False))
LAYOUT = make_layout("zigzag", tokens=RAGGED.tokens, ring_size=3)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": "no tensor"}, RingShapeError, "q: expected a tensor, got str"),
        ({"k": None}, RingShapeError, "k: expected a tensor, got NoneType"),
        ({"q": torch.zeros(2, 257, 16)}, RingShapeError, "expected 4 dimensions"),
        ({"q": torch.zeros(2, 8, 257, 16, device="meta")}, RingShapeError, "meta device"),
        ({"q": on_cuda(2, 8, 257, 16)}, RingShapeError, "q: expected a tensor on the CPU, got cuda:0"),
        ({"q": torch.zeros(2, 7, 257, 16)}, RingShapeError, "multiple of K/V heads"),
        ({"q": torch.zeros(2, 8, 256, 16)}, RingShapeError,
            "expected q and k of one length, got 256 and 257"),
        ({"v": torch.zeros(2, 2, 257, 16, dtype=torch.float64)}, RingShapeError, "v is torch.float64"),
        ({"grad_out": torch.zeros(2, 8, 257, 8)}, RingShapeError, "grad_out: expected (2, 8, 257, 16)"),
        ({"grad_out": True}, RingShapeError, "grad_out: expected a tensor, got bool"),
        ({"layout": "zigzag"}, RingLayoutError, "make_layout"),
        ({"layout": make_layout("zigzag", tokens=300, ring_size=3)}, RingShapeError,
            "layout: expected 257 tokens, as q has, got 300"),
        ({"pattern": "causal"}, RingPatternError, "expected a pattern, got 'causal'"),
        ({"pattern": PATTERNS["documents"](300)}, RingPatternError, "257 tokens"),
        ({"kernel": "fast"}, RingConfigError, 'kernel: expected one of "auto"'),
        ({"options": {"kernel_options": {"blok": 1}}}, RingConfigError, "blok"),
        ({"scale": float("nan")}, RingConfigError, "scale"),
        ({"options": {"chunk_bytes": 0}}, RingConfigError, "chunk_bytes: expected a positive integer, got 0"),
        ({"ranks": [0, 3]}, RingConfigError, "each of 0 to 2 at most once"),
        ({"ranks": [1, 1]}, RingConfigError, "at most once"),
        ({"q": GeneratedSource(257)}, RingShapeError, "a source alone"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_wrong_arguments(changes: dict[str, Any], error: type[RingError], words: str) -> None:
    arguments: dict[str, Any] = {**GOOD, "pattern": Causal(), "layout": LAYOUT} | changes
    options = arguments.pop("options", {})
    with pytest.raises(error) as caught:
        simulate(**arguments, options=SimulationOptions(**options))
    assert words in str(caught.value)


def test_the_generator_is_splitmix64() -> None:
    """The first output of seed 0, as published with the algorithm."""
    assert _mixed(GAMMA) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("head_dim", [16, 20, 3])
def test_generated_values_do_not_depend_on_the_sharding(head_dim: int) -> None:
    tokens = 20_000
    source = GeneratedSource(tokens, heads=3, head_dim=head_dim, batch=2, seed=7)
    whole = torch.empty(2, 3, tokens, head_dim)
    source.fill("q", slice(None), np.array([[0, 1, tokens]]), whole)
    pattern = Dilated((64, 256), (1, 4))
    for name in ("contiguous", "zigzag", "striped", "residue"):
        layout = make_layout(name, tokens=tokens, ring_size=7, pattern=pattern)
        runs = layout.runs(4)
        part = torch.empty(2, 2, layout.valid_tokens(4), head_dim)
        source.fill("q", slice(0, 3, 2), runs, part)
        assert torch.equal(part, whole[:, ::2][:, :, expand_runs(runs)]), name
    scattered = np.stack([np.random.default_rng(0).permutation(tokens), *np.ones((2, tokens), int)], 1)
    part = torch.empty(2, 3, tokens, head_dim, dtype=torch.bfloat16)
    source.fill("q", slice(None), scattered, part)
    assert torch.equal(part.float(), whole[:, :, scattered[:, 0]])
    assert abs(float(whole.mean()) + 1 / 128) < 0.01 and abs(float(whole.std()) - 1.1547) < 0.01
    streams = [source, GeneratedSource(tokens, heads=3, head_dim=head_dim, batch=2, seed=8)]
    rows = [torch.empty(2, 3, 100, head_dim) for _ in range(4)]
    for row, (name, stream) in zip(rows, [(n, s) for n in ("q", "k") for s in streams], strict=True):
        stream.fill(name, slice(None), np.array([[0, 1, 100]]), row)
    flat = [x.flatten() for row in rows for batch in row for x in batch]
    correlation = torch.corrcoef(torch.stack(flat)).fill_diagonal_(0).abs().max()
    assert correlation < 6 / (100 * head_dim) ** 0.5


@pytest.mark.parametrize(
    "arguments",
    [
        {"tokens": 0},
        {"tokens": 8, "heads": 3, "kv_heads": 2},
        {"tokens": 8, "seed": -1},
        {"tokens": 8, "dtype": torch.int32},
        {"tokens": 8, "head_dim": (1 << 16) + 1},
        {"tokens": 8, "v_head_dim": (1 << 16) + 1},
    ],
)
def test_wrong_sources(arguments: dict[str, Any]) -> None:
    with pytest.raises(RingError, match=r"expected|multiple"):
        GeneratedSource(**arguments)


def test_slots_as_progressions_of_positions() -> None:
    pattern = Dilated((64, 256), (1, 4))
    for name in ("contiguous", "zigzag", "striped", "residue"):
        layout = make_layout(name, tokens=1003, ring_size=3, pattern=pattern)
        positions = layout.positions(1)
        slots = np.array([[0, 1], [5, 40], [100, 101], [200, 310]])
        want = np.concatenate([positions[start:end] for start, end in slots.tolist()])
        assert np.array_equal(expand_runs(progressions_at(layout.runs(1), slots)), want), name


@pytest.mark.parametrize(
    ("ring_size", "rank", "most_mib"), [(2, 0, 37.21), (4, 1, 18.89), (8, 7, 9.36), (16, 0, 4.73)]
)
@pytest.mark.day("8-7-9.36", "16-0-4.73")
def test_the_peak_of_a_forward_pass_is_that_of_the_table(ring_size: int, rank: int, most_mib: float) -> None:
    """The row "peak" of launcher/README.md. A copy of the own keys would add 2 to 5 %."""
    q, k, v, _ = tensors(Shape(batch=1, query_heads=8, kv_heads=8, tokens=8192, head_dim=64))
    layout = make_layout("zigzag", tokens=8192, ring_size=ring_size)
    results = simulate(
        q, k, v, pattern=Causal(), layout=layout, ranks=[rank], options=SimulationOptions(progress=False)
    )
    assert most_mib - 0.05 < results.peak_bytes / 2**20 < most_mib

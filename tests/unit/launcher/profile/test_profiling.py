"""What a profile shows: parts that sum up, the 1/P line, the trace as JSON, pictures that can be drawn."""

from __future__ import annotations

import builtins
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ring import Causal, RingConfigError, RingError, RingMesh, SlidingWindow
from ds_ring.comm.messages import MessageSize, PostedBatch
from ds_ring.measure.trace import Span, Trace
from ds_ring.ops.options import Options
from ds_ring.simulation.rank import COMPONENTS, GlobalSizes
from ds_ring_launcher.profile import pictures
from ds_ring_launcher.profile.measure import ProfileJob, RingRun, measure_rank, measure_virtual
from ds_ring_launcher.profile.pictures import LABELS, bars_of, one_over_p, shown_parts, steps_by_part
from ds_ring_launcher.profile.timeline import LINKS, chrome_trace, replay, this_machine, timeline_of

SIZES = GlobalSizes(1, 4, 2, 600, 16, torch.float32)
JOB = ProfileJob(SIZES, Causal(), "zigzag", Options(chunk_bytes=1))


@pytest.fixture(scope="module")
def runs() -> list[RingRun]:
    return [measure_virtual(JOB, ring_size, times=ring_size == 3, progress=False) for ring_size in (1, 3)]


def test_parts_sum_to_the_peak(runs: list[RingRun]) -> None:
    bars = bars_of(runs)
    assert [bar.ring_size for bar in bars] == [1, 3]
    for bar, run in zip(bars, runs, strict=True):
        assert sum(bar.parts.values()) == bar.total_bytes == run.peak_bytes
        assert bar.total_bytes == max(rank.memory.peak_bytes for rank in run.ranks)
        assert min(bar.parts.values()) >= 0 and set(bar.parts) == set(LABELS)
    assert bars[0].parts["in_flight"] == 0 < bars[1].parts["in_flight"]
    assert "in_flight" in shown_parts(bars) and "accumulators" not in shown_parts(bars)


def test_the_line_starts_at_ring_1(runs: list[RingRun]) -> None:
    line = one_over_p(bars_of([runs[1], runs[0]]))
    assert line.at(1) == runs[0].peak_bytes and line.at(4) == runs[0].peak_bytes / 4
    assert one_over_p(bars_of(runs[1:])).at(3) == runs[1].peak_bytes


def test_steps_sum_to_their_totals(runs: list[RingRun]) -> None:
    memory = runs[1].ranks[runs[1].busiest].memory
    parts = steps_by_part(memory)
    totals = [step.total for step in memory.steps]
    assert [sum(sizes) for sizes in zip(*parts.values(), strict=True)] == totals
    assert "accumulators" not in parts and list(parts) == [name for name in COMPONENTS if name in parts]


def test_one_real_rank_is_the_virtual_one(runs: list[RingRun]) -> None:
    """A ring of one needs no process group: the pass, its profile and its times are those of real ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = measure_rank(RingMesh.single(), JOB, times=True)
    finally:
        torch.set_num_threads(threads)
    assert found.memory.peak_bytes == pytest.approx(runs[0].peak_bytes, rel=0.03)
    assert found.trace is not None
    timeline = timeline_of({0: found.trace}, where="a desk")
    assert timeline.kind == "real" and "a desk" in timeline.note and "one clock" in timeline.note
    assert min(event.start_us for event in timeline.events) == 0
    check_trace(chrome_trace([timeline]), ranks=1)


def test_the_trace_is_valid(runs: list[RingRun]) -> None:
    timeline = replay(runs[1].traces, 100.0)
    trace = json.loads(json.dumps(chrome_trace([timeline, timeline], "a title")))
    check_trace(trace, ranks=3)
    assert trace["otherData"]["title"] == "a title" and "MODELLED" in trace["otherData"]["simulated"]
    names = {row["args"]["name"] for row in trace["traceEvents"] if row["name"] == "process_name"}
    assert names == {"ring rank 0", "ring rank 1", "ring rank 2"}


def check_trace(trace: dict[str, Any], ranks: int) -> None:
    """Complete events of one thread do not overlap; every rank goes forward and back."""
    by_thread: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in trace["traceEvents"]:
        assert row["ph"] in ("X", "M") and row["pid"] in range(ranks)
        if row["ph"] == "X":
            by_thread[row["pid"], row["tid"]].append(row)
    assert {pid for pid, _ in by_thread} == set(range(ranks))
    for (pid, tid), rows in by_thread.items():
        rows.sort(key=lambda row: row["ts"])
        assert all(row["dur"] > 0 for row in rows)
        for before, after in pairwise(rows):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3, (pid, tid)
        if tid < LINKS:
            assert {row["cat"] for row in rows} == {"forward", "backward"}
            hops = {row["args"]["hop"] for row in rows if row["name"].startswith("compute hop ")}
            assert set(range(ranks)) <= hops
            posted = [row for row in rows if row["name"].startswith("send hop ")]
            assert (sum(row["args"]["bytes_sent"] for row in posted) > 0) == (ranks > 1)


def test_clocks_of_several_machines_are_aligned() -> None:
    """The second machine's clock is an hour ahead; what is common is the end of the first wait."""
    batch = PostedBatch((MessageSize(1, 8),), (MessageSize(1, 8),))
    traces = {}
    for rank, (ahead_ns, compute_ns) in enumerate([(0, 5000), (3600 * 10**9, 2000)]):
        ends = ahead_ns + 10_000 * (rank + 1)
        spans = [
            Span("compute", "forward", 0, 0, ends - 1000 - compute_ns, ends - 1000, 0, 0),
            Span("wait", "forward", 0, 1, ends - 1000, ends, 0, 0, batch),
        ]
        traces[rank] = Trace(rank, spans)
    aligned = timeline_of(traces, one_clock=False)
    assert [event.end_us for event in aligned.events if event.what == "wait"] == [6, 6]
    assert [event.start_us for event in aligned.events if event.what == "compute"] == [0, 3]
    assert "aligned" in aligned.note
    assert timeline_of(traces).end_us > 3.6e9


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "words"),
    [
        (2, 1, 2, "one machine with 2 cores"),
        (1, 1, 1, "one machine with 1 core"),
        (4, 1, 2, "one machine, whose 2 cores they share: times are longer than on cores of their own"),
        (2, 2, 2, "they share"),
    ],
)
def test_a_timeline_says_when_ranks_share_cores(
    monkeypatch: pytest.MonkeyPatch, ranks: int, threads: int, cores: int, words: str
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    text = this_machine(ranks, threads)
    assert words in text and ("share" in text) == ("share" in words)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.day("True")
def test_pictures_are_drawn(tmp_path: Path, backward: bool) -> None:
    sizes = SIZES._replace(dtype=torch.bfloat16)
    job = ProfileJob(sizes, SlidingWindow(100), "contiguous", Options(chunk_bytes=1), backward)
    found = [measure_virtual(job, ring_size, times=True, progress=False) for ring_size in (2, 4)]
    assert {span.phase for span in found[1].traces[0].spans} >= {"forward"}
    timelines = [replay(found[1].traces, 1000.0), timeline_of(found[1].traces)]
    pictures.draw_memory(found, job.title, tmp_path / "memory.png")
    pictures.draw_steps(found[1:], job.title, tmp_path / "steps.png")
    pictures.draw_timeline(timelines, job.title, tmp_path / "timeline.png")
    for name in ("memory", "steps", "timeline"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refusing(name: str, *arguments: Any, **named: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return real_import(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(RingConfigError, match=r"ds_ring\[plot\]"):
        pictures.new_figure(1, 1)


def test_a_job_without_threads_is_refused() -> None:
    with pytest.raises(RingError, match="threads: expected at least 1, got 0"):
        ProfileJob(SIZES, Causal(), threads=0).check([1, 4])

"""A ring that sends to itself (`self_ring.py`): exactness, how much of its messages is hidden, a trace."""

from __future__ import annotations

import gzip
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from benchmarks.gpu_rates import seconds
from benchmarks.measuring import ResultRow
from common import in_turns
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ds_ring.comm import exchange
from ds_ring.kernels.flash.kernel import FlashKernel
from ds_ring.kernels.flash.packages import SM_MARGIN
from ds_ring.ops.options import Options

from .kernels import compute_errors, get_limit, get_shape, is_cuda, judged, operands, reference
from .self_ring import Done, poisoned, self_group, self_ring

OUTPUT = "GPU_FIRST_OUTPUT"
TRACE_BYTES = 15 << 20  # of a file that comes back from a borrowed machine


def exact(device: str, kernel: str) -> Iterator[ResultRow]:
    """Yield errors of rings of eight, hop by hop and in stages."""
    names, ring_size = ("out", "lse", "dq", "dk", "dv"), 8
    with self_group(device, poisoned):
        for stage_bytes in (0, 1 << 40):
            options = Options(kernel=kernel, stage_bytes=stage_bytes)
            begin = time.perf_counter()
            with self_ring(operands(device), ring_size, options) as passes:
                got = dict(zip(names, passes(), strict=True))
            case = {"kernel": kernel, "keys_travel": "in stages" if stage_bytes else "hop by hop"}
            first = {"first_pass_s": round(time.perf_counter() - begin, 2)}
            errors = compute_errors(got, reference(device, "full"), math.log(ring_size))
            yield judged(case, errors, get_limit(get_shape(device).dtype), first)


def _large(device: str) -> tuple[Tensor, ...]:
    """Return q, k, v and the gradient of out of a shard that is timed."""
    shape, tokens = get_shape(device), 8192 if is_cuda(device) else 64
    q, grad = (shape.tensor(shape.heads, tokens) for _ in range(2))
    k, v = (shape.tensor(shape.kv_heads, tokens) for _ in range(2))
    return q, k, v, grad


def _nothing(*_: object, **__: object) -> Iterator[Any]:
    """Compute nothing of a hop."""
    return iter(())


def measure(device: str, sm_margin: int, cluster: str | None) -> Iterator[ResultRow]:
    """Yield the time of a ring of eight with messages, without, and of its messages alone."""
    case = {"sm_margin": sm_margin, "cluster": cluster or "unset (1)"}
    if is_cuda(device) and sm_margin != SM_MARGIN and find_spec("flash_attn_interface") is None:
        yield ResultRow(case, {"not_shown": "only FlashAttention 3 has a margin; it is not installed"})
        return
    ring_size, on = 8, {"messages": True, "kernels": True}

    def start(route: Any, sent: Any, received: Any) -> Any:
        return (
            exchange_start(route, sent, received) if on["messages"] else [Done() for _ in (*sent, *received)]
        )

    def computing(name: str) -> Callable[..., Any]:
        real = getattr(FlashKernel, name)
        return lambda *arguments, **named: (real if on["kernels"] else _nothing)(*arguments, **named)

    exchange_start = exchange.start_batch
    options = Options(kernel="flash", kernel_options={"sm_margin": sm_margin})
    with ExitStack() as stack:
        stack.enter_context(self_group(device, start))
        for name in ("forward", "backward"):
            stack.enter_context(mock.patch.object(FlashKernel, name, computing(name)))
        passes = stack.enter_context(self_ring(_large(device), ring_size, options))

        def timed(messages: bool, kernels: bool) -> float:
            on.update(messages=messages, kernels=kernels)
            return seconds(passes, device)

        works = {"with": (True, True), "without": (False, True), "alone": (True, False)}
        taken = in_turns({name: partial(timed, *arguments) for name, arguments in works.items()}, 10, 2)
        on.update(messages=True, kernels=True)
    both, none, alone = (1e3 * statistics.median(taken[name]) for name in works)
    results = {"with_ms": round(both, 3), "without_ms": round(none, 3), "messages_alone_ms": round(alone, 3)}
    results |= {
        "exposed_ms": round(both - none, 3),
        "hidden_percent": round(100 * (1 - (both - none) / alone)),
    }
    yield ResultRow(case, results)


def trace(device: str) -> Iterator[ResultRow]:
    """Yield the kernels of a ring of eight, the gaps between them and the host's time, by one trace."""
    ring_size, cuda = 8, is_cuda(device)
    with self_group(device), self_ring(_large(device), ring_size, Options(kernel="flash")) as passes:
        for _ in range(3):
            passes()
        if cuda:
            torch.cuda.synchronize()
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with profile(activities=kinds) as profiler:
            begin = time.perf_counter()
            passes()
            host = time.perf_counter() - begin
            if cuda:
                torch.cuda.synchronize()
    _write(profiler)
    events = [
        event
        for event in profiler.events()
        if event.device_type.name == device.upper() and event.time_range.elapsed_us() > 0
    ]
    names, times = Counter[str](), Counter[str]()
    for event in events:
        names[event.name] += 1
        times[event.name] += event.self_device_time_total if cuda else event.self_cpu_time_total
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    merged = spans[:1]
    for start, end in spans[1:]:
        if start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    gaps = [later[0] - earlier[1] for earlier, later in pairwise(merged)]
    results = {"launches": len(events), "host_us_a_hop": round(1e6 * host / 2 / ring_size)}
    results |= {"span_us": round(merged[-1][1] - merged[0][0]), "gaps_us": round(sum(gaps))}
    yield ResultRow(
        {"what": "a pass, forward and backward"}, results | {"largest_gap_us": round(max(gaps, default=0))}
    )
    for name, microseconds in times.most_common(12):
        yield ResultRow({"what": name[:90]}, {"launches": names[name], "sum_us": round(microseconds)})


def _write(profiler: Any) -> None:
    """Write a trace, unless it is too large to come back."""
    path = Path(os.environ[OUTPUT], "trace.json")
    profiler.export_chrome_trace(str(path))
    packed = gzip.compress(path.read_bytes())
    path.unlink()
    if len(packed) <= TRACE_BYTES:
        path.with_suffix(".json.gz").write_bytes(packed)

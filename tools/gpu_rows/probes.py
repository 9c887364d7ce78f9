"""The host's time of a hop, the merge, and assumptions about CUDA's runtime."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from benchmarks.gpu_rates import host_seconds, merge_rate
from benchmarks.measuring import ResultRow

from ds_ring.cuda.streams import CudaStreams

from .kernels import get_shape, is_cuda


def host(device: str, kernel: str) -> Iterator[ResultRow]:
    """Yield the processor time of issuing a hop."""
    size = {} if is_cuda(device) else {"tokens": 64, "times": 5}
    yield host_seconds(get_shape(device), kernel, **size)


def merge(device: str) -> Iterator[ResultRow]:
    """Yield the rate of a merge."""
    yield merge_rate(get_shape(device), 32_768 if is_cuda(device) else 512, 10)


def probe(device: str, what: str) -> Iterator[ResultRow]:
    """Check an assumption: queries of events are cheap, and do not disturb a capture."""
    if not is_cuda(device):
        yield ResultRow({"probe": what}, {"not_shown": "needs CUDA"})
    elif what == "capture":
        yield ResultRow({"probe": "graph capture during event queries of a thread"}, _capture())
    else:
        yield _queries(f"event query, {what} host", _launches if what == "launching" else lambda: None)


def _launches() -> None:
    x = torch.ones(1024, device="cuda")
    for _ in range(20_000):
        x.add_(1)


def _queries(name: str, work: Callable[[], None]) -> ResultRow:
    """Time queries of an event that is not over, from a thread, while the main thread works."""
    taken: list[float] = []
    torch.cuda._sleep(1 << 30)  # clock cycles: about half a second
    event = torch.cuda.Event()
    event.record()
    over = threading.Event()

    def ask() -> None:
        while not over.is_set() and not event.query():
            begin = time.perf_counter()
            event.query()
            taken.append(time.perf_counter() - begin)
            time.sleep(1e-3)

    thread = threading.Thread(target=ask)
    thread.start()
    work()
    torch.cuda.synchronize()
    over.set()
    thread.join()
    if not taken:
        return ResultRow({"probe": name}, {}, "the event was over before the first query")
    seconds = {"median_us": statistics.median(taken), "largest_us": max(taken)}
    results = {key: round(value * 1e6, 1) for key, value in seconds.items()}
    return ResultRow({"probe": name}, results | {"queries": len(taken)})


def _capture() -> dict[str, str]:
    """Capture a graph while a thread queries an event, in both modes, and as ds_ring does it."""
    row: dict[str, str] = {}
    streams = CudaStreams(torch.device("cuda", 0))
    for name, mode, prepare, query in (
        ("global", "global", lambda: None, torch.cuda.Event.query),
        ("global, by CudaStreams", "global", streams.prepare_thread, streams.reached),
        ("thread_local", "thread_local", lambda: None, torch.cuda.Event.query),
    ):
        event, over = torch.cuda.Event(), threading.Event()
        event.record()

        def ask(
            event: Any = event, over: threading.Event = over, prepare: Any = prepare, query: Any = query
        ) -> None:
            prepare()
            while not over.is_set():
                query(event)
                time.sleep(1e-4)

        thread = threading.Thread(target=ask)
        x, graph = torch.ones(1024, device="cuda"), torch.cuda.CUDAGraph()
        thread.start()
        try:
            with torch.cuda.graph(graph, capture_error_mode=mode):
                for _ in range(1000):
                    x.add_(1)
            x.zero_()
            graph.replay()
            row[name] = "right" if bool((x == 1000).all()) else "wrong numbers"
        except RuntimeError as error:
            row[name] = str(error).splitlines()[0][:100]
        finally:
            over.set()
            thread.join()
    return row

"""Transport "pull" on CUDA, as far as no GPU shows it: torch's signatures, and the order of signals.

`CudaShared` launches on streams that only note what is launched. A scheduler then runs the streams of all
ranks with the signals of torch (CUDASymmetricMemory.cu): a signal is put by a compare-and-swap from 0 to 1,
which waits while the last one was not heard, and heard by one from 1 to 0.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import _symmetric_memory

from ds_ring import Causal, SlidingWindow, make_layout
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.lowering import lower_rank
from ds_ring.schedule.plan import build_plan
from ds_ring.schedule.steps import Recv, Send
from ds_ring.transports.pull import shared_memory
from ds_ring.transports.pull.shared_memory import OF_HANDLE, OF_MODULE, QUEUES, READY, TAKEN, CudaShared, Pull
from tests.fake_cuda import fake_gpu

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("name", OF_MODULE)
def test_torch_has_each_function_with_our_parameters(name: str) -> None:
    assert set(OF_MODULE[name]) <= set(inspect.signature(getattr(_symmetric_memory, name)).parameters)


@pytest.mark.parametrize("name", OF_HANDLE)
def test_torch_has_each_method_with_our_parameters(name: str) -> None:
    """In this order and under these types: torch 2.11.0 and 2.13.0 have the same (read and run)."""
    found = getattr(_SymmetricMemory, name)
    given = [one for one in re.findall(r"(\w+): ", found.__doc__ or "") if one != "self"]
    if name == "stream_write_value32":
        given[0] = "tensor"  # `input` in the binding, `tensor` in its stub; we pass it by place
    assert tuple(given[: len(OF_HANDLE[name])]) == OF_HANDLE[name]


def test_nothing_else_of_it_is_used() -> None:
    used = set()
    for node in ast.walk(ast.parse(inspect.getsource(shared_memory))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("handle", "_symmetric_memory"):
            used.add(node.attr)
    assert used == set(OF_MODULE) | set(OF_HANDLE)


class Op(NamedTuple):
    """What a stream does: put or hear a signal of a rank and kind, write it, copy, or come to an event."""

    what: str
    rank: int
    kind: int = 0
    queue: int | None = None  # of the driver, where a stream that releases is current


class Handle:
    """torch's handle of one rank, which notes what is launched."""

    def __init__(self, rank: int, world_size: int, launched: list[Op]) -> None:
        self.rank, self.world_size, self._launched = rank, world_size, launched

    def put_signal(self, dst_rank: int, channel: int, timeout_ms: int) -> None:
        assert timeout_ms == 0, "a timeout ends the process"
        self._launched.append(Op("put", dst_rank, channel))

    def wait_signal(self, src_rank: int, channel: int, timeout_ms: int) -> None:
        assert timeout_ms == 0
        self._launched.append(Op("hear", src_rank, channel))

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int) -> torch.Tensor:
        self._launched.append(Op("copy", rank))
        return torch.zeros(sizes, dtype=dtype)

    def get_signal_pad(self, rank: int, sizes: Any, dtype: torch.dtype) -> int:
        assert sizes == (2 * self.world_size,) and dtype == torch.uint32
        return rank

    def stream_write_value32(self, pad: int, offset: int, value: int) -> None:
        kind, sender = divmod(offset, self.world_size)
        self._launched.append(Op(f"write {value} of {sender}", pad, kind, Stream.now))


class Stream:
    """A stream in one of the driver's queues; while it is current, `Stream.now` is that queue."""

    now: int | None = None

    def __init__(self, queue: int) -> None:
        self.queue = queue

    def __enter__(self) -> None:
        Stream.now = self.queue

    def __exit__(self, *_: object) -> None:
        Stream.now = None


class Node:
    """The GPUs of a node: one stream of pulls each, and a pad of signals, by receiver, sender and kind.

    The stream of pulls is in queue 0 of `queues`, and so is the first of the streams that release.
    """

    def __init__(self, ranks: int, queues: int = 8, releasing: int = QUEUES - 1) -> None:
        self.launched: list[list[Op]] = [[] for _ in range(ranks)]
        self.copied: list[tuple[int, int]] = []  # reader and owner
        self.pad: dict[tuple[int, int, int], int] = {}
        self.shared: list[CudaShared] = []
        for rank in range(ranks):
            one = CudaShared.__new__(CudaShared)
            one.device, one._peers = GPU, [other for other in range(ranks) if other != rank]
            one._pulling = mock.MagicMock()
            one._releasing = [Stream(number % queues) for number in range(releasing)]
            one._handle = Handle(rank, ranks, self.launched[rank])
            self.shared.append(one)

    def run(self) -> list[int]:
        """Run all streams as far as they come; the number of operations that each has left."""
        moved = True
        while moved:
            moved = False
            for rank, ops in enumerate(self.launched):
                while ops and self._step(rank, ops[0]):
                    ops.pop(0)
                    moved = True
        return [len(ops) for ops in self.launched]

    def release(self, rank: int, puts: bool) -> None:
        """What `abort` of a rank writes in turn, at once; in queue 0 it stands behind what is stuck."""
        kept, self.launched[rank][:] = list(self.launched[rank]), []
        self.shared[rank]._release(puts)
        for op in self.launched[rank]:
            if op.queue == 0 and kept:
                continue
            value, sender = (int(x) for x in re.findall(r"\d+", op.what))
            self.pad[op.rank, sender, op.kind] = value
        self.launched[rank][:] = kept

    def _step(self, rank: int, op: Op) -> bool:
        key = (op.rank, rank, op.kind) if op.what == "put" else (rank, op.rank, op.kind)
        if op.what == "copy":
            self.copied.append((rank, op.rank))
            return True
        free = self.pad.get(key, 0) == (0 if op.what == "put" else 1)
        if free:
            self.pad[key] = int(op.what == "put")
        return free


@pytest.fixture
def no_gpu() -> Any:
    with fake_gpu(current_stream=mock.Mock(), stream=lambda stream: stream, set_device=None):
        yield


def launch(node: Node, pattern: Pattern, backward: bool, begin: Callable[..., Any] = CudaShared.begin) -> int:
    """Launch all batches of a pass on all ranks; the number of messages."""
    ranks, count = len(node.shared), 0
    layout = make_layout("zigzag", tokens=64 * ranks, ring_size=ranks, pattern=pattern)
    plan = build_plan(pattern, layout, query_heads=4, kv_heads=2)
    for rank, shared in enumerate(node.shared):
        schedule = lower_rank(plan.rank(rank), backward=backward, head_bytes=1, chunk_bytes=1)
        for batch in schedule.batches:
            posted = [step for _, steps in batch.rounds for step in steps.posted]
            pulls: dict[int, list[Pull]] = {}
            for step in posted:
                if isinstance(step, Recv):
                    pulls.setdefault(step.peer, []).append(Pull(0, torch.zeros(1)))
                    count += 1
            begin(shared, list(dict.fromkeys(one.peer for one in posted if isinstance(one, Send))), pulls)
    return count


@pytest.mark.parametrize("pattern", [Causal(), SlidingWindow(70)], ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.usefixtures("no_gpu")
def test_no_rank_waits_for_ever_and_each_message_is_copied(ranks: int, pattern: Pattern) -> None:
    node = Node(ranks)
    count = sum(launch(node, pattern, backward) for backward in (False, True))
    assert node.run() == [0] * ranks
    assert len(node.copied) == count > 0 and not any(node.pad.values())


def one_signal_a_message(shared: CudaShared, receivers: list[int], pulls: dict[int, list[Pull]]) -> None:
    """The seeded fault: what one would write first. Two messages to one rank wait for each other."""
    handle = shared._handle
    for peer in receivers:
        for _ in range(2):
            handle.put_signal(peer, READY, 0)
    for peer in pulls:
        for _ in range(2):
            handle.wait_signal(peer, READY, 0)
            handle.put_signal(peer, TAKEN, 0)
    for peer in receivers:
        for _ in range(2):
            handle.wait_signal(peer, TAKEN, 0)


@pytest.mark.usefixtures("no_gpu")
def test_signals_in_another_order_would_be_found() -> None:
    node = Node(4)
    launch(node, Causal(), False, one_signal_a_message)
    assert any(node.run())


def is_released(node: Node, gone: int) -> bool:
    """Whether all survivors come to their end by `abort`, if rank 2 dies after so many operations."""
    for backward in (False, True):
        launch(node, Causal(), backward)
    del node.launched[2][gone:]
    survivors, left = (0, 1, 3), node.run()
    assert all(left[rank] for rank in survivors)
    for _ in range(sum(left)):
        for puts in (False, True):
            for rank in survivors:
                node.release(rank, puts)
            node.run()
        if not any(node.run()):
            return True
    return False


@pytest.mark.parametrize("gone", range(6))
@pytest.mark.parametrize("queues", [2, 8, QUEUES])
@pytest.mark.usefixtures("no_gpu")
def test_abort_releases_what_waits_for_a_rank_that_is_gone(gone: int, queues: int) -> None:
    """Also where the first stream that releases is in the queue of the one that is stuck."""
    assert is_released(Node(4, queues), gone)


@pytest.mark.parametrize(("queues", "releasing"), [(8, 1), (1, QUEUES - 1)])
@pytest.mark.usefixtures("no_gpu")
def test_a_release_in_the_queue_of_the_wait_would_be_found(queues: int, releasing: int) -> None:
    """One stream alone may stand behind the wait; with one queue all of them do, so it is refused."""
    assert not is_released(Node(4, queues, releasing), 3)


def test_a_process_with_one_queue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with mock.patch.object(_symmetric_memory, "get_backend", return_value="CUDA"):
        found = shared_memory._why_not(GPU)
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "2")
        assert shared_memory._why_not(GPU) is None
    assert found is not None and "its CUDA_DEVICE_MAX_CONNECTIONS is 1" in found and "use 2" in found

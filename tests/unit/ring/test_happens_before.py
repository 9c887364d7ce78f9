"""Every access of a pass is ordered: its streams, marks and waits under torch's race detector.

The real executor runs on CPU tensors; its exchange is a stand-in that tells `torch.cuda._sanitizer` what a
GPU would do: operators run on the caller's stream, messages on NCCL's, which begins behind the stream that
posts and is waited for by a stream. Where two accesses of a buffer are not ordered, it says so.
"""

from __future__ import annotations

import traceback
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.cuda._sanitizer import ArgumentHandler, EventHandler, SynchronizationError
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ring.comm.messages import Counters, Message, check_messages
from ds_ring.errors import RingMismatchError
from ds_ring.kernels.interface import Kernel, PartialGrads, PartialOut, Rows
from ds_ring.masks.tiles import Tiles
from ds_ring.ring import buffers, pool
from ds_ring.ring.pool import Block
from ds_ring.ring.ring_pass import RingPass
from ds_ring.schedule.plan import build_plan
from tests.cases import PATTERNS, layout_for

MAIN, POSTING, NCCL, OTHER = 0, 1, 2, 3
TOKENS = 96


class Ranges(NamedTuple):
    """What an access is given: bytes from the first to the last element of each tensor, read and written."""

    what: str
    stream: int
    read: list[tuple[int, int]]
    written: list[tuple[int, int]]


class Event(NamedTuple):
    """An event, recorded or waited for on a stream; which wait of the pass it is, -1 for another's."""

    event: int
    stream: int
    is_wait: bool
    number: int = -1


class Device(TorchDispatchMode):
    """Keeps what runs where, for the race detector: accesses of memory, marks and waits, in order.

    Args:
        kept: if given, only accesses of these blocks are looked at: others' addresses are used again.

    Attributes:
        waits: how many there were.
    """

    def __init__(self, kept: list[Block] | None = None) -> None:
        super().__init__()
        self._kept = kept
        self.waits, self.stream = 0, MAIN
        self._trace: list[Ranges | Event] = []
        self._events = 0

    def launch(self, what: str, stream: int, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Run something on a stream."""
        # By address: buffers of a pass lie side by side in one block, and one after the other in one place.
        read, written = ([part for x in given for part in self._parts(x)] for given in (reads, writes))
        self._trace.append(Ranges(what, stream, read, written))

    def _parts(self, x: Tensor) -> list[tuple[int, int]]:
        """Return where the memory between the first and the last element begins and ends."""
        extent = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
        first, end = x.data_ptr(), x.data_ptr() + extent * x.element_size() * (x.numel() > 0)
        if self._kept is None:
            return [(first, end)]
        begins = [(block._storage.data_ptr(), block.nbytes) for block in self._kept]
        return [(max(first, begin), min(end, begin + size)) for begin, size in begins]

    def record(self, stream: int) -> int:
        """Make an event."""
        self._events += 1
        self._trace.append(Event(self._events, stream, False))
        return self._events

    def wait(self, event: int, stream: int, inside: bool = False) -> None:
        """Make a stream wait; `inside` another's work, so that it is not one of the pass's waits."""
        self._trace.append(Event(event, stream, True, -1 if inside else self.waits))
        self.waits += not inside

    def errors(self, left_out: int | None = None) -> list[SynchronizationError]:
        """The accesses that are not ordered, if one wait is forgotten.

        What runs on the CPU does not depend on a wait, so that one run is asked about all of them. Bytes that
        all accesses have in common are one piece of memory for the detector.
        """
        handler, names = EventHandler(), defaultdict[int, list[str]](list)
        accesses = [one for one in self._trace if isinstance(one, Ranges)]
        cuts = sorted({at for one in accesses for part in (*one.read, *one.written) for at in part})
        errors: list[SynchronizationError] = []
        # The detector keeps the stack of every access: most of the time, and nothing is read from it.
        with mock.patch("traceback.StackSummary.extract", return_value=traceback.StackSummary()):
            for one in self._trace:
                if isinstance(one, Ranges):
                    read, written = (_pieces(parts, cuts) for parts in (one.read, one.written))
                    arguments = (one.stream, read - written, written, set[int](), one.what, names)
                    errors += handler._handle_kernel_launch(*arguments)
                elif not one.is_wait:
                    handler._handle_event_record(one.event, one.stream)
                elif left_out is None or one.number != left_out:
                    handler._handle_event_wait(one.event, one.stream)
        return errors

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        arguments = Accesses()
        arguments.parse_inputs(function._schema, args, kwargs or {}, is_factory=False)
        arguments.parse_outputs(function._schema, result, is_factory=False)
        self.launch(str(function), self.stream, arguments.read, arguments.written)
        return result


def _pieces(parts: list[tuple[int, int]], cuts: list[int]) -> set[int]:
    """Return numbers of the pieces between cuts."""
    return {n for begin, end in parts for n in range(bisect_left(cuts, begin), bisect_left(cuts, end))}


class Accesses(ArgumentHandler):
    """Sort the tensors of an operator into read and written; torch's own looks at CUDA tensors only."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Tensor] = []
        self.written: list[Tensor] = []

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: Any = None, is_output: bool = False
    ) -> None:
        if isinstance(value, Tensor) and (is_write or not metadata_only):
            (self.written if is_write else self.read).append(value)


class Streams:
    """The streams of a pass, told to the detector."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def mark(self) -> int:
        return self._device.record(self._device.stream)

    def reached(self, mark: int) -> bool:
        return True

    @contextmanager
    def behind(self, mark: int) -> Iterator[None]:
        self._device.wait(mark, POSTING)
        self._device.stream, before = POSTING, self._device.stream
        yield
        self._device.stream = before


class Nccl:
    """An exchange whose messages are accesses on a stream of their own."""

    def __init__(self, device: Device) -> None:
        self.device, self.counters = device, Counters()

    def streams(self, tensor: Tensor) -> Streams:
        return Streams(self.device)

    def route(self, *sides: Sequence[Message]) -> None:
        for side in sides:
            check_messages(side)

    def start(self, route: None, sent: Sequence[Tensor], received: Sequence[Tensor], hop: int) -> Work:
        device = self.device
        # Inside NCCL's work: not one of the pass's waits, so it is never left out.
        device.wait(device.record(device.stream), NCCL, inside=True)
        device.launch("messages", NCCL, sent, received)
        return Work(device, device.record(NCCL))


class Work:
    """A batch in flight; a second wait does nothing, as `Pending`'s."""

    def __init__(self, device: Device, event: int) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        if self._event >= 0:
            self._device.wait(self._event, self._device.stream)
        self._event = -1


class Touch:
    """A kernel that reads all that is given to it, and computes next to nothing."""

    name = "touch"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        if len(tiles):
            total = q + k.sum() + v.sum()
            yield PartialOut(slice(None), Rows(0, 1, q.shape[2]), total, total.sum(-1))

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        if len(tiles):
            rows, keys = Rows(0, 1, q.shape[2]), Rows(0, 1, k.shape[2])
            total = q + grad_out + out + lse.unsqueeze(-1)
            yield PartialGrads(slice(None), rows, keys, total, k + total.sum(), v + total.sum())

    def select_heads(self, heads: slice) -> Kernel:
        return self

    def count_executed_pairs(self, tiles: Tiles, backward: bool = False) -> int:
        return 0


class OfFewParts(Touch):
    """Its parts wait, and what it returns for keys is sent as it is."""

    few_parts = True


def run(
    rank_plan: Any,
    slots: int,
    behind_mark: bool,
    first: bool = True,
    kernel: Kernel | None = None,
) -> Device:
    """One pass forward and one back on a rank; then the caller writes to all of its tensors.

    They are the first ones of their shape, or the second ones, whose buffers are there already.
    """
    dtype = torch.float32 if kernel is None else torch.bfloat16
    q, k, v, grad = (torch.zeros(1, heads, slots, 8, dtype=dtype) for heads in (4, 2, 2, 4))
    with Device() as device:
        agreed = (lambda: None) if behind_mark else None
        # Two head chunks.
        nccl = Nccl(device)
        made = RingPass(
            rank_plan, kernel or Touch(), nccl, 1.0, chunk_bytes=1 << 12, finish_header_check=agreed
        )
        if not first:
            nccl.device = Device()  # not looked at
            out, lse = made.forward(q, k, v)
            made.backward(grad, q, k, v, out, lse)
            nccl.device = device
        device.launch("caller", MAIN, [], [q, k, v])
        out, lse = made.forward(q, k, v)
        device.launch("caller", MAIN, [], [q, *kept(made)])
        # A pass back waits for nothing of the pass forward: that one's waits are counted apart.
        dq, dk, dv = made.backward(grad, q, k, v, out, lse)
        device.launch("caller", MAIN, [], [q, k, v, grad, out, lse, dq, dk, dv, *kept(made)])
    return device


def kept(made: RingPass) -> list[Tensor]:
    """All memory that the pool keeps."""
    blocks = [block for free in made.buffers._free.values() for block in free]
    return [torch.empty(0, dtype=torch.uint8).set_(block._storage) for block in blocks]


def test_calls_on_two_streams_of_one_thread_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """(The second call wrote to buffers that the first one's kernels were still reading.)"""
    blocks: list[Block] = []

    class Noted(Block):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            blocks.append(self)  # alive, so that its address means one block

    monkeypatch.setattr(pool, "Block", Noted)
    plan, slots = rank_of("causal", "zigzag", 4, 1)
    tensors = {
        stream: [torch.zeros(1, heads, slots, 8) for heads in (4, 2, 2, 4)] for stream in (MAIN, OTHER)
    }
    with Device(kept=blocks) as device:
        monkeypatch.setattr(buffers, "get_stream_number", lambda _: device.stream, raising=False)
        made = RingPass(plan, Touch(), Nccl(device), 1.0, chunk_bytes=1 << 12)
        for stream in (MAIN, MAIN, OTHER, MAIN):
            device.stream = stream
            q, k, v, grad = tensors[stream]
            out, lse = made.forward(q, k, v)
            made.backward(grad, q, k, v, out, lse)
    errors = device.errors()
    assert blocks and not errors, str(errors[0])


@pytest.mark.parametrize("refused", [False, True])
def test_headers_are_compared_while_the_first_hop_computes_and_before_a_payload(refused: bool) -> None:
    plan, slots = rank_of("causal", "zigzag", 4, 1)
    told: list[str] = []

    class Told(Touch):
        def forward(self, *args: Any) -> Iterator[PartialOut]:
            told.append("hop")
            yield from super().forward(*args)

    class Posted(Nccl):
        def start(self, *args: Any) -> Work:
            told.append("payload")
            return super().start(*args)

    def agreed() -> None:
        told.append("headers")
        if refused:
            raise RingMismatchError("other arguments")

    q, k, v = (torch.zeros(1, heads, slots, 8) for heads in (4, 2, 2))
    made = RingPass(plan, Told(), Posted(Device()), 1.0, finish_header_check=agreed)
    with pytest.raises(RingMismatchError) if refused else nullcontext():
        made.forward(q, k, v)
    assert told[:3] == ["hop", "headers", "payload"][: len(told)] and told.count("headers") == 1
    assert ("payload" in told) is not refused


def rank_of(
    name: str, layout_name: str, ring_size: int, rank: int, most: int | None = None
) -> tuple[Any, int]:
    pattern = PATTERNS[name](TOKENS)
    layout = layout_for(layout_name, pattern, tokens=TOKENS, ring_size=ring_size)
    plan = build_plan(pattern, layout, query_heads=4, kv_heads=2, stage_shards=most)
    return plan.rank(rank), layout.local_tokens


@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("name", ["causal", "full", "window both ways", "dilated", "documents, causal"])
@pytest.mark.day("causal-zigzag")
def test_every_access_is_ordered(name: str, layout_name: str) -> None:
    """All ring sizes from 2 to 8; windows and documents travel in both directions."""
    waits = 0
    for ring_size in range(2, 9):
        plan, slots = rank_of(name, layout_name, ring_size, ring_size // 2)
        for behind_mark in (True, False)[: 1 + (ring_size == 3)]:
            for first in (True, False) if ring_size in (3, 8) else (False,):
                device = run(plan, slots, behind_mark, first=first)
                waits += device.waits
                errors = device.errors()
                assert not errors, (ring_size, first, str(errors[0]))
    assert waits > 20


@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", ["causal", "full", "documents, causal"])
@pytest.mark.day("causal-zigzag")
def test_every_access_in_stages_is_ordered(name: str, layout_name: str) -> None:
    """Where what returns waits in buffers that were given back, and gradients lie in the kernel's memory."""
    for ring_size in (2, 3, 5, 8):
        plan, slots = rank_of(name, layout_name, ring_size, ring_size // 2, 3)
        for kernel in (None, OfFewParts()):
            device = run(plan, slots, ring_size == 3, first=ring_size < 5, kernel=kernel)
            errors = device.errors()
            assert device.waits and not errors, (ring_size, kernel, str(errors[0]))
        if ring_size == 5 and name == "causal":
            missed = [wait for wait in range(device.waits) if not device.errors(left_out=wait)]
            assert device.waits >= 3 and not missed, (missed, device.waits)


@pytest.mark.parametrize(
    ("name", "layout_name"), [("causal", "zigzag"), ("window both ways", "contiguous"), ("full", "striped")]
)
@pytest.mark.day("causal-zigzag")
def test_leaving_out_any_single_wait_is_found(name: str, layout_name: str) -> None:
    for ring_size in (2, 3, 5):
        plan, slots = rank_of(name, layout_name, ring_size, ring_size // 2)
        device = run(plan, slots, True, first=False)
        missed = [wait for wait in range(device.waits) if not device.errors(left_out=wait)]
        assert device.waits > 3 and not missed, (ring_size, missed, device.waits)

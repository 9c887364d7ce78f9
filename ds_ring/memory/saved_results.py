"""Keep (out, lse) of passes in a checkpointed region, so that no key travels when the region is run again.

Activation checkpointing runs a region's forward pass again in the backward pass. What attention's gradient
needs of the ring is (out, lse), as large as the region's input: kept, a model of 8 layers has 8 forward
passes in a step and not 16. Of long sequences only the later rows may be kept, which cost most under a
causal pattern, and the others are computed again (BurstEngine, Sun et al. 2025, sequence-level selective
checkpointing). Owns finding the region that a call belongs to, and what is kept for it.

[Note: why not a selective policy]
All ranks decide alike, since they run the same code. torch's policy for selective checkpointing would do the
same for one of the three kinds of checkpointing, and would put a dispatch mode around every operation.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ds_ring.ring.buffers import some_heads
from ds_ring.ring.trace import is_fake
from ds_ring.schedule.steps import HeadChunk

# Keep tensors in the host's memory, and bring them back before they are asked for.
#
# Owns copies to pinned memory and back, on streams of their own beside the computation. Tensors are asked for
# in the reverse order of their keeping, as a backward pass does: whoever asks for one starts the copies of
# those that were kept just before it. On the CPU, where the host's memory is the device's, a copy is one, and
# nothing is gained. The CUDA path has not run on a GPU here.
#
# torch's `save_on_cpu` copies on the stream of the computation, which waits for it.

LAYER_TENSORS = 3  # of a checkpointed layer: its input, and attention's out and lse


@dataclass(eq=False)
class Ticket:
    """Stand for the tensor that was kept as number `number`.

    Attributes:
        host: the copy, whole after the event `copied` (None on the CPU).
        device: where the tensor was.
        back: the copy on the device, once it was started; whole after the event `ready`.
    """

    number: int
    host: Tensor
    device: torch.device
    copied: Any = None
    back: Tensor | None = None
    ready: Any = None


class HostMemory:
    """Keep tensors for a while: `put` returns a ticket, `get` the tensor.

    Whoever could keep something asks whether it is `enabled`. `ahead` tensors are brought back before they
    are asked for: those of one layer.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.ahead = LAYER_TENSORS
        self._tickets: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()
        self._count = 0
        self._streams: dict[torch.device, tuple[Any, Any]] = {}  # out, back

    @property
    def held_bytes(self) -> int:
        """Return the bytes of all tensors that are kept."""
        return sum(one.host.nbytes for one in list(self._tickets.values()))

    def put(self, tensor: Tensor) -> Ticket:
        """Copy a tensor to the host; it may be freed at once, and must not be written to before `get`."""
        host, copied = self.start_out(tensor)
        ticket = Ticket(self._count, host, tensor.device, copied)
        self._tickets[self._count] = ticket
        self._count += 1
        return ticket

    def get(self, ticket: Ticket) -> Tensor:
        """Return the tensor on its device; start to bring back those that were kept before it."""
        if ticket.device.type == "cpu":
            return ticket.host
        for number in range(ticket.number, ticket.number - 1 - self.ahead, -1):
            one = self._tickets.get(number)
            if one is not None and one.device == ticket.device and one.back is None:
                one.back, one.ready = self.start_back(one.host, one.device)
        torch.accelerator.current_stream(ticket.device).wait_event(ticket.ready)
        tensor, ticket.back, ticket.ready = ticket.back, None, None
        assert tensor is not None
        return tensor

    def start_out(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Start the copy of a tensor to the host; return it and the event after which it is whole.

        The tensor may be freed at once. The copy is contiguous, on the CPU it is made at once (event None).
        """
        tensor = tensor.detach()
        on_cpu = tensor.device.type == "cpu"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not on_cpu)
        if on_cpu:
            return host.copy_(tensor), None
        stream, _ = self._streams_of(tensor.device)
        stream.wait_stream(torch.accelerator.current_stream(tensor.device))
        with stream:
            _copy(host, tensor)
            copied = stream.record_event()
        tensor.record_stream(stream)  # its memory is not used again before the copy is done
        return host, copied

    def start_back(self, host: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Start the copy of `start_out`'s result, or of a part of it, to a device; return it and its event.

        It follows every copy to the host that was started before. On the CPU it is the tensor itself.
        """
        if device.type == "cpu":
            return host, None
        out, stream = self._streams_of(device)
        # Allocated for the stream of the computation, so that its memory goes back there without waiting.
        back = torch.empty(host.shape, dtype=host.dtype, device=device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        stream.wait_stream(out)
        with stream:
            _copy(back, host)
            ready = stream.record_event()
        back.record_stream(stream)
        return back, ready

    def _streams_of(self, device: torch.device) -> tuple[Any, Any]:
        if device not in self._streams:
            self._streams[device] = (torch.Stream(device), torch.Stream(device))
        return self._streams[device]


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy without waiting; a tensor that is not contiguous by head, each of which is one piece or small."""
    if target.dim() < 3 or (source.is_contiguous() and target.is_contiguous()):
        target.copy_(source, non_blocking=True)
        return
    for target_of_sample, source_of_sample in zip(target.unbind(0), source.unbind(0), strict=True):
        for to, of in zip(target_of_sample.unbind(0), source_of_sample.unbind(0), strict=True):
            to.copy_(of, non_blocking=True)


Results = tuple[Tensor, Tensor]
_ATTRIBUTE = "_ds_ring_kept"
_HOOKS = {  # torch.utils.checkpoint: what a region packs its tensors with, and the name of its frame there
    "_checkpoint_hook.__init__.<locals>.pack_hook": "frame",
    "_recomputation_hook.__init__.<locals>.pack_hook": "target_frame_ref",
}


@dataclass(frozen=True)
class SavedRows:
    """Say which local slots' (out, lse) are kept, int64 [rows], and how to compute those of the others."""

    slots: Tensor
    run_others: Callable[[], Results]

    def of(self, results: Results) -> Results:
        """Return a copy of the rows to be kept."""
        return tuple(x.index_select(2, self.slots) for x in results)  # type: ignore[return-value]

    def completed(self, kept: Results) -> Results:
        """Return all rows, of which `kept` are those of `slots`."""
        results = self.run_others()
        for whole, part in zip(results, kept, strict=True):
            whole.index_copy_(2, self.slots, part)
        return results


@dataclass
class SavedResults:
    """Hold the results of a region's calls, in their order.

    Attributes:
        results: of each call: which it was, and what returns out and lse (None if a model wrote to them).
        reader: number of the backward pass that took some; another one runs all passes again.
    """

    results: deque[tuple[object, Callable[[], Results | None]]] = field(default_factory=deque)
    reader: int | None = None

    def take(self, call: object) -> Results | None:
        """Return the results of the next call; None if they are not there as they were."""
        task = torch._C._current_graph_task_id()
        if self.reader not in (None, task):
            self.results.clear()
        self.reader = task
        if not self.results:
            return None
        same, results = self.results.popleft()
        return results() if same == call else None


def reuse_or_run(
    call: object,
    run: Callable[[], Results],
    memory: HostMemory | None = None,
    rows: SavedRows | None = None,
) -> Results:
    """Return what a pass gives: kept results where its region is run again, else those of `run`.

    Args:
        call: equal for equal calls. Every rank decides alike, since all run the same region.
        memory: where results are kept; None leaves them where they are.
        rows: which rows to keep; None for all.
    """
    region, again = _region()
    if region is None:
        return run()
    kept = getattr(region, _ATTRIBUTE, None)
    if again:
        found = kept.take(call) if kept is not None else None
        if found is None:
            return run()
        return found if rows is None else rows.completed(found)
    if kept is None:
        kept = SavedResults()
        setattr(region, _ATTRIBUTE, kept)
    results = run()
    to_keep = results if rows is None else rows.of(results)
    if memory is not None:
        tickets = [memory.put(x) for x in to_keep]
        kept.results.append((call, lambda: (memory.get(tickets[0]), memory.get(tickets[1]))))
    else:  # as they are, as long as nobody writes to them
        versions = _versions(to_keep)
        kept.results.append((call, lambda: to_keep if _versions(to_keep) == versions else None))
    return results


# [Note: regions]
# One object stands for a region in both of its runs, and lives as long as the graph. Reentrant checkpointing
# (torch's, DeepSpeed's, Megatron's) is an autograd Function that notes `run_function` on its ctx: `forward`
# and `backward`, which call it, have the same ctx and are on the stack. What is not reentrant has a frame
# object, known to the hook by which tensors are saved meanwhile. Where neither is found the pass runs again.
def _region() -> tuple[Any, bool]:
    """Return the innermost region that is running and whether it is run again; (None, False) outside."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals["ctx"]
            if hasattr(ctx, "run_function"):
                return ctx, code.co_name == "backward"
        frame = frame.f_back
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack: Any = inspect.unwrap(hooks[0]) if hooks is not None else None
    name = _HOOKS.get(getattr(pack, "__qualname__", ""))
    if name is None:
        return None, False
    found = dict(zip(pack.__code__.co_freevars, pack.__closure__, strict=True))[name].cell_contents
    return (found, False) if name == "frame" else (found(), True)


def _versions(results: Results) -> tuple[int, ...]:
    return tuple(0 if x.is_inference() else x._version for x in results)


# Keep attention's tensors on the host between its two passes, and bring back the heads that are computed.
#
# What autograd saves of a pass (q, k, v, out, lse) is as large as the gradients that the backward pass makes
# beside it. On the host it leaves room for half as many tokens again, and since the backward pass takes a few
# heads at a time, those of the next chunk come while one is computed (fully pipelined offloading: Yao et al.
# 2024, "Training Ultra Long Context Language Model with Fully Pipelined Distributed Transformer", section 4).
# Owns what is saved instead of the tensors, and when heads come back. The CUDA path has not run on a GPU
# here.
#
# [Note: attention on the host]
# The operator saves CPU tensors in place of its own, so the hooks of checkpointing see ordinary saved
# tensors. The first run of a checkpointed region, whose saved tensors nobody reads, copies nothing. On the
# device remain the gradients, the residual stream and about three head chunks.

log = logging.getLogger(__name__)

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def saved_on_host(saved: Saved, memory: HostMemory) -> Saved:
    """Return what stands on the host for q, k, v, out and lse of a pass, whose copies are started.

    In the first run of a checkpointed region nothing is copied: what is saved there is made again.
    """
    if is_fake(saved[0]):
        _say_that_graphs_keep_tensors()
        return saved
    region, again = _region()
    if region is not None and not again:  # the first run, whose saved tensors are not used
        # Checkpointing compares shape, dtype and device with those of the second run.
        return tuple(torch.empty(x.shape, dtype=x.dtype) for x in saved)  # type: ignore[return-value]
    return tuple(memory.start_out(x)[0] for x in saved)  # type: ignore[return-value]


@cache
def _say_that_graphs_keep_tensors() -> None:
    log.warning(
        "long_sequence.offload_attention: a compiled graph keeps what it saves on the device; only attention"
        " outside of compiled graphs is kept on the host"
    )


class HeadStream:
    """Give the heads of one chunk after the other: views of what is here, copies of what is on the host.

    `saved` are q, k, v, out and lse, [B, H, S, ...] and [B, G, S, ...].
    """

    def __init__(
        self, saved: Saved, chunks: Sequence[HeadChunk], device: torch.device, memory: HostMemory | None
    ) -> None:
        self._saved, self._chunks, self._device = saved, chunks, device
        self._memory = memory if saved[0].device != device else None
        self._started: dict[int, list[tuple[Tensor, Any]]] = {}
        self._next = 0

    def of(self, chunk: HeadChunk) -> Saved:
        """Return q, k, v, out and lse of the next chunk's heads; start to bring those of the one after it."""
        if self._memory is None:
            return self._heads(chunk)
        number, self._next = self._next, self._next + 1
        for index in range(number, min(number + 2, len(self._chunks))):
            if index not in self._started:
                heads = self._heads(self._chunks[index])
                self._started[index] = [self._memory.start_back(x, self._device) for x in heads]
        here = self._started.pop(number)
        for _, ready in here:
            torch.accelerator.current_stream(self._device).wait_event(ready)
        return tuple(tensor for tensor, _ in here)  # type: ignore[return-value]

    def _heads(self, chunk: HeadChunk) -> Saved:
        q, k, v, out, lse = self._saved
        q, out, lse = some_heads(chunk.query_heads, q, out, lse)
        k, v = some_heads(chunk.kv_heads, k, v)
        return q, k, v, out, lse

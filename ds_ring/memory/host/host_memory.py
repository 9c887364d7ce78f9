"""Keep tensors in the host's memory, and prefetch them before they are read.

Owns copies to pinned memory and back, on streams of their own. Tensors are read in the reverse order of their
keeping, as a backward pass does: reading one starts the copies of those that were kept just before it. On the
CPU, where the host's memory is the device's, a copy is one, and nothing is gained. The CUDA path has not run
on a GPU here.

torch's `save_on_cpu` copies on the stream of the computation, which waits for it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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

    `ahead` tensors are prefetched: those of one layer.
    """

    def __init__(self) -> None:
        self.ahead = LAYER_TENSORS
        self._tickets: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()
        self._count = 0
        self._streams: dict[torch.device, tuple[Any, Any]] = {}  # out, back

    @property
    def held_bytes(self) -> int:
        """Return the bytes of all tensors that are kept."""
        return sum(ticket.host.nbytes for ticket in list(self._tickets.values()))

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
            following = self._tickets.get(number)
            if following is not None and following.device == ticket.device and following.back is None:
                following.back, following.ready = self.start_back(following.host, following.device)
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
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not on_cpu, device="cpu")
        if on_cpu:
            return host.copy_(tensor), None
        stream, _ = self._get_streams(tensor.device)
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
        out, stream = self._get_streams(device)
        # Allocated for the stream of the computation, so that its memory returns there without waiting.
        back = torch.empty(host.shape, dtype=host.dtype, device=device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        stream.wait_stream(out)
        with stream:
            _copy(back, host)
            ready = stream.record_event()
        back.record_stream(stream)
        return back, ready

    def _get_streams(self, device: torch.device) -> tuple[Any, Any]:
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

"""Keep attention's tensors on the host between its two passes, and bring back the heads that are computed.

What autograd saves of a pass (q, k, v, out, lse) is as large as the gradients that the backward pass
allocates. On the host it leaves room for half as many tokens again. The backward pass takes a few heads at a
time, so those of the next chunk are copied while one is computed (fully pipelined offloading: Yao et al.
2024, "Training Ultra Long Context Language Model with Fully Pipelined Distributed Transformer", section 4).
Owns the objects saved in place of the tensors, and the time at which heads return. The CUDA path has not run
on a GPU here.

[Note: attention on the host]
The operator saves CPU tensors in place of its own, so the hooks of checkpointing see ordinary saved tensors.
The first run of a checkpointed region, whose saved tensors are never read, copies nothing. On the device
remain the gradients, the residual stream and about three head chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_ring.comm.streams import is_fake
from ds_ring.memory.host.host_memory import HostMemory
from ds_ring.ops.passes import SavedTensors, running_region
from ds_ring.ring.buffers import Saved, select_chunk
from ds_ring.schedule.steps import HeadChunk

if TYPE_CHECKING:
    from ds_ring.ops.context import RingContext

log = logging.getLogger(__name__)


class OnHost(SavedTensors):
    """Save copies on the host, where the options ask for it (`Options.offload_on`)."""

    def save(self, context: RingContext, saved: Saved) -> Saved:
        """Return the tensors on the host that replace those of a pass."""
        q = saved[0]
        wanted = context.options.offload_on(q.device.type, q.shape[2])
        return saved_on_host(saved, context.mesh.owners[HostMemory]) if wanted else saved

    def load_heads(
        self, context: RingContext, saved: Saved, chunks: Sequence[HeadChunk], device: torch.device
    ) -> HeadStream:
        """Return what brings the heads of one chunk after the other."""
        return HeadStream(saved, chunks, device, context.mesh.owners[HostMemory])


def saved_on_host(saved: Saved, memory: HostMemory) -> Saved:
    """Start to copy q, k, v, out and lse of a pass to the host; return the tensors there.

    In the first run of a checkpointed region nothing is copied: its saved tensors are computed again.
    """
    if is_fake(saved[0]):
        _say_that_graphs_keep_tensors()
        return saved
    region, again = running_region()
    if region is not None and not again:  # the first run, whose saved tensors are not used
        # Checkpointing compares shape, dtype and device with those of the second run.
        return tuple(torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in saved)  # type: ignore[return-value]
    return tuple(memory.start_out(x)[0] for x in saved)  # type: ignore[return-value]


@cache
def _say_that_graphs_keep_tensors() -> None:
    log.warning(
        "long_sequence.offload_attention: a compiled graph keeps what it saves on the device; only attention"
        " outside of compiled graphs is kept on the host"
    )


class HeadStream:
    """Return the heads of one chunk after the other: views of tensors here, copies of those on the host.

    `saved` are q, k, v, out and lse, [B, H, S, ...] and [B, G, S, ...].
    """

    def __init__(
        self, saved: Saved, chunks: Sequence[HeadChunk], device: torch.device, memory: HostMemory | None
    ) -> None:
        self._saved, self._chunks, self._device = saved, chunks, device
        self._memory = memory if saved[0].device != device else None
        self._started: dict[int, list[tuple[Tensor, Any]]] = {}
        self._next = 0

    def load(self, chunk: HeadChunk) -> Saved:
        """Return q, k, v, out and lse of the next chunk's heads; start to bring those of the one after it."""
        if self._memory is None:
            return select_chunk(self._saved, chunk)
        number, self._next = self._next, self._next + 1
        for index in range(number, min(number + 2, len(self._chunks))):
            if index not in self._started:
                heads = select_chunk(self._saved, self._chunks[index])
                self._started[index] = [self._memory.start_back(x, self._device) for x in heads]
        here = self._started.pop(number)
        for _, ready in here:
            torch.accelerator.current_stream(self._device).wait_event(ready)
        return tuple(tensor for tensor, _ in here)  # type: ignore[return-value]

"""Let somebody observe a ring pass, batch by batch, without a line for each use in the pass.

The pass calls `Observer.on_batch` if its mesh has an observer. `ds_ring.measure.Trace` is one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ds_ring.comm.messages import PostedBatch


class BatchEvent(NamedTuple):
    """Describe a moment of a ring pass: a stage of a batch begins, and the one before it ends.

    Attributes:
        stage: "begin" (of the pass), "send" (take what arrived, pack and post the next batch), "compute"
            (attend in every head chunk), "wait" (for the batch), or "end" (of the pass).
        phase: "forward" or "backward".
        hop: of the head chunk that set out last. "send" and "wait" have the hop of the messages, one more
            than the hop that is computed meanwhile.
        buffers_bytes: memory of messages now: in flight, held, or kept for the next ones.
        accumulators_bytes: float32 accumulators of low-precision results now.
        posted: the messages of the batch, from "compute" on.
    """

    stage: str
    phase: str
    hop: int
    buffers_bytes: int
    accumulators_bytes: int
    posted: PostedBatch


class Observer(Protocol):
    """Observe ring passes."""

    def on_batch(self, event: BatchEvent) -> None:
        """Take note of an event; the pass waits for the return."""
        ...


class Observers(list[Observer]):
    """Hold the observers of a mesh, innermost last; a pass calls the last one, in autograd's thread, too."""

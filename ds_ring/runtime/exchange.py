"""The exchange: the only file that moves tensors between ranks.

Owns point-to-point messages of a hop, the header that is agreed on before the first payload of a call, the
all-gather yardstick and the Ulysses all-to-all, deadlines on all of them, and the count of what was sent.
Knows nothing of attention.

[Note: rules of the exchange]
Bare point-to-point hangs, corrupts and aborts in known ways (project DESIGN, section 7). The rules here:
one batch per hop that holds every send and receive (blocking send-then-receive deadlocks at one element);
only contiguous buffers; headers compared before the first payload, since a message of another size or
dtype is otherwise received as silent garbage; buffers in flight are never written; every Work is kept
and waited for, with a deadline. Messages between two ranks are matched by order alone (NCCL ignores
tags), so both sides list a batch in the same order; with two ranks, previous and next are the same.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_ring.errors import RingPeerError
from ds_ring.runtime.mesh import RingMesh

_ROUNDING_S = 0.01  # torch waits in whole milliseconds, rounded down: a wait may end before its deadline


class Message(NamedTuple):
    """A contiguous tensor and the ring rank it goes to or comes from."""

    tensor: Tensor
    peer: int


@dataclass
class Counters:
    """What left this rank through an exchange, payloads only."""

    bytes_sent: int = 0
    messages_sent: int = 0
    batches: int = 0


@dataclass
class Pending:
    """A batch in flight. Its buffers must not be written, nor its receive buffers read, before `wait`."""

    works: list[dist.Work]
    peers: list[int]
    hop: int | None
    ring_rank: int
    deadline: float
    buffers: list[Tensor] = field(default_factory=list)

    def wait(self) -> None:
        """Wait for every message of the batch.

        Raises:
            RingPeerError: a peer closed the connection or the deadline passed.
        """
        for work, peer in zip(self.works, self.peers, strict=True):
            _wait(work, self.deadline, self.ring_rank, self.hop, peer)
        self.works, self.peers, self.buffers = [], [], []


def _wait(work: dist.Work, deadline: float, ring_rank: int, hop: int | None, peer: int | None) -> None:
    left_s = max(deadline - time.monotonic(), 0.001)
    try:
        work.wait(datetime.timedelta(seconds=left_s))
    except RuntimeError as error:
        late = time.monotonic() >= deadline - _ROUNDING_S
        cause = "no answer before the deadline (hop_timeout_seconds)" if late else "the connection failed"
        raise RingPeerError(ring_rank, hop, peer, f"{cause}: {str(error).splitlines()[0]}") from error


class Exchange:
    """Messages of one ring.

    Args:
        mesh: who is who.
        hop_timeout_s: seconds that one hop (or one collective) may take.
    """

    def __init__(self, mesh: RingMesh, hop_timeout_s: float = 60.0) -> None:
        self.mesh = mesh
        self.hop_timeout_s = hop_timeout_s
        self.counters = Counters()
        self._warm = False

    def post(self, sends: Sequence[Message], receives: Sequence[Message], hop: int | None = None) -> Pending:
        """Start all messages of a hop at once; returns at once. Tensors must be contiguous."""
        mesh = self.mesh
        operations, peers = [], []
        for function, messages in ((dist.irecv, receives), (dist.isend, sends)):
            for tensor, peer in messages:
                assert tensor.is_contiguous(), f"exchange: a buffer with strides {tensor.stride()}"
                to = mesh.global_rank_of(peer)
                operations.append(dist.P2POp(function, tensor, to, group=mesh.ring_group))
                peers.append(peer % mesh.ring_size)
        deadline = time.monotonic() + self.hop_timeout_s
        works = self._start(operations, peers, hop) if operations else []
        self.counters.batches += bool(operations)
        self.counters.messages_sent += len(sends)
        self.counters.bytes_sent += sum(message.tensor.nbytes for message in sends)
        buffers = [message.tensor for message in (*sends, *receives)]
        if len(works) < len(peers):  # NCCL answers with one Work for the whole batch
            peers = peers[: len(works)]
        return Pending(works, peers, hop, mesh.ring_rank, deadline, buffers)

    def _start(self, operations: list[dist.P2POp], peers: list[int], hop: int | None) -> list[dist.Work]:
        try:
            return dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise RingPeerError(
                self.mesh.ring_rank, hop, peers[0], f"could not start: {str(error).splitlines()[0]}"
            ) from error

    def spread(self, header: Tensor) -> Tensor:
        """Let every rank of the sequence (ring x Ulysses) see the least and the greatest header.

        Dissemination (Hensgen, Finkel, Manber 1988): in round i a rank speaks to the one 2^i ahead and hears
        the one 2^i behind; least and greatest are idempotent, so ceil(log2 n) rounds do for any n.

        Args:
            header: int64 [n] on the CPU, compared lexicographically; the same n on all ranks.

        Returns:
            int64 [2, n]: least and greatest.
        """
        mesh = self.mesh
        known = torch.stack([header, header])
        reach = 1
        while reach < mesh.sequence_size:
            heard = torch.empty_like(known)
            self._swap_headers(known, heard, reach).wait()
            rows = [tuple(row) for row in (*known.tolist(), *heard.tolist())]
            known = torch.tensor([min(rows), max(rows)], dtype=torch.int64)
            reach *= 2
        return known

    def _swap_headers(self, known: Tensor, heard: Tensor, reach: int) -> Pending:
        """Send to the rank `reach` ahead in the sequence, receive from the one as far behind."""
        mesh, group = self.mesh, self.mesh.cpu_group
        ahead, behind = ((mesh.sequence_rank + step) % mesh.sequence_size for step in (reach, -reach))
        operations = [
            dist.P2POp(dist.irecv, heard, mesh.global_rank_in_sequence(behind), group=group),
            dist.P2POp(dist.isend, known, mesh.global_rank_in_sequence(ahead), group=group),
        ]
        deadline = time.monotonic() + self.hop_timeout_s
        peers = [rank // mesh.ulysses_size for rank in (behind, ahead)]  # errors name ring ranks
        works = self._start(operations, peers, None)
        return Pending(works, peers, None, mesh.ring_rank, deadline, [known, heard])

    def all_gather(self, tensor: Tensor, group: ProcessGroup | None, size: int) -> list[Tensor]:
        """Every rank's (equally shaped, contiguous) tensor, in group order."""
        if group is None:
            return [tensor]
        parts = list(torch.empty((size, *tensor.shape), dtype=tensor.dtype, device=tensor.device))
        work = dist.all_gather(parts, tensor.contiguous(), group=group, async_op=True)
        self._finish(work, tensor.nbytes * (size - 1))
        return parts

    def all_to_all(self, parts: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
        """Part i of this rank goes to rank i of the group; all parts have one shape."""
        if group is None:
            return list(parts)
        sends = [part.contiguous() for part in parts]
        received = [torch.empty_like(part) for part in sends]
        work = dist.all_to_all(received, sends, group=group, async_op=True)
        self._finish(work, sum(part.nbytes for part in sends[1:]))
        return received

    def reduce_scatter(self, parts: Sequence[Tensor], group: ProcessGroup | None) -> Tensor:
        """The sum over ranks of their part for this rank, in group order (the same bits every time)."""
        received = self.all_to_all(parts, group)
        total = received[0]
        for part in received[1:]:
            total = total + part
        return total

    def _finish(self, work: dist.Work | None, sent_bytes: int) -> None:
        assert work is not None
        _wait(work, time.monotonic() + self.hop_timeout_s, self.mesh.ring_rank, None, None)
        self.counters.bytes_sent += sent_bytes

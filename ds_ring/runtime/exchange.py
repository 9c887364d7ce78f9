"""Move tensors between ranks: the exchange, the only file that does.

Owns point-to-point messages of a hop, the header that is agreed on before the first payload of a call, the
all-gather yardstick and the Ulysses all-to-all, deadlines on all of them, and the count of what was sent.
Knows nothing of attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_ring.errors import RingPeerError
from ds_ring.health.watch import keep_for_ever
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.messages import Counters, Message, check_messages
from ds_ring.runtime.pending import DeviceWatch, Pending
from ds_ring.runtime.streams import Streams, streams_of
from ds_ring.runtime.waiting import Place, blame, error_of

BATCH_TIMEOUT_S = 1800.0  # of what happens once a batch: a rank may be saving or evaluating meanwhile


class Peer(NamedTuple):
    """Hold a rank's numbers in the world and in a group."""

    world_rank: int
    group_rank: int


End: TypeAlias = tuple[Tensor, Peer]  # of a message: what is sent or received, and to or from whom


# [Note: rules of the exchange]
# Bare point-to-point hangs, corrupts and aborts in known ways. The rules here:
# one batch per hop that holds every send and receive (blocking send-then-receive deadlocks at one element);
# only contiguous buffers; headers compared before the first payload, since a message of another size or dtype
# is otherwise received as silent garbage; buffers in flight are never written; every Work is kept and waited
# for, with a deadline (on a GPU by the stream, and the deadline is a thread's: `pending.py`). Messages
# between two ranks are matched by order alone (NCCL ignores tags), so both sides list a batch in the same
# order; with two ranks, previous and next are the same.
class Exchange:
    """Send and receive the messages of one ring.

    Args:
        mesh: who is who.
        hop_timeout_s: seconds that one hop (or one collective) may take.
    """

    def __init__(self, mesh: RingMesh, hop_timeout_s: float = 60.0) -> None:
        self.mesh = mesh
        self.hop_timeout_s = hop_timeout_s
        self.counters = Counters()
        self.call = 0  # number of the call that this rank is in, for messages
        self._latest: Pending | None = None
        self._peers: dict[int, Peer] = {}
        self._ways: dict[tuple[ProcessGroup | None, torch.device], tuple[ProcessGroup, bool]] = {}
        self._device_watch = DeviceWatch(mesh)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], hop: int | None = None) -> Pending:
        """Start all messages of a hop at once; returns at once.

        Raises:
            RingMismatchError: a message is not what the plan says (this rank's own fault; nothing was sent).
        """
        # Both before anything is posted, so that a refusal leaves nothing in flight.
        check_messages(sends)
        check_messages(receives)
        batch = (self._ends(receives), self._ends(sends))
        self.counters.count(sends, receives)
        return self._start(*batch, hop, self.mesh.ring_group)

    def _ends(self, messages: Sequence[Message]) -> list[End]:
        return [(message.tensor, self._ranks_of(message.peer)) for message in messages]

    def _ranks_of(self, peer: int) -> Peer:
        """Return the world rank of a ring rank and its rank in the ring's group, looked up once."""
        if peer not in self._peers:
            world_rank = self.mesh.global_rank_of(peer)
            self._peers[peer] = Peer(world_rank, _rank_in(self.mesh.ring_group, world_rank))
        return self._peers[peer]

    def streams(self, tensor: Tensor) -> Streams:
        """Return how the streams of a tensor's device are ordered."""
        return streams_of(tensor)

    def _start(
        self, receives: list[End], sends: list[End], hop: int | None, group: ProcessGroup | None
    ) -> Pending:
        """Post all messages at once."""
        place = Place(self.call, hop)
        self._check_alive(hop)
        peers: list[tuple[int, ...]] = [(peer.world_rank,) for _, peer in (*receives, *sends)]
        received, sent = ([tensor for tensor, _ in ends] for ends in (receives, sends))
        try:
            way = self._way(group, (receives or sends)[0][0]) if peers else None
            works = [] if way is None else start_batch(receives, sends, *way)
        except RuntimeError as error:
            # Some messages of the batch may have been posted already.
            keep_for_ever(sent, received)
            cause = f"could not start {place}: {str(error).splitlines()[0]}"
            if self.mesh.watch is not None:
                self.mesh.watch.accuse(peers[0], cause)
            raise blame(self.mesh, hop, peers[0], cause) from error
        if len(works) < len(peers):  # NCCL answers with one Work for the whole batch
            peers = [tuple(sorted({peer for one in peers for peer in one}))]
        self._latest = self._pending(works, peers, place, group, sent, received)
        return self._latest

    def _way(self, group: ProcessGroup | None, tensor: Tensor) -> tuple[ProcessGroup, bool]:
        """Return a group, and whether its backend starts messages as one; looked up once."""
        key = (group, tensor.device)
        if key not in self._ways:
            real = group or dist.group.WORLD
            assert real is not None, "no process group"
            self._ways[key] = real, bool(real._get_backend(tensor.device).supports_coalescing)
        return self._ways[key]

    def _pending(
        self,
        works: list[dist.Work],
        peers: list[tuple[int, ...]],
        place: Place,
        group: ProcessGroup | None,
        sent: list[Tensor],
        received: list[Tensor],
    ) -> Pending:
        pending = Pending(works, peers, self.mesh, place, self.hop_timeout_s, sent, received, group)
        if (sent or received) and self._on_device(tensor := (sent or received)[0], group):
            streams = self.streams(tensor)
            pending.watch, pending.begun = self._device_watch, partial(streams.reached, streams.mark())
        return pending

    def _on_device(self, tensor: Tensor, group: ProcessGroup | None) -> bool:
        """Return whether a stream waits for works; never for gloo's, though it takes a GPU's tensors."""
        return tensor.is_cuda and dist.get_backend(group) != "gloo"

    def _check_alive(self, hop: int | None) -> None:
        """Refuse to go on after a fault: nothing works any more, and every call says why."""
        watch, broken = self.mesh.watch, self.mesh.use.broken
        if watch is not None and watch.fault is not None:
            raise error_of(self.mesh, hop, watch.fault)
        # One error object for all calls: each raise would lengthen its traceback.
        if broken is not None:
            raise broken.with_traceback(None)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Surround a pass: whatever else is raised here leaves the other ranks waiting, so they are told."""
        try:
            yield
        except RingPeerError:
            raise
        except BaseException as error:
            keep_for_ever(self._latest)  # what it posted last may still be under way
            if self.mesh.watch is not None:
                text = str(error).splitlines()[0][:300] if str(error) else ""
                self.mesh.watch.failed(f"{type(error).__name__} in call {self.call}: {text}")
            if self._latest is not None:
                self._latest.hand_over()
            raise

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
            # As tuples, which Python compares lexicographically, so each result is one rank's header.
            rows = [tuple(row) for row in (*known.tolist(), *heard.tolist())]
            known = torch.tensor([min(rows), max(rows)], dtype=torch.int64)
            reach *= 2
        return known

    def _swap_headers(self, known: Tensor, heard: Tensor, reach: int) -> Pending:
        """Send to the rank `reach` ahead in the sequence, receive from the one as far behind."""
        # Headers are CPU tensors: NCCL could not send them.
        mesh, group = self.mesh, self.mesh.cpu_group
        ahead, behind = (
            mesh.global_rank_in_sequence((mesh.sequence_rank + step) % mesh.sequence_size)
            for step in (reach, -reach)
        )
        both = ((heard, behind), (known, ahead))
        receives, sends = ([(tensor, Peer(rank, _rank_in(group, rank)))] for tensor, rank in both)
        return self._start(receives, sends, None, group)

    def all_gather(self, tensor: Tensor, group: ProcessGroup | None, size: int) -> list[Tensor]:
        """Return every rank's (equally shaped, contiguous) tensor, in group order."""
        if group is None:
            return [tensor]
        # One allocation; its slices along dim 0 are contiguous.
        parts = list(torch.empty((size, *tensor.shape), dtype=tensor.dtype, device=tensor.device))
        self._check_alive(None)
        own = tensor.contiguous()
        self._finish(dist.all_gather(parts, own, group=group, async_op=True), group, [own], parts)
        self.counters.bytes_sent += tensor.nbytes * (size - 1)
        return parts

    def all_reduce(self, tensor: Tensor, group: ProcessGroup) -> None:
        """Sum over the ranks of a group, in place."""
        self._check_alive(None)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        self._finish(work, group, [], [tensor])

    def all_to_all(self, parts: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
        """Send part i of this rank to rank i of the group; all parts have one shape."""
        if group is None:
            return list(parts)
        sends = [part.contiguous() for part in parts]
        received = [torch.empty_like(part) for part in sends]
        self._check_alive(None)
        self._finish(dist.all_to_all(received, sends, group=group, async_op=True), group, sends, received)
        # One part stays here; all have one size, so any of them may be left out.
        self.counters.bytes_sent += sum(part.nbytes for part in sends[1:])
        return received

    def reduce_scatter(self, parts: Sequence[Tensor], group: ProcessGroup | None) -> Tensor:
        """Return the sum of all ranks' parts for this rank, in group order (the same bits every time)."""
        # Not dist.reduce_scatter: the order in which a backend adds is its own, and changes the last bits.
        received = self.all_to_all(parts, group)
        total = received[0]
        for part in received[1:]:
            total = total + part
        return total

    def _finish(
        self, work: dist.Work | None, group: ProcessGroup, sent: list[Tensor], got: list[Tensor]
    ) -> None:
        """Wait for a collective; torch's own collectives on its own groups."""
        assert work is not None
        peers = [tuple(rank for rank in dist.get_process_group_ranks(group) if rank != self.mesh.global_rank)]
        self._pending([work], peers, Place(self.call, None), group, sent, got).wait()


def _rank_in(group: ProcessGroup | None, world_rank: int) -> int:
    return world_rank if group is None else dist.get_group_rank(group, world_rank)


def start_batch(
    receives: Sequence[End], sends: Sequence[End], group: ProcessGroup, together: bool
) -> list[dist.Work]:
    """Start all messages at once, receives first; return one Work each, or one for all of them.

    Does what `torch.distributed.batch_isend_irecv` does, by the same calls of the group: that function looks
    groups and ranks up again for each message, which takes longer than all else that a hop does here.

    Args:
        receives, sends: tensors, with ranks in the group.
        group: what they travel through.
        together: the group's backend can start them as one (NCCL).
    """
    device = (receives or sends)[0][0].device
    if together:
        group._start_coalescing(device)
    works = [group.recv([tensor], peer.group_rank, 0) for tensor, peer in receives]
    works += [group.send([tensor], peer.group_rank, 0) for tensor, peer in sends]
    return [group._end_coalescing(device)] if together else works

"""Send and receive the tensors of attention. Only this file sends them; `ring/naive.py` is for readers.

Owns the point-to-point messages of a hop and of headers, the collectives (all-gather, the all-to-all of
Ulysses, sums), and the count of bytes sent. `waiting.py` and `in_flight.py` own the waits with deadlines.
Knows nothing of attention. `collective.py` decides when ranks compare their headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_ring.comm.in_flight import Pending
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import BatchSizes, Counters, Message, check_messages, compute_batch_sizes
from ds_ring.comm.streams import Streams, get_streams
from ds_ring.comm.waiting import CallSite, blame, check_alive, first_line
from ds_ring.compat.torch import start_all_to_all
from ds_ring.errors import RingError, RingPeerError
from ds_ring.health.stuck_waits import keep_for_ever
from ds_ring.plugin import DEVICES, load

if TYPE_CHECKING:
    from ds_ring.comm.protocols import Collectives, Watchdog

NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
# What every backend sends; a tensor of another dtype travels as bytes.
SENT_DTYPES = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8,
    torch.uint8,
})  # fmt: skip
NOT_COUNTED = BatchSizes(False, 0, 0)  # for headers, which do not count as payload


class Route(NamedTuple):
    """What `Exchange.start` needs besides tensors, made once for equal batches: [Note: routes], protocols.py.

    Attributes:
        receives, sends: the group rank of the peer of each message, in order.
        peers: for each message a tuple with the world rank of its peer.
        all_peers: one tuple with all peers, used if one Work covers the whole batch (NCCL).
        sizes: the numbers that a batch adds to `Exchange.counters`.
        group: the process group that carries the messages; None for the world.
        streams: CUDA streams that wait for the messages; None if the host waits for them.
    """

    receives: tuple[int, ...]
    sends: tuple[int, ...]
    peers: list[tuple[int, ...]]
    all_peers: list[tuple[int, ...]]
    sizes: BatchSizes
    group: ProcessGroup | None
    streams: Streams | None


# [Note: rules of the exchange]
# Point-to-point messages can hang, corrupt data or abort a process. These rules prevent that:
# - A rank posts all sends and receives of a batch in one call. (If all ranks wait for a send before they
#   post a receive, they deadlock even with messages of one element.)
# - Only contiguous tensors are sent.
# - Ranks compare headers before they post the first payload. Otherwise a rank may receive a message of
#   another size or dtype, and read wrong numbers without an error.
# - No code writes to a tensor that is in flight.
# - A rank keeps every Work (torch's handle of a message) and waits for it, with a deadline. The host waits
#   (`waiting.py`). On a GPU the stream waits, and a thread enforces the deadline (`cuda/watchdog.py`).
# - Sender and receiver list the messages of a batch in the same order. Messages between two ranks are matched
#   by order alone, because NCCL ignores tags.
class Exchange:
    """Send and receive the messages of one ring.

    Args:
        mesh: the ranks and process groups.
        hop_timeout_s: seconds that one hop (or one collective) may take.
        operation: name of a collective, and the JSON key of its time limit; None for a pass.
    """

    def __init__(
        self, mesh: RingMesh, hop_timeout_s: float = 60.0, operation: tuple[str, str] | None = None
    ) -> None:
        self.mesh = mesh
        self.hop_timeout_s, self._operation = hop_timeout_s, operation
        self.counters = Counters()
        self.call = 0  # number of the current call, for error messages
        self._latest: Pending | None = None
        self._header_routes: list[Route] | None = None

    @cached_property
    def _work_watchdog(self) -> Watchdog | None:
        # Only messages between GPUs need a watchdog: with gloo the host waits.
        watchdog: Watchdog | None = None
        if "cuda" in DEVICES:
            watchdog = load(DEVICES["cuda"].watchdog).for_mesh(self.mesh)
        return watchdog

    @property
    def deadline_s(self) -> float:
        """Return the seconds that a wait may take now; see [Note: compile skew] in `cuda/patience.py`."""
        return max(self.hop_timeout_s, self.mesh.state.patience_s)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], hop: int | None = None) -> Pending:
        """Start all messages of a hop, without waiting for them.

        Raises:
            RingMismatchError: see `route`.
        """
        sent, received = ([message.tensor for message in side] for side in (sends, receives))
        return self.start(self.route(sends, receives), sent, received, hop)

    def post_in_sequence(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Pending:
        """Start messages between ranks of the sequence (ring x Ulysses): pairs of sequence rank and tensor.

        Raises:
            RingMismatchError: a tensor is not contiguous (a fault of this rank; nothing was sent).
        """
        sent, received = ([Message(tensor, peer) for peer, tensor in side] for side in (sends, receives))
        check_messages(sent)
        check_messages(received)
        of, to = ([self.mesh.global_rank_in_sequence(peer) for peer, _ in side] for side in (receives, sends))
        sizes = compute_batch_sizes(sent, received)
        route = self.world_route(of, to, (*receives, *sends)[0][1], self.mesh.sequence_group, sizes)
        return self.start(route, [x for _, x in sends], [x for _, x in receives])

    def route(self, sends: Sequence[Message], receives: Sequence[Message]) -> Route:
        """Check messages, and return their route. The caller keeps it for all batches with equal messages.

        Raises:
            RingMismatchError: a message differs from the plan (a fault of this rank; nothing was sent).
        """
        check_messages(sends)
        check_messages(receives)
        find_rank, sizes = self.mesh.global_rank_of, compute_batch_sizes(sends, receives)
        sources, targets = ([find_rank(message.peer) for message in side] for side in (receives, sends))
        tensor = (*receives, *sends)[0].tensor if receives or sends else NOTHING
        return self.world_route(sources, targets, tensor, self.mesh.ring_group, sizes)

    def world_route(
        self, receives: Sequence[int], sends: Sequence[int], like: Tensor, group: ProcessGroup | None,
        sizes: BatchSizes = NOT_COUNTED,
    ) -> Route:  # fmt: skip
        """Return the route of messages from and to these world ranks, of tensors on the device of `like`."""
        peers: list[tuple[int, ...]] = [(rank,) for rank in (*receives, *sends)]
        of, to = (
            tuple(rank if group is None else dist.get_group_rank(group, rank) for rank in side)
            for side in (receives, sends)
        )
        streams = self._get_waiting_streams(like, group)
        return Route(of, to, peers, [tuple(sorted({*receives, *sends}))], sizes, group, streams)

    def streams(self, tensor: Tensor) -> Streams:
        """Return the object that orders the streams of a tensor's device."""
        return get_streams(tensor)

    def start(
        self, route: Route, sent: Sequence[Tensor], received: Sequence[Tensor], hop: int | None = None
    ) -> Pending:
        """Post all messages of a batch, and return the object that waits for them."""
        mesh, counters, sizes = self.mesh, self.counters, route.sizes
        counters.batches += sizes.is_one
        counters.messages_sent += sizes.sends
        counters.bytes_sent += sizes.sent_bytes
        site = CallSite(self.call, hop, self._operation)
        if mesh.state.broken is not None or (mesh.detector is not None and mesh.detector.fault is not None):
            check_alive(mesh, hop)
        try:
            works = start_batch(route, sent, received)
        except RuntimeError as error:
            if isinstance(error, RingError):  # a fault of this rank; `collective` tells the other ranks
                raise
            # Some messages of the batch may be in flight, so the memory of their tensors is never freed.
            keep_for_ever(sent, received)
            peers, cause = route.peers, f"could not start {site}: {first_line(error)}"
            if mesh.detector is not None:
                mesh.detector.report_timeout(peers[0], cause)
            raise blame(mesh, hop, peers[0], cause) from error
        peers = route.peers if len(works) == len(route.peers) else route.all_peers
        watchdog = None if route.streams is None else self._work_watchdog
        deadline_s, streams = max(self.hop_timeout_s, mesh.state.patience_s), route.streams
        self._latest = Pending(
            works, peers, mesh, site, deadline_s, sent, received, route.group, watchdog, streams
        )
        return self._latest

    def _get_waiting_streams(self, tensor: Tensor, group: ProcessGroup | None) -> Streams | None:
        """Return the streams that wait for works; None with gloo, whose works the host waits for."""
        on_device = tensor.is_cuda and dist.get_backend(group) != "gloo"
        return self.streams(tensor) if on_device else None

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that a pass raised here, unless the error is about another rank."""
        if isinstance(error, RingPeerError):
            return
        keep_for_ever(self._latest)  # the last batch may still be in flight
        if self.mesh.detector is not None:
            text = str(error).splitlines()[0][:300] if str(error) else ""
            self.mesh.detector.report_failure(f"{type(error).__name__} in call {self.call}: {text}")
        if self._latest is not None:
            self._latest.hand_over()

    def spread(self, header: Tensor) -> Tensor:
        """Return the least and the greatest header of all ranks of the sequence (ring x Ulysses).

        Uses dissemination (Hensgen, Finkel, Manber 1988): in round i a rank sends to the rank 2^i ahead and
        receives from the rank 2^i behind. Minimum and maximum are idempotent, so ceil(log2 P) rounds suffice
        for any number P of ranks.

        Args:
            header: int64 [n] on the CPU, compared lexicographically; the same n on all ranks.

        Returns:
            int64 [2, n]: least and greatest.
        """
        if (collectives := self.mesh.collectives) is not None:
            return collectives.spread(self, header)
        if self._header_routes is None:
            mesh, self._header_routes = self.mesh, []
            for step in range((mesh.sequence_size - 1).bit_length()):
                rank, apart = mesh.sequence_rank, 1 << step
                ahead, behind = (
                    mesh.global_rank_in_sequence(target) for target in (rank + apart, rank - apart)
                )
                # Headers are CPU tensors: NCCL could not send them.
                self._header_routes.append(self.world_route([behind], [ahead], header, mesh.cpu_group))
        least = greatest = tuple(header.tolist())
        for route in self._header_routes:
            known = torch.tensor([least, greatest], dtype=torch.int64, device="cpu")
            heard = torch.empty_like(known)
            self.start(route, [known], [heard]).wait()
            # Python compares tuples lexicographically, so each result is the whole header of one rank.
            low, high = heard.tolist()
            least, greatest = min(least, tuple(low)), max(greatest, tuple(high))
        return torch.tensor([least, greatest], dtype=torch.int64, device="cpu")

    def all_gather(self, tensor: Tensor, group: ProcessGroup | None, size: int) -> list[Tensor]:
        """Return every rank's (equally shaped, contiguous) tensor, in group order."""
        if group is None:
            return [tensor]
        if (collectives := self._get_collectives(group)) is not None:
            return collectives.all_gather(self, tensor.contiguous(), group)
        sent = _view_as_sent(tensor.contiguous())
        # One allocation; slices along dim 0 are contiguous.
        parts = list(torch.empty((size, *sent.shape), dtype=sent.dtype, device=sent.device))
        check_alive(self.mesh, None)
        self._finish(dist.all_gather(parts, sent, group=group, async_op=True), group, [sent], parts)
        self.counters.bytes_sent += tensor.nbytes * (size - 1)
        return [_view_as_received(part, tensor) for part in parts]

    def all_reduce(self, tensor: Tensor, group: ProcessGroup) -> None:
        """Sum over the ranks of a group, in place."""
        check_alive(self.mesh, None)
        if (collectives := self._get_collectives(group)) is not None:
            tensor.copy_(torch.stack(collectives.all_gather(self, tensor.contiguous(), group)).sum(dim=0))
            return
        work = dist.all_reduce(tensor, group=group, async_op=True)
        self._finish(work, group, [], [tensor])

    def all_to_all(self, parts: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
        """Send part i of this rank to rank i of the group; all parts have one shape."""
        if group is None:
            return list(parts)
        if (collectives := self._get_collectives(group)) is not None:
            return collectives.all_to_all(self, parts, group)
        sends = [_view_as_sent(part.contiguous()) for part in parts]
        check_alive(self.mesh, None)
        work, received, sends = start_all_to_all(sends, group)
        self._finish(work, group, sends, received)
        # One part stays on this rank; all parts have one size, so leave out any one of them.
        self.counters.bytes_sent += sum(part.nbytes for part in parts[1:])
        return [_view_as_received(part, parts[0]) for part in received]

    def reduce_scatter(self, parts: Sequence[Tensor], group: ProcessGroup | None) -> Tensor:
        """Return the sum of all ranks' parts for this rank, in group order (the same bits every time)."""
        # Not dist.reduce_scatter: the backend chooses the order of its additions, which changes the last
        # bits.
        received = self.all_to_all(parts, group)
        total = received[0]
        for part in received[1:]:
            total = total + part
        return total

    def _get_collectives(self, group: ProcessGroup | None) -> Collectives | None:
        """Return the collectives of a ring that has no groups of its own; None: use those of torch."""
        return None if group is dist.group.WORLD else self.mesh.collectives

    def _finish(
        self, work: dist.Work | None, group: ProcessGroup, sent: list[Tensor], got: list[Tensor]
    ) -> None:
        """Wait for a collective of torch.distributed."""
        assert work is not None
        peers = [tuple(rank for rank in dist.get_process_group_ranks(group) if rank != self.mesh.global_rank)]
        streams, site = self._get_waiting_streams(got[0], group), CallSite(self.call, None, self._operation)
        watchdog = None if streams is None else self._work_watchdog
        Pending([work], peers, self.mesh, site, self.deadline_s, sent, got, group, watchdog, streams).wait()


def _view_as_sent(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor, or a view of its bytes [n] if a backend may lack its dtype."""
    return tensor if tensor.dtype in SENT_DTYPES else tensor.view(-1).view(torch.uint8)


def _view_as_received(part: Tensor, like: Tensor) -> Tensor:
    """Return what arrived of a tensor like `like`, which `_view_as_sent` may have turned into bytes."""
    return part if part.dtype == like.dtype else part.view(like.dtype).view(like.shape)


def make_batch_exchange(mesh: RingMesh, what: str) -> Exchange:
    """Return an exchange for a collective outside of a pass.

    Its deadline is the limit "step", because a peer may still load data.
    """
    limit = mesh.timeouts.limit("step")
    return Exchange(mesh, limit.seconds, (what, limit.key))


def start_batch(route: Route, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[dist.Work]:
    """Start all messages of a route, receives first; return one Work each, or one for the batch (NCCL)."""
    if not route.peers:
        return []
    sides = (dist.irecv, received, route.receives), (dist.isend, sent, route.sends)
    operations = []
    for act, tensors, ranks in sides:
        for tensor, rank in zip(tensors, ranks, strict=True):
            if tensor.dtype not in SENT_DTYPES:
                tensor = _view_as_sent(tensor)
            operations.append(dist.P2POp(act, tensor, group=route.group, group_peer=rank))
    return dist.batch_isend_irecv(operations)

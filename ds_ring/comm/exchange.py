"""Send and receive the tensors of attention. No other file does.

Owns the point-to-point messages of a hop, the header that ranks compare before the first payload of a call,
the all-gather (offered as a reference to measure the ring against), the Ulysses all-to-all, the deadlines on
all of these, and the count of bytes sent. Knows nothing of attention.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_ring.comm.in_flight import Pending
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import BatchSizes, Counters, Message, check_messages, sizes_of
from ds_ring.comm.streams import Streams, streams_of
from ds_ring.comm.waiting import CallSite, blame, check_alive, first_line
from ds_ring.comm.watchdog import WorkWatchdog
from ds_ring.errors import RingError, RingMismatchError, RingPeerError
from ds_ring.health.client import keep_for_ever

NOTHING = torch.empty(0)
NOT_COUNTED = BatchSizes(False, 0, 0)  # for headers, which do not count as payload


class Route(NamedTuple):
    """What `Exchange.start` needs besides the tensors; made once for equal batches. See [Note: routes].

    Attributes:
        receives, sends: the group rank of the peer of each message, in order.
        peers: for each message a tuple with the world rank of its peer.
        all_peers: one tuple with all peers, for the case that one Work covers the whole batch (NCCL).
        sizes: what a batch adds to the counters.
        group: the process group that carries the messages; None for the world.
        streams: the streams that wait for the works; None if the host waits.
        places: of transport "pull" (`signals.py`): offsets of the received messages in their senders' memory.
        begin: starts the messages instead of `start_batch`; as that one it returns one Work each, or fewer.
    """

    receives: tuple[int, ...]
    sends: tuple[int, ...]
    peers: list[tuple[int, ...]]
    all_peers: list[tuple[int, ...]]
    sizes: BatchSizes
    group: ProcessGroup | None
    streams: Streams | None
    places: tuple[int, ...] = ()
    begin: Callable[..., list[Any]] | None = None


# [Note: rules of the exchange]
# Bare point-to-point communication hangs, corrupts data and aborts in known ways. These rules prevent it:
# - One batch per hop holds every send and receive. (If all ranks block in a send before they receive, they
#   deadlock even with messages of one element.)
# - Only contiguous buffers are sent.
# - Headers are compared before the first payload is posted. Otherwise a message of another size or dtype is
#   received as silent garbage. (On a GPU, hop 0 may compute while headers are compared.)
# - Buffers in flight are never written.
# - Every Work is kept and waited for, with a deadline. On a GPU the stream waits and a thread holds the
#   deadline (`waiting.py`).
# - Both sides list the messages of a batch in the same order: messages between two ranks are matched by order
#   alone (NCCL ignores tags). In a ring of two ranks, previous and next are the same rank.
class Exchange:
    """Send and receive the messages of one ring.

    Args:
        mesh: the ranks and process groups.
        hop_timeout_s: seconds that one hop (or one collective) may take.
        outside: for what is no pass: what it is, and the key of the JSON that sets its time.
    """

    def __init__(
        self, mesh: RingMesh, hop_timeout_s: float = 60.0, outside: tuple[str, str] | None = None
    ) -> None:
        self.mesh = mesh
        self.hop_timeout_s, self._outside = hop_timeout_s, outside
        self.counters = Counters()
        self.call = 0  # number of the current call, for error messages
        self._latest: Pending | None = None
        self._header_routes: list[Route] | None = None
        self._work_watchdog = WorkWatchdog.of(mesh)

    @property
    def deadline_s(self) -> float:
        """Return the seconds that a wait may take now; see [Note: compile skew] in `ops/options.py`."""
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
        sizes = sizes_of(sent, received)
        route = self._route(of, to, (*receives, *sends)[0][1], self.mesh.sequence_group, sizes)
        return self.start(route, [x for _, x in sends], [x for _, x in receives])

    def route(self, sends: Sequence[Message], receives: Sequence[Message]) -> Route:
        """Return what all batches with these messages have in common; see [Note: routes].

        Raises:
            RingMismatchError: a message differs from the plan (a fault of this rank; nothing was sent).
        """
        # Check both before anything is posted, so that an error leaves no message in flight.
        check_messages(sends)
        check_messages(receives)
        of, to = ([self.mesh.global_rank_of(message.peer) for message in side] for side in (receives, sends))
        tensor = (*receives, *sends)[0].tensor if receives or sends else NOTHING
        return self._route(of, to, tensor, self.mesh.ring_group, sizes_of(sends, receives))

    def _route(
        self, receives: list[int], sends: list[int], like: Tensor, group: ProcessGroup | None,
        sizes: BatchSizes = NOT_COUNTED,
    ) -> Route:  # fmt: skip
        """Return the route of messages from and to ranks of the world, of tensors like this one."""
        peers: list[tuple[int, ...]] = [(rank,) for rank in (*receives, *sends)]
        of, to = (
            tuple(rank if group is None else dist.get_group_rank(group, rank) for rank in side)
            for side in (receives, sends)
        )
        streams = self._streams_that_wait(like, group)
        return Route(of, to, peers, [tuple(sorted({*receives, *sends}))], sizes, group, streams)

    def streams(self, tensor: Tensor) -> Streams:
        """Return the object that orders the streams of a tensor's device."""
        return streams_of(tensor)

    def start(
        self, route: Route, sent: Sequence[Tensor], received: Sequence[Tensor], hop: int | None = None
    ) -> Pending:
        """Start all messages of a batch."""
        mesh, counters, sizes = self.mesh, self.counters, route.sizes
        counters.batches += sizes.is_one
        counters.messages_sent += sizes.sends
        counters.bytes_sent += sizes.sent_bytes
        site = CallSite(self.call, hop, self._outside)
        if mesh.state.broken is not None or (mesh.detector is not None and mesh.detector.fault is not None):
            check_alive(mesh, hop)
        try:
            works = (route.begin or start_batch)(route, sent, received)
        except RuntimeError as error:
            if isinstance(error, RingError):  # a fault of this rank: the pass tells the others
                raise
            # Some messages of the batch may have been posted already, so their buffers must never be freed.
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

    def _streams_that_wait(self, tensor: Tensor, group: ProcessGroup | None) -> Streams | None:
        """Return the streams that wait for works; None with gloo, whose works the host waits for."""
        on_device = tensor.is_cuda and dist.get_backend(group) != "gloo"
        return self.streams(tensor) if on_device else None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run a pass; if it raises, tell the other ranks, which would otherwise wait for this one."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

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
        receives from the rank 2^i behind. Minimum and maximum are idempotent, so ceil(log2 n) rounds suffice
        for any n.

        Args:
            header: int64 [n] on the CPU, compared lexicographically; the same n on all ranks.

        Returns:
            int64 [2, n]: least and greatest.
        """
        if self._header_routes is None:
            mesh, self._header_routes = self.mesh, []
            for step in range((mesh.sequence_size - 1).bit_length()):
                rank, apart = mesh.sequence_rank, 1 << step
                ahead, behind = (mesh.global_rank_in_sequence(one) for one in (rank + apart, rank - apart))
                # Headers are CPU tensors: NCCL could not send them.
                self._header_routes.append(self._route([behind], [ahead], header, mesh.cpu_group))
        least = greatest = tuple(header.tolist())
        for route in self._header_routes:
            known = torch.tensor([least, greatest], dtype=torch.int64)
            heard = torch.empty_like(known)
            self.start(route, [known], [heard]).wait()
            # Python compares tuples lexicographically, so each result is the whole header of one rank.
            low, high = heard.tolist()
            least, greatest = min(least, tuple(low)), max(greatest, tuple(high))
        return torch.tensor([least, greatest], dtype=torch.int64)

    def all_gather(self, tensor: Tensor, group: ProcessGroup | None, size: int) -> list[Tensor]:
        """Return every rank's (equally shaped, contiguous) tensor, in group order."""
        if group is None:
            return [tensor]
        # One allocation; slices along dim 0 are contiguous.
        parts = list(torch.empty((size, *tensor.shape), dtype=tensor.dtype, device=tensor.device))
        check_alive(self.mesh, None)
        own = tensor.contiguous()
        self._finish(dist.all_gather(parts, own, group=group, async_op=True), group, [own], parts)
        self.counters.bytes_sent += tensor.nbytes * (size - 1)
        return parts

    def all_reduce(self, tensor: Tensor, group: ProcessGroup) -> None:
        """Sum over the ranks of a group, in place."""
        check_alive(self.mesh, None)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        self._finish(work, group, [], [tensor])

    def all_to_all(self, parts: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
        """Send part i of this rank to rank i of the group; all parts have one shape."""
        if group is None:
            return list(parts)
        sends = [part.contiguous() for part in parts]
        check_alive(self.mesh, None)
        if torch.__version__ < "2.12" and sends[0].device.type == "cpu":
            # gloo of torch 2.11 has no all-to-all of lists, and one of single tensors.
            sends = [torch.stack(sends)]
            whole = torch.empty_like(sends[0])
            received = list(whole)
            work = dist.all_to_all_single(whole, sends[0], group=group, async_op=True)
        else:
            received = [torch.empty_like(part) for part in sends]
            work = dist.all_to_all(received, sends, group=group, async_op=True)
        self._finish(work, group, sends, received)
        # One part stays on this rank; all parts have one size, so leave out any one of them.
        self.counters.bytes_sent += sum(part.nbytes for part in parts[1:])
        return received

    def reduce_scatter(self, parts: Sequence[Tensor], group: ProcessGroup | None) -> Tensor:
        """Return the sum of all ranks' parts for this rank, in group order (the same bits every time)."""
        # Not dist.reduce_scatter: the backend chooses the order of its additions, which changes the last
        # bits.
        received = self.all_to_all(parts, group)
        total = received[0]
        for part in received[1:]:
            total = total + part
        return total

    def _finish(
        self, work: dist.Work | None, group: ProcessGroup, sent: list[Tensor], got: list[Tensor]
    ) -> None:
        """Wait for one of torch's own collectives."""
        assert work is not None
        peers = [tuple(rank for rank in dist.get_process_group_ranks(group) if rank != self.mesh.global_rank)]
        streams, site = self._streams_that_wait(got[0], group), CallSite(self.call, None, self._outside)
        watchdog = None if streams is None else self._work_watchdog
        Pending([work], peers, self.mesh, site, self.deadline_s, sent, got, group, watchdog, streams).wait()


def once_a_batch(mesh: RingMesh, what: str) -> Exchange:
    """Return an exchange for what ranks do together outside of passes: one may be reading data meanwhile."""
    limit = mesh.timeouts.limit("step")
    return Exchange(mesh, limit.seconds, (what, limit.key))


def walk_owners(
    exchange: Exchange | None, ring_rank: int, ring_size: int, own: Sequence[Tensor],
    sent_to: Callable[[int], Sequence[Tensor]], received_from: Callable[[int], Sequence[Tensor]],
    compute: Callable[[int, Sequence[Tensor]], Sequence[Tensor]],
    returned_by: Callable[[int], Sequence[Tensor]],
    add: Callable[[int, Sequence[Tensor]], None] | None,
) -> None:  # fmt: skip
    """Call `compute` with the keys of one owner after the other, at hop s with those of rank p - s.

    Each owner sends directly to its readers, while the keys of the owner before are computed with. Lists of
    tensors are K and V in turn.

    Args:
        exchange: of the ring; None for a ring of one.
        ring_rank, ring_size: of this rank p.
        own: its keys, as `compute` gets them.
        sent_to: returns the keys for a reader.
        received_from: returns empty tensors for those of an owner.
        compute: takes an owner and its keys; what it returns goes back to the owner if there is `add`.
        returned_by: returns empty tensors for what a reader returns.
        add: takes a reader, first this rank, and what it returned; in the order of hops.
    """
    here: Sequence[Tensor] = own
    gradients: Sequence[Tensor] = ()
    for hop in range(ring_size + (add is not None and ring_size > 1)):
        sends: list[Message] = []
        receives: list[Message] = []
        arriving: Sequence[Tensor] = ()
        returned: Sequence[Tensor] = ()
        if hop + 1 < ring_size:
            reader, owner = (ring_rank + hop + 1) % ring_size, (ring_rank - hop - 1) % ring_size
            arriving = received_from(owner)
            sends += _in_turn(sent_to(reader), reader, ("K", "V"))
            receives += _in_turn(arriving, owner, ("K", "V"))
        # Gradients of the hop before: of rank p - hop + 1, and of this rank's keys at rank p + hop - 1.
        reader, owner = (ring_rank + hop - 1) % ring_size, (ring_rank - hop + 1) % ring_size
        if add is not None and hop > 1:
            returned = returned_by(reader)
            sends += _in_turn(gradients, owner, ("dK", "dV"))
            receives += _in_turn(returned, reader, ("dK", "dV"))
        pending = exchange.post(sends, receives, hop) if exchange is not None else None
        if hop < ring_size:
            gradients = compute((ring_rank - hop) % ring_size, here)
            if add is not None and hop == 0:
                add(ring_rank, gradients)
        if pending is not None:
            pending.wait()
        if add is not None and hop > 1:
            add(reader, returned)
        here = arriving


def _in_turn(tensors: Sequence[Tensor], peer: int, what: tuple[str, str]) -> list[Message]:
    """Return the messages of tensors that are labelled in turn; none if they have no rows."""
    if not tensors or not tensors[0].numel():
        return []
    return [Message(x.contiguous(), peer, what[i % 2]) for i, x in enumerate(tensors)]


def start_batch(route: Route, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[dist.Work]:
    """Start all messages of a route, receives first; return one Work each, or one for the batch (NCCL)."""
    if not route.peers:
        return []
    sides = (dist.irecv, received, route.receives), (dist.isend, sent, route.sends)
    operations = []
    for act, tensors, ranks in sides:
        for tensor, rank in zip(tensors, ranks, strict=True):
            operations.append(dist.P2POp(act, tensor, group=route.group, group_peer=rank))
    return dist.batch_isend_irecv(operations)


# What ranks agree on before the first payload of a call. The header has a digest of the report. If any digest
# differs, all ranks send each other their reports, so that the error says which rank differs in what.
#
# [Note: a header on every call]
# The least and the greatest header spread to all ranks in log2 P rounds, so every rank raises the same error
# at once. If the header went to the next rank only, two ranks would see a difference, and the others would
# wait for their deadline. The comparison costs one small message a round.

_OPERATION, _REFUSAL = "operation", "refused"
_VALUE_CHARACTERS = 300  # of a value in a report
_REPORT_BYTES = 1 << 15
_NAMED_RANKS = 4

AgreementFields = dict[str, str]


class Agreement(NamedTuple):
    """What all ranks of a sequence must agree on, as texts by name, and its digest, which is computed once.

    The report of a rank that refuses says why.
    """

    report: AgreementFields
    digest: int

    @classmethod
    def on(cls, operation: str, fields: Mapping[str, object], refused: RingError | None = None) -> Agreement:
        """Return the agreement on an operation, "attention forward" say, with these fields."""
        more = {name: str(value) for name, value in fields.items()}
        report = {_OPERATION: operation, **(more if refused is None else {_REFUSAL: str(refused)})}
        digest = hashlib.sha256(json.dumps(report, sort_keys=True).encode()).digest()
        return cls(report, int.from_bytes(digest[:8], "big", signed=True))


# [Note: refusals]
# A rank that must refuse its own input still takes part, so that the others raise too instead of waiting for
# it. Headers go over the whole sequence group, ring and Ulysses ranks alike: whoever would wait for the
# refusing rank, directly or through another rank, learns of it.
def agree(
    exchange: Exchange,
    operation: str,
    fields: Mapping[str, object],
    refused: RingError | None = None,
    patience_s: float = 0.0,
) -> None:
    """Check that all ranks of the sequence make the same call. Only headers are sent, if all agree.

    Args:
        exchange: the exchange of the mesh. The longest `patience_s` of all ranks is set on this mesh.
        operation: what is about to happen, for example "attention forward".
        fields: what must be equal on all ranks, by the name that error messages use; compared as texts.
        refused: why this rank cannot do it; raised here after the others were told. See [Note: refusals].
        patience_s: a lower bound in seconds for the deadline of a wait; 0 for none (`ops/options.py`).

    Raises:
        RingError: `refused`, on this rank.
        RingMismatchError: another rank refused, or fields differ; names ranks and fields.
        RingPeerError: another rank did not take part before the deadline.
    """
    with exchange.mesh.in_call():
        compare_headers(exchange, Agreement.on(operation, fields, refused), patience_s, refused)()


def compare_headers(
    exchange: Exchange, agreement: Agreement, patience_s: float = 0.0, refused: RingError | None = None
) -> Callable[[], None]:
    """Count the call and return the function that compares headers and raises what `agree` documents.

    The caller is inside `mesh.in_call()`, and sends no payload before the function has returned. The function
    may run in a thread (`Task`), so that the device computes meanwhile.
    """
    # Refused calls count as well: ranks that go on after one must still have equal numbers.
    exchange.call = number = next(exchange.mesh.calls)
    use = exchange.mesh.state
    # Never reduce the patience here: headers of the last call may be in flight, or a rank may still compile.
    use.patience_s = max(use.patience_s, patience_s)
    # Headers are compared lexicographically. So least[0] is 1 only if all ranks refuse. If the first two
    # integers are the same on all ranks, the greatest header has the longest patience of all ranks.
    header = torch.tensor([int(refused is not None), agreement.digest ^ number, math.ceil(patience_s)])

    def compare() -> None:
        try:
            least, greatest = exchange.spread(header).tolist()
            all_refuse, all_equal = least[0] == 1, least[:2] == greatest[:2]
            # Every rank sees the same least and greatest, so all of them send their reports, or none.
            reports = [] if all_refuse or all_equal else _all_reports(exchange, agreement.report, number)
        except RingPeerError as unheard:
            if refused is not None:  # nobody to tell: the own fault is still the better message
                raise refused from unheard
            raise
        if refused is not None:
            raise refused
        if not all_equal:
            raise RingMismatchError(_describe(exchange.mesh, reports))
        use.patience_s = float(greatest[2])

    return compare


def _all_reports(exchange: Exchange, report: AgreementFields, number: int) -> list[AgreementFields]:
    """Return every rank's report, by sequence rank."""
    mine = {_OPERATION: report[_OPERATION], "number of the call": str(number), **report}
    text = json.dumps({name: value[:_VALUE_CHARACTERS] for name, value in mine.items()})
    return [json.loads(row) for row in gather_texts(exchange, text)]


def gather_texts(exchange: Exchange, text: str) -> list[str]:
    """Return the texts of all ranks of the sequence, by sequence rank, padded with spaces to one size."""
    data = text.encode().ljust(_REPORT_BYTES)  # an all-gather takes equal sizes only
    assert len(data) == _REPORT_BYTES, f"a report of {len(data)} bytes, there is room for {_REPORT_BYTES}"
    mesh = exchange.mesh
    # A bytearray, since torch warns of memory that it cannot write to.
    row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = exchange.all_gather(row, mesh.cpu_group, mesh.sequence_size)
    return [bytes(row.tolist()).decode() for row in rows]


def _describe(mesh: RingMesh, reports: list[AgreementFields]) -> str:
    """Return the message for reports that differ."""
    refusing = [rank for rank, report in enumerate(reports) if _REFUSAL in report]
    if refusing:
        return (
            f"{_names(mesh, refusing)} refused its own input: {reports[refusing[0]][_REFUSAL]}. No rank of"
            " this sequence sent anything; all can go on once that is mended"
        )
    operations = {report[_OPERATION] for report in reports}
    names = [_OPERATION] if len(operations) > 1 else list(reports[0])  # elsewhere fields mean other things
    different = []
    for name in names:
        by_value: dict[str, list[int]] = {}
        for rank, report in enumerate(reports):
            by_value.setdefault(report[name], []).append(rank)
        if len(by_value) > 1:
            who = [f"{_names(mesh, ranks)} has {value}" for value, ranks in by_value.items()]
            different.append(f"{name}: {', '.join(who)}")
    return (
        "the ranks of this sequence call ds_ring with different arguments; nothing was sent. "
        + "; ".join(different)
        + ". Give every rank of a sequence the same model, configuration and batch shape"
    )


def _names(mesh: RingMesh, ranks: list[int]) -> str:
    named = " and ".join(mesh.describe(rank) for rank in ranks[:_NAMED_RANKS])
    return named if len(ranks) <= _NAMED_RANKS else f"{named} and {len(ranks) - _NAMED_RANKS} more"

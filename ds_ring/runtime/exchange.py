"""Move tensors between ranks. This is the only file that does.

Owns the point-to-point messages of a hop, the header that ranks compare before the first payload of a call,
the all-gather (offered as a reference to measure the ring against), the Ulysses all-to-all, the deadlines on
all of these, and the count of bytes sent. Knows nothing of attention.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_ring.errors import RingError, RingMismatchError, RingPeerError
from ds_ring.health.watch import keep_for_ever
from ds_ring.runtime.buffers import PreparedPasses
from ds_ring.runtime.device import Streams, streams_of
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.messages import BatchSizes, Counters, Message, check_messages, sizes_of
from ds_ring.runtime.waiting import DeviceWatch, Pending, Place, Task, blame, check_alive

NOTHING = torch.empty(0)
NOT_COUNTED = BatchSizes(False, 0, 0)  # for headers, which do not count as payload
BATCH_TIMEOUT_S = 1800.0  # for what runs once a batch: another rank may be saving or evaluating meanwhile


class Route(NamedTuple):
    """What is the same in all batches with the same messages, apart from the tensors; see [Note: routes].

    Attributes:
        receives, sends: ranks in the group, in order.
        peers: for each message the world rank that it depends on.
        all_peers: the same for one Work that stands for the whole batch (NCCL).
        sizes: what a batch adds to the counters.
        group: the process group that carries the messages; None for the world.
        streams: the streams that wait for the works; None if the host waits.
    """

    receives: tuple[int, ...]
    sends: tuple[int, ...]
    peers: list[tuple[int, ...]]
    all_peers: list[tuple[int, ...]]
    sizes: BatchSizes
    group: ProcessGroup | None
    streams: Streams | None


# [Note: rules of the exchange] Bare point-to-point communication hangs, corrupts data and aborts in known
# ways. These rules prevent it: - One batch per hop holds every send and receive. (A blocking send before a
# receive deadlocks at one element.) - Only contiguous buffers are sent. - Headers are compared before the
# first payload. Otherwise a message of another size or dtype is received as silent garbage. - Buffers in
# flight are never written. - Every Work is kept and waited for, with a deadline. On a GPU the stream waits
# and a thread holds the deadline (`waiting.py`). - Both sides list the messages of a batch in the same order:
# messages between two ranks are matched by order alone (NCCL ignores tags). In a ring of two ranks, previous
# and next are the same rank.
class Exchange:
    """Send and receive the messages of one ring.

    Args:
        mesh: the ranks and process groups.
        hop_timeout_s: seconds that one hop (or one collective) may take.
    """

    def __init__(self, mesh: RingMesh, hop_timeout_s: float = 60.0) -> None:
        self.mesh = mesh
        self.hop_timeout_s = hop_timeout_s
        self.counters = Counters()
        self.prepared = PreparedPasses()
        self.call = 0  # number of the current call, for error messages
        self._latest: Pending | None = None
        self._device_watch = DeviceWatch.of(mesh)

    @property
    def deadline_s(self) -> float:
        """Return the seconds that a wait may take now; see [Note: compile skew] in `context.py`."""
        return max(self.hop_timeout_s, self.mesh.use.patience_s)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], hop: int | None = None) -> Pending:
        """Start all messages of a hop, without waiting for them.

        Raises:
            RingMismatchError: see `route`.
        """
        sent, received = ([message.tensor for message in side] for side in (sends, receives))
        return self.start(self.route(sends, receives), sent, received, hop)

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
        of, to = (tuple(_rank_in(group, rank) for rank in side) for side in (receives, sends))
        streams = self._streams_that_wait(like, group)
        return Route(of, to, peers, [tuple(sorted({*receives, *sends}))], sizes, group, streams)

    def streams(self, tensor: Tensor) -> Streams:
        """Return the object that orders the streams of a tensor's device."""
        return streams_of(tensor)

    def start(
        self, route: Route, sent: Sequence[Tensor], received: Sequence[Tensor], hop: int | None = None
    ) -> Pending:
        """Start all messages of a batch."""
        self.counters.count(route.sizes)
        place = Place(self.call, hop)
        check_alive(self.mesh, hop)
        try:
            works = start_batch(route, sent, received)
        except RuntimeError as error:
            # Some messages of the batch may have been posted already, so their buffers must never be freed.
            keep_for_ever(sent, received)
            peers, cause = route.peers, f"could not start {place}: {str(error).splitlines()[0]}"
            if self.mesh.watch is not None:
                self.mesh.watch.accuse(peers[0], cause)
            raise blame(self.mesh, hop, peers[0], cause) from error
        peers = route.peers if len(works) == len(route.peers) else route.all_peers
        pending = self._pending(works, peers, place, route.group, route.streams, sent, received)
        self._latest = pending
        return pending

    def _pending(
        self, works: list[dist.Work], peers: list[tuple[int, ...]], place: Place, group: ProcessGroup | None,
        streams: Streams | None, sent: Sequence[Tensor], received: Sequence[Tensor],
    ) -> Pending:  # fmt: skip
        if streams is None:
            return Pending(works, peers, self.mesh, place, self.deadline_s, sent, received, group)
        return Pending(
            works, peers, self.mesh, place, self.deadline_s, sent, received, group,
            self._device_watch, streams,
        )  # fmt: skip

    def _streams_that_wait(self, tensor: Tensor, group: ProcessGroup | None) -> Streams | None:
        """Return the streams that wait for works; None with gloo, whose works the host waits for."""
        on_device = tensor.is_cuda and dist.get_backend(group) != "gloo"
        return self.streams(tensor) if on_device else None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run a pass; if it raises, tell the other ranks, which would otherwise wait for this one."""
        try:
            yield
        except RingPeerError:
            raise
        except BaseException as error:
            keep_for_ever(self._latest)  # the last batch may still be in flight
            if self.mesh.watch is not None:
                text = str(error).splitlines()[0][:300] if str(error) else ""
                self.mesh.watch.failed(f"{type(error).__name__} in call {self.call}: {text}")
            if self._latest is not None:
                self._latest.hand_over()
            raise

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
        mesh = self.mesh
        known = torch.stack([header, header])
        reach = 1
        while reach < mesh.sequence_size:
            heard = torch.empty_like(known)
            self._swap_headers(known, heard, reach).wait()
            # Python compares tuples lexicographically, so each result is the whole header of one rank.
            rows = [tuple(row) for row in (*known.tolist(), *heard.tolist())]
            known = torch.tensor([min(rows), max(rows)], dtype=torch.int64)
            reach *= 2
        return known

    def _swap_headers(self, known: Tensor, heard: Tensor, reach: int) -> Pending:
        """Send to the rank `reach` ahead in the sequence and receive from the rank `reach` behind."""
        # Headers are CPU tensors: NCCL could not send them.
        mesh, group = self.mesh, self.mesh.cpu_group
        ahead, behind = (
            mesh.global_rank_in_sequence((mesh.sequence_rank + step) % mesh.sequence_size)
            for step in (reach, -reach)
        )
        return self.start(self._route([behind], [ahead], known, group), [known], [heard])

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
        received = [torch.empty_like(part) for part in sends]
        check_alive(self.mesh, None)
        self._finish(dist.all_to_all(received, sends, group=group, async_op=True), group, sends, received)
        # One part stays on this rank; all parts have one size, so leave out any one of them.
        self.counters.bytes_sent += sum(part.nbytes for part in sends[1:])
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
        streams, place = self._streams_that_wait(got[0], group), Place(self.call, None)
        self._pending([work], peers, place, group, streams, sent, got).wait()


def _rank_in(group: ProcessGroup | None, world_rank: int) -> int:
    return world_rank if group is None else dist.get_group_rank(group, world_rank)


def start_batch(route: Route, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[dist.Work]:
    """Start all messages of a route, receives first; return one Work each, or one for the batch (NCCL)."""
    if not route.peers:
        return []
    sides = (dist.irecv, received, route.receives), (dist.isend, sent, route.sends)
    return dist.batch_isend_irecv(
        [
            dist.P2POp(act, tensor, group=route.group, group_peer=rank)
            for act, tensors, ranks in sides
            for tensor, rank in zip(tensors, ranks, strict=True)
        ]
    )


# Compare what ranks must agree on before the first payload of a call: the header, and its errors.
#
# Owns the header and the messages about it; how it travels is the exchange's, what stands in it the caller's.
# The header is a digest, so that agreeing costs next to nothing; only ranks that turn out to disagree send
# each other what they meant, and all of them can say who differs in what.
#
# [Note: a header on every call]
# The least and the greatest header spread to all ranks in log2 P rounds, so every rank raises the same error
# at once. If the header went to the next rank only, two ranks would see a difference, and the others would
# wait for their deadline. The comparison costs one small message a round.

_OPERATION, _REFUSAL = "operation", "refused"
_VALUE_CHARACTERS = 300  # of a value in a report
_REPORT_BYTES = 1 << 15
_NAMED_RANKS = 4

Report = dict[str, str]


# [Note: refusals]
# A rank that must refuse its own input still takes part, so that the others raise too instead of waiting for
# it. Headers go over the whole sequence group, ring and Ulysses ranks alike: whoever would wait for the
# refusing rank, directly or through somebody else, hears of it.
def agree(
    exchange: Exchange,
    operation: str,
    fields: Mapping[str, object],
    refused: RingError | None = None,
    patience_s: float = 0.0,
) -> None:
    """Compare this call with the other ranks' of the sequence; nothing is sent but the header.

    From then on the mesh has the most patience that a rank asked for.

    Args:
        exchange: of the mesh concerned.
        operation: what is about to happen, "attention forward" say.
        fields: what must be equal on all ranks, by the name for messages; compared as texts.
        refused: why this rank cannot do it; raised here after the others were told. See [Note: refusals].
        patience_s: seconds that waits may take at the least (`context.py`), if this rank has to say.

    Raises:
        RingError: `refused`, on this rank.
        RingMismatchError: on every other rank, and on all where fields differ; names ranks and fields.
        RingPeerError: another rank did not take part before the deadline.
    """
    with exchange.mesh.in_call():
        _compare(exchange, *_numbered(exchange, operation, fields, refused, patience_s), refused)


def begin_to_agree(
    exchange: Exchange, operation: str, fields: Mapping[str, object], patience_s: float = 0.0
) -> Task:
    """Begin what `agree` does, in a thread, for a call that is not refused here.

    The caller stays in its call on the mesh, sends nothing of a payload before `result` of what is returned
    has come back (or raised as `agree` does), and asks for it in any case.
    """
    mine, header = _numbered(exchange, operation, fields, None, patience_s)
    return Task(partial(_compare, exchange, mine, header, None)).start()


def _numbered(
    exchange: Exchange, operation: str, fields: Mapping[str, object], refused: RingError | None,
    patience_s: float,
) -> tuple[Report, torch.Tensor]:  # fmt: skip
    """Count the call; return its report and its header."""
    # Refused calls count as well: ranks that go on after one must still have equal numbers.
    exchange.call = next(exchange.mesh.calls)
    mine = {_OPERATION: operation, "number of the call": str(exchange.call)}
    mine |= {_REFUSAL: str(refused)} if refused is not None else {n: str(v) for n, v in fields.items()}
    # The headers of the call before may still be on their way, or a rank may still compile: no less patience.
    exchange.mesh.use.patience_s = max(exchange.mesh.use.patience_s, patience_s)
    # Headers are compared lexicographically: least[0] is 1 only if all refuse, and where refusal and digest
    # are equal the greatest has the most patience.
    header = [int(refused is not None), _digest(mine), math.ceil(patience_s)]
    return mine, torch.tensor(header, dtype=torch.int64)


def _compare(exchange: Exchange, mine: Report, header: torch.Tensor, refused: RingError | None) -> None:
    """Exchange headers, and raise what `agree` says."""
    try:
        least, greatest = exchange.spread(header).tolist()
        all_refuse, all_equal = least[0] == 1, least[:2] == greatest[:2]
        # Collective as well: every rank sees the same least and greatest, and decides alike.
        reports = [] if all_refuse or all_equal else _all_reports(exchange, mine)
    except RingPeerError as unheard:
        if refused is not None:  # nobody to tell: the own fault is still the better message
            raise refused from unheard
        raise
    if refused is not None:
        raise refused
    if not all_equal:
        raise RingMismatchError(_describe(exchange.mesh, reports))
    exchange.mesh.use.patience_s = float(greatest[2])


def _digest(report: Report) -> int:
    text = json.dumps(report, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _all_reports(exchange: Exchange, mine: Report) -> list[Report]:
    """Return every rank's report, by sequence rank."""
    text = json.dumps({name: value[:_VALUE_CHARACTERS] for name, value in mine.items()})
    # An all-gather takes equal sizes only: padded with spaces, which JSON ignores.
    data = text.encode().ljust(_REPORT_BYTES)
    assert len(data) == _REPORT_BYTES, f"a report of {len(data)} bytes, there is room for {_REPORT_BYTES}"
    mesh = exchange.mesh
    # A bytearray, since torch warns of memory that it cannot write to.
    row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = exchange.all_gather(row, mesh.cpu_group, mesh.sequence_size)
    return [json.loads(bytes(row.tolist())) for row in rows]


def _describe(mesh: RingMesh, reports: list[Report]) -> str:
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

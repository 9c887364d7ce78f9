"""Make a call on all ranks of a sequence together, so that an error of one rank reaches every rank.

Owns the context manager `collective` and the header that ranks compare before the first payload of a call.
`exchange.py` sends it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch

from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.waiting import Task
from ds_ring.errors import RingError, RingMismatchError, RingPeerError

if TYPE_CHECKING:
    from typing_extensions import Self

# [Note: a header on every call]
# A header is four integers that each rank sends before the first payload of a call:
# 1. 0; or 1 if the rank refuses its input ([Note: refusals]). A rank that refuses sends 1, 0, 0, 0.
# 2. The digest of the values that must be equal on all ranks (`Agreement`), combined with the call's number.
# 3. Seconds of patience that the rank asks for ([Note: compile skew] in `cuda/patience.py`); 0 for none.
# 4. A further value (`MeshState.compared`); 0 for none. In a forward call it is 1 if no operand requires a
#    gradient, 2 if an operand does. In a backward call it is 1 + the number of the forward call.
# `Exchange.spread` orders headers lexicographically. It returns the least and the greatest header, each of
# one rank. The call goes on if these two headers have the same first integer, the same second integer, and
# fourth integers that are equal or of which one is 0. Then all ranks take the patience of the greatest
# header. (So if ranks ask for different patience, a difference of fourth integers may be missed.) If the call
# does not go on, all ranks send each other reports: the error names fields, values and ranks.
#
# With N ranks, every rank gets the same two headers after ceil(log2 N) rounds of one small message, so all
# ranks raise at once. If a rank sent its header to the next rank only, the others would wait until their
# deadline.

_OPERATION, _REFUSAL, _NONE = "operation", "refused", "none"
_VALUE_CHARACTERS = 300  # of a value in a report
_REPORT_BYTES = 1 << 15
_NAMED_RANKS = 4


class Agreement(NamedTuple):
    """The fields that all ranks of a sequence compare, as texts by name, and their digest.

    The report of a rank that refuses has the reason instead of the fields.
    """

    report: dict[str, str]
    digest: int

    @classmethod
    def on(cls, operation: str, fields: Mapping[str, object]) -> Agreement:
        """Return the agreement on an operation, "attention forward" say, with these fields."""
        report = {_OPERATION: operation, **{name: str(value) for name, value in fields.items()}}
        digest = hashlib.sha256(json.dumps(report, sort_keys=True).encode()).digest()
        return cls(report, int.from_bytes(digest[:8], "big", signed=True))


# [Note: refusals]
# A rank that refuses its own input still sends a header, so that the other ranks raise instead of waiting.
# Headers go to all ranks of the sequence (ring x Ulysses). No payload was sent, so all ranks can use the mesh
# afterwards. An error after the header is a failure, not a refusal: other ranks may be waiting for payload of
# this rank. The rank reports a failure to the failure detector, which tells the other ranks. The mesh cannot
# be used afterwards.
class collective:  # noqa: N801 - reads as contextlib's own
    """Surround a call that all ranks of a sequence make together; see [Note: refusals].

        with collective(mesh, "halo") as call:
            check(x)  # an error that is raised here is a refusal: every rank raises
            call.agree({"shape": tuple(x.shape)})  # RingMismatchError on every rank if the fields differ
            send_and_compute(call.exchange)  # an error that is raised here is a failure: peers are notified

    The same thread may make further calls inside the block; each call sends a header of its own. A block in
    which no headers are compared sends nothing, unless the block raises: then the rank sends a refusal.

    Args:
        mesh: the ranks.
        name: name of the operation, which ranks compare.
        exchange: sends the headers; None: the call makes an exchange.
        alone: if True, send no headers, because the tensors are fake. (A single rank never sends headers.)

    Raises:
        RingMeshError: the mesh is closed, belongs to another process, or is in use by another thread.
    """

    __slots__ = ("_agreement_began", "_exchange", "_is_outermost", "alone", "mesh", "name")

    def __init__(
        self, mesh: RingMesh, name: str, exchange: Exchange | None = None, alone: bool = False
    ) -> None:
        self.mesh, self.name, self._exchange = mesh, name, exchange
        self.alone = alone or mesh.sequence_size == 1
        self._agreement_began = False

    @property
    def exchange(self) -> Exchange:
        """Return the exchange of the call."""
        if self._exchange is None:
            self._exchange = Exchange(self.mesh)
        return self._exchange

    def use(self, exchange: Exchange | None) -> None:
        """Send by this exchange from here on."""
        self._exchange = exchange or self._exchange

    def __enter__(self) -> Self:
        self._is_outermost = False
        if torch.compiler.is_compiling():  # the operators of the graph make calls, when it runs
            return self
        state, thread = self.mesh.state, threading.get_ident()
        if state.closed or state.refusal or os.getpid() != state.process:
            state.check()
        # If `state.thread` is this thread, the call is nested in another one. Only a thread itself writes its
        # id there.
        if state.thread != thread:
            if not state.busy.acquire(blocking=False):
                state.refuse_thread(self.mesh.detector)
            state.thread, self._is_outermost = thread, True
        return self

    def agree(self, fields: Mapping[str, object], patience_s: float = 0.0) -> None:
        """Check that all ranks of the sequence make the same call. If they do, only headers are sent.

        Args:
            fields: what must be equal on all ranks, by the name that messages use; compared as texts.
            patience_s: every wait of the call has at least this deadline, in seconds. The mesh gets the
                greatest value of all ranks ([Note: compile skew] in `cuda/patience.py`). With 0 on all ranks
                the deadline of the exchange applies.

        Raises:
            RingMismatchError: another rank refused its input, or fields differ; names ranks and fields.
            RingPeerError: another rank did not take part before the deadline.
        """
        if not self.alone:
            self.compare_headers(Agreement.on(self.name, fields), patience_s)

    def compare_headers_meanwhile(self, agreement: Agreement, patience_s: float = 0.0) -> Callable[[], None]:
        """Compare headers in a thread, while the device computes.

        Returns:
            A function that waits for the comparison and raises what `agree` documents.
        """
        self._agreement_began = True  # before the thread runs: an error from here on is a failure
        return Task(partial(self.compare_headers, agreement, patience_s)).start().result

    def compare_headers(self, agreement: Agreement, patience_s: float = 0.0) -> None:
        """Count the call, compare its header with those of all ranks, and raise what `agree` documents.

        No payload is sent before it has returned.
        """
        self._agreement_began = True
        exchange, state = self._exchange or self.exchange, self.mesh.state
        exchange.call = number = next(self.mesh.calls)
        further, value, words = state.compared
        # Never reduce the patience here: headers of the last call may be in flight, or a rank may compile.
        state.patience_s = max(state.patience_s, patience_s)
        # The meaning and the order of the integers: [Note: a header on every call].
        header = torch.tensor([0, agreement.digest ^ number, math.ceil(patience_s), value], device="cpu")
        least, greatest = exchange.spread(header).tolist()
        if least[:2] != greatest[:2] or (0 < least[3] != greatest[3] > 0):
            # Every rank sees the same least and greatest, so all of them send their reports, or none.
            report = agreement.report | ({further: words} if value else {})
            reports = _gather_reports(exchange, report, number)
            error = RingMismatchError(self._describe(reports))
            error.peers_know = True
            raise error
        state.patience_s = float(greatest[2])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self.alone and not getattr(error, "peers_know", False):
                self._tell(error)
        finally:
            if self._is_outermost:
                self.mesh.state.thread = None
                self.mesh.state.busy.release()

    def _tell(self, error: BaseException) -> None:
        """Tell the other ranks that this one refuses or has failed."""
        with suppress(AttributeError):  # a class with slots
            error.peers_know = True  # type: ignore[attr-defined]
        if self._agreement_began:
            self.exchange.failed(error)
        # Refuse for any exception, such as an IndexError of the user's function, not for a RingError alone:
        # the other ranks wait for a header. (A KeyboardInterrupt ends the process, and the failure detector
        # sees that.)
        elif isinstance(error, Exception) and not torch.compiler.is_compiling():
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        exchange = self.exchange
        # Refused calls count as well: ranks that go on after one must still have equal numbers.
        exchange.call = number = next(self.mesh.calls)
        try:
            least, _ = exchange.spread(torch.tensor([1, 0, 0, 0], device="cpu")).tolist()
            if least[0] == 0:  # some rank does not refuse, and gathers the reports
                why = str(error) if isinstance(error, RingError) else f"{type(error).__name__}: {error}"
                _gather_reports(exchange, {_OPERATION: self.name, _REFUSAL: why}, number)
        except RingPeerError as unheard:  # no peer is reachable; this rank's own error is the better message
            raise error from unheard

    def _describe(self, reports: list[dict[str, str]]) -> str:
        """Return the message for reports that differ."""
        refusing = [rank for rank, report in enumerate(reports) if _REFUSAL in report]
        if refusing:
            return (
                f"{self._describe_ranks(refusing)} refused its own input: {reports[refusing[0]][_REFUSAL]}."
                " No rank of this sequence sent anything; all can go on once that is mended"
            )
        operations = {report[_OPERATION] for report in reports}
        # Ranks of one operation may differ in their fields, too: one passes an operand that others lack.
        names = [_OPERATION] if len(operations) > 1 else list(dict.fromkeys(chain(*reports)))
        different = []
        for name in names:
            by_value: dict[str, list[int]] = {}
            for rank, report in enumerate(reports):
                by_value.setdefault(report.get(name, _NONE), []).append(rank)
            if len(by_value) > 1:
                who = [f"{self._describe_ranks(ranks)} has {value}" for value, ranks in by_value.items()]
                different.append(f"{name}: {', '.join(who)}")
        return (
            "the ranks of this sequence call ds_ring with different arguments; nothing was sent. "
            + "; ".join(different)
            + ". Give every rank of a sequence the same model, configuration and batch shape"
        )

    def _describe_ranks(self, ranks: list[int]) -> str:
        named = " and ".join(self.mesh.describe(rank) for rank in ranks[:_NAMED_RANKS])
        return named if len(ranks) <= _NAMED_RANKS else f"{named} and {len(ranks) - _NAMED_RANKS} more"


def _gather_reports(exchange: Exchange, report: dict[str, str], number: int) -> list[dict[str, str]]:
    """Return every rank's report, by sequence rank; they are sent padded with spaces to one size."""
    mine = {_OPERATION: report[_OPERATION], "number of the call": str(number), **report}
    text = json.dumps({name: _shorten(value) for name, value in mine.items()})
    data = text.encode().ljust(_REPORT_BYTES)  # an all-gather takes equal sizes only
    assert len(data) == _REPORT_BYTES, f"a report of {len(data)} bytes, there is room for {_REPORT_BYTES}"
    mesh = exchange.mesh
    # A bytearray, since torch warns of memory that it cannot write to.
    row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = exchange.all_gather(row, mesh.cpu_group, mesh.sequence_size)
    return [json.loads(bytes(row.tolist())) for row in rows]


def _shorten(value: str) -> str:
    """Return the beginning of a long text with a checksum, so that texts with one beginning still differ."""
    if len(value) <= _VALUE_CHARACTERS:
        return value
    return f"{value[:_VALUE_CHARACTERS]}... (checksum {zlib.crc32(value.encode()):08x})"

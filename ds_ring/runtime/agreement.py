"""Compare what ranks must agree on before the first payload of a call: the header, and its errors.

Owns the header and the messages about it; how it travels is the exchange's, what stands in it the caller's.
The header is a digest, so that agreeing costs next to nothing; only ranks that turn out to disagree send
each other what they meant, and all of them can say who differs in what.

[Note: a header on every call]
The least and the greatest header spread to all ranks in log2 P rounds, so every rank raises the same error at
once. If the header went to the next rank only, two ranks would see a difference, and the others would wait
for their deadline. The comparison costs one small message a round, and turns every silent corruption by
unequal calls into an error.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import partial

import torch

from ds_ring.errors import RingError, RingMismatchError, RingPeerError
from ds_ring.runtime.exchange import Exchange
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.waiting import Task

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

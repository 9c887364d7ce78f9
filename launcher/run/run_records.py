"""Read the files of a run (run_folder.py describes them): bounded, and each by a schema.

Ranks, launchers of other versions and other writers of the folder make these files, also while they are
read. Only regular files are read, so many bytes at most; an incomplete record is left out, and
so is a field that is nothing of its kind.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
)

from ds_ring.limits import MAX_RANKS, MAX_TOKENS

from .run_folder import ATTEMPTS, RankFault

MAX_BYTES = 1 << 20  # of a small file: a rank's fault has a traceback of some KB
MAX_LINES_BYTES = 1 << 24  # of a file of lines, of which the last ones are read
MAX_SECONDS = 1e11  # since 1970: the year 5138
MAX_SLOTS = 4096  # of one host: more than any has devices or cores
_MAX_LETTERS = 1 << 16


def read_bytes(path: Path, most: int = MAX_BYTES, last: bool = False) -> bytes | None:
    """Return what a regular file holds; None for anything else, and for what cannot be read.

    Args:
        path: of the file.
        most: bytes; of a larger file nothing is read.
        last: of a larger file the last bytes are read.
    """
    try:
        # to open a FIFO would wait for its writer
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or (status.st_size > most and not last):
                return None
            file.seek(max(status.st_size - most, 0))
            return file.read(most)
    except (OSError, ValueError):
        return None


def _or_none(value: Any, handler: Any) -> Any:
    try:
        return handler(value)
    except ValidationError:
        return None


def _number(value: object) -> object:
    """Return a float of JSON, in which "nan" and "inf" are words."""
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


def _not_negative(value: float) -> float:
    if value < 0:
        raise ValueError("expected no negative number")
    return value


def _mapping(value: object) -> object:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> object:
    return value if isinstance(value, list) else []


_Letters = Annotated[str, AfterValidator(lambda text: text[:_MAX_LETTERS])]
_Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
_Time = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
_Status = Annotated[int, Field(ge=-(1 << 31), lt=1 << 32)]
MaybeText = Annotated[_Letters | None, WrapValidator(_or_none)]
MaybeRank = Annotated[_Rank | None, WrapValidator(_or_none)]
MaybeTime = Annotated[_Time | None, WrapValidator(_or_none)]
MaybeCount = Annotated[_Count | None, WrapValidator(_or_none)]
MaybeStatus = Annotated[_Status | None, WrapValidator(_or_none)]
MaybeNumber = Annotated[float | None, WrapValidator(_or_none), BeforeValidator(_number)]
_Rate = Annotated[float, BeforeValidator(_number), AfterValidator(_not_negative)]
MaybeRate = Annotated[_Rate | None, WrapValidator(_or_none)]
MaybeBool = Annotated[bool | None, WrapValidator(_or_none)]
_Slots = Annotated[int | None, Field(ge=1, le=MAX_SLOTS), WrapValidator(_or_none)]


class Record(BaseModel):
    """Take the known keys of a JSON object, and convert nothing."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class LauncherRecord(Record):
    """Describe launcher.json."""

    at: MaybeTime = None
    since: MaybeText = None
    host: MaybeText = None
    pid: MaybeCount = None
    processes: MaybeText = None
    started: MaybeNumber = None
    token: MaybeText = None
    ended: MaybeBool = None


class EventRecord(Record):
    """Describe a line of attempts.jsonl, of any event."""

    event: _Letters
    attempt: _Count
    at: MaybeTime = None
    engine: MaybeText = None
    hosts: Annotated[dict[str, _Slots], BeforeValidator(_mapping)] = Field(default_factory=dict)
    missing: Annotated[dict[str, MaybeText], BeforeValidator(_mapping)] = Field(default_factory=dict)
    interfaces: Annotated[dict[str, Any], BeforeValidator(_mapping)] = Field(default_factory=dict)
    world_size: MaybeCount = None
    sequence_parallel_size: MaybeCount = None
    checkpoint: MaybeText = None
    checkpoints: MaybeText = None
    kind: MaybeText = None
    rank: MaybeRank = None
    host: MaybeText = None
    step: MaybeCount = None
    what: MaybeText = None
    frames: Annotated[list[MaybeText], BeforeValidator(_list)] = Field(default_factory=list)
    status: MaybeStatus = None
    verdict: MaybeText = None
    why: MaybeText = None
    next: MaybeText = None
    wait_seconds: MaybeTime = None
    ring: MaybeBool = None


class FaultRecord(Record):
    """Describe rank-N.fault.json; see `RankFault`."""

    rank: _Rank
    at: _Time
    step: MaybeCount = None
    kind: _Letters
    type: _Letters
    message: _Letters
    frames: Annotated[list[_Letters], Field(max_length=64)]
    traceback: _Letters
    blames: MaybeRank = None
    raised: MaybeBool = None


class ExitRecord(Record):
    """Describe rank-N.exit.json."""

    rank: _Rank
    status: _Status


class LinkRecord(Record):
    """Describe a link of rank-N.metrics.json."""

    source: Annotated[_Rank, Field(alias="from")]
    hop_seconds: Annotated[float, Field(ge=0, le=MAX_SECONDS)]
    wait_seconds: MaybeTime = None
    bytes: MaybeCount = None


def _links(value: object) -> list[LinkRecord]:
    links = (_record(link, LinkRecord) for link in value) if isinstance(value, list) else ()
    return [link for link in links if link is not None]


class MetricsRecord(Record):
    """Describe rank-N.metrics.json: a rank's latest figures."""

    rank: _Rank
    at: MaybeTime = None
    step: MaybeCount = None
    loss: MaybeNumber = None
    step_seconds: MaybeTime = None
    tokens_per_second: MaybeRate = None
    memory_bytes: MaybeCount = None
    ring_rank: MaybeRank = None
    links: Annotated[list[LinkRecord], BeforeValidator(_links)] = Field(default_factory=list)


class LateRecord(Record):
    """Describe rank-N.late.json: others wait for the rank, outside of a pass or in one."""

    rank: _Rank
    at: _Time
    seconds: _Time
    what: _Letters
    where: MaybeText = None
    limit_seconds: MaybeTime = None
    key: MaybeText = None


class HistoryRecord(Record):
    """Describe a line of history.jsonl."""

    step: _Count
    loss: MaybeNumber = None
    tokens_per_second: MaybeRate = None


class _FileSize(Record):
    bytes: _Count


class ManifestRecord(Record):
    """Describe a checkpoint's manifest for `ds-ring status`."""

    global_steps: _Count
    files: list[_FileSize]


AnyRecord = TypeVar("AnyRecord", bound=Record)


def read_record(path: Path, kind: type[AnyRecord], most: int = MAX_BYTES) -> AnyRecord | None:
    """Return the record in a file; None where there is none."""
    data = read_bytes(path, most)
    return None if data is None else _record(_parse_value(data), kind)


def read_lines(path: Path, kind: type[AnyRecord]) -> list[AnyRecord]:
    """Return the records of a file, one a line, without incomplete ones."""
    data = read_bytes(path, MAX_LINES_BYTES, last=True) or b""
    records = (_record(_parse_value(line), kind) for line in data.split(b"\n") if line)
    return [record for record in records if record is not None]


def read_events(run: Path) -> list[EventRecord]:
    """Return the lines of attempts.jsonl in a run's folder."""
    return read_lines(run / ATTEMPTS, EventRecord)


def read_faults(folder: Path) -> list[RankFault]:
    """Return the faults of an attempt, the first one first."""
    faults = [
        RankFault(**{**record.model_dump(), "frames": tuple(record.frames)})
        for record in _read_ranks(folder, "fault", FaultRecord)
    ]
    return sorted(faults, key=lambda fault: fault.at)


def read_exits(folder: Path) -> dict[int, int]:
    """Return the exit status of each rank whose script ended by itself."""
    return {record.rank: record.status for record in _read_ranks(folder, "exit", ExitRecord)}


def read_metrics(folder: Path) -> dict[int, MetricsRecord]:
    """Return the latest figures of each rank that has written some."""
    return {record.rank: record for record in _read_ranks(folder, "metrics", MetricsRecord)}


def read_late(folder: Path) -> dict[int, LateRecord]:
    """Return the ranks that others have waited for, longer than a tenth of the limit."""
    return {record.rank: record for record in _read_ranks(folder, "late", LateRecord)}


def newest_checkpoint(folder: Path | None) -> tuple[str, int] | None:
    """Return the tag that `latest` names, and when it was written; None where there is none."""
    data = None if folder is None else read_bytes(folder / "latest", 4096)
    if folder is None or data is None:
        return None
    try:
        return data.decode("utf-8").strip(), (folder / "latest").stat().st_mtime_ns
    except (OSError, ValueError):
        return None


def _read_ranks(folder: Path, what: str, kind: type[AnyRecord]) -> Iterator[AnyRecord]:
    for path in sorted(folder.glob(f"rank-*.{what}.json")):
        record = read_record(path, kind)
        if record is not None:
            yield record


def _parse_value(data: bytes) -> object:
    try:
        return json.loads(data.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):  # no JSON, an integer of 5000 digits, or nested too deep
        return None


def _record(value: object, kind: type[AnyRecord]) -> AnyRecord | None:
    try:
        return kind.model_validate(value) if isinstance(value, dict) else None
    except ValidationError:
        return None


@dataclass(frozen=True)
class RankStop:
    """Say how a rank of an attempt ended, and when.

    Attributes:
        rank: in the world.
        when_ns: by the clock of the file system, which is one for all hosts; None if unknown: its
            host is gone, or it still runs.
        status: that its script left with by itself, or TOLD_TO_END; None where it did not.
        fault: the exception that ended it.
    """

    rank: int
    when_ns: int | None
    status: int | None = None
    fault: RankFault | None = None

    @property
    def is_silent(self) -> bool:
        """Return whether it did not say how it ended: killed, stopped, or cut off."""
        return self.status is None and self.fault is None


def read_stops(folder: Path) -> list[RankStop]:
    """Return how each rank of an attempt that has ended came to its end, the first one first."""
    faults, exits = {fault.rank: fault for fault in reversed(read_faults(folder))}, read_exits(folder)
    began = (re.fullmatch(r"rank-(\d{1,7})\.log", path.name) for path in folder.glob("rank-*.log"))
    stops = []
    for rank in {*faults, *exits, *(int(match[1]) for match in began if match)}:
        kind = "fault.json" if rank in faults else "exit.json" if rank in exits else "stopped"
        try:
            when = os.stat(folder / f"rank-{rank}.{kind}").st_mtime_ns
        except OSError:
            when = None
        fault = faults.get(rank)
        stops.append(RankStop(rank, when, None if fault is not None else exits.get(rank), fault))
    return sorted(stops, key=lambda stop: (math.inf if stop.when_ns is None else stop.when_ns, stop.rank))

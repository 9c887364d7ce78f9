"""Read the folder of a run, also while it is being written: what has happened, and how far every rank is.

Owns what `ds-ring status` knows; status/table.py shows it. Files of a run may be cut short, from another
version, or anything at all: what cannot be read is left out.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

from ds_ring.errors import RingConfigError

from ..run.run_folder import ATTEMPTS, HISTORY, LAUNCHER, RunFolder
from ..run.run_lock import BEAT_SECONDS, is_alive_here
from ..run.run_records import (
    EventRecord,
    HistoryRecord,
    LateRecord,
    LauncherRecord,
    ManifestRecord,
    newest_checkpoint,
    read_events,
    read_exits,
    read_faults,
    read_late,
    read_lines,
    read_metrics,
    read_record,
)

MANIFEST = "ds_ring_manifest.json"  # written last: a folder without one is not whole
_MAX_BYTES = 1 << 24
_MAX_RUNS = 5
_MAX_RANKS = 1 << 16  # that are listed


@dataclass(frozen=True)
class Checkpoint:
    """Describe a checkpoint; None is unknown. `is_latest`: the one that is loaded next."""

    tag: str
    step: int | None
    total_bytes: int | None
    saved_at: float
    is_latest: bool


def newest_checkpoints(folder: Path) -> tuple[Checkpoint, ...]:
    """Return the newest checkpoints that have a manifest, at most five, the newest first."""
    checkpoints, latest = [], (newest_checkpoint(folder) or ("", 0))[0]
    try:
        for path in folder.iterdir():
            if not path.name.startswith(".") and (path / MANIFEST).is_file():
                checkpoints.append(((path / MANIFEST).stat().st_mtime, path.name))
    except (OSError, ValueError):
        return ()
    newest = sorted(checkpoints, reverse=True)[:_MAX_RUNS]
    return tuple(
        Checkpoint(tag, *_step_and_bytes(folder / tag / MANIFEST), saved_at, tag == latest)
        for saved_at, tag in newest
    )


def _step_and_bytes(path: Path) -> tuple[int | None, int | None]:
    manifest = read_record(path, ManifestRecord, _MAX_BYTES)
    return (
        (None, None)
        if manifest is None
        else (manifest.global_steps, sum(file.bytes for file in manifest.files))
    )


SILENT_SECONDS = 180.0  # the launcher writes every few seconds
CONFIRM_SECONDS = 2.5 * BEAT_SECONDS  # in which a living launcher writes
NO_RING = "no rank has made a ring"
_DONE = ("done", "failed", "preempted", "interrupted")


@dataclass(frozen=True)
class RankStatus:
    """Hold a rank's latest figures; None is unknown."""

    rank: int
    host: str | None
    ring_rank: int | None
    step: int | None
    loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    memory_bytes: int | None
    age_seconds: float | None
    state: str  # "at work", "late: others wait ...", "left with status N", "raised NAME"


@dataclass(frozen=True)
class LinkStatus:
    """Hold the mean over the hops that brought something to rank `to`, of one step."""

    source: int
    to: int
    between: str  # "host" or "host to host"
    hop_seconds: float
    wait_seconds: float
    payload_bytes: int


@dataclass(frozen=True)
class AttemptStatus:
    """Hold the state of an attempt; `verdict` is None while it is under way. Times are since 1970."""

    number: int
    started_at: float | None
    ended_at: float | None
    engine: str | None
    world_size: int | None
    sequence_parallel_size: int | None
    checkpoint: str | None
    hosts: dict[str, int]
    missing: dict[str, str]
    verdict: str | None
    status: int | None
    why: str | None
    again: bool
    wait_seconds: float
    last_step: int | None
    faults: tuple[str, ...]
    has_ring: bool | None = None  # whether a rank has made a ring; None if unknown


@dataclass(frozen=True)
class HistoryMoment:
    """Hold a step of a run; a loss may be nan or infinite."""

    attempt: int
    step: int
    loss: float | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class RunStatus:
    """Hold all that is shown of a run; `ranks` and `links` are those of the last attempt.

    `state` is that of the last attempt ("starting", "running", or its verdict), "waiting" between two
    attempts, and "silent" where one should be running and nothing has been heard for SILENT_SECONDS.
    `age_seconds` is that of the latest figures of a rank of the last attempt; None before any.
    """

    path: str
    at: float
    state: str
    why: str
    age_seconds: float | None
    attempts: tuple[AttemptStatus, ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    links: tuple[LinkStatus, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    latest: HistoryMoment | None = None  # step that is known

    @property
    def is_under_way(self) -> bool:
        """Return whether more may come."""
        return self.state in ("starting", "running", "waiting")

    def document(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return _plain(asdict(self))


def read_run(path: Path, now: float | None = None, confirm_seconds: float = 0.0) -> RunStatus:
    """Read a run's folder.

    Args:
        path: `run_folder` of the cluster YAML.
        now: seconds since 1970, by default those of this host's clock.
        confirm_seconds: how long to watch a run of which nothing seems to have been heard for a while: this
            host's clock may be ahead of those of its hosts.

    Raises:
        RingConfigError: that is no folder of a run.
    """
    status = _read_run(path, time.time() if now is None else now)
    if status.state != "silent" or confirm_seconds <= 0:
        return status
    if is_alive_here(read_record(path / LAUNCHER, LauncherRecord)) is False:
        return status
    heard, deadline = _latest_word(path), time.monotonic() + confirm_seconds
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if (word := _latest_word(path)) != heard:
            return _read_run(path, word[0])  # by the clock of the latest writer
    return status


def _latest_word(path: Path) -> tuple[float, ...]:
    """Return when anybody of a run last spoke, by the clocks of those who did: the latest first."""
    numbers = require_run(path)
    times = [*_launcher_times(path), *(record.at for record in read_events(path))]
    if numbers:
        times += [record.at for record in read_metrics(RunFolder(path).attempt(numbers[-1])).values()]
    return tuple(sorted((at for at in times if at is not None), reverse=True)) or (0.0,)


def _launcher_times(path: Path) -> list[float | None]:
    launcher = read_record(path / LAUNCHER, LauncherRecord)
    return [] if launcher is None else [launcher.at]


def _read_run(path: Path, now: float) -> RunStatus:
    numbers = require_run(path)
    folder = RunFolder(path)
    events = read_events(path)
    attempts = tuple(_attempt(number, folder, events) for number in numbers)
    last = attempts[-1] if attempts else None
    steps = (
        HistoryMoment(number, line.step, line.loss, line.tokens_per_second)
        for number in reversed(numbers)
        for line in reversed(read_lines(folder.attempt(number) / HISTORY, HistoryRecord))
    )
    ranks = () if last is None else _ranks(folder.attempt(last.number), last, now)
    links = () if last is None else _links(folder.attempt(last.number), last)
    age = min((rank.age_seconds for rank in ranks if rank.age_seconds is not None), default=None)
    times = [at for at in (*_launcher_times(path), *(event.at for event in events)) if at is not None]
    silence = min([now - at for at in times] + ([] if age is None else [age]), default=0.0)
    state, why = _state(last, silence)
    named = [event.checkpoints for event in events if event.checkpoints]
    checkpoints = newest_checkpoints(Path(named[-1])) if named else ()
    return RunStatus(str(path), now, state, why, age, attempts, ranks, links, checkpoints, next(steps, None))


def require_run(path: Path) -> list[int]:
    """Return the numbers of the attempts in a run's folder, ascending; RingConfigError if it is none."""
    try:
        names = [entry.name for entry in path.iterdir()]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _no_run(path, f"which cannot be read ({reason})") from None
    numbers = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"attempt-(\d{1,9})", name)))
    if not numbers and ATTEMPTS not in names:
        inside = re.fullmatch(r"attempt-\d+", path.name) and (path.parent / ATTEMPTS).exists()
        raise _no_run(path, f"an attempt of {path.parent.name!r}" if inside else f"without {ATTEMPTS}")
    return numbers


def _no_run(path: Path, got: str) -> RingConfigError:
    from ds_ring.config.messages import shown

    return RingConfigError(
        f"expected the folder of a run (run_folder of the cluster YAML), got {shown(str(path))}, {got}; give"
        " the folder that holds attempts.jsonl"
    )


def _state(last: AttemptStatus | None, silence: float) -> tuple[str, str]:
    if last is None:
        return "starting", "no attempt has begun"
    if last.verdict in _DONE and not last.again:
        why = "" if last.why == last.verdict else last.why or ""
        return str(last.verdict), why if last.has_ring is not False else f"{why}; {NO_RING}".lstrip("; ")
    if silence > SILENT_SECONDS:
        return "silent", f"neither its launcher nor a rank has said anything for {silence:.0f} s"
    if last.verdict is not None:
        return "waiting", f"attempt {last.number} {last.verdict}; another one follows"
    if last.started_at is None:
        return "starting", f"attempt {last.number}: hosts are asked"
    why = f"attempt {last.number} from {last.checkpoint or 'the start'}"
    return ("starting", f"{why}, no step so far") if last.last_step is None else ("running", why)


def _attempt(number: int, folder: RunFolder, events: list[EventRecord]) -> AttemptStatus:
    attempt_events, nothing = (
        [event for event in events if event.attempt == number],
        EventRecord(event="", attempt=number),
    )
    start = next((event for event in attempt_events if event.event == "start"), nothing)
    end = next((event for event in attempt_events if event.event == "end"), nothing)
    path = folder.attempt(number)
    steps = [event.step for event in read_metrics(path).values()]
    steps += [event.step for event in read_lines(path / HISTORY, HistoryRecord)[-1:]]
    faults = [event.what or "" for event in attempt_events if event.event == "fault"]
    if not faults and end is nothing:  # the launcher has not judged yet
        faults = [
            f"rank {fault.rank} raised {fault.type}: {fault.message}" for fault in read_faults(path)[:3]
        ]
    return AttemptStatus(
        number=number, started_at=start.at, ended_at=end.at,
        engine=start.engine, world_size=start.world_size,
        sequence_parallel_size=start.sequence_parallel_size,
        checkpoint=start.checkpoint,
        hosts={name: slots for name, slots in start.hosts.items() if slots is not None},
        missing={name: why or "" for name, why in start.missing.items()},
        verdict=end.verdict, status=end.status, why=end.why,
        again=end.next == "again", wait_seconds=end.wait_seconds or 0.0,
        last_step=max((step for step in steps if step is not None), default=None), faults=tuple(faults),
        has_ring=end.ring,
    )  # fmt: skip


def _hosts_by_rank(hosts: Mapping[str, int]) -> list[str]:
    names: Iterable[str] = chain.from_iterable(repeat(name, slots) for name, slots in hosts.items())
    return list(islice(names, _MAX_RANKS))


def _lateness(late: LateRecord, now: float) -> str:
    where = f"; it is in {late.where}" if late.where else ""
    limit = "" if late.limit_seconds is None else f" of {late.limit_seconds:g} s ({late.key or 'its limit'})"
    seconds = late.seconds + max(now - late.at, 0.0)
    return f"late: others wait at {late.what} for {seconds:.0f} s{limit}{where}"


def _ranks(path: Path, attempt: AttemptStatus, now: float) -> tuple[RankStatus, ...]:
    figures, exits = read_metrics(path), read_exits(path)
    late = read_late(path) if attempt.verdict is None else {}
    raised = {fault.rank: fault.type for fault in reversed(read_faults(path))}
    hosts = _hosts_by_rank(attempt.hosts)
    rows = []
    for rank in sorted({*figures, *exits, *raised, *range(min(attempt.world_size or 0, _MAX_RANKS))}):
        figure, state = figures.get(rank), "at work" if attempt.verdict is None else "gone"
        if rank in raised:
            state = f"raised {raised[rank]}"
        elif rank in exits:
            state = "done" if exits[rank] == 0 else f"left with status {exits[rank]}"
        elif rank in late:
            state = _lateness(late[rank], now)
        host = hosts[rank] if rank < len(hosts) else None
        if figure is None:
            rows.append(RankStatus(rank, host, None, None, None, None, None, None, None, state))
            continue
        age = None if figure.at is None else max(now - figure.at, 0.0)
        rows.append(
            RankStatus(
                rank, host, figure.ring_rank, figure.step, figure.loss, figure.step_seconds,
                figure.tokens_per_second, figure.memory_bytes, age, state,
            )
        )  # fmt: skip
    return tuple(rows)


def _links(path: Path, attempt: AttemptStatus) -> tuple[LinkStatus, ...]:
    hosts = _hosts_by_rank(attempt.hosts)
    rows = []
    for rank, figures in read_metrics(path).items():
        for link in figures.links:
            ends = [hosts[end] if end < len(hosts) else "?" for end in (link.source, rank)]
            between = ends[0] if ends[0] == ends[1] else " to ".join(ends)
            waited, size = link.wait_seconds or 0.0, link.bytes or 0
            rows.append(LinkStatus(link.source, rank, between, link.hop_seconds, waited, size))
    return tuple(sorted(rows, key=lambda link: (-link.hop_seconds, link.to)))


def _plain(value: Any) -> Any:
    """Return a value without numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value

"""Read the folder of a run, also while it is being written: what has happened, and how far every rank is.

Owns what `ds-ring status` and the status page know; status/table.py and status/page.py show it. Files of a
run may be cut short, from another version, or anything at all: what cannot be read is left out.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ds_ring.errors import RingConfigError

from ..run.run_folder import (
    ATTEMPTS,
    HISTORY,
    LAUNCHER,
    RunFolder,
    exits_of,
    faults_of,
    lines_of,
    metrics_of,
    newest_checkpoint,
)

MANIFEST = "ds_ring_manifest.json"  # written last: a folder without one is not whole
_MOST_BYTES = 1 << 24
_MOST = 5


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
    found, latest = [], (newest_checkpoint(folder) or ("", 0))[0]
    try:
        for path in folder.iterdir():
            if not path.name.startswith(".") and (path / MANIFEST).is_file():
                found.append(((path / MANIFEST).stat().st_mtime, path.name))
    except (OSError, ValueError):
        return ()
    newest = sorted(found, reverse=True)[:_MOST]
    return tuple(
        Checkpoint(tag, *_step_and_bytes(folder / tag / MANIFEST), saved_at, tag == latest)
        for saved_at, tag in newest
    )


def _step_and_bytes(path: Path) -> tuple[int | None, int | None]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None, None
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return int(said["global_steps"]), sum(int(one["bytes"]) for one in said["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


SILENT_SECONDS = 180.0  # the launcher says something each minute
MOST_CURVES = 40  # attempts whose steps are read: the latest ones
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
    state: str  # "at work", "left with status N", "raised NAME"


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
    """Hold what is known of an attempt; `verdict` is None while it is under way. Times are since 1970."""

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


@dataclass(frozen=True)
class HistoryMoment:
    """Hold a step of the course of a run; a loss may be nan or infinite."""

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
    course: tuple[HistoryMoment, ...] = field(default=(), repr=False)

    @property
    def is_under_way(self) -> bool:
        """Return whether more may come."""
        return self.state in ("starting", "running", "waiting")

    @property
    def last_moment(self) -> HistoryMoment | None:
        """Return the latest step that is known."""
        return self.course[-1] if self.course else None

    def document(self) -> dict[str, Any]:
        """Return what `--json` prints: this, without the course but for its last step."""
        found = {name: value for name, value in asdict(self).items() if name != "course"}
        last = self.last_moment
        return _plain({**found, "latest": None if last is None else asdict(last)})


def read_run(path: Path, now: float | None = None) -> RunStatus:
    """Read a run's folder.

    Args:
        path: `run_folder` of the cluster YAML.
        now: seconds since 1970, by default those of this host's clock.

    Raises:
        RingConfigError: that is no folder of a run.
    """
    now = time.time() if now is None else now
    numbers = require_run(path)
    folder = RunFolder(path)
    events = folder.events()
    attempts = tuple(_attempt(number, folder, events) for number in numbers)
    last = attempts[-1] if attempts else None
    course = tuple(
        HistoryMoment(number, step, number_of(one, "loss"), number_of(one, "tokens_per_second"))
        for number in numbers[-MOST_CURVES:]
        for one in lines_of(folder.attempt(number) / HISTORY)
        if (step := _whole(one, "step")) is not None
    )
    ranks = () if last is None else _ranks(folder.attempt(last.number), last, now)
    links = () if last is None else _links(folder.attempt(last.number), last)
    age = min((rank.age_seconds for rank in ranks if rank.age_seconds is not None), default=None)
    said = [at for one in (*events, *lines_of(path / LAUNCHER)) if (at := number_of(one, "at")) is not None]
    silence = min([now - at for at in said] + ([] if age is None else [age]), default=0.0)
    state, why = _state(last, silence)
    named = [name for one in events if (name := _text(one, "checkpoints"))]
    checkpoints = newest_checkpoints(Path(named[-1])) if named else ()
    return RunStatus(str(path), now, state, why, age, attempts, ranks, links, checkpoints, course)


def require_run(path: Path) -> list[int]:
    """Return the numbers of the attempts in a run's folder, ascending; RingConfigError if it is none."""
    try:
        names = [one.name for one in path.iterdir()]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _no_run(path, f"which cannot be read ({reason})") from None
    numbers = sorted(int(found[1]) for name in names if (found := re.fullmatch(r"attempt-(\d{1,9})", name)))
    if not numbers and ATTEMPTS not in names:
        inside = re.fullmatch(r"attempt-\d+", path.name) and (path.parent / ATTEMPTS).exists()
        raise _no_run(path, f"an attempt of {path.parent.name!r}" if inside else f"without {ATTEMPTS}")
    return numbers


def number_of(one: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a JSON object; None for everything else. "nan" and "inf" are words in JSON."""
    value = one.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value) if not isinstance(value, str) or value in ("nan", "inf", "-inf") else None
    except (ValueError, OverflowError):
        return None


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
        return str(last.verdict), "" if last.why == last.verdict else last.why or ""
    if silence > SILENT_SECONDS:
        return "silent", f"neither its launcher nor a rank has said anything for {silence:.0f} s"
    if last.verdict is not None:
        return "waiting", f"attempt {last.number} {last.verdict}; another one follows"
    if last.started_at is None:
        return "starting", f"attempt {last.number}: hosts are asked"
    why = f"attempt {last.number} from {last.checkpoint or 'the start'}"
    return ("starting", f"{why}, no step so far") if last.last_step is None else ("running", why)


def _attempt(number: int, folder: RunFolder, events: list[dict[str, Any]]) -> AttemptStatus:
    own = [one for one in events if one.get("attempt") == number]
    start: dict[str, Any] = next((one for one in own if one.get("event") == "start"), {})
    end: dict[str, Any] = next((one for one in own if one.get("event") == "end"), {})
    path = folder.attempt(number)
    steps = [_whole(one, "step") for one in (*metrics_of(path).values(), *lines_of(path / HISTORY)[-1:])]
    faults = [_text(one, "what") or "" for one in own if one.get("event") == "fault"]
    if not faults and not end:  # the launcher has not judged yet
        faults = [f"rank {fault.rank} raised {fault.type}: {fault.message}" for fault in faults_of(path)[:3]]
    return AttemptStatus(
        number=number, started_at=number_of(start, "at"), ended_at=number_of(end, "at"),
        engine=_text(start, "engine"), world_size=_whole(start, "world_size"),
        sequence_parallel_size=_whole(start, "sequence_parallel_size"),
        checkpoint=_text(start, "checkpoint"),
        hosts={name: int(slots) for name, slots in _mapping(start, "hosts") if isinstance(slots, int)},
        missing={name: str(why) for name, why in _mapping(start, "missing")},
        verdict=_text(end, "verdict"), status=_whole(end, "status"), why=_text(end, "why"),
        again=end.get("next") == "again", wait_seconds=number_of(end, "wait_seconds") or 0.0,
        last_step=max((step for step in steps if step is not None), default=None), faults=tuple(faults),
    )  # fmt: skip


def _ranks(path: Path, attempt: AttemptStatus, now: float) -> tuple[RankStatus, ...]:
    figures, exits = metrics_of(path), exits_of(path)
    raised = {fault.rank: fault.type for fault in reversed(faults_of(path))}
    hosts = [name for name, slots in attempt.hosts.items() for _ in range(slots)]
    found = []
    for rank in sorted({*figures, *exits, *raised, *range(min(attempt.world_size or 0, 1 << 16))}):
        one, state = figures.get(rank, {}), "at work" if attempt.verdict is None else "gone"
        if rank in raised:
            state = f"raised {raised[rank]}"
        elif rank in exits:
            state = "done" if exits[rank] == 0 else f"left with status {exits[rank]}"
        at = number_of(one, "at")
        found.append(
            RankStatus(
                rank, hosts[rank] if rank < len(hosts) else None, _whole(one, "ring_rank"),
                _whole(one, "step"), number_of(one, "loss"), number_of(one, "step_seconds"),
                number_of(one, "tokens_per_second"), _whole(one, "memory_bytes"),
                None if at is None else max(now - at, 0.0), state,
            )
        )  # fmt: skip
    return tuple(found)


def _links(path: Path, attempt: AttemptStatus) -> tuple[LinkStatus, ...]:
    hosts = [name for name, slots in attempt.hosts.items() for _ in range(slots)]
    found = []
    for rank, figures in metrics_of(path).items():
        links = figures.get("links")
        for link in links if isinstance(links, list) else []:
            source = _whole(link, "from") if isinstance(link, dict) else None
            seconds = number_of(link, "hop_seconds") if isinstance(link, dict) else None
            if source is None or seconds is None:
                continue
            ends = [hosts[one] if 0 <= one < len(hosts) else "?" for one in (source, rank)]
            between = ends[0] if ends[0] == ends[1] else " to ".join(ends)
            waited, size = number_of(link, "wait_seconds") or 0.0, _whole(link, "bytes") or 0
            found.append(LinkStatus(source, rank, between, seconds, waited, size))
    return tuple(sorted(found, key=lambda link: (-link.hop_seconds, link.to)))


def _whole(one: Mapping[str, Any], name: str) -> int | None:
    value = number_of(one, name)
    return int(value) if value is not None and math.isfinite(value) else None


def _text(one: Mapping[str, Any], name: str) -> str | None:
    value = one.get(name)
    return value if isinstance(value, str) else None


def _mapping(one: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    value = one.get(name)
    return list(value.items()) if isinstance(value, dict) else []


def _plain(value: Any) -> Any:
    """Return a value without numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value

"""Make the status page of a run: one HTML file that needs no network and shows whatever files say as text.

Its only script, known to the page's content security policy by its digest, tells how old the page is.
"""

from __future__ import annotations

import base64
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ds_ring.errors import RingConfigError
from ds_ring.replaced_file import replace_text

from ..run.process import say
from ..run.run_folder import ATTEMPTS, PAGE, write_launcher
from .run_status import AttemptStatus, LinkStatus, RankStatus, RunStatus, read_run

# The course of a run is inline SVG: one figure over optimizer steps, a line for each attempt.

WIDTH, HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 18, 14, 30
MOST_POINTS = 1500  # of a chart: more than it has columns of pixels
COLOURS = 6  # classes c0 to c5 of the page's style

_Scale = Callable[[float], float]


class ChartPoint(NamedTuple):
    """Hold a value of an attempt after a step; nan and infinite ones are marked at the top."""

    attempt: int
    step: int
    value: float


def chart(
    title: str, points: Sequence[ChartPoint], fault_steps: Sequence[int] = (), from_zero: bool = False
) -> str:
    """Return an <svg> element.

    Args:
        title: what is drawn, plain text.
        points: in the order in which they happened.
        fault_steps: the steps in which attempts failed: a dashed line each.
        from_zero: the axis begins at 0.
    """
    points = _thinned(points)
    finite = [point for point in points if _is_drawn(point)]
    if not finite:
        return f'<p class="none">{escape(title)}: nothing is known yet.</p>'
    low, high, ticks = _axis([point.value for point in finite], from_zero)
    first, last, step_ticks = _step_axis([point.step for point in points])

    def x_of(step: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (step - first) / max(last - first, 1)

    def y_of(value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)

    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
    ]
    for value in ticks:
        y = y_of(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="y" x="{_LEFT - 6}" y="{y + 4:.1f}">{short(value)}</text>')
    for step in step_ticks:
        parts.append(f'<text class="x" x="{x_of(step):.1f}" y="{HEIGHT - 10}">{step:,}</text>')
    for step in fault_steps:
        if first <= step <= last:
            x = x_of(step)
            parts.append(
                f'<line class="fault" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">'
                f"<title>a fault in step {step:,}</title></line>"
            )
    for attempt, own in groupby(points, key=lambda point: point.attempt):
        parts += _line(attempt, list(own), x_of, y_of)
    return "".join([*parts, "</svg>"])


def short(value: float) -> str:
    """Return a number of about four digits."""
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.2e}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _line(attempt: int, points: list[ChartPoint], x_of: _Scale, y_of: _Scale) -> list[str]:
    colour, found = f"c{(attempt - 1) % COLOURS}", list[str]()
    for good, run in groupby(points, key=_is_drawn):
        places = [(x_of(point.step), y_of(point.value) if good else _TOP) for point in run]
        if good and len(places) > 1:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            found.append(
                f'<polyline class="line {colour}" points="{line}">{_tip(f"attempt {attempt}")}</polyline>'
            )
            continue
        kind, said = (f"dot {colour}", f"attempt {attempt}") if good else ("odd", "not finite")
        found += [
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3">{_tip(said)}</circle>' for x, y in places
        ]
    return found


def _is_drawn(point: ChartPoint) -> bool:
    return abs(point.value) < 1e100  # neither nan nor infinite, nor so large that arithmetic is


def _tip(text: str) -> str:
    return f"<title>{text}</title>"


def _thinned(points: Sequence[ChartPoint]) -> list[ChartPoint]:
    """Return at most MOST_POINTS points, the last one among them."""
    every = -(-len(points) // MOST_POINTS)
    return list(points) if every <= 1 else list(points[(len(points) - 1) % every :: every])


def _axis(values: list[float], from_zero: bool) -> tuple[float, float, list[float]]:
    low, high = (0.0 if from_zero else min(values)), max(values)
    if high - low < 1e-9 * max(abs(high), abs(low), 1e-300):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    unit = _round_unit((high - low) / 4)
    low, high = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    return low, high, [low + unit * number for number in range(round((high - low) / unit) + 1)]


def _step_axis(steps: list[int]) -> tuple[int, int, list[int]]:
    first, last = min(steps), max(steps)
    unit = max(int(_round_unit((last - first) / 6 or 1)), 1)
    return first, last, list(range(-(-first // unit) * unit, last + 1, unit))


def _round_unit(least: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not below `least`."""
    power = 10.0 ** math.floor(math.log10(max(least, 1e-300)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


REFRESH_SECONDS = 20
MOST_ROWS = 2048  # of a table
MOST_LETTERS = 2000  # of a cell

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--soft:#5d6675;--line:#d9dee6;--ground:#fff;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#9aa4b5;--line:#343c4a;--ground:#14181f;
--bad:#ff8a80}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--ground);max-width:1000px;
margin:24px auto;padding:0 16px}
h1{font-size:21px;margin:0;overflow-wrap:anywhere}h2{font-size:16px;margin:28px 0 6px}
p{margin:4px 0}.soft,.none{color:var(--soft)}.bad{color:var(--bad)}
.state{display:inline-block;padding:1px 10px;border-radius:10px;background:var(--line);font-size:14px}
.state.running,.state.done{background:#1f7a4d;color:#fff}.state.failed,.state.silent{background:#b3261e;color:#fff}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:8px;margin:14px 0}
.tile{border:1px solid var(--line);border-radius:6px;padding:6px 10px}
.tile b{display:block;font-size:19px;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:3px 12px 3px 0;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:anywhere;font-variant-numeric:tabular-nums}th{color:var(--soft);font-weight:normal}
td.why{min-width:240px}td.n,th.n{white-space:nowrap}
.chart{width:100%;height:auto;display:block}.grid{stroke:var(--line)}
.chart text{font-size:11px;fill:var(--soft)}
.chart .y{text-anchor:end}.chart .x{text-anchor:middle}.line{fill:none;stroke-width:1.8}
.fault{stroke:var(--bad);stroke-dasharray:4 3}.odd{fill:var(--bad)}
.key{display:inline-block;width:14px;height:3px;vertical-align:middle;margin:0 5px 0 12px}
""" + "".join(
    f".line.c{n}{{stroke:{colour}}}.dot.c{n}{{fill:{colour}}}.key.c{n}{{background:{colour}}}"
    for n, colour in enumerate(("#2f6fde", "#d9731a", "#1f9d6b", "#a44fc4", "#c23b5a", "#6b7f2a"))
)  # as many as COLOURS

# How old the page is, by the reader's clock: without it a launcher that is gone could not be told.
_SCRIPT = """
const age=document.getElementById("age"),written=Number(age.dataset.at)*1000;
function tell(){const s=Math.max(0,Math.round((Date.now()-written)/1000));
age.textContent=s<120?s+" s ago":s<7200?Math.round(s/60)+" min ago":Math.round(s/3600)+" h ago";
if(age.dataset.live==="1"&&s>180){age.className="bad";
age.textContent+=": the launcher no longer renews this page"}}
tell();setInterval(tell,1000);
"""


def page_of(status: RunStatus) -> str:
    """Return the whole page."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    live = status.is_under_way
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' if live else ""
    name = escape(status.path.rstrip("/").rpartition("/")[2] or status.path)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">{refresh}',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{name}: {escape(status.state)}</title><style>{_STYLE}</style></head><body>",
            _head(status, name),
            _tiles(status),
            _missing(status),
            _charts(status),
            _attempts(status),
            _ranks(status),
            _links(status),
            _checkpoints(status),
            f"<script>{_SCRIPT}</script></body></html>\n",
        ]
    )


def seconds_text(seconds: float | None) -> str:
    """Return a span of time that a person reads."""
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def memory_text(size: int | None) -> str:
    """Return bytes as MiB or GiB."""
    if size is None:
        return "unknown"
    return f"{size / 2**20:,.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"


def number_text(value: float | None) -> str:
    """Return a figure of about four digits; unknown, nan and infinite ones by name."""
    if value is None or not math.isfinite(value):
        return "unknown" if value is None else repr(value)
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else short(value)


def what_happened(one: AttemptStatus) -> str:
    """Return the faults of an attempt, or why it ended, and who was missing."""
    said = "; ".join(one.faults) or ("" if one.why == one.verdict else one.why or "")
    return f"{said} (without {', '.join(one.missing)})".lstrip() if one.missing else said


def _head(status: RunStatus, name: str) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(status.at))
    live, age = int(status.is_under_way), status.age_seconds
    figures = "" if age is None else f" The latest figures were {seconds_text(age)} old then."
    return (
        f'<h1>{name} <span class="state {escape(status.state)}">{escape(status.state)}</span></h1>'
        f'<p>{_cut(status.why)}</p><p class="soft">Written {at}, <span id="age" data-at="{status.at:.0f}"'
        f' data-live="{live}"></span>.{figures}</p>'
    )


def _tiles(status: RunStatus) -> str:
    moment = status.last_moment
    most = max((rank.memory_bytes for rank in status.ranks if rank.memory_bytes is not None), default=None)
    links = [link.hop_seconds for link in status.links]
    newest = status.checkpoints[0] if status.checkpoints else None
    tiles = [
        ("step", "unknown" if moment is None else f"{moment.step:,}"),
        ("loss", number_text(None if moment is None else moment.loss)),
        ("tokens per second", number_text(None if moment is None else moment.tokens_per_second)),
        ("memory, at most", memory_text(most)),
        ("slowest hop", "unknown" if not links else f"{1e3 * max(links):.2f} ms"),
        ("newest checkpoint", "none" if newest is None else f"step {newest.step}"),
        ("attempts", str(len(status.attempts))),
    ]
    cells = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for what, value in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _missing(status: RunStatus) -> str:
    missing = status.attempts[-1].missing if status.attempts else {}
    rows = "".join(f"<li>{_cut(name)}: {_cut(why)}</li>" for name, why in missing.items())
    return f'<h2 class="bad">Hosts that are missing</h2><ul>{rows}</ul>' if rows else ""


def _charts(status: RunStatus) -> str:
    course = status.course
    losses = [ChartPoint(one.attempt, one.step, one.loss) for one in course if one.loss is not None]
    rates = [
        ChartPoint(one.attempt, one.step, one.tokens_per_second)
        for one in course
        if one.tokens_per_second is not None
    ]
    shown = sorted({point.attempt for point in losses})[-COLOURS:]
    keys = "".join(f'<i class="key c{(n - 1) % COLOURS}"></i>attempt {n}' for n in shown)
    faults = [one.last_step for one in status.attempts if one.faults and one.last_step is not None]
    return (
        f'<h2>Loss over steps</h2><p class="soft">{keys}</p>{chart("Loss over steps", losses, faults)}'
        f"<h2>Tokens per second over steps</h2>{chart('Tokens per second', rates, faults, from_zero=True)}"
    )


def _attempts(status: RunStatus) -> str:
    heads = ["attempt", "began", "took", "ranks", "ring", "from", "last step", "ended", "what happened"]
    rows = [_attempt(one, status.at) for one in reversed(status.attempts)]
    return f"<h2>Attempts and faults</h2>{_table(heads, rows, wide='what happened')}"


def _attempt(one: AttemptStatus, now: float) -> list[str]:
    began = "" if one.started_at is None else time.strftime("%m-%d %H:%M:%S", time.gmtime(one.started_at))
    took = None if one.started_at is None else (one.ended_at or now) - one.started_at
    return [
        str(one.number), began, seconds_text(took), _or_blank(one.world_size),
        _or_blank(one.sequence_parallel_size), one.checkpoint or "the start", _or_blank(one.last_step),
        one.verdict or "under way", what_happened(one),
    ]  # fmt: skip


def _ranks(status: RunStatus) -> str:
    heads = ["rank", "host", "state", "step", "step takes", "memory, at most", "figures are from"]
    rows = [_rank(one) for one in status.ranks[:MOST_ROWS]]
    return f"<h2>Ranks</h2>{_table(heads, rows)}{_left_out(status.ranks)}"


def _rank(one: RankStatus) -> list[str]:
    takes = "" if one.step_seconds is None else f"{1e3 * one.step_seconds:,.0f} ms"
    age = "never" if one.age_seconds is None else f"{seconds_text(one.age_seconds)} before"
    memory = "" if one.memory_bytes is None else memory_text(one.memory_bytes)
    return [str(one.rank), one.host or "", one.state, _or_blank(one.step), takes, memory, age]


def _links(status: RunStatus) -> str:
    if not status.links:
        return (
            '<h2>Hop times by link</h2><p class="none">Nothing is known: a ring of one rank, no step so'
            " far, or a GPU, whose host does not wait for messages.</p>"
        )
    heads = ["from rank", "to rank", "host", "a hop takes", "of which waiting", "payload of a hop"]
    rows = [_link(one) for one in status.links[:MOST_ROWS]]
    return f"<h2>Hop times by link, the slowest first</h2>{_table(heads, rows)}{_left_out(status.links)}"


def _link(one: LinkStatus) -> list[str]:
    hop, wait = f"{1e3 * one.hop_seconds:.2f} ms", f"{1e3 * one.wait_seconds:.2f} ms"
    return [str(one.source), str(one.to), one.between, hop, wait, f"{one.payload_bytes / 1024:,.0f} KiB"]


def _checkpoints(status: RunStatus) -> str:
    rows = [
        [
            one.tag, _or_blank(one.step), f"{seconds_text(status.at - one.saved_at)} before",
            memory_text(one.total_bytes), "yes" if one.is_latest else "",
        ]
        for one in status.checkpoints
    ]  # fmt: skip
    if not rows:
        return '<h2>Checkpoints</h2><p class="none">None is known.</p>'
    return f"<h2>Checkpoints</h2>{_table(['tag', 'step', 'saved', 'size', 'loaded next'], rows)}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], wide: str = "") -> str:
    kinds = ["why" if head == wide else "n" for head in heads]
    first = "".join(
        f'<th class="{kind}">{escape(head)}</th>' for kind, head in zip(kinds, heads, strict=True)
    )
    others = (
        "".join(f'<td class="{kind}">{_cut(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))
        for row in rows
    )
    body = "".join(f"<tr>{cells}</tr>" for cells in others)
    return f'<div class="wide"><table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'


def _left_out(found: Sequence[object]) -> str:
    more = len(found) - MOST_ROWS
    return f'<p class="soft">{more:,} more are in ds-ring status --json.</p>' if more > 0 else ""


def _cut(text: str) -> str:
    """Return text of any origin as HTML; letters that a browser does not show are left out."""
    text = text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} ..."
    return escape("".join(sign if sign.isprintable() or sign == "\n" else " " for sign in text))


def _or_blank(value: object) -> str:
    return "" if value is None else str(value)


# The launcher renews `launcher.json` and `status.html` each minute, and after every event of the run. An
# error here is printed once and ends no run.

RENEW_SECONDS = 60.0
_LOOK_SECONDS = 1.0  # between two looks at attempts.jsonl


@contextmanager
def page_kept(run: Path) -> Iterator[None]:
    """Keep RUN/status.html new inside the block, and write it a last time at the end."""
    keeper = _Keeper(run)
    thread = threading.Thread(target=keeper.work, name="status page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        keeper.ended.set()
        thread.join(timeout=10.0)  # a folder that does not answer must not hold the launcher
        if not thread.is_alive():
            keeper.renew()


def write_page(run: Path) -> None:
    """Write RUN/status.html at once: a browser sees the old page or the new one.

    Raises:
        RingConfigError: that is no folder of a run.
        OSError: the page could not be written.
    """
    replace_text(run / PAGE, page_of(read_run(run)))


class _Keeper:
    def __init__(self, run: Path) -> None:
        self.run, self.ended, self._said = run, threading.Event(), False

    def work(self) -> None:
        """Renew the page until the run has ended."""
        waited, seen = RENEW_SECONDS, 0
        while True:
            size = self._events_bytes()
            if waited >= RENEW_SECONDS or size != seen:
                waited, seen = 0.0, size
                self.renew()
            if self.ended.wait(_LOOK_SECONDS):
                return
            waited += _LOOK_SECONDS

    def renew(self) -> None:
        try:
            write_launcher(self.run)
            write_page(self.run)
        except RingConfigError:  # no attempt has begun
            pass
        except Exception as error:  # the page is worth no run
            if not self._said:
                self._said = True
                say(f"the status page cannot be written: {type(error).__name__}: {error}")

    def _events_bytes(self) -> int:
        try:
            return (self.run / ATTEMPTS).stat().st_size
        except OSError:
            return 0

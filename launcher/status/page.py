"""Make the status page of a run: one HTML file that needs no network and shows the contents of files as text.

Its only script, known to the page's content security policy by its digest, shows the age of the page.
"""

from __future__ import annotations

import base64
import hashlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ds_ring.errors import RingConfigError
from ds_ring.written_files import replace_text

from ..run.process import say
from ..run.run_folder import ATTEMPTS, PAGE
from .run_status import RunStatus, read_run
from .table import StatusTable, memory_text, number_text, plain, rate_text, seconds_text, tables_of

# The course of a run is inline SVG: one figure over optimizer steps, a line for each attempt.

WIDTH, HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 18, 14, 30
MAX_POINTS = 1500  # of a chart: more than it has columns of pixels
COLOURS = ("#2f6fde", "#d9731a", "#1f9d6b", "#a44fc4", "#c23b5a", "#6b7f2a")  # of attempts, in turn


class ChartPoint(NamedTuple):
    """Hold a value of an attempt after a step; nan and infinite ones are marked at the top."""

    attempt: int
    step: int
    value: float

    @property
    def is_drawn(self) -> bool:
        """Return whether it is finite, and not so large that arithmetic with it is not."""
        return abs(self.value) < 1e100


def chart(
    title: str,
    points: Sequence[ChartPoint],
    fault_steps: Sequence[int] = (),
    from_zero: bool = False,
    first_step: int | None = None,
) -> str:
    """Return an <svg> element.

    Args:
        title: plain text.
        points: in the order in which they happened.
        fault_steps: the steps in which attempts failed: a dashed line each.
        from_zero: the axis begins at 0.
        first_step: where the axis of steps begins; by default that of the first point.
    """
    every = max(-(-len(points) // MAX_POINTS), 1)
    points = points[(len(points) - 1) % every :: every]  # the last one among them
    values = [point.value for point in points if point.is_drawn]
    if not values:
        return f'<p class="none">{escape(title)}: nothing is known yet.</p>'
    values_at = _ticks(0.0 if from_zero else min(values), max(values), 4)
    steps = [point.step for point in points]
    first_step = min(steps) if first_step is None else min(first_step, *steps)
    steps_at = _ticks(first_step, max(steps), 6, least_unit=1)

    def x_of(step: float) -> float:
        share = (step - steps_at[0]) / (steps_at[-1] - steps_at[0])
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * share

    def y_of(point: ChartPoint) -> float:
        share = (point.value - values_at[0]) / (values_at[-1] - values_at[0]) if point.is_drawn else 1.0
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * share

    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
    ]
    for value in values_at:
        y = y_of(ChartPoint(0, 0, value))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="y" x="{_LEFT - 6}" y="{y + 4:.1f}">{_short(value)}</text>')
    for step in steps_at:
        parts.append(f'<text class="x" x="{x_of(step):.1f}" y="{HEIGHT - 10}">{step:,.0f}</text>')
    for step in fault_steps:
        if steps_at[0] <= step <= steps_at[-1]:
            x = x_of(step)
            parts.append(
                f'<line class="fault" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">'
                f"<title>a fault in step {step:,}</title></line>"
            )
    for (attempt, drawn), run in groupby(points, key=lambda point: (point.attempt, point.is_drawn)):
        places = [f"{x_of(point.step):.1f},{y_of(point):.1f}" for point in run]
        colour = f"c{(attempt - 1) % len(COLOURS)}"
        tip = f"<title>attempt {attempt}{'' if drawn else ': not finite'}</title>"
        if drawn and len(places) > 1:
            parts.append(f'<polyline class="line {colour}" points="{" ".join(places)}">{tip}</polyline>')
        else:
            kind = f"dot {colour}" if drawn else "odd"
            centres = (place.split(",") for place in places)
            parts += [f'<circle class="{kind}" cx="{x}" cy="{y}" r="3">{tip}</circle>' for x, y in centres]
    return "".join([*parts, "</svg>"])


def _ticks(low: float, high: float, count: int, least_unit: float = 0.0) -> list[float]:
    """Return about `count` round numbers, evenly spaced, of which the first and the last enclose the range.

    The spacing is 1, 2 or 5 times a power of ten.
    """
    if high - low < 1e-9 * max(abs(high), abs(low), 1e-300):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    least = max((high - low) / count, least_unit, 1e-300)
    power = 10.0 ** math.floor(math.log10(least))
    unit = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    first, last = math.floor(low / unit), math.ceil(high / unit)
    return [unit * number for number in range(first, last + 1)]


def _short(value: float) -> str:
    """Return a number of about four digits."""
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.2e}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


REFRESH_SECONDS = 20
MAX_ROWS = 2048  # of a table

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
.tile{max-width:200px;border:1px solid var(--line);border-radius:6px;padding:6px 10px}
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
    for n, colour in enumerate(COLOURS)
)

# How old the page is, by the reader's clock: without it a missing launcher would not be visible.
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
    live, state = status.is_under_way, escape(status.state)
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' if live else ""
    name = escape(status.path.rstrip("/").rpartition("/")[2] or status.path)
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(status.at))
    age = status.age_seconds
    figures = "" if age is None else f" The latest figures were {seconds_text(age)} old then."
    missing = status.attempts[-1].missing if status.attempts else {}
    gone = "".join(f"<li>{_html(f'{name}: {why}')}</li>" for name, why in missing.items())
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">{refresh}',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{name}: {state}</title><style>{_STYLE}</style></head><body>",
            f'<h1>{name} <span class="state {state}">{state}</span></h1><p>{_html(status.why)}</p>',
            f'<p class="soft">Written {written}, <span id="age" data-at="{status.at:.0f}"'
            f' data-live="{int(live)}"></span>.{figures}</p>',
            _tiles(status),
            f'<h2 class="bad">Hosts that are missing</h2><ul>{gone}</ul>' if gone else "",
            _charts(status),
            *(_table(one) for one in tables_of(status, MAX_ROWS)),
            f"<script>{_SCRIPT}</script></body></html>\n",
        ]
    )


def _tiles(status: RunStatus) -> str:
    """Return a box for each figure that is known."""
    moment = status.last_moment
    most = max((rank.memory_bytes for rank in status.ranks if rank.memory_bytes is not None), default=None)
    newest = status.checkpoints[0].step if status.checkpoints else None
    tiles = {
        "step": "" if moment is None else f"{moment.step:,}",
        "loss": "" if moment is None or moment.loss is None else number_text(moment.loss),
        "tokens per second": rate_text(moment),
        "memory, at most": "" if most is None else memory_text(most),
        "slowest hop": f"{1e3 * status.links[0].hop_seconds:.2f} ms" if status.links else "",
        "newest checkpoint": "" if newest is None else f"step {newest:,}",
        "attempt" if len(status.attempts) == 1 else "attempts": str(len(status.attempts)),
    }
    cells = (
        f'<div class="tile"><b>{_html(value)}</b><span>{what}</span></div>'
        for what, value in tiles.items()
        if value
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _charts(status: RunStatus) -> str:
    losses = [ChartPoint(one.attempt, one.step, one.loss) for one in status.course if one.loss is not None]
    rates = [
        ChartPoint(one.attempt, one.step, one.tokens_per_second)
        for one in status.course
        if one.tokens_per_second is not None
    ]
    shown = sorted({point.attempt for point in losses})[-len(COLOURS) :]
    keys = "".join(f'<i class="key c{(n - 1) % len(COLOURS)}"></i>attempt {n}' for n in shown)
    faults = [one.last_step for one in status.attempts if one.faults and one.last_step is not None]
    first = min((one.step for one in status.course), default=None)  # of both charts: no rate is known of it
    loss = chart("Loss over steps", losses, faults, first_step=first)
    rate = chart("Tokens per second", rates, faults, from_zero=True, first_step=first)
    return (
        f'<h2>Loss over steps</h2><p class="soft">{keys}</p>{loss}<h2>Tokens per second over steps</h2>{rate}'
    )


def _table(table: StatusTable) -> str:
    if not table.rows:
        return f'<h2>{table.title}</h2><p class="none">{table.none}</p>'
    heads = table.heads.split(", ")
    kinds = ["why" if head == "what happened" else "n" for head in heads]
    first = "".join(f'<th class="{kind}">{head}</th>' for kind, head in zip(kinds, heads, strict=True))
    body = ""
    for row in table.rows:
        cells = (f'<td class="{kind}">{_html(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))
        body += f"<tr>{''.join(cells)}</tr>"
    left = f'<p class="soft">{table.left_out:,} more are in ds-ring status --json.</p>' * bool(table.left_out)
    return (
        f'<h2>{table.title}</h2><div class="wide"><table><thead><tr>{first}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{left}"
    )


def _html(text: str) -> str:
    return escape(plain(text))


# The launcher renews `status.html` each minute, and after every event of the run. An error here is printed
# once and ends no run.

RENEW_SECONDS = 60.0
_LOOK_SECONDS = 1.0  # between two looks at attempts.jsonl


@contextmanager
def page_kept(run: Path) -> Iterator[None]:
    """Keep RUN/status.html new inside the block, and write it a last time at the end."""
    ended, reported = threading.Event(), set[str]()

    def renew() -> None:
        try:
            write_page(run)
        except RingConfigError:  # no attempt has begun
            pass
        except Exception as error:  # the page is worth no run
            if not reported:
                say(f"the status page cannot be written: {type(error).__name__}: {error}")
            reported.add("failed")

    def work() -> None:
        due, seen = 0.0, -1
        while True:
            try:
                size = (run / ATTEMPTS).stat().st_size
            except OSError:
                size = 0
            if time.monotonic() >= due or size != seen:
                due, seen = time.monotonic() + RENEW_SECONDS, size
                renew()
            if ended.wait(_LOOK_SECONDS):
                return

    thread = threading.Thread(target=work, name="status page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=10.0)  # a folder that does not answer must not hold the launcher
        if not thread.is_alive():
            renew()


def write_page(run: Path) -> None:
    """Write RUN/status.html at once: a browser sees the old page or the new one.

    Raises:
        RingConfigError: that is no folder of a run.
        OSError: the page could not be written.
    """
    replace_text(run / PAGE, page_of(read_run(run)))

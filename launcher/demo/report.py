"""Write the results of `ds-ring demo` as one HTML file: no script, no other files."""

from __future__ import annotations

import base64
import html
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from ds_ring.measure.schedule_text import format_schedule
from ds_ring.schedule.lowering import lower_pass
from ds_ring.schedule.plan import Plan
from ds_ring.written_files import replace_text

from ..profile.pictures import draw_timeline
from ..profile.plan_picture import draw_plan
from .lm_compare import Comparison
from .lm_report import LAST_STEPS, MIB, Report, draw
from .measure import DRAWN_RING, DemoRings

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 1rem }
h1 { margin-bottom: 0 } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc }
img { max-width: 100%; height: auto } table { border-collapse: collapse }
th, td { padding: .25rem .8rem; text-align: left; border-bottom: 1px solid #ddd } td.n { text-align: right }
pre { background: #f6f6f4; padding: .8rem; overflow-x: auto; font-size: 12px; line-height: 1.35 }
.yes { color: #00704a; font-weight: 600 } .no { color: #b00020; font-weight: 600 }
.small { color: #666; font-size: 14px }
"""


def write_report(path: Path, log: Mapping[str, Any], found: DemoRings, ds_config: Mapping[str, Any]) -> Path:
    """Write the report and return its path.

    Args:
        path: of the HTML file.
        log: `log.json` of the training, a `Report` of lm_report.py.
        found: rings measured on this machine.
        ds_config: the DeepSpeed JSON of the training.
    """
    tokens, made = found.job.sizes.tokens, Comparison(**log["comparison"])
    report = Report(log["title"], log["losses"], peak_mib=log["peak_mib"], comparison=made)
    title = f"causal attention, {tokens:,} tokens"
    pictures = {
        "the loss of each training step, and the memory of each rank": partial(draw, report),
        "which rank and hop computes which block of the causal mask, and what each rank receives":
            partial(draw_plan, found.plan, title, max(16, tokens // 128)),
        "when each rank computes, sends and waits": partial(draw_timeline, [found.timeline], found.job.title),
    }  # fmt: skip
    replace_text(path, _page(report, found, ds_config, [_image(*one) for one in pictures.items()]))
    return path


def _image(text: str, drawn: Callable[[Path], Any]) -> str:
    """Return an `img` element that holds a picture."""
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        drawn(Path(file.name))
        data = base64.b64encode(Path(file.name).read_bytes()).decode()
    return f'<img alt="{text}" src="data:image/png;base64,{data}">'


def _page(report: Report, found: DemoRings, ds_config: Mapping[str, Any], pictures: Sequence[str]) -> str:
    schedule = format_schedule(lower_pass(found.plan.rank(1).classes, found.plan.group, backward=False))
    sizes = found.job.sizes
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>ds_ring demo</title><style>{_STYLE}</style></head><body>
<h1>ds_ring demo</h1>
<p class="small">{html.escape(report.title)}. Everything on this page was measured on this machine's CPU.</p>

<h2>One process and the ring agree</h2>
{_comparison(report.comparison)}

<h2>Loss</h2>
<p>A byte-level Llama with random weights learns Python's standard library. Each sequence is sharded over
{len(report.peak_mib)} ranks. {_training(report)} Each step has samples of its own. The loss of the
comparison above is that of other samples, after the last step.</p>
{pictures[0]}

<h2>Memory against ring size</h2>
<p>Causal attention, {sizes.tokens:,} tokens, {sizes.query_heads} heads of {sizes.head_dim}, float32, forward
and backward, on real gloo ranks of this machine: the peak of the rank that needs most.</p>
{_table(_memory(found))}

<h2>The plan: who computes what, and what is sent</h2>
<p>The causal mask over {DRAWN_RING} ranks, in the order of the {html.escape(found.plan.layout.name)} layout.
A colour is the hop at which a block is computed. K/V travel from each rank to the one {_way(found.plan)} it.
A white block is hidden by the mask: it is neither computed nor sent.</p>
{pictures[1]}

<h2>The schedule of rank 1, and what each rank did</h2>
<p>A line is a batch: all its sends and receives are posted at once, and the rank computes meanwhile.
<code>K2[1024]</code> are keys and values of 1,024 tokens of rank 2; <code>b3</code> is a buffer.</p>
<pre>{html.escape(schedule)}</pre>
{pictures[2]}

<h2>What was run</h2>
<pre>{html.escape(json.dumps(ds_config, indent=2))}</pre>
<p class="small">torch {metadata.version("torch")}, deepspeed {metadata.version("deepspeed")}</p>
</body></html>
"""


def _training(report: Report) -> str:
    """Return which training loss is which: of one step, and a mean of several."""
    first, last = report.training_loss
    steps = min(len(report.losses), LAST_STEPS)
    return f"The training loss is {first:.3f} in step 1, and {last:.3f} on average of the last {steps} steps."


def _way(plan: Plan) -> str:
    """Return which neighbour a rank sends to."""
    return "before" if plan.classes[0].directions[0].sign < 0 else "after"


def _memory(found: DemoRings) -> dict[str, str]:
    """Return the measured peaks in MiB, by ring size."""
    gathered = found.peaks_bytes["all_gather"]
    rows = {}
    for size, peak in found.peaks_bytes["ring"].items():
        name = "1 rank" if size == 1 else f"{size} ranks"
        rows[name] = f"{peak / MIB:.0f} MiB; with an all-gather {gathered[size] / MIB:.0f} MiB"
    return rows


def _comparison(found: Comparison | None) -> str:
    """Return the table of the comparison with one process, and whether it is exact."""
    assert found is not None, "the demo compares"
    words = "exact: rounding explains" if found.exact else "NOT exact: rounding does not explain"
    style = "yes" if found.exact else "no"
    return f'<p class="{style}">{words} all differences</p>{_table(found.rows())}'


def _table(rows: Mapping[str, str]) -> str:
    row = '<tr><td>{}</td><td class="n">{}</td></tr>'
    cells = (row.format(html.escape(name), html.escape(value)) for name, value in rows.items())
    return f"<table>{''.join(cells)}</table>"

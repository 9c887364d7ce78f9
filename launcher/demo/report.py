"""Write the results of `ds-ring demo` as one HTML file: no script, no other files."""

from __future__ import annotations

import base64
import html
import json
import platform
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ds_ring.integrations.written_files import replace_text
from ds_ring.schedule.lowering import lower_pass
from ds_ring.schedule.steps import format_schedule

from ..profile.pictures import draw_timeline, new_figure, save_figure
from ..profile.plan_picture import draw_plan
from .lm_report import MIB, Report, draw_losses
from .measure import DRAWN_RING, DemoRings

_PACKAGES = ("ds_ring", "torch", "deepspeed", "transformers", "numpy")
_COLOURS = {"ring": "#0072b2", "all_gather": "#d55e00"}  # colour-blind safe (Okabe and Ito 2008)
_NAMES = {"ring": "ring: K/V travel, each rank holds its share", "all_gather": "all-gather of K/V"}

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
    with tempfile.TemporaryDirectory(prefix="ds-ring-") as folder:
        pictures = dict(_pictures(Path(folder), log, found))
    replace_text(path, _page(log, found, ds_config, pictures))
    return path


def _pictures(folder: Path, log: Mapping[str, Any], found: DemoRings) -> Iterator[tuple[str, str]]:
    """Draw each picture; yield its name and an `img` element that holds it."""
    alternatives = {
        "loss": "the loss of each training step",
        "memory": "peak tensor memory of a rank against the ring size, for a ring and an all-gather",
        "plan": "which rank and hop computes which block of the causal mask, and what each rank receives",
        "timeline": "when each rank computes, sends and waits",
    }
    figure = new_figure(10, 3.4)
    draw_losses(figure.subplots(), Report("", log["losses"]))
    save_figure(figure, folder / "loss.png")
    _draw_memory(found, folder / "memory.png")
    tokens = found.job.sizes.tokens
    draw_plan(found.plan, f"causal attention, {tokens:,} tokens", max(16, tokens // 128), folder / "plan.png")
    draw_timeline([found.timeline], found.job.title, folder / "timeline.png")
    for name, text in alternatives.items():
        data = base64.b64encode((folder / f"{name}.png").read_bytes()).decode()
        yield name, f'<img alt="{text}" src="data:image/png;base64,{data}">'


def _draw_memory(found: DemoRings, path: Path) -> None:
    """Draw measured peaks by ring size, and the line of 1/P."""
    figure = new_figure(10, 4.2)
    axes = figure.subplots()
    for transport, peaks in found.peaks_bytes.items():
        sizes_mib = [peak / MIB for peak in peaks.values()]
        axes.plot(list(peaks), sizes_mib, "o-", color=_COLOURS[transport], label=_NAMES[transport])
        for ring_size, size_mib in zip(peaks, sizes_mib, strict=True):
            axes.annotate(f"{size_mib:.0f}", (ring_size, size_mib), (4, 6), textcoords="offset points")
    sizes = list(found.peaks_bytes["ring"])
    alone = found.peaks_bytes["ring"][1] / MIB
    axes.plot(sizes, [alone / size for size in sizes], "--", color="black", label="1/P")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="ring size P", ylabel="peak tensor memory of a rank, MiB")
    axes.set_ylim(0, 1.12 * max(max(peaks.values()) for peaks in found.peaks_bytes.values()) / MIB)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def _page(
    log: Mapping[str, Any], found: DemoRings, ds_config: Mapping[str, Any], pictures: Mapping[str, str]
) -> str:
    schedule = format_schedule(lower_pass(found.plan.rank(1).classes, found.plan.group, backward=False))
    sizes = found.job.sizes
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>ds_ring demo</title><style>{_STYLE}</style></head><body>
<h1>ds_ring demo</h1>
<p class="small">{html.escape(log["title"])}. Everything on this page was measured on this machine's CPU.</p>

<h2>One process and the ring agree</h2>
{_comparison(log["comparison"])}

<h2>Loss</h2>
<p>A byte-level Llama with random weights learns Python's standard library. Each sequence is sharded over
{len(log["peak_mib"])} ranks. The loss goes from {log["losses"][0]:.3f} to {log["losses"][-1]:.3f}.</p>
{pictures["loss"]}

<h2>Memory against ring size</h2>
<p>Causal attention, {sizes.tokens:,} tokens, {sizes.query_heads} heads of {sizes.head_dim}, float32, forward
and backward, on real gloo ranks of this machine: the peak of the rank that needs most.</p>
{pictures["memory"]}

<h2>The plan: who computes what, and what is sent</h2>
<p>The causal mask over {DRAWN_RING} ranks, in the order of the {html.escape(found.plan.layout.name)} layout.
A colour is the hop at which a block is computed. A white block is hidden by the mask: it is neither computed
nor sent.</p>
{pictures["plan"]}

<h2>The schedule of rank 1, and what each rank did</h2>
<p>A line is a batch: all its sends and receives are posted at once, and the rank computes meanwhile.
<code>K2[1024]</code> are keys and values of 1,024 tokens of rank 2; <code>b3</code> is a buffer.</p>
<pre>{html.escape(schedule)}</pre>
{pictures["timeline"]}
<p class="small">The ranks share the cores of one machine, so that this picture shows the order of events, and
no speed-up.</p>

<h2>What was run</h2>
<pre>{html.escape(json.dumps(ds_config, indent=2))}</pre>
{_table(_versions())}
</body></html>
"""


def _comparison(comparison: Mapping[str, Any]) -> str:
    """Return the table of the comparison with one process, and whether it is exact."""
    words = "exact: rounding explains" if comparison["exact"] else "NOT exact: rounding does not explain"
    number = comparison["gradients"]
    rows = {
        "loss on one process": f"{comparison['loss_alone']:.6f}",
        "loss on the ring, same weights and batch": f"{comparison['loss_on_ring']:.6f}",
        "difference": f"{abs(comparison['loss_on_ring'] - comparison['loss_alone']):.1e}",
        f"largest difference of {number} gradients, each by itself, over its norm":
            f"{comparison['gradient_difference']:.1e} ({comparison['worst']})",
        "tensor memory of forward + backward, one process": f"{comparison['alone_mib']:.0f} MiB",
    }  # fmt: skip
    rows |= {f"the same, rank {rank}": f"{mib:.0f} MiB" for rank, mib in enumerate(comparison["ranks_mib"])}
    style = "yes" if comparison["exact"] else "no"
    return f'<p class="{style}">{words} all differences</p>{_table(rows)}'


def _versions() -> dict[str, str]:
    versions = {package: metadata.version(package) for package in _PACKAGES}
    return versions | {"Python": platform.python_version(), "machine": platform.platform(terse=True)}


def _table(rows: Mapping[str, str]) -> str:
    row = '<tr><td>{}</td><td class="n">{}</td></tr>'
    cells = (row.format(html.escape(name), html.escape(value)) for name, value in rows.items())
    return f"<table>{''.join(cells)}</table>"

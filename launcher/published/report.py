"""Print published figures beside the model's, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.table import Table as RichTable

from ..tables import console
from .evaluate import CLOSE, Prediction, Result, share
from .packed import STAGE_SHARDS, PackedRow, Pair
from .table import Table


def as_json(
    table: Table, results: Sequence[Result], predictions: Sequence[Prediction], packed: Sequence[PackedRow]
) -> str:
    """Return one object."""
    sources = {name: source.model_dump(mode="json") for name, source in table.sources.items()}
    rows = [result._asdict() | {"ratio": result.ratio, "holds": result.holds} for result in results]
    document = {
        "sources": sources,
        "share_within_a_tenth": share(results),
        "published": rows,
        "ds_ring": [prediction._asdict() for prediction in predictions],
        "packed": [row._asdict() for row in packed],
    }
    return json.dumps(document, indent=2)


def print_report(
    table: Table, results: Sequence[Result], predictions: Sequence[Prediction], packed: Sequence[PackedRow]
) -> None:
    """Print a table for each source, ds_ring's figures, and the packed record."""
    out = console()
    for name in dict.fromkeys(result.source for result in results):
        source, rows = table.sources[name], [result for result in results if result.source == name]
        grid = RichTable("method", "setting", "GPUs", "published", "model", "ratio", title_justify="left")
        grid.title = f"{source.what}, {source.date}: {share(rows):.0%} within {CLOSE:.0%}"
        for result in rows:
            mark = "" if result.holds else " off"
            setting = f"{result.setting} {result.quantity}"
            grid.add_row(
                result.method,
                setting,
                str(result.devices),
                _figure(result.published),
                _figure(result.model),
                f"{result.ratio:.2f}{mark}",
            )
        out.print(grid)
        out.print(source.link)
        for method, setting, why in dict.fromkeys((o.method, o.setting, o.why) for o in rows if not o.holds):
            out.print(f"off: {method}, {setting}: {why}")
    out.print(
        f"{len(results)} published figures, {share(results):.0%} within {CLOSE:.0%};"
        " no constant is fitted to a row"
    )
    grid = RichTable("setting", "GPUs", "figure", "ds_ring", "best published", title_justify="left")
    grid.title = "ds_ring, computed, not measured, where the peers' rows hold"
    for setting, devices, quantity, model, best, _ in predictions:
        grid.add_row(setting, str(devices), quantity, _figure(model), best)
    out.print(grid)
    out.print(_make_packed_table(packed))
    out.print(describe_limits(packed))


def _make_packed_table(packed: Sequence[PackedRow]) -> RichTable:
    grid = RichTable("packed, H100", *(f"{row.devices:,}" for row in packed), title_justify="left")
    grid.title = (
        "64:8 heads, head_dim 128, bf16, 8 Ki tokens a GPU; forward/backward, TFLOPS a GPU;"
        " K/V of an all-gather's"
    )
    rates = {
        "Magi, published": "published",
        "ring, computed": "ring",
        f"stages of {STAGE_SHARDS}": "staged",
        "direct, computed": "direct",
        "kernel alone": "kernel",
    }
    for name, field in rates.items():
        pairs = (getattr(row, field) for row in packed)
        grid.add_row(name, *("" if pair is None else f"{pair[0]:.0f}/{pair[1]:.0f}" for pair in pairs))
    grid.add_row("work, max/mean", *(f"{row.imbalance:.3f}" for row in packed))
    parts = {
        "K/V read": "needed",
        "K/V sent": "sent",
        "waiting": "exposed",
        "hops' fixed cost": "fixed",
        "merging": "merging",
    }
    for name, field in parts.items():
        grid.add_row(name, *(f"{getattr(row, field):.0%}" for row in packed))
    return grid


def describe_limits(packed: Sequence[PackedRow]) -> str:
    """Return what larger rings keep of the smallest one's TFLOPS, and what they lose it to."""
    first, lines = packed[0], []
    for row in packed[1:] or packed:
        magi = ""
        if row.published is not None and first.published is not None:
            magi = f" (MagiAttention {_compare(row.published, first.published)})"
        ring_both, staged_both, direct_both = (
            f"{_both_passes(pair) / _both_passes(first.ring):.0%}"
            for pair in (row.ring, row.staged, row.direct)
        )
        lines.append(
            f"{row.devices:,} GPUs: the ring keeps {_compare(row.ring, first.ring)} of its figures at"
            f" {first.devices}, {ring_both} of both passes together{magi}:"
            f" {row.exposed:.0%} of its time it waits, {row.fixed:.0%} goes to hops' fixed costs,"
            f" {row.merging:.0%} to merges; stages of {STAGE_SHARDS} keep"
            f" {_compare(row.staged, first.staged)}, {staged_both} together; a direct exchange keeps"
            f" {_compare(row.direct, first.direct)}, {direct_both} together"
        )
    return "\n".join(lines)


def _compare(pair: Pair, smallest: Pair) -> str:
    return " and ".join(f"{now / then:.0%}" for now, then in zip(pair, smallest, strict=True))


def _both_passes(pair: Pair) -> float:
    """Return the TFLOPS of both passes, of which the backward one has 2.5 times the FLOPs."""
    forward, backward = pair
    return 3.5 / (1 / forward + 2.5 / backward)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"

"""Print published figures beside the model's, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.table import Table as RichTable

from ..tables import console
from .evaluate import CLOSE, Result, share
from .table import Table


def as_json(table: Table, results: Sequence[Result]) -> str:
    """Return one object."""
    sources = {name: source.model_dump(mode="json") for name, source in table.sources.items()}
    rows = [result._asdict() | {"ratio": result.ratio, "holds": result.holds} for result in results]
    document = {"sources": sources, "share_within_a_tenth": share(results), "published": rows}
    return json.dumps(document, indent=2)


def print_report(table: Table, results: Sequence[Result]) -> None:
    """Print a table for each source."""
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


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"

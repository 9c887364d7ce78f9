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
    sources = {name: one.model_dump(mode="json") for name, one in table.sources.items()}
    rows = [one._asdict() | {"ratio": one.ratio, "holds": one.holds} for one in results]
    document = {"sources": sources, "share_within_a_tenth": share(results), "published": rows}
    return json.dumps(document, indent=2)


def print_report(table: Table, results: Sequence[Result]) -> None:
    """Print a table for each source."""
    out = console()
    for name in dict.fromkeys(one.source for one in results):
        source, rows = table.sources[name], [one for one in results if one.source == name]
        made = RichTable("method", "setting", "GPUs", "published", "model", "ratio", title_justify="left")
        made.title = f"{source.what}, {source.date}: {share(rows):.0%} within {CLOSE:.0%}"
        for one in rows:
            mark = "" if one.holds else " off"
            setting = f"{one.setting} {one.quantity}"
            made.add_row(
                one.method,
                setting,
                str(one.devices),
                _figure(one.published),
                _figure(one.model),
                f"{one.ratio:.2f}{mark}",
            )
        out.print(made)
        out.print(source.link)
        for method, setting, why in dict.fromkeys((o.method, o.setting, o.why) for o in rows if not o.holds):
            out.print(f"off: {method}, {setting}: {why}")
    out.print(
        f"{len(results)} published figures, {share(results):.0%} within {CLOSE:.0%};"
        " no constant is fitted to a row"
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"

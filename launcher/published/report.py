"""Print published figures beside the model's, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.table import Table as RichTable

from ..tables import console
from .evaluate import CLOSE, Prediction, Result, share
from .packed import PackedRow
from .table import Table


def as_json(
    table: Table, results: Sequence[Result], own: Sequence[Prediction], packed: Sequence[PackedRow]
) -> str:
    """Return one object."""
    sources = {name: one.model_dump(mode="json") for name, one in table.sources.items()}
    rows = [one._asdict() | {"ratio": one.ratio, "holds": one.holds} for one in results]
    return json.dumps(
        {
            "sources": sources,
            "share_within_a_tenth": share(results),
            "published": rows,
            "ds_ring": [one._asdict() for one in own],
            "packed": [one._asdict() for one in packed],
        },
        indent=2,
    )


def print_report(
    table: Table, results: Sequence[Result], own: Sequence[Prediction], packed: Sequence[PackedRow]
) -> None:
    """Print a table for each source, ds_ring's figures, and the packed record."""
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
    made = RichTable("setting", "GPUs", "figure", "ds_ring", "best published", title_justify="left")
    made.title = "ds_ring, computed, not measured, where the peers' rows hold"
    for prediction in own:
        made.add_row(
            prediction.setting,
            str(prediction.devices),
            prediction.quantity,
            _figure(prediction.model),
            prediction.best_published,
        )
    out.print(made)
    out.print(_packed_table(packed))
    out.print(limits(packed))


def _packed_table(packed: Sequence[PackedRow]) -> RichTable:
    made = RichTable("packed documents, H100", *(str(one.devices) for one in packed), title_justify="left")
    made.title = "64:8 heads, head_dim 128, bf16, 8 Ki tokens a GPU; forward / backward, TFLOPS a GPU"
    both = {
        "MagiAttention, published": [one.published for one in packed],
        "ds_ring's ring, computed": [one.ring for one in packed],
        "direct exchange, not built": [one.direct for one in packed],
        "kernel alone": [one.kernel for one in packed],
    }
    for name, pairs in both.items():
        made.add_row(name, *(f"{forward:.0f} / {backward:.0f}" for forward, backward in pairs))
    made.add_row("work, max / mean", *(f"{one.imbalance:.3f}" for one in packed))
    parts = {
        "K/V read, of an all-gather": "needed",
        "K/V sent by the ring": "sent",
        "waiting for messages": "exposed",
        "posting, starting kernels": "fixed",
        "merging": "merging",
    }
    for name, field in parts.items():
        made.add_row(name, *(f"{getattr(one, field):.0%}" for one in packed))
    return made


def limits(packed: Sequence[PackedRow]) -> str:
    """Return what a larger ring keeps of the smallest one's TFLOPS, and what it loses it to."""
    first, last = packed[0], packed[-1]
    kept = [f"{last.ring[way] / first.ring[way]:.0%}" for way in (0, 1)]
    direct = [f"{last.direct[way] / first.direct[way]:.0%}" for way in (0, 1)]
    magi = [f"{last.published[way] / first.published[way]:.0%}" for way in (0, 1)]
    return (
        f"at {last.devices} GPUs the ring keeps {kept[0]} forward and {kept[1]} backward of its figure at"
        f" {first.devices} (MagiAttention {magi[0]} and {magi[1]}): {last.exposed:.0%} of its time it waits"
        f" for messages, {last.fixed:.0%} goes to {last.devices} hops' fixed costs, {last.merging:.0%} to"
        f" merges; a direct exchange of the same tokens would keep {direct[0]} and {direct[1]}"
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"

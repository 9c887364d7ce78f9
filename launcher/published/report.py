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
    made = RichTable("packed, H100", *(f"{one.devices:,}" for one in packed), title_justify="left")
    made.title = (
        "64:8 heads, head_dim 128, bf16, 8 Ki tokens a GPU; forward/backward, TFLOPS a GPU;"
        " K/V of an all-gather's"
    )
    both: dict[str, Sequence[Pair | None]] = {
        "Magi, published": [one.published for one in packed],
        "ring, computed": [one.ring for one in packed],
        f"stages of {STAGE_SHARDS}": [one.staged for one in packed],
        "direct, not built": [one.direct for one in packed],
        "kernel alone": [one.kernel for one in packed],
    }
    for name, pairs in both.items():
        made.add_row(name, *("" if pair is None else f"{pair[0]:.0f}/{pair[1]:.0f}" for pair in pairs))
    made.add_row("work, max/mean", *(f"{one.imbalance:.3f}" for one in packed))
    parts = {
        "K/V read": "needed",
        "K/V sent": "sent",
        "waiting": "exposed",
        "hops' fixed cost": "fixed",
        "merging": "merging",
    }
    for name, field in parts.items():
        made.add_row(name, *(f"{getattr(one, field):.0%}" for one in packed))
    return made


def _together(pair: Pair) -> float:
    """Return the TFLOPS of both passes, of which the backward one has 2.5 times the FLOPs."""
    forward, backward = pair
    return 3.5 / (1 / forward + 2.5 / backward)


def limits(packed: Sequence[PackedRow]) -> str:
    """Return what larger rings keep of the smallest one's TFLOPS, and what they lose it to."""
    first, lines = packed[0], []
    for one in packed[1:] or packed:
        ring, staged, direct = (
            " and ".join(f"{now / then:.0%}" for now, then in zip(each, before, strict=True))
            for each, before in (
                (one.ring, first.ring), (one.staged, first.staged), (one.direct, first.direct)
            )
        )  # fmt: skip
        together, in_stages = (
            f"{_together(each) / _together(first.ring):.0%}" for each in (one.ring, one.staged)
        )
        magi = ""
        if one.published is not None and first.published is not None:
            kept = (f"{now / then:.0%}" for now, then in zip(one.published, first.published, strict=True))
            magi = f" (MagiAttention {' and '.join(kept)})"
        lines.append(
            f"{one.devices:,} GPUs: the ring keeps {ring} of its figures at {first.devices}, {together}"
            f" of both passes together{magi}:"
            f" {one.exposed:.0%} of its time it waits, {one.fixed:.0%} goes to hops' fixed costs,"
            f" {one.merging:.0%} to merges; stages of {STAGE_SHARDS} keep {staged}, {in_stages} together; a"
            f" direct exchange of the same tokens would keep {direct}"
        )
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"

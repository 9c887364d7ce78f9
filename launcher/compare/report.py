"""Write a comparison as one page of Markdown and as one JSON, with what to take and why."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from typing import Any, NamedTuple

import torch

from .comparison import Request, Row
from .group import Verdict
from .peers import ONE, PEERS

CLOSE = 1.05  # times: medians that are closer than this are alike
GIB = 2**30


class Advice(NamedTuple):
    """Say what to take in one table, and why."""

    devices: int
    case: str
    contestant: str
    take: str
    why: str


def describe_machine(device: str) -> dict[str, Any]:
    """Return what figures depend on."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["ds_ring"] = metadata.version("ds_ring")
    hardware: dict[str, Any] = {"device": f"{platform.machine()} CPU", "cores": len(os.sched_getaffinity(0))}
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        hardware |= {"device": card.name, "devices": torch.cuda.device_count()}
        hardware["memory_gib"] = round(card.total_memory / GIB, 1)
        versions |= {
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return {"date": today, "hardware": hardware, "versions": versions}


def advise(rows: Sequence[Row]) -> list[Advice]:
    """Return what to take in each table: the fastest that is exact; of those alike, the least memory."""
    advice = []
    for devices, case in _tables(rows):
        table = _rows_in(rows, devices, case)
        alone_s = next((row.median_s for row in table if row.contestant == ONE.name), None)
        timed = [
            (row.median_s, row) for row in table if row.median_s is not None and row.contestant != ONE.name
        ]
        if not timed:
            advice.append(Advice(devices, case, "nothing", "", "none was exact and timed"))
            continue
        timed.sort(key=lambda pair: pair[0])
        alike = [(seconds, row) for seconds, row in timed if seconds <= CLOSE * timed[0][0]]
        best_s, best = min(alike, key=lambda pair: pair[1].peak_bytes)
        close = [row.contestant for _, row in alike if row is not best]
        slower = [(seconds, row) for seconds, row in timed if row is not best]
        if close:
            least = ", least memory" if best.peak_bytes else ""
            why = f"exact{least}; {', '.join(close)} within {CLOSE - 1:.0%}"
        elif slower:
            seconds, following = slower[0]
            why = f"exact; {seconds / best_s:.2f} times as fast as {following.contestant}, the next"
        else:
            why = "exact; no other was exact and timed"
        if alone_s is not None and alone_s < best_s:
            why += f"; but one process alone is {best_s / alone_s:.2f} times as fast"
        advice.append(Advice(devices, case, best.contestant, best.take, why))
    return advice


def as_json(request: Request, rows: Sequence[Row], command: str, spent_s: float) -> dict[str, Any]:
    """Return all of it as one object."""
    cells = [
        {"case": cell.name, "tokens": cell.tokens, "heads": cell.heads, "kv_heads": cell.kv_heads}
        | {"head_dim": cell.head_dim, "dtype": str(cell.dtype).removeprefix("torch.")}
        | {"documents": list(cell.documents)}
        for cell in request.cells
    ]
    budget = {"budget_s": request.budget_s, "spent_s": round(spent_s, 1), "rounds": request.rounds}
    return (
        {"command": command}
        | describe_machine(request.device)
        | {"device": request.device, "devices": list(request.sizes), "cells": cells}
        | budget
        | {"advice": [row._asdict() for row in advise(rows)], "rows": [row.as_json() for row in rows]}
    )


def write_page(document: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the page; `document` is `as_json`'s."""
    cell, hardware = document["cells"][0], document["hardware"]
    many = " and ".join(map(str, document["devices"]))
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        f"# Attention over {cell['tokens']:,} tokens on {many} devices: {hardware['device']}",
        "",
        f"`{document['command']}`, {document['date']}.",
        f"{versions}. {', '.join(f'{name} {value}' for name, value in hardware.items())}.",
        f"It took {document['spent_s']:.0f} of {document['budget_s']:g} seconds.",
        "",
        "## What to take",
        "",
        *_make_table(
            ("devices", "case", "take", "why"),
            ((row.devices, row.case, row.contestant, row.why) for row in advise(rows)),
        ),
        "",
        *dict.fromkeys(f"- {row.contestant}: `{row.take}`" for row in advise(rows) if row.take),
    ]
    for devices, case in _tables(rows):
        lines += ["", f"## {devices} devices, {case}", "", *_describe_table(_rows_in(rows, devices, case))]
    lines += ["", "## How it was measured", "", *_explain_method(document, rows)]
    return "\n".join(lines) + "\n"


def _describe_table(rows: Sequence[Row]) -> list[str]:
    base = next((row.median_s for row in rows if row.contestant == ONE.name), None)
    with_peaks = any(row.peak_bytes for row in rows)
    heads = ["contestant", "answer", "largest error", "ms, median", "ms, least to most", "x one process"]
    cells = []
    for row in rows:
        if row.verdict.word == "not installed":
            continue
        name = row.contestant if row.contestant == ONE.name else f"{row.contestant} ({row.version})"
        line = [name, _bold(row.verdict), "" if row.verdict.error is None else f"{row.verdict.error:.1e}"]
        if row.median_s is not None:
            ends = f"{1e3 * min(row.seconds):.1f} to {1e3 * max(row.seconds):.1f}"
            speed = "" if base is None else f"{base / row.median_s:.2f}"
            line += [f"{1e3 * row.median_s:.1f}", ends, speed, f"{row.peak_bytes / GIB:.2f}"]
        line += [""] * (len(heads) + 1 - len(line))
        cells.append(line if with_peaks else line[:-1])
    absent = [row.contestant for row in rows if row.verdict.word == "not installed"]
    table = _make_table([*heads, "peak GiB"] if with_peaks else heads, cells)
    return table + (["", f"Not installed: {', '.join(absent)}."] if absent else [])


def _bold(verdict: Verdict) -> str:
    word = f"**{verdict.word}**" if verdict.word == "wrong" else verdict.word
    return f"{word}: {verdict.why}" if verdict.why else word


def _explain_method(document: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    checked = sorted({row.checked_tokens for row in rows})
    lengths = " and ".join(f"{tokens:,}" for tokens in checked)
    exact = "float64" if document["device"] == "cpu" else "float32"
    lines = [
        "- Each contestant has processes of its own. Forward and backward of one attention, batch 1.",
        f"- First out, dq, dk and dv are compared with {exact} in one process, over {lengths} tokens.",
        "- Errors are relative to the largest value. Exact: 2e-5 in float32, 3e-2 in bfloat16.",
        f"- Exact contestants take turns; medians of at most {document['rounds']} rounds, slowest rank.",
        "- `x one process`: how many times as fast as SDPA in one process on one device.",
        "- `4:2 heads` are 4 query heads and 2 K/V heads.",
    ]
    for cell in document["cells"]:
        if cell["documents"]:
            lines.append(f"- {cell['case']}: documents of {', '.join(map(str, cell['documents']))} tokens.")
    present = {row.contestant for row in rows if row.version is not None}
    lines += [f"- {peer.name}: {peer.note}." for peer in PEERS if peer.note and peer.name in present]
    return lines


def _tables(rows: Sequence[Row]) -> list[tuple[int, str]]:
    return list(dict.fromkeys((row.devices, row.case) for row in rows))


def _rows_in(rows: Sequence[Row], devices: int, case: str) -> list[Row]:
    return [row for row in rows if (row.devices, row.case) == (devices, case)]


def _make_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines]

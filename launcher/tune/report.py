"""Print tables for people: what was measured, expected and chosen."""

from __future__ import annotations

from rich.table import Table

from ..tables import console, print_table
from .result import Finalist, Result


def print_tables(result: Result) -> None:
    """Print the tables on stdout."""
    here = console()
    print_table(_machine(result))
    here.print(_finals(result))  # names of candidates are broken between words, figures are not
    for line in _words(result):
        here.print(line)


def _machine(result: Result) -> Table:
    measured, table = result.measured, Table(title="measured, every rank at work", title_justify="left")
    table.add_column("what")
    table.add_column("", justify="right")
    rate = measured.kernels[result.chosen.kernel]
    rows = [
        ("kernel, forward", f"{rate.forward_flops / 1e9:.1f} GFLOP/s"),
        ("kernel, backward", f"{rate.backward_flops / 1e9:.1f} GFLOP/s"),
        ("kernel, fixed cost of a tile", f"{(rate.forward_tile_s + rate.backward_tile_s) * 1e6:.0f} us"),
        ("large matrix product", f"{measured.matmul_flops / 1e9:.1f} GFLOP/s"),
        ("one rank alone is faster by", f"{measured.alone_speedup:.2f} x"),
    ]
    if (links := measured.links) is not None:
        rows += [
            ("to the next rank", f"{links.bytes_per_s / 2**20:.0f} MiB/s"),
            ("latency of a message", f"{links.latency_s * 1e6:.0f} us"),
            ("overhead of a hop", f"{measured.hop_overhead_s * 1e6:.0f} us"),
        ]
        if links.all_to_all_bytes_per_s is not None:
            rows.append(("all-to-all", f"{links.all_to_all_bytes_per_s / 2**20:.0f} MiB/s"))
    for row in rows:
        table.add_row(*row)
    return table


def _finals(result: Result) -> Table:
    title = f"passes of {result.request.tokens} tokens, forward + backward, slowest rank"
    table = Table(title=title, title_justify="left")
    for name in ("", "candidate"):
        table.add_column(name)
    for name in ("expected", "measured", "fastest\nto slowest"):
        table.add_column(name, justify="right", no_wrap=True)
    for finalist in result.finalists:
        table.add_row(_mark(finalist, result), str(finalist.candidate), *_times(finalist))
    return table


def _mark(finalist: Finalist, result: Result) -> str:
    marks = {"chosen": result.chosen, "defaults": result.default}
    return ", ".join(mark for mark, candidate in marks.items() if candidate == finalist.candidate)


def _times(finalist: Finalist) -> tuple[str, str, str]:
    low, high = min(finalist.seconds), max(finalist.seconds)
    return f"{finalist.predicted_s:.4f} s", f"{finalist.median_s:.4f} s", f"{low:.4f} to {high:.4f}"


def _words(result: Result) -> list[str]:
    ratio = result.chosen_s / result.default_s
    lines = [
        f"chosen: {result.chosen}",
        f"expected {result.predicted.seconds:.4f} s (compute {result.predicted.compute_s:.4f}, transfer"
        f" {result.predicted.transfer_s:.4f}, overhead {result.predicted.overhead_s:.4f}), measured"
        f" {result.chosen_s:.4f} s, {ratio:.2f} of the defaults",
        f"{result.candidates} candidates, {result.contestants} raced, {result.passes} passes, the shortest of"
        f" {result.shortest_tokens} tokens, {result.seconds:.0f} s",
    ]
    if result.request.base.pattern.documents:
        lines.append("documents are each batch's own: measured without them")
    return lines

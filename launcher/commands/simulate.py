"""Simulate all ranks of a ring here, and print what each would need and send: `ds-ring simulate`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .parsers import (
    MIB,
    Commands,
    add_command,
    add_json,
    add_shapes,
    get_pattern,
    make_source,
    print_json,
    read_section,
    refuse_extra,
)

if TYPE_CHECKING:
    from ds_ring.config.section import RingConfig
    from ds_ring.simulation.simulate import GeneratedSource, SimulationResult

    _Check = Callable[[SimulationResult], dict[str, Any]]

_HELP = "run all ranks of a ring here, one after the other; print what each needs and sends"
_DESCRIPTION = (
    "Run all ranks of a ring on this machine, one at a time, by the code that real ranks run, on "
    "generated numbers. Tensor memory is measured, bytes are counted, results can be checked."
)
_EXAMPLE = """\
examples:
  ds-ring simulate --tokens 8192 --heads 8 --layout zigzag      causal, rings of 1 to 16
  ds-ring simulate --tokens 65536 --pattern '{"window": 4096}' --backward --check
  ds-ring simulate --tokens 65536 --config configs/longnet.json --ring-sizes 1 8 --json
"""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "simulate", run, _HELP, _DESCRIPTION, _EXAMPLE)
    add_shapes(parser, [1, 2, 4, 8, 16])
    parser.add_argument("--backward", action="store_true", help="the backward pass as well")
    parser.add_argument(
        "--check",
        type=int,
        nargs="?",
        const=64,
        metavar="ROWS",
        help="compare with float64, so many rows (64); all rows, and dk and dv, where ROWS is at least T",
    )
    add_json(parser)


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Print one row for each ring size; RingError for what cannot be."""
    from ds_ring.errors import RingConfigError

    refuse_extra("simulate", extra_args)
    if options.check is not None and options.check < 1:
        raise RingConfigError(f"--check: expected at least 1 row, got {options.check}; leave it out for none")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library greets on stderr
    rows: list[dict[str, Any]] = []
    config, source = read_section(options), make_source(options)
    errors = _exact(options, source, config)
    for ring_size in options.ring_sizes:
        rows.append(_row(options, config, source, ring_size, errors))
        # Saved memory is relative to one rank, if that is the first size.
        first = rows[0]
        if first["ring_size"] == 1:
            rows[-1]["less_percent"] = round(100 * (1 - rows[-1]["peak_bytes"] / first["peak_bytes"]), 2)
        if options.json:  # one document at the end; progress goes to stderr
            print(f"ds-ring simulate: ring {ring_size} done", file=sys.stderr, flush=True)
    if options.json:
        print_json({"rings": rows})
    else:
        _print_table(rows, options)
    return 0


def _row(
    options: argparse.Namespace, config: RingConfig, source: GeneratedSource, ring_size: int, errors: _Check
) -> dict[str, Any]:
    """Simulate one ring size."""
    from ds_ring.plugin import PASSES
    from ds_ring.schedule.layout import make_layout
    from ds_ring.simulation.simulate import SimulationOptions, simulate

    pattern = get_pattern(options, config)
    layout = make_layout(
        options.layout or config.layout, tokens=options.tokens, ring_size=ring_size, pattern=pattern
    )
    began = time.perf_counter()
    result = simulate(
        source,
        pattern=pattern,
        layout=layout,
        grad_out=options.backward or None,
        kernel=config.kernel,
        options=SimulationOptions(
            kernel_options=config.kernel_options,
            chunk_bytes=options.chunk_bytes,
            prune=config.prune,
            gradient_payload=config.gradient_payload,
            stage_bytes=config.stage_bytes,
            transport=config.transport if PASSES[config.transport].plans else "ring",
        ),
    )
    busiest = max(result.memory.values(), key=lambda memory: memory.peak_bytes)
    sent = [both.forward + both.backward for both in result.bytes_sent.values()]
    return {
        "ring_size": ring_size,
        "layout": layout.name,
        "peak_bytes": result.peak_bytes,
        "at_peak": busiest.components,
        "sent_bytes": max(sent),
        "sent_bytes_all_ranks": sum(sent),
        "seconds": round(time.perf_counter() - began, 2),
        **errors(result),
    }


def _exact(options: argparse.Namespace, source: GeneratedSource, config: RingConfig) -> _Check:
    """Return what finds the errors of a result: of rows that are found once, for all ring sizes."""
    from ds_ring.simulation.simulate import exact_rows, sampled_rows

    if options.check is None:
        return lambda result: {}
    rows = sampled_rows(options.tokens, options.check, options.seed)
    scale = options.head_dim**-0.5
    exact = exact_rows(source, get_pattern(options, config), rows, scale, options.backward)

    def errors(result: SimulationResult) -> dict[str, Any]:
        """Return largest differences over the largest magnitude; of dk and dv if all rows were compared."""
        results = {"out": result.out[:, :, rows]}
        if result.dq is not None:
            results["dq"] = result.dq[:, :, rows]
        if result.dk is not None and result.dv is not None and len(rows) == options.tokens:
            results |= {"dk": result.dk, "dv": result.dv}
        largest = {}
        for name, got in results.items():
            want = getattr(exact, name)
            largest[name] = float((got.double() - want).abs().max() / want.abs().max())
        return {"rows_checked": len(rows), "errors": largest}

    return errors


def _print_table(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    from rich.table import Table

    from ..tables import print_table

    parts = [name for name in rows[0]["at_peak"] if any(row["at_peak"][name] for row in rows)]
    passes = "forward + backward" if options.backward else "forward"
    shape = f"{options.tokens} tokens, {options.heads} heads, head_dim {options.head_dim}, {options.dtype}"
    table = Table(title=f"{shape}, {passes}: MiB of the rank that needs most")
    for name in ("ring", "layout", "peak", "less", *parts, "sent by a rank", "error"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for row in rows:
        less = f"{row['less_percent']:.2f} %" if "less_percent" in row else ""
        sizes = [f"{row['at_peak'][name] / MIB:.2f}" for name in parts]
        worst = f"{max(row['errors'].values()):.1e}" if "errors" in row else ""
        table.add_row(
            str(row["ring_size"]), row["layout"], f"{row['peak_bytes'] / MIB:.2f}", less, *sizes,
            f"{row['sent_bytes'] / MIB:.2f}", worst,
        )  # fmt: skip
    print_table(table)

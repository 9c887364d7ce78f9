"""Run a benchmark by its name.

Each result is printed as a line of JSON below a line with hardware, versions, commit and rounds. --output
appends complete rows, which have all of it, to a file of JSON lines; --markdown prints a table at the end. It
ends with 1 if a row contradicts what the benchmark claims.

Example:
    python tools/bench.py attention --tokens 4096 8192 16384 --rounds 7
    python tools/bench.py attention --help
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # some benchmarks use stand-ins of tests/

import torch
from benchmarks.measuring import ResultRow, markdown
from common import make_parser


class Benchmark(NamedTuple):
    """Describe a row of the table: its measurement, and the function of the module."""

    about: str
    module: str
    function: str = "run"
    warm_up: int | None = 1  # rounds that are dropped; None: no option


BENCHMARKS = {
    "attention": Benchmark("causal attention against SDPA and other packages", "attention"),
    "host": Benchmark("processor time of the host for one hop", "host", warm_up=5),
    "planning": Benchmark("processor time to plan packed documents", "planning", warm_up=0),
    "published": Benchmark("published figures beside the planner's", "published", warm_up=None),
}


def main(
    arguments: list[str] | None = None, table: Mapping[str, Benchmark] = BENCHMARKS,
    package: str = "benchmarks", about: str | None = __doc__,
) -> int:  # fmt: skip
    """Run one row of a table of a package's modules; return 1 if a row of its results is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    names = "\n".join(f"  {name:14}{row.about}" for name, row in table.items())
    outer = argparse.ArgumentParser(
        description=about, epilog=f"names:\n{names}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    outer.add_argument("name", choices=table, metavar="NAME", help="one of the names below")
    name = outer.parse_known_args(arguments[:1])[0].name
    benchmark = table[name]
    module = import_module(f"{package}.{benchmark.module}")
    dropped = {} if benchmark.warm_up is None else {"warm_up": (benchmark.warm_up, "rounds that are dropped")}
    parser = make_parser(
        module.__doc__, **module.OPTIONS, **dropped,
        markdown=(False, "print a table at the end"), output=("", "append complete rows to this file"),
    )  # fmt: skip
    parser.prog = f"{outer.prog} {name}"
    options = parser.parse_args(arguments[1:])
    if getattr(options, "rounds", 1) < 1:
        parser.error(f"--rounds: expected at least one round, got {options.rounds}")
    try:
        return report(name, getattr(module, benchmark.function)(options), options)
    except ModuleNotFoundError as missing:  # of a peer: its help names the package to install
        parser.error(f"{missing}; see the help of {name}")


def report(name: str, results: Iterable[ResultRow], options: argparse.Namespace) -> int:
    """Print rows as they come, and store them; return 1 if one is wrong."""
    torch.set_num_threads(1)
    os.environ["DS_ACCELERATOR"] = "cpu"
    where, rows = ResultRow({}, {}).complete(name, options), []
    about = {key: where[key] for key in ("hardware", "versions", "commit", "date", "warm_up", "iterations")}
    print(f"# {json.dumps({'benchmark': name} | about)}", flush=True)
    for row in results:
        rows.append(row)
        print(json.dumps({**row.case, **row.results}), flush=True)
        if row.wrong:
            print(f"WRONG: {row.wrong}", file=sys.stderr)
        if options.output:
            with open(options.output, "a") as file:
                file.write(json.dumps(row.complete(name, options)) + "\n")
    if options.markdown:
        print(markdown(rows))
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())

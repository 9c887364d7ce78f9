"""Make the table of transformers' model types: exact on a ring, refused with the reason, or wrong.

Examples:
    python tools/model_table.py --head causal-lm --seeds 0 1    # of the installed version; some hours
    python tools/model_table.py --shapes 2x61x2 3x100x3    # ranks x tokens of a sample x least layers
    python tools/model_table.py --read runs/*.jsonl    # of `ds-ring check-model --all --json`
    python tools/model_table.py --newer    # status 1: the index has a minor version without a table

A table is written to tools/results/models_VERSION_HEAD.md, and of other forms than plain with their name.
A type whose results differ by seed or shape has the worst of them, and its row says of which run it is.
Of two reports of one type, seed and shape in files, the later is read: the type was run again.
The exit status is 1 where a type is wrong, or lacks a seed or a shape that others have.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import make_parser

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tools/results"
WORST_FIRST = ("WRONG", "invalid", "refused", "exact")
WORDS = {"invalid": "no small model"}
SHAPES = ("2x61x2", "3x100x3", "4x150x4")


class Run(NamedTuple):
    """Name what all types are run with. Runs sort by shape first."""

    shape: str
    seed: int

    def __str__(self) -> str:
        """Return its words in a table."""
        return f"seed {self.seed} of {self.shape}"


def run_checks(head: str, run: Run, jobs: int, batch: str) -> list[dict[str, Any]]:
    """Return what `ds-ring check-model --all` finds in the installed version.

    Raises:
        SystemExit: a shape is not three numbers.
    """
    if not re.fullmatch(r"\d+x\d+x\d+", run.shape):
        raise SystemExit(f"--shapes: expected RANKSxTOKENSxLAYERS, as 3x100x3, got {run.shape!r}")
    values: dict[str, Any] = dict(
        zip(("ring-size", "tokens", "layers"), run.shape.split("x"), strict=True),
        **{"head": head, "batch": batch, "seed": run.seed, "jobs": jobs, "deadline-seconds": 600},
    )
    command = [sys.executable, "-m", "ds_ring_launcher.cli", "check-model", "--all", "--json"]
    command += [word for name, value in values.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the reports in files, the last of each type, seed and shape.

    Raises:
        SystemExit: a report does not say of which seed and shape it is, or two are of different tables.
    """
    reports: dict[tuple[str, Run], dict[str, Any]] = {}
    of_table: dict[tuple[str, ...], str] = {}
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            report, place = json.loads(line), f"{file}, line {number}"
            for name in ("seed", "shape", "form"):
                if name not in report:
                    raise SystemExit(f"{place}: expected a report with its {name}, got none; run it again")
            of_table.setdefault((report["transformers"], report["head"], report["form"]), place)
            reports[report["source"], Run(report["shape"], report["seed"])] = report
    if len(of_table) != 1:
        tables = "; ".join(f"{' '.join(key)} ({place})" for key, place in of_table.items()) or "no report"
        raise SystemExit(f"--read: expected reports of one version, head and form, got {tables}")
    return list(reports.values())


def lacking(runs_of: Mapping[str, Mapping[Run, Any]]) -> dict[Run, list[str]]:
    """Return the types without a run that others have, by the run."""
    every = sorted({run for of_type in runs_of.values() for run in of_type})
    without = {run: sorted(name for name in runs_of if run not in runs_of[name]) for run in every}
    return {run: names for run, names in without.items() if names}


def by_type(reports: Sequence[dict[str, Any]]) -> dict[str, dict[Run, dict[str, Any]]]:
    """Return the reports of each type, by their run."""
    runs_of: dict[str, dict[Run, dict[str, Any]]] = {}
    for report in reports:
        runs_of.setdefault(report["source"], {})[Run(report["shape"], report["seed"])] = report
    return runs_of


def make_table(reports: Sequence[dict[str, Any]], commit: str) -> str:
    """Return the table of reports of one version, head and form, as Markdown.

    Args:
        reports: each with its shape, seed and form, at most one of a type, shape and seed.
        commit: of reports that have none.
    """
    version, head, form = (reports[0][name] for name in ("transformers", "head", "form"))
    batch = "" if form == "plain" else f" --batch {form}"
    runs_of = by_type(reports)
    worst: dict[str, dict[str, Any]] = {}
    for name, of_type in runs_of.items():
        worst[name] = min(of_type.values(), key=lambda entry: WORST_FIRST.index(entry["result"]))
    counts = Counter(entry["result"] for entry in worst.values())
    totals = ", ".join(f"{counts[key]} {WORDS.get(key, key)}" for key in reversed(WORST_FIRST))
    tipped = sorted({report["source"] for report in reports if report.get("tipped")})
    seeds_of: dict[str, list[str]] = {}
    for run in sorted({run for of_type in runs_of.values() for run in of_type}):
        seeds_of.setdefault(run.shape, []).append(str(run.seed))
    runs = "; ".join(f"{shape} with seed {' and '.join(seeds)}" for shape, seeds in seeds_of.items())
    runs_by = Counter(report.get("commit", commit) for report in reports).most_common()
    commits = ", ".join(f"{entry} ({number} runs)" for entry, number in runs_by)
    dates = " and ".join(sorted({report["date"] for report in reports}))
    lines = [
        f"# {head} types of transformers {version}\n",
        f"{len(worst)} types: {totals}. `ds-ring check-model --all --head {head}{batch}`, {dates},"
        f" commits {commits}.\n",
        f"Shapes (ranks x tokens x least layers): {runs}.\n",
        *(f"Not run with {run}: {', '.join(names)}.\n" for run, names in lacking(runs_of).items()),
        *([f"Rounding tips a threshold of {', '.join(tipped)}.\n"] if tipped else []),
        "| type | result | why |\n|---|---|---|",
    ]
    exact = [name for name, entry in worst.items() if entry["result"] == "exact"]
    rows = sorted(worst.items(), key=lambda row: (WORST_FIRST.index(row[1]["result"]), row[0]))
    for name, entry in rows:
        if name not in exact:
            reason = " ".join(entry["reason"].split()).replace("|", "/")
            same = [
                run
                for run, candidate in sorted(runs_of[name].items())
                if candidate["result"] == entry["result"]
            ]
            if len(same) < len(runs_of[name]):  # other runs had a better result
                reason = f"{', '.join(map(str, same))}: {reason}"
            lines.append(f"| {name} | {WORDS.get(entry['result'], entry['result'])} | {reason} |")
    return "\n".join([*lines, *([f"| {', '.join(sorted(exact))} | exact | |"] if exact else [])]) + "\n"


def minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    first, second = version.split(".")[:2]
    return int(first), int(second)


def newest_in(index: str) -> str:
    """Return the newest release in what `pip index versions` printed."""
    match = re.search(r"^transformers \(([\d.]+)\)", index, re.MULTILINE)
    if match is None:
        raise SystemExit(f"pip index versions: expected a version of transformers, got {index!r}")
    return match[1]


def newer_than_tables(index: str, tables: Sequence[str]) -> str | None:
    """Return the newest version in the index if no table is of its minor version, None if one is."""
    newest = newest_in(index)
    known = [name.split("_")[1] for name in tables]
    return None if any(minor(version) >= minor(newest) for version in known) else newest


def main(arguments: list[str] | None = None) -> int:
    """Make a table, or ask the index for a version without one."""
    parser = make_parser(__doc__)
    parser.add_argument("--head", default="causal-lm")
    parser.add_argument("--batch", default="plain", help="plain, padded, packed or tree")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="ranks x tokens x layers, as 3x100x3")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--read", type=Path, nargs="+", help="files of reports; run nothing")
    parser.add_argument("--commit", help="of reports that name none; default: that of this tree")
    parser.add_argument(
        "--newer", action="store_true", help="whether the index has a version without a table"
    )
    options = parser.parse_args(arguments)
    if options.newer:
        command = [sys.executable, "-m", "pip", "index", "versions", "transformers"]
        index = subprocess.run(command, capture_output=True, text=True).stdout
        newer = newer_than_tables(index, [item.stem for item in RESULTS.glob("models_*.md")])
        print(f"transformers {newer} has no table" if newer else "the newest minor version has a table")
        return int(newer is not None)
    runs = [Run(shape, seed) for shape in options.shapes for seed in options.seeds]
    reports = (
        read(options.read)
        if options.read
        else [item for run in runs for item in run_checks(options.head, run, options.jobs, options.batch)]
    )
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.run(head, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    batch = "" if reports[0]["form"] == "plain" else f"_{reports[0]['form']}"
    place = RESULTS / f"models_{reports[0]['transformers']}_{reports[0]['head']}{batch}.md"
    place.write_text(make_table(reports, commit))
    print(place.read_text())
    return int(any(item["result"] == "WRONG" for item in reports) or bool(lacking(by_type(reports))))


if __name__ == "__main__":
    sys.exit(main())

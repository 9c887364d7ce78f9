"""Make the table of transformers' model types: exact on a ring, refused with the reason, or wrong.

Examples:
    python tools/model_table.py --head causal-lm --seeds 0 1    # of the installed version; about an hour
    python tools/model_table.py --read runs/seed0.jsonl --seeds 0    # of `ds-ring check-model --all --json`
    python tools/model_table.py --newer    # status 1: the index has a minor version without a table

A table is written to tools/results/models_VERSION_HEAD.md, and of other forms than plain with their name.
A type whose results differ by seed has the worst of them. The exit status is 1 where one is wrong.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import parser_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tools/results"
WORST_FIRST = ("WRONG", "invalid", "refused", "exact")
WORDS = {"invalid": "no small model"}


def reports_of(head: str, seed: int, jobs: int, batch: str) -> list[dict[str, Any]]:
    """Return what `ds-ring check-model --all` finds in the installed version."""
    command = [sys.executable, "-m", "ds_ring_launcher.cli", "check-model", "--all", "--json"]
    command += [
        "--head",
        head,
        "--batch",
        batch,
        "--seed",
        str(seed),
        "--jobs",
        str(jobs),
        "--deadline-seconds",
        "600",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) | {"seed": seed} for line in done.stdout.splitlines()]


def table_of(reports: Sequence[dict[str, Any]], commit: str) -> str:
    """Return the table of reports of one version and head, as Markdown."""
    version, head = reports[0]["transformers"], reports[0]["head"]
    batch = "" if reports[0].get("form", "plain") == "plain" else f" --batch {reports[0]['form']}"
    seeds = sorted({report.get("seed", 0) for report in reports})
    worst: dict[str, dict[str, Any]] = {}
    for report in reports:
        before = worst.get(report["source"], report)
        worst[report["source"]] = min(before, report, key=lambda one: WORST_FIRST.index(one["result"]))
    counts = Counter(one["result"] for one in worst.values())
    found = ", ".join(f"{counts[key]} {WORDS.get(key, key)}" for key in reversed(WORST_FIRST))
    tipped = sorted({report["source"] for report in reports if report.get("tipped")})
    lines = [
        f"# {head} types of transformers {version}\n",
        f"{len(worst)} types: {found}. `ds-ring check-model --all --head {head}{batch}` with seed"
        f" {' and '.join(map(str, seeds))}, {reports[-1]['date']}, commit {commit}.\n",
        *([f"Rounding tips a threshold of {', '.join(tipped)}.\n"] if tipped else []),
        "| type | result | why |\n|---|---|---|",
    ]
    exact = [name for name, one in worst.items() if one["result"] == "exact"]
    rows = sorted(worst.items(), key=lambda row: (WORST_FIRST.index(row[1]["result"]), row[0]))
    for name, one in rows:
        if name not in exact:
            reason = " ".join(one["reason"].split()).replace("|", "/")
            lines.append(f"| {name} | {WORDS.get(one['result'], one['result'])} | {reason} |")
    return "\n".join([*lines, f"| {', '.join(sorted(exact))} | exact | |"]) + "\n"


def minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    first, second = version.split(".")[:2]
    return int(first), int(second)


def newest_in(index: str) -> str:
    """Return the newest release in what `pip index versions` printed."""
    found = re.search(r"^transformers \(([\d.]+)\)", index, re.MULTILINE)
    if found is None:
        raise SystemExit(f"pip index versions: expected a version of transformers, got {index!r}")
    return found[1]


def newer_than_tables(index: str, tables: Sequence[str]) -> str | None:
    """Return the newest version in the index if no table is of its minor version, None if one is."""
    newest = newest_in(index)
    known = [name.split("_")[1] for name in tables]
    return None if any(minor(one) >= minor(newest) for one in known) else newest


def main(arguments: list[str] | None = None) -> int:
    """Make a table, or ask the index for a version without one."""
    parser = parser_of(__doc__)
    parser.add_argument("--head", default="causal-lm")
    parser.add_argument("--batch", default="plain", help="plain, padded, packed or tree")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--read", type=Path, nargs="+", help="files, a seed each; run nothing")
    parser.add_argument("--commit", help="of the runs; default: that of this tree")
    parser.add_argument(
        "--newer", action="store_true", help="whether the index has a version without a table"
    )
    options = parser.parse_args(arguments)
    if options.newer:
        command = [sys.executable, "-m", "pip", "index", "versions", "transformers"]
        index = subprocess.run(command, capture_output=True, text=True).stdout
        newer = newer_than_tables(index, [one.stem for one in RESULTS.glob("models_*.md")])
        print(f"transformers {newer} has no table" if newer else "the newest minor version has a table")
        return int(newer is not None)
    reports: list[dict[str, Any]] = []
    for file, seed in zip(options.read or (), options.seeds, strict=False):
        reports += [json.loads(line) | {"seed": seed} for line in file.read_text().splitlines()]
    for seed in () if options.read else options.seeds:
        reports += reports_of(options.head, seed, options.jobs, options.batch)
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.run(head, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    batch = "" if reports[0].get("form", "plain") == "plain" else f"_{reports[0]['form']}"
    place = RESULTS / f"models_{reports[0]['transformers']}_{reports[0]['head']}{batch}.md"
    place.write_text(table_of(reports, commit))
    print(place.read_text())
    return int(any(report["result"] == "WRONG" for report in reports))


if __name__ == "__main__":
    sys.exit(main())

"""Run the tests of what users did in runs of their own, and print a row for each.

A row is a test that is marked `situation(area, what)`: something that a public report or a user did, whose
right result is that of one process, or a refusal by name. Its outcome is what pytest says of the test. The
exit status is 1 if a row failed.

Examples:
    python tools/situations.py                        # all rows
    python tools/situations.py --areas compile padding
    python tools/situations.py --short --json         # the rows of a day
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from common import make_parser, print_row, provenance

ROOT = Path(__file__).resolve().parents[1]


class Situation(NamedTuple):
    """One test and what it is about."""

    area: str
    what: str
    test: str


class Rows:
    """A plugin of pytest: keeps the marked tests of some areas, and prints a row when one ends."""

    def __init__(self, areas: list[str], as_json: bool) -> None:
        self.areas = areas
        self.as_json = as_json
        self.rows: dict[str, Situation] = {}
        self.outcomes: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect what is no situation, or one of another area."""
        chosen = []
        for item in items:
            marker = item.get_closest_marker("situation")
            if marker is None:
                continue
            area, what = marker.args
            row = Situation(area, what, item.nodeid)
            if not self.areas or row.area in self.areas:
                self.rows[item.nodeid] = row
                chosen.append(item)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self.rows])
        items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the row of a test that ended; one that failed in its set-up or tear-down failed."""
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.when == "call" or report.skipped:
            self.outcomes.setdefault(report.nodeid, report.outcome)
        if report.when == "teardown":
            row = self.rows[report.nodeid]
            print_row({"outcome": self.outcomes[report.nodeid], **row._asdict()}, self.as_json)


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each situation, then the number of each outcome."""
    parser = make_parser(
        __doc__, areas=([""], "only rows of these areas"), folder=("tests", "the tests to look through"),
        short=(False, "the rows of a day, without those of the night"), json=(False, "one JSON row each"),
    )  # fmt: skip
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    rows = Rows([area for area in options.areas if area], options.json)
    quiet = [
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=--strict-markers",
        "-c",
        "pyproject.toml",
    ]
    chosen = [] if options.short else ["--night"]
    status = pytest.main([*quiet, *chosen, options.folder], plugins=[rows])
    counts = Counter(rows.outcomes.values())
    print_row({**provenance(), "situations": len(rows.rows), **counts}, options.json)
    if not rows.rows:
        parser.error(f"expected tests marked `situation` in {options.folder} of {options.areas}, got none")
    return 0 if status == pytest.ExitCode.OK and not counts["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())

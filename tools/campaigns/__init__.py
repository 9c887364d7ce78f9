"""Random rounds, one module for each kind; `tools/campaign.py` has their table, and plays them by name.

A module has `OPTIONS`, which become its command line, and `run`, from these options to rows of counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measuring import ResultRow

SHOWN = 3  # faults of a row that are printed


def count_row(case: Mapping[str, Any], counts: Mapping[str, Any], faults: Sequence[str]) -> ResultRow:
    """Return a row with the number of faults, which is wrong if there is one."""
    return ResultRow(case, {**counts, "wrong": len(faults)}, "\n".join(faults[:SHOWN]))

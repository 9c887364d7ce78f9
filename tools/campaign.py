"""Play rounds of one kind by its name, most of them random, and compare each with what must come of it.

Rows are printed as those of `tools/bench.py`: one for an operator, a fault or another kind, with its numbers
of good and wrong rounds. It ends with 1 if a round was wrong.

Example:
    python tools/campaign.py fault --rounds 10
    python tools/campaign.py fault --help
"""

from __future__ import annotations

import sys

import bench
from bench import Benchmark

CAMPAIGNS = {
    "autograd": Benchmark("gradients of every operator, asked for in every way", "autograd", warm_up=None),
    "compile": Benchmark("calls of a compiled function, other captured values", "compile", warm_up=None),
    "dtype": Benchmark("every operator with every dtype of torch", "dtype", warm_up=None),
    "fault": Benchmark("ranks that fail in every way and place", "fault", warm_up=None),
    "launch": Benchmark("two launches of one run at the same instant", "launch", warm_up=None),
    "pattern": Benchmark("random trees and patterns on simulated rings", "pattern", warm_up=None),
    "tree": Benchmark("random trees of rollouts through layers and models", "tree", warm_up=None),
}


def main(arguments: list[str] | None = None) -> int:
    """Play one kind; return 1 if a row is wrong."""
    return bench.main(arguments, CAMPAIGNS, "campaigns", __doc__)


if __name__ == "__main__":
    sys.exit(main())

"""Draw trees and patterns with tables of labels, run them on simulated rings, compare with dense attention.

Each round is one random tree (nodes in any order that `Tree` takes) or one composition with `&` and `|` of
documents (ids that reappear, descend or are negative), trees, windows, prefixes, slices, dilations and mask
functions. It runs on two rings of 1 to 6 ranks (or on all of them) with the kernels "cpu" and "reference" in
float64, forward and backward; rings and layouts take turns. out, lse, dq, dk and dv are compared with dense
attention under plain formulas (`tests/pattern_rounds.py`). Rounds run in another process, so that one that a
signal ends is counted.

Example:
    python tools/pattern_campaign.py --rounds 400
    python tools/pattern_campaign.py --rounds 20 --kinds tree --first 1000 --all-rings
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from common import parser_of, print_row

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' rounds

from tests.pattern_rounds import KINDS, play_apart


def main(arguments: list[str] | None = None) -> int:
    """Print a row per kind; the exit code is the number of wrong rounds, 100 at most."""
    parser = parser_of(
        __doc__, rounds=(400, "of each kind"), first=(0, "the seed of the first round"),
        all_rings=(False, "all ring sizes in each round"), json=(False, "one JSON row per kind"),
    )  # fmt: skip
    parser.add_argument("--kinds", nargs="*", choices=tuple(KINDS), default=list(KINDS))
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.first < 0:
        parser.error(f"expected at least one round from seed 0 on, got {options.rounds} from {options.first}")
    bad = 0
    for kind in options.kinds:
        passes, wrong, ended, started = 0, 0, 0, time.monotonic()
        seeds = range(options.first, options.first + options.rounds)
        for count, said in play_apart(kind, seeds, options.all_rings):
            passes += count
            wrong += bool(said)
            ended += not count
            for text in said[:2]:
                print("    " + text.replace("\n", "\n    "), flush=True)
        bad += wrong
        row = {"kind": kind, "rounds": options.rounds, "passes": passes, "wrong": wrong, "crashes": ended}
        print_row(row | {"seconds": round(time.monotonic() - started)}, options.json)
    return min(bad, 100)


if __name__ == "__main__":
    sys.exit(main())

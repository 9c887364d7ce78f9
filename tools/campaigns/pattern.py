"""Draw trees and patterns with tables of labels, run them on simulated rings, compare with dense attention.

Each round is one random tree (nodes in any order that `Tree` takes) or one composition with `&` and `|` of
documents (ids that reappear, descend or are negative), trees, windows, prefixes, slices, dilations and mask
functions. It runs on two rings of 1 to 6 ranks (or on all of them) with the kernels "cpu" and "reference" in
float64, forward and backward; rings and layouts take turns. out, lse, dq, dk and dv are compared with dense
attention under plain formulas (`tests/pattern_rounds.py`). Rounds run in another process, so that one that a
signal ends is counted.

Example:
    python tools/campaign.py pattern --rounds 400
    python tools/campaign.py pattern --rounds 20 --only tree --first 1000 --all-rings
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from benchmarks.measuring import ResultRow
from common import ONLY, choose

from tests.pattern_rounds import KINDS, play_apart

from . import count_row

OPTIONS = {
    "only": ONLY, "rounds": (400, "of each kind"), "first": (0, "the seed of the first round"),
    "all_rings": (False, "all ring sizes in each round"),
}  # fmt: skip


def run(options: Namespace) -> Iterator[ResultRow]:
    """Yield a row for each kind."""
    seeds = range(options.first, options.first + options.rounds)
    for kind in choose(options.only, KINDS):
        rounds = list(play_apart(kind, seeds, options.all_rings))
        counts = {"rounds": options.rounds, "passes": sum(count for count, _ in rounds)}
        counts["crashes"] = sum(not count for count, _ in rounds)
        yield count_row({"kind": kind}, counts, ["\n".join(texts[:2]) for _, texts in rounds if texts])

"""Call every public operator with every dtype of torch: right, or refused and the mesh lives.

A row is an operator on a number of ranks; it counts dtypes. Of a dtype output and gradients equal those of
one process ("right"), every rank raises a RingError ("refused"), or the caller's own code raises, as in one
process ("caller"). Bad are "wrong" numbers, another error of the library ("raw"), and a mesh on which an
ordinary call fails afterwards ("lost"). Ranks are processes over gloo (`tests/dist/dtype_table.py`).

Example:
    python tools/campaign.py dtype
    python tools/campaign.py dtype --only halo gather_sequence --grids 2,1
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator

from benchmarks.measuring import ResultRow
from common import ONLY, choose

from tests.dist.dtype_table import DTYPES, Outcome, outcomes, rows_for
from tests.dist.harness import RankPool

from . import count_row

OPTIONS = {"only": ONLY, "grids": (["2,1", "2,2", "3,1"], "ranks and their Ulysses size")}
GOOD = ("right", "refused", "caller")
KINDS = (*GOOD, "wrong", "raw", "lost")  # the worst last


def run(options: Namespace) -> Iterator[ResultRow]:
    """Yield a row for each operator and grid."""
    for grid in options.grids:
        ranks, ulysses = map(int, grid.split(","))
        with RankPool(ranks) as pool:
            for name in choose(options.only, rows_for(ulysses)):
                counts, faults = try_dtypes(pool, ulysses, name)
                yield count_row(
                    {"operator": name, "ranks": grid}, {kind: counts[kind] for kind in GOOD}, faults
                )


def try_dtypes(pool: RankPool, ulysses: int, name: str) -> tuple[Counter[str], list[str]]:
    """Return how many dtypes are of each kind, and a text for each bad one."""
    counts, faults = Counter[str](), list[str]()
    left = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    while left:
        by_rank = pool.collect(outcomes, ulysses, [(name, dtype) for dtype in left], timeout_s=120)
        answers = [outcome.value if outcome.status == "returned" else {} for outcome in by_rank]
        reached = max(len(answer) for answer in answers)
        if not reached:
            report = [(outcome.status, outcome.report[-400:]) for outcome in by_rank]
            return counts, [*faults, *(f"{dtype}: lost: {report}" for dtype in left)]
        for dtype in left[:reached]:
            results = {answer.get((name, dtype), Outcome("lost", "no answer")) for answer in answers} - {None}
            worst = max((outcome.kind for outcome in results), key=KINDS.index, default="none")
            counts[worst] += 1
            if worst not in (*GOOD, "none"):
                faults.append(
                    f"{dtype}: {' | '.join(sorted(f'{outcome.kind} {outcome.text}' for outcome in results))}"
                )
        left = left[reached:]
    return counts, faults

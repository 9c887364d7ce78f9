"""Call every public operator with every dtype of torch: right, or refused and the mesh lives.

A row is an operator on a number of ranks; it counts dtypes. Of a dtype output and gradients equal those of
one process ("right"), every rank raises a RingError ("refused"), or the caller's own code raises, as in one
process ("caller"). Bad are "wrong" numbers, another error of the library ("raw"), and a mesh on which an
ordinary call fails afterwards ("lost"). Ranks are processes over gloo (`tests/dist/dtype_table.py`).

Example:
    python tools/dtype_campaign.py
    python tools/dtype_campaign.py --operators halo gather_sequence --ranks 2,1
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from common import parser_of, print_row

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' ranks

from tests.dist.dtype_table import DTYPES, Outcome, outcomes, rows_for
from tests.dist.harness import RankPool
from tests.operator_table import OPERATORS

GRIDS = ("2,1", "2,2", "3,1")  # ranks, Ulysses size
GOOD = ("right", "refused", "caller")


def main(arguments: list[str] | None = None) -> int:
    """Print a row per operator and grid; the exit code is the number of bad dtypes, 100 at most."""
    parser = parser_of(__doc__, json=(False, "one JSON row per operator"))
    parser.add_argument("--operators", nargs="*", choices=tuple(OPERATORS), default=list(OPERATORS))
    parser.add_argument("--ranks", nargs="*", default=list(GRIDS), help="ranks and their Ulysses size")
    options = parser.parse_args(arguments)
    bad = 0
    for grid in options.ranks:
        world_size, ulysses_size = map(int, grid.split(","))
        with RankPool(world_size) as pool:
            for name in (one for one in rows_for(ulysses_size) if one in options.operators):
                bad += _run(pool, ulysses_size, name, grid, options.json)
    return min(bad, 100)


def _run(pool: RankPool, ulysses_size: int, name: str, grid: str, as_json: bool) -> int:
    """Print the row of an operator; return the number of bad dtypes."""
    left, counts, texts = [str(dtype).removeprefix("torch.") for dtype in DTYPES], Counter[str](), []
    while left:
        by_rank = pool.collect(outcomes, ulysses_size, [(name, dtype) for dtype in left], timeout_s=120)
        found = [one.value if one.status == "returned" else {} for one in by_rank]
        seen = max(len(one) for one in found)
        if not seen:
            texts.append(f"{left[0]}: {[(one.status, one.report[-400:]) for one in by_rank]}")
            counts["lost"] += len(left)
            break
        for dtype in left[:seen]:
            kinds = {one.get((name, dtype), Outcome("lost", "no answer")) for one in found}
            kind = "none" if kinds == {None} else max((one.kind for one in kinds if one), key=_rank)
            counts[kind] += 1
            if kind not in (*GOOD, "none"):
                texts.append(
                    f"{dtype}: {' | '.join(sorted(f'{one.kind} {one.text}' for one in kinds if one))}"
                )
        left = left[max(seen, 1) :]
    for text in texts:
        print("    " + text, flush=True)
    print_row({"operator": name, "ranks": grid} | {kind: counts[kind] for kind in _KINDS}, as_json)
    return sum(counts[kind] for kind in _KINDS if kind not in GOOD)


_KINDS = (*GOOD, "wrong", "raw", "lost")


def _rank(kind: str) -> int:
    return _KINDS.index(kind)


if __name__ == "__main__":
    sys.exit(main())

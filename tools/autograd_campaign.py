"""Ask for gradients of every operator in every way, on gloo ranks, and compare with one process.

The operators are those of `tests/operator_table.py`. The modes are backward, torch.autograd.grad,
backward(inputs=...), inputs without gradients (others on each rank, too), twice with retain_graph, both kinds
of checkpointing, two lengths before one backward pass, another order on one rank, forward mode and second
derivatives (`tests/dist/autograd_rounds.py`). A case is "equal" to one process in float64, or "refused" by
one error on all ranks, after which the mesh works. All else is wrong, as is a rank that waits for a deadline.

Example:
    python tools/autograd_campaign.py
    python tools/autograd_campaign.py --names halo serial_scan --modes grad twice --ranks 3 --ulysses 1
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from common import parser_of, print_row

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' cases

from tests.dist.autograd_rounds import MODES, play
from tests.dist.harness import RankPool
from tests.operator_table import OPERATORS


def main(arguments: list[str] | None = None) -> int:
    """Print a row per operator and grid; the exit code is the number of wrong cases, 100 at most."""
    parser = parser_of(
        __doc__, names=(["all"], "operators", ("all", *OPERATORS)), modes=(["all"], "modes", ("all", *MODES)),
        ranks=([2, 3], "of a sequence, in turn"), ulysses=([1, 2], "Ulysses sizes that divide the ranks"),
        json=(False, "one JSON row per operator"),
    )  # fmt: skip
    options = parser.parse_args(arguments)
    names = list(OPERATORS) if "all" in options.names else options.names
    modes = list(MODES) if "all" in options.modes else options.modes
    bad = 0
    for ranks in options.ranks:
        with RankPool(ranks) as pool:
            for ulysses in (size for size in options.ulysses if ranks % size == 0):
                for name in names:
                    started, found = time.monotonic(), play(pool, [name], modes, ulysses)
                    if not found:
                        continue
                    wrong = {
                        mode: said for (_, mode), said in found.items() if said not in ("equal", "refused")
                    }
                    for mode, said in wrong.items():
                        print(f"    {name}, {mode}: {said}", flush=True)
                    bad += len(wrong)
                    row = {"operator": name, "ranks": ranks, "ulysses": ulysses, "cases": len(found)}
                    row |= {key: list(found.values()).count(key) for key in ("equal", "refused")}
                    row |= {"wrong": len(wrong), "seconds": round(time.monotonic() - started)}
                    print_row(row, options.json)
    return min(bad, 100)


if __name__ == "__main__":
    sys.exit(main())

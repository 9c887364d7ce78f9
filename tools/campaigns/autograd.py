"""Ask for gradients of every operator in every way, on gloo ranks, and compare with one process.

The operators are those of `tests/operator_table.py`. The modes are backward, torch.autograd.grad,
backward(inputs=...), inputs without gradients (others on each rank, too), twice with retain_graph, both kinds
of checkpointing, two lengths before one backward pass, another order on one rank, forward mode and second
derivatives (`tests/dist/autograd_rounds.py`). A case is "equal" to one process in float64, or "refused" by
one error on all ranks, after which the mesh works. All else is wrong, as is a rank that waits for a deadline.

Example:
    python tools/campaign.py autograd
    python tools/campaign.py autograd --only halo ring_scan --modes grad twice --ranks 3 --ulysses 1
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import product

from benchmarks.measuring import ResultRow
from common import ONLY, choose

from tests.dist.autograd_rounds import MODES, play
from tests.dist.harness import RankPool
from tests.operator_table import OPERATORS

from . import count_row

OPTIONS = {
    "only": ONLY, "modes": ([""], "parts of the names of modes"), "ranks": ([2, 3], "of a sequence, in turn"),
    "ulysses": ([1, 2], "Ulysses sizes that divide the ranks"),
}  # fmt: skip
GOOD = ("equal", "refused")


def run(options: Namespace) -> Iterator[ResultRow]:
    """Yield a row for each operator and grid."""
    names, modes = choose(options.only, OPERATORS), choose(options.modes, MODES, "--modes")
    for ranks in options.ranks:
        with RankPool(ranks) as pool:
            for ulysses, name in product([size for size in options.ulysses if ranks % size == 0], names):
                outcomes = play(pool, [name], modes, ulysses)
                faults = [
                    f"{name}, {mode}: {text}" for (_, mode), text in outcomes.items() if text not in GOOD
                ]
                counts = {key: list(outcomes.values()).count(key) for key in GOOD}
                if outcomes:
                    case = {"operator": name, "ranks": ranks, "ulysses": ulysses, "cases": len(outcomes)}
                    yield count_row(case, counts, faults)

"""Train on rings as on one process? ZeRO 0 to 3 with what DeepSpeed runs usually have, a table for each mesh.

Each cell is a run of three steps on real ranks over gloo: the largest relative error of a loss on any rank,
and of a parameter's gradient by its norm, against plain PyTorch on one process. A cell beyond what rounding
explains is marked with "!" and makes the exit code 1.

Example:
    python tools/check_training.py
    python tools/check_training.py --only offload LoRA --stages 3 --meshes "ring 2"
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from common import ONLY, choose, make_parser
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' ranks and variants

from ds_ring_launcher.tables import console, print_table
from tests.dist.harness import RankPool, RanksFailed
from tests.dist.training_table import MESHES, VARIANTS, errors, train_alone, train_on_ring


def cell(pool: RankPool, name: str, stage: int, mesh: str) -> tuple[str, bool]:
    """Return the text of one run and whether it is good; "-" where DeepSpeed has no such thing."""
    variant = VARIANTS[name]
    if stage < variant.least_stage:
        return "-", True
    run = lambda: errors(pool.run(train_on_ring, name, stage, mesh), train_alone(name))  # noqa: E731
    return judged(run, variant.errors)


def judged(run: Callable[[], tuple[float, float]], limits: tuple[float, float]) -> tuple[str, bool]:
    """Return the text of a run's errors of loss and gradients, and whether both are within limits."""
    try:
        loss, gradient = run()
    except RanksFailed as failed:
        console().print(str(failed)[-1500:], markup=False)
        return "failed !", False
    good = loss <= limits[0] and gradient <= limits[1]
    return f"{loss:.0e} {gradient:.0e}{'' if good else ' !'}".replace("e-0", "e-"), good


def print_cells(
    title: str, stages: Sequence[int], rows: Iterable[tuple[str, Callable[[int], tuple[str, bool]]]]
) -> list[bool]:
    """Print a table of a cell for each row and ZeRO stage; return which cells are good."""
    table, good = Table(title=title, title_justify="left"), []
    for head in ("", *(f"ZeRO {stage}" for stage in stages)):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for name, cell_at in rows:
        cells = [cell_at(stage) for stage in stages]
        print(f"{title}, {name}:", *(text for text, _ in cells), sep="  ", file=sys.stderr, flush=True)
        good += [fine for _, fine in cells]
        table.add_row(name, *(text for text, _ in cells))
    print_table(table)
    return good


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; return 1 if a cell is beyond rounding."""
    parser = make_parser(__doc__, stages=([0, 1, 2, 3], "of ZeRO"), only=ONLY)
    parser.add_argument("--meshes", nargs="*", choices=tuple(MESHES), default=list(MESHES))
    options = parser.parse_args(arguments)
    names = choose(options.only, VARIANTS)
    good, started = list[bool](), time.monotonic()
    for mesh in options.meshes:
        with RankPool(MESHES[mesh][0]) as pool:
            rows = ((name, partial(cell, pool, name, mesh=mesh)) for name in names)
            good += print_cells(f"{mesh}: error of losses, of gradients", options.stages, rows)
    print(f"{good.count(False)} cells beyond rounding, {time.monotonic() - started:.0f} s")
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())

"""Train with "long_sequence" as without it? Every option, model, ZeRO stage and ring against one process.

Each cell is a step on real ranks over gloo: the largest relative error of the loss on any rank, and of a
parameter's gradient by its norm, against plain PyTorch on one process. A cell beyond what rounding explains
is marked with "!" and makes the exit code 1.

Example:
    python tools/check_long.py
    python tools/check_long.py --families llama mixtral --options all --stages 3 --rings 4
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' ranks and models

from ds_ring_launcher.tables import console, print_table
from tests.dist.harness import RankPool, RanksFailed
from tests.dist.long_table import FAMILIES, OPTIONS, Step, errors, step_alone, step_on_ring

LOSS, GRADIENT = 1e-6, 1e-5


def cell(
    pool: RankPool, family: str, stage: int, option: str, checkpointing: bool, alone: Step
) -> tuple[str, bool]:
    """Return the text of one step and whether it is good."""
    try:
        found = pool.run(step_on_ring, family, stage, option, pool.world_size, checkpointing)
    except RanksFailed as failed:
        console().print(str(failed)[-1500:], markup=False)
        return "failed !", False
    loss, gradient = errors(found, alone)
    good = loss <= LOSS and gradient <= GRADIENT
    return f"{loss:.0e} {gradient:.0e}{'' if good else ' !'}".replace("e-0", "e-"), good


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; return 1 if a cell is beyond rounding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="*", choices=tuple(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--options", nargs="*", choices=(*OPTIONS, "auto", "off"), default=list(OPTIONS))
    parser.add_argument("--stages", nargs="*", type=int, default=[0, 1, 2, 3], help="of ZeRO")
    parser.add_argument("--rings", nargs="*", type=int, default=[1, 2, 4], help="ring sizes")
    options = parser.parse_args(arguments)
    bad, cells, started = 0, 0, time.monotonic()
    alone = {family: step_alone(family) for family in options.families}
    for ring in options.rings:
        table = Table(title=f"ring {ring}: error of the loss, of gradients", title_justify="left")
        for head in ("", *(f"ZeRO {stage}" for stage in options.stages)):
            table.add_column(head, no_wrap=True)
        with RankPool(ring) as pool:
            for family in options.families:
                for option in options.options:
                    for checkpointing in (False, True):
                        row = [
                            cell(pool, family, stage, option, checkpointing, alone[family])
                            for stage in options.stages
                        ]
                        name = f"{family}, {option}{', checkpointing' if checkpointing else ''}"
                        print(
                            f"ring {ring}, {name}:", *(text for text, _ in row), file=sys.stderr, flush=True
                        )
                        bad += sum(not good for _, good in row)
                        cells += len(row)
                        table.add_row(name, *(text for text, _ in row))
        print_table(table)
    console().print(f"{bad} of {cells} cells beyond rounding, {time.monotonic() - started:.0f} s")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())

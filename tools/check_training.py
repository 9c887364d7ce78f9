"""Train on rings as on one process? ZeRO 0 to 3 with what DeepSpeed runs usually have, a table for each mesh.

Each cell is a run of three steps on real ranks over gloo: the largest relative error of a loss on any rank,
and of a parameter's gradient by its norm, against plain PyTorch on one process. A cell beyond what rounding
explains is marked with "!" and makes the exit code 1.

Example:
    python tools/check_training.py
    python tools/check_training.py --only offload LoRA --stages 3 --meshes "ring 2"
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

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
    try:
        loss, gradient = errors(pool.run(train_on_ring, name, stage, mesh), train_alone(name))
    except RanksFailed as failed:
        console().print(str(failed)[-1500:], markup=False)
        return "failed !", False
    good = loss <= variant.errors[0] and gradient <= variant.errors[1]
    return f"{loss:.0e} {gradient:.0e}{'' if good else ' !'}".replace("e-0", "e-"), good


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; return 1 if a cell is beyond rounding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="variants whose name contains one of these")
    parser.add_argument("--stages", nargs="*", type=int, default=[0, 1, 2, 3], help="of ZeRO")
    parser.add_argument("--meshes", nargs="*", choices=tuple(MESHES), default=list(MESHES))
    options = parser.parse_args(arguments)
    names = [name for name in VARIANTS if not options.only or any(part in name for part in options.only)]
    if not names:
        parser.error(f"--only: expected parts of the names of variants, got {options.only}; see --help")
    bad, started = 0, time.monotonic()
    for mesh in options.meshes:
        table = Table(title=f"{mesh}: error of losses, of gradients", title_justify="left")
        table.add_column("")
        for stage in options.stages:
            table.add_column(f"ZeRO {stage}", justify="right", no_wrap=True)
        with RankPool(MESHES[mesh][0]) as pool:
            for name in names:
                cells = [cell(pool, name, stage, mesh) for stage in options.stages]
                print(f"{mesh}, {name}:", *(text for text, _ in cells), sep="  ", file=sys.stderr, flush=True)
                bad += sum(not good for _, good in cells)
                table.add_row(name, *(text for text, _ in cells))
        print_table(table)
    console().print(f"{bad} cells beyond rounding, {time.monotonic() - started:.0f} s")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())

"""Train with "long_sequence" as without it? Every option, model, ZeRO stage and ring against one process.

Each cell is a step on real ranks over gloo: the largest relative error of the loss on any rank, and of a
parameter's gradient by its norm, against plain PyTorch on one process. A cell beyond what rounding explains
is marked with "!" and makes the exit code 1.

Example:
    python tools/check_long.py
    python tools/check_long.py --families llama mixtral --options all --stages 3 --rings 4
"""

from __future__ import annotations

import itertools
import sys
import time
from functools import partial
from pathlib import Path

from check_training import judged, print_cells
from common import make_parser

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' ranks and models

from tests.dist.deepspeed_ranks import Run
from tests.dist.harness import RankPool
from tests.dist.long_table import FAMILIES, OPTIONS, step_alone, step_on_ring
from tests.dist.training_table import errors

LOSS, GRADIENT = 1e-6, 1e-5


def cell(
    pool: RankPool, family: str, stage: int, option: str, checkpointing: bool, alone: Run
) -> tuple[str, bool]:
    """Return the text of one step and whether it is good."""
    arguments = (family, stage, option, pool.world_size, checkpointing)
    return judged(lambda: errors(pool.run(step_on_ring, *arguments), alone), (LOSS, GRADIENT))


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; return 1 if a cell is beyond rounding."""
    parser = make_parser(__doc__, stages=([0, 1, 2, 3], "of ZeRO"), rings=([1, 2, 4], "ring sizes"))
    parser.add_argument("--families", nargs="*", choices=tuple(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--options", nargs="*", choices=(*OPTIONS, "auto", "off"), default=list(OPTIONS))
    options = parser.parse_args(arguments)
    good, started = list[bool](), time.monotonic()
    alone = {family: step_alone(family) for family in options.families}
    kinds = list(itertools.product(options.families, options.options, (False, True)))
    for ring in options.rings:
        with RankPool(ring) as pool:
            rows = (
                (
                    f"{family}, {option}{', checkpointing' if again else ''}",
                    partial(cell, pool, family, option=option, checkpointing=again, alone=alone[family]),
                )
                for family, option, again in kinds
            )
            good += print_cells(f"ring {ring}: error of the loss, of gradients", options.stages, rows)
    seconds = time.monotonic() - started
    print(f"{good.count(False)} of {len(good)} cells beyond rounding, {seconds:.0f} s")
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())

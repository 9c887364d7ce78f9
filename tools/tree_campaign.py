"""Draw trees of rollouts, run layers and models on them on rings, compare with each rollout by itself.

A round is one random tree of rollouts (branches within answers, equal ones, prefixes of others) for an
operator in float64 or a small model of transformers in float32, on gloo rings of 1 to 4 ranks. Outputs (of
models log-probabilities) of each rollout and all gradients are compared with one process that computes each
rollout by itself: 1e-10 for operators, 2e-5 for models (`tests/dist/tree_rounds.py`). "refused" counts trees
of fewer tokens than ranks, which RWKV refuses; "rounded" those beyond 2e-5 whose ring is nearer to float64
than one process is. The last rows are the tokens that a layer computes and sends,
for the trees and for their rollouts as rows of their own.

Example:
    python tools/tree_campaign.py --rounds 200
    python tools/tree_campaign.py --rounds 5 --seed 1000 --names ALiBi bloom --rings 2 3 --all-rings
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from common import parser_of, print_row, provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' rounds

from tests.dist.harness import RankPool
from tests.dist.tree_rounds import MODELS, OPERATORS, Tokens, play, tokens_of

AT_ONCE = 40  # trees, of which the ranks of a ring are given their part in one call


def append(file: Path, line: str) -> None:
    """Add a line to a file."""
    with file.open("a") as table:
        table.write(line + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Print a row per operator and model; the exit code is the number of wrong rounds, 100 at most."""
    parser = parser_of(
        __doc__, rounds=(200, "trees of each operator and model"), seed=(0, "of the first tree"),
        names=(["all"], "operators and models", ("all", *OPERATORS, *MODELS)),
        rings=([1, 2, 3, 4], "ring sizes, which take turns"),
        all_rings=(False, "each tree on all ring sizes"), json=(False, "one JSON row each"),
        output=("", "append the rows to this file as a table"),
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.seed < 0 or min(options.rings) < 1:
        parser.error(f"expected at least one round from seed 0 on, and rings, got {options}")
    names = [*OPERATORS, *MODELS] if "all" in options.names else options.names
    seeds = range(options.seed, options.seed + options.rounds)
    turns = 1 if options.all_rings else len(options.rings)
    about, command = provenance(), " ".join(sys.argv[1:] if arguments is None else arguments)
    write = partial(append, Path(options.output or os.devnull))
    write(f"`python tools/tree_campaign.py {command}`, {about['date']}, commit {about['commit']}\n")
    bad, heads = 0, set[str]()

    def report(row: dict[str, object], seconds: float | None = None) -> None:
        """Print a row, and write it as one of a table."""
        print_row(row | ({} if seconds is None else {"seconds": round(seconds)}), options.json)
        head = "| " + " | ".join(row) + " |"
        if head not in heads:
            heads.add(head)
            write(f"\n{head}\n" + "|---" * len(row) + "|")
        write("| " + " | ".join(map(str, row.values())) + " |")

    with ExitStack() as stack:
        pools = [stack.enter_context(RankPool(size)) for size in options.rings]
        for name in names:
            started = time.monotonic()
            found = [
                one
                for first in range(0, len(seeds), AT_ONCE)
                for number, pool in enumerate(pools)
                for one in play(name, seeds[first : first + AT_ONCE][number % turns :: turns], pool)
            ]
            wrong = [one.wrong for one in found if one.wrong]
            for text in wrong[:3]:
                print("    " + text.replace("\n", "\n    "), flush=True)
            bad += len(wrong)
            errors = (max(one[at] for one in found) for at in (0, 1))
            named = dict(zip(("outputs", "gradients"), (f"{error:.1e}" for error in errors), strict=True))
            counts = {"rounds": len(found), "wrong": len(wrong)}
            counts |= {key: sum(getattr(one, key) for one in found) for key in ("refused", "rounded")}
            report({"of": name} | counts | named, time.monotonic() - started)
    for size in options.rings:
        each = [tokens_of(seed, size) for seed in seeds]  # of all trees
        for of, at in (("trees", 0), ("rows", 1)):
            total = sum((pair[at] for pair in each), Tokens())
            report({"ring": size, "of": of} | total._asdict())
    return min(bad, 100)


if __name__ == "__main__":
    sys.exit(main())

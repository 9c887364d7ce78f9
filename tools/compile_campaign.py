"""Draw sequences of calls of a compiled function on ranks; each call is equal to the eager one, or refused.

The calls of a round differ in captured numbers and tensors, documents, layouts, options and meshes
(`tests/dist/compiled_rounds.py`). Rounds take the backends in turns.

Example:
    python tools/compile_campaign.py --rounds 200
    python tools/compile_campaign.py --rounds 20 --first 1000 --backends inductor
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

from common import parser_of, print_row

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' rounds

from tests.dist.compiled_rounds import BACKENDS, play
from tests.dist.harness import RankPool


def main(arguments: list[str] | None = None) -> int:
    """Print a row per backend; the exit code is the number of wrong rounds, 100 at most."""
    parser = parser_of(
        __doc__, rounds=(200, "of all backends together"), first=(0, "the seed of the first round"),
        ranks=(2, "of a round"), json=(False, "one JSON row per backend"),
    )  # fmt: skip
    parser.add_argument("--backends", nargs="*", choices=BACKENDS, default=list(BACKENDS))
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.first < 0:
        parser.error(f"expected at least one round from seed 0 on, got {options.rounds} from {options.first}")
    rows = {backend: Counter[str]() for backend in options.backends}
    started = time.monotonic()
    with RankPool(options.ranks) as pool:
        for seed in range(options.first, options.first + options.rounds):
            backend = options.backends[seed % len(options.backends)]
            row, outcomes = rows[backend], pool.collect(play, seed, backend, timeout_s=600)
            found = [one.value for one in outcomes if one.status == "returned"]
            said = [
                f"seed {seed}, rank {one.rank} {one.status}: {one.report}"
                for one in outcomes
                if one.value is None
            ]
            said += [text for one in found for text in one.wrong]
            row.update(rounds=1, equal=sum(one.equal for one in found), wrong=bool(said))
            row.update(refused=sum(len(one.refused) for one in found))
            for text in said[:2]:
                print("    " + text.replace("\n", "\n    "), flush=True)
    for backend, row in rows.items():
        print_row({"backend": backend, **row, "seconds": round(time.monotonic() - started)}, options.json)
    return min(sum(row["wrong"] for row in rows.values()), 100)


if __name__ == "__main__":
    sys.exit(main())

"""How long ranks take to join the monitor process, and how long a verdict takes: 1,024 light ranks.

A light rank is a connection that speaks ds_ring's protocol; all of them live in this process, so the figures
hold this process's own part. The limit of open files is 1,024 for the monitor at its start.

Example:
    python tools/bench_monitor.py --ranks 1024 --rounds 5
"""

from __future__ import annotations

import resource
import statistics
import sys
from pathlib import Path

from bench import parser_of, print_row

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' light ranks

from tests.dist.light_ranks import verdict_seconds

KINDS = ("killed", "stopped", "late in a ring", "late in a collective")


def main(arguments: list[str] | None = None) -> int:
    """Print a row per kind of fault; exit code 1 if a verdict took a second or more."""
    parser = parser_of(__doc__, ranks=1024, rounds=5, heartbeat_s=(3.0, "heartbeat timeout"))
    options = parser.parse_args(arguments)
    slow = False
    for kind in KINDS:
        rounds = []
        for _ in range(options.rounds):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
            rounds.append(verdict_seconds(kind, options.ranks, options.heartbeat_s))
        joins, verdicts = zip(*rounds, strict=True)
        row = {"fault": kind, "ranks": options.ranks, "rounds": options.rounds}
        row |= {"joined_median_s": round(statistics.median(joins), 3), "joined_max_s": round(max(joins), 3)}
        row |= {"verdict_median_s": round(statistics.median(verdicts), 3)}
        row |= {"verdict_max_s": round(max(verdicts), 3)}
        print_row(row)
        slow |= max(verdicts) >= 1.0
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())

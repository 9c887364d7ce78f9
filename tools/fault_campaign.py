"""Ranks are killed, stopped, crash, leave, sleep or send the wrong thing: does every survivor say who it was?

Real processes over gloo: attention alone (and the start before it), a DeepSpeed training step, or parts of
a DeepSpeed run outside the ring: step, backward's collectives, checkpoints, loader, start, at ZeRO 0 to 3
(one stage a round). Mode "late" has a rank that sleeps, or leaves with status 0, at every place outside of
a pass. A round is good if every survivor ends with a typed error that names the culprit, in
time, or, where its collective is none of ours, with the culprit first (or last, where it ended itself) in
its log; and no process hangs.

Example:
    python tools/fault_campaign.py --rounds 10
    python tools/fault_campaign.py --rounds 10 --mode deepspeed --only kill stop
    python tools/fault_campaign.py --rounds 4 --mode outside
    python tools/fault_campaign.py --rounds 2 --mode late
    python tools/fault_campaign.py --rounds 10 --transport pull
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from common import parser_of, print_row

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' campaign

from tests.dist.campaign import Zygote, play
from tests.dist.faults import KINDS, LATE, OUTSIDE, WHILE_STARTING

KINDS_OF = {
    "attention": (*KINDS, *WHILE_STARTING),
    "deepspeed": KINDS,
    "outside": tuple(OUTSIDE),
    "late": tuple(LATE),
}


def main(arguments: list[str] | None = None) -> int:
    """Print a row per fault; the exit code is the number of bad rounds, 100 at most."""
    parser = parser_of(__doc__, rounds=10, json=(False, "one JSON row per fault"))
    parser.add_argument("--mode", choices=tuple(KINDS_OF), default="attention")
    parser.add_argument("--transport", choices=("ring", "pull"), default="ring")
    parser.add_argument("--only", nargs="*", default=[], help="faults whose name contains one of these")
    options = parser.parse_args(arguments)
    every = KINDS_OF[options.mode]
    kinds = [kind for kind in every if not options.only or any(part in kind for part in options.only)]
    if not kinds or options.rounds < 1:
        parser.error(f"expected faults and rounds to play, got --only {options.only} of {every}")
    zygote, bad, started = Zygote(options.mode), 0, time.monotonic()
    for kind in kinds:
        given = {"transport": options.transport}
        rounds = [play(zygote, kind, options.mode, turn, **given) for turn in range(options.rounds)]
        wrong = [one.wrong for one in rounds if one.wrong]
        times = [one.seconds for one in rounds]
        bad += len(wrong)
        row = {
            "fault": kind,
            "mode": options.mode,
            **given,
            "rounds": len(rounds),
            "good": len(rounds) - len(wrong),
        }
        row |= {"median_s": round(statistics.median(times), 2), "slowest_s": round(max(times), 2)}
        print_row(row, options.json)
        for text in wrong[:2]:
            print("    " + text.replace("\n", "\n    "), flush=True)
    zygote.close()
    print(f"{bad} bad rounds, {time.monotonic() - started:.0f} s", flush=True)
    return min(bad, 100)


if __name__ == "__main__":
    sys.exit(main())

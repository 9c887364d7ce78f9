"""Spoil checkpoints, files of a run and loader states at random, and read them: does a process end, or raise?

A round spoils one thing in a few places (bytes, values of a pickle or of JSON, names, kinds of files) and
reads it with its reader: verification, pickles as loading reads them, resize-checkpoint, the owner of
a folder; `ds-ring status` and who failed first in a run; a loader's load_state_dict and its next
epoch (tests/spoiled_files.py). A round is good if that ends, with a result or with a typed error of ds_ring.
Rounds run in a child process: if it ends, or prints nothing for a minute, the round is a crash.

Example:
    python tools/fuzz_files.py --rounds 300
    python tools/fuzz_files.py --rounds 10000 --seed 38
    python tools/fuzz_files.py --rounds 1 --first 4711 --child        # one round once more, in this process
"""

from __future__ import annotations

import io
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

from common import make_parser, print_row

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' ways to spoil a pickle

SILENT_SECONDS = 60.0
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # files are flushed to the disk again and again
KINDS = ("checkpoint", "run", "loader")


def main(arguments: list[str] | None = None) -> int:
    """Print a row per kind; the exit code is the number of bad rounds, 100 at most."""
    parser = make_parser(
        __doc__,
        rounds=300,
        seed=38,
        first=(0, "number of the first round; a round is made of its number and the seed"),
        child=(False, "run the rounds in this process, a line each"),
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"expected --rounds of 1 or more, got {options.rounds}")
    if options.child:
        return play(options.seed, range(options.first, options.first + options.rounds))
    outcomes, bad, started = {kind: Counter[str]() for kind in KINDS}, 0, time.monotonic()
    number, end = options.first, options.first + options.rounds
    while number < end:
        for kind, outcome, text in run_child(options.seed, number, end):
            outcomes[kind][outcome] += 1
            if outcome in ("crash", "untyped"):
                bad += 1
                print(f"round {number} ({kind}): {outcome}: {text}", flush=True)
            number += 1
    for kind, counts in outcomes.items():
        print_row({"kind": kind, "rounds": counts.total(), **counts}, as_json=False)
    print(f"{options.rounds} rounds, {bad} bad, {time.monotonic() - started:.0f} s")
    return min(bad, 100)


def run_child(seed: int, first: int, end: int) -> Iterator[tuple[str, str, str]]:
    """Yield kind, outcome and text of each round of a new process, until one ends it."""
    command = [sys.executable, __file__, "--child", "--seed", str(seed), "--first", str(first)]
    command += ["--rounds", str(end - first)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None
        number = first
        while number < end:
            ready, _, _ = select.select([child.stdout], [], [], SILENT_SECONDS)
            line = child.stdout.readline() if ready else ""
            if not line:
                child.kill()
                errors.seek(0)
                how = f"exit status {child.wait()}" if ready else f"nothing for {SILENT_SECONDS:g} s"
                yield get_kind(number), "crash", f"{how}: {errors.read()[-300:]!r}"
                return
            told = json.loads(line)
            yield told["kind"], told["outcome"], told["text"]
            number += 1


def get_kind(number: int) -> str:
    """Return what a round spoils: of ten six checkpoints, three runs and one loader."""
    return KINDS[0] if number % 10 < 6 else KINDS[1] if number % 10 < 9 else KINDS[2]


def play(seed: int, numbers: range) -> int:
    """Play rounds in this process and print a line for each; return how many were bad."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed logs to the standard output, from its import on
    from ds_ring.errors import RingError
    from tests.spoiled_files import checkpoint_round, loader_round, run_round

    bad, play_one = 0, {"checkpoint": checkpoint_round, "run": run_round, "loader": loader_round}
    for number in numbers:
        draw, kind, text = random.Random(f"{seed} {number}"), get_kind(number), ""
        with tempfile.TemporaryDirectory(prefix="fuzz-", dir=MEMORY) as name, redirect_stdout(io.StringIO()):
            try:
                play_one[kind](draw, Path(name))
                outcome = "read"
            except RingError:
                outcome = "refused"
            except Exception:
                outcome, text, bad = "untyped", traceback.format_exc()[-1500:], bad + 1
        print(json.dumps({"kind": kind, "outcome": outcome, "text": text}), file=out, flush=True)
    return min(bad, 100)


if __name__ == "__main__":
    sys.exit(main())

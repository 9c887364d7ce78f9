"""Show how far a run is: `ds-ring status`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .parsers import Commands, add_command, add_json, refuse_extra

if TYPE_CHECKING:
    from ..status.run_status import RunStatus

ENDED_BADLY, SILENT, PREEMPTED = 1, 4, 75
WATCH_SECONDS = 2.0

_HELP = "how far a run is: attempts, faults, steps, loss, speed, memory, links, checkpoints"
_DESCRIPTION = "Read the folder of a run (run_folder of the cluster YAML), also while it is under way."
_EXAMPLE = """\
examples:
  ds-ring status runs/mine              tables of attempts, ranks, links and checkpoints
  ds-ring status runs/mine --watch      again every two seconds, until the run has ended
  ds-ring status runs/mine --json       one JSON document; with --watch one on each line

exit status: 0 done or under way, 1 failed or interrupted, 2 wrong input, 4 nothing heard for three minutes,
75 preempted (saved, and to be started again)
"""


def add(commands: Commands) -> None:
    """Add the command."""
    status = add_command(commands, "status", run, _HELP, _DESCRIPTION, _EXAMPLE)
    status.add_argument("folder", metavar="RUN", type=Path, help="run_folder of the cluster YAML")
    status.add_argument(
        "--watch", action="store_true", help="again every two seconds, until the run has ended"
    )
    add_json(status)


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Print the state; the exit status is that of the run's state."""
    from ..status.run_status import CONFIRM_SECONDS, read_run

    refuse_extra("status", extra_args)
    while True:
        status = read_run(options.folder, confirm_seconds=CONFIRM_SECONDS)
        _show(status, options)
        if not options.watch or not status.is_under_way:
            fine = status.is_under_way or status.state == "done"
            return 0 if fine else {"silent": SILENT, "preempted": PREEMPTED}.get(status.state, ENDED_BADLY)
        time.sleep(WATCH_SECONDS)


def _show(status: RunStatus, options: argparse.Namespace) -> None:
    from ..status.table import print_status

    if options.json:
        print(json.dumps(status.document(), indent=None if options.watch else 2), flush=True)
        return
    if options.watch and sys.stdout.isatty():
        print("\x1b[2J\x1b[H", end="")  # clear, and begin at the top
    print_status(status)
    sys.stdout.flush()

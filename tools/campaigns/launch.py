"""Launch one run twice at the same instant: one launcher goes on, the other is refused, nothing is lost.

Needs no other hosts and no root. Real launchers, a real engine and a script that saves at each step.

Example:
    python tools/campaign.py launch --rounds 100
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measuring import ResultRow

from tests.dist.launch_rounds import play_rounds

OPTIONS = {"rounds": (5, "of two launches")}


def run(options: Namespace) -> Iterator[ResultRow]:
    """Yield a row for each round."""
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        for number, wrong in enumerate(play_rounds(Path(name), options.rounds)):
            yield ResultRow({"round": number}, {}, wrong)

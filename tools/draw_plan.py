"""A picture of a plan: which rank and hop computes which block of the attention matrix, and what travels.

Example:
    python tools/draw_plan.py --tokens 4096 --ring-size 4 --layout auto --window 512 --out plan.png
    python tools/draw_plan.py --segment-lengths 512 4096 --dilation-rates 1 4
    python tools/draw_plan.py --documents 1000 96 2000 1000
"""

from __future__ import annotations

import argparse
import re
import sys

import numpy as np
from common import make_parser

from ds_ring import Causal, Dilated, Documents, Full, SlidingWindow, build_plan, make_layout
from ds_ring.masks.pattern import Pattern
from ds_ring.measure.schedule_text import format_schedule
from ds_ring.schedule.lowering import lower_pass
from ds_ring_launcher.plan.picture import draw_plan


def read_pattern(options: argparse.Namespace) -> Pattern:
    """Return the pattern that the command line describes."""
    pattern: Pattern = Full() if options.full else Causal()
    if options.segment_lengths:
        pattern = Dilated(tuple(options.segment_lengths), tuple(options.dilation_rates), not options.full)
    elif options.window:
        pattern = SlidingWindow(options.window, not options.full)
    if options.documents:
        pattern = pattern & Documents(np.repeat(np.arange(len(options.documents)), options.documents))
    return pattern


def main(arguments: list[str] | None = None) -> int:
    """Draw, and print the plan's summary."""
    parser = make_parser(
        __doc__, tokens=4096, ring_size=4, layout="auto", full=(False, "not causal"), out="plan.png",
        block=(32, "tokens on a side of a point of the picture"),
    )  # fmt: skip
    parser.add_argument("--window", type=int)
    parser.add_argument("--documents", type=int, nargs="+", help="lengths in tokens; --tokens is their sum")
    parser.add_argument("--segment-lengths", type=int, nargs="+")
    parser.add_argument("--dilation-rates", type=int, nargs="+")
    parser.add_argument("--schedule", type=int, metavar="RANK", help="print this rank's steps, draw nothing")
    parser.add_argument("--stage-shards", type=int, help="most shards of a stage; by default hop by hop")
    options = parser.parse_args(arguments)
    if options.documents:
        options.tokens = sum(options.documents)
    pattern = read_pattern(options)
    layout = make_layout(options.layout, tokens=options.tokens, ring_size=options.ring_size, pattern=pattern)
    plan = build_plan(pattern, layout, stage_shards=options.stage_shards)
    if options.schedule is not None:
        classes = plan.rank(options.schedule).classes
        for backward in (False, True):
            print(format_schedule(lower_pass(classes, plan.group, backward=backward)))
        return 0
    print(plan.summary())
    heads = f"; K/V heads {plan.classes[0].kv_heads}" if len(plan.classes) > 1 else ""
    shape = f"{layout.name} layout of {layout.tokens:,} tokens over {layout.ring_size} ranks"
    name = re.sub(r", -?\d+\)$", ")", str(pattern))  # the digest of Documents
    draw_plan(plan, f"{name}\n{shape}{heads}", options.block, options.out)
    print(f"picture: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

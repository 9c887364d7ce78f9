"""A picture of a plan: which rank and hop computes which block of the attention matrix, and what travels.

Example:
    python tools/draw_plan.py --tokens 4096 --ring-size 4 --layout auto --window 512 --out plan.png
"""

from __future__ import annotations

import argparse
import sys

import matplotlib
import numpy as np

from ds_ring import Causal, Dilated, Full, SlidingWindow, build_plan, make_layout
from ds_ring.schedule.blocks import blocks_of_tiles
from ds_ring.schedule.pattern import Pattern
from ds_ring.schedule.plan import Plan
from ds_ring.schedule.slots import count_slots

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def pattern_of(options: argparse.Namespace) -> Pattern:
    """The pattern that the command line describes."""
    if options.segment_lengths:
        return Dilated(tuple(options.segment_lengths), tuple(options.dilation_rates), not options.full)
    if options.window:
        return SlidingWindow(options.window, not options.full)
    return Full() if options.full else Causal()


def hop_of_blocks(plan: Plan, block: int) -> np.ndarray:
    """For every block of the matrix in slot order (rank after rank) the hop that computes it; -1: none."""
    local = plan.layout.local_tokens
    side = -(-local // block)
    canvas = np.full((side * plan.ring_size,) * 2, -1)
    walk = plan.walks[0]
    for rank in range(plan.ring_size):
        for visit in walk.rank(rank).visits:
            tiles = walk.pattern.tiles(plan.layout.runs(rank), plan.layout.runs(visit.origin))
            blocks = blocks_of_tiles(tiles, block)
            canvas[rank * side + blocks[:, 0], visit.origin * side + blocks[:, 1]] = visit.hop
    return canvas


def payloads(plan: Plan) -> np.ndarray:
    """Tokens that arrive on every rank at every hop, of the first class of heads; [ring_size, hops]."""
    arrived = np.zeros((plan.ring_size, plan.ring_size), dtype=np.int64)
    for rank in range(plan.ring_size):
        for visit in plan.walks[0].rank(rank).visits:
            if visit.hop:
                arrived[rank, visit.hop] += count_slots(visit.held)
    return arrived


def main(arguments: list[str] | None = None) -> int:
    """Draw, and print the plan's summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ring-size", type=int, default=4)
    parser.add_argument("--layout", default="auto")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--window", type=int)
    parser.add_argument("--segment-lengths", type=int, nargs="+")
    parser.add_argument("--dilation-rates", type=int, nargs="+")
    parser.add_argument("--out", default="plan.png")
    options = parser.parse_args(arguments)
    pattern = pattern_of(options)
    layout = make_layout(options.layout, tokens=options.tokens, ring_size=options.ring_size, pattern=pattern)
    plan = build_plan(pattern, layout)
    print(plan.summary())
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6), width_ratios=[3, 2])
    canvas = hop_of_blocks(plan, options.block)
    shown = np.ma.masked_less(canvas, 0)
    image = left.imshow(shown, cmap="viridis", vmin=0, vmax=plan.ring_size - 1, interpolation="nearest")
    side = len(canvas) // plan.ring_size
    for border in range(side, len(canvas), side):
        left.axhline(border - 0.5, color="grey", linewidth=0.6)
        left.axvline(border - 0.5, color="grey", linewidth=0.6)
    left.set(
        title=f"{layout}\nblocks of {options.block} slots",
        xlabel="key slots, rank after rank",
        ylabel="query slots",
    )
    figure.colorbar(image, ax=left, label="hop", ticks=range(plan.ring_size))
    arrived = payloads(plan)
    for hop in range(1, plan.ring_size):
        right.bar(
            np.arange(plan.ring_size), arrived[:, hop], bottom=arrived[:, :hop].sum(1), label=f"hop {hop}"
        )
    right.set(title="tokens that arrive", xlabel="ring rank", ylabel="tokens (K and V of one head)")
    right.set_xticks(range(plan.ring_size))
    right.legend()
    figure.tight_layout()
    figure.savefig(options.out, dpi=110)
    print(f"picture: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

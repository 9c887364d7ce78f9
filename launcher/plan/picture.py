"""Draw a plan: who computes which block of the attention matrix, what travels, and a step's memory by part.

matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ds_ring.config.problems import listed
from ds_ring.errors import RingConfigError
from ds_ring.kernels.flex.blocks import find_block_intervals
from ds_ring.masks.slots import count_slots, repeat_rows
from ds_ring.schedule.plan import Plan
from ds_ring.schedule.rank_plan import HopPlan
from ds_ring.written_files import replaced

from .estimate import Estimate
from .report import describe_size, get_unit

_DPI = 110

_MAX_NAMED = 12  # hops in the legend of a large ring


def new_figure(width_inches: float, height_inches: float) -> Any:
    """Return an empty matplotlib figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RingConfigError(
            f"pictures: expected matplotlib, got: {error}; pip install 'ds_ring[plot]'"
        ) from None
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a picture in the format of its name's ending; as SVG with text that can be read and searched.

    Raises:
        RingConfigError: a name with another ending.
    """
    from matplotlib import rc_context

    path = Path(path)
    ending, formats = path.suffix[1:] or "png", sorted(figure.canvas.get_supported_filetypes())
    if ending not in formats:
        raise RingConfigError.wrong(f"picture {path}", f"a name in {listed(formats)}", ending, "rename it")
    dated: dict[str, Any] = {"metadata": {"Date": None}} if ending == "svg" else {}
    lasting: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "ds_ring",
        "font.sans-serif": ["DejaVu Sans"],
    }
    with rc_context(lasting), replaced(path) as file:
        figure.savefig(file, dpi=_DPI, format=ending, **dated)


class Picture(NamedTuple):
    """A picture's file, which a notebook shows where it is the last expression of a cell."""

    path: str | Path  # of a PNG

    def _repr_png_(self) -> bytes:
        return Path(self.path).read_bytes()


def list_hops(plan: Plan, rank: int) -> Iterator[tuple[int, HopPlan]]:
    """Yield what a rank computes for the first K/V heads: hop (negative where shards go down), data."""
    head_class = plan.classes[0]
    for number, (direction, on_rank) in enumerate(
        zip(head_class.directions, head_class.rank(rank).directions, strict=True)
    ):
        for hop_plan in on_rank.hops:
            if hop_plan is not None and (hop_plan.hop or not number):
                yield hop_plan.hop * direction.sign, hop_plan


def map_hops(plan: Plan, block: int) -> np.ma.MaskedArray:
    """Return for every block of the matrix, rank after rank, the signed hop that computes it, or masked."""
    side = -(-plan.layout.local_tokens // block)
    canvas = np.ma.masked_all((side * plan.ring_size,) * 2, dtype=int)
    for rank in range(plan.ring_size):
        for hop, hop_plan in list_hops(plan, rank):
            queries, keys = plan.layout.runs(rank), plan.layout.runs(hop_plan.origin)
            for intervals in find_block_intervals(plan.classes[0].pattern.tiles(queries, keys), block):
                which, place = repeat_rows(intervals.end - intervals.first)
                columns = hop_plan.origin * side + intervals.first[which] + place
                canvas[rank * side + intervals.row[which], columns] = hop
    return canvas


def received(plan: Plan) -> dict[int, np.ndarray]:
    """Return by signed hop the tokens that arrive on each rank, int64 [ring_size]; hop 0 sends none."""
    arrived: dict[int, np.ndarray] = {}
    for rank in range(plan.ring_size):
        for hop, hop_plan in list_hops(plan, rank):
            if hop:
                arrived.setdefault(hop, np.zeros(plan.ring_size, np.int64))[rank] += count_slots(
                    hop_plan.held
                )
    return dict(sorted(arrived.items(), key=lambda item: (abs(item[0]), -item[0])))


def choose_color(hop: int, most: int) -> tuple[float, float, float, float]:
    """Return grey for the own shard, blues for shards that go up, oranges for those that go down."""
    if not hop:
        return (0.35, 0.35, 0.35, 1.0)
    from matplotlib import colormaps

    shade = 0.35 + 0.6 * (abs(hop) - 1) / max(1, most - 1)
    red, green, blue, opacity = colormaps["Blues" if hop > 0 else "Oranges"](shade)
    return red, green, blue, opacity


def draw_blocks(axes: Any, plan: Plan, block: int, most: int) -> None:
    """Draw the attention matrix in the order of the layout, each block in the colour of its hop."""
    canvas = map_hops(plan, block)
    picture = np.ones((*canvas.shape, 4))
    for hop in np.unique(canvas.compressed()):
        picture[(canvas == hop).filled(False)] = choose_color(int(hop), most)
    axes.imshow(picture, interpolation="nearest")
    side = len(canvas) // plan.ring_size
    for border in range(side, len(canvas), side):
        axes.axhline(border - 0.5, color="black", linewidth=0.6)
        axes.axvline(border - 0.5, color="black", linewidth=0.6)
    step = -(-plan.ring_size // 16)
    middles = [rank * side + side / 2 - 0.5 for rank in range(0, plan.ring_size, step)]
    axes.set_xticks(middles, [str(rank) for rank in range(0, plan.ring_size, step)])
    axes.set_yticks(middles, [str(rank) for rank in range(0, plan.ring_size, step)])
    axes.set(
        title=f"which hop computes which pairs\n(a point: {block} x {block} tokens with any attended pair)",
        xlabel=f"keys, by the rank that owns them ({plan.layout.local_tokens:,} tokens each)",
        ylabel="queries, by the rank that owns them",
    )


def draw_received(axes: Any, plan: Plan, most: int) -> None:
    """Draw a bar for each rank: the tokens that it receives, hop upon hop."""
    below = np.zeros(plan.ring_size, np.int64)
    for hop, tokens in received(plan).items():
        axes.bar(
            np.arange(plan.ring_size), tokens, bottom=below, color=choose_color(hop, most), edgecolor="white"
        )
        below += tokens
    axes.set(title="what each rank receives in a forward pass", xlabel="rank of the ring")
    axes.set_ylabel("tokens (K and V of one K/V head)")
    axes.set_xticks(range(0, plan.ring_size, -(-plan.ring_size // 16)))
    axes.set_ylim(0, max(1, 1.08 * below.max()))
    axes.yaxis.set_major_formatter("{x:,.0f}")


def describe_hop(plan: Plan, hop: int) -> str:
    """Return whose shard a rank r computes with at a hop; without it on two levels, where nodes decide."""
    if not hop:
        return "hop 0: own K/V"
    if any(direction.ranks_per_node for direction in plan.classes[0].directions):
        return f"hop {abs(hop)}"
    return f"hop {abs(hop)}: K/V of rank r {'-' if hop > 0 else '+'} {abs(hop)}"


def draw_plan(plan: Plan, title: str, block: int, path: str | Path) -> None:
    """Write the picture: blocks on the left, traffic on the right, one legend for both.

    Raises:
        RingConfigError: matplotlib is not installed.
    """
    figure = new_figure(13, 7)
    from matplotlib.patches import Patch

    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    hops = [0, *received(plan)]
    most = max(map(abs, hops))
    draw_blocks(left, plan, block, most)
    draw_received(right, plan, most)
    named = hops[:: -(-len(hops) // _MAX_NAMED)]
    figure.legend(
        handles=[Patch(facecolor=choose_color(hop, most), label=describe_hop(plan, hop)) for hop in named],
        title=f"what rank r computes with (ranks modulo {plan.ring_size}); white: nothing is computed",
        loc="outside lower center",
        ncols=min(4, len(named)),
    )
    figure.suptitle("\n".join(textwrap.fill(line, 110) for line in title.split("\n")))
    save_figure(figure, path)


def plot_memory(planned: Estimate) -> Any:
    """Return the figure of a device's memory: a bar for each moment of a step, of the parts in use then.

    Raises:
        RingConfigError: matplotlib is not installed.
    """
    figure = new_figure(11, 4.8)
    from matplotlib import colormaps

    axes, moments, setting = figure.subplots(), planned.moments, planned.setting
    highest, (label, unit) = planned.peak.components, get_unit(planned.peak.total)
    parts = {part for moment in moments for part, size in moment.components.items() if size}
    left = np.zeros(len(moments))
    # The largest part of the highest moment is on the left.
    for number, part in enumerate(sorted(parts, key=lambda part: (-highest.get(part, 0), part))):
        sizes = np.array([moment.components.get(part, 0) for moment in moments]) / unit
        text = f"{part}: {highest[part] / unit:.2f}" if highest.get(part) else part
        axes.barh(range(len(moments)), sizes, left=left, label=text, color=colormaps["tab20"](number))
        left += sizes
    axes.set_yticks(range(len(moments)), [moment.name for moment in moments])
    for row, moment in enumerate(moments):
        axes.text(moment.total / unit, row, f" {moment.total / unit:.2f}", va="center")
    usable = setting.usable_bytes / unit
    axes.axvline(usable, color="black", linestyle="--", label=f"a plan may take: {usable:,.1f}")
    axes.invert_yaxis()  # the first moment on top
    axes.set(xlabel=f"{label} of a device", xlim=(0, 1.1 * max(usable, planned.peak.total / unit)))
    axes.legend(title=f"{label} at: {planned.peak.name}", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"{describe_size(setting)}: memory of a device by part, at each moment of a step")
    return figure

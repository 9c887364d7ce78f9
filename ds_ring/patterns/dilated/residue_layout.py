"""The residue layout of a dilated pattern: in its order of tokens a dilation is block-sparse."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np

from ds_ring.errors import RingLayoutError
from ds_ring.masks.pattern import QueryHead
from ds_ring.masks.slots import IntArray
from ds_ring.patterns.dilated.residues import Residue
from ds_ring.schedule.choose import EVEN, describe_mix, rated
from ds_ring.schedule.layout import ChunkLayout, Layout, Mix, expand_runs

MAX_RUNS = 1024  # per shard, for residue layouts in "auto": tables of tiles grow faster than the runs
_log = logging.getLogger(__name__)


def make_residue(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> Layout:
    """Return the residue layout of a dilated pattern (alone, in a composition, or in some layers)."""
    shapes = _residue_layouts(tokens, ring_size, multiple_of, mix)
    if ring_size == 1:
        return shapes[0]
    options = [rated(mix, layout) for layout in shapes]
    return next((o for o in options if o.imbalance <= EVEN), min(options, key=lambda o: o.imbalance)).layout


@dataclass(frozen=True)
class ResidueLayout(Layout):
    """Sort tokens of each window by residue class, so that a dilation becomes block-sparse.

    Inside windows of `window` positions the order is by (p mod moduli[0], p mod moduli[1], ..., p); with
    moduli that divide one another every class of every modulus is a contiguous range of slots. Windows
    go to ranks as in a chunk layout.

    """

    window: int = 1  # positions of a window; the smallest segment of the pattern
    moduli: tuple[int, ...] = (1,)  # r_1, lcm(r_1, r_2), ...: each divides the next
    chunks_per_rank: int = 1  # 1 for contiguous chunks, 2 for zigzag

    name = "residue"

    def runs(self, ring_rank: int) -> IntArray:
        # a chunk layout of windows instead of tokens
        chunks = ChunkLayout(-(-self.tokens // self.window), self.ring_size, 1, self.chunks_per_rank)
        windows = expand_runs(chunks.runs(ring_rank)) * self.window
        period = self.moduli[-1]
        residues = np.arange(min(period, self.window))
        # lexsort's last key counts most, so the first modulus comes last
        order = np.lexsort([residues % modulus for modulus in reversed(self.moduli)])
        # one run for each residue of each window, in slot order
        starts = (windows[:, None] + residues[order][None, :]).reshape(-1)
        ends = np.repeat(np.minimum(windows + self.window, self.tokens), len(residues))
        # ceil; 0 where the last window ends before the residue
        length = np.maximum(-((starts - ends) // period), 0)
        runs = np.stack([starts, np.full_like(starts, period), length], axis=1)
        return runs[length > 0]

    def __str__(self) -> str:
        how = f"windows of {self.window}, moduli {self.moduli}, chunks {self.chunks_per_rank}"
        return f"{super().__str__()}, {how}"


def _residue_layouts(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> list[ResidueLayout]:
    """Return the residue layouts of contiguous and of zigzag windows.

    Raises:
        RingLayoutError: no dilated pattern, or rates that repeat only after more than the smallest segment.
    """
    for pattern, _ in mix:
        sides = (branch.queries.primitives for branch in pattern.branches(QueryHead()))
        residues = ([part for part in side if isinstance(part, Residue)] for side in sides)
        # shortest segment first; of two dilated patterns combined by `&`, the first one's
        dilations = sorted({some[0] for some in residues if some}, key=lambda residue: residue.length)
        if dilations:
            break
    else:
        raise RingLayoutError.wrong(
            'layout "residue"', "a pattern with Dilated(...)", describe_mix(mix), 'give one, or take "auto"'
        )
    window, rates = dilations[0].length, tuple(dilation.rate for dilation in dilations)
    # each divides the next, as `ResidueLayout` asks for
    moduli = [math.lcm(*rates[: i + 1]) for i in range(len(rates))]
    if moduli[-1] > window:
        raise RingLayoutError(
            f'layout "residue": the rates {rates} repeat after {moduli[-1]} tokens, more'
            f' than the smallest segment {window}; take "auto" or "contiguous"'
        )
    return [ResidueLayout(tokens, ring_size, multiple_of, window, tuple(moduli), n) for n in (1, 2)]


def for_blocks(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> list[Layout] | None:
    """Return the residue layouts of at most `MAX_RUNS` runs a shard; None for a pattern without dilations."""
    if not any(isinstance(part, Residue) for pattern, _ in mix for part in pattern.primitives):
        return None
    try:
        shapes = _residue_layouts(tokens, ring_size, multiple_of, mix)
    except RingLayoutError:
        return []
    few: list[Layout] = [
        shape for shape in shapes if tokens // ring_size <= MAX_RUNS * (shape.window // shape.moduli[-1])
    ]
    if not few:
        _log.info("ds_ring: layout auto left out residue: more than %d runs a shard", MAX_RUNS)
    return few

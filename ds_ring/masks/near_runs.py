"""Find the pairs of runs that may attend to each other, before rectangles are made of all pairs.

A run is an arithmetic progression of tokens. In the residue layout a shard has one run for every residue of
every window, and nearly all pairs of runs differ in residue or segment. Without this filter, the number of
rectangles of two shards, and the time to plan, would grow with the square of the number of runs.
"""

from __future__ import annotations

import numpy as np

from ds_ring.masks.branches import Branch
from ds_ring.masks.partitions import Residue
from ds_ring.masks.slot_ranges import IntArray

MANY_PAIRS = 4096  # filter if there are at least this many pairs of runs
Pairs = tuple[IntArray, IntArray]  # indices of query runs and of key runs, in the order of both


def near_pairs(branches: set[Branch], q_runs: IntArray, k_runs: IntArray) -> Pairs | None:
    """Return the pairs of runs (start, step, length) that some branch may join; None for all pairs.

    A pair is left out only if every branch has a dilation that gives no two of its tokens the same label.
    """
    count = len(q_runs) * len(k_runs)
    if count <= MANY_PAIRS:
        return None
    dilations = {_dilation_of(branch) for branch in branches}
    found: list[IntArray] = []
    for dilation in dilations:
        if dilation is None:
            return None
        (q, q_segment), (k, k_segment) = (_reached(dilation, runs) for runs in (q_runs, k_runs))
        order = np.argsort(k_segment, kind="stable")
        bounds = [np.searchsorted(k_segment[order], q_segment, side=side) for side in ("left", "right")]
        matches = bounds[1] - bounds[0]
        if sum(map(len, found)) + int(matches.sum()) > count:
            return None
        row = np.repeat(np.arange(len(q)), matches)
        within = np.arange(len(row)) - np.repeat(np.cumsum(matches) - matches, matches)
        found.append(q[row] * len(k_runs) + k[order[bounds[0][row] + within]])
    joined = np.unique(np.concatenate(found))
    return joined // len(k_runs), joined % len(k_runs)


def _dilation_of(branch: Branch) -> Residue | None:
    """Return a dilation that labels both sides of a branch; None if there is none."""
    return next(
        (ours for ours, theirs in branch.labels_of if isinstance(ours, Residue) and ours == theirs), None
    )


def _reached(dilation: Residue, runs: IntArray) -> Pairs:
    """Return (run, segment) rows for the segments in which a run may have tokens of a dilation."""
    start, step, length = runs.T
    last = start + (length - 1) * step
    w, rate = dilation.length, dilation.rate
    # Only in this case is the offset inside a segment a residue of the position.
    if w % rate == 0 or (len(last) and w > last.max()):
        rows = np.flatnonzero((dilation.offset - start) % np.gcd(step, rate) == 0)
    else:
        rows = np.arange(len(runs))
    first = start[rows] // w
    counts = last[rows] // w - first + 1
    row = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows[row], first[row] + within

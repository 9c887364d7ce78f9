"""Find the pairs of runs that may attend to each other, where runs are many: before rectangles are made.

Owns the sieve for dilations: a shard in the residue layout has a run for every residue of every window, and
nearly all pairs of runs differ in residue or segment. Without it the rectangles of two shards, and the time
of a plan, grow with the square of their runs.
"""

from __future__ import annotations

import numpy as np

from ds_ring.masks.branches import Branch
from ds_ring.masks.partitions import Residue
from ds_ring.masks.slot_ranges import IntArray

MANY_PAIRS = 4096  # of runs, from which on they are sieved
Pairs = tuple[IntArray, IntArray]  # indices of query runs and of key runs, in the order of both


def near_pairs(branches: set[Branch], q_runs: IntArray, k_runs: IntArray) -> Pairs | None:
    """Return the pairs of runs (start, step, length) that some branch may join; None for all pairs.

    A pair is left out only if every branch has a dilation by which no two of its tokens are labelled alike.
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
    """Return a dilation by which both sides of a branch are labelled, None if there is none."""
    return next(
        (ours for ours, theirs in branch.labels_of if isinstance(ours, Residue) and ours == theirs), None
    )


def _reached(dilation: Residue, runs: IntArray) -> Pairs:
    """Return rows of (run, segment) for the segments in which runs may have tokens of a dilation."""
    start, step, length = runs.T
    last = start + (length - 1) * step
    w, rate = dilation.length, dilation.rate
    # Only then the offset inside a segment is a residue of the position.
    if w % rate == 0 or (len(last) and w > last.max()):
        rows = np.flatnonzero((dilation.offset - start) % np.gcd(step, rate) == 0)
    else:
        rows = np.arange(len(runs))
    first = start[rows] // w
    counts = last[rows] // w - first + 1
    row = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows[row], first[row] + within

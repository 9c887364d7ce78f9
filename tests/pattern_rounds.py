"""Random patterns with tables of labels, each with its multiplicity m(q, k) by plain formulas of tokens.

Owns a round of `tools/campaign.py pattern`: a tree, or a composition with `&` and `|` of which one part has a
table, on rings of 1 to 6 and all layouts, in float64, out, lse, dq, dk and dv each against dense attention.
Rounds run in another process, so that one that a signal ends (SIGFPE) is counted. The formulas share no code
with `ds_ring/masks`. Legend: H heads, G K/V heads, T tokens, D head dim.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import torch

from ds_ring import (
    Causal,
    Chunked,
    Dilated,
    DilatedWindow,
    Documents,
    Full,
    MaskMod,
    PrefixLM,
    RingPatternError,
    Sinks,
    Slices,
    SlidingWindow,
    Tree,
    simulate,
)
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.layout import Layout
from ds_ring.simulation.simulate import SimulationOptions
from tests.cases import LAYOUTS, layout_for
from tests.dilated_definition import RULES, Branches
from tests.reference import Dense, attend_by_counts

RINGS = (1, 2, 3, 4, 5, 6)
HEADS, KV_HEADS, DIM = 4, 2, 4
TOLERANCE = 1e-11  # of results of size 1 in float64
TIMEOUT_S = 600
Rng = np.random.Generator


class Part(NamedTuple):
    """A pattern, and its m for each head, int64 [H, T, T]."""

    pattern: Pattern
    m: np.ndarray

    def __and__(self, rest: Part) -> Part:
        return Part(self.pattern & rest.pattern, self.m * rest.m)

    def __or__(self, rest: Part) -> Part:
        """Raise RingPatternError for patterns whose union cannot be expressed."""
        return Part(self.pattern | rest.pattern, np.maximum(self.m, rest.m))


def for_all_heads(pattern: Pattern, seen: np.ndarray) -> Part:
    return Part(pattern, np.broadcast_to(seen.astype(np.int64), (HEADS, *seen.shape)))


def random_tree(rng: Rng, tokens: int = 0) -> Part:
    """A tree of 1 to 10 nodes in any order that `Tree` takes, perhaps with padding; of T tokens if given."""
    count = int(rng.integers(1, rng.choice([5, 7, 11])))
    # from a path (a parent is one of the newest nodes) to any earlier node, and from one root to mostly roots
    reach, roots = int(rng.choice([1, 3, 100])), float(rng.choice([0.1, 0.4, 0.7]))
    parents = [int(rng.integers(max(0, node - reach), max(node, 1))) for node in range(count)]
    parents = [-1 if not node or rng.random() < roots else parent for node, parent in enumerate(parents)]
    lengths = rng.integers(1, 7, count)
    if tokens:
        lengths = np.maximum(lengths * tokens // (lengths.sum() + count), 1)
        parents, lengths = parents[:tokens], lengths[:tokens]
    total = tokens or int(lengths.sum() + rng.integers(0, 2) * rng.integers(0, 9))
    node = np.full(total, -1)
    node[: lengths.sum()] = np.repeat(np.arange(len(lengths)), lengths)
    above = np.zeros((len(parents) + 1, len(parents) + 1), dtype=bool)  # the last row and column are padding
    for number, parent in enumerate(parents):
        if parent >= 0:
            above[number] = above[parent]
        above[number, number] = True
    at = np.arange(total)
    seen = above[node[:, None], node[None]] & (at[None] <= at[:, None])
    return for_all_heads(Tree(tuple(parents), tuple(lengths.tolist()), total), seen)


def random_documents(rng: Rng, tokens: int) -> Part:
    """Ids that reappear, descend, are negative or large; or positions that begin again."""
    known = ([0, 1, 2, 3], [5, -1, 2, -7], [1 << 40, 3, -(1 << 50), 9])[rng.integers(3)]
    stretches = int(rng.integers(1, 10))
    ids = rng.choice(known, max(tokens, stretches))
    kind = rng.integers(4)
    if kind == 0:  # every token by itself
        ids = ids[:tokens]
    elif kind < 3:  # stretches, in any order or ascending
        ids = ids[np.sort(rng.integers(0, stretches, tokens))]
        ids = np.sort(ids) if kind == 2 else ids
    else:
        starts = np.sort(rng.integers(0, tokens, stretches))
        begins = np.zeros(tokens, dtype=np.int64)
        begins[starts] = starts
        positions = np.arange(tokens) - np.maximum.accumulate(begins)
        number = np.cumsum(positions == 0)
        return for_all_heads(Documents(position_ids=positions), number[:, None] == number)
    return for_all_heads(Documents(ids), (ids[:, None] == ids) & (ids >= 0))


def random_slices(rng: Rng, tokens: int) -> Part:
    """Squares on the diagonal, or rectangles of queries one behind the other, of any kind."""
    ends = np.unique(np.append(rng.integers(1, tokens + 1, int(rng.integers(1, 5))), tokens)).tolist()
    at, seen, slices = np.arange(tokens), np.zeros((tokens, tokens), dtype=bool), []
    q, k = at[:, None], at[None]
    for first, end in zip([0, *ends], ends, strict=False):
        start, stop = (
            (first, end) if rng.random() < 0.5 else np.sort(rng.choice(tokens + 1, 2, False)).tolist()
        )
        kind = str(rng.choice(["full", "causal", "inverse-causal", "bi-causal"]))
        inside = (first <= q) & (q < end) & (start <= k) & (k < stop)
        if kind in ("causal", "bi-causal"):
            inside &= k - stop <= q - end
        if kind in ("inverse-causal", "bi-causal"):
            inside &= k - start >= q - first
        seen |= inside
        slices.append(((first, end), (start, stop), kind))
    return for_all_heads(Slices(tuple(slices)), seen)


def random_dilated(rng: Rng, tokens: int) -> Part:
    lengths = np.sort(rng.choice(np.arange(2, 2 * tokens + 4), 2, False)).tolist()
    rates, causal = np.sort(rng.choice(np.arange(1, 7), 2, False)).tolist(), bool(rng.integers(2))
    rule = str(rng.choice(RULES))
    inputs = tuple(lengths), tuple(rates), causal, rule
    select_heads = (Branches(*inputs).multiplicity(head, HEADS, KV_HEADS, tokens) for head in range(HEADS))
    return Part(Dilated(*inputs), np.stack(list(select_heads)))


def random_mask_mod(rng: Rng, tokens: int) -> Part:
    ids = torch.from_numpy(rng.integers(0, 3, tokens))
    seen = (ids[:, None] <= ids[None]).numpy()
    return for_all_heads(MaskMod(lambda b, h, q, k: ids[q] <= ids[k]), seen)


def random_band(rng: Rng, tokens: int) -> Part:
    """A pattern of bands, ranges, chunks or remainders."""
    at, n = np.arange(tokens), int(rng.integers(1, tokens + 2))
    gap, causal, rate = at[:, None] - at, bool(rng.integers(2)), int(rng.integers(1, 6))
    behind = (gap >= 0) | (not causal)
    both = np.broadcast_to(at, gap.shape), np.broadcast_to(at[:, None], gap.shape)
    rows: list[tuple[Pattern, np.ndarray]] = [
        (Causal(), gap >= 0),
        (Full(), gap == gap),
        (SlidingWindow(n, causal), behind & (abs(gap) < n)),
        (Sinks(n, causal), behind & (both[0] < n)),
        (Chunked(n, causal), behind & (both[0] // n == both[1] // n)),
        (PrefixLM(n), (gap >= 0) | ((both[0] < n) & (both[1] < n))),
        (DilatedWindow(n, rate, causal), behind & (gap % rate == 0) & (abs(gap) <= (n - 1) * rate)),
    ]
    return for_all_heads(*rows[rng.integers(len(rows))])


WITH_TABLES = (random_documents, random_documents, random_tree)
PARTS: tuple[Callable[[Rng, int], Part], ...] = (
    *WITH_TABLES, *[random_band] * 5, random_slices, random_dilated, random_mask_mod
)  # fmt: skip


def random_pattern(rng: Rng) -> Part:
    """A composition of one to four parts, of which the first or a later one has a table."""
    tokens = int(rng.integers(1, 33))
    result = WITH_TABLES[rng.integers(len(WITH_TABLES))](rng, tokens)
    for _ in range(int(rng.integers(0, 4))):
        second = PARTS[rng.integers(len(PARTS))](rng, tokens)
        pair = (result, second) if rng.random() < 0.5 else (second, result)
        try:
            result = pair[0] | pair[1] if rng.random() < 0.4 else pair[0] & pair[1]
        except RingPatternError:  # a union that is refused by name
            result = pair[0] & pair[1]
    return result


KINDS: dict[str, Callable[[Rng], Part]] = {"tree": random_tree, "pattern": random_pattern}


def cases_of(part: Part, seed: int, every: bool) -> Iterator[tuple[Layout, str]]:
    """Layouts and kernels: of two rings one layout each, of other ones for the next seed; or of all rings."""
    tokens, first = part.m.shape[1], seed % len(RINGS)
    for number, ring in enumerate(RINGS):
        if every or number in (first, len(RINGS) - 1 - first):
            name = LAYOUTS[(seed // len(RINGS) + ring) % len(LAYOUTS)]
            kernel = "reference" if (seed + ring) % 5 == 0 else "cpu"
            yield layout_for(name, part.pattern, tokens=tokens, ring_size=ring), kernel


def play(kind: str, seed: int, every: bool = False) -> tuple[int, list[str]]:
    """Return how many passes were run for one random pattern, and what was wrong."""
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    part = KINDS[kind](rng)
    tokens = part.m.shape[1]
    sizes = [(1, heads, tokens, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, grad = (torch.from_numpy(rng.standard_normal(size)) for size in sizes)
    want, wrong, count = attend_by_counts(q, k, v, grad, torch.from_numpy(part.m.copy())), [], 0
    for layout, kernel in cases_of(part, seed, every):
        count += 1
        where = f"{kind} {seed}: {part.pattern!r} on {layout}, {kernel}"
        stage = (0, 1 << 30)[(seed + count) % 4 == 0]
        try:
            result = simulate(
                q, k, v, pattern=part.pattern, layout=layout, grad_out=grad, kernel=kernel,
                measure_memory=False, options=SimulationOptions(stage_bytes=stage, progress=False),
            )  # fmt: skip
        except Exception:
            wrong.append(f"{where}: {traceback.format_exc()}")
            continue
        for name in Dense._fields:
            got, exact = getattr(result, name), getattr(want, name)
            nothing = exact.isneginf()  # the lse of a query that sees no key
            error = float((got - exact).masked_fill(nothing, 0).abs().max())
            if not torch.equal(got.isneginf(), nothing) or not error <= TOLERANCE:  # NaN is not, either
                wrong.append(f"{where}: {name} is off by {error:.2g}")
    return count, wrong


def _played(pipe: Connection, kind: str, seeds: Iterable[int], every: bool) -> None:
    torch.set_num_threads(1)
    for seed in seeds:
        pipe.send(play(kind, seed, every))


def play_apart(kind: str, seeds: Sequence[int], every: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield what `play` finds for each seed, in a process of its own.

    A seed at which that process ends (by a signal, say) or does not go on is wrong and has no passes; another
    process plays those after it.
    """
    context, done = multiprocessing.get_context("fork"), 0
    while done < len(seeds):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_played, args=(theirs, kind, seeds[done:], every))
        child.start()
        theirs.close()
        try:
            while done < len(seeds) and ours.poll(TIMEOUT_S):
                result = ours.recv()
                done += 1
                yield result
        except EOFError:
            pass
        if done < len(seeds):
            child.join(1)
            ended = "did not go on" if child.exitcode is None else f"ended with {child.exitcode}"
            yield 0, [f"{kind} {seeds[done]}: the process {ended}"]
            done += 1
        child.kill()
        child.join()
        ours.close()

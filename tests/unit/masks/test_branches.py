"""What is derived from branches: rewrites against the plain derivation, unions, and what was wrong before."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ring import Causal, Chunked, Documents, Full, PrefixLM, RingPatternError, Sinks, SlidingWindow
from ds_ring.data.layer_patterns import covers
from ds_ring.masks.branches import (
    LARGEST_LABEL,
    Branch,
    Primitive,
    Remainder,
    Segment,
    in_range,
    labelled,
    match_labels,
)
from ds_ring.masks.compose import product, subtract, union
from ds_ring.masks.joins import select_distances, split_by_head
from ds_ring.masks.pattern import BoundPattern, Pattern, QueryHead
from ds_ring.masks.tiles import UNBOUNDED, Axis, Tiles
from ds_ring.patterns.documents.table import Table
from ds_ring.schedule.layout import expand_runs
from ds_ring.schedule.plan import find_head_classes
from tests.cases import rows_of
from tests.mask_table import HEADS, KV_HEADS, MASKS, TOKENS, dense
from tests.unit.masks.painting import coverage, in_order, paint, positions_agree, runs

IDS = (3, 1, 3, -1, 0, 7)


def residues() -> dict[str, Primitive]:
    from ds_ring.patterns.dilated.residues import Residue

    return {str(item): Residue(*item) for item in ((12, 4, 1), (5, 7, 3), (20, 3, 2))}


PRIMITIVES = [
    Segment(7),
    Segment(1000),
    *rows_of("Dilated", lambda _: residues()).values(),
    Remainder(1),
    Remainder(5),
    Table((0, 5, 9, 30, 31, 60), IDS, 1000),
    Table((0, 5, 9, 30, 31, 60), (0, 1, 2, -1, 4, 5), 1000),
]


@pytest.mark.parametrize("primitive", PRIMITIVES, ids=str)
@given(rows=runs)
def test_pieces_are_the_tokens_of_their_label(primitive: Primitive, rows: list[tuple[int, int, int]]) -> None:
    table = in_order(rows)
    axis = Axis.from_runs(table)
    least, greatest = primitive.bounds(axis)
    pieces = primitive.split(axis, least, greatest)
    assert (np.diff(pieces.row) >= 0).all()
    got: list[tuple[int, int]] = []
    for row in range(len(pieces.row)):
        slots = pieces.axis.slot[row] + pieces.axis.slot_step[row] * np.arange(pieces.axis.length[row])
        got += [(int(slot), int(pieces.label[row])) for slot in slots]
    labels = primitive.labels(expand_runs(table))
    want = [(slot, label) for slot, label in enumerate(labels.tolist()) if label >= 0]
    assert sorted(got) == want


IDS_OF = st.lists(st.integers(-2, 5), min_size=6, max_size=6).map(tuple)
STARTS = (0, 5, 9, 30, 31, 60)


@pytest.mark.situation("masks", "labels that do not ascend: trees whose nodes are in any order, negative ids")
@given(ids=IDS_OF, others=IDS_OF, q=runs, k=runs)
def test_tables_join_by_their_ids_in_any_order(
    ids: tuple[int, ...],
    others: tuple[int, ...],
    q: list[tuple[int, int, int]],
    k: list[tuple[int, int, int]],
) -> None:
    """Queries by one table and keys by another, as a tree has them; ids reappear, descend and are negative.

    Before, a label below those that both sides may have was taken for one of the rectangle before it.
    """
    both = labelled(Table(STARTS, ids, 1000)), labelled(Table(STARTS, others, 1000))
    q_runs, k_runs = in_order(q), in_order(k)
    q_at, k_at = expand_runs(q_runs), expand_runs(k_runs)
    of_q, of_k = (
        np.array(item)[np.searchsorted(STARTS, at, side="right") - 1]
        for item, at in ((ids, q_at), (others, k_at))
    )
    want = (of_q[:, None] == of_k) & (of_q[:, None] >= 0)
    for least in (-1000, 0):
        pattern = BoundPattern(((Branch(*both, least=least),),))
        tiles, seen_of = pattern.tiles(q_runs, k_runs), want & (q_at[:, None] - k_at >= least)
        assert positions_agree(tiles, q_at, k_at)
        np.testing.assert_array_equal(paint(tiles, len(q_at), len(k_at)), seen_of)
        np.testing.assert_array_equal(pattern.multiplicity(0, 1, 1, q_at[:, None], k_at[None]), seen_of)


def test_alternatives_that_are_no_product_stay_apart() -> None:
    """Segments of 8 with parity, or segments of 32 modulo 3: not segments of 8 modulo 3."""
    small, large = (labelled(Segment(n)) & labelled(Remainder(m)) for n, m in ((8, 2), (32, 3)))
    pattern = BoundPattern(((Branch(small, small, least=0), Branch(large, large, least=0)),))
    whole, at = np.array([[0, 1, 70]]), np.arange(70)
    want = pattern.multiplicity(0, 1, 1, at[:, None], at[None])
    np.testing.assert_array_equal(paint(pattern.tiles(whole, whole), 70, 70), want)


def test_a_billion_positions_cost_nothing() -> None:
    tokens = 1 << 30
    whole = np.array([[0, 1, tokens]])
    for pattern in (
        Chunked(1 << 20),
        PrefixLM(1 << 22),
        SlidingWindow(4096) | Sinks(4),
        *rows_of("Dilated", lambda dilated: {"": dilated((1 << 28,), (1,))}).values(),
    ):
        assert len(pattern.tiles(whole, whole)) < 4096


@pytest.mark.parametrize("name", MASKS)
def test_rewrites_are_the_plain_derivation(name: str) -> None:
    """Tiles with and without rewrites, and flex's labels, are the formula for every head."""
    for q_runs, k_runs in itertools.product(
        (np.array([[0, 1, TOKENS]]), np.array([[1, 4, 20], [2, 4, 11]])),
        (np.array([[0, 1, 60], [61, 2, 16]]),),
    ):
        q, k = expand_runs(q_runs), expand_runs(k_runs)
        want = dense(name)[:, q][:, :, k]
        for kv_heads, bound in find_head_classes(MASKS[name].pattern, HEADS, KV_HEADS):
            if any(mask.heads for mask in bound.masks):
                continue  # by head: only a kernel asks; tests/dist/test_registry.py
            tables = [
                split_by_head(bound.branches_by_head, Tiles.rectangles(q_runs, k_runs), plain)
                for plain in (0, 1)
            ]
            for kv_head, head_in_group in itertools.product(range(KV_HEADS)[kv_heads], range(2)):
                head = 2 * kv_head + head_in_group
                for tiles in tables:
                    assert positions_agree(tiles, q, k)
                    np.testing.assert_array_equal(paint(tiles, len(q), len(k), head_in_group), want[head])
                if not bound.counts_twice:
                    assert want[head].max() <= 1
                    assert coverage(tables[0], len(q), len(k), head_in_group).max(initial=0) <= 1


@pytest.mark.parametrize("name", MASKS)
def test_multiplicities_are_the_formula_for_every_head(name: str) -> None:
    at = np.arange(TOKENS)
    pairs = at[:, None], at[None, :]
    counts = [MASKS[name].pattern.multiplicity(head, HEADS, KV_HEADS, *pairs) for head in range(HEADS)]
    np.testing.assert_array_equal(counts, dense(name))


@pytest.mark.parametrize("name", MASKS)
def test_rows_that_are_left_out_of_many_have_no_pair(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_ring.masks.pattern.MANY_PAIRS", 0)
    q_runs = np.array([[start, 1, 3] for start in range(0, TOKENS - 3, 3)])
    k_runs = np.array([[start, 2, 2] for start in range(1, TOKENS - 3, 4)])
    for _, bound in find_head_classes(MASKS[name].pattern, HEADS, KV_HEADS):
        few, whole = bound.tiles(q_runs, k_runs), bound.cut(Tiles.rectangles(q_runs, k_runs))
        assert len(few) == len(whole)
        assert (few.pairs * few.multiplicity).sum() == (whole.pairs * whole.multiplicity).sum()


@dataclass(frozen=True)
class Blocks(Pattern):
    """Defined once, by its branches; before, one that said its tiles alone was wrong by 1.0 on flex."""

    length: int

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (match_labels(Segment(self.length)),)


@pytest.mark.parametrize("pattern", [Blocks(16), Blocks(16) & Causal(), Causal() & Blocks(16)], ids=str)
def test_a_pattern_is_defined_once(pattern: Pattern) -> None:
    """Tiles and the multiplicity agree, and `&` asks both of its parts. (test_flex.py: so do flex's labels.)

    On the commit before, `Pattern.tiles` or `cut` could be overridden alone, flex then attended to whatever
    `labels` said, and `&` never asked its parts' `cut`.
    """
    whole, at = np.array([[0, 1, 64]]), np.arange(64)
    want = (at[:, None] // 16 == at[None] // 16) & ((at[:, None] >= at[None]) | (pattern == Blocks(16)))
    tiles = pattern.tiles(whole, whole)
    np.testing.assert_array_equal(paint(tiles, 64, 64), want)
    np.testing.assert_array_equal(pattern.mask(at, at), want)


def test_a_pattern_class_overrides_nothing_but_its_branches() -> None:
    derived = {name for name in vars(Pattern) if not name.startswith("_")} - {
        "branches",
        "conjuncts",
        "json_key",
        "made_in_graphs",
    }
    for kind in Pattern.__subclasses__():
        if kind is not BoundPattern:
            assert not derived & set(vars(kind)), kind


def test_unions_count_each_pair_once() -> None:
    at = np.arange(70)
    q, k = at[:, None], at[None]
    ids = np.repeat([0, 1, 2], [20, 30, 20])
    for pattern, want in (
        (Causal() | Full(), q + k >= 0),
        (Full() | Causal(), q + k >= 0),
        (SlidingWindow(5) | SlidingWindow(9, False), abs(q - k) < 9),
        (PrefixLM(8) | SlidingWindow(4, False), (k <= q) | ((q < 8) & (k < 8)) | (abs(q - k) < 4)),
        (Documents(ids) | SlidingWindow(6), (ids[q] == ids[k]) | ((k <= q) & (q - k < 6))),
        (
            Documents(ids) & Causal() | Documents(ids) & SlidingWindow(6, False),
            (ids[q] == ids[k]) & ((k <= q) | (abs(q - k) < 6)),
        ),
    ):
        counts = pattern.multiplicity(0, 1, 1, q, k)
        assert counts.max() == 1
        if want is not None:
            np.testing.assert_array_equal(counts, want)


@pytest.mark.situation("masks", "a union of patterns that count a pair twice")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Documents([0, 0, 1, 1]), Chunked(3)),
        (Chunked(3), Chunked(4)),
        *rows_of(  # a pair of both would have several m
            "Dilated",
            lambda dilated: {
                "first": (dilated((8, 16), (1, 2)), Causal()),
                "second": (Causal(), dilated((8, 16), (1, 2))),
            },
        ).values(),
    ],
    ids=str,
)
def test_unions_that_cannot_be_told_apart_are_refused_by_name(first: Pattern, second: Pattern) -> None:
    match = r"count once, got others; write the whole mask as one MaskMod"
    with pytest.raises(RingPatternError, match=match) as caught:
        first | second
    assert str(first) in str(caught.value) and str(second) in str(caught.value)


def test_only_patterns_are_united() -> None:
    with pytest.raises(RingPatternError, match=r"\|: expected a pattern on both sides, got int"):
        Causal() | 3  # type: ignore[operator]
    assert str(Causal() & (SlidingWindow(3) | Sinks(2))) == f"{Causal()} & ({SlidingWindow(3)} | {Sinks(2)})"


def test_what_only_looks_like_a_window_is_none() -> None:
    from ds_ring import DilatedWindow

    assert covers(SlidingWindow(9) & Documents([0, 1]), SlidingWindow(9))
    assert not covers(DilatedWindow(5, 2), SlidingWindow(9))
    assert not covers(SlidingWindow(9) | Sinks(1), SlidingWindow(9))


RANGE = st.sampled_from([(0, 12), (0, 5), (3, 9), (7, 12), (4, 4), (9, 2)]).map(lambda ends: in_range(*ends))
BAND = st.sampled_from([(-14, 14), (0, 14), (-3, 2), (-14, -1), (3, 3), (2, 0)])
BRANCHES = st.builds(lambda queries, keys, band: Branch(queries, keys, *band), RANGE, RANGE, BAND)


def pairs(*branches: Branch) -> np.ndarray:
    """In how many branches each pair of the first 12 positions takes part."""
    at = np.arange(12)
    return BoundPattern((branches,)).multiplicity(0, 1, 1, at[:, None], at[None])


@given(whole=BRANCHES, taken=BRANCHES)
def test_the_algebra_of_branches_is_that_of_their_pairs(whole: Branch, taken: Branch) -> None:
    """Difference, product, union and emptiness; ranges and bands may be empty, too."""
    assert whole.is_empty is (not pairs(whole).any())
    if not taken.is_empty:
        np.testing.assert_array_equal(pairs(*subtract(whole, taken)), pairs(whole) * (1 - pairs(taken)))
    np.testing.assert_array_equal(pairs(*product([whole], [taken])), pairs(whole) * pairs(taken))
    either = union((whole,), (taken,))
    np.testing.assert_array_equal(pairs(*either), np.maximum(pairs(whole), pairs(taken)))


def test_labels_of_many_primitives_stay_small_and_compare_as_before() -> None:
    """Three labels of positions near 2**30 make numbers of 90 bits, unless they are renumbered."""
    item = labelled(Segment(1))
    at = (1 << 30) + np.arange(0, 60, 3)
    q, k = Branch(item & item & item, item & item & item).labels(at, at[::-1])
    np.testing.assert_array_equal(q[:, None] == k[None], at[:, None] == at[None, ::-1])
    assert q.min() >= 0 and q.max() < LARGEST_LABEL


# --- tiles -----------------------------------------------------------------------------------------------


Run = tuple[int, int]  # first position and length

run = st.tuples(st.integers(0, 60), st.integers(1, 40))
a_band = given(
    q=run,
    k=run,
    step=st.sampled_from([1, 1, 2, 3, 8]),
    least=st.one_of(st.just(-UNBOUNDED), st.integers(-70, 70)),
    most=st.one_of(st.just(UNBOUNDED), st.integers(-70, 70)),
)


def in_band(q: Run, k: Run, step: int, least: int, most: int) -> tuple[Tiles, np.ndarray]:
    """The band of two runs of positions as tiles, and the pairs in it by its definition."""
    whole = Tiles.rectangles(np.array([[q[0], step, q[1]]]), np.array([[k[0], step, k[1]]]))
    gap = (q[0] + step * np.arange(q[1]))[:, None] - (k[0] + step * np.arange(k[1]))[None, :]
    return select_distances(whole, least, most), (gap >= least) & (gap <= most)


@a_band
def test_a_band_covers_every_pair_once(q: Run, k: Run, step: int, least: int, most: int) -> None:
    tiles, pairs = in_band(q, k, step, least, most)
    np.testing.assert_array_equal(paint(tiles, q[1], k[1]), pairs)
    assert len(tiles) <= 1, "a band is one tile"


def test_several_runs_are_cut_at_once() -> None:
    q_runs, k_runs = np.array([[0, 1, 5], [20, 1, 7]]), np.array([[3, 1, 9], [12, 1, 9]])
    tiles = select_distances(Tiles.rectangles(q_runs, k_runs), 0, UNBOUNDED)
    q, k = np.r_[0:5, 20:27], np.r_[3:12, 12:21]
    np.testing.assert_array_equal(paint(tiles, 12, 18), k[None, :] <= q[:, None])


def test_a_single_pair_outside_a_band_is_no_tile() -> None:
    pair = Tiles.rectangles(np.array([[4, 1, 1]]), np.array([[0, 1, 1]]))
    assert [len(select_distances(pair, *band)) for band in ((0, 3), (5, 9), (4, 4))] == [0, 0, 1]


@pytest.mark.situation("masks", "a tree whose tile has no queries or no keys")
@pytest.mark.parametrize("side", ["q", "k"])
def test_an_empty_tile_is_refused_where_it_is_made(side: str) -> None:
    """aten ended the process at a tile of no tokens (SIGFPE)."""
    tiles = Tiles.rectangles(np.array([[0, 1, 5], [20, 1, 7]]), np.array([[3, 1, 9]]))
    axis = getattr(tiles, side)
    with pytest.raises(RingPatternError, match=r"tokens on each side, got 0 .* in tile 1 of 2"):
        replace(tiles, **{side: replace(axis, length=axis.length * [1, 0])})


# --- patterns --------------------------------------------------------------------------------------------


Runs = list[tuple[int, int, int]]


@given(window=st.integers(1, 40), causal=st.booleans(), q=runs, k=runs)
def test_a_window_sees_itself_and_what_is_before_it(window: int, causal: bool, q: Runs, k: Runs) -> None:
    q_runs, k_runs = in_order(q), in_order(k)
    gap = expand_runs(q_runs)[:, None] - expand_runs(k_runs)[None, :]
    want = (gap >= 0) & (gap <= window - 1) if causal else np.abs(gap) <= window - 1
    pattern = SlidingWindow(window, causal)
    np.testing.assert_array_equal(paint(pattern.tiles(q_runs, k_runs), *gap.shape), want)
    np.testing.assert_array_equal(pattern.mask(expand_runs(q_runs), expand_runs(k_runs)), want)
    assert pattern.is_causal is (causal or window == 1)


def test_a_position_of_minus_one_sees_nothing_and_is_not_seen() -> None:
    positions = np.array([3, -1, 0])
    assert Full().mask(positions, positions).tolist() == [[1, 0, 1], [0, 0, 0], [1, 0, 1]]


def test_patterns_are_values() -> None:
    assert Causal() & SlidingWindow(3, False) == Causal() & SlidingWindow(3, False)
    assert Causal() & SlidingWindow(3, False) != Causal() & SlidingWindow(4, False)
    every = np.arange(9)
    composed, window = Causal() & SlidingWindow(3, False), SlidingWindow(3)
    np.testing.assert_array_equal(composed.mask(every, every), window.mask(every, every))
    assert str(Causal() & Full()) == f"{Causal()} & {Full()}"


def test_a_band_that_is_empty_has_no_tiles() -> None:
    # Queries after their keys by 10 and more, in a window of 5.
    assert len(SlidingWindow(5).tiles(np.array([[50, 1, 8]]), np.array([[0, 1, 40]]))) == 0


@pytest.mark.parametrize("window", [0, -3, 2.0, True, "8", None])
def test_windows_that_cannot_be(window: object) -> None:
    with pytest.raises(RingPatternError, match="window: expected a positive integer") as caught:
        SlidingWindow(window)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


def test_only_patterns_compose() -> None:
    with pytest.raises(RingPatternError, match="&: expected a pattern on both sides, got int"):
        Causal() & 3  # type: ignore[operator]

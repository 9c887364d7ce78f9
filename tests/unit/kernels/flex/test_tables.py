"""Tables of blocks as the kernels of every torch read them: random masks, and faults that are put in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from ds_ring import Causal, Chunked, Dilated, Documents, Full, PrefixLM, Sinks, SlidingWindow, Tree
from ds_ring.kernels.flex.block_mask import BlockTable, HopMasks, HopTensors
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import Tiles
from ds_ring.schedule.plan import build_plan
from tests.cases import document_ids, layout_for
from tests.flex_tables import TEMPLATES, find_table_faults
from tests.unit.masks.painting import paint

BLOCK, MASKS, HEADS = 16, 200, 2


def draw_tree(random: np.random.Generator, tokens: int) -> Pattern:
    lengths = random.multinomial(tokens - 12, np.full(12, 1 / 12)) + 1
    parents = [-1, *(int(random.integers(-1, node)) for node in range(1, 12))]
    return Tree(tuple(parents), tuple(lengths.tolist()), tokens)


DRAWS: tuple[Callable[[np.random.Generator, int], Pattern], ...] = (
    lambda random, tokens: Causal(),
    lambda random, tokens: Full(),
    lambda random, tokens: SlidingWindow(int(random.integers(1, tokens)), causal=bool(random.integers(2))),
    lambda random, tokens: Documents(document_ids(tokens, int(random.integers(5, 200)))),
    lambda random, tokens: Documents(document_ids(tokens, 80, int(random.integers(99)))) & Causal(),
    lambda random, tokens: Chunked(int(random.integers(3, tokens))),
    lambda random, tokens: PrefixLM(int(random.integers(1, tokens))),
    lambda random, tokens: Sinks(int(random.integers(1, 40))) | SlidingWindow(int(random.integers(1, 90))),
    lambda random, tokens: Dilated((64, 256, 1024), (1, 2, 4), bool(random.integers(2))),
    draw_tree,
)  # fmt: skip


def draw_hops(seed: int) -> Iterator[tuple[Pattern, Tiles]]:
    """The hops of a rank of a random mask, layout and ring, with five to nine blocks a rank."""
    random = np.random.default_rng(seed)
    ring_size = int(random.integers(1, 4))
    tokens = ring_size * (BLOCK * int(random.integers(5, 10)) - int(random.integers(BLOCK)))
    pattern = DRAWS[seed % len(DRAWS)](random, tokens)
    name = ("contiguous", "zigzag", "striped")[int(random.integers(3))]
    layout = layout_for(name, pattern, tokens=tokens, ring_size=ring_size)
    plan = build_plan(pattern, layout, query_heads=2 * HEADS, kv_heads=2).rank(
        int(random.integers(ring_size))
    )
    for head_class in plan.classes:
        yield from ((pattern, hop.tiles) for hop in head_class.hops if len(hop.tiles))


def find_blocks(tiles: Tiles) -> tuple[HopTensors, np.ndarray, np.ndarray]:
    """The tables, and from the painted tiles which blocks have a pair, and which pairs alone."""
    (q0, n), (k0, m), tensors, block = HopMasks().get(tiles, BLOCK, torch.device("cpu"))
    rows, columns = -(-n // block), -(-m // block)
    heads = tensors.partial_rows.counts.shape[1]
    whole = np.zeros((heads, rows * block, columns * block), dtype=bool)
    for head in range(heads):
        whole[head, :n, :m] = paint(tiles, q0 + n, k0 + m, head)[q0:, k0:] > 0
    blocks = whole.reshape(heads, rows, block, columns, block)
    return tensors, blocks.any((2, 4)), blocks.all((2, 4))


def test_every_row_is_right_with_the_strides_of_every_torch() -> None:
    hops, unequal = 0, 0
    for seed in range(MASKS):
        for pattern, tiles in draw_hops(seed):
            tensors, blocks, full = find_blocks(tiles)
            for version, own_strides in TEMPLATES.items():
                faults = find_table_faults(tensors, blocks, full, own_strides)
                assert not faults, (seed, pattern, version, faults[:3])
            sides = (
                (tensors.partial_rows, tensors.full_rows),
                (tensors.partial_columns, tensors.full_columns),
            )
            unequal += any(len({int(table.counts.max()) for table in pair}) == 2 for pair in sides)
            hops += 1
    assert hops > MASKS and unequal > hops // 2, (hops, unequal)  # else a common width would prove nothing


def test_the_installed_templates_read_the_tables_in_a_way_that_is_known() -> None:
    """Inductor's offset of a row of the full tables is the partial table's, or one of their own."""
    common = pytest.importorskip("torch._inductor.kernel.flex.common")
    text = "".join(map(common.load_flex_template, ("flex_attention", "flex_backwards")))
    offsets = set(re.findall(r"FULL_(?:KV|Q)_IDX \+ (\w+)", text))
    own = {"sparse_full_kv_idx_offset", "sparse_full_q_idx_offset"}
    assert offsets in (own, {name.replace("_full", "") for name in own})
    assert len(re.findall(r'stride\("FULL_', text)) == 9 * (offsets == own)


def trim(table: BlockTable) -> BlockTable:
    """A table that is as wide as its own widest row, as each one was."""
    width = max(int(table.counts.max()), 2)
    return BlockTable(table.counts, table.blocks[..., :width].contiguous())


def change(table: BlockTable, count: int = 0, block: int = 0) -> BlockTable:
    """A table with another count or first block in its fullest row."""
    counts, blocks = (x.clone() for x in table)
    row = int(counts[0, 0].argmax())
    counts[0, 0, row] += count
    blocks[0, 0, row, 0] += block
    return BlockTable(counts, blocks)


@pytest.mark.parametrize(
    ("name", "seed_fault", "versions"),
    [
        ("partial_rows", trim, {"2.11"}), ("full_rows", trim, set()), ("partial_columns", trim, {"2.11"}),
        ("full_rows", lambda table: change(table, block=99), {"2.11", "2.12.1"}),
        ("full_rows", lambda table: change(table, block=1), {"2.11", "2.12.1"}),
        ("partial_rows", lambda table: change(table, count=1), {"2.11", "2.12.1"}),
        ("full_columns", lambda table: change(table, count=-1), {"2.11", "2.12.1"}),
    ],
    ids=["trimmed rows", "the widest rows", "trimmed columns", "beyond", "another", "one more", "one less"],
)  # fmt: skip
def test_a_wrong_table_is_found(
    name: str, seed_fault: Callable[[BlockTable], BlockTable], versions: set[str]
) -> None:
    layout = layout_for("contiguous", Causal(), tokens=7 * BLOCK, ring_size=1)
    tensors, blocks, full = find_blocks(build_plan(Causal(), layout).rank(0).classes[0].hops[0].tiles)
    wrong = tensors._replace(**{name: seed_fault(getattr(tensors, name))})
    found = {version for version, own in TEMPLATES.items() if find_table_faults(wrong, blocks, full, own)}
    assert found == versions

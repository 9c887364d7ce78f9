"""How FlexAttention's Triton kernels read a hop's tables of blocks, and what is wrong with what they read.

Written from the templates of torch 2.8, 2.9, 2.11, 2.13 and 2.15, not from ds_ring. Before torch 2.12.1 the
full table is indexed with the strides of the partial one. The first entry of a row is read even if the row
has no block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ds_ring.kernels.flex.block_mask import BlockTable, HopTensors

# By the oldest version of torch that reads so: whether the full tables have strides of their own.
TEMPLATES = {"2.11": False, "2.12.1": True}


def find_table_faults(
    tensors: HopTensors, blocks: np.ndarray, full: np.ndarray, own_strides: bool
) -> list[str]:
    """Return what a kernel would compute wrongly.

    Args:
        tensors: the hop's.
        blocks, full: which blocks have attended pairs, and which no others; bool [heads, rows, columns].
        own_strides: a value of `TEMPLATES`.
    """
    faults = []
    sides = (
        ("rows", tensors.partial_rows, tensors.full_rows, blocks, full),
        ("columns", tensors.partial_columns, tensors.full_columns, blocks.mT, full.mT),
    )
    for side, partial_table, full_table, any_pair, all_pairs in sides:
        strides = full_table if own_strides else partial_table
        for head, row in np.ndindex(*any_pair.shape[:2]):
            places = f"{side}, head {head}, row {row}"
            lists = []
            for table, layout in ((partial_table, partial_table), (full_table, strides)):
                try:
                    lists.append(list(_read_row(table, layout, head, row, any_pair.shape[2])))
                except IndexError as error:
                    faults.append(f"{places}: {error}")
            if len(lists) < 2:
                continue
            seen = sorted(lists[0] + lists[1])
            if seen != np.flatnonzero(any_pair[head, row]).tolist():
                faults.append(f"{places}: blocks {seen}")
            if not all_pairs[head, row][lists[1]].all():
                faults.append(f"{places}: full blocks {lists[1]}")
    return faults


def _read_row(table: BlockTable, layout: BlockTable, head: int, row: int, columns: int) -> Iterator[int]:
    """Yield the blocks of a row, read at offsets that the strides of `layout` give."""
    counts, entries = (x.flatten().numpy() for x in table)
    count_at = head * layout.counts.stride(1) + row
    first = head * layout.blocks.stride(1) + row * layout.blocks.stride(2)
    if count_at >= len(counts):
        raise IndexError(f"count {count_at} of {len(counts)}")
    count = int(counts[count_at])
    if first + max(count, 1) > len(entries):
        raise IndexError(f"entries {first} to {first + max(count, 1)} of {len(entries)}")
    for place in range(first, first + max(count, 1)):
        if not 0 <= entries[place] < columns:
            raise IndexError(f"block {entries[place]} of {columns}")
        if place < first + count:
            yield int(entries[place])


def find_outside(tensors: HopTensors, rows: int, columns: int, own_strides: bool) -> list[str]:
    """Return what a kernel would read outside the tables, and numbers of blocks that there are not."""
    faults = []
    sides = (
        ("rows", tensors.partial_rows, tensors.full_rows, rows, columns),
        ("columns", tensors.partial_columns, tensors.full_columns, columns, rows),
    )
    for side, partial_table, full_table, lines, blocks in sides:
        for table in (partial_table, full_table):
            layout = full_table if table is full_table and own_strides else partial_table
            for head, line in np.ndindex(table.counts.shape[1], lines):
                try:
                    list(_read_row(table, layout, head, line, blocks))
                except IndexError as error:
                    faults.append(f"{side}, head {head}, row {line}: {error}")
    return faults

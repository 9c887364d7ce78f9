"""Tables that fit the terminal: a wide one is printed transposed."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

WIDTH = 80  # where stdout is no terminal


def console() -> Console:
    """Return a console on stdout, as wide as the terminal or 80 columns."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def print_table(table: Table) -> None:
    """Print to stdout; turned where that is too narrow.

    A table of which no number can be read is worth nothing: what does not fit has its columns for rows.
    """
    here = console()
    # every cell unbroken, and every word of a header
    words = [[*map(str, column.cells), *str(column.header).split(), ""] for column in table.columns]
    widths = [max(map(len, column_words)) for column_words in words]
    if 1 + sum(width + 3 for width in widths) > here.width:
        table = _turned(table)
    elif here.measure(table, options=here.options.update(width=1000)).maximum > here.width:
        for column, width in zip(table.columns, widths, strict=True):
            column.width = width
    here.print(table)


def _turned(table: Table) -> Table:

    turned = Table(title=table.title, title_justify="left", caption=table.caption, caption_justify="left")
    first, *others = table.columns
    turned.add_column(str(first.header))
    for cell in first.cells:
        turned.add_column(str(cell), justify="right")
    for column in others:
        turned.add_row(str(column.header), *map(str, column.cells))
    return turned

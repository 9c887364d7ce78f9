"""Compare the layout that `auto` takes for packed documents with "balanced": work, tokens sent, time.

Documents are drawn from three distributions for each number of ranks, 8 Ki tokens a rank. It ends with 1 if
`auto` is slower than "balanced" in a draw, by the model of `ds_ring/schedule/choose.py`.

Example:
    python tools/document_layouts.py --ranks 8 64 --draws 1000
"""

from __future__ import annotations

import sys

from common import parser_of, print_row

from ds_ring_launcher.plan.documents import DISTRIBUTIONS, PERCENTILES, packed_figures


def main() -> int:
    """Print a row for each distribution and number of ranks."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--shard", type=int, default=8192, help="tokens of a rank")
    options = parser.parse_args()
    slower = 0
    for ranks in options.ranks:
        for source in DISTRIBUTIONS:
            found = packed_figures(source, ranks * options.shard, ranks, options.draws)
            slower += found.slower
            figures = {name: [round(value, 3) for value in row] for name, row in found.rows.items()}
            sizes = {"documents": source, "ranks": ranks, "draws": options.draws, "percentiles": PERCENTILES}
            print_row({**sizes, "other layout": found.other, "slower": found.slower, **figures})
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())

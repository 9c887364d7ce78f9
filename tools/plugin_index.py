"""Write `ds_ring/plugins.json`, the index of all `plugin.py` files: python tools/plugin_index.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ds_ring.plugin import INDEX, make_index


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the index."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    INDEX.write_text(make_index())


if __name__ == "__main__":
    main()

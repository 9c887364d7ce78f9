"""Write `ds_ring/plugins.json`, the index of all `plugin.py` files: python tools/plugin_index.py."""

from __future__ import annotations

import argparse

from ds_ring.plugin import write_index

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    write_index()

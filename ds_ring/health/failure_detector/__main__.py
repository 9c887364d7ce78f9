"""Start the monitor process: `python -I -S FOLDER_OF_THIS_FILE`, its settings as one line on standard input.

Loads this folder as a package of its own, `failure_detector`. As `ds_ring.health.failure_detector` it would
need ds_ring where `-I -S` finds it, and with the folder on `sys.path` its files could hide modules of the
standard library.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    """Serve until every rank is gone."""
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != FOLDER]
    spec = importlib.util.spec_from_file_location("failure_detector", FOLDER / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules["failure_detector"] = importlib.util.module_from_spec(spec)
    importlib.import_module("failure_detector.server").main()


main()

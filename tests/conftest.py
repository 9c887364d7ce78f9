"""Puts the repository on sys.path, so that `ds_ring` and `tests.dist.harness` are found by every test.

Spawned ranks inherit the parent's sys.path, so what is importable here is importable there.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

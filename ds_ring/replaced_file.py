"""Replace a small file at once, so that a reader sees the old text or the new one. Standard library only.

For figures and pages that are renewed: after a crash of the machine either text may be lost. What must not be
lost is written by `config/json_text.py`.
"""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write the text beside the file, then put it in its place.

    Raises:
        OSError: it cannot be written; the old file stays.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)

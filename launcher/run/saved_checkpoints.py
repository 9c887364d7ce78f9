"""List the checkpoints of a folder by what their manifests say of themselves; reads no other file of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "ds_ring_manifest.json"  # written last: a folder without one is not whole
_MOST_BYTES = 1 << 24
_MOST = 5


@dataclass(frozen=True)
class Checkpoint:
    """Describe a checkpoint; None is unknown. `is_latest`: the one that is loaded next."""

    tag: str
    step: int | None
    total_bytes: int | None
    saved_at: float
    is_latest: bool


def newest_checkpoints(folder: Path | None) -> tuple[Checkpoint, ...]:
    """Return the newest checkpoints that have a manifest, at most five, the newest first."""
    if folder is None:
        return ()
    found = []
    latest = _latest(folder)
    try:
        for path in folder.iterdir():
            if not path.name.startswith(".") and (path / MANIFEST).is_file():
                found.append(((path / MANIFEST).stat().st_mtime, path.name))
    except (OSError, ValueError):
        return ()
    newest = sorted(found, reverse=True)[:_MOST]
    return tuple(
        Checkpoint(tag, *_step_and_bytes(folder / tag / MANIFEST), saved_at, tag == latest)
        for saved_at, tag in newest
    )


def _latest(folder: Path) -> str:
    try:
        return (folder / "latest").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _step_and_bytes(path: Path) -> tuple[int | None, int | None]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None, None
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return int(said["global_steps"]), sum(int(one["bytes"]) for one in said["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None

"""Estimate memory, bytes and time of a run; here: find hardware descriptions, without slow imports."""

from __future__ import annotations

from pathlib import Path

from .. import configs_folder


def known_hardware() -> dict[str, Path]:
    """Return the descriptions that come with this package, by name."""
    return {path.stem: path for path in sorted((configs_folder() / "hardware").glob("*.yaml"))}

"""Estimate memory, bytes and time of a run; here: find hardware and models by name, without slow imports."""

from __future__ import annotations

from pathlib import Path

from .. import configs_folder


def known_models() -> dict[str, Path]:
    """Return the config.json files that come with this package, by name."""
    return {path.stem: path for path in sorted((configs_folder() / "models").glob("*.json"))}


def known_hardware() -> dict[str, Path]:
    """Return the descriptions that come with this package, by name."""
    return {path.stem: path for path in sorted((configs_folder() / "hardware").glob("*.yaml"))}


def is_there(path: Path) -> bool:
    """Return whether a path exists; False for a name that no file can have."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False

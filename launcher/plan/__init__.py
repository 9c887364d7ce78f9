"""Estimate memory, bytes and time of a run; here: find hardware and models by name, without slow imports."""

from __future__ import annotations

import os
from pathlib import Path

from ds_ring.config.messages import sentence, shown
from ds_ring.config.problems import did_you_mean
from ds_ring.errors import RingConfigError

from .. import configs_folder


def known_models() -> dict[str, Path]:
    """Return the config.json files that come with this package, by name."""
    return {path.stem: path for path in sorted((configs_folder() / "models").glob("*.json"))}


def known_hardware() -> dict[str, Path]:
    """Return the descriptions that come with this package, by name."""
    return {path.stem: path for path in sorted((configs_folder() / "hardware").glob("*.yaml"))}


def find_file(what: str, name: str, known: dict[str, Path], kind: str, *endings: str) -> Path:
    """Return the file of a known name, or the path of another one.

    Args:
        what: for errors.
        name: a known name in any case, or a path; one without a folder needs one of the endings, or a file.
        known: files by name.
        kind: of another file, for the error.
        endings: of such files.

    Raises:
        RingConfigError: neither.
    """
    path = known.get(name.lower(), Path(name))
    if path.suffix in endings or len(path.parts) > 1 or os.path.exists(path):
        return path
    near = did_you_mean(name, known)
    expected = f"one of {', '.join(known)}" if near is None else f"a known name or the path of {kind}"
    advice = f"give one of these, or the path of {kind}" if near is None else f"did you mean '{near}'?"
    raise RingConfigError(f"{what}: {sentence(expected, shown(name), advice)}")

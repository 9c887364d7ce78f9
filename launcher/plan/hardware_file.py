"""Find a hardware description by its name or its file."""

from __future__ import annotations

from pathlib import Path

from ds_ring.config.messages import config_error, did_you_mean, shown

from ..cluster.yaml_file import read_mapping
from .hardware import Hardware, hardware_from

# Beside this package where it is installed, in configs/ where it is a checkout.
_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE / "hardware", _PACKAGE.parent / "configs" / "hardware")


def known_hardware() -> dict[str, Path]:
    """Return the descriptions that come with this package, by name."""
    return {path.stem: path for folder in _FOLDERS for path in sorted(folder.glob("*.yaml"))}


def read_hardware(name_or_path: str) -> Hardware:
    """Read a description that comes with the package, or a YAML file; RingConfigError for anything else."""
    known = known_hardware()
    path = Path(name_or_path)
    if name_or_path.lower() in known:
        path = known[name_or_path.lower()]
    elif path.suffix not in (".yaml", ".yml") and not _exists(path):
        near = did_you_mean(name_or_path, known)
        advice = f"did you mean '{near}'?" if near else "or the path of a YAML file with the keys of these"
        raise config_error(
            "hardware", f"expected one of {', '.join(known)}, got {shown(name_or_path)}; {advice}"
        )
    return hardware_from(read_mapping(path), str(path))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False

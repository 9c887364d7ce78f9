"""Apply a patch for another package to a copy of the installed package; its tests come with it.

Example:
    python -m tools.upstream.apply --package accelerate --folder /tmp/patched
    PYTHONPATH=/tmp/patched/src pytest /tmp/patched/tests
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

# Where a package's repository has its sources.
SOURCES = {"accelerate": "src", "trl": "."}


def patched(package: str, folder: Path) -> Path:
    """Copy the installed package into `folder`, as its repository has it, and apply its patch there.

    Returns:
        What PYTHONPATH needs.

    Raises:
        SystemExit: the patch is for other files than those installed.
    """
    (patch,) = Path(__file__).parent.glob(f"{package}-*.patch")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package}: expected an installed package, got none; pip install {package}")
    sources = folder / SOURCES[package]
    shutil.copytree(Path(spec.origin).parent, sources / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = ["patch", "-p1", "--forward", "--no-backup-if-mismatch", "--fuzz=0", "-i", str(patch)]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        failed = [line for line in done.stdout.splitlines() if "FAILED" in line or "can't find" in line]
        expected = patch.stem.removeprefix(f"{package}-")
        raise SystemExit(
            f"{package}: expected the files of {expected}, got {version(package)} with others"
            f" ({'; '.join(failed)}); make a new patch, or install that version"
        )
    return sources


def main() -> None:
    """Apply the patch that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", choices=[*SOURCES], default="accelerate", help="whose patch")
    parser.add_argument("--folder", default="runs/patched", help="for the copy (runs/patched)")
    options = parser.parse_args()
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    print(patched(options.package, folder))


if __name__ == "__main__":
    main()

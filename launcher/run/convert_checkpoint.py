"""Make the newest whole checkpoint of a folder one that any number of ranks can load.

Run in a process of its own by relaunch.py: it imports torch and DeepSpeed, which the launcher does not.

    python -m ds_ring_launcher.run.convert_checkpoint FOLDER WORLD_SIZE ATTEMPT_FOLDER
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from ds_ring.errors import RingCheckpointError, RingError
from ds_ring.integrations.checkpoint.manifest import earlier_tags, read_latest, verify_checkpoint


def convert(folder: Path, world_size: int, attempt_folder: Path) -> str | None:
    """Return the tag that `world_size` ranks can load, converted if need be; None where none is whole."""
    from ds_ring.integrations.checkpoint.resize import is_universal, ranks_of, resize_checkpoint
    from ds_ring.integrations.deepspeed.run_report import attempt_of

    newest = read_latest(folder)
    if newest is None:
        return None
    for tag in (newest, *earlier_tags(folder, newest)):
        try:
            verify_checkpoint(folder, tag)
        except RingCheckpointError as error:
            print(f"{tag}: not whole, trying the one before: {error}", file=sys.stderr)
            continue
        if is_universal(folder / tag) or ranks_of(folder / tag) in (0, world_size):
            return tag
        return resize_checkpoint(folder, tag, attempt=attempt_of(attempt_folder))
    return None


def main(arguments: list[str]) -> int:
    """Print the tag; return 1 where it cannot be converted."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout
            tag = convert(Path(arguments[0]), int(arguments[1]), Path(arguments[2]))
    except RingError as error:
        print(error, file=sys.stderr)
        return 1
    print(tag or "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

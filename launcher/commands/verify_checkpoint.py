"""Compare a checkpoint with its manifest: `ds-ring verify-checkpoint`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .parsers import Commands, add_command, add_json, print_json, readable, refuse_extra

DAMAGED, MISSING = 1, 3

_HELP = "compare a checkpoint with its manifest"
_DESCRIPTION = "Read every file of a checkpoint and compare sizes and sha256 with its manifest."
_EXAMPLE = """\
examples:
  ds-ring verify-checkpoint runs/train_lm/checkpoints      read the latest checkpoint, compare its manifest
  ds-ring verify-checkpoint checkpoints --tag mine --accept    seal one that was written without ds_ring

exit status: 0 whole, 1 not whole (damaged, or never finished), 2 wrong input, 3 no such checkpoint
"""


def add(commands: Commands) -> None:
    """Add the command."""
    verify = add_command(commands, "verify-checkpoint", run, _HELP, _DESCRIPTION, _EXAMPLE)
    verify.add_argument("folder", metavar="DIR", type=Path, help="what save_checkpoint was given")
    verify.add_argument("--tag", help="which checkpoint; by default the one that DIR/latest names")
    verify.add_argument(
        "--accept",
        action="store_true",
        help="write the manifest of a checkpoint that has none and that you know to be whole; needs --tag",
    )
    add_json(verify)


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Print what was compared; the exit status tells a damaged checkpoint from one that is not there."""
    from ds_ring.errors import RingCheckpointError, RingCheckpointMissingError
    from ds_ring.integrations.checkpoint.manifest import accept_checkpoint, verify_checkpoint

    refuse_extra("verify-checkpoint", extra_args)
    _check(options)
    try:
        if options.accept:
            accept_checkpoint(options.folder, options.tag)
        manifest = verify_checkpoint(options.folder, options.tag)
    # First: it is also a RingCheckpointError.
    except RingCheckpointMissingError as error:
        return _say("no such checkpoint", error, MISSING)
    except RingCheckpointError as error:
        return _say("not whole", error, DAMAGED)
    total_bytes = sum(record.bytes for record in manifest.files)
    if options.json:
        found = {"files": len(manifest.files), "bytes": total_bytes, "global_steps": manifest.global_steps}
        print_json(found)
    else:
        print(
            f"whole: {len(manifest.files)} files, {total_bytes:,} bytes, after step {manifest.global_steps}"
        )
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise RingConfigError for options that do not go together, or name no folder."""
    from ds_ring.errors import RingConfigError

    if options.accept and options.tag is None:
        raise RingConfigError("--accept: expected --tag with it, got none; name the checkpoint to accept")
    check_folder(options.folder, options.tag)


def check_folder(folder: Path, tag: str | None) -> None:
    """Raise RingConfigError for what names no folder, or no tag in one."""
    from ds_ring.config.messages import shown
    from ds_ring.errors import RingConfigError

    try:
        is_folder = folder.is_dir()
    except (OSError, ValueError):
        is_folder = False
    if not is_folder:
        raise RingConfigError(
            f"expected the folder that save_checkpoint was given, got {shown(str(folder))}, which"
            " is no folder; check the path"
        )
    if tag is not None and (
        tag in (".", "..") or "/" in tag or not tag.isprintable() or len(os.fsencode(tag)) > 255
    ):
        raise RingConfigError(f"--tag: expected the name of a folder, got {shown(tag)}; check the tag")


def _say(what: str, error: Exception, status: int) -> int:
    print(f"ds-ring: error: {what}: {readable(str(error))}", file=sys.stderr)
    return status

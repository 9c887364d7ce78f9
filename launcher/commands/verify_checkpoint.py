"""`ds-ring verify-checkpoint`: a checkpoint against its manifest."""

from __future__ import annotations

import argparse
from pathlib import Path

from .parsers import Commands, add_command, refuse_extra

_EXAMPLE = """\
examples:
  ds-ring verify-checkpoint runs/train_lm/checkpoints      read the latest checkpoint, compare its manifest
  ds-ring verify-checkpoint checkpoints --tag mine --accept    seal one that was written without ds_ring
"""


def add(commands: Commands) -> None:
    """Declare the command."""
    verify = add_command(
        commands,
        "verify-checkpoint",
        help="compare a checkpoint with its manifest",
        description="Read every file of a checkpoint and compare sizes and sha256 with its manifest.",
        epilog=_EXAMPLE,
    )
    verify.add_argument("folder", metavar="DIR", type=Path, help="what save_checkpoint was given")
    verify.add_argument("--tag", help="which checkpoint; by default the one that DIR/latest names")
    verify.add_argument(
        "--accept",
        action="store_true",
        help="write the manifest of a checkpoint that has none and that you know to be whole; needs --tag",
    )
    verify.set_defaults(run=run)


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Print what was compared; RingCheckpointError for damage."""
    from ds_ring.errors import RingConfigError
    from ds_ring.integrations.manifest import accept_checkpoint, verify_checkpoint

    refuse_extra("verify-checkpoint", extra_args)
    if options.accept and options.tag is None:
        raise RingConfigError("--accept: expected --tag with it, got none; name the checkpoint to accept")
    if options.accept:
        accept_checkpoint(options.folder, options.tag)
    manifest = verify_checkpoint(options.folder, options.tag)
    total_bytes = sum(record.bytes for record in manifest.files)
    print(f"whole: {len(manifest.files)} files, {total_bytes:,} bytes, after step {manifest.global_steps}")
    return 0

"""Compare a checkpoint with its manifest, convert one: `ds-ring verify-checkpoint`, `resize-checkpoint`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ds_ring.errors import RingCheckpointError, RingCheckpointMissingError, RingConfigError

from .parsers import Commands, add_command, add_json, print_json, refuse_extra, require_sizes

DAMAGED, MISSING = 1, 3

_VERIFY_HELP = "compare a checkpoint with its manifest"
_VERIFY_DESCRIPTION = "Read every file of a checkpoint and compare sizes and sha256 with its manifest."
_VERIFY_EXAMPLE = """\
examples:
  ds-ring verify-checkpoint runs/train_lm/checkpoints      read the latest checkpoint, compare its manifest
  ds-ring verify-checkpoint checkpoints --tag mine --accept    seal one that was written without ds_ring
  ds-ring verify-checkpoint checkpoints --tag global_step20 --make-latest    go back to an earlier one

exit status: 0 whole, 1 not whole (damaged, or never finished), 2 wrong input, 3 no such checkpoint
"""
_RESIZE_HELP = "convert a checkpoint for another number of ranks"
_RESIZE_DESCRIPTION = (
    "Convert a checkpoint of ZeRO 1, 2 or 3 for any number of ranks, seal it, and make it the latest: the\n"
    "same script goes on from it. The checkpoint that it is made from stays as it is."
)
_RESIZE_EXAMPLE = """\
examples:
  ds-ring resize-checkpoint runs/train_lm/checkpoints --world-size 4                 one ring of 4
  ds-ring resize-checkpoint checkpoints --world-size 8 --ring-size 4 --tag best      2 data replicas

exit status: 0 converted, 1 not whole or not convertible, 2 wrong input, 3 no such checkpoint
"""


def add_verify(commands: Commands) -> None:
    """Add `verify-checkpoint`."""
    parser = add_command(
        commands, "verify-checkpoint", verify, _VERIFY_HELP, _VERIFY_DESCRIPTION, _VERIFY_EXAMPLE
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="what save_checkpoint was given")
    parser.add_argument("--tag", help="which checkpoint; by default the one that DIR/latest names")
    parser.add_argument(
        "--accept",
        action="store_true",
        help="write the manifest of a checkpoint that has none and that you know to be whole; needs --tag",
    )
    parser.add_argument(
        "--make-latest",
        action="store_true",
        help="let DIR/latest name it, if it is whole, a later one or not; needs --tag",
    )
    add_json(parser)


def add_resize(commands: Commands) -> None:
    """Add `resize-checkpoint`."""
    parser = add_command(
        commands, "resize-checkpoint", resize, _RESIZE_HELP, _RESIZE_DESCRIPTION, _RESIZE_EXAMPLE
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="what save_checkpoint was given")
    parser.add_argument("--world-size", type=int, required=True, metavar="W", help="ranks that will go on")
    parser.add_argument(
        "--ring-size", type=int, metavar="P", help="ranks of a sequence, Ulysses ranks included; by default W"
    )
    parser.add_argument("--tag", help="which checkpoint; by default the one that DIR/latest names")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes that convert; 1")
    add_json(parser)


def verify(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Print the comparison; the exit status separates a damaged checkpoint from one that is not there."""
    from ds_ring.checkpoint.manifest import accept_checkpoint, make_latest, verify_checkpoint

    refuse_extra("verify-checkpoint", extra_args)
    for name in ("accept", "make_latest"):
        if getattr(options, name) and options.tag is None:
            option = "--" + name.replace("_", "-")
            raise RingConfigError(f"{option}: expected --tag with it, got none; name the checkpoint")
    _check_folder(options.folder, options.tag)
    with _named("not whole"):
        if options.accept:
            accept_checkpoint(options.folder, options.tag)
        verified = make_latest if options.make_latest else verify_checkpoint
        manifest = verified(options.folder, options.tag)
    total_bytes = sum(record.bytes for record in manifest.files)
    if options.json:
        figures = {"files": len(manifest.files), "bytes": total_bytes, "global_steps": manifest.global_steps}
        print_json(figures)
    else:
        print(
            f"whole: {len(manifest.files)} files, {total_bytes:,} bytes, after step {manifest.global_steps}"
        )
    return 0


def resize(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Convert, and print what the JSON must say to keep the samples of a step."""
    refuse_extra("resize-checkpoint", extra_args)
    _check_folder(options.folder, options.tag)
    require_sizes(options, {"world_size": 2**20, "ring_size": 2**20, "workers": 1024})
    ring = options.ring_size or options.world_size
    if options.world_size % ring:
        raise RingConfigError.wrong(
            "--ring-size", f"a divisor of --world-size {options.world_size}", ring, "correct it"
        )
    # stdout is the answer's: DeepSpeed logs there from its import on.
    with contextlib.redirect_stdout(sys.stderr):
        from ds_ring.checkpoint.resize import count_step_samples, resize_checkpoint

    with _named("not converted"):
        samples = count_step_samples(options.folder, options.tag)
        replicas = options.world_size // ring
        if samples % replicas:
            raise RingConfigError(
                f"--world-size: expected replicas that divide {samples} samples, got {replicas}"
            )
        tag = resize_checkpoint(options.folder, options.tag, options.workers)
    if options.json:
        print_json({"tag": tag, "sequence_parallel_size": ring, "samples_per_replica": samples // replicas})
    else:
        print(
            f"{tag}: latest of {options.folder}, for {options.world_size} ranks\n"
            f'"sequence_parallel_size": {ring}, and "train_micro_batch_size_per_gpu" x'
            f' "gradient_accumulation_steps" = {samples // replicas} keep the {samples} samples of a step'
        )
    return 0


def _check_folder(folder: Path, tag: str | None) -> None:
    """Raise RingConfigError for what names no folder, or no tag in one."""
    from ds_ring.config.messages import shown

    if not os.path.isdir(folder):  # no error for a name that no folder can have
        raise RingConfigError(f"expected save_checkpoint's folder, got {shown(str(folder))}, no folder")
    if tag is not None and (
        tag in (".", "..") or "/" in tag or not tag.isprintable() or len(os.fsencode(tag)) > 255
    ):
        raise RingConfigError(f"--tag: expected the name of a folder, got {shown(tag)}; check the tag")


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Translate a checkpoint's error for this command; cli.py leaves with its exit status."""
    try:
        yield
    except RingCheckpointError as error:
        missing = isinstance(error, RingCheckpointMissingError)
        named = RingCheckpointError(f"{'no such checkpoint' if missing else what}: {error}")
        named.exit_status = MISSING if missing else DAMAGED  # type: ignore[attr-defined]
        raise named from error

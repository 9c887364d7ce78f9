"""Convert a checkpoint for another number of ranks: `ds-ring resize-checkpoint`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from .parsers import Commands, add_command, add_json, print_json, readable, refuse_extra, require_sizes
from .verify_checkpoint import DAMAGED, MISSING, check_folder

_HELP = "convert a checkpoint for another number of ranks"
_DESCRIPTION = (
    "Convert a checkpoint of ZeRO 1, 2 or 3 for any number of ranks, seal it, and make it the latest: the\n"
    "same script goes on from it. The checkpoint that it is made from stays as it is."
)
_EXAMPLE = """\
examples:
  ds-ring resize-checkpoint runs/train_lm/checkpoints --world-size 4                 one ring of 4
  ds-ring resize-checkpoint checkpoints --world-size 8 --ring-size 4 --tag best      2 data replicas

exit status: 0 converted, 1 not whole or not convertible, 2 wrong input, 3 no such checkpoint
"""


def add(commands: Commands) -> None:
    """Add the command."""
    resize = add_command(commands, "resize-checkpoint", run, _HELP, _DESCRIPTION, _EXAMPLE)
    resize.add_argument("folder", metavar="DIR", type=Path, help="what save_checkpoint was given")
    resize.add_argument("--world-size", type=int, required=True, metavar="W", help="ranks that will go on")
    resize.add_argument(
        "--ring-size", type=int, metavar="P", help="ranks of a sequence, Ulysses ranks included; by default W"
    )
    resize.add_argument("--tag", help="which checkpoint; by default the one that DIR/latest names")
    resize.add_argument("--workers", type=int, default=1, metavar="N", help="processes that convert; 1")
    add_json(resize)


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Convert, and print what the JSON must say to keep the samples of a step."""
    from ds_ring.errors import RingCheckpointError, RingCheckpointMissingError, RingConfigError

    refuse_extra("resize-checkpoint", extra_args)
    check_folder(options.folder, options.tag)
    require_sizes(options, {"world_size": 2**20, "ring_size": 2**20, "workers": 1024})
    ring = options.ring_size or options.world_size
    if options.world_size % ring:
        raise RingConfigError(
            f"--ring-size: expected a divisor of --world-size {options.world_size}, got {ring}; correct it"
        )
    # stdout is the answer's: DeepSpeed logs there from its import on.
    with contextlib.redirect_stdout(sys.stderr):
        from ds_ring.integrations.checkpoint.resize import resize_checkpoint, samples_of_a_step

    try:
        samples = samples_of_a_step(options.folder, options.tag)
        replicas = options.world_size // ring
        if samples % replicas:
            raise RingConfigError(
                f"--world-size: expected data replicas that divide the {samples} samples of a step, got"
                f" {replicas}; choose --world-size and --ring-size otherwise"
            )
        tag = resize_checkpoint(options.folder, options.tag, options.workers)
    # First: it is also a RingCheckpointError.
    except RingCheckpointMissingError as error:
        return _say("no such checkpoint", error, MISSING)
    except RingCheckpointError as error:
        return _say("not converted", error, DAMAGED)
    if options.json:
        print_json({"tag": tag, "sequence_parallel_size": ring, "samples_per_replica": samples // replicas})
    else:
        print(
            f"{tag}: latest of {options.folder}, for {options.world_size} ranks\n"
            f'"sequence_parallel_size": {ring}, and "train_micro_batch_size_per_gpu" x'
            f' "gradient_accumulation_steps" = {samples // replicas} keep the {samples} samples of a step'
        )
    return 0


def _say(what: str, error: Exception, status: int) -> int:
    print(f"ds-ring: error: {what}: {readable(str(error))}", file=sys.stderr)
    return status

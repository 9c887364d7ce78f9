"""The command `ds-ring`: finds the subcommand, turns typed errors into one line and exit status 2."""

from __future__ import annotations

import argparse
import signal
import sys

from .commands import launch, plan, profile, simulate, tune, verify_checkpoint

COMMANDS = (launch, plan, simulate, profile, tune, verify_checkpoint)

_EXAMPLE = """\
examples:
  ds-ring launch configs/quickstart.yaml                   train on this machine
  ds-ring tune --tokens 32768 --heads 8 --head-dim 64 --processes 4    what is fastest here
  ds-ring plan --hf-config config.json --tokens 1048576 --hardware h100    what it needs, before it is started
  ds-ring verify-checkpoint runs/train_lm/checkpoints      read the latest checkpoint, compare its manifest
  ds-ring simulate --tokens 65536 --ring-sizes 1 8         what each rank would need and send
  ds-ring profile --tokens 8192 --ring-sizes 1 2 4 8       pictures: memory by ring size, who waits when
  ds-ring COMMAND --help                                   more examples
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status (2: wrong input, 130: Ctrl-C)."""
    own, extra = _split(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(own)
    from ds_ring.errors import RingError  # imports torch, and `--help` should not wait for it

    try:
        return int(options.run(options, extra))
    except RingError as error:
        print(f"ds-ring: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ds-ring: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _split(argv: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """What stands before `--` is ours, what stands after it is the script's."""
    where = argv.index("--") if "--" in argv else len(argv)
    return argv[:where], tuple(argv[where + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-ring",
        description="Ring attention for DeepSpeed: see what a run will need, start it, check what it saved.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())

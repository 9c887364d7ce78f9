"""Run the command `ds-ring`: find the subcommand, turn typed errors into one line and exit status 2."""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import sys
from importlib import metadata
from typing import Any

from ds_ring.compat import EXTRAS, make_missing_error
from ds_ring.errors import RingError

from .commands import (
    check_model,
    checkpoints,
    compare,
    configs,
    doctor,
    launch,
    plan,
    simulate,
    status,
    tune,
)  # fmt: skip
from .commands.parsers import Parser, readable

COMMANDS = (
    configs.add, launch.add, doctor.add, status.add, plan.add, simulate.add, tune.add, compare.add,
    check_model.add, checkpoints.add_verify, checkpoints.add_resize,
)  # fmt: skip

WRONG_INPUT, CANNOT_PRINT = 2, 74  # 74: sysexits.h's EX_IOERR
_OUTPUT_IS_GONE = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT)
_EXAMPLE = """\
examples:
  ds-ring configs                                          write configs/ here: quick start, recipes, examples
  ds-ring launch configs/quickstart.yaml                   train on this machine
  ds-ring status runs/mine                                 how far it is
  ds-ring tune --tokens 32k --heads 8 --head-dim 64 --processes 4    rates of this machine, for plan
  ds-ring compare --gpus 8 --hf-config qwen3-8b --tokens 64k    ring, Ulysses, other packages: on your machine
  ds-ring doctor cluster.yaml                              are hosts, network and ring as they must be?
  ds-ring plan --hf-config config.json --tokens 1048576 --hardware h100    what it needs, before it is started
  ds-ring check-model llama                                is this model exact on a ring?
  ds-ring verify-checkpoint runs/train_lm/checkpoints      read the latest checkpoint, compare its manifest
  ds-ring resize-checkpoint runs/train_lm/checkpoints --world-size 4    go on with other ranks
  ds-ring simulate --tokens 65536 --ring-sizes 1 8         what each rank would need and send
  ds-ring COMMAND --help                                   more examples
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status (2: wrong input, 130: Ctrl-C)."""
    try:
        return _run(argv)
    except ModuleNotFoundError as error:  # a package of an extra
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(f"ds-ring: error: {make_missing_error('this command', package)}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:  # while torch is imported, too
        print("ds-ring: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(argv: list[str] | None) -> int:
    # The script's own options must not be taken for ours.
    argv = sys.argv[1:] if argv is None else argv
    where = argv.index("--") if "--" in argv else len(argv)
    arguments, extra = argv[:where], tuple(argv[where + 1 :])
    parser = _parser()
    for argument in arguments:
        if argument.startswith("--") and argument.endswith("=--"):  # argparse takes it for a list
            parser.error(f"{argument[:-3]}: expected a value, got '--'")
    options = parser.parse_args(arguments)
    try:
        status = int(options.run(options, extra))
        if sys.stdout is not None:  # closed by who started us
            sys.stdout.flush()
        return status
    except RingError as error:
        print(f"ds-ring: error: {readable(str(error))}", file=sys.stderr)
        return getattr(error, "exit_status", WRONG_INPUT)
    except (BrokenPipeError, UnicodeEncodeError, OSError) as error:
        return _cannot_print(error)


def _cannot_print(error: Exception) -> int:
    """Print why the output could not be written, unless the reader went away (head)."""
    if (
        isinstance(error, OSError)
        and not isinstance(error, BrokenPipeError)
        and error.errno not in _OUTPUT_IS_GONE
    ):
        raise error
    # or Python would try once more at its own end, and print that
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if not isinstance(error, BrokenPipeError):
        print(f"ds-ring: error: expected to write the output, got: {error}", file=sys.stderr)
    return CANNOT_PRINT


class _PrintCompletion(argparse.Action):
    """Print the script by which a shell completes commands, options and files."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        import shtab  # 35 ms, for this option only

        # shtab reads which arguments are files from an attribute of theirs.
        commands = next(action.choices for action in parser._actions if action.dest == "command")
        assert isinstance(commands, dict), "the subcommands' parsers by name"
        for command in commands.values():
            for action in command._actions:
                if re.search("CONFIG|DS_JSON|FILE|FOLDER|DIR|RUN", str(action.metavar)):
                    action.complete = shtab.FILE
        print(shtab.complete(parser, values))
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ds-ring",
        description="Ring attention for DeepSpeed: see what a run will need, start it, check what it saved.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ds-ring {metadata.version('ds_ring')}")
    parser.add_argument(
        "--print-completion", action=_PrintCompletion, choices=("bash", "zsh", "tcsh"), metavar="SHELL",
        help="print a script for bash, zsh or tcsh; eval it there, and TAB completes ds-ring",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.type = str  # argparse gives the words of a command's options to the command's own type, too
    for add in COMMANDS:
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""What the subcommands' parsers have in common."""

from __future__ import annotations

import argparse
from typing import Any

Commands = Any  # argparse's own name for it is private


def add_command(commands: Commands, name: str, **texts: str) -> argparse.ArgumentParser:
    """A subcommand whose help keeps the line breaks of its examples."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts
    )
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`: for machines."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def refuse_extra(command: str, extra_args: tuple[str, ...]) -> None:
    """RingConfigError for anything after `--`, which only `launch` has a use for."""
    from ds_ring.errors import RingConfigError

    if extra_args:
        raise RingConfigError(f"{command}: expected nothing after --, got {' '.join(extra_args)}")

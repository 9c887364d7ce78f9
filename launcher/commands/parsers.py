"""Read numbers and report wrong lines in the same way for all subcommands."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ds_ring.config.problems import did_you_mean
from ds_ring.plugin import LAYOUTS

if TYPE_CHECKING:
    from ds_ring.config.section import RingConfig
    from ds_ring.masks.pattern import Pattern
    from ds_ring.simulation.simulate import GeneratedSource


Commands = Any  # argparse's own name for it is private

MAX_SECONDS = 10**7
MAX_SIZE = 2**53  # sizes are multiplied in 64 bits
_MAX_LETTERS = 400


class Parser(argparse.ArgumentParser):
    """Parse as argparse does, with sentences that say what was expected, none of which fills the screen."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("type", int, _whole_number)
        self.register("type", float, _number)
        self.register("type", None, _word)
        self.register("type", Path, lambda text: Path(_word(text)))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the options; leave with status 2 at an unknown one, naming the nearest of the command."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            commands: Any = self._subparsers._group_actions[0] if self._subparsers else None
            command = commands.choices[options.command] if commands else self
            near = did_you_mean(unknown[0].partition("=")[0], command._option_string_actions)
            advice = "leave it out"
            if near is not None:
                advice = f"did you mean '{near}'?"
            elif getattr(options, "command", None) == "launch":
                advice = f"options of the script come after --: ds-ring launch FILE -- {' '.join(unknown)}"
            command.error(f"expected no other arguments, got {' '.join(unknown)}; {advice}")
        return options

    def error(self, message: str) -> NoReturn:
        """Print one line and leave with status 2; `--help` has the usage."""
        choice = re.fullmatch(r"(.*): invalid choice: (.*) \(choose from (.*)\)", message, re.DOTALL)
        if "the following arguments are required" in message:
            message = f"expected {message.partition(': ')[2]}, got none"
        elif choice is not None:
            near = did_you_mean(choice[2].strip("'"), choice[3].replace("'", "").split(", "))
            expected, advice = f"one of {choice[3]}", ""
            if near:  # the list of all would hide it
                expected, advice = "a known one", f"; did you mean '{near}'?"
            message = f"{choice[1]}: expected {expected}, got {choice[2]}{advice}"
        self.exit(2, f"{self.prog}: error: {_short(message)}; see {self.prog} --help\n")


def readable(text: str) -> str:
    """Return an error's text with its lines and their number cut, for any input of a user."""
    return "\n".join(_short(line, 800) for line in text.splitlines()[:30])


def _short(text: str, most: int = _MAX_LETTERS) -> str:
    text = text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def _word(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"expected a word, got {text[:40]!r}")
    return text


def _whole_number(text: str) -> int:
    try:
        value = int(text) if len(text) < 40 and text.isascii() else None
    except ValueError:
        value = None
    if value is None:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text[:40]!r}")
    if abs(value) > MAX_SIZE:
        raise argparse.ArgumentTypeError(f"expected a number of at most {MAX_SIZE:,}, got {text[:40]!r}")
    return value


def read_tokens(text: str) -> int:
    """Return a length of sequences; "128k" and "128Ki" are 131,072 tokens, "1M" and "1Mi" 1,048,576."""
    match = re.fullmatch(r"([0-9]{1,12})(k|m)i?", text, re.ASCII | re.IGNORECASE)
    if match is not None:
        return int(match[1]) << {"k": 10, "m": 20}[match[2].lower()]
    try:
        return _whole_number(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; write 131072 or 128k, say") from None


def _number(text: str) -> float:
    try:
        value = float(text) if len(text) < 40 and text.isascii() else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, got {text[:40]!r}")
    return value


def add_command(
    commands: Commands, name: str, run: Callable[..., int], help: str, description: str, examples: str,
    **overrides: str,
) -> argparse.ArgumentParser:  # fmt: skip
    """Add a subcommand whose help keeps the line breaks of its examples."""
    form = argparse.RawDescriptionHelpFormatter
    texts = {"help": help, "description": description, "epilog": examples} | overrides
    parser: argparse.ArgumentParser = commands.add_parser(name, formatter_class=form, **texts)
    parser.set_defaults(run=run)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, for machines."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")


def print_json(value: object) -> None:
    """Print the one JSON document of a command on stdout."""
    print(json.dumps(value, indent=2))


def refuse_extra(command: str, extra_args: tuple[str, ...]) -> None:
    """Raise RingConfigError for anything after `--`, which only `launch` has a use for."""
    from ds_ring.errors import RingConfigError

    if extra_args:
        got = _short(" ".join(extra_args), 100)
        raise RingConfigError(f"{command}: expected nothing after --, got {got}; leave it out")


def require_packages(command: str, *names: str) -> None:
    """Raise RingConfigError, with pip's command, for packages of the extra `train` that are not installed."""
    from ds_ring.errors import RingConfigError

    absent = [name for name in names if find_spec(name) is None]
    if absent:
        raise RingConfigError.wrong(
            command, " and ".join(names), f"no {', '.join(absent)}", "pip install 'ds_ring[train]'"
        )


def require_sizes(options: argparse.Namespace, most: dict[str, int]) -> None:
    """Raise RingConfigError for an option that is below 1 or above what can be meant; None is left out."""
    from ds_ring.errors import RingConfigError

    for name, limit in most.items():
        sizes = getattr(options, name)
        for value in sizes if isinstance(sizes, list) else [sizes]:
            if value is not None and not 1 <= value <= limit:
                bound = "at least 1" if value < 1 else f"at most {limit:,}"
                option = f"--{name.replace('_', '-')}"
                raise RingConfigError(f"{option}: expected a number of {bound}, got {value}; correct it")


def require_memory(tokens: int, heads: int, head_dim: int, element_bytes: int) -> None:
    """Raise RingConfigError where q, k, v and out of one pass are more than this machine has."""
    import psutil

    from ds_ring.errors import RingConfigError

    needed, has = 4 * tokens * heads * head_dim * element_bytes, psutil.virtual_memory().total
    if needed > has:
        raise RingConfigError(
            f"--tokens x --heads x --head-dim: expected at most this machine's {has / 2**30:.0f} GiB, got"
            f" {needed / 2**30:,.0f} GiB of q, k, v and out; take less"
        )


def require_deadline(seconds: float, option: str = "--deadline-seconds") -> None:
    """Raise RingConfigError for a number of seconds that is none."""
    from ds_ring.errors import RingConfigError

    if not 0 < seconds <= MAX_SECONDS:
        bound = "above 0" if seconds <= 0 else f"of at most {MAX_SECONDS:,}"
        raise RingConfigError(f"{option}: expected a number {bound}, got {seconds:g}; leave it out")


def require_writable(path: Path, option: str) -> None:
    """Raise RingConfigError, before anything is computed, unless a file can be written at `path`."""
    from ds_ring.errors import RingConfigError

    try:
        folder = path.resolve().parent
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise RingConfigError(f"{option}: expected a file's name, got {str(path)[:80]!r}: {error}") from None
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        got = "a folder" if path.is_dir() else "no folder" if not folder.is_dir() else "one that is not ours"
        raise RingConfigError.wrong(
            f"{option} {path}", "a file in a folder to write to", got, "choose another"
        )


# Options of `simulate`: sizes of an attention, its pattern, layout and kernel.

_MAX_SIZES = {
    "tokens": 2**40,
    "heads": 4096,
    "kv_heads": 4096,
    "head_dim": 4096,
    "ring_sizes": 4096,
    "chunk_bytes": 2**53,
}
DTYPES = ("float32", "bfloat16", "float16", "float64")
MIB = 2**20


def add_shapes(parser: argparse.ArgumentParser, ring_sizes: list[int]) -> None:
    """Add the options of pattern, layout and sizes."""
    parser.add_argument(
        "--tokens", type=read_tokens, required=True, metavar="T", help="of the sequence, say 65536 or 64k"
    )
    sizes = " ".join(map(str, ring_sizes))
    parser.add_argument(
        "--ring-sizes",
        type=int,
        nargs="+",
        default=ring_sizes,
        metavar="P",
        help=f"ranks of a ring ({sizes})",
    )
    parser.add_argument("--heads", type=int, default=8, metavar="H", help="query heads (8)")
    parser.add_argument(
        "--kv-heads", type=int, metavar="G", help="K/V heads; as many as query heads if left out"
    )
    parser.add_argument("--head-dim", type=int, default=64, metavar="D", help="head_dim (64)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--layout", help=", ".join(LAYOUTS))
    parser.add_argument("--pattern", metavar="JSON", help='as "pattern" in the JSON; causal if left out')
    parser.add_argument(
        "--config", metavar="DS_JSON", type=Path, help="take pattern, layout and kernel from this file"
    )
    parser.add_argument(
        "--chunk-bytes",
        type=int,
        metavar="BYTES",
        help="least size of K or V in a message (as real CPU ranks); 1: head by head",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the numbers (0)")


def read_section(options: argparse.Namespace) -> RingConfig:
    """Return the section with pattern, layout and kernel: of --config, or made of --pattern."""
    from ds_ring.config.json_text import parse_object
    from ds_ring.config.section import RingConfig
    from ds_ring.errors import RingConfigError

    if options.config is not None and options.pattern is not None:
        raise RingConfigError(f"{options.command}: expected --pattern or --config, got both; leave one out")
    if options.config is not None:
        return RingConfig.from_deepspeed(options.config)
    pattern = parse_object("{}" if options.pattern is None else options.pattern, "--pattern")
    return RingConfig.from_deepspeed({"sequence_parallel_size": 1, "ring_attention": {"pattern": pattern}})


def get_pattern(options: argparse.Namespace, config: RingConfig) -> Pattern:
    """Return the pattern of a section."""
    from ds_ring.config.section import pattern_from_config
    from ds_ring.errors import RingConfigError

    if config.pattern.documents:
        raise RingConfigError.wrong(
            options.command, 'a pattern without "documents"', "true", "call ds_ring.simulate"
        )
    return pattern_from_config(config)


def make_source(options: argparse.Namespace) -> GeneratedSource:
    """Return generated numbers of these sizes.

    Raises:
        RingShapeError, RingConfigError: sizes or a seed that cannot be.
    """
    require_sizes(options, _MAX_SIZES)
    element_bytes = {"float64": 8, "float32": 4}.get(options.dtype, 2)
    require_memory(options.tokens, options.heads, options.head_dim, element_bytes)
    import torch  # a second or two, for which a wrong size need not wait

    from ds_ring.simulation.simulate import GeneratedSource

    return GeneratedSource(
        options.tokens,
        options.heads,
        options.kv_heads,
        options.head_dim,
        dtype=getattr(torch, options.dtype),
        seed=options.seed,
    )

"""Write the configurations, recipes and examples of this version into a folder: `ds-ring configs`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .parsers import Commands, add_command, refuse_extra

_HELP = "write configs/ of this version here: quick start, recipes, hardware, examples"
_DESCRIPTION = (
    "Copy the quick start, the recipes, the hardware descriptions and the example scripts of this version\n"
    "into a folder, to be run and changed there. A file that is there already stays as it is."
)
_EXAMPLE = """\
examples:
  ds-ring configs                       writes configs/, as the other commands' examples name it
  ds-ring configs mine/configs          into another folder

exit status: 0 written, 2 wrong input
"""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "configs", run, _HELP, _DESCRIPTION, _EXAMPLE)
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, nargs="?", default=Path("configs"), help="(configs)"
    )


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Copy the files that FOLDER lacks; return 0."""
    from ds_ring.errors import RingConfigError
    from ds_ring.written_files import replace_text

    from .. import configs_folder

    refuse_extra("configs", extra_args)
    written, differing = 0, []
    try:
        for source in sorted(configs_folder().rglob("*")):
            name = source.relative_to(configs_folder())
            if source.is_dir() or "__pycache__" in name.parts:
                continue
            target, text = options.folder / name, source.read_text(encoding="utf-8")
            if target.exists():
                if target.read_text(encoding="utf-8", errors="replace") != text:
                    differing.append(str(name))
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_text(target, text)
            written += 1
    except OSError as error:
        raise RingConfigError.wrong(
            "FOLDER", "a folder to write to", f"{options.folder}: {error.strerror}", "name another"
        ) from None
    print(f"{options.folder}: {written} files written")
    if differing:
        print(f"kept, though other than in this version: {', '.join(differing)}")
    return 0

"""Write which names of its dependencies ds_ring uses, as found in environments of several versions.

Example:
    python tools/lowest_names.py --write transformers    # a row of tests/lowest_names.json: this version's
    python tools/lowest_names.py --write deepspeed accelerate trl peft
    python tools/lowest_names.py --print    # what this environment lacks

The day's tests compare the table with the source: a name that is not in it may be missing in a version that
pyproject.toml allows. One that a row lacks may stand in `ds_ring/compat/` alone, or in a module that is left
out then. `python tools/version_matrix.py --names` runs it in each environment.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

from common import make_parser

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests/lowest_names.json"
# operators of ours, and of a package that is tried before it is used
_OPERATORS = ("torch.ops.ds_ring", "torch.ops.flash_attn_3")
OWN = {"ds_ring", "ds_ring_launcher", "launcher", "tests", "tools", "__future__", *sys.stdlib_module_names}


@cache
def names_used(path: Path) -> set[str]:
    """Return the dotted names outside the standard library that a file imports, and their attributes."""
    tree = ast.parse(path.read_text())
    skipped = {id(node) for block in _only_for_types(tree) for node in ast.walk(block)}
    nodes = [node for node in ast.walk(tree) if id(node) not in skipped]
    known: dict[str, str] = {}
    used: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                used.add(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
                used.add(alias.name)
    for node in nodes:
        chain = _chain(node)
        if chain and chain[0] in known:
            used.add(".".join([known[chain[0]], *chain[1:]]))
    return {name for name in used if not _left_out(name)}


def _left_out(name: str) -> bool:
    """Return whether a name is our own, or one that no version of torch or numpy lacks: torch.sqrt."""
    parts = name.split(".")
    is_old = len(parts) == 2 and parts[0] in ("torch", "numpy") and not parts[1].startswith("_")
    return parts[0] in OWN or is_old or name.startswith(_OPERATORS)


def _only_for_types(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from node.body


def _chain(node: ast.AST) -> list[str]:
    """Return a.b.c of an attribute as a list; nothing if it does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) and parts else []


def all_used() -> list[str]:
    """Return the names that ds_ring and the launcher use."""
    files = [file for folder in ("ds_ring", "launcher") for file in (ROOT / folder).rglob("*.py")]
    return sorted({name for file in files for name in names_used(file)})


def is_there(name: str) -> bool:
    """Return whether a dotted name can be imported and read here."""
    parts, value = name.split("."), None
    for number, part in enumerate(parts):
        try:  # a package may have a function of its module's name
            value = importlib.import_module(".".join(parts[: number + 1]))
        except Exception:  # no module, or one whose own imports fail
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
    return True


def write_rows(packages: Sequence[str]) -> list[str]:
    """Write a row for the installed version of each package; return the names that they lack."""
    table = json.loads(TABLE.read_text())
    names, homes = all_used(), packages_distributions()
    lacking: list[str] = []
    for package in packages:
        used = [name for name in names if name.partition(".")[0] == package]
        missing = [name for name in used if not is_there(name)]
        table["rows"][f"{package} {version(homes.get(package, [package])[0])}"] = missing
        table["names"][package] = used
        lacking += missing
    table["rows"] = dict(sorted(table["rows"].items()))
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    return lacking


def main(arguments: list[str] | None = None) -> int:
    """Write rows of the table, or print the names that are missing here."""
    parser = make_parser(__doc__)
    parser.add_argument("--print", action="store_true", help="what is missing here; write nothing")
    parser.add_argument(
        "--write", nargs="+", metavar="PACKAGE", help="rows of these packages, by import name"
    )
    options = parser.parse_args(arguments)
    if options.print or not options.write:
        missing = [name for name in all_used() if not is_there(name)]
        print("\n".join(missing))
        return int(bool(missing))
    print(f"missing: {', '.join(write_rows(options.write)) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

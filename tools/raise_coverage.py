"""List the `raise` statements of ds_ring and launcher that no test reaches.

Examples:
    python tools/raise_coverage.py --record /tmp/raised -- python -m pytest -q -n 4 --dist loadfile
    python tools/raise_coverage.py --record /tmp/raised          # the report alone, of runs before

While the command runs, each Python process of this environment notes the `raise` statements that it reaches:
ranks, launchers and their children, too. To do so it compiles the modules of both packages with a call before
each `raise`; line numbers stay. A later run adds to the record. The exit status is 1 where a statement was
not reached, or where the command failed.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import os
import subprocess
import sys
import sysconfig
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import CodeType

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"ds_ring": "ds_ring", "ds_ring_launcher": "launcher"}  # the name of a package: its folder
RECORD = "DS_RING_RAISE_RECORD"  # a folder: a file for each process, since a test may limit their sizes
_START = "import os, runpy; os.environ.get({name!r}) and runpy.run_path({tool!r}, run_name='recorder')\n"


class _Recorded(ast.NodeTransformer):
    """Put a call that notes the statement before each `raise`."""

    def __init__(self, place: str) -> None:
        self.place = place

    def visit_Raise(self, node: ast.Raise) -> list[ast.stmt]:
        call = ast.Call(ast.Name("__raised__", ast.Load()), [ast.Constant(f"{self.place}:{node.lineno}")], [])
        return [ast.fix_missing_locations(ast.copy_location(ast.Expr(call), node)), node]


def _record() -> None:
    """Note from now on the statements that this process and its children reach. Runs at its start."""
    folder, noted = os.environ[RECORD], set[str]()

    def raised(place: str) -> None:
        if place not in noted:
            noted.add(place)
            with suppress(OSError), open(os.path.join(folder, str(os.getpid())), "a") as file:
                file.write(f"{place}\n")

    get_code = importlib.machinery.SourceFileLoader.get_code

    def compiled(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        package, _, _ = name.partition(".")
        if package not in PACKAGES:
            return get_code(loader, name)
        _, _, below = loader.path.rpartition(f"/{PACKAGES[package]}/")
        tree = _Recorded(f"{PACKAGES[package]}/{below}").visit(ast.parse(loader.get_data(loader.path)))
        return compile(tree, loader.path, "exec", dont_inherit=True)

    builtins.__raised__ = raised  # type: ignore[attr-defined]
    importlib.machinery.SourceFileLoader.get_code = compiled  # type: ignore[method-assign, assignment]


def statements() -> dict[str, str]:
    """Return the source line of each `raise`, by `path:line`."""
    found = {}
    for folder in PACKAGES.values():
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            lines = source.splitlines()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Raise):
                    found[f"{path.relative_to(ROOT)}:{node.lineno}"] = lines[node.lineno - 1].strip()
    return found


def report(record: Path) -> bool:
    """Print the statements that `record` lacks, by file; return whether there are none."""
    found = statements()
    noted = {place for file in record.iterdir() for place in file.read_text().split()}
    missing = defaultdict(list)
    for place, line in found.items():
        if place not in noted:
            path, _, at = place.rpartition(":")
            missing[path].append((int(at), line))
    for path, unreached in missing.items():
        print(path)
        for number, source in sorted(unreached):
            print(f"  {number}: {source}")
    count = sum(map(len, missing.values()))
    print(f"{len(found)} raise statements, {len(found) - count} reached, {count} not reached")
    return not count


def main() -> int:
    from common import parser_of  # the package's own tools stay out of the processes that are recorded

    parser = parser_of(__doc__ or "")
    parser.add_argument("--record", type=Path, required=True, help="the folder of statements reached so far")
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="what to run while they are noted")
    options = parser.parse_args()
    options.record.mkdir(parents=True, exist_ok=True)
    status = 0
    if options.command:
        # A .pth file and not PYTHONPATH: tests start processes with a PYTHONPATH of their own.
        with NamedTemporaryFile("w", suffix=".pth", dir=sysconfig.get_path("purelib")) as start:
            start.write(_START.format(name=RECORD, tool=str(Path(__file__).resolve())))
            start.flush()
            variables = os.environ | {RECORD: str(options.record.resolve())}
            status = subprocess.run(options.command, env=variables, check=False).returncode
    return 0 if report(options.record) and not status else 1


if __name__ == "__main__":
    sys.exit(main())
elif __name__ == "recorder":
    _record()

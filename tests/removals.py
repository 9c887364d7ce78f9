"""What is left when a capability's folder is deleted, and nothing else.

The capabilities are the folders of `ds_ring/plugins.json`. `removed` deletes one from a copy of the tree,
with the folders of tests of the same name; no other file changes. Test files that import what is not there
any more are of the capability, too. tests/integration/test_removals.py runs what is left. `python -m
tests.removals` prints a table: files and lines of each capability, the files of its tests, lines of the
core that name it. `python -m tests.removals --run [FOLDER ...]` runs the core's tests in a copy without
each.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ds_ring.plugin import INDEX, PUBLIC, Plugin, load
from tests import test_architecture as architecture

ROOT = Path(__file__).resolve().parents[1]
INDEXED: dict[str, dict[str, object]] = json.loads(INDEX.read_text())
# Rows of the core itself, and of what every batch needs.
CORE_FOLDERS = {"ops", "data", "data/dynamic_ring", "patterns/documents"}
CAPABILITIES = [folder for folder in INDEXED if folder not in CORE_FOLDERS]

# For the processes of a copy, by PYTHONPATH: an editable install finds in the original what the copy lacks.
_SITE = """import sys

sys.meta_path = [one for one in sys.meta_path if "__editable__" not in getattr(one, "__module__", "")]
"""
# Lines of the core that name a capability all the same, at most, and why.
NAMED = {
    "patterns/dilated": (1, "the prefix pattern refuses the key segment_lengths"),
    "patterns/captured": (4, "an interface: a function's captured values are compared between ranks"),
    "layouts/balanced": (3, "the name of layouts of pieces, which the core has; two refusals advise it"),
    "memory/saved_results": (
        3,
        "an interface: what a checkpointed region keeps; a buffer has this name, too",
    ),
    "measure": (2, "the failure detector's own monitor"),
    "engines/trainers": (3, "packages: the extra of each, and the version that was tried"),
}
CORE_TESTS = (
    "tests/unit/masks", "tests/unit/schedule", "tests/unit/config", "tests/dist/test_ring_attention.py",
)  # fmt: skip


def module_name(folder: str) -> str:
    return folder.replace("/", ".")


def left_out_with(folder: str) -> list[str]:
    """Return a capability and those that require it, or lie inside its folder."""
    names = [folder]
    for name in names:
        for other, fields in INDEXED.items():
            inside = name in fields.get("requires", ()) or other.startswith(f"{name}/")  # type: ignore[operator]
            if inside and other not in names:
                names.append(other)
    return names


def files_of(folder: str) -> list[Path]:
    return sorted((ROOT / "ds_ring" / folder).rglob("*.py"))


def tests_named_like(folder: str) -> list[Path]:
    """Return the folders and files of tests that have a capability's name."""
    parent, _, last = folder.rpartition("/")
    places = [ROOT / "tests" / kind for kind in ("unit", "dist", "gpu")]
    return [
        path
        for place in places
        for path in (place / folder, place / parent / f"test_{last}.py")
        if path.exists()
    ]


@cache
def imports_of_test(path: Path) -> frozenset[str]:
    """Return the dotted names that a test imports, public names of ds_ring as `ds_ring.NAME`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "ds_ring"
        ):
            names.add(f"ds_ring.{node.attr}")
    return frozenset(names)


@cache
def users_of_modules() -> dict[str, set[Path]]:
    """Return the files of tests by the modules and public names that they, or their helpers, import."""
    files = {path: imports_of_test(path) for path in (ROOT / "tests").rglob("*.py")}
    helpers = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in files}
    near = {
        path: {helpers[x] for name in names for x in (name, name.rpartition(".")[0]) if x in helpers}
        for path, names in files.items()
    }
    users: dict[str, set[Path]] = {}
    for path in files:
        reached, waiting = {path}, [path]
        while waiting:
            waiting += (more := near[waiting.pop()] - reached)
            reached |= more
        for name in {name for one in reached for name in files[one] if name.startswith("ds_ring.")}:
            users.setdefault(name, set()).add(path)
    return users


@cache
def tests_that_need(folder: str) -> list[Path]:
    """Return the files of tests that import something of a capability, themselves or by a helper."""
    prefixes = tuple(f"ds_ring.{module_name(name)}." for name in left_out_with(folder))
    gone = {f"ds_ring.{name}" for name, home in PUBLIC.items() if home.startswith(prefixes)}
    users = users_of_modules()
    return sorted(
        {path for name in users if name in gone or name.startswith(prefixes) for path in users[name]}
    )


def still_needing(folder: str) -> list[str]:
    """Return the imports of a capability by modules that stay when its folder goes."""
    places, imports = [module_name(name) for name in left_out_with(folder)], []
    for module in architecture.MODULES:
        if module and not any(architecture.is_in(module, place) for place in places):
            imports += [
                f"{module} imports {one}"
                for one in sorted(architecture.own_imports_of(module))
                if architecture.is_in(one, places[0])
            ]
    return imports


class CodeLine(NamedTuple):
    """A line of code of the core, without its comment."""

    place: str
    code: str


@cache
def code_of_the_core() -> tuple[CodeLine, ...]:
    """Return the lines of code of the core, comments and docstrings left out."""
    parts = [part for floor in architecture.CORE for part in floor]
    lines = []
    for module, path in architecture.MODULES.items():
        if not any(architecture.is_in(module, part) for part in parts):
            continue
        prose = {
            number
            for node in architecture.nodes_of(architecture.tree_of(path))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if number not in prose:
                lines.append(CodeLine(f"{module}, line {number}", line.split("#", 1)[0]))
    return tuple(lines)


def expressions_of(folder: str) -> list[str]:
    """Return what names a capability: its module and objects as words, names of rows and keys as strings."""
    words, strings = {f"ds_ring.{module_name(folder)}"}, set()
    for kind, rows in INDEXED[folder].items():
        if kind not in Plugin._fields or not isinstance(rows, dict) or kind == "needs":
            continue
        for name, row in rows.items():
            if kind not in ("part_keys", "json_keys", "devices", "rates"):
                strings.add(name)
            objects = row.values() if isinstance(row, dict) else [row]
            words |= {str(x).rpartition(".")[2] for x in objects if str(x).startswith("ds_ring.")}
            if kind in ("json_keys", "part_keys", "pattern_keys"):
                strings |= set(load(row).__annotations__) - {"description"}
    # Kinds of devices, options of a pass, and what most keys may be.
    strings -= {"cpu", "cuda", "score_mod", "offload_attention", "auto"}
    words -= {"make_pass", "refused", "launch", "warm_up", "patience_s", "for_blocks"}  # of several folders
    return [rf"(?<![\w.]){re.escape(word)}\b" for word in words] + [rf'"{re.escape(x)}"' for x in strings]


def core_lines(folder: str) -> list[str]:
    """Return the lines of code of the core that name a capability."""
    names = re.compile("|".join(expressions_of(folder)))
    return [f"{place}: {code.strip()}" for place, code in code_of_the_core() if names.search(code)]


def copy_tree(folder: Path) -> None:
    """Copy what git tracks, and what is new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for file in listed.splitlines():
        if (ROOT / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)


def removed(name: str, folder: Path) -> Path:
    """Make a copy of the tree without a capability's folder and tests, and return it."""
    copy_tree(folder)
    shutil.rmtree(folder / "ds_ring" / name)
    gone = [path.relative_to(ROOT) for path in tests_that_need(name) if path.name.startswith("test_")]
    gone = [path for path in gone if not path.as_posix().startswith(CORE_TESTS)]
    gone += [path.relative_to(ROOT) for one in left_out_with(name) for path in tests_named_like(one)]
    for path in gone:
        target = folder / path
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE)
    (folder / "ds_ring_launcher").symlink_to("launcher")  # its installed name
    return folder


def environment_of(copy: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def run_tests(copy: Path, *tests: str) -> str:
    """Run tests in a copy; return what they printed, "" if all passed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--day",
        "--without-a-capability",
        *tests,
    ]
    done = subprocess.run(
        command, cwd=copy, env=environment_of(copy), capture_output=True, text=True, timeout=900
    )
    return "" if done.returncode == 0 and " passed" in done.stdout else done.stdout[-5000:] + done.stderr


def table() -> str:
    """Return a row for each capability: files, their lines, files of tests, and lines of the core."""
    rows = ["| capability | files | lines | files of tests | left out with it | named by the core |"]
    rows += ["|---|---|---|---|---|---|"]
    for name in CAPABILITIES:
        lines = sum(len(path.read_text().splitlines()) for path in files_of(name))
        others = ", ".join(left_out_with(name)[1:])
        why = NAMED.get(name, (0, ""))[1]
        named = str(len(core_lines(name))) + (f" ({why})" if why else "")
        tests = len(tests_that_need(name))
        rows.append(f"| {name} | {len(files_of(name))} | {lines:,} | {tests} | {others} | {named} |")
    return "\n".join(rows)


def main() -> None:
    """Print the table, or run the core's tests without each capability."""
    if "--run" not in sys.argv:
        print(table())
        return
    chosen = [word for word in sys.argv[1:] if word != "--run"] or CAPABILITIES
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            text = run_tests(removed(name, Path(folder) / "copy"), *CORE_TESTS)
        print(f"{name}: {text or 'the tests of the core pass'}", flush=True)


if __name__ == "__main__":
    main()

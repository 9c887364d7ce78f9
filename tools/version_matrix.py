"""Compare training on a ring with one process, under other versions of the dependencies: a table of them.

Examples:
    python tools/version_matrix.py --folder /tmp/matrix --rows corners
    python tools/version_matrix.py --folder /tmp/matrix --rows "deepspeed 0.18.9" "transformers 4.56.2"
    python tools/version_matrix.py --folder /tmp/matrix --rows all --from .venv --delete
    python tools/version_matrix.py --folder /tmp/matrix --rows all --names    # names alone; seconds a row

Each row is an environment, which `--from` copies from another one by hard links; without it pip makes it anew
(minutes, up to 6 GB). `tools/version_cells.py` runs in it. Results are kept in the folder, and all of them
are written to tools/results/versions.md. A cell is exact, refused by name, not offered, or WRONG with the
error; nothing ends the command early. The exit status is 1 where a cell is WRONG.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import make_parser
from version_cells import ACCUMULATED, FAMILIES, PACKED, SCRIPTS, STAGES

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tools/results/versions.md"
TOOLS = ("pytest>=8.0", "pytest-timeout>=2.3.1", "setuptools>=77")
BASE = "torch==2.13.0"
# Packages that bring others of their own with each version; the rest is installed as it is.
WITH_REQUIREMENTS = ("torch", "transformers")
INSTALL_S, ROW_S = 1800, 3600


class Row(NamedTuple):
    """Name the versions of one environment, and what is compared there."""

    group: str
    pins: Mapping[str, str]
    cells: Sequence[str]

    def make(self, name: str, folder: Path, source: Path | None) -> Path:
        """Return the folder of the environment, which is made if it is not there.

        Raises:
            subprocess.SubprocessError: something cannot be installed.
        """
        place = folder / name.replace(" ", "-")
        if (place / "complete").exists():
            return place
        shutil.rmtree(place, ignore_errors=True)
        pip = [str(place / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        if source is None or "python" in self.pins:
            interpreter = f"python{self.pins['python']}" if "python" in self.pins else sys.executable
            run([interpreter, "-m", "venv", str(place)])
            run([*pip, BASE, *TOOLS, "-e", f"{ROOT}[trainers]"])
        else:
            # pip replaces files and never writes into them: those of the source stay as they are
            shutil.copytree(source, place, symlinks=True, copy_function=link)
            run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
        for package in WITH_REQUIREMENTS:
            if package in self.pins:
                run([*pip, f"{package}=={self.pins[package]}"])
        as_they_are = self.pins.keys() - {*WITH_REQUIREMENTS, "python"}
        others = [f"{name}=={self.pins[name]}" for name in sorted(as_they_are)]
        if others:
            run([*pip, "--no-deps", *others])
        (place / "complete").touch()
        return place


def _rows() -> dict[str, Row]:
    """Return all rows by name."""
    rows = {
        f"deepspeed {version}": Row("DeepSpeed", {"deepspeed": version}, (*STAGES, *ACCUMULATED))
        for version in ("0.16.9", "0.17.6", "0.18.0", "0.18.9", "0.19.0", "0.19.8")
    }
    rows |= {
        f"transformers {version}": Row("transformers", {"transformers": version}, (*FAMILIES, *PACKED))
        for version in ("4.56.2", "5.0.0", "5.6.2", "5.8.1", "5.14.1", "5.17.0", "5.24.0")
    }
    rows |= {
        f"torch {version}": Row("torch", {"torch": version}, ("pass", "quickstart"))
        for version in ("2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.13.0", "2.15.0")
    }
    rows |= {
        f"Python {version}": Row("Python", {"python": version}, ("pass", "quickstart"))
        for version in ("3.10", "3.11", "3.12", "3.13", "3.14")
    }
    sets: dict[str, dict[str, str]] = {
        "oldest": {
            "deepspeed": "0.16.9", "transformers": "4.56.2", "accelerate": "1.10.1", "trl": "0.24.0",
            "peft": "0.18.0", "datasets": "4.0.0",
        },
        "LLaMA-Factory": {
            "deepspeed": "0.18.0", "transformers": "5.8.1", "accelerate": "1.11.0", "trl": "0.24.0",
            "peft": "0.18.1", "datasets": "4.0.0",
        },
        "axolotl": {
            "deepspeed": "0.18.8", "transformers": "5.14.1", "accelerate": "1.13.0", "trl": "1.9.0",
            "peft": "0.20.0", "datasets": "4.8.4",
        },
        "newest": {
            "deepspeed": "0.19.8", "transformers": "5.24.0", "accelerate": "1.15.0", "trl": "1.16.0",
            "peft": "0.21.2", "datasets": "5.2.0",
        },
    }  # fmt: skip
    return rows | {
        name: Row("Trainers", pins, ("zero2.accumulated", "llama", "llama.packed", *SCRIPTS, "quickstart"))
        for name, pins in sets.items()
    }


ROWS = _rows()
CORNERS = ("oldest", "LLaMA-Factory", "axolotl", "newest")


def link(source: str, target: str) -> None:
    """Link a file, or copy it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def run(command: Sequence[str]) -> str:
    """Return the output of a command that ended with 0."""
    return subprocess.run(
        command, cwd=ROOT, check=True, text=True, timeout=INSTALL_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ).stdout  # fmt: skip


def compare(
    interpreter: Path, cells: Sequence[str], log: Path, seconds: float = ROW_S
) -> list[dict[str, Any]]:
    """Return what came of the cells in an environment; those after an abrupt end are WRONG."""
    command = [str(interpreter), "tools/version_cells.py", *cells]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w") as errors:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
                timeout=seconds,
            )  # fmt: skip
            output, end = done.stdout, f"exit code {done.returncode}"
        except subprocess.TimeoutExpired as error:
            output, end = (error.stdout or b"").decode(), f"{seconds:g} s"
    results = [json.loads(line) for line in output.splitlines() if line.startswith('{"cell"')]
    reason = f"the command ended ({end}); see {log}"
    return results + [
        {"cell": cell, "verdict": "WRONG", "reason": reason, "seconds": 0.0} for cell in cells[len(results) :]
    ]


def try_row(
    name: str, folder: Path, source: Path | None, without: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Make the environment of a row and compare its cells, but for those in `without`."""
    row = ROWS[name]
    cells = [cell for cell in row.cells if cell not in without]
    try:
        place = row.make(name, folder, source)
    except (subprocess.SubprocessError, OSError) as error:
        last = (str(getattr(error, "output", None) or error).strip().splitlines() or [""])[-1]
        results = [
            {"cell": cell, "verdict": "WRONG", "reason": f"no environment: {last}", "seconds": 0.0}
            for cell in cells
        ]
    else:
        results = compare(place / "bin/python", cells, folder / f"{place.name}.log")
    about = {
        "row": name,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": read_commit(),
    }
    return [about | result for result in results]


def read_commit() -> str:
    """Return the commit of this tree."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def merge(known: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return results, the later ones of a row's cell in place of earlier ones."""
    by_cell = {(result["row"], result["cell"]): result for result in (*known, *new)}
    return list(by_cell.values())


def make_table(results: Sequence[dict[str, Any]]) -> str:
    """Return the tables of all groups as Markdown, and the reasons of what is not exact."""
    lines = ["# Versions of the dependencies\n"]
    lines.append(
        "Each cell compares a ring of two CPU ranks with one process: losses and every gradient by itself."
        " ZeRO stages run with one micro-batch and with two accumulated ones, families plain and packed."
        " Trainer and SFT compare logs at ZeRO 2 with accumulation. torch is 2.13.0,"
        " other packages as in the newest set."
        " `python tools/version_matrix.py --folder /tmp/matrix --rows ROW` writes a row again.\n"
    )
    for group in dict.fromkeys(row.group for row in ROWS.values()):
        rows = {name: row for name, row in ROWS.items() if row.group == group}
        by_cell = {(x["row"], x["cell"]): x for x in results if x["row"] in rows}
        if not by_cell:
            continue
        columns = [cell for cell in next(iter(rows.values())).cells if "." not in cell or group == "Trainers"]
        lines.append(f"## {group}\n")
        lines += [f"| row | {' | '.join(columns)} | date, commit |", "|---" * (len(columns) + 2) + "|"]
        reasons: dict[str, list[str]] = {}
        for name in rows:
            cells_run = {cell: x for (row, cell), x in by_cell.items() if row == name}
            if not cells_run:
                continue
            texts = [_cell(cells_run, column) for column in columns]
            last = max(cells_run.values(), key=lambda x: x["date"])
            lines.append(f"| {name} | {' | '.join(texts)} | {last['date']}, {last['commit']} |")
            for cell, x in cells_run.items():
                if x["reason"]:
                    text = x["reason"].replace("|", "/")[:320]
                    reasons.setdefault(f"{x['verdict']}: {text}", []).append(f"{name} {cell}")
        pins = [f"- {name}: {_list(row.pins)}" for name, row in rows.items() if len(row.pins) > 1]
        lines += ["", *pins, *([""] if pins else [])]
        lines += [f"- {', '.join(cells)}: {reason}" for reason, cells in reasons.items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _cell(cells_run: Mapping[str, dict[str, Any]], column: str) -> str:
    """Return a cell's verdict, with that of its other form where it differs."""
    verdicts = [
        cells_run[cell]["verdict"]
        for cell in (column, f"{column}.packed", f"{column}.accumulated")
        if cell in cells_run
    ]
    return "; ".join(dict.fromkeys(verdicts)) if len(set(verdicts)) > 1 else (verdicts or [""])[0]


def _list(pins: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in pins.items())


def main(arguments: list[str] | None = None) -> int:
    """Try the rows; write the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the environments, logs and results")
    parser.add_argument(
        "--rows", nargs="+", default=["corners"], help=f"all, corners, or of {', '.join(ROWS)}"
    )
    parser.add_argument("--without", nargs="+", default=[], metavar="CELL", help="leave these cells out")
    parser.add_argument("--from", dest="source", type=Path, help="an environment with all packages, to copy")
    parser.add_argument("--delete", action="store_true", help="each environment after its run")
    parser.add_argument("--names", action="store_true", help="write rows of tests/lowest_names.json instead")
    options = parser.parse_args(arguments)
    named = {"all": list(ROWS), "corners": list(CORNERS)}
    names = [name for word in options.rows for name in named.get(word, [word])]
    if unknown := [name for name in names if name not in ROWS]:
        raise SystemExit(f"--rows: expected all, corners or rows of {list(ROWS)}, got {unknown}")
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.jsonl"
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    wrong = False
    for name in names:
        if options.names:
            packages = [
                re.sub("-", "_", package) for package in ROWS[name].pins.keys() - {"python", "datasets"}
            ]
            if packages:
                place = ROWS[name].make(name, folder, options.source)
                command = [str(place / "bin/python"), "tools/lowest_names.py", "--write", *packages]
                print(name, run(command).strip())
            continue
        results = try_row(name, folder, options.source, options.without)
        for result in results:
            print(f"{result['verdict']:<11} {name}: {result['cell']} {result['reason'][:200]}", flush=True)
        wrong = wrong or any(result["verdict"] == "WRONG" for result in results)
        known = merge(known, results)
        file.write_text("".join(json.dumps(result) + "\n" for result in known))
        TABLE.write_text(make_table(known))
        if options.delete:
            shutil.rmtree(folder / name.replace(" ", "-"), ignore_errors=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())

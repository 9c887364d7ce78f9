"""Try ds_ring with other versions of Python, torch and transformers: an environment and a short suite each.

Example:
    python tools/version_matrix.py --folder /tmp/matrix --python 3.11 3.13 --torch 2.11.0 2.13.0 2.15.0
    python tools/version_matrix.py --folder /tmp/matrix --python 3.11 --torch 2.13.0 --transformers 5.0.0

Each environment takes a few minutes and up to 6 GB: outside of CPU-only indexes torch comes with CUDA. An
environment that exists already is used again. The suite is ring attention on real ranks, gradients under
DeepSpeed at each ZeRO stage, a transformers model, and the tutorial's run. It prints one row for each
combination, as a table of README; the exit status is 1 where one failed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from bench import parser_of

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("pytest>=8.0", "pytest-timeout>=2.3", "pytest-xdist>=3.5", "hypothesis>=6.100")
SUITE = (
    "tests/unit/masks/test_branches.py",
    "tests/dist/test_ring_attention.py",
    "tests/dist/test_deepspeed_parity.py",
    "tests/dist/test_transformers.py",
    "tests/integration/test_documents.py::test_block_does_what_its_document_says",
)
# Rows that need what these environments lack (trainers, megatron), and of the documents only the tutorial.
CHOICE = "not README and not MIGRATING and not configs and not launcher and not tools"
SHOWN = ("torch", "deepspeed", "transformers", "numpy", "pydantic")
INSTALL_S, SUITE_S = 1800, 1800


class Result(NamedTuple):
    """Hold what came of one combination."""

    python: str
    versions: dict[str, str]
    verdict: str  # "passed", or what failed first
    passed: int
    seconds: float


def environment(folder: Path, python: str, torch: str, transformers: str) -> Path:
    """Return the interpreter of an environment with these versions, which is made if it is not there.

    Raises:
        subprocess.CalledProcessError: something cannot be installed; its output says what.
    """
    place = folder / f"python{python}-torch{torch}-transformers{transformers}"
    interpreter = place / "bin/python"
    if not (place / "complete").exists():
        run([f"python{python}", "-m", "venv", "--clear", str(place)], INSTALL_S)
        wanted = [f"torch=={torch}", f"transformers=={transformers}", *TOOLS, "-e", f"{ROOT}[train]"]
        run([str(interpreter), "-m", "pip", "install", "-q", *wanted], INSTALL_S)
        (place / "complete").touch()
    return interpreter


def run(command: list[str], deadline_s: float) -> str:
    """Return the output of a command that ended with 0."""
    return subprocess.run(
        command, cwd=ROOT, check=True, text=True, timeout=deadline_s,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ).stdout  # fmt: skip


def tried(folder: Path, python: str, torch: str, transformers: str) -> Result:
    """Make the environment and run the suite in it."""
    began = time.monotonic()
    try:
        interpreter = environment(folder, python, torch, transformers)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = str(error.output or error).strip().splitlines()
        return Result(
            python, {"torch": torch, "transformers": transformers}, f"no environment: {said[-1]}", 0, 0
        )
    ask = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {SHOWN}}}))"
    versions = json.loads(run([str(interpreter), "-c", ask], 60))
    path = f"{interpreter.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(interpreter), "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-k", CHOICE, *SUITE],
        cwd=ROOT, env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}, text=True, timeout=SUITE_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    (interpreter.parents[1] / "suite.log").write_text(done.stdout)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    found = re.search(r"(\d+) passed", done.stdout)
    passed = int(found[1]) if found else 0
    fine = done.returncode == 0 and passed > 0
    verdict = "passed" if fine else f"{len(failed)} failed: {failed[0] if failed else 'see suite.log'}"
    return Result(python, versions, verdict, passed, time.monotonic() - began)


def main(arguments: list[str] | None = None) -> int:
    """Try every combination; print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the environments and their logs")
    parser.add_argument("--python", nargs="+", default=["3.11", "3.12", "3.13"])
    parser.add_argument("--torch", nargs="+", default=["2.11.0", "2.13.0", "2.15.0"])
    parser.add_argument("--transformers", nargs="+", default=["5.23.0"])
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    results = []
    for python, torch, transformers in itertools.product(options.python, options.torch, options.transformers):
        results.append(tried(options.folder.absolute(), python, torch, transformers))
        print(results[-1], file=sys.stderr, flush=True)
    print(f"| Python | {' | '.join(SHOWN)} | suite |\n|---|{'---|' * len(SHOWN)}---|")
    for result in results:
        cells = [result.versions.get(name, "") for name in SHOWN]
        print(f"| {result.python} | {' | '.join(cells)} | {result.verdict}, {result.passed} tests |")
    return int(any(result.verdict != "passed" for result in results))


if __name__ == "__main__":
    sys.exit(main())

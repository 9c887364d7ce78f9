"""Run a short test suite with other versions of the dependencies, in an environment for each combination.

Example:
    python tools/version_matrix.py --folder /tmp/matrix --python 3.11 3.13 --torch 2.13.0 2.15.0 --delete
    python tools/version_matrix.py --folder /tmp/m --python 3.11 --torch 2.11.0 --transformers 5.18.0 --lowest

Each environment takes a few minutes and up to 6 GB: outside of CPU-only indexes torch comes with CUDA. An
environment that exists already is used again. The suite is ring attention on real ranks, gradients under
DeepSpeed at each ZeRO stage, a transformers model, Megatron's attention, and the tutorial's run. It prints
one row for each combination, as a table of README; the exit status is 1 where one failed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

from common import make_parser

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("pytest>=8.0", "pytest-timeout>=2.3.1", "pytest-xdist>=3.5", "hypothesis>=6.100")
SUITE = (
    "tests/unit/masks/test_branches.py",
    "tests/dist/test_ring_attention.py",
    "tests/dist/test_deepspeed_parity.py",
    "tests/dist/test_rotary.py",
    "tests/dist/test_generation.py",
    "tests/dist/contrib/test_megatron.py",
    "tests/integration/test_documents.py::test_block_does_what_its_document_says",
)
# Of the documents only the tutorial: the others need the trainers, which these environments lack.
CHOICE = "not README and not CONTRIBUTING and not MIGRATING and not configs and not launcher and not tools"
SHOWN = ("torch", "deepspeed", "transformers", "trl", "megatron-core", "numpy", "pydantic")
EXTRAS = "trainers,megatron"
BOUNDED = ("plot", "train", "trainers", "megatron")
INSTALL_S, SUITE_S = 1800, 1800


class Combination(NamedTuple):
    """Name the versions of one environment."""

    python: str
    torch: str
    transformers: str
    megatron: str
    lowest: bool  # every other dependency at its lower bound

    def wanted(self) -> list[str]:
        """Return what pip installs."""
        pinned = {"torch": self.torch, "transformers": self.transformers, "megatron-core": self.megatron}
        return [
            *(f"{name}=={version}" for name, version in pinned.items()),
            *TOOLS,
            "-e",
            f"{ROOT}[{EXTRAS}]",
        ]

    def place(self, folder: Path) -> Path:
        """Return the folder of the environment."""
        name = f"python{self.python}-torch{self.torch}-transformers{self.transformers}"
        return folder / (name + "-lowest" * self.lowest)

    def environment(self, folder: Path) -> Path:
        """Return the folder of an environment with these versions, which is made if it is not there.

        Raises:
            subprocess.CalledProcessError: something cannot be installed; its output has the name.
        """
        place = self.place(folder)
        if not (place / "complete").exists():
            run([f"python{self.python}", "-m", "venv", "--clear", str(place)], INSTALL_S)
            bounds = place / "bounds.txt"
            bounds.write_text("\n".join(lower_bounds() if self.lowest else ()))
            pip = [str(place / "bin/python"), "-m", "pip", "install", "-q", "-c", str(bounds)]
            run([*pip, *self.wanted()], INSTALL_S)
            (place / "complete").touch()
        return place


class Result(NamedTuple):
    """Hold what came of one combination."""

    python: str
    versions: dict[str, str]
    verdict: str  # "passed", or what failed first
    passed: int
    seconds: float


def lower_bounds() -> list[str]:
    """Return each dependency of pyproject.toml, and of the extras that are tried, at its lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = project["dependencies"] + [requirement for name in BOUNDED for requirement in optional[name]]
    bounds = (re.match(r"([\w-]+)>=([\w.]+)", requirement) for requirement in wanted)
    # megatron-core's version is `--megatron`'s
    return [
        f"{requirement[1]}=={requirement[2]}"
        for requirement in bounds
        if requirement and requirement[1] != "megatron-core"
    ]


def run(command: list[str], deadline_s: float) -> str:
    """Return the output of a command that ended with 0."""
    return subprocess.run(
        command, cwd=ROOT, check=True, text=True, timeout=deadline_s,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ).stdout  # fmt: skip


def tried(folder: Path, combination: Combination) -> Result:
    """Make the environment and run the suite in it; its output stays in the folder, as NAME.log."""
    began = time.monotonic()
    try:
        place = combination.environment(folder)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        lines = str(error.output or error).strip().splitlines()
        versions = {"torch": combination.torch, "transformers": combination.transformers}
        return Result(combination.python, versions, f"no environment: {lines[-1]}", 0, 0)
    interpreter = place / "bin/python"
    ask = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {SHOWN}}}))"
    versions = json.loads(run([str(interpreter), "-c", ask], 60))
    path = f"{interpreter.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(interpreter), "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-k", CHOICE, *SUITE],
        cwd=ROOT, env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}, text=True, timeout=SUITE_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    place.with_name(f"{place.name}.log").write_text(done.stdout)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    match = re.search(r"(\d+) passed", done.stdout)
    passed = int(match[1]) if match else 0
    fine = done.returncode == 0 and passed > 0
    verdict = "passed" if fine else f"{len(failed)} failed: {failed[0] if failed else 'see its log'}"
    return Result(combination.python, versions, verdict, passed, time.monotonic() - began)


def main(arguments: list[str] | None = None) -> int:
    """Try every combination; print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the environments and their logs")
    parser.add_argument("--python", nargs="+", default=["3.11", "3.12", "3.13"])
    parser.add_argument("--torch", nargs="+", default=["2.11.0", "2.13.0", "2.15.0"])
    parser.add_argument("--transformers", nargs="+", default=["5.23.0"])
    parser.add_argument("--megatron", nargs="+", default=["0.16.1"])
    parser.add_argument("--lowest", action="store_true", help="all other dependencies at their lower bounds")
    parser.add_argument("--delete", action="store_true", help="each environment after its run")
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    for versions in itertools.product(options.python, options.torch, options.transformers, options.megatron):
        combination = Combination(*versions, lowest=options.lowest)
        results.append(tried(folder, combination))
        print(results[-1], file=sys.stderr, flush=True)
        if options.delete:
            shutil.rmtree(combination.place(folder), ignore_errors=True)
    commit = run(["git", "log", "-1", "--format=%h, %cs"], 60).strip()
    print(f"Commit {commit}:\n\n| Python | {' | '.join(SHOWN)} | suite |\n|---|{'---|' * len(SHOWN)}---|")
    for result in results:
        cells = [result.versions.get(name, "") for name in SHOWN]
        print(f"| {result.python} | {' | '.join(cells)} | {result.verdict}, {result.passed} tests |")
    return int(any(result.verdict != "passed" for result in results))


if __name__ == "__main__":
    sys.exit(main())

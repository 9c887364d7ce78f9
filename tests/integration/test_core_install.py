"""A pass, the simulator and the plan with torch, numpy and pydantic alone; what else is missing is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.integration.test_wheel import build
from tests.removals import copy_tree

CHECK = ROOT / "tests/pass_check.py"
CORE = {"torch", "numpy", "pydantic"}
# What Python imports at its start: no other package than these can be found, in child processes either.
BLOCK = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
class Allowed:
    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        found = top in ALLOWED or top in sys.stdlib_module_names or top[:1] == "_"
        return PathFinder.find_spec(name, path, target) if found else None
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Allowed]
"""
# Objects of ds_ring whose use needs a package, and the command that brings it.
NEEDS = {
    "initialize": "needs deepspeed: pip install 'ds_ring[deepspeed]'",
    "enable": "needs deepspeed: pip install 'ds_ring[deepspeed]'",
}
PROBE = """
import sys, ds_ring
tops = {name.partition(".")[0] for name in sys.modules if name[:1] != "_"}  # not what .pth files import
print("imported", sorted(tops - set(sys.stdlib_module_names) - {"ds_ring", "sitecustomize"}))
for name in ds_ring.__all__:
    try:
        getattr(ds_ring, name)
    except ds_ring.RingError as error:
        print(error)
pattern = ds_ring.Causal()
layout = ds_ring.make_layout("zigzag", tokens=64, ring_size=4, pattern=pattern)
print(ds_ring.build_plan(pattern, layout, query_heads=2, kv_heads=2).summary())
"""


def requirements(names: set[str]) -> set[str]:
    """Distributions and what they require, as far as it is installed."""
    known: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        known.add(name)
        needed = {re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line}
        waiting |= {one for one in needed if one not in known}
    return known


def modules_of(name: str) -> Iterator[Path]:
    """The folders and files of a distribution at the top of site-packages."""
    files = distribution(name).files or []
    tops = {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}
    yield from (Path(str(distribution(name).locate_file(top))) for top in tops)


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which Python finds torch, numpy, pydantic, what these require, and ds_ring."""
    folder = tmp_path_factory.mktemp("blocked")
    allowed = {path.name.split(".")[0] for name in requirements(CORE) for path in modules_of(name)}
    allowed |= {
        "ds_ring",
        "ds_ring_launcher",
        "pass_check",
        "torchgen",
        "functorch",
        "__mp_main__",
        "__main__",
    }
    (folder / "sitecustomize.py").write_text(f"ALLOWED = {sorted(allowed)}\n{BLOCK}")
    # the checkout itself is installed by a finder of its own
    (folder / "ds_ring").symlink_to(ROOT / "ds_ring")
    return os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def run(*command: str, environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_what_is_imported_and_what_is_named(blocked: dict[str, str], tmp_path: Path) -> None:
    printed = run(sys.executable, "-c", PROBE, environment=blocked, folder=tmp_path).splitlines()
    assert printed[0] == "imported []", "`import ds_ring` takes no other package with it"
    named = {line.split()[0]: line for line in printed if " needs " in line}
    assert named == {name: f"{name} {text}" for name, text in NEEDS.items()}
    assert any(line.startswith("rank hop origin") for line in printed)


@pytest.mark.night
def test_a_pass_and_the_simulator_need_no_more(blocked: dict[str, str], tmp_path: Path) -> None:
    command = (sys.executable, str(CHECK), "pass", "simulator")
    result = json.loads(run(*command, environment=blocked, folder=tmp_path).splitlines()[-1])
    assert result["exact"] == {"pass": True, "simulator": True} and not result["imported"], result


@pytest.mark.night
def test_the_wheel_alone_beside_what_a_vendor_installed(tmp_path: Path) -> None:
    """A virtual environment with torch, numpy, pydantic and their needs; pip adds the wheel."""
    copy_tree(tmp_path / "tree")
    wheel = build("wheel", tmp_path / "tree", tmp_path)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    python = tmp_path / "venv/bin/python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    for path in {path for name in requirements(CORE) for path in modules_of(name)}:
        if path.exists() and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    pip = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, timeout=120)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    (tmp_path / "run").mkdir()
    printed = run(str(python), str(CHECK), environment=environment, folder=tmp_path / "run")
    result = json.loads(printed.splitlines()[-1])
    assert all(result["exact"].values()) and result["ds_ring"] == str(site / "ds_ring"), result
    torchrun = [str(python), "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    run(*torchrun, str(CHECK.with_name("pass_rank.py")), environment=environment, folder=tmp_path / "run")

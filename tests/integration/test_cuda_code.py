"""tools/verify_cuda_kernels.py --compile: cubins of the kernels without a GPU, the budget and the tables."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from compiled_kernels import HEADS, OURS, Captured, Row, faults  # type: ignore[import-not-found]
from cuda_code import Resources, triton_sources  # type: ignore[import-not-found]

from ds_ring.kernels.flex.options import BLOCKS

ROOT = Path(__file__).parents[2]
SMALL = ["--targets", "90", "--head-dims", "64"]
# Accumulators of so many elements do not fit the registers of a block.
TOO_MANY = "import runpy, ds_ring.cuda.merge as m; m.ELEMENTS = 1 << 14;"


def run(*arguments: str, before: str = "import runpy;") -> subprocess.CompletedProcess[str]:
    """The command, in a process where Triton compiles (others interpret)."""
    tool = "runpy.run_module('tools.verify_cuda_kernels', run_name='__main__')"
    script = f"import sys; sys.argv = {['-m', '--compile', *arguments]!r}; {before} {tool}"
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)


@pytest.mark.night  # by day tests/unit/cuda/test_merge.py interprets them
@pytest.mark.needs("triton")
@pytest.mark.parametrize(
    ("before", "status", "says"), [("import runpy;", 0, "ok   3 rows"), (TOO_MANY, 1, "spilled")]
)
def test_our_kernels_compile_within_the_budget(before: str, status: int, says: str) -> None:
    done = run("ours", *SMALL, before=before)
    assert done.returncode == status and says in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.night
@pytest.mark.needs("triton")
@pytest.mark.parametrize(("options", "status"), [([], 0), (["--options", "{}"], 1)])
def test_inductors_kernels_compile_and_its_own_blocks_spill(options: Sequence[str], status: int) -> None:
    done = run("all", *SMALL, "--patterns", "causal", *options)
    assert done.returncode == status, done.stdout + done.stderr[-2000:]
    assert ("forward (128 x 128, 3 stages, 4 warps): expected at most 320 bytes" in done.stdout) == bool(
        options
    )


@pytest.mark.parametrize(
    ("worst", "says"),
    [
        (Resources(255, 64, 64, 232_448), ""),
        (Resources(255, 0, 65, 1024), "got 65"),
        (Resources(255, 72, 0, 1024), "got 72"),
        (Resources(64, 0, 0, 232_449), "shared memory, got 232449"),
    ],
)
def test_a_kernel_over_the_budget_is_found(worst: Resources, says: str) -> None:
    found = faults([Row(90, 192, "backward", "32 x 32", 4, worst)])
    assert says in found[0] if says else not found


def test_every_kernel_of_ours_is_compiled() -> None:
    """Each function that `triton.jit` decorates and that is no helper of another one."""
    found = set()
    for path in (ROOT / "ds_ring").rglob("*.py"):
        if "triton" not in (text := path.read_text()):
            continue
        tree = ast.parse(text)
        jitted = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        }
        launched = {
            ast.unparse(node.func.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        }
        found |= jitted & launched
    assert found == set(OURS)


def test_the_tables_are_of_todays_blocks() -> None:
    """Every row is within the budget; flex's rows have the blocks, stages and warps of the options."""
    paths = sorted((ROOT / "tools" / "results").glob("compiled_sm_*.md"))
    targets = {int(re.findall(r"\d+", path.name)[0]) for path in paths}
    assert 90 in targets <= set(BLOCKS)
    for path in paths:
        rows = []
        for line in path.read_text().splitlines():
            if not line.startswith("| sm_"):
                continue
            gpu, dim, kernel, blocks, registers, spilled, shared, count = line.strip("| ").split(" | ")
            worst = Resources(int(registers), *map(int, spilled.split(", ")), int(shared))
            rows.append(Row(int(gpu[3:]), int(dim), kernel, blocks.strip(), int(count), worst))
            way = {"forward": "fwd", "backward": "bwd"}.get(kernel)
            if way is not None:
                table = BLOCKS[rows[-1].capability]
                *sides, stages, warps = table[min(size for size in table if size >= int(dim))][way]
                both = sides if way == "fwd" else [*sides, *reversed(sides)]
                assert blocks == f"{' x '.join(map(str, both))}, {stages} stages, {warps} warps", line
        assert not faults(rows)
        assert {row.head_dim for row in rows} == {64, 80, 96, 128, 192, 256}
        assert {row.kernel for row in rows} == {"forward", "backward", "row sums", *OURS}


def test_kernels_are_cut_out_of_a_module() -> None:
    """With quotes and backslashes as Inductor writes them."""
    source = (
        "x = async_compile.triton('triton_tem_fused_a', '''\nnum = \\'1\\'\n''', device_str='cuda')\ny = f(1)"
    )
    assert triton_sources(source) == {"triton_tem_fused_a": "\nnum = '1'\n"}
    assert Captured(64, "triton_per_fused_a", "").kernel == "row sums" and HEADS[0] == (32, 8)


OWN_WIDTHS = """
import runpy, ds_ring.kernels.flex.block_mask as b
make = b._TablePlan.from_intervals
b._make_plan_pair = lambda by_head, rows: [make([pair[full] for pair in by_head], rows) for full in (0, 1)]
"""


@pytest.mark.night  # by day tests/unit/kernels/flex/test_tables.py reads the tables as the kernels do
@pytest.mark.needs("triton")
@pytest.mark.parametrize(
    "before", ["import runpy", OWN_WIDTHS], ids=["today's tables", "of their own widths"]
)
def test_interpreted_kernels_of_torch_2_11_are_exact_with_tables_of_one_width(before: str) -> None:
    """With tables of two widths they read other blocks, and behind the tables: wrong, or the process ends."""
    tool = "runpy.run_module('tools.verify_cuda_kernels', run_name='__main__')"
    words = ["-m", "--templates", "2.11", "--patterns", "causal"]
    script = f"import sys; sys.argv = {words!r}\n{before}\n{tool}"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert (done.returncode == 0) == (before != OWN_WIDTHS), done.stdout + done.stderr[-2000:]
    assert before == OWN_WIDTHS or "templates of torch 2.11: ok   causal" in done.stdout

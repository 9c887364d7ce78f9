"""Compare training on a ring with one process, in an environment of some versions: one line for each cell.

Examples:
    python tools/version_cells.py zero0 zero2.accumulated
    python tools/version_cells.py llama llama.packed trainer sft quickstart

`tools/version_matrix.py` makes the environments and calls this file in each. A line is a JSON object: the
cell, its verdict (exact, refused, not offered, WRONG) and the reason. Nothing that a cell raises ends the
command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from common import make_parser

ROOT = Path(__file__).resolve().parents[1]
Verdict = Literal["exact", "refused", "not offered", "WRONG"]

STAGES = ("zero0", "zero1", "zero2", "zero3")
ACCUMULATED = tuple(f"{stage}.accumulated" for stage in STAGES)
FAMILIES = (
    "llama", "qwen3", "gpt_oss", "gemma3_text", "mixtral", "deepseek_v3", "bloom", "bert", "mamba2",
    "qwen3_next",
)  # fmt: skip
PACKED = tuple(f"{family}.packed" for family in FAMILIES)
SCRIPTS = {"trainer": "hf_trainer.py", "sft": "trl_sft.py"}
CELLS = ("pass", *STAGES, *ACCUMULATED, *FAMILIES, *PACKED, *SCRIPTS, "quickstart")
STEPS = 3
DEADLINE_S = 300.0


class Cell(NamedTuple):
    """Hold what came of one comparison."""

    cell: str
    verdict: Verdict
    reason: str = ""
    seconds: float = 0.0


class RefusedError(Exception):
    """Carry the text of a typed error of ds_ring's, raised on a rank."""


def run_on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what rank 0 returned.

    Raises:
        RefusedError: a rank raised an error that is a mistake of the caller's.
        RuntimeError: a rank failed otherwise.
    """
    from ds_ring import errors
    from tests.dist.harness import RankPool

    with RankPool(ranks) as pool:
        outcomes = pool.collect(function, *arguments, timeout_s=DEADLINE_S, grace_s=3.0)
    failed = [outcome for outcome in outcomes if outcome.status != "returned"]
    if failed:
        raised = [outcome for outcome in failed if outcome.status == "raised"]
        first = (raised or failed)[0]
        kind = getattr(errors, first.error_type, None)
        text = f"{first.error_type}: {first.message}" if raised else f"{first.status} {first.message}"
        if kind is not None and issubclass(kind, ValueError):
            raise RefusedError(text)
        print(first.report, file=sys.stderr)
        raise RuntimeError(text)
    return outcomes[0].value


def check_stage(name: str) -> Cell:
    """Train a Llama at a ZeRO stage: three losses, and each gradient by itself."""
    from tests.dist.deepspeed_ranks import Size, check_gradients, json_config, train_alone, train_on_ring

    size, stage = Size(hidden=32, layers=2, tokens=48, samples=2), int(name.removeprefix("zero")[0])
    micro_batches = 2 if name in ACCUMULATED else 1
    config = json_config(2, size.samples // micro_batches, stage, gradient_accumulation_steps=micro_batches)
    run = run_on_ranks(2, train_on_ring, size, config, STEPS)
    expected = train_alone(size, STEPS, micro_batches)
    for loss, alone in zip(run.losses, expected.losses, strict=True):
        assert abs(loss - alone) < 1e-5 * abs(alone), f"losses {run.losses}, of one process {expected.losses}"
    check_gradients(run.gradients, expected.gradients, 1e-4)
    return Cell(name, "exact")


def check_on_ranks(rank: int, world_size: int, source: str, form: Any) -> tuple[str, str]:
    """Return the verdict on a family and its reason. On a rank."""
    from ds_ring_launcher.check.model_check import CheckRequest, check_forms
    from tests.dist.deepspeed_ranks import start_deepspeed

    start_deepspeed()
    report = check_forms(CheckRequest(source, forms=(form,)))[0]
    return report.result, report.reason


def check_family(name: str) -> Cell:
    """Compare a small model of a family: logits, loss and each gradient by itself."""
    from transformers import CONFIG_MAPPING

    source, _, form = name.partition(".")
    if source not in CONFIG_MAPPING:
        return Cell(name, "not offered", "transformers has no such model type")
    result, reason = run_on_ranks(2, check_on_ranks, source, form or "plain")
    verdicts: dict[str, Verdict] = {"exact": "exact", "refused": "refused", "invalid": "not offered"}
    return Cell(name, verdicts.get(result, "WRONG"), reason)


def run_script(rank: int, world_size: int, script: str, arguments: list[str], plain: bool) -> Any:
    """Return what an example logs. On a rank."""
    from tests.dist.test_trainers import run_example

    # accelerate before 1.12 asks for it where the groups have been started, too
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return run_example(rank, world_size, script, arguments, plain)


def check_script(name: str) -> Cell:
    """Compare the logs of an example with those of one process without a ring."""
    from tests.dist.trainer_logs import EXAMPLES, check_logs, configs

    script, ring_json = SCRIPTS[name], EXAMPLES / "ds_config.json"
    with tempfile.TemporaryDirectory() as folder:
        # At ZeRO 1: DeepSpeed 0.17.0 to 0.18.2 drop micro-batches at ZeRO 2.
        plain = configs(Path(folder), zero_optimization={"stage": 1})[0]
        try:
            alone = ["--config", plain, "--output", f"{folder}/plain"]
            expected = run_on_ranks(1, run_script, script, alone, True)
        except RuntimeError as error:
            return Cell(name, "not offered", f"one process without a ring fails: {error}")
        got = run_on_ranks(
            2, run_script, script, ["--config", str(ring_json), "--output", f"{folder}/ring"], False
        )
    check_logs(got, expected)
    return Cell(name, "exact")


def check_pass(name: str) -> Cell:
    """Compare passes of torch alone with the definition in float64: by ranks, compiled, simulated."""
    command = [sys.executable, str(ROOT / "tests/pass_check.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, text=True, timeout=DEADLINE_S, capture_output=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-2000:]
    inexact = [kind for kind, is_exact in json.loads(lines[-1])["exact"].items() if not is_exact]
    assert not inexact, f"not exact: {', '.join(inexact)}"
    return Cell(name, "exact")


def check_quickstart(name: str) -> Cell:
    """Run README's example: its last lines compare it with one process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "ds_ring_launcher.cli",
            "launch",
            str(ROOT / "configs/quickstart.yaml"),
        ]
        done = subprocess.run(
            command,
            cwd=folder,
            text=True,
            timeout=2 * DEADLINE_S,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    assert done.returncode == 0, done.stdout[-2000:]
    return Cell(name, "exact")


def check_cell(name: str) -> Cell:
    """Return what came of a cell; never raises."""
    began = time.monotonic()
    check: Callable[[str], Cell] = check_family
    if name.startswith("zero"):
        check = check_stage
    elif name in SCRIPTS:
        check = check_script
    elif name in ("pass", "quickstart"):
        check = check_pass if name == "pass" else check_quickstart
    try:
        cell = check(name)
    except RefusedError as error:
        cell = Cell(name, "refused", str(error))
    except Exception as error:  # a cell must not stop those after it
        cell = Cell(name, "WRONG", f"{type(error).__name__}: {error}")
    return cell._replace(
        reason=" ".join(cell.reason.split())[:500], seconds=round(time.monotonic() - began, 1)
    )


def check_cells(names: Sequence[str]) -> Iterator[Cell]:
    """Yield the cells in turn."""
    for name in names:
        yield check_cell(name)


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each cell; the status is 1 where one is WRONG."""
    parser = make_parser(__doc__)
    parser.add_argument("cells", nargs="+", choices=CELLS, metavar="CELL", help=", ".join(CELLS))
    options = parser.parse_args(arguments)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(ROOT))
    wrong = False
    for cell in check_cells(options.cells):
        print(json.dumps(cell._asdict()), flush=True)
        wrong = wrong or cell.verdict == "WRONG"
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())

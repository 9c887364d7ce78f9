"""Train a small model on two CPU ranks and write a report about it: `ds-ring demo`."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from .parsers import Commands, add_command, refuse_extra, require_packages, require_sizes, writing_to

_HELP = "train a small model on two CPU ranks, compare it with one process, write one HTML report"
_DESCRIPTION = (
    "Train a byte-level Llama on the sources of Python's standard library, sharded over two CPU ranks;"
    " compare loss and gradients with one process; measure the memory of real rings of several sizes"
    " beside an all-gather of K/V; write everything into one HTML file. It takes about a minute, and"
    " needs no checkout, no GPU and no network."
)
_EXAMPLE = """\
examples:
  ds-ring demo                                  writes runs/demo/report.html
  ds-ring demo --steps 200 --output runs/longer

writes FOLDER/report.html, and beside it what was run: demo.yaml and ds_config.json, for `ds-ring launch`
"""
RANKS = 2

# The DeepSpeed JSON of the demo: the quick start's without its warm-up.
_DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "torch_adam": True}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000},
    "steps_per_print": 1_000_000,
    "sequence_parallel_size": RANKS,
    "ring_attention": {"ring_size": "auto", "layout": "auto", "pattern": {"causal": True}},
}


def add(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "demo", run, _HELP, _DESCRIPTION, _EXAMPLE)
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="optimizer steps (60)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), metavar="FOLDER", help="(runs/demo)"
    )


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Train, measure, write the report; return the exit status of the training."""
    refuse_extra("demo", extra_args)
    require_sizes(options, {"steps": 1_000_000})
    require_packages("demo", "transformers", "matplotlib")
    folder = options.output.absolute()
    with writing_to(options.output):
        cluster = _write_inputs(folder, options.steps)
    began = time.perf_counter()
    from . import launch

    print(f"1/3 training on {RANKS} ranks, then the same batch on one process", flush=True)
    launched = argparse.Namespace(config=cluster, dry_run=False, sbatch=False, node_rank=None, verbose=False)
    status = launch.run(launched, ())
    if status:
        return status
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library greets on stderr
    from ..demo.measure import RING_SIZES, measure
    from ..demo.report import write_report

    sizes = ", ".join(str(size) for size in RING_SIZES)
    print(f"2/3 memory of real rings of {sizes} ranks, beside an all-gather", flush=True)
    found = measure()
    print("3/3 pictures and report", flush=True)
    log = json.loads((folder / "log.json").read_text())
    path = write_report(folder / "report.html", log, found, _DS_CONFIG)
    print(f"written in {time.perf_counter() - began:.0f} s: {path}")
    return 0


def _write_inputs(folder: Path, steps: int) -> Path:
    """Write what the training needs; return the cluster YAML."""
    from ds_ring.written_files import replace_text

    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "ds_config.json", json.dumps(_DS_CONFIG, indent=2) + "\n")
    arguments = ["--steps", steps, "--evaluate_every", 0, "--output", str(folder)]
    cluster = {
        "engine": "deepspeed",
        "device": "cpu",
        "hosts": "local",
        "slots": RANKS,
        "script": "ds_ring_launcher.demo.train_lm",
        "deepspeed_config": "ds_config.json",
        "script_args": arguments,
        "environment": {"KINETO_LOG_LEVEL": 99, "TORCH_CPP_LOG_LEVEL": "ERROR"},  # no lines of the profiler
    }
    path = folder / "demo.yaml"
    replace_text(path, json.dumps(cluster, indent=2) + "\n")  # JSON is YAML
    return path

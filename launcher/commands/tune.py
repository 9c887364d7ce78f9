"""Measure this machine for `ds-ring plan`: `ds-ring tune`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .parsers import (
    Commands,
    add_command,
    add_json,
    read_tokens,
    refuse_extra,
    require_deadline,
    require_memory,
    require_sizes,
)

_MAX_SIZES = {
    "tokens": 2**30,
    "heads": 4096,
    "kv_heads": 4096,
    "head_dim": 4096,
    "batch": 2**20,
    "processes": 1024,
    "threads": 1024,
}

_HELP = "measure this machine, write its rates for `ds-ring plan`"
_DESCRIPTION = (
    "Measure kernels, links and a few real passes on ranks of this machine, and print or write the hardware"
    " file that `ds-ring plan --hardware FILE.yaml` reads."
)
_EXAMPLE = """\
examples:
  ds-ring tune --tokens 32k --heads 8 --head-dim 64 --processes 4 --hardware-output here.yaml
  ds-ring tune --tokens 16384 --heads 8 --kv-heads 2 --head-dim 64 --processes 2 --config ds_config.json
  ds-ring tune --tokens 65536 --heads 8 --head-dim 64 --processes 2 --pattern '{"window": 4096}' --json

on several hosts, every rank of a launch measures:
  torchrun ... -m ds_ring_launcher.tune --tokens 128k --heads 32 --head-dim 128 --device cuda ...
"""


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the options of what is measured and of the output, also for `python -m ds_ring_launcher.tune`."""
    shapes = parser.add_argument_group("shapes of a layer")
    shapes.add_argument(
        "--tokens", type=read_tokens, required=True, help="length of a whole sequence, say 131072 or 128k"
    )
    shapes.add_argument("--heads", type=int, required=True, help="query heads")
    shapes.add_argument("--kv-heads", type=int, help="K/V heads; by default as many as query heads")
    shapes.add_argument("--head-dim", type=int, required=True, help="size of a head")
    shapes.add_argument("--batch", type=int, default=1, help="sequences of a micro batch (default 1)")
    shapes.add_argument(
        "--dtype", help="float32, bfloat16 or float16 (default: bfloat16 on CUDA, else float32)"
    )
    shapes.add_argument("--pattern", metavar="JSON", help="""instead of the file's, say '{"window": 4096}'""")
    shapes.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    files = parser.add_argument_group("files")
    files.add_argument(
        "--config", "--deepspeed_config", metavar="FILE.json", type=Path,
        help="a DeepSpeed JSON; its section is measured, in one ring",
    )  # fmt: skip
    files.add_argument("--hardware-output", metavar="FILE.yaml", type=Path, help="where the description goes")
    add_json(parser)


def add(commands: Commands) -> None:
    """Add the command."""
    tune = add_command(commands, "tune", run, _HELP, _DESCRIPTION, _EXAMPLE)
    declare(tune)
    ranks = tune.add_argument_group("ranks")
    ranks.add_argument("--processes", type=int, required=True, help="ranks to start on this machine")
    ranks.add_argument("--threads", type=int, help="of each rank (default: cores / processes)")
    ranks.add_argument(
        "--deadline-seconds", type=float, default=3600, help="all ranks are ended then (default 3600)"
    )


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Start the ranks and wait for them; RingError for wrong input, before any is started."""
    refuse_extra("tune", extra_args)
    require_sizes(options, _MAX_SIZES)
    require_deadline(options.deadline_seconds)
    import torch

    from ds_ring.transports.devices import select_gpu

    from ..run.local_ranks import run_ranks
    from ..tune.__main__ import read
    from ..tune.__main__ import run as work

    # Read here as well, so that wrong input costs no start of ranks.
    request = read(options, options.processes)
    require_memory(request.batch * request.tokens, request.heads, request.head_dim, request.item_bytes)
    cores = len(os.sched_getaffinity(0))
    threads = options.threads if options.threads is not None else max(1, cores // options.processes)
    if options.device == "cuda":
        select_gpu(options.processes - 1, torch.cuda.device_count())
    arguments = argparse.Namespace(**{name: value for name, value in vars(options).items() if name != "run"})
    run_ranks(work, options.processes, (arguments,), threads=threads, deadline_s=options.deadline_seconds)
    return 0

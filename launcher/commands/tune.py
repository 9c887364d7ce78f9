"""Measure this machine and choose the section: `ds-ring tune`."""

from __future__ import annotations

import argparse
import json
import os

from ..tune.arguments import declare
from .parsers import Commands, add_command, refuse_extra, require_deadline, require_memory, require_sizes

_MAX_SIZES = {
    "tokens": 2**30,
    "heads": 4096,
    "kv_heads": 4096,
    "head_dim": 4096,
    "batch": 2**20,
    "processes": 1024,
    "threads": 1024,
}

_HELP = "measure this machine, choose sizes, layout, overlap and kernel options for given shapes"
_DESCRIPTION = (
    "Measure kernels, links and a few real passes on ranks of this machine, and write the section of "
    "the DeepSpeed JSON that is fastest here. Prints what it expected and what it measured."
)
_EXAMPLE = """\
examples:
  ds-ring tune --tokens 32768 --heads 8 --head-dim 64 --processes 4
  ds-ring tune --tokens 32768 --heads 8 --kv-heads 2 --head-dim 64 --processes 4 \\
      --config ds_config.json --output ds_config.tuned.json
  ds-ring tune --tokens 65536 --heads 8 --head-dim 64 --processes 2 --pattern '{"window": 4096}' --json
  ds-ring tune --tokens 16384 --heads 4 --kv-heads 1 --head-dim 64 --processes 2 --hf-config config.json
  ds-ring tune --tokens 16384 --heads 8 --head-dim 64 --processes 2 --hardware-output here.yaml

on several hosts, every rank of a launch calls the same search:
  torchrun ... -m ds_ring_launcher.tune --tokens 131072 --heads 32 --head-dim 128 --device cuda ...
"""


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

    from ..plan.model_file import with_layer_types
    from ..run.local_ranks import run_ranks
    from ..tune.__main__ import read
    from ..tune.__main__ import run as work

    if options.hf_config is not None:
        options.hf_config = json.dumps(with_layer_types(options.hf_config))

    # Read here as well, so that wrong input costs no start of ranks.
    _, request = read(options, options.processes)
    require_memory(request.batch * request.tokens, request.heads, request.head_dim, request.item_bytes)
    cores = len(os.sched_getaffinity(0))
    threads = options.threads if options.threads is not None else max(1, cores // options.processes)
    if options.device == "cuda":
        select_gpu(options.processes - 1, torch.cuda.device_count())
    told = argparse.Namespace(**{name: value for name, value in vars(options).items() if name != "run"})
    run_ranks(work, options.processes, (told,), threads=threads, deadline_s=options.deadline_seconds)
    return 0

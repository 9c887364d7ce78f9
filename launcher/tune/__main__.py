"""Run a search inside an existing launch: every rank runs this, rank 0 writes and prints.

Examples:
    torchrun --nproc-per-node 8 -m ds_ring_launcher.tune --tokens 131072 --heads 32 --kv-heads 8 \
        --head-dim 128 --device cuda --config ds_config.json --output ds_config.tuned.json
    deepspeed --hostfile hosts --module ds_ring_launcher.tune --tokens 131072 --heads 32 \
        --head-dim 128 --device cuda
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
import torch.distributed as dist
import yaml

from ds_ring.config.json_text import SECTION, Json, parse_object, read_object
from ds_ring.errors import RingError
from ds_ring.transports.devices import select_gpu
from ds_ring.written_files import write_at_once

from ..plan.model_file import read_model_patterns
from .arguments import declare
from .request import TuningRequest, request_from
from .result import TuningResult, describe_hardware, print_tables, require_writable
from .search import tune


def read(options: argparse.Namespace, world_size: int) -> tuple[Json, TuningRequest]:
    """Read the DeepSpeed JSON and the request; measure nothing.

    Raises:
        RingConfigError: wrong options or files.
    """
    for option in ("output", "hardware_output"):
        if getattr(options, option) is not None:
            require_writable(getattr(options, option), "--" + option.replace("_", "-"))
    whole = read_object(options.config) if options.config is not None else {}
    if options.pattern is not None:
        section = whole.get(SECTION, {})
        whole = whole | {SECTION: dict(section) | {"pattern": parse_object(options.pattern, "--pattern")}}
    request = request_from(
        whole,
        tokens=options.tokens,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        batch=options.batch,
        device=options.device,
        dtype=options.dtype,
        world_size=world_size,
        model_patterns=read_model_patterns(options.hf_config, options.layers),
    )
    return whole, request


def run(options: argparse.Namespace) -> TuningResult:
    """Read, tune, and on rank 0 write and print. Collective."""
    whole, request = read(options, dist.get_world_size())
    result = tune(request, progress=True)
    if dist.get_rank() == 0:
        merged = result.merged(whole)
        if options.output is not None:
            write_at_once(options.output, json.dumps(merged, indent=2) + "\n")
        if options.hardware_output is not None:
            write_at_once(options.hardware_output, yaml.safe_dump(describe_hardware(result), sort_keys=False))
        _print(options, result, merged)
    return result


def _print(options: argparse.Namespace, result: TuningResult, merged: Json) -> None:
    if options.json:
        print(json.dumps(result.as_json(), indent=2))
        return
    print_tables(result)
    if options.output is None:
        print(json.dumps({key: merged[key] for key in ("sequence_parallel_size", SECTION)}, indent=2))
    for path in (options.output, options.hardware_output):
        if path is not None:
            print(f"written: {path}")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; exit status 2 is wrong input."""
    parser = argparse.ArgumentParser(
        prog="python -m ds_ring_launcher.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    declare(parser)
    # what launchers add by themselves
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.device == "cuda":
            local_rank = dist.get_node_local_rank(options.local_rank or 0)
            torch.cuda.set_device(select_gpu(local_rank, torch.cuda.device_count()))
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
        run(options)
    except RingError as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"ds_ring_launcher.tune: error: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

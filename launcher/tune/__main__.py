"""Measure inside an existing launch: every rank runs this, rank 0 writes and prints.

Examples:
    torchrun --nproc-per-node 8 -m ds_ring_launcher.tune --tokens 131072 --heads 32 --kv-heads 8 \
        --head-dim 128 --device cuda --config ds_config.json --hardware-output here.yaml
    deepspeed --hostfile hosts --module ds_ring_launcher.tune --tokens 128k --heads 32 \
        --head-dim 128 --device cuda
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
import torch.distributed as dist
import yaml

from ds_ring.config.json_text import SECTION, parse_object, read_object
from ds_ring.errors import RingError
from ds_ring.transports.devices import select_gpu
from ds_ring.written_files import write_at_once

from ..commands.parsers import require_writable
from ..commands.tune import declare
from .hardware_file import describe_hardware
from .measurements import measure
from .request import TuningRequest, request_from


def read(options: argparse.Namespace, world_size: int) -> TuningRequest:
    """Read the request; measure nothing.

    Raises:
        RingConfigError: wrong options or files.
    """
    if options.hardware_output is not None:
        require_writable(options.hardware_output, "--hardware-output")
    whole = read_object(options.config) if options.config is not None else {}
    if options.pattern is not None:
        section = whole.get(SECTION, {})
        whole = whole | {SECTION: dict(section) | {"pattern": parse_object(options.pattern, "--pattern")}}
    return request_from(
        whole,
        tokens=options.tokens,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        batch=options.batch,
        device=options.device,
        dtype=options.dtype,
        world_size=world_size,
    )


def run(options: argparse.Namespace) -> None:
    """Read, measure, and on rank 0 write and print. Collective."""
    request = read(options, dist.get_world_size())
    description = describe_hardware(request, measure(request))
    if dist.get_rank() == 0:
        text = yaml.safe_dump(description, sort_keys=False)
        if options.hardware_output is not None:
            write_at_once(options.hardware_output, text)
            text = f"written: {options.hardware_output}"
        print(json.dumps(description, indent=2) if options.json else text, flush=True)


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

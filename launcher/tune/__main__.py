"""Run a search inside an existing launch: every rank runs this, rank 0 writes and prints.

Examples:
    torchrun --nproc-per-node 8 -m ds_ring_launcher.tune --tokens 131072 --heads 32 --kv-heads 8 \\
        --head-dim 128 --device cuda --config ds_config.json --output ds_config.tuned.json
    deepspeed --hostfile hosts --module ds_ring_launcher.tune --tokens 131072 --heads 32 \\
        --head-dim 128 --device cuda
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist

from ds_ring.errors import RingError

from .arguments import declare
from .run import run


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
    if options.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(options.local_rank or 0))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    try:
        run(options)
    except RingError as error:
        if dist.get_rank() == 0:
            print(f"ds_ring_launcher.tune: error: {error}", file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

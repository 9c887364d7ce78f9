"""One of eight ranks on several hosts: passes by direct exchange, and their errors, as a JSON file.

python -m tests.dist.transports.direct.node_rank OUT.json RANKS_PER_NODE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.dist.transports.direct.test_direct import PATTERNS, parity


def main(out: str, inner: int) -> None:
    """Each pattern with stages of all bytes, of one shard, and of some shards."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    result = [pair for name in PATTERNS for pair in parity(rank, size, inner, name, False)]
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""Read how many ranks share a node, as the engine that started the job says it.

Nothing else knows: torch.distributed numbers ranks and not nodes. torchrun sets LOCAL_WORLD_SIZE, DeepSpeed's
launcher LOCAL_SIZE. What follows for the order of hops stands in `schedule/directions.py`.
"""

from __future__ import annotations

import os

LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")


def ranks_per_node() -> int | None:
    """Return the ranks that share a node; None where no launcher has said so."""
    texts = (os.environ.get(name, "") for name in LOCAL_SIZE_VARIABLES)
    return next((int(text) for text in texts if text.isdecimal() and int(text)), None)

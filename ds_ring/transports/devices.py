"""Say which GPU a rank uses, and whether ranks may share one.

[Note: ranks that share a GPU]
The rank with local rank n uses GPU n. More ranks than GPUs on a node are refused: they would share memory and
speed without a word. Ranks share GPUs, n modulo their number, if `SHARE`, a variable of the environment that
NCCL reads, too, is 1 (from version 2.30 on; older ones refuse equal GPUs). So one GPU can run a ring of
several ranks, to try it and not for its speed.
"""

from __future__ import annotations

import os

from ds_ring.errors import RingConfigError

SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"


def select_gpu(local_rank: int, devices: int) -> int:
    """Return the index of the GPU for a local rank on a node with so many GPUs.

    Raises RingConfigError where it has none of its own and may not share; [Note: ranks that share a GPU].
    """
    if 0 <= local_rank < devices:
        return local_rank
    if devices < 1 or os.environ.get(SHARE) != "1":
        expected, advice = f"at least {local_rank + 1} GPUs", f"start fewer ranks, or share: set {SHARE}=1"
        raise RingConfigError.wrong(f"local rank {local_rank}", expected, str(devices), advice)
    return local_rank % devices


def claim_device(devices: int) -> None:
    """Set LOCAL_RANK, which DeepSpeed takes for the index of a GPU, to the GPU of this rank."""
    if "LOCAL_RANK" in os.environ:
        os.environ["LOCAL_RANK"] = str(select_gpu(int(os.environ["LOCAL_RANK"]), devices))

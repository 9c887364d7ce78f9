"""Say which GPU a rank uses, and whether ranks may share one.

[Note: ranks that share a GPU]
The rank with local rank n uses GPU n. More ranks than GPUs on a node are refused: they would share memory and
speed without a word. Ranks share GPUs, n modulo their number, if one of two variables of the environment is
1. NCCL reads the first one (from version 2.30 on; older ones refuse equal GPUs), torch's symmetric memory,
which "pull" uses, the second. So one GPU can run a ring of several ranks, to try it and not for its speed.
"""

from __future__ import annotations

import os

from ds_ring.errors import RingConfigError

OF_NCCL, OF_SYMMETRIC_MEMORY = "NCCL_MULTI_RANK_GPU_ENABLE", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def may_share(*variables: str) -> bool:
    """Return whether one of these variables allows that ranks share a GPU."""
    return any(os.environ.get(name) == "1" for name in variables)


def select_gpu(local_rank: int, devices: int) -> int:
    """Return the index of the GPU for a local rank on a node with so many GPUs.

    Raises RingConfigError where it has none of its own and may not share; [Note: ranks that share a GPU].
    """
    if 0 <= local_rank < devices:
        return local_rank
    if devices < 1 or not may_share(OF_NCCL, OF_SYMMETRIC_MEMORY):
        expected, advice = f"at least {local_rank + 1} GPUs", f"start fewer ranks, or share: set {OF_NCCL}=1"
        raise RingConfigError.wrong(f"local rank {local_rank}", expected, str(devices), advice)
    return local_rank % devices


def claim_device(devices: int) -> None:
    """Set LOCAL_RANK, which DeepSpeed takes for the index of a GPU, to the GPU of this rank."""
    if "LOCAL_RANK" in os.environ:
        os.environ["LOCAL_RANK"] = str(select_gpu(int(os.environ["LOCAL_RANK"]), devices))


def has_one_queue() -> bool:
    """Return whether the driver runs all streams of this process in one queue."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1"

"""A process group and a mesh of this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

import ds_ring


@contextmanager
def one_rank_mesh(backend: str, folder: Path) -> Iterator[ds_ring.RingMesh]:
    """A ring of one on a real process group, both closed at the end; `folder` takes its store."""
    dist.init_process_group(backend, f"file://{folder}/store", rank=0, world_size=1)
    mesh = ds_ring.RingMesh.from_world(ring_size=1)
    try:
        yield mesh
    finally:
        mesh.close()
        dist.destroy_process_group()

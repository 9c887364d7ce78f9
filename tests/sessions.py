"""A session without an engine: of one rank, or on the mesh of a rank of the harness."""

from __future__ import annotations

from typing import Any

import torch

from ds_ring import RingConfig, RingMesh
from ds_ring.config.section import pattern_from_config
from ds_ring.data.session import RingSession


def session_of(mesh: RingMesh | None = None, divisor: float = 1.0, **section: Any) -> RingSession:
    mesh = mesh or RingMesh.single()
    sizes = {"ring_size": mesh.ring_size, "ulysses_size": mesh.ulysses_size}
    config = RingConfig(**sizes | section)
    return RingSession(config, mesh, pattern_from_config(config), torch.device("cpu"), divisor)

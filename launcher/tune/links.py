"""Measure the network: rate and latency between ring neighbours, and of an all-to-all.

Messages go through the exchange, as those of a pass do, checks and waits included; all ranks send at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_ring.runtime.exchange import Exchange
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.messages import Message

from .clock import Clock

SMALL_BYTES, LARGE_BYTES = 64 << 10, 8 << 20
ROUNDS = 7


@dataclass(frozen=True)
class Links:
    """Hold what moving costs; rates count what leaves a rank while every rank sends."""

    bytes_per_s: float  # to the next rank of a ring of all ranks, of the slowest rank
    fastest_bytes_per_s: float  # the same of the fastest rank
    latency_s: float  # of a small message, its bytes at that rate taken off
    all_to_all_bytes_per_s: float | None  # None where no more than one rank can split the heads


def measure_links(ring: RingMesh, ulysses: RingMesh | None, clock: Clock) -> Links:
    """Measure meshes whose ring, or whose Ulysses group, has more than one rank. Collective."""
    small = _neighbour_seconds(ring, SMALL_BYTES, clock)
    large = _neighbour_seconds(ring, LARGE_BYTES, clock)
    # The difference of two sizes: the fixed cost of a message drops out.
    rates = [(LARGE_BYTES - SMALL_BYTES) / max(t - s, 1e-9) for s, t in zip(small, large, strict=True)]
    latency = max(small[0] - SMALL_BYTES / rates[0], 1e-7)
    swapped = None if ulysses is None else _all_to_all_rate(ulysses, clock)
    return Links(rates[0], max(rates), latency, swapped)


def _neighbour_seconds(mesh: RingMesh, size_bytes: int, clock: Clock) -> tuple[float, float]:
    """Return seconds of the slowest and of the fastest rank, each the least of some rounds."""
    exchange = Exchange(mesh)
    sent, received = (torch.zeros(size_bytes, dtype=torch.uint8, device=clock.device) for _ in range(2))
    ahead, behind = ((mesh.ring_rank + step) % mesh.ring_size for step in (1, -1))

    def swap() -> None:
        exchange.post([Message(sent, ahead)], [Message(received, behind)]).wait()

    swap()
    seconds = []
    for _ in range(ROUNDS):
        clock.meet()
        seconds.append(clock.own(swap))
    own = min(seconds)
    return clock.slowest(own), clock.least(own)


def _all_to_all_rate(mesh: RingMesh, clock: Clock) -> float:
    exchange, size = Exchange(mesh), mesh.ulysses_size
    parts = [torch.zeros(LARGE_BYTES // size, dtype=torch.uint8, device=clock.device) for _ in range(size)]
    exchange.all_to_all(parts, mesh.ulysses_group)
    seconds = clock.together(lambda: exchange.all_to_all(parts, mesh.ulysses_group), ROUNDS)
    return (size - 1) * (LARGE_BYTES // size) / seconds

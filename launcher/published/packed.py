"""Model the packed record: MagiAttention's published packs on ds_ring's ring, and what limits it there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import numpy as np

from ds_ring.plugin import PASSES

from .evaluate import list_passes
from .own import compute_own_pass
from .table import PassGroup, Table

# by number of devices: of how many packs the mean is taken; plans of large rings take seconds
PACK_COUNTS = {8: 6, 16: 6, 32: 6, 64: 6, 256: 2, 1024: 1}
STAGE_SHARDS = 4  # of which "stage_bytes" in the JSON has the bytes

# the pass that plans an exchange of its own; the ring where its folder was removed
DIRECT = next((name for name, row in PASSES.items() if row.plans), "ring")

Pair = tuple[float, float]  # TFLOPS a GPU, forward and backward


class PackedRow(NamedTuple):
    """Hold the means over packs at one number of devices."""

    devices: int
    published: Pair | None  # MagiAttention's TFLOPS a GPU, forward and backward
    layout: str
    imbalance: float  # work, maximum over mean
    needed: float  # K/V of others that a rank reads, over those of an all-gather
    sent: float  # K/V that a rank of the ring sends, over the same
    # exposed, fixed, merging: parts of the ring's time: waiting for messages, posting and starting, merging
    exposed: float
    fixed: float
    merging: float
    ring: Pair  # modelled TFLOPS a GPU
    staged: Pair  # the same in stages of `STAGE_SHARDS`; inside a node "auto" has stages already
    direct: Pair  # the same of the transport `DIRECT`
    kernel: Pair  # the same of the kernel alone


def model_packed_rows(table: Table, packs: dict[int, int], say: Callable[[str], None]) -> list[PackedRow]:
    """Return a row for each number of devices.

    Args:
        table: of published rows.
        packs: by number of devices, over how many a row is the mean.
        say: told what is computed.
    """
    peer, group = (
        next(row for row in table.passes if (row.method, row.machine, row.mask) == (method, "h100", "packed"))
        for method in ("Magi", "Ulysses")
    )
    return [_model_row(table, peer, group, ranks, count, say) for ranks, count in packs.items()]


def _model_row(
    table: Table, peer: PassGroup, group: PassGroup, ranks: int, packs: int, say: Callable[[str], None]
) -> PackedRow:
    rows, layout = [], ""
    for done, attention in enumerate(islice(list_passes(table, group, "forward", ranks), packs)):
        say(f"packs on {ranks} devices, {done + 1} of {packs}")
        ring, staged = compute_own_pass(attention), compute_own_pass(attention, STAGE_SHARDS)
        layout, others = ring.layout, attention.tokens * (ranks - 1)
        parts = (ring.imbalance, ring.reads / others, ring.sent, ring.exposed, ring.fixed, ring.merging)
        direct = compute_own_pass(attention, transport=DIRECT)
        times = [*ring.seconds, *staged.seconds, *direct.seconds, *ring.kernel_s]
        rows.append([*parts, *(np.tile([1, 2.5], 4) * attention.flops / 1e12 / times)])
    mean = np.mean(rows, axis=0).tolist()
    pairs = zip(mean[6::2], mean[7::2], strict=True)
    published = (peer.forward[ranks], peer.backward[ranks]) if ranks in peer.forward else None
    return PackedRow(ranks, published, layout, *mean[:6], *pairs)

"""Model the packed record: MagiAttention's published packs on ds_ring's ring, and what limits it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .evaluate import passes_of
from .own import direct_s, own_pass
from .packs import PACKS
from .table import PassGroup, Table

# by number of devices: of how many packs the mean is taken; plans of large rings take seconds
PACKS_OF = {8: 6, 16: 6, 32: 6, 64: 6, 256: 2, 1024: 1}


STAGE_SHARDS = 4  # of which "stage_bytes" in the JSON has the bytes
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
    direct: Pair  # the same if what is read came from its owner; not built
    kernel: Pair  # the same of the kernel alone


def packed_rows(
    table: Table, packs: dict[int, int] = PACKS_OF, say: Callable[[str], None] = lambda what: None
) -> list[PackedRow]:
    """Return a row for each number of devices.

    Args:
        table: of published rows.
        packs: by number of devices, over how many a row is the mean.
        say: told what is computed.
    """
    peer, own = (
        next(one for one in table.passes if (one.method, one.machine, one.mask) == (method, "h100", "packed"))
        for method in ("Magi", "Ulysses")
    )
    return [_row(table, peer, own, ranks, min(count, PACKS), say) for ranks, count in packs.items()]


def _row(
    table: Table, peer: PassGroup, group: PassGroup, ranks: int, packs: int, say: Callable[[str], None]
) -> PackedRow:
    sums = [0.0] * 14
    layout = ""
    for done, one in enumerate(passes_of(table, group, "forward", ranks)):
        if done == packs:
            break
        say(f"packs on {ranks} devices, {done + 1} of {packs}")
        flops = (one.flops / 1e12, 2.5 * one.flops / 1e12)
        found, staged = own_pass(one), own_pass(one, STAGE_SHARDS)
        layout = found.layout
        whole = one.tokens * (ranks - 1)
        straight = [direct_s(one, found, backward) for backward in (False, True)]
        values = (
            found.imbalance, found.reads.mean / whole, found.sent, found.exposed, found.fixed, found.merging,
            flops[0] / found.forward_s, flops[1] / found.backward_s, flops[0] / staged.forward_s,
            flops[1] / staged.backward_s, flops[0] / straight[0], flops[1] / straight[1],
            flops[0] / found.kernel_s[0], flops[1] / found.kernel_s[1],
        )  # fmt: skip
        sums = [total + value for total, value in zip(sums, values, strict=True)]
    mean = [total / packs for total in sums]
    imbalance, needed, sent, exposed, fixed, merging = mean[:6]
    ring, stages, direct, kernel = ((mean[at], mean[at + 1]) for at in (6, 8, 10, 12))
    published = (peer.forward[ranks], peer.backward[ranks]) if ranks in peer.forward else None
    return PackedRow(
        ranks, published, layout, imbalance, needed, sent, exposed, fixed, merging, ring, stages,
        direct, kernel,
    )  # fmt: skip

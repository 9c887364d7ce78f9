"""Tell from the spans of ring passes how long hops take by the link over which their payload comes.

What is measured is the time of a whole hop (send, compute, wait) on the receiving rank and the part of it
that was spent waiting: a link that is slower than computing shows in both. The host's clock sees it where the
host waits; on a GPU the stream does, and nothing is known here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.trace import Span


@dataclass
class _Link:
    hops: int = 0
    hop_ns: int = 0
    wait_ns: int = 0
    payload_bytes: int = 0


def link_times(spans: Sequence[Span], mesh: RingMesh) -> list[dict[str, Any]]:
    """Return the means over hops of each link that brought something to this rank, by the sender.

    Args:
        spans: of this rank's passes, in order.
        mesh: who is who.

    Returns:
        For each sender {"from": rank of the world, "hops", "hop_seconds": from the post of a batch to the end
        of the wait for it, "wait_seconds", "bytes": payload of a hop}.
    """
    links: defaultdict[int, _Link] = defaultdict(_Link)
    posted_ns = 0
    for span in spans:
        if span.what == "send":
            posted_ns = span.start_ns
        if span.what != "wait":
            continue
        arrived: defaultdict[int, int] = defaultdict(int)
        for message in span.batch.receives:
            arrived[mesh.global_rank_of(message.peer)] += message.payload_bytes
        for rank, payload_bytes in arrived.items():
            link = links[rank]
            link.hops += 1
            link.hop_ns += span.end_ns - posted_ns
            link.wait_ns += span.end_ns - span.start_ns
            link.payload_bytes += payload_bytes
    return [
        {
            "from": rank,
            "hops": link.hops,
            "hop_seconds": link.hop_ns / link.hops / 1e9,
            "wait_seconds": link.wait_ns / link.hops / 1e9,
            "bytes": link.payload_bytes // link.hops,
        }
        for rank, link in sorted(links.items())
    ]

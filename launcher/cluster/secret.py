"""Make the secret that all ranks of one launch share, by which they know each other's connections.

A new one for each launch. It reaches the ranks as every variable does: inherited on this machine, through the
standard input of an agent on another; it never stands on a command line, in a file or in a log.
"""

from __future__ import annotations

import secrets

from .cluster import Cluster

_BYTES = 32


def secret_for(cluster: Cluster) -> str | None:
    """Return a new secret of 64 hex digits where one call starts all ranks, and otherwise None."""
    # Hosts that are started each by its own call have no channel on which to agree: who wants a secret there
    # exports the same DS_RING_SECRET on every host, and the ranks inherit it.
    # 32 bytes, so that nobody guesses it from one answer of the handshake.
    return secrets.token_hex(_BYTES) if cluster.is_local or cluster.reaches_out else None

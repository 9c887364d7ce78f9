"""Find free ports on this machine. Nobody can ask other hosts' ports from here."""

from __future__ import annotations

import random
import socket

from ds_ring.errors import RingConfigError

# Below the kernel's ephemeral range (32768 up), so that between our look and the engine's bind, seconds
# later, no outgoing connection and no bind to port 0 of another program takes it. DeepSpeed's and torchrun's
# default, 29500, is where everybody collides; it is left out.
_CANDIDATES = range(20000, 29500)
_ATTEMPTS = 200


def is_free(port: int) -> bool:
    """Return whether a server could listen on `port` now, on all interfaces as torch's store does."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT can be listened on
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def choose_free_port() -> int:
    """Return a port that is free here, drawn at random so that two launches at once do not meet."""
    draw = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        port = draw.choice(_CANDIDATES)
        if is_free(port):
            return port
    raise RingConfigError(
        f"expected a free port from {_CANDIDATES.start} to {_CANDIDATES.stop}, got none in {_ATTEMPTS} "
        "tries; set master_port in the YAML"
    )


def require_free(port: int) -> None:
    """Raise RingConfigError if somebody listens on `port` here."""
    if not is_free(port):
        raise RingConfigError(
            f"expected master_port {port} to be free, got a port in use; end the run that holds it "
            f"(ss -ltnp 'sport = :{port}' names it), or leave master_port out and a free one is taken"
        )

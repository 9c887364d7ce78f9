"""The monitor's side of the handshake (`handshake.py`)."""

from __future__ import annotations

import hmac
import secrets

from .handshake import ANSWER, HELLO, MONITOR, RANK, VERSION, HandshakeError, compute_proof, match_line


class DetectorHandshake:
    """Take the monitor's side, one line after the other.

    Attributes:
        rank: who it is, once `done`; a mere claim before.
        done: the other side has proved that it knows the secret.
    """

    def __init__(self, secret: bytes, world_size: int) -> None:
        self.rank, self.done = -1, False
        self._secret, self._world_size = secret, world_size
        self._rank_nonce, self._nonce = "", secrets.token_hex(16)

    def take(self, line: bytes) -> bytes:
        """Return the answer to a line."""
        if not self._rank_nonce:
            rank, self._rank_nonce = match_line(HELLO, line, "a hello").groups()
            self.rank = int(rank)
            if self.rank >= self._world_size:
                raise HandshakeError(f"expected a rank below {self._world_size}, got {rank}")
            mine = compute_proof(self._secret, MONITOR, self.rank, self._rank_nonce, self._nonce)
            return f"{VERSION} challenge {self._nonce} {mine}\n".encode()
        (proof,) = match_line(ANSWER, line, "an answer").groups()
        if not hmac.compare_digest(
            proof, compute_proof(self._secret, RANK, self.rank, self._rank_nonce, self._nonce)
        ):
            raise HandshakeError("another secret")
        self.done = True
        return f"{VERSION} welcome\n".encode()

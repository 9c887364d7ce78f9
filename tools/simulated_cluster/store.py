"""Speak to torch's TCPStore without torch; run as a program, be that store.

The protocol is torch's own (`TCPStoreBackend.hpp`), which it does not document: after a greeting each request
is a byte and its operands; texts have their length in 8 bytes before them.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import TYPE_CHECKING

from ds_ring_launcher.run.job import raise_file_limit

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_MAGIC = 0x3C85F7CE
_VALIDATE, _SET, _GET, _ADD, _CHECK, _MULTI_GET = 0, 1, 3, 4, 5, 10
_NUMBER = struct.Struct("=q")
_SECONDS = 60.0


class TorchStore:
    """Be a client of a TCPStore, with what `ds_ring/health/joining.py` asks for.

    Args:
        host, port: of the store.
        prefix: of all keys, as a PrefixStore adds it.
    """

    def __init__(self, host: str, port: int, prefix: str) -> None:
        self.host, self._prefix = host, prefix
        self._connection = socket.create_connection((host, port), timeout=_SECONDS)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(struct.pack("=BI", _VALIDATE, _MAGIC))

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        self._send(_SET, self._key(key), _text(value.encode()))

    def get(self, key: str, /) -> bytes:
        """Return a value that is there."""
        self._send(_GET, self._key(key))
        return self._read_text()

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return values that are there."""
        self._send(_MULTI_GET, _NUMBER.pack(len(keys)), *map(self._key, keys))
        return [self._read_text() for _ in keys]

    def add(self, key: str, value: int, /) -> int:
        """Add to a number; return the sum."""
        self._send(_ADD, self._key(key), _NUMBER.pack(value))
        return self._read_number()

    def check(self, keys: list[str], /) -> bool:
        """Return whether all are there."""
        self._send(_CHECK, _NUMBER.pack(len(keys)), *map(self._key, keys))
        return self._read(1) == b"\0"

    def _key(self, key: str) -> bytes:
        return _text(f"{self._prefix}/{key}".encode())

    def _send(self, request: int, *operands: bytes) -> None:
        try:
            self._connection.sendall(bytes([request]) + b"".join(operands))
        except OSError as error:
            raise RuntimeError(f"the store's connection is lost: {error}") from error

    def _read(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            try:
                data = self._connection.recv(count - len(found))
            except OSError as error:
                raise RuntimeError(f"the store's connection is lost: {error}") from error
            if not data:
                raise RuntimeError("the store's connection is lost: expected an answer of torch's TCPStore")
            found += data
        return bytes(found)

    def _read_number(self) -> int:
        return int(_NUMBER.unpack(self._read(_NUMBER.size))[0])

    def _read_text(self) -> bytes:
        return self._read(self._read_number())


def _text(data: bytes) -> bytes:
    return _NUMBER.pack(len(data)) + data


def serve() -> TCPStore:
    """Make a store of torch in this process, at a free port of loopback."""
    from torch._C._distributed_c10d import TCPStore

    raise_file_limit()  # as the process that has the store got it from the launcher
    # torch asks for the name of every peer's address. At its own socket, of IPv6, that is ::ffff:127.0.0.1,
    # which /etc/hosts does not have: a name service that is slow stops the store for 5 s at a time.
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port, number = listener.getsockname()[1], listener.detach()
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=number)


if __name__ == "__main__":
    store = serve()
    print(store.port, flush=True)
    sys.stdin.read()

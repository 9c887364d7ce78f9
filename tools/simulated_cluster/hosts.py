"""Answer for hosts that are pretended: run what the launcher starts there through `ssh`, in a forked process.

`write_ssh` makes a program that hands its own standard streams to this process and ends with the other side.
A host is gone while `gone-HOST` is in the folder.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
from pathlib import Path

from ds_ring_launcher.run import environment_file, probe

SOCKET = "hosts.socket"
# Without site and socket.py: 128 of them start at once.
_SSH = """#!{python} -IS
import _socket, os, sys
words = iter(sys.argv[1:])
for word in words:
    if word in ("-o", "-p"):
        next(words)
    elif not word.startswith("-"):
        break
if os.path.exists({folder!r} + "/gone-" + word):
    print(f"ssh: connect to host {{word}}: No route to host", file=sys.stderr)
    sys.exit(255)
host = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
host.connect({folder!r} + "/{socket}")
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
host.sendmsg([" ".join(words).encode()], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
host.recv(1)
"""


def write_ssh(path: Path, folder: Path) -> None:
    """Write the program that replaces ssh."""
    path.write_text(_SSH.format(python=sys.executable, folder=str(folder), socket=SOCKET))
    path.chmod(stat.S_IRWXU)


def main(folder: Path) -> None:
    """Serve until somebody ends this process; each host is a child that ends with its standard input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are not waited for
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(folder / SOCKET))
        server.listen(4096)
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                break
            connection.close()
    command, streams, _, _ = socket.recv_fds(connection, 4096, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    module = command.decode().rpartition(" ")[2]
    if module == "ds_ring_launcher.run.probe":
        probe.main()
    elif module == "ds_ring_launcher.run.environment_file":
        environment_file.main(sys.stdin)
    else:
        sys.exit(
            f"expected the launcher's probe or environment_file, got {command.decode()!r}: nothing else runs"
            " on these hosts"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

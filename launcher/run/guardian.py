"""End a run whose launcher died without ending it: by SIGKILL, out of memory, in a crash.

A small process beside the launcher, in a session of its own. Its standard input is a pipe that the launcher
alone holds open: the first line names the run, "done" says that the run has ended, and the end of the file
without that word says that the launcher is gone, however it died.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from .marked import MARK, ORPHAN_GRACE_SECONDS, end_all, marked

_DONE = "done"


class Guardian:
    """Hold the launcher's end of the pipe: made before the run is started, told `done` after its end."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._start()

    def _start(self) -> None:
        # Without the mark it would end itself; it must import the same package wherever that is.
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ds_ring_launcher.run.guardian"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            env=environment, start_new_session=True, text=True,
        )  # fmt: skip
        self._tell(self._mark)

    def keep(self) -> None:
        """Start it again if somebody has ended it."""
        if self._process.poll() is not None:
            self._start()

    def done(self) -> None:
        """Send word that nothing of the run is left, and wait for its end."""
        self._tell(_DONE)
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.wait()

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        try:
            print(word, file=self._process.stdin, flush=True)
        except BrokenPipeError:  # it was ended: `keep` starts it again
            pass


def main() -> None:
    """Wait for the end of standard input; end the run unless the launcher said that it is done."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # meant for the launcher
        signal.signal(number, signal.SIG_IGN)
    mark, *said = sys.stdin.read().split() or [""]
    if not mark or _DONE in said or not marked(mark):
        return
    try:
        print("ds-ring: the launcher was killed; ending this run's processes", file=sys.stderr, flush=True)
    except OSError:  # the terminal went with it
        pass
    end_all(mark, ORPHAN_GRACE_SECONDS)


if __name__ == "__main__":
    main()

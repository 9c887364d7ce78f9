"""Renew the status page of a run while its launcher lives: each minute, and after every event of the run.

Owns `launcher.json` and `status.html` of the run's folder, and the thread that writes them. Whatever goes
wrong here is said once and ends no run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_ring.errors import RingConfigError
from ds_ring.replaced_file import replace_text

from ..run.process import say
from ..run.run_folder import ATTEMPTS, PAGE, write_launcher
from .page import page_of
from .run_status import read_run

RENEW_SECONDS = 60.0
_LOOK_SECONDS = 1.0  # between two looks at attempts.jsonl


@contextmanager
def page_kept(run: Path) -> Iterator[None]:
    """Keep RUN/status.html new inside the block, and write it a last time at the end."""
    keeper = _Keeper(run)
    thread = threading.Thread(target=keeper.work, name="status page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        keeper.ended.set()
        thread.join(timeout=10.0)  # a folder that does not answer must not hold the launcher
        if not thread.is_alive():
            keeper.renew()


def write_page(run: Path) -> None:
    """Write RUN/status.html at once: a browser sees the old page or the new one.

    Raises:
        RingConfigError: that is no folder of a run.
        OSError: the page could not be written.
    """
    replace_text(run / PAGE, page_of(read_run(run)))


class _Keeper:
    def __init__(self, run: Path) -> None:
        self.run, self.ended, self._said = run, threading.Event(), False

    def work(self) -> None:
        """Renew the page until the run has ended."""
        waited, seen = RENEW_SECONDS, 0
        while True:
            size = self._events_bytes()
            if waited >= RENEW_SECONDS or size != seen:
                waited, seen = 0.0, size
                self.renew()
            if self.ended.wait(_LOOK_SECONDS):
                return
            waited += _LOOK_SECONDS

    def renew(self) -> None:
        try:
            write_launcher(self.run)
            write_page(self.run)
        except RingConfigError:  # no attempt has begun
            pass
        except Exception as error:  # the page is worth no run
            if not self._said:
                self._said = True
                say(f"the status page cannot be written: {type(error).__name__}: {error}")

    def _events_bytes(self) -> int:
        try:
            return (self.run / ATTEMPTS).stat().st_size
        except OSError:
            return 0

"""Keep the course of a run in one file: a line for each optimizer step, thinned out where it grows long.

Owns `history.jsonl` of an attempt's folder, which rank 0 writes and the status page draws. Knows neither
torch nor DeepSpeed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds_ring.replaced_file import replace_text

FILE = "history.jsonl"
MOST_LINES = 4000  # some 500 KB


class RunHistory:
    """Append lines to a file of at most `most_lines`: where they are more, every other one is left out.

    From then on only every second step adds a line, then every fourth, and so on: the file is rewritten
    log2(steps / most_lines) times in all, and its lines stay evenly spaced.

    Args:
        path: of the file.
        most_lines: at least 2.
    """

    def __init__(self, path: Path, most_lines: int = MOST_LINES) -> None:
        self._path, self._most_lines = path, most_lines
        self._lines: list[str] = []
        self._every, self._count = 1, 0

    def add(self, figures: dict[str, Any]) -> None:
        """Append a line, or leave it out where lines are spaced; a full disk ends no training."""
        self._count += 1
        if (self._count - 1) % self._every:
            return
        line = json.dumps(figures) + "\n"
        self._lines.append(line)
        try:
            if len(self._lines) > self._most_lines:
                self._thin_out()
            else:
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(line)
        except OSError:
            pass

    def _thin_out(self) -> None:
        self._lines = self._lines[::2]
        self._every *= 2
        replace_text(self._path, "".join(self._lines))

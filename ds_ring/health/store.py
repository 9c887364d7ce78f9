"""Describe what ranks ask of the process group's store before they have joined the monitor.

A torch Store has all of it. Named here so that joining needs no torch: a process without it can be a rank
(`tools/simulate_cluster.py` starts a thousand).
"""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """Keep texts by name for all ranks. A store that is lost raises a RuntimeError, as torch's does."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...

    def add(self, key: str, value: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

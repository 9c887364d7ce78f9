"""Keep checksums of results that are too large to keep, and some rows whole.

Owns the state file of a long run, written by an atomic rename, so that a killed run can continue.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ring.errors import RingConfigError
from ds_ring.masks.slots import IntArray
from ds_ring.schedule.layout import expand_runs
from ds_ring.simulation.rank import Source
from streamed.numbers import read, runs_at
from streamed.ranks import PendingGradients, StreamedPart

TENSORS = ("out", "lse", "dq", "dk", "dv")
SUMS = ("plain", "weighted", "absolute")


@dataclass
class Ledger:
    """Sum up the ranks that were computed: checksums and sampled rows.

    A checksum has three float64 sums: of the values, of the values weighted by a generated number between
    1/2 and 3/2 for each token (so that a permutation is seen), and of the magnitudes, which differences
    are to be held against.
    """

    source: Source  # generates the weights, under the name "weight"
    rows: IntArray  # positions whose results are kept, ascending
    ring_size: int  # number of ranks
    done: np.ndarray = field(init=False)  # bool [P]
    sums: np.ndarray = field(init=False)  # float64 [P, 5, 3], by rank, `TENSORS` and `SUMS`
    values: dict[str, np.ndarray] = field(init=False)  # of the rows, by tensor, [n, D] (lse [n, 1])

    def __post_init__(self) -> None:
        width = self.source.geometry.head_dim
        self.done = np.zeros(self.ring_size, dtype=bool)
        self.sums = np.zeros((self.ring_size, len(TENSORS), len(SUMS)))
        self.values = {n: np.zeros((len(self.rows), 1 if n == "lse" else width)) for n in TENSORS}

    def note_all(self, ring_rank: int, parts: Iterable[StreamedPart]) -> None:
        """Take all that a rank found; keep nothing of it."""
        for part in parts:
            self.note(ring_rank, part)
        self.done[ring_rank] = True

    def note(self, ring_rank: int, part: StreamedPart) -> None:
        """Take what a rank found for some tokens; parts of one tensor add up."""
        positions = expand_runs(part.runs)
        if not len(positions):
            return
        of_token = 1 + read(self.source, "weight", part.runs, width=1)[:, 0].double() / 4
        where = np.searchsorted(positions, self.rows)
        hit = np.flatnonzero(positions[np.minimum(where, len(positions) - 1)] == self.rows)
        for number, name in enumerate(TENSORS):
            x: Tensor | None = getattr(part, name)
            if x is None:
                continue
            x = x[0, 0] if name != "lse" else x[0, 0, :, None]
            token_sums = x.sum(-1).double()
            sums = (token_sums.sum(), token_sums @ of_token, x.abs().sum(-1).double().sum())
            self.sums[ring_rank, number] += [float(value) for value in sums]
            self.values[name][hit] += x[torch.from_numpy(where[hit])].double().numpy()

    def settle(self, pending: PendingGradients, local_tokens: int) -> None:
        """Take gradients for ranks that another process computed."""
        positions, owed = pending.table()
        runs = runs_at(positions)
        for rank in np.unique(positions // local_tokens).tolist():
            mine = positions // local_tokens == rank
            dk, dv = (torch.from_numpy(owed[mine][None, None, :, side].copy()) for side in (0, 1))
            self.note(rank, StreamedPart(runs[mine], dk=dk, dv=dv))

    def add(self, other: Ledger) -> None:
        """Add the ranks that another process computed."""
        self.done |= other.done
        self.sums += other.sums
        for name, values in self.values.items():
            values += other.values[name]

    @property
    def totals(self) -> dict[str, dict[str, float]]:
        """Return the checksums over all ranks, by tensor."""
        total = self.sums.sum(axis=0)
        found = {name: dict(zip(SUMS, total[i].tolist(), strict=True)) for i, name in enumerate(TENSORS)}
        return {name: sums for name, sums in found.items() if sums["absolute"]}


@dataclass(frozen=True)
class StateFile:
    """Store a long run between processes."""

    path: Path  # of the file
    settings: Mapping[str, object]  # what the run was started with; a file of other settings is refused

    def save(self, ledger: Ledger, pending: PendingGradients) -> None:
        """Write all of it, then put it in place by a rename."""
        positions, owed = pending.table()
        partial = self.path.with_suffix(".partial")
        arrays: dict[str, Any] = {f"rows_{name}": values for name, values in ledger.values.items()}
        arrays |= {"settings": self._text, "done": ledger.done, "sums": ledger.sums}
        with partial.open("wb") as file:
            np.savez(file, positions=positions, owed=owed, **arrays)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)

    def load(self, ledger: Ledger, pending: PendingGradients, local_tokens: int) -> None:
        """Read what `save` wrote; change nothing where there is no file.

        Raises:
            RingConfigError: the file is of a run with other settings.
        """
        if not self.path.exists():
            return
        with np.load(self.path) as state:
            if str(state["settings"]) != self._text:
                raise RingConfigError(
                    f"{self.path}: expected {self._text}, got {state['settings']}; name another folder"
                )
            ledger.done, ledger.sums = state["done"], state["sums"]
            ledger.values = {name: state[f"rows_{name}"] for name in TENSORS}
            pending.restore(state["positions"], state["owed"], local_tokens)

    @property
    def _text(self) -> str:
        return json.dumps(dict(self.settings), sort_keys=True)

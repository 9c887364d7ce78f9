"""Hold the result of a search, and write it as the section of a DeepSpeed JSON."""

from __future__ import annotations

import copy
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

from ds_ring.config.deepspeed_file import SECTION, SP_KEY
from ds_ring.config.json_text import Json
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingConfigError

from .candidates import TuningCandidate, keys_of
from .model import Measured, Predicted
from .request import Request


@dataclass(frozen=True)
class Finalist:
    """Hold the times of a candidate at the full length."""

    candidate: TuningCandidate  # which
    predicted_s: float  # what the model expected of a pass, forward and backward
    seconds: tuple[float, ...]  # what the slowest rank took, by round

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Result:
    """Hold what `tune` found; the same on all ranks."""

    request: Request  # what was asked
    measured: Measured  # what the machine gives
    chosen: TuningCandidate  # the best candidate
    predicted: Predicted  # what the model expected of it
    finalists: tuple[Finalist, ...]  # those timed at the full length, the fastest first
    default: TuningCandidate  # what the section's defaults come to; it is among the finalists
    # candidates, contestants: how many there were, and how many the model let into the race
    candidates: int
    contestants: int
    passes: int  # real passes that were timed
    shortest_tokens: int  # length of the shortest ones
    seconds: float  # that all of it took
    ranks_per_node: int  # ranks on rank 0's host

    def finalist(self, candidate: TuningCandidate) -> Finalist:
        """Return the times of a candidate at the full length; KeyError if it was not in the final."""
        return {one.candidate: one for one in self.finalists}[candidate]

    @property
    def chosen_s(self) -> float:
        """Return median seconds of a pass of the choice."""
        return self.finalist(self.chosen).median_s

    @property
    def default_s(self) -> float:
        """Return median seconds of a pass of the defaults."""
        return self.finalist(self.default).median_s

    def section(self) -> Json:
        """Return the keys of the section that were chosen."""
        return keys_of(self.chosen, self.request, self.request.tokens)

    def merged(self, whole: Json) -> Json:
        """Return a DeepSpeed JSON with the choice in it, all else kept.

        Raises:
            RingConfigError: the rest of the JSON is refused.
        """
        # Keys that the choice leaves at their defaults are written only where the JSON has them already, or
        # where they say what was measured (sizes, layout, overlap).
        merged = copy.deepcopy(whole)
        section = dict(merged.get(SECTION, {}))
        plain = {"block_size": 128, "kernel_options": {}, "chunk_bytes": None}
        for key, value in self.section().items():
            if key in section or key not in plain or value != plain[key]:
                section[key] = value
        merged |= {SP_KEY: self.request.sequence_size, SECTION: section}
        RingConfig.from_deepspeed(merged)
        return merged

    def as_json(self) -> Json:
        """Return the result for machines: seconds, bytes and FLOPs, as in the attributes."""
        links, chosen = self.measured.links, self.finalist(self.chosen)
        return {
            "chosen": str(self.chosen),
            "section": {SP_KEY: self.request.sequence_size, SECTION: self.section()},
            "expected_s": chosen.predicted_s,
            "measured_s": chosen.median_s,
            "default": str(self.default),
            "default_s": self.default_s,
            "finalists": [
                {"candidate": str(f.candidate), "expected_s": f.predicted_s, "seconds": list(f.seconds)}
                for f in self.finalists
            ],
            "measured": {
                "matmul_flops": self.measured.matmul_flops,
                "kernels": [
                    dict(choice.options) | {"block_size": choice.block_size} | vars(rate)
                    for choice, rate in self.measured.kernels.items()
                ],
                "alone_speedup": self.measured.alone_speedup,
                "links": None if links is None else vars(links),
                "hop_overhead_s": self.measured.hop_overhead_s,
            },
            "candidates": self.candidates,
            "contestants": self.contestants,
            "passes": self.passes,
            "shortest_tokens": self.shortest_tokens,
            "tokens": self.request.tokens,
            "seconds": self.seconds,
        }


def require_writable(path: Path, option: str) -> None:
    """Raise RingConfigError, before anything is measured, unless a file can be written at `path`."""
    try:
        folder = path.resolve().parent
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise RingConfigError(
            f"{option}: expected the name of a file, got {str(path)[:80]!r}: {error}"
        ) from None
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        got = "a folder" if path.is_dir() else "no folder" if not folder.is_dir() else "one that is not ours"
        raise RingConfigError(
            f"{option} {path}: expected the name of a file in a folder that can be written to, got {got};"
            " choose another place"
        )

"""What came out of a search, and the two files that it becomes: the section merged into a DeepSpeed JSON, and
a description of the hardware.
"""

from __future__ import annotations

import copy
import os
import platform
import socket
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ds_ring.config import RingConfig
from ds_ring.config_deepspeed import SECTION, SP_KEY
from ds_ring.config_json import Json
from ds_ring.errors import RingConfigError
from ds_ring.tuning.candidates import Candidate, keys_of
from ds_ring.tuning.model import Measured, Predicted
from ds_ring.tuning.request import Request


@dataclass(frozen=True)
class Finalist:
    """A candidate that was timed at the full length.

    Attributes:
        candidate: which.
        predicted_s: what the model expected of a pass, forward and backward.
        seconds: what the slowest rank took, by round.
    """

    candidate: Candidate
    predicted_s: float
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Result:
    """What `tune` found; the same on all ranks.

    Attributes:
        request: what was asked.
        measured: what the machine gives.
        chosen: the best candidate.
        predicted: what the model expected of it.
        finalists: those timed at the full length, the fastest first.
        default: what the section's defaults come to; it is among the finalists.
        candidates, contestants: how many there were, and how many the model let into the race.
        passes: real passes that were timed.
        shortest_tokens: length of the shortest ones.
        seconds: that all of it took.
        ranks_per_node: ranks on rank 0's host.
    """

    request: Request
    measured: Measured
    chosen: Candidate
    predicted: Predicted
    finalists: tuple[Finalist, ...]
    default: Candidate
    candidates: int
    contestants: int
    passes: int
    shortest_tokens: int
    seconds: float
    ranks_per_node: int

    def finalist(self, candidate: Candidate) -> Finalist:
        """The times of a candidate at the full length; KeyError if it was not in the final."""
        return {one.candidate: one for one in self.finalists}[candidate]

    @property
    def chosen_s(self) -> float:
        """Median seconds of a pass of the choice."""
        return self.finalist(self.chosen).median_s

    @property
    def default_s(self) -> float:
        """Median seconds of a pass of the defaults."""
        return self.finalist(self.default).median_s

    def section(self) -> Json:
        """The keys of the section that were chosen."""
        return keys_of(self.chosen, self.request, self.request.tokens)

    def merged(self, whole: Json) -> Json:
        """A DeepSpeed JSON with the choice in it, all else kept.

        Keys that the choice leaves at their defaults are written only where the JSON has them already, or
        where they say what was measured (sizes, layout, overlap).

        Raises:
            RingConfigError: the rest of the JSON is refused.
        """
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
        """For machines: seconds, bytes and FLOPs, as in the attributes."""
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

    def hardware(self) -> Json:
        """A description of this hardware, in the form of `configs/hardware`; rates are per rank, all at work.

        A rank of the CPU counts as a device. What was not measured, with one rank, is not in it.
        """
        request, measured, links = self.request, self.measured, self.measured.links
        kernel = measured.kernels[self.chosen.kernel]
        peak = max(measured.matmul_flops, kernel.forward_flops, kernel.backward_flops)
        description = {
            "name": _device_name(request, self.ranks_per_node),
            "kind": request.device,
            "memory_bytes": _memory_bytes(request, self.ranks_per_node),
            "devices_per_node": self.ranks_per_node,
            "peak_flops": {request.dtype: peak},
            "attention_efficiency": {
                "forward": kernel.forward_flops / peak,
                "backward": kernel.backward_flops / peak,
            },
            "matmul_efficiency": measured.matmul_flops / peak,
            "call_overhead_s": kernel.forward_tile_s,
        }
        if links is not None:
            description["intra_node_bytes_per_s"] = links.fastest_bytes_per_s
            description["inter_node_bytes_per_s"] = links.bytes_per_s
            description["link_latency_s"] = links.latency_s
            description["hop_overhead_s"] = measured.hop_overhead_s
        return description | {"source": _source(request)}


def _device_name(request: Request, ranks_per_node: int) -> str:
    cuda = request.device == "cuda"
    name = torch.cuda.get_device_name(0) if cuda else f"{platform.machine()} CPU, {os.cpu_count()} cores"
    return f"{name}, {ranks_per_node} ranks on {socket.gethostname()}"


def _memory_bytes(request: Request, ranks_per_node: int) -> int:
    """Of a device: a GPU's own, or a rank's part of the host's."""
    if request.device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(psutil.virtual_memory().total) // ranks_per_node


def _source(request: Request) -> dict[str, str]:
    return {
        "all": f"ds-ring tune, torch {torch.__version__}, {request.world_size} ranks at once",
        "peak_flops": "the best of a large product of matrices and the attention kernel",
        "inter_node_bytes_per_s": "the slowest link of the ring",
        "intra_node_bytes_per_s": "the fastest link of the ring",
    }


def require_writable(path: Path, option: str) -> None:
    """RingConfigError, before anything is measured, unless a file can be written at `path`."""
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        got = "a folder" if path.is_dir() else "no folder" if not folder.is_dir() else "one that is not ours"
        raise RingConfigError(
            f"{option} {path}: expected the name of a file in a folder that can be written to, got {got};"
            " choose another place"
        )


def write_whole(path: Path, text: str) -> None:
    """The file is there as a whole or not at all."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.resolve().parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)  # mkstemp's file is its owner's only
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

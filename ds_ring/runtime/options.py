"""Check the options of a call: how a pass is carried out. Owns them, and nothing that carries them out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ds_ring.checked_numbers import true_or_false
from ds_ring.errors import RingConfigError, shown
from ds_ring.masks.score_mod import ScoreMod
from ds_ring.schedule.head_chunks import chunk_bytes_on, heads_on_host
from ds_ring.schedule.plan import GRADIENT_PAYLOADS

TRANSPORTS = ("ring", "all_gather")
LONGEST_S = 1e8  # three years; threads cannot wait for much longer


@dataclass(frozen=True)
class Options:
    """Describe how a pass is carried out; none of the options changes its result, but for two named below.

    Attributes:
        scale: of the scores; None is 1 / sqrt(head_dim).
        kernel: "auto", or a kernel of `registry.py`.
        transport: "ring", or the yardstick "all_gather".
        overlap: compute a hop while the next one travels.
        prune: send only what the receiver or a rank after it reads.
        hop_timeout_s: seconds that a hop may take.
        check_finite: raise on NaN and infinities, naming rank, tensor and hop.
        gradient_payload: in which dtype dK and dV travel, "float32" or "bfloat16", which rounds each rank's
            part of them once; they are added in the accumulators' dtype either way.
        kernel_options: for the kernel, as sorted pairs.
        recompute: part of the sequence, its first tokens, whose attention is computed again where a
            checkpointed region is; (out, lse) of later tokens are kept. 0.0 keeps all, 1.0 nothing.
        score_mod: changes scores pair by pair.
        block_size: side of a block of the flex kernel, slots.
        chunk_bytes: see [Note: head chunks]; None takes what `head_chunks.py` says for the device:
            a MiB on the CPU, less in rings of more than two, and 64 MiB elsewhere.
        offload: keep q, k, v, out and lse on the host between both passes; "auto" for long shards.
        first_pass_timeout_s: as hop_timeout_s, on a GPU in the first pass of a shape, forward and backward,
            where ranks compile kernels, each at its own pace, and peers connect; the larger one counts.
    """

    scale: float | None = None
    kernel: str = "auto"
    transport: str = "ring"
    overlap: bool = True
    prune: bool = True
    hop_timeout_s: float = 60.0
    check_finite: bool = False
    gradient_payload: str = "float32"
    kernel_options: tuple[tuple[str, Any], ...] = ()
    chunk_bytes: int | None = None
    block_size: int = 128
    recompute: float = 0.0
    score_mod: ScoreMod | None = None
    offload: bool | Literal["auto"] = False
    first_pass_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not isinstance(self.transport, str) or self.transport not in TRANSPORTS:
            raise RingConfigError(
                f"transport: expected one of {', '.join(TRANSPORTS)}, got {shown(self.transport)}"
            )
        if not isinstance(self.kernel, str):
            raise RingConfigError(
                f'kernel: expected the name of a kernel, got {shown(self.kernel)}; use "auto"'
            )
        if not isinstance(self.gradient_payload, str) or self.gradient_payload not in GRADIENT_PAYLOADS:
            raise RingConfigError(
                f"gradient_payload: expected one of {', '.join(GRADIENT_PAYLOADS)}, got"
                f" {shown(self.gradient_payload)}"
            )
        if self.transport == "all_gather" and self.gradient_payload != "float32":
            raise RingConfigError(
                f'gradient_payload: expected "float32" beside transport "all_gather", which sums without'
                f' hops, got {shown(self.gradient_payload)}; use transport "ring"'
            )
        for name in ("overlap", "prune", "check_finite"):
            true_or_false(getattr(self, name), name, RingConfigError)
        if self.offload != "auto":
            true_or_false(self.offload, "offload", RingConfigError)
        if self.offload is True and self.transport == "all_gather":
            raise RingConfigError(
                'offload_attention: expected transport "ring", which sends heads in groups, got "all_gather",'
                ' which takes all of them at once; set one of the two to its default ("ring", false)'
            )
        if not _is_number(self.recompute) or not 0 <= self.recompute <= 1:
            raise RingConfigError(
                f"recompute: expected a part of the sequence from 0 to 1, got {shown(self.recompute)}"
            )
        for name, usual in (("hop_timeout_s", 60), ("first_pass_timeout_s", 600)):
            seconds = getattr(self, name)
            if not _is_number(seconds) or not 0 < seconds <= LONGEST_S:
                raise RingConfigError(
                    f"{name}: expected seconds > 0, got {shown(seconds)} (at most {LONGEST_S:g}); use"
                    f" {usual}, say"
                )
        if self.scale is not None:
            if not _is_number(self.scale):
                raise RingConfigError(
                    f"scale: expected a finite number, got {shown(self.scale)}; use None for 1 /"
                    " sqrt(head_dim)"
                )
            object.__setattr__(self, "scale", float(self.scale))  # 1 and 1.0 are one header

    def chunk_bytes_on(self, device_type: str, ring_size: int) -> int:
        """Return the smallest K or V message worth a head chunk of its own, bytes."""
        return chunk_bytes_on(device_type, ring_size) if self.chunk_bytes is None else self.chunk_bytes

    def offload_on(self, device_type: str, local_tokens: int) -> bool:
        """Return whether attention's tensors are kept on the host; see `head_chunks.heads_on_host`."""
        return self.transport == "ring" and heads_on_host(self.offload, device_type, local_tokens)


def _is_number(value: object) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 1 << 1000  # as a float, still finite
    return isinstance(value, float) and math.isfinite(value)

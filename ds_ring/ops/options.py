"""The options of a pass, and how long ranks wait for a pass that compiles.

Owns which values an option takes. Owns no tensors and no mesh: `context.py` puts options, pattern, layout and
mesh together.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError, shown, true_or_false, whole_number
from ds_ring.limits import MOST_BYTES, MOST_SECONDS
from ds_ring.masks.mask_mod import ScoreMod
from ds_ring.registry import PASSES, PassRow
from ds_ring.schedule.lowering import chunk_bytes_on, heads_on_host
from ds_ring.schedule.plan import GRADIENT_PAYLOADS, KV_PAYLOADS


@dataclass(frozen=True)
class Options:
    """Describe how a pass is carried out.

    Only `gradient_payload`, `kv_payload`, `scale` and `score_mod` change its result by more than rounding.

    Attributes:
        scale: of the scores; None is 1 / sqrt(head_dim).
        kernel: "auto", or a kernel of `registry.py`.
        transport: a name of `registry.PASSES`.
        overlap: compute a hop while the next one travels.
        prune: send only what the receiver or a rank after it reads.
        hop_timeout_s: seconds that a hop may take.
        check_finite: raise on NaN and infinities, naming rank, tensor and hop.
        gradient_payload: in which dtype dK and dV travel, "float32" or "bfloat16", which rounds each rank's
            part of them once; they are added in the accumulators' dtype either way.
        kv_payload: in which dtype K and V travel, "as_is" or "float8", which rounds those of other ranks; see
            [Note: scaled keys] in `lowering.py`.
        kernel_options: for the kernel, as sorted pairs.
        recompute: part of the sequence, its first tokens, whose attention is computed again where a
            checkpointed region is; (out, lse) of later tokens are kept. 0.0 keeps all, 1.0 nothing.
        score_mod: changes scores pair by pair.
        block_size: side of a block of the flex kernel, slots; of a transport that takes whole blocks, too.
        chunk_bytes: see [Note: head chunks]; None takes what `lowering.py` says for the device:
            a MiB on the CPU, less in rings of more than two, and 64 MiB elsewhere.
        stage_bytes: most bytes of K and V of a stage, the shards that are computed with at once
            (`schedule/rank_plan.py`, [Note: stages]); 0: hop by hop; "auto": on a GPU in a ring inside a
            node, see `lowering.py`. With a kernel on GPUs each rank's part of dK and dV is rounded once, as
            the kernel returns it.
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
    kv_payload: str = "as_is"
    kernel_options: tuple[tuple[str, Any], ...] = ()
    chunk_bytes: int | None = None
    block_size: int = 128
    recompute: float = 0.0
    score_mod: ScoreMod | None = None
    stage_bytes: int | Literal["auto"] = "auto"
    offload: bool | Literal["auto"] = False
    first_pass_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        payloads = ("gradient_payload", GRADIENT_PAYLOADS), ("kv_payload", KV_PAYLOADS)
        for name, known in (("transport", PASSES), *payloads):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                raise RingConfigError(f"{name}: expected one of {', '.join(known)}, got {shown(value)}")
        if not isinstance(self.kernel, str):
            raise RingConfigError(
                f'kernel: expected the name of a kernel, got {shown(self.kernel)}; use "auto"'
            )
        for name, known in payloads:
            if not self.has_hops and getattr(self, name) != known[0]:
                raise RingConfigError(
                    f'{name}: expected "{known[0]}" beside transport "{self.transport}", which'
                    f' {self.row.no_hops}, got {shown(getattr(self, name))}; use transport "ring"'
                )
        asked: Any = self.stage_bytes
        is_set = asked != "auto" if isinstance(asked, str) else type(asked) is not int or asked != 0
        if is_set:
            whole_number(self.stage_bytes, "stage_bytes", RingConfigError, MOST_BYTES)
            if not self.has_hops:
                raise RingConfigError(
                    f'stage_bytes: expected "auto" or 0 beside transport "{self.transport}", which'
                    f' {self.row.no_hops}, got {self.stage_bytes}; use transport "ring"'
                )
        for name in ("overlap", "prune", "check_finite"):
            true_or_false(getattr(self, name), name, RingConfigError)
        if self.offload != "auto":
            true_or_false(self.offload, "offload", RingConfigError)
        if self.offload is True and self.row.no_offload is not None:
            raise RingConfigError(
                'offload_attention: expected transport "ring", which sends heads in groups, got'
                f' "{self.transport}", which {self.row.no_offload}; set one of the two to its default'
                ' ("ring", false)'
            )
        if not _is_number(self.recompute) or not 0 <= self.recompute <= 1:
            raise RingConfigError(
                f"recompute: expected a part of the sequence from 0 to 1, got {shown(self.recompute)}"
            )
        for name, usual in (("hop_timeout_s", 60), ("first_pass_timeout_s", 600)):
            seconds = getattr(self, name)
            if not _is_number(seconds) or not 0 < seconds <= MOST_SECONDS:
                raise RingConfigError(
                    f"{name}: expected seconds > 0, got {shown(seconds)} (at most {MOST_SECONDS:g}); use"
                    f" {usual}, say"
                )
        if self.scale is not None:
            if not _is_number(self.scale):
                raise RingConfigError(
                    f"scale: expected a finite number, got {shown(self.scale)}; use None for 1 /"
                    " sqrt(head_dim)"
                )
            object.__setattr__(self, "scale", float(self.scale))  # 1 and 1.0 are one header

    @property
    def row(self) -> PassRow:
        """Return the row of the transport in the table of passes."""
        return PASSES[self.transport]

    @property
    def has_hops(self) -> bool:
        """Return whether K/V travel from rank to rank, hop by hop: in a `RingPass`."""
        return self.row.no_hops is None

    def chunk_bytes_on(self, device_type: str, ring_size: int) -> int:
        """Return the least bytes of K, or of V, for which a head chunk of its own pays."""
        return chunk_bytes_on(device_type, ring_size) if self.chunk_bytes is None else self.chunk_bytes

    def offload_on(self, device_type: str, local_tokens: int) -> bool:
        """Return whether attention's tensors are kept on the host; see `head_chunks.heads_on_host`."""
        return self.row.no_offload is None and heads_on_host(self.offload, device_type, local_tokens)


def _is_number(value: object) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 1 << 1000  # as a float, still finite
    return isinstance(value, float) and math.isfinite(value)


# [Note: compile skew]
# On a GPU each rank compiles its kernels at its own pace: one finds them in its cache, another one compiles
# for minutes, and peers that no call has met yet connect. Whoever is done first waits meanwhile, for headers
# and for messages. So a rank that is about to compile asks for `first_pass_timeout_s` in its header, and all
# ranks wait that long (`MeshState.patience_s`): in this pass and for the header of the next call, since one
# may compile at the last hop of a pass. Every other wait has hop_timeout_s. Whether a pass compiles is the
# kernel's own word: flex looks into the table of the functions that it has compiled (`flex.py`'s [Note: one
# compilation]). The first pass of its kind on a mesh counts as well, because its peers connect.

COMPILES_NOTHING = {"cpu"}  # devices whose kernels need no compiler


def may_compile(device_type: str) -> bool:
    """Return whether kernels on a kind of device are compiled when they first run."""
    return device_type not in COMPILES_NOTHING


def patience_s(
    mesh: RingMesh, options: Options, operation: str, q: Tensor, k: Tensor, compiles: bool
) -> float:
    """Return the seconds that this rank asks for in an operation that begins now; 0: hop_timeout_s does.

    `compiles` says whether the kernel is going to compile something; the mesh remembers what it has seen.
    """
    if not may_compile(q.device.type):
        return 0.0
    kind: Hashable = (operation, options.kernel, q.dtype, q.shape[1], k.shape[1], q.shape[-1])
    known = kind in mesh.state.operations
    mesh.state.operations.add(kind)
    return 0.0 if known and not compiles else options.first_pass_timeout_s

"""Describe what is measured: shapes, the number of ranks, and the section of the passes."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

from ds_ring.config.json_text import SECTION, SP_KEY, Json
from ds_ring.config.section import RingConfig, named_patterns
from ds_ring.errors import RingConfigError
from ds_ring.plugin import FAST_KERNELS
from ds_ring.schedule.layout import Mix

from ..plan.model_file import count_patterns
from ..plan.training_setting import ELEMENT_BYTES

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class TuningRequest:
    """Describe the request; `request_from` checks it."""

    tokens: int  # of a whole sequence
    # heads, kv_heads: H and G of a layer
    heads: int
    kv_heads: int
    head_dim: int  # D
    batch: int  # sequences of a micro batch
    dtype: str  # "float32", "bfloat16" or "float16"
    device: str  # "cpu" or "cuda"
    world_size: int  # ranks that measure at once
    base: RingConfig  # the section; its sizes are replaced by one ring

    @property
    def sequence_size(self) -> int:
        """Return the ranks that share one sequence."""
        return self.base.sequence_parallel_size

    @property
    def mix(self) -> Mix:
        """Return what attends to what and in how many layers, without the documents of a batch."""
        layers = max([1, *(layer + 1 for layer in named_patterns(self.base))])
        return count_patterns(self.base, (None,) * layers, self.tokens)

    @property
    def item_bytes(self) -> int:
        """Return bytes of one element of q, k and v."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def kernel(self) -> str:
        """Return the name of the kernel that will run."""
        if self.base.kernel != "auto":
            return self.base.kernel
        return FAST_KERNELS.get(self.device, "reference")


def request_from(
    whole: Json,
    *,
    tokens: int,
    heads: int,
    head_dim: int,
    world_size: int,
    kv_heads: int | None = None,
    batch: int = 1,
    device: str = "cpu",
    dtype: str | None = None,
) -> TuningRequest:
    """Check a request.

    Args:
        whole: the DeepSpeed JSON; the section may be missing. Its `sequence_parallel_size` (or ring_size x
            ulysses_size) is kept, without one all ranks share a sequence.
        tokens: of a whole sequence.
        heads, kv_heads: of a layer; kv_heads None is heads.
        head_dim: of a head.
        world_size: ranks that will measure.
        batch: sequences of a micro batch.
        device: "cpu" or "cuda".
        dtype: None is float32 on the CPU and bfloat16 on CUDA.

    Raises:
        RingConfigError: sizes that cannot be, or a section that is refused.
        RingMeshError: the ranks do not fall into whole sequence groups.
        RingPatternError: a pattern that these tokens cannot have.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    sizes = {"tokens": tokens, "heads": heads, "kv-heads": kv_heads, "head-dim": head_dim}
    for name, size in (sizes | {"processes": world_size, "batch": batch}).items():
        if type(size) is not int or size < 1:
            raise RingConfigError(f"{name}: expected a whole number of at least 1, got {size!r}; give one")
    for name, word, words in (("device", device, DEVICES), ("dtype", dtype, tuple(ELEMENT_BYTES))):
        if word not in words:
            raise RingConfigError(f"{name}: expected one of {', '.join(words)}, got {word!r}; choose one")
    if heads % kv_heads:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise RingConfigError.wrong("kv-heads", f"a divisor of {heads} heads", kv_heads, f"use one of {fits}")
    base = _open_sizes(whole, world_size)
    base.validate_world(world_size)
    if tokens < base.sequence_parallel_size:
        raise RingConfigError(
            f"tokens: expected at least {base.sequence_parallel_size}, one a rank, got {tokens}"
        )
    request = TuningRequest(tokens, heads, kv_heads, head_dim, batch, dtype, device, world_size, base)
    _ = request.mix  # or raise its error
    return request


def _open_sizes(whole: Json, world_size: int) -> RingConfig:
    """Return the section with its sizes open; everything else in it must be sound."""
    section = whole.get(SECTION, {})
    if not isinstance(section, dict):
        return RingConfig.from_deepspeed(whole)  # refuses it
    size = whole.get(SP_KEY, "auto")
    if size == "auto":
        sizes = [section.get("ring_size", "auto"), section.get("ulysses_size", 1)]
        size = math.prod(sizes) if all(type(n) is int and n > 0 for n in sizes) else world_size
    open_sizes = {"ring_size": "auto", "ulysses_size": 1}
    return RingConfig.from_deepspeed(copy.deepcopy(whole) | {SP_KEY: size, SECTION: section | open_sizes})

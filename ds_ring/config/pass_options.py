"""The keys of the section that a pass reads, with their defaults, units and limits: `PassOptions`.

`RingConfig` (section.py) inherits them, and so does `Options` (ops/options.py), the options of calls from
Python: each value is checked here alone. Imports no torch.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
)

from ds_ring.config.messages import (
    ONE_UP,
    WORD,
    Accepted,
    AtLeastOne,
    Flag,
    FlagOrPart,
    Refused,
    Section,
    Timeout,
    as_int,
    sentence,
    shown,
    without_effect,
)  # fmt: skip
from ds_ring.limits import MAX_BLOCK, MAX_BYTES, Timeouts
from ds_ring.plugin import GRADIENT_PAYLOADS, KERNELS, PASSES

BlockSize = Annotated[int, Field(le=MAX_BLOCK), Accepted("a power of two of at least 16", "use 128")]
KernelOptions = Annotated[dict[str, JsonValue], Accepted("an object of JSON values", "use {} for no options")]
ChunkBytes = Annotated[AtLeastOne | None, Accepted(f"{ONE_UP} (bytes), or null", "use null for the default")]
StageBytes = Annotated[
    Literal["auto"] | Annotated[int, BeforeValidator(as_int), Field(ge=0, le=MAX_BYTES)],
    Accepted('a whole number of bytes, 0 or more, or "auto"', "use 0 to go hop by hop"),
]
if TYPE_CHECKING:  # a type checker cannot read the words of a table
    KernelName = str
    TransportName = str
    GradientPayload = str
else:
    TransportName = Annotated[Literal[tuple(PASSES)], WORD]
    GradientPayload = Annotated[Literal[tuple(GRADIENT_PAYLOADS)], WORD]
    KernelName = Annotated[Literal[("auto", *KERNELS)], WORD]


def refuse_without_hops(model: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    """Return the value of a key that only a transport with hops reads, or refuse one that has no effect."""
    transport = info.data.get("transport", "ring")
    why = PASSES[transport].no_hops
    if why is not None and value != model.model_fields[str(info.field_name)].default:
        raise Refused(without_effect(shown(value), f'"transport": "{transport}"', why))
    return value


class PassOptions(Section):
    """The options of a pass, which are set once a run. Frozen and hashable.

    The fields are keys of the section (`PassOptions.model_fields` has their descriptions).

    Raises:
        RingConfigError: a value that a field does not take; names it, and what to write.
    """

    # The order matters: a validator sees the values of the fields above its own.
    transport: TransportName = Field(default="ring", description="how K/V move")
    kernel: KernelName = Field(default="auto", description="what computes a hop's attention")
    block_size: BlockSize = Field(default=128, description="side of mask blocks; small ones skip more")
    kernel_options: KernelOptions = Field(default={}, description="options of the kernel itself")
    overlap: Flag = Field(
        default=True, description="send and receive the next hop while this one is computed"
    )
    prune: Flag = Field(default=True, description="send each rank only the tokens that it reads")
    gradient_payload: GradientPayload = Field(
        default="float32", description="dtype in which dK and dV travel; in stages see `stage_bytes`"
    )
    chunk_bytes: ChunkBytes = Field(
        default=None, description="least size of K in a group of heads that travels together"
    )
    stage_bytes: StageBytes = Field(
        default="auto", description="most K/V bytes of shards computed at once; 0: hop by hop"
    )
    recompute_attention: FlagOrPart = Field(
        default=False,
        description="under activation checkpointing: send K/V again, instead of keeping outputs",
    )
    hop_timeout_seconds: Timeout = Field(
        default=Timeouts().hop, description="how late ranks may come to a hop, or inside the engine"
    )
    first_pass_timeout_seconds: Timeout = Field(
        default=600.0, description="the same in a GPU's first pass of a shape, which compiles"
    )
    check_finite: Flag = Field(default=False, description="raise on NaN or Inf, naming rank, tensor and hop")

    @cached_property
    def kernel_pairs(self) -> tuple[tuple[str, Any], ...]:
        """Return `kernel_options` as sorted pairs, lists and objects in them as tuples: a hashable value."""
        return _hashable(self.kernel_options)

    @cached_property
    def _hash(self) -> int:
        values = {name: getattr(self, name) for name in PassOptions.model_fields}
        return hash(tuple((values | {"kernel_options": self.kernel_pairs}).values()))

    def __hash__(self) -> int:
        return self._hash

    @property
    def has_hops(self) -> bool:
        """Return whether K/V travel from rank to rank, hop by hop."""
        return PASSES[self.transport].no_hops is None

    @field_validator("block_size")
    @classmethod
    def _check_block_size(cls, size: int, info: ValidationInfo) -> int:
        kernel, reads = info.data.get("kernel"), PASSES[info.data.get("transport", "ring")].whole_blocks
        if size != 128 and not reads and kernel in KERNELS and not KERNELS[kernel].takes_blocks:
            raise Refused(without_effect(shown(size), f'"kernel": "{kernel}"', "has no mask blocks"))
        if size >= 16 and size.bit_count() == 1:
            return size
        below = 1 << (size.bit_length() - 1) if size > 16 else 16
        near = f"use {below} or {2 * below}" if size > 16 else "use 16 or more; 128 suits FlexAttention best"
        raise Refused(sentence("a power of two of at least 16 tokens", shown(size), near))

    @field_validator("overlap", "prune", "gradient_payload", "chunk_bytes", "stage_bytes")
    @classmethod
    def _check_ring_option(cls, value: Any, info: ValidationInfo) -> Any:
        return refuse_without_hops(cls, value, info)


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((name, _hashable(v)) for name, v in sorted(value.items()))
    return tuple(map(_hashable, value)) if isinstance(value, list) else value

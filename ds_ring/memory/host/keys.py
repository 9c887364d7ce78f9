"""The keys "offload_checkpoints" and "offload_attention" of the JSON's "long_sequence"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ds_ring.config.messages import PartKeys, Section, Switch


class HostKeys(PartKeys):
    """Say which tensors are kept in pinned memory of the host."""

    description: ClassVar[str] = "what is computed in chunks or kept on the host"

    offload_checkpoints: Switch = Field(
        default=False,
        description="checkpoint each layer; checkpoints and attention's results in pinned host memory",
    )
    offload_attention: Switch = Field(
        default=False, description="keep attention's saved tensors in pinned memory of the host"
    )

    @property
    def changes_models(self) -> bool:
        """Return whether a part of a transformers model is on, or may be; attention is no part of it."""
        return self.offload_checkpoints is not False or super().changes_models


class OffloadedAttention(Section):
    """Give a section the option `offload_attention` of a pass."""

    if TYPE_CHECKING:
        long_sequence: Any

    @property
    def offload_attention(self) -> bool | Literal["auto"]:
        """Return whether attention's tensors are kept on the host between both passes."""
        value: bool | Literal["auto"] = self.long_sequence.offload_attention
        return value

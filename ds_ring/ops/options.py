"""The options of a pass. `context.py` puts them together with pattern, layout and mesh."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PlainValidator, ValidationInfo, field_validator

from ds_ring.config.messages import Accepted, Refused, Switch, sentence, shown
from ds_ring.config.pass_options import PassOptions
from ds_ring.errors import RingConfigError
from ds_ring.plugin import PASSES, SAVED_TENSORS, TRACERS, PassRow, load
from ds_ring.schedule.lowering import chunk_bytes_on, heads_on_host

if TYPE_CHECKING:
    from ds_ring.masks.pair_masks import ScoreFunction

_SCALE = Accepted("a finite number", "use None for 1 / sqrt(head_dim)")


def _scale(value: Any) -> float | None:
    """Return a float, so that 1 and 1.0 are one header."""
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and abs(value) <= sys.float_info.max:
        return float(value)
    raise Refused(sentence(_SCALE.what, shown(value), _SCALE.advice))


def as_value(score_mod: ScoreFunction | None) -> Any:
    """Return a score_mod as a value that ranks compare and that kernels evaluate; None for none."""
    if score_mod is None:
        return None
    if "score_mod" not in TRACERS:
        raise RingConfigError.wrong("score_mod", "none, as no module traces one", score_mod, "leave it out")
    return load(TRACERS["score_mod"]).lookup(score_mod)


class Options(PassOptions):
    """Hold the keys of the JSON that a pass reads, and what a call from Python may add.

    Only `gradient_payload`, `scale` and `score_mod` change the result by more than rounding.

    Attributes:
        scale: of the scores; None is 1 / sqrt(head_dim).
        offload_attention: keep q, k, v, out and lse on the host between both passes; "auto" for long shards.
        score_mod: changes scores pair by pair; of `as_value`.
    """

    scale: Annotated[float | None, PlainValidator(_scale), _SCALE] = Field(default=None)
    offload_attention: Switch = Field(default=False)
    score_mod: Annotated[Any, Accepted("a value of as_value(function)", "call it")] = Field(default=None)

    @classmethod
    def make(cls, options: PassOptions | None, **overrides: Any) -> Options:
        """Return the options of a call: those that are given, a `RingConfig` say, and others by name.

        Raises:
            RingConfigError: `options` is something else, or a value that a field does not take.
        """
        if options is None:
            return cls(**overrides)
        if not isinstance(options, PassOptions):
            raise RingConfigError.wrong(
                "options", "PassOptions", shown(options), "use ds_ring.PassOptions(transport=...)"
            )
        fields = [*PassOptions.model_fields, "offload_attention"]
        return cls(**{name: getattr(options, name) for name in fields if hasattr(options, name)} | overrides)

    def replaced(self, **changes: Any) -> Options:
        """Return options with other values of some fields."""
        return Options(**self._get_fields() | changes)

    def _get_fields(self) -> dict[str, Any]:
        """Return the fields by name; `dict(self)` would have cached properties, too."""
        return {name: getattr(self, name) for name in Options.model_fields}

    @property
    def transport_spec(self) -> PassRow:
        """Return the row of the transport in the table of passes."""
        return PASSES[self.transport]

    def chunk_bytes_on(self, device_type: str, ring_size: int) -> int:
        """Return the least bytes of K, or of V, for which a head chunk of its own pays."""
        return chunk_bytes_on(device_type, ring_size) if self.chunk_bytes is None else self.chunk_bytes

    def offload_on(self, device_type: str, local_tokens: int) -> bool:
        """Return whether attention's tensors are kept on the host; see `lowering.heads_on_host`."""
        if "offload_attention" not in SAVED_TENSORS:
            if self.offload_attention is True:
                raise RingConfigError.wrong("offload_attention", "false", "true", "it is not installed")
            return False
        return self.transport_spec.no_offload is None and heads_on_host(
            self.offload_attention, device_type, local_tokens
        )

    @field_validator("offload_attention")
    @classmethod
    def _check_offload(cls, value: Any, info: ValidationInfo) -> Any:
        transport = info.data.get("transport", "ring")
        why = PASSES[transport].no_offload
        if value is True and why is not None:
            expected, got = 'transport "ring", which sends heads in groups', f'"{transport}", which {why}'
            raise Refused(sentence(expected, got, "set one of the two to its default"))
        return value

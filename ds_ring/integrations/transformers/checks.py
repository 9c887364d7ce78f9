"""Refuse what a transformers model may not ask of attention on a ring.

Every check here guards against a silent mistake: a shard taken for the whole sequence, a mask dropped, a loss
averaged over local tokens. Owns no behaviour of the ring. Errors depend on what all ranks have in common
(the model, the call), so that they are raised on every rank together.
"""

from __future__ import annotations

from typing import Any

from ds_ring.config.pattern_section import PatternConfig
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding

THROUGH_SHARD_BATCH = (
    "take the batch from the loader of ds_ring.initialize or from engine.ring.shard_batch(batch)"
)

# Arguments with which models change what attention computes; a ring has none of it.
_FOREIGN_ARGUMENTS = (
    "softcap",
    "s_aux",
    "sinks",
    "position_bias",
    "head_mask",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
)


def is_plain_causal(config: RingConfig) -> bool:
    """Return whether the pattern is what a causal model computes by itself."""
    # Any other pattern (LongNet's dilation, a window, documents) replaces the model's causal mask knowingly:
    # the JSON asks for it. So it goes with every causal model, and only with attn_implementation="ds_ring".
    return config.pattern == PatternConfig()


def check_model_call(name: str, given: dict[str, Any]) -> None:
    """Refuse what a shard cannot answer. `given` is the call's arguments by name."""
    if given.get("position_ids") is None:
        raise RingShapeError(
            f"{name}: expected position_ids, got none; transformers would number this rank's tokens from 0:"
            f" {THROUGH_SHARD_BATCH}"
        )
    if given.get("attention_mask") is not None:
        raise RingPatternError(
            f"{name}: expected no attention_mask, got one of this rank's tokens; it must be checked against"
            f" the whole sequence: {THROUGH_SHARD_BATCH}"
        )
    if given.get("use_cache") or given.get("past_key_values") is not None:
        raise RingConfigError(
            f"{name}: expected a call without a cache, got use_cache or past_key_values; call model.generate,"
            " whose cache stays on the ring"
        )


def check_length(name: str, given: dict[str, Any], sharding: BatchSharding) -> None:
    """Raise RingShapeError unless the tensors are as long as this rank's part of the sequence."""
    for key in ("input_ids", "inputs_embeds", "position_ids"):
        tensor = given.get(key)
        if tensor is not None and tensor.shape[1] != sharding.local_tokens:
            raise RingShapeError(
                f"{name}: {key}: expected {sharding.local_tokens} local tokens, a rank's part of"
                f" {sharding.layout.tokens}, got {tensor.shape[1]}; {THROUGH_SHARD_BATCH}"
            )


def check_attention_call(name: str, mask: object, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse dropout, mask tensors and extra terms of the scores."""
    if dropout:
        raise RingConfigError(
            f"{name}: expected no dropout inside attention, got {dropout}; set attention_dropout to 0 in the"
            " model's configuration (dropout elsewhere is fine)"
        )
    if mask is not None:
        raise RingPatternError(
            f"{name}: expected no mask tensor, got {type(mask).__name__} {list(getattr(mask, 'shape', []))};"
            " it is written for one rank's tokens: say it with the pattern in the JSON"
        )
    refuse_foreign_arguments(name, kwargs)


def refuse_foreign_arguments(name: str, kwargs: dict[str, Any]) -> None:
    """Refuse terms of the scores that a ring does not compute, and with them the backend's own attention."""
    for key in _FOREIGN_ARGUMENTS:
        if kwargs.get(key) is not None:
            raise RingPatternError(
                f"{name}: expected no {key}, got one, which is not computed here; sinks (s_aux) and softcap"
                ' are computed with "attention": "ring" in the section, without backend="ds_ring"'
            )

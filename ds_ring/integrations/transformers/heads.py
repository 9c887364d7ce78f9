"""Make heads that read one token of a sequence work on a ring: transformers' sequence classifiers.

Owns the pooled logits of `GenericForSequenceClassification` (Llama, Qwen, Mistral, Gemma and the like, reward
models among them) over all ranks, and the refusal of outputs that are no tensor of local tokens.

The score of each local token is computed as ever; what the head picks (the last token that is not padding) is
then put in place of all of them, so that the model's own indexing finds it on every rank.

Shapes: B samples, S local tokens, L labels.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.deepspeed.sequence_sum import number_of, sequence_max_op, sequence_sum_op
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.runtime.mesh import RingMesh


def pools_the_last_token(model: nn.Module) -> bool:
    """Return whether a model is a classifier whose pooled token is known and gathered here."""
    return isinstance(model, GenericForSequenceClassification)


def pool_over_ranks(model: PreTrainedModel, session: RingSession) -> list[RemovableHandle]:
    """Make the model's head read its token from the rank that has it; return the handles of the hooks."""
    signature = inspect.signature(model.forward)
    held: dict[str, Tensor | None] = {}
    padding = model.config.get_text_config().pad_token_id
    mesh = session.mesh

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        held["input_ids"] = signature.bind_partial(*args, **kwargs).arguments.get("input_ids")

    def after_score(_: nn.Module, args: tuple[Any, ...], logits_BSL: Tensor) -> Tensor:
        sharding = session.batches.current
        _refuse_short(model, sharding, mesh)
        assert sharding.slots is not None
        return _pooled_everywhere(logits_BSL, sharding.slots, held["input_ids"], padding, number_of(mesh))

    assert isinstance(model.score, nn.Module), type(model.score)
    return [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.score.register_forward_hook(after_score),
    ]


def _refuse_short(model: nn.Module, sharding: BatchSharding, mesh: RingMesh) -> None:
    if sharding.mesh is not mesh:
        raise RingShapeError(
            f"{type(model).__name__}: expected a sequence that is cut, got {sharding.layout.tokens} tokens,"
            " below min_sequence_length, where each rank takes whole samples and its loss would be a mean"
            " over"
            ' those; set "min_sequence_length": 0 in the "ring_attention" section'
        )


def _pooled_everywhere(
    logits_BSL: Tensor, slots_S: Tensor, input_ids: Tensor | None, padding: int | None, mesh: int
) -> Tensor:
    """Return [B, S, L]: in every slot the logits of the sequence's last token that is not padding."""
    # Where all tokens are padding that is the first one, as on one process; without a padding token, or
    # without ids, the very last.
    batch, tokens, _ = logits_BSL.shape
    candidates_BS = slots_S.expand(batch, tokens)
    if padding is not None and input_ids is not None:
        candidates_BS = torch.where((input_ids == padding) & (slots_S >= 0), 0, candidates_BS)
    last_B = sequence_max_op(candidates_BS.amax(dim=1), mesh)
    mine_BS1 = (slots_S == last_B[:, None])[..., None]
    pooled_BL = sequence_sum_op((logits_BSL * mine_BS1).sum(dim=1), mesh)
    return pooled_BL[:, None].expand(-1, tokens, -1)


def check_outputs(model: PreTrainedModel, output: Any, local_tokens: int) -> None:
    """Refuse what a head made of this rank's tokens alone."""
    if isinstance(output, Tensor | tuple):
        raise RingConfigError(
            f"{type(model).__name__}: expected a ModelOutput, got {type(output).__name__}, in which the loss"
            " cannot be told from logits; leave out return_dict=False"
        )
    for name, value in output.items():
        if (
            not isinstance(value, Tensor)
            or value.ndim < 2
            or name == "image_hidden_states"  # of this rank's image tokens
            or (name == "logits" and pools_the_last_token(model))
        ):
            continue
        if name == "logits" and _is_pooled(model, value, local_tokens):
            raise RingConfigError(_own_head(model, value))
        if value.shape[1] != local_tokens or name in _OVER_TOKENS:
            raise RingConfigError(
                f"{type(model).__name__}: its output {name} {list(value.shape)} is read off, or normalized"
                " over,"
                f" this rank's {local_tokens} tokens, and not those of the whole sequence. On a ring a head"
                " may"
                " give each token a result of its own (language models, token classifiers), or pool the last"
                " token (transformers' GenericForSequenceClassification); for any other one take the base"
                " model"
                " (without pooling layer: add_pooling_layer=False), and your own head on"
                " engine.ring.gather(output.last_hidden_state); leave out logits_to_keep"
            )


def _is_pooled(model: nn.Module, logits: Tensor, local_tokens: int) -> bool:
    """Return whether an output is one result for each sample, however many tokens there are."""
    classifies = type(model).__name__.endswith("ForSequenceClassification")
    return logits.ndim == 2 and (classifies or logits.shape[1] != local_tokens)


def _own_head(model: PreTrainedModel, logits: Tensor) -> str:
    """Return what to do instead of BERT's way, which reads the first token, or a mean of all."""
    base = type(model.base_model)
    pooler = "add_pooling_layer" in inspect.signature(base.__init__).parameters
    return (
        f"{type(model).__name__}: expected a result for each token, got logits {list(logits.shape)}, pooled"
        " from this rank's tokens and not from those of the whole sequence. Take"
        f" {base.__name__}{'(config, add_pooling_layer=False)' if pooler else ''} in a module of your own,"
        " with a head on engine.ring.gather(output.last_hidden_state): [:, 0] is the first token of the"
        " sequence there, every rank computes the same loss of it, and engine.backward takes that as it is."
        " Classifiers that pool the last token (GenericForSequenceClassification: Llama, Qwen, Mistral) need"
        " none of this"
    )


_OVER_TOKENS = ("start_logits", "end_logits", "pooler_output")

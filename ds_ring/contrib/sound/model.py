"""Give the language part of a model that hears the sound features of its own tokens.

Sound goes whole to every rank, which runs the tower of sound, with that tower's own attention, and takes the
features of its own tokens: a tower is small beside the language part, and some (Conformers) normalize over
all sounds of a batch, which no share of them can. The tower's gradient is a sum over the ranks, like any
other. The features are put in place of the embeddings here, so that the model itself does not compare the
number of its sounds' features with that of one rank's tokens.

Shapes: B samples, T tokens, S local tokens, N sound tokens of the batch, R sounds, L features of the longest
sound, E width of the language part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from ds_ring.comm.mesh import RingMesh
from ds_ring.contrib.images.batch import FeatureTokens, Images
from ds_ring.contrib.images.model import (
    check_number,
    find_encoders,
    list_encoder_modules,
    name_part_attention,
)
from ds_ring.data.batch import Batch
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.models.model import PRETRAINED, TABLE
from ds_ring.models.model_part import Loss, ModelPart
from ds_ring.models.variant import Variant
from ds_ring.patches import patch
from ds_ring.schedule.layout import Layout

# By model_type, those that tests compare with one process: tests/dist/contrib/sound.
EXACT = tuple(
    """
    audioflamingo3 glmasr granite_speech granite_speech_plus moss_transcribe_diarize musicflamingo omniasr
    qwen2_audio qwen3_asr vibevoice_asr voxtral
    """.split()  # noqa: SIM905
)
_SOUND = ("input_features", "input_values")
_OF_SOUND = frozenset({*_SOUND, "input_features_mask", "feature_attention_mask", "padding_mask"})


class SoundTokens(NamedTuple):
    """The sound features that replace embeddings of a batch's local tokens."""

    local: FeatureTokens  # numbered as image tokens are
    ids_BT: Tensor  # of the whole batch: Music Flamingo counts the tokens of each sound


class Sounds(Images):
    """The sounds of a model's batches."""

    names = _OF_SOUND

    def take_columns(
        self, local: Batch, prepared: Mapping[str, Tensor], layout: Layout | None, mesh: RingMesh
    ) -> Any:
        """Return the `SoundTokens` of the local tokens; None for a batch without sounds."""
        features = super().take_columns(local, prepared, layout, mesh)
        return None if features is None else SoundTokens(features.by_modality["sound"], prepared["input_ids"])

    def make_prompt_features(self, batch: Mapping[str, Any], layout: Layout, mesh: RingMesh) -> Any:
        """Return the `SoundTokens` of the local tokens of a prompt; None without sounds."""
        if not _has_sound(batch) or batch.get("input_ids") is None:
            return None
        ids_BT = batch["input_ids"]
        return SoundTokens(self.find_prompt_tokens(ids_BT, "sound", layout, mesh), ids_BT)

    def _modalities(self, batch: Mapping[str, Any]) -> list[str]:
        return ["sound"]


class SoundModels(Variant):
    """Models with towers of sound, which keep their own attention."""

    encoder_types = EXACT

    def own_attention(self, model: nn.Module) -> list[PreTrainedModel]:
        return find_encoders(model) if _hears(model) else []

    def apart(self, model: nn.Module) -> list[nn.Module]:
        return list_encoder_modules(model) if _hears(model) else []

    def attention_names(self, model: PreTrainedModel, name: str) -> dict[str, str] | None:
        return name_part_attention(model, name) if _hears(model) else None


class SoundPart(ModelPart):
    """Give a model the sound features of its own tokens."""

    def patches(self, loss: Loss) -> list[Any]:
        """Return the hook that makes the model take sound."""
        return [make_sound_hook(self.model, self.session)] if _hears(self.model) else []


def _hears(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) in EXACT


def _has_sound(batch: Mapping[str, Any]) -> bool:
    return any(batch.get(name) is not None for name in _SOUND)


_gives_features = patch(
    TABLE.given("base", PRETRAINED), stage="before_forward", feature="sound",
    reason="gives embeddings with the features of this rank's sound tokens", when="the model takes sound",
)  # fmt: skip


def make_sound_hook(model: PreTrainedModel, session: RingSession) -> Callable[..., Any]:
    """Return the hook that makes `model` take sound.

    Raises:
        RingConfigError: (from a forward pass) a compiled model, or a tower that draws noise.
        RingShapeError: (from a forward pass) other numbers of sound tokens than of features.
    """
    base: Any = model.base_model
    session.needs.whole = Sounds({"sound": int(model.config.audio_token_id)})
    signature = inspect.signature(base.forward)

    @_gives_features
    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        arguments = dict(signature.bind_partial(*args).arguments) | kwargs
        if not _has_sound(arguments):
            return None
        sounds = session.batches.current.whole
        if torch.compiler.is_compiling() or not isinstance(sounds, SoundTokens):
            got = "a compiled model" if torch.compiler.is_compiling() else "others"
            raise RingShapeError.wrong(
                "sound", "that of the batch", got, "give it to engine.ring.shard_batch; do not compile"
            )
        rows_NE = _features(base, arguments, sounds.ids_BT)
        check_number(base, len(rows_NE), sounds.local, "sound")
        places_BS = sounds.local.places_BS
        are_sounds_BS = places_BS > 0
        # of a token that the vocabulary may not have
        embeds_BSE = base.get_input_embeddings()(arguments["input_ids"].masked_fill(are_sounds_BS, 0))
        mine_NE = rows_NE[places_BS[are_sounds_BS] - 1].to(embeds_BSE.dtype)
        arguments = {key: x for key, x in arguments.items() if key not in _OF_SOUND}
        arguments["inputs_embeds"] = embeds_BSE.masked_scatter(are_sounds_BS[..., None], mine_NE)
        return (), arguments | {"input_ids": None}

    return before


def _features(base: Any, arguments: Mapping[str, Any], ids_BT: Tensor) -> Tensor:
    """Return the features [N, E] of all sounds, in the order of their tokens."""
    kind, mask = base.config.model_type, arguments.get("input_features_mask")
    if kind == "qwen2_audio":
        return _expand_qwen2_audio(base, arguments["input_features"], arguments["feature_attention_mask"])
    if kind == "vibevoice_asr" and base.config.acoustic_tokenizer_encoder_config.vae_std:
        raise RingConfigError.wrong(
            kind, "a tower without noise of its own", "vae_std above 0",
            "set config.acoustic_tokenizer_encoder_config.vae_std to 0",
        )  # fmt: skip
    takes = inspect.signature(base.get_audio_features).parameters
    sounds = {key: arguments[key] for key in _OF_SOUND if key in takes and arguments.get(key) is not None}
    if "input_ids" in takes:
        sounds["input_ids"] = ids_BT.to(base.device)
    if "padding_mask" in takes and takes["padding_mask"].default is inspect.Parameter.empty:
        sounds.setdefault("padding_mask", None)
    features = base.get_audio_features(**sounds, return_dict=True).pooler_output
    if kind.startswith("granite") and mask is not None:  # of features, not of frames
        features = features[mask.bool()]
    rows_NE: Tensor = features.reshape(-1, features.shape[-1])
    return rows_NE


def _expand_qwen2_audio(base: Any, frames: Tensor, real: Tensor) -> Tensor:
    """Return the features [N, E] of Qwen2-Audio, whose forward pass has no function that makes them."""
    tower, lengths_R = base.audio_tower, real.sum(-1)
    heard_R, features_R = tower._get_feat_extract_output_lengths(lengths_R)
    at_L = torch.arange((frames.shape[-1] - 2) // 2 + 1, device=frames.device)
    heard_RL = at_L[None] < heard_R[:, None]
    mask = create_bidirectional_mask(
        config=tower.config, inputs_embeds=frames.new_zeros((*heard_RL.shape, 1)),
        attention_mask=heard_RL.long(),
    )  # fmt: skip
    found_RLE = base.multi_modal_projector(tower(frames, attention_mask=mask).last_hidden_state)
    rows_NE: Tensor = found_RLE[at_L[None, : found_RLE.shape[1]] < features_R[:, None]]
    return rows_NE

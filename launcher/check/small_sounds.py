"""Make a model that hears small, and sounds for a batch of it.

Owns the sizes of towers of sound, the shapes in which a model type takes its sounds (no processor is
run), and positions of sound tokens: across borders of shards, two sounds in one sample, one in the other.

Shapes: B samples, T tokens, R sounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ds_ring.compat.transformers import PreTrainedConfig
from ds_ring.data.batch import IGNORE, Batch
from ds_ring.errors import RingConfigError

from .small_images import ConfigValues, merged, name_tokens, shrink_part

SOUNDS = (2, 1)  # of each sample
_MELS, _FRAMES = 8, 32
_WHISPER: ConfigValues = {
    "num_mel_bins": _MELS, "max_source_positions": _FRAMES // 2, "max_position_embeddings": _FRAMES // 2,
    "intermediate_size": 128,  # four frames of the width, which some take for one feature
}  # fmt: skip
_CONFORMER: ConfigValues = {
    "input_dim": _MELS, "num_layers": 2, "hidden_dim": 32, "num_heads": 2, "dim_head": 16, "output_dim": 8,
    "context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 5,
}  # fmt: skip
_GRANITE: ConfigValues = {
    "encoder_config": _CONFORMER,
    "projector_config": {"encoder_hidden_size": 32, "hidden_size": 32, "max_position_embeddings": 64},
}
_VIBE: ConfigValues = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1], "vae_std": 0.0}

Made = tuple[Batch, list[int]]  # inputs of all sounds, and how many tokens each takes
Randn = Callable[..., Tensor]


def _frames(
    randn: Randn, lengths: list[int], mask: str = "input_features_mask", frames: int = _FRAMES
) -> Batch:
    real = torch.arange(frames) < torch.tensor(lengths)[:, None]
    return {"input_features": randn(len(lengths), _MELS, frames), mask: real.long()}


def _flamingo(randn: Randn) -> Made:
    return _frames(randn, [32, 20, 28]), [8, 5, 7]


def _glm(randn: Randn) -> Made:
    return _frames(randn, [32, 24, 32]), [4, 3, 4]


def _granite(randn: Randn) -> Made:
    real = torch.arange(6) < torch.tensor([6, 4, 5])[:, None]  # of features: three for 15 frames
    return {"input_features": randn(3, 30, _MELS), "input_features_mask": real}, [6, 4, 5]


def _omni(randn: Randn) -> Made:
    real = torch.arange(200) < torch.tensor([200, 150, 200])[:, None]
    return {"input_values": randn(3, 1, 200), "padding_mask": real.long()}, [9, 7, 9]


def _qwen2(randn: Randn) -> Made:
    return _frames(randn, [32, 20, 28], "feature_attention_mask"), [8, 5, 7]


def _qwen3(randn: Randn) -> Made:
    return _frames(randn, [100, 60, 80], frames=100), [13, 8, 10]  # a piece of it is 100 frames


def _vibe(randn: Randn) -> Made:
    real = torch.arange(32) < torch.tensor([32, 20, 28])[:, None]
    return {"input_values": randn(3, 1, 32), "padding_mask": real}, [8, 5, 7]


def _voxtral(randn: Randn) -> Made:
    return {"input_features": randn(3, _MELS, _FRAMES)}, [4, 4, 4]


class _Kind(NamedTuple):
    """Say what must fit the small sizes, by part, and what makes the inputs."""

    values: ConfigValues
    make: Callable[[Randn], Made]


_OF_AUDIO: ConfigValues = {"audio_config": _WHISPER}
_KINDS: dict[str, _Kind] = {
    "audioflamingo3": _Kind(_OF_AUDIO, _flamingo),
    "glmasr": _Kind(_OF_AUDIO, _glm),
    "granite_speech": _Kind(_GRANITE, _granite),
    "granite_speech_plus": _Kind(_GRANITE, _granite),
    "moss_transcribe_diarize": _Kind(_OF_AUDIO, _glm),
    "musicflamingo": _Kind(_OF_AUDIO, _flamingo),
    "omniasr": _Kind(
        {
            "audio_config": {
                "conv_dim": [32, 32], "conv_kernel": [10, 3], "conv_stride": [10, 2],
                "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
            }
        },
        _omni,
    ),
    "qwen2_audio": _Kind(_OF_AUDIO, _qwen2),
    "qwen3_asr": _Kind(
        {
            "audio_config": _WHISPER | {"n_window_infer": 100, "downsample_hidden_size": 8}
        },
        _qwen3,
    ),
    "vibevoice_asr": _Kind(
        {
            "acoustic_tokenizer_encoder_config": _VIBE, "semantic_tokenizer_encoder_config": _VIBE,
            "acoustic_tokenizer_chunk_size": 16,
        },
        _vibe,
    ),
    "voxtral": _Kind(_OF_AUDIO, _voxtral),
}  # fmt: skip


def hears(config: Any) -> bool:
    """Return whether a model joins a tower of sound and a text part that is causal."""
    parts = getattr(config, "sub_configs", ())
    return "text_config" in parts and len(parts) > 1 and not config.is_encoder_decoder


def shrink_sounds(config: PreTrainedConfig, values: ConfigValues, text: ConfigValues) -> ConfigValues:
    """Return the values of a model's configuration with a small text part, `text`, and tower of sound.

    Raises:
        RingConfigError: no sounds are known for this type.
    """
    kind = _KINDS.get(config.model_type)
    if kind is None:
        raise RingConfigError.wrong(
            config.model_type, f"one of {', '.join(_KINDS)}", "another", "check its text part"
        )
    values = values | {"text_config": text}
    for key, part in values.items():
        if key.endswith("_config") and key != "text_config" and isinstance(part, dict):
            shrink_part(part, text["hidden_size"])
    values = merged(values, kind.values)
    if "audio_token_id" in values and values["audio_token_id"] is None:
        values["audio_token_id"] = 0
    name_tokens(values, text["vocab_size"])
    return values


def add_sounds(batch: Batch, model: PreTrainedModel, seed: int) -> Batch:
    """Return a batch of text [B, T] with sound tokens in place of some, and their sounds.

    Raises:
        RingConfigError: there are too few tokens.
    """
    generator = torch.Generator().manual_seed(seed + 2)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    sounds, counts = _KINDS[model.config.model_type].make(randn)
    ids_BT = batch["input_ids"].clone()
    tokens, left = ids_BT.shape[1], iter(counts)
    are_sounds_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for row, number in enumerate(SOUNDS):
        for which in range(number):
            # the middles of the first sample's sounds are where shards of two ranks end
            count, middle = next(left), 3 * tokens // 7 if row else (2 * which + 1) * tokens // 4
            start = max(1, middle - count // 2)
            if start + count >= tokens or bool(are_sounds_BT[row, start - 1 : start + count].any()):
                raise RingConfigError.wrong(
                    model.config.model_type, f"sounds of {counts} tokens", f"{tokens} tokens", "give more"
                )
            are_sounds_BT[row, start : start + count] = True
    inputs = batch | {"input_ids": ids_BT.masked_fill(are_sounds_BT, model.config.audio_token_id)} | sounds
    for key in ("labels", "shift_labels"):
        if key in batch:
            inputs[key] = batch[key].masked_fill(are_sounds_BT, IGNORE)
    return inputs

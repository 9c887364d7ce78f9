"""The model types that compute attention in their own code, or number their own tokens: a row for each.

A row names the modules of a type, the bias that they add to scores, and the pattern that they hide.

Shapes: B samples, H query heads, S local tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.errors import RingPatternError
from ds_ring.layers.scores import Alibi
from ds_ring.masks.catalog import Causal, Full, SlidingWindow
from ds_ring.masks.pair_masks import ScoreFunction
from ds_ring.masks.pattern import Pattern
from ds_ring.models.variant import find_forward_home

# Of an attention module, what the bias is multiplied by after it was added, and the attention that the model
# has without a ring ("eager", "sdpa"): the bias of a pair.
Bias = Callable[[Any, float, str], ScoreFunction]
# Of a module that numbers tokens, the batch's position ids [B, S], its own forward and what that is given.
Numbered = Callable[[Any, Tensor, Callable[..., Tensor], Any], Tensor]


@dataclass(frozen=True)
class Family:
    """What a ring must know of a model type.

    Attributes:
        attention: the class of the modules that compute attention eagerly; "" if all use the interface.
        pattern: what a module hides by a mask that it makes of its own; None if it is given all masks.
        bias: what a module adds to the scores; None if it adds nothing.
        positions: the class of the module that numbers tokens, which `numbered` replaces; "" if the model is
            given position_ids, or needs none.
        dense_up_to: of a configuration, up to how many tokens its layers attend to all keys, where they draw
            keys at random for more; None if they never draw any.
        by_length: whether the model counts the tokens of a row that are no padding, and hides as many of its
            last ones as there is padding, where it is given no mask (XLM).
    """

    attention: str = ""
    pattern: Callable[[Any, Any], Pattern] | None = None
    bias: Bias | None = None
    positions: str = ""
    numbered: Numbered | None = None
    dense_up_to: Callable[[Any], int | None] = lambda config: None
    by_length: bool = False


def _big_bird_tokens(config: Any) -> int | None:
    """BigBird's own limit, at which its models switch."""
    if config.attention_type != "block_sparse":
        return None
    return int((5 + 2 * config.num_random_blocks) * config.block_size)


def _bloom_alibi(module: Any, factor: float, implementation: str) -> Alibi:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    slopes = _shift_to_second_key(build_alibi_tensor, module.num_heads)
    return Alibi(tuple((slopes.double() * factor).tolist()))


def _shift_to_second_key(build_alibi_tensor: Callable[..., Tensor], heads: int) -> Tensor:
    """Return the slopes [H]: ALiBi of the second of two keys."""
    return build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64, device="cpu"), heads, torch.float32)[
        :, 0, 1
    ]


def _mpt_alibi(module: Any, factor: float, implementation: str) -> Alibi:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    slopes = -build_mpt_alibi_tensor(module.n_heads, 2)[:, 0, 0]  # of the key one before the last
    return Alibi(tuple((slopes.double() * factor).tolist()))


@dataclass(frozen=True)
class RoundedAlibi:
    """Add slope * key position, rounded to bfloat16, times a factor to the scores, as Falcon does."""

    slopes: tuple[float, ...]  # in bfloat16
    factor: float

    def __call__(self, score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        slopes = torch.tensor(self.slopes, dtype=torch.float32, device=score.device)
        rounded = (slopes[head] * key).to(torch.bfloat16).to(score.dtype)
        return score + rounded * self.factor


def _falcon_alibi(module: Any, factor: float, implementation: str) -> RoundedAlibi:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    if implementation == "eager":  # its model adds ALiBi to the mask, too, which sdpa is given alone
        factor += 1 / math.sqrt(module.config.hidden_size // module.num_heads)
    return RoundedAlibi(tuple(_shift_to_second_key(build_alibi_tensor, module.num_heads).tolist()), factor)


def _embedded(module: Any, position_ids: Tensor, forward: Callable[..., Tensor], argument: Any) -> Tensor:
    """Return the rows of a table of BART's kind, which may begin with rows that no position has."""
    return nn.functional.embedding(position_ids + getattr(module, "offset", 0), module.weight)


def _read_sinusoids(
    module: Any, position_ids: Tensor, forward: Callable[..., Tensor], argument: Any
) -> Tensor:
    """Musicgen's: a table that grows with the length; several codebooks of a sample are rows of the batch."""
    position_ids = position_ids[:: len(position_ids) // len(argument)]
    needed = int(position_ids.max()) + 1
    if needed > module.weights.size(0):
        module.make_weights(needed, module.embedding_dim)
    rows: Tensor = module.weights[position_ids].detach()
    return rows


def _read_rotary_rows(
    module: Any, position_ids: Tensor, forward: Callable[..., Tensor], argument: Any
) -> Tensor:
    """RoFormer's sinusoids [S, D], which all samples share."""
    if bool((position_ids != position_ids[:1]).any()):
        got = "got documents that differ; use a batch of one sample"
        raise RingPatternError(f"RoFormer: expected samples whose tokens have the same positions, {got}")
    return forward(position_ids.shape, 0, position_ids[0])


def _by_ids(module: Any, position_ids: Tensor, forward: Callable[..., Tensor], argument: Any) -> Tensor:
    """Return M2M100's sinusoids; the batch's positions leave padding out, as the module does."""
    needed = int(position_ids.max()) + 1
    if needed > module.weights.size(0):
        module.make_weights(needed, module.embedding_dim, module.padding_idx)
    rows: Tensor = module.weights[position_ids].detach()
    return rows


def _decoder(positions: str, attention: str = "") -> Family:
    """Return the family of an encoder-decoder, whose decoder may be used alone."""
    return Family(attention, positions=positions, numbered=_embedded)


def _numbered_by_ids(positions: str) -> Family:
    return Family(positions=positions, numbered=_by_ids)


# By model type, those that tests compare with one process: tests/dist/test_families.py.
FAMILIES: Mapping[str, Family] = {
    "bart": _decoder("BartLearnedPositionalEmbedding"),
    "big_bird": Family("BigBirdSelfAttention", dense_up_to=_big_bird_tokens),
    "bigbird_pegasus": _decoder("BigBirdPegasusLearnedPositionalEmbedding", "BigBirdPegasusSelfAttention"),
    "biogpt": Family(),
    "blenderbot": _decoder("BlenderbotLearnedPositionalEmbedding"),
    "blenderbot-small": _decoder("BlenderbotSmallLearnedPositionalEmbedding"),
    "bloom": Family("BloomAttention", bias=_bloom_alibi),
    "codegen": Family("CodeGenAttention"),
    "falcon": Family("FalconAttention", bias=_falcon_alibi),
    "git": Family("GitSelfAttention"),
    "git_vision_model": Family(),  # runs with images only, which are refused
    "gpt_neo": Family(
        "GPTNeoSelfAttention",
        pattern=lambda module, config: (
            SlidingWindow(config.window_size) if module.attention_type == "local" else Causal()
        ),
    ),
    "gpt_neox_japanese": Family("GPTNeoXJapaneseAttention"),
    "gptj": Family("GPTJAttention"),
    "m2m_100": _numbered_by_ids("M2M100SinusoidalPositionalEmbedding"),
    "marian": _decoder("MarianSinusoidalPositionalEmbedding"),
    "mbart": _decoder("MBartLearnedPositionalEmbedding"),
    "megatron-bert": Family("MegatronBertSelfAttention"),
    "mpt": Family("MptAttention", bias=_mpt_alibi),
    "musicgen_decoder": Family(positions="MusicgenSinusoidalPositionalEmbedding", numbered=_read_sinusoids),
    "musicgen_melody_decoder": Family(
        positions="MusicgenMelodySinusoidalPositionalEmbedding", numbered=_read_sinusoids
    ),
    "mvp": _decoder("MvpLearnedPositionalEmbedding", "MvpAttention"),
    "nemotron": Family(),
    "openai-gpt": Family("Attention", pattern=lambda *_: Causal()),
    "pegasus": _decoder("PegasusSinusoidalPositionalEmbedding"),
    "plbart": _decoder("PLBartLearnedPositionalEmbedding"),
    "rembert": Family("RemBertSelfAttention"),
    "roformer": Family(
        "RoFormerSelfAttention", positions="RoFormerSinusoidalPositionalEmbedding", numbered=_read_rotary_rows
    ),
    "stablelm": Family(),
    "seamless_m4t": _numbered_by_ids("SeamlessM4TSinusoidalPositionalEmbedding"),
    "seamless_m4t_v2": _numbered_by_ids("SeamlessM4Tv2SinusoidalPositionalEmbedding"),
    "trocr": _decoder("TrOCRLearnedPositionalEmbedding", "TrOCRAttention"),
    "whisper": _decoder("WhisperPositionalEmbedding"),
    "xglm": Family("XGLMAttention"),
    "xlm": Family(
        "MultiHeadAttention",
        pattern=lambda module, config: Causal() if config.causal else Full(),
        by_length=True,
    ),
}


def find_family(model: PreTrainedModel) -> Family | None:
    """Return the row of a model of `FAMILIES`; None for others, also of code from elsewhere."""
    known = find_forward_home(model).startswith("transformers.models.")
    return FAMILIES.get(model.config.model_type) if known else None


# By model type, what a model that computes attention eagerly does with other tokens.
REFUSED = {
    "deberta": "its scores have terms of learned relative positions, whose tables need a gradient",
    "deberta-v2": "its scores have terms of learned relative positions, whose tables need a gradient",
    "mpnet": "its scores have a learned bias for each distance, whose table needs a gradient",
    "prophetnet": "it predicts several tokens ahead, from states that attend by learned bucketed distances",
    "reformer": "it sorts tokens into buckets by random projections, and attends within chunks of them",
}

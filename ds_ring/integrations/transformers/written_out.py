"""Models of transformers that write their attention out, or number their tokens by themselves.

Such a model computes softmax(q @ k.T * scale + mask) @ v in its attention modules, not through transformers'
attention interface. `FAMILIES` lists those that are exact on a ring, and what is particular to each.

[Note: attention that is written out]
While an attention module runs, `_Operators` returns a `WrittenScores` for the product of queries and keys. It
holds no scores: it notes what the module does to them (a scale, a bias, a mask), and its product with the
values is the ring's attention. So projections, rotary embeddings and norms are the module's own. An operation
that is not noted raises an error. The module is given no mask; what the mask hides is the layer's pattern.

Shapes: B samples, H query heads, G key/value heads, S local tokens, K keys, D head dim.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.integrations.deepspeed.batch import SHARDING
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding, RecentBatches
from ds_ring.integrations.transformers.attention_name import NAME
from ds_ring.integrations.transformers.layer_masks import LayerMask
from ds_ring.masks.catalog import Causal, Full, SlidingWindow
from ds_ring.masks.mask_mod import Alibi, ScoreFunction
from ds_ring.masks.pattern import Pattern

# Of an attention module, and what the bias is multiplied by after it was added: the bias of a pair.
Bias = Callable[[Any, float], ScoreFunction]
# Of a module that numbers tokens, the batch's position ids [B, S], its own forward and what that is given.
Numbered = Callable[[Any, Tensor, Callable[..., Tensor], Any], Tensor]


@dataclass(frozen=True)
class Family:
    """Say what a ring must know of a model type.

    Attributes:
        attention: the class of the modules that write attention out; "" if the attention interface is used.
        pattern: what a module hides by a mask that it makes of its own; None if it is given all masks.
        bias: what a module adds to the scores; None if it adds nothing.
        positions: the class of the module that numbers tokens, which `numbered` replaces; "" if the model is
            given position_ids, or needs none.
        pairs: whether its encoder-decoders are exact, too: [Note: two sequences] in pairs.py.
    """

    attention: str = ""
    pattern: Callable[[Any, Any], Pattern] | None = None
    bias: Bias | None = None
    positions: str = ""
    numbered: Numbered | None = None
    pairs: bool = False


def _bloom_alibi(module: Any, factor: float) -> Alibi:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    slopes = _of_second_key(build_alibi_tensor, module.num_heads)
    return Alibi(tuple((slopes.double() * factor).tolist()))


def _of_second_key(build_alibi_tensor: Callable[..., Tensor], heads: int) -> Tensor:
    """Return the slopes [H]: ALiBi of the second of two keys."""
    return build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)[:, 0, 1]


def _mpt_alibi(module: Any, factor: float) -> Alibi:
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


def _falcon_alibi(module: Any, factor: float) -> RoundedAlibi:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    return RoundedAlibi(tuple(_of_second_key(build_alibi_tensor, module.num_heads).tolist()), factor)


def _embedded(module: Any, position_ids: Tensor, forward: Callable[..., Tensor], given: Any) -> Tensor:
    """Return the rows of a table of BART's kind, which may begin with rows that no position has."""
    return nn.functional.embedding(position_ids + getattr(module, "offset", 0), module.weight)


def _sinusoidal(module: Any, position_ids: Tensor, forward: Callable[..., Tensor], given: Any) -> Tensor:
    """Musicgen's: a table that grows with the length; several codebooks of a sample are rows of the batch."""
    position_ids = position_ids[:: len(position_ids) // len(given)]
    needed = int(position_ids.max()) + 1
    if needed > module.weights.size(0):
        module.make_weights(needed, module.embedding_dim)
    found: Tensor = module.weights[position_ids].detach()
    return found


def _rotary_rows(module: Any, position_ids: Tensor, forward: Callable[..., Tensor], given: Any) -> Tensor:
    """RoFormer's sinusoids [S, D], which all samples share."""
    if bool((position_ids != position_ids[:1]).any()):
        raise RingPatternError(
            "RoFormer: expected samples whose tokens have the same positions, got documents that differ from"
            " sample to sample: the model takes one row of positions for all; use a batch of one sample"
        )
    return forward(position_ids.shape, 0, position_ids[0])


def _by_ids(module: Any, position_ids: Tensor, forward: Callable[..., Tensor], given: Any) -> Tensor:
    """Return M2M100's sinusoids; the batch's positions leave padding out, as the module does."""
    needed = int(position_ids.max()) + 1
    if needed > module.weights.size(0):
        module.make_weights(needed, module.embedding_dim, module.padding_idx)
    found: Tensor = module.weights[position_ids].detach()
    return found


def _decoder(positions: str, attention: str = "", pairs: bool = True) -> Family:
    """Return the family of an encoder-decoder, whose decoder may be used alone."""
    return Family(attention, positions=positions, numbered=_embedded, pairs=pairs)


def _numbered_by_ids(positions: str) -> Family:
    return Family(positions=positions, numbered=_by_ids, pairs=True)


# By model type, those that tests compare with one process.
FAMILIES: Mapping[str, Family] = {
    "bart": _decoder("BartLearnedPositionalEmbedding"),
    "big_bird": Family("BigBirdSelfAttention"),
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
    "musicgen_decoder": Family(positions="MusicgenSinusoidalPositionalEmbedding", numbered=_sinusoidal),
    "musicgen_melody_decoder": Family(
        positions="MusicgenMelodySinusoidalPositionalEmbedding", numbered=_sinusoidal
    ),
    "mt5": Family(pairs=True),
    "mvp": _decoder("MvpLearnedPositionalEmbedding", "MvpAttention"),
    "nemotron": Family(),
    "openai-gpt": Family("Attention", pattern=lambda *_: Causal()),
    "pegasus": _decoder("PegasusSinusoidalPositionalEmbedding"),
    "plbart": _decoder("PLBartLearnedPositionalEmbedding"),
    "rembert": Family("RemBertSelfAttention"),
    "roformer": Family(
        "RoFormerSelfAttention", positions="RoFormerSinusoidalPositionalEmbedding", numbered=_rotary_rows
    ),
    "stablelm": Family(),
    "seamless_m4t": _numbered_by_ids("SeamlessM4TSinusoidalPositionalEmbedding"),
    "seamless_m4t_v2": _numbered_by_ids("SeamlessM4Tv2SinusoidalPositionalEmbedding"),
    "t5": Family(pairs=True),
    "trocr": _decoder("TrOCRLearnedPositionalEmbedding", "TrOCRAttention", pairs=False),
    "umt5": Family(pairs=True),
    "whisper": _decoder("WhisperPositionalEmbedding", pairs=False),
    "xglm": Family("XGLMAttention"),
    "xlm": Family("MultiHeadAttention", pattern=lambda module, config: Causal() if config.causal else Full()),
}


def family_of(model: PreTrainedModel) -> Family | None:
    """Return what a ring must know of a model of `FAMILIES`; None for others, also of code from elsewhere."""
    known = type(model).__module__.startswith("transformers.models.")
    family = FAMILIES.get(model.config.model_type) if known else None
    alone = not getattr(model.config, "is_encoder_decoder", False)
    return family if family is not None and (alone or family.pairs) else None


def check_inputs(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Refuse a second sequence, and images, which these models put in front of each rank's tokens."""
    for name in ("encoder_hidden_states", "encoder_outputs", "pixel_values", "audio_codes"):
        if family_of(model) is not None and given.get(name) is not None:
            raise RingConfigError(
                f"{type(model).__name__}: expected one sequence of tokens, got {name} beside it, which a ring"
                " does not cut; leave it out, or embed it yourself and pass inputs_embeds through"
                " engine.ring.shard_batch"
            )


@dataclass(frozen=True)
class _ModuleAttention:
    """Know of the attention of one call of a module."""

    module: nn.Module
    config: Any  # the model's
    family: Family
    sharding: BatchSharding
    mask: LayerMask | None
    samples: int  # B

    def __call__(self, scores: WrittenScores, value: Tensor) -> Tensor:
        """Return the ring's attention [..., S, D], with the leading dimensions of the scores."""
        family, mask = self.family, self.mask
        if family.pattern is not None:
            mask = LayerMask(family.pattern(self.module, self.config))
        if mask is None or scores.masked != (family.pattern is not None):
            raise _unexpected(self.module, "does not mask the scores as its class is known to do")
        changed = None
        if scores.bias is not None:
            assert family.bias is not None
            changed = family.bias(self.module, scores.bias)
            if isinstance(changed, RoundedAlibi) and self.sharding.groups:
                raise RingPatternError(
                    f"{type(self.module).__name__}: expected no documents beside config.alibi, got some: it"
                    " is rounded to bfloat16 by the place of a key in its document, which no rank knows;"
                    ' set "documents": false, or take a model with rotary positions'
                )
        # Models compute scores in float32 where a kernel does so by itself.
        query, key = (self._with_heads(x).to(value.dtype) for x in (scores.query, scores.key))
        out_BSHD, _ = ALL_ATTENTION_FUNCTIONS[NAME](
            self.module, query, key, self._with_heads(value), mask, scaling=scores.scale,
            dropout=scores.dropout, score_mod=changed, **{SHARDING: self.sharding},
        )  # fmt: skip
        found: Tensor = out_BSHD.transpose(1, 2)
        return found.reshape(*scores.shape[:-1], value.shape[-1])

    def _with_heads(self, x: Tensor) -> Tensor:
        """Return [B, H, S, D] of itself or of [B * H, S, D]."""
        return x if x.ndim == 4 else x.unflatten(0, (self.samples, -1))


@dataclass(frozen=True, eq=False)
class WrittenScores:
    """Stand for the scores of queries and keys while a module computes attention of them."""

    # Not a subclass of Tensor: there are no numbers in it, and nothing may take it for some.

    attend: _ModuleAttention
    query: Tensor  # [..., S, D]
    key: Tensor  # [..., K, D]
    shape: torch.Size  # [..., S, K]
    scale: float = 1.0
    bias: float | None = None  # what the family's bias is multiplied by; None: none was added
    masked: bool = False  # by the mask that the module makes of its own
    is_normalized: bool = False  # by softmax
    dropout: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def device(self) -> torch.device:
        return self.query.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def view(self, *sizes: int) -> WrittenScores:
        known = math.prod(size for size in sizes if size >= 0)
        shape = torch.Size(math.prod(self.shape) // known if size < 0 else size for size in sizes)
        if shape[-2:] != self.shape[-2:] or math.prod(shape) != math.prod(self.shape):
            raise _unexpected(self.attend.module, f"views scores {list(self.shape)} as {list(sizes)}")
        return replace(self, shape=shape)

    def to(self, *_: Any, **__: Any) -> WrittenScores:
        return self  # the kernel computes scores in float32 whatever is asked for

    float = type_as = to

    def masked_fill_(self, mask: Tensor, value: Any) -> WrittenScores:
        object.__setattr__(self, "masked", self.masked_fill(mask, value).masked)
        return self

    def masked_fill(self, mask: Tensor, value: Any) -> WrittenScores:
        if self.attend.family.pattern is None or self.is_normalized:
            raise _unexpected(self.attend.module, f"masks scores by a tensor {list(mask.shape)}")
        return replace(self, masked=True)

    def __mul__(self, factor: Any) -> WrittenScores:
        if isinstance(factor, Tensor) and factor.numel() != 1:
            return self.masked_fill(factor, 0)  # GPT's causal mask of zeros and ones
        number = float(factor)
        if self.is_normalized:
            raise _unexpected(self.attend.module, "multiplies what softmax returned")
        return replace(
            self, scale=self.scale * number, bias=None if self.bias is None else self.bias * number
        )

    def __truediv__(self, divisor: Any) -> WrittenScores:
        return self * (1.0 / float(divisor))

    def __add__(self, term: Any) -> WrittenScores:
        if term is None:
            return self  # a mask, which the module was not given
        if self.masked and isinstance(term, Tensor):
            return self  # of the mask, too: what is added to hidden scores
        if self.attend.family.bias is None or self.bias is not None or self.is_normalized:
            raise _unexpected(self.attend.module, "adds a term to the scores")
        return replace(self, bias=1.0)

    __rmul__, __radd__ = __mul__, __add__

    def softmax(self, *_: Any, **__: Any) -> WrittenScores:
        return replace(self, is_normalized=True)

    def __matmul__(self, value: Tensor) -> Tensor:
        if not self.is_normalized:
            raise _unexpected(self.attend.module, "multiplies scores by values without softmax")
        return self.attend(self, value)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note what a function of torch does to scores, or raise."""
        given, named = list(args), dict(kwargs or {})
        scores: WrittenScores = next(x for x in (*given, *named.values()) if isinstance(x, WrittenScores))
        match getattr(function, "__name__", ""), given:
            case "softmax", _:
                return scores.softmax()
            case "dropout", _:
                rate = given[1] if len(given) > 1 else named.get("p", 0.5)
                is_on = given[2] if len(given) > 2 else named.get("training", True)
                return replace(scores, dropout=float(rate) if is_on else 0.0)
            case "matmul" | "bmm" | "__matmul__", [WrittenScores(), Tensor() as value]:
                return scores @ value
            case "where", [Tensor() as mask, WrittenScores(), value]:
                return scores.masked_fill(mask, value)
            case "masked_fill", [WrittenScores(), Tensor() as mask, value]:
                return scores.masked_fill(mask, value)
            case "expand_as", [Tensor() as mask, WrittenScores()]:
                return mask
        raise _unexpected(
            scores.attend.module, f"calls {getattr(function, '__name__', function)} on its scores"
        )


def _unexpected(module: nn.Module, what: str) -> RingPatternError:
    return RingPatternError(
        f"{type(module).__name__}: expected attention as ds_ring knows it written out in this class, got"
        f" a module of transformers {transformers.__version__} that {what}, which no ring computes; install a"
        " version of transformers that ds_ring allows, or take a model of another type"
    )


class _Operators(TorchFunctionMode):
    """Return `WrittenScores` for the product of queries and keys: [Note: attention that is written out]."""

    def __init__(self, attend: _ModuleAttention) -> None:
        super().__init__()
        self._attend = attend
        self._zeros: Tensor | None = None
        self.scores: WrittenScores | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if any(isinstance(x, WrittenScores) for x in (*args, *named.values())):
            return WrittenScores.__torch_function__(func, types, args, named)
        name = getattr(func, "__name__", "")
        if self.scores is not None:
            return func(*args, **named)
        if name == "zeros" and len(args) == 3:  # GPT-NeoX Japanese: to add scores to; no room is needed
            self._zeros = func((), **named).expand(args)
            return self._zeros
        if name in ("matmul", "bmm", "__matmul__") and args[0].ndim >= 3 and args[1].ndim >= 3:
            return self._product(*args)
        if name == "baddbmm":
            first, batch1, batch2 = (*args, *(named[key] for key in ("batch1", "batch2") if key in named))
            scores = self._product(batch1, batch2) * named.get("alpha", 1.0)
            return scores if first is self._zeros else scores + first
        return func(*args, **named)

    def _product(self, query: Tensor, key_transposed: Tensor) -> WrittenScores:
        shape = torch.Size((*query.shape[:-1], key_transposed.shape[-1]))
        self.scores = WrittenScores(self._attend, query, key_transposed.transpose(-1, -2), shape)
        return self.scores


def _asks_interface(kind: type[nn.Module]) -> bool:
    """Return whether a class hands its attention to transformers' interface (GPT-J's, from 5.24 on)."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(kind.forward).__code__.co_names


def parts_of(model: nn.Module) -> list[tuple[PreTrainedModel, Family, nn.Module]]:
    """Return the modules inside `model` that a family names, each once."""
    found: dict[int, tuple[PreTrainedModel, Family, nn.Module]] = {}
    for part in (part for part in model.modules() if isinstance(part, PreTrainedModel)):
        family = family_of(part)
        for module in part.modules() if family is not None else ():
            assert family is not None
            kind = type(module)
            if kind.__name__ == family.positions or (
                kind.__name__ == family.attention and not _asks_interface(kind)
            ):
                found.setdefault(id(module), (part, family, module))
    return list(found.values())


def around_attention(
    model: PreTrainedModel,
    family: Family,
    module: nn.Module,
    batches: RecentBatches,
    of_encoder: bool = False,
) -> SimpleNamespace:
    """Return what runs in place of the forward of a module that writes attention out."""

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if model.config._attn_implementation != NAME:
            return forward(*args, **kwargs)  # engine.ring.off()
        if torch.compiler.is_compiling():
            raise RingConfigError(
                f"{type(module).__name__} writes its attention out, which a compiled model does not do on a"
                " ring; do not compile it"
            )
        given = (*args, *kwargs.values())
        mask = next((x for x in given if isinstance(x, LayerMask)), None)
        if mask is None and batches.current.cross is not None:  # only the decoder's own attention has one
            mask = LayerMask(Full(), batches.current.encoder if of_encoder else batches.current)
        sharding = batches.current if mask is None or mask.sharding is None else mask.sharding
        samples = next(x for x in given if isinstance(x, Tensor)).shape[0]
        operators = _Operators(_ModuleAttention(module, model.config, family, sharding, mask, samples))
        with operators:
            output = forward(
                *(None if x is mask and mask is not None else x for x in args),
                **{key: None if x is mask and mask is not None else x for key, x in kwargs.items()},
            )
        if operators.scores is None:
            raise _unexpected(module, "computes no product of queries and keys")
        if isinstance(output, tuple | list):
            return type(output)(None if isinstance(x, WrittenScores) else x for x in output)
        return output

    return SimpleNamespace(around_forward=around)


def told_layer(batches: RecentBatches, of_encoder: bool = False) -> SimpleNamespace:
    """Return the hook by which a layer's mask knows its batch, also when the layer is run again.

    With `of_encoder` it is a layer of the encoder of an encoder-decoder.
    """

    # Hooks of a layer run outside of the checkpointed function, which keeps the arguments of the first run.
    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def told(x: Any) -> Any:
            sharding = batches.current.encoder if of_encoder else batches.current
            return replace(x, sharding=sharding) if isinstance(x, LayerMask) else x

        return tuple(map(told, args)), {key: told(x) for key, x in kwargs.items()}

    return SimpleNamespace(before_forward=before)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the models of `FAMILIES` inside `model`."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and family_of(part)]
    layers = {id(layer): layer for part in parts for layer in part.modules()}
    return [layer for layer in layers.values() if isinstance(layer, GradientCheckpointingLayer)]


def around_positions(
    model: PreTrainedModel, family: Family, module: nn.Module, position_ids: Callable[[], Tensor | None]
) -> SimpleNamespace:
    """Return what runs in place of the forward of a module that numbers tokens by itself."""

    def around(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        noted = position_ids()
        if model.config._attn_implementation != NAME or noted is None:
            return forward(*args, **kwargs)
        assert family.numbered is not None
        return family.numbered(module, noted, forward, args[0])

    return SimpleNamespace(around_forward=around)

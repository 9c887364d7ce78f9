"""Models of transformers that compute attention eagerly in their own code, or number their own tokens.

Such a model computes softmax(q @ k.T * scale + mask) @ v in its attention modules, and not through
transformers' attention interface. `FAMILIES` has a row for each model type that is exact on a ring; a new
family is a row here.

[Note: eager attention]
While an attention module runs, `_Operators` returns an `EagerScores` for the product of queries and keys. It
holds no scores. It records what the module does to them (a scale, a bias, a mask), and its product with the
values is the ring's attention. So projections, rotary embeddings and norms are the module's own. An operation
that is not recorded raises an error. The module gets no mask; what the mask hides is the layer's pattern.

Shapes: B samples, H query heads, G key/value heads, S local tokens, K keys, D head dim.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.integrations.adapter import patch
from ds_ring.integrations.deepspeed.batch import SHARDING
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.transformers.attention_name import NAME
from ds_ring.integrations.transformers.checks import OWN_TOKENS, cannot_run, refuse_other_inputs
from ds_ring.integrations.transformers.layer_masks import LayerMask
from ds_ring.integrations.transformers.model import MODEL, TABLE
from ds_ring.integrations.transformers.variants.variant import INTERFACE, POSITIONS, Request, Variant
from ds_ring.masks.catalog import Causal, Full, SlidingWindow
from ds_ring.masks.mask_mod import Alibi, ScoreFunction
from ds_ring.masks.pattern import Pattern

if TYPE_CHECKING:
    from ds_ring.integrations.transformers.model_adapter import ModelAdapter
    from ds_ring.integrations.transformers.model_call import ModelCall

_patch = partial(patch, when="the attention bypasses transformers' interface")
_attention_patch = _patch(
    TABLE.given("eager", "torch.nn.Module"), "forward", stage="around_forward", feature="eager attention",
    reason="computes the module's own softmax(q @ k.T) @ v on the ring",
)  # fmt: skip
_layer_patch = _patch(
    TABLE.given("checkpointed", "torch.nn.Module"), stage="before_forward", feature="eager attention.layer",
    reason="the mask of a layer knows its batch, also when a checkpointed layer runs again",
)  # fmt: skip
_call_patch = _patch(
    MODEL, stage="before_forward", feature="own positions", reason="notes the positions of the batch"
)
_positions_patch = _patch(
    TABLE.given("numbers", "torch.nn.Module"), "forward", stage="around_forward", feature="own positions",
    reason="numbers tokens by the batch's positions",
)  # fmt: skip

# Of an attention module, and what the bias is multiplied by after it was added: the bias of a pair.
Bias = Callable[[Any, float], ScoreFunction]
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
    """

    attention: str = ""
    pattern: Callable[[Any, Any], Pattern] | None = None
    bias: Bias | None = None
    positions: str = ""
    numbered: Numbered | None = None


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


def _decoder(positions: str, attention: str = "") -> Family:
    """Return the family of an encoder-decoder, whose decoder may be used alone."""
    return Family(attention, positions=positions, numbered=_embedded)


def _numbered_by_ids(positions: str) -> Family:
    return Family(positions=positions, numbered=_by_ids)


# By model type, those that tests compare with one process: tests/dist/test_families.py.
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
    "trocr": _decoder("TrOCRLearnedPositionalEmbedding", "TrOCRAttention"),
    "whisper": _decoder("WhisperPositionalEmbedding"),
    "xglm": Family("XGLMAttention"),
    "xlm": Family("MultiHeadAttention", pattern=lambda module, config: Causal() if config.causal else Full()),
}


def family_of(model: PreTrainedModel) -> Family | None:
    """Return the row of a model of `FAMILIES`; None for others, also of code from elsewhere."""
    known = type(model).__module__.startswith("transformers.models.")
    return FAMILIES.get(model.config.model_type) if known else None


# By model type, what a model that computes attention eagerly does with other tokens.
_OTHERWISE = {
    "cpmant": "it puts a prompt in front of the tokens it is given, and learns a bias for each distance",
    "deberta": "its scores have terms of learned relative positions, whose tables need a gradient",
    "deberta-v2": "its scores have terms of learned relative positions, whose tables need a gradient",
    "mpnet": "its scores have a learned bias for each distance, whose table needs a gradient",
    "prophetnet": "it predicts several tokens ahead, from states that attend by learned bucketed distances",
    "reformer": "it sorts tokens into buckets by random projections, and attends within chunks of them",
    "xlnet": "it adds scores of learned relative positions, for which it shifts the scores of all keys",
}


class EagerAttention(Variant):
    """Models that compute attention in their own code, or number their tokens by themselves."""

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, PreTrainedModel) and family_of(module) is not None

    def refuse(self, model: PreTrainedModel, request: Request) -> None:
        config, family = model.config.get_text_config(), family_of(model)
        if config.model_type in _OTHERWISE:
            raise cannot_run(model, f"{_OTHERWISE[config.model_type]}, {OWN_TOKENS}")
        if request.as_is and getattr(config, "alibi", False):
            raise cannot_run(
                model,
                "config.alibi adds a distance to each score, which the backend does not compute; use a model"
                " with rotary or learned positions",
            )
        pair = getattr(model.config, "is_encoder_decoder", False)
        draws = config.model_type == "big_bird" or (config.model_type == "bigbird_pegasus" and pair)
        if draws and config.attention_type == "block_sparse":
            raise cannot_run(
                model,
                'config.attention_type "block_sparse" draws blocks of keys at random for each length; set it'
                ' to "original_full", if that is your model (up to 1024 tokens BigBird takes it by itself)',
            )
        if family is None or request.as_is:
            return
        if family.positions not in ("", *(type(part).__name__ for part in model.modules())):
            raise cannot_run(
                model,
                f"it numbers its tokens otherwise than by {family.positions}, and a rank knows its own tokens"
                " only; choose these positions in its configuration (TrOCR: use_learned_position_embeddings)",
            )

    def covers(self, model: PreTrainedModel, as_is: bool) -> set[str]:
        return {INTERFACE, POSITIONS} if self.matches(model) and not as_is else set()

    def advice(self, kind: type[PreTrainedModel]) -> str | None:
        if getattr(kind.config_class, "model_type", None) not in FAMILIES:
            return None
        return (
            "build it without attn_implementation, and start with ds_ring.initialize(model=...), which"
            " computes its attention on the ring"
        )

    def makes_full_masks(self, model_type: str) -> bool:
        return model_type in FAMILIES

    def positioned(self, model: PreTrainedModel) -> Iterator[nn.Module]:
        yield from (module for _, _, module in parts_of(model))

    def install(self, adapter: ModelAdapter) -> None:
        if adapter.rewritten or not any(map(self.matches, adapter.model.modules())):
            return
        numbered = _NumberedCall(adapter)
        if self.matches(adapter.model) and adapter.call.one_sequence:
            adapter.apply(numbered.hook(), model=adapter.model)
        for part, family, module in parts_of(adapter.model):
            if type(module).__name__ == family.positions:
                around = around_positions(part, family, module, partial(numbered.position_ids, module))
                adapter.apply(around, numbers=module)
            else:
                adapter.apply(around_attention(part, family, module, adapter.call), eager=module)
        for layer in layers_of(adapter.model):
            adapter.apply(tell_mask(adapter.call, layer), checkpointed=layer)


@dataclass(frozen=True)
class _ModuleAttention:
    """Know of the attention of one call of a module."""

    module: nn.Module
    config: Any  # the model's
    family: Family
    sharding: BatchSharding
    mask: LayerMask | None
    samples: int  # B

    def __call__(self, scores: EagerScores, value: Tensor) -> Tensor:
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
class EagerScores:
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

    def view(self, *sizes: int) -> EagerScores:
        known = math.prod(size for size in sizes if size >= 0)
        shape = torch.Size(math.prod(self.shape) // known if size < 0 else size for size in sizes)
        if shape[-2:] != self.shape[-2:] or math.prod(shape) != math.prod(self.shape):
            raise _unexpected(self.attend.module, f"views scores {list(self.shape)} as {list(sizes)}")
        return replace(self, shape=shape)

    def to(self, *_: Any, **__: Any) -> EagerScores:
        return self  # the kernel computes scores in float32 whatever is asked for

    float = type_as = to

    def masked_fill_(self, mask: Tensor, value: Any) -> EagerScores:
        object.__setattr__(self, "masked", self.masked_fill(mask, value).masked)
        return self

    def masked_fill(self, mask: Tensor, value: Any) -> EagerScores:
        if self.attend.family.pattern is None or self.is_normalized:
            raise _unexpected(self.attend.module, f"masks scores by a tensor {list(mask.shape)}")
        return replace(self, masked=True)

    def __mul__(self, factor: Any) -> EagerScores:
        if isinstance(factor, Tensor) and factor.numel() != 1:
            return self.masked_fill(factor, 0)  # GPT's causal mask of zeros and ones
        number = float(factor)
        if self.is_normalized:
            raise _unexpected(self.attend.module, "multiplies what softmax returned")
        return replace(
            self, scale=self.scale * number, bias=None if self.bias is None else self.bias * number
        )

    def __truediv__(self, divisor: Any) -> EagerScores:
        return self * (1.0 / float(divisor))

    def __add__(self, term: Any) -> EagerScores:
        if term is None:
            return self  # a mask, which the module was not given
        if self.masked and isinstance(term, Tensor):
            return self  # of the mask, too: what is added to hidden scores
        if self.attend.family.bias is None or self.bias is not None or self.is_normalized:
            raise _unexpected(self.attend.module, "adds a term to the scores")
        return replace(self, bias=1.0)

    __rmul__, __radd__ = __mul__, __add__

    def softmax(self, *_: Any, **__: Any) -> EagerScores:
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
        scores: EagerScores = next(x for x in (*given, *named.values()) if isinstance(x, EagerScores))
        match getattr(function, "__name__", ""), given:
            case "softmax", _:
                return scores.softmax()
            case "dropout", _:
                rate = given[1] if len(given) > 1 else named.get("p", 0.5)
                is_on = given[2] if len(given) > 2 else named.get("training", True)
                return replace(scores, dropout=float(rate) if is_on else 0.0)
            case "matmul" | "bmm" | "__matmul__", [EagerScores(), Tensor() as value]:
                return scores @ value
            case "where", [Tensor() as mask, EagerScores(), value]:
                return scores.masked_fill(mask, value)
            case "masked_fill", [EagerScores(), Tensor() as mask, value]:
                return scores.masked_fill(mask, value)
            case "expand_as", [Tensor() as mask, EagerScores()]:
                return mask
        raise _unexpected(
            scores.attend.module, f"calls {getattr(function, '__name__', function)} on its scores"
        )


def _unexpected(module: nn.Module, what: str) -> RingPatternError:
    return RingPatternError(
        f"{type(module).__name__}: expected the eager attention that ds_ring knows in this class, got"
        f" a module of transformers {transformers.__version__} that {what}, which no ring computes; install a"
        " version of transformers that ds_ring allows, or take a model of another type"
    )


class _Operators(TorchFunctionMode):
    """Return `EagerScores` for the product of queries and keys: [Note: eager attention]."""

    def __init__(self, attend: _ModuleAttention) -> None:
        super().__init__()
        self._attend = attend
        self._zeros: Tensor | None = None
        self.scores: EagerScores | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if any(isinstance(x, EagerScores) for x in (*args, *named.values())):
            return EagerScores.__torch_function__(func, types, args, named)
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

    def _product(self, query: Tensor, key_transposed: Tensor) -> EagerScores:
        shape = torch.Size((*query.shape[:-1], key_transposed.shape[-1]))
        self.scores = EagerScores(self._attend, query, key_transposed.transpose(-1, -2), shape)
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
    model: PreTrainedModel, family: Family, module: nn.Module, call: ModelCall
) -> Callable[..., Any]:
    """Return what runs in place of the forward of a module that computes attention eagerly."""

    @_attention_patch
    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if model.config._attn_implementation != NAME:
            return forward(*args, **kwargs)  # engine.ring.off()
        if torch.compiler.is_compiling():
            raise RingConfigError(
                f"{type(module).__name__} computes attention in its own code, which a compiled model does not"
                " do on a ring; do not compile it"
            )
        given = (*args, *kwargs.values())
        mask = next((x for x in given if isinstance(x, LayerMask)), None)
        used = call.mask_of(module) if mask is None else mask
        sharding = None if used is None else used.sharding
        sharding = call.sharding_of(module) if sharding is None else sharding
        samples = next(x for x in given if isinstance(x, Tensor)).shape[0]
        operators = _Operators(_ModuleAttention(module, model.config, family, sharding, used, samples))
        with operators:
            output = forward(
                *(None if isinstance(x, LayerMask) else x for x in args),
                **{key: None if isinstance(x, LayerMask) else x for key, x in kwargs.items()},
            )
        if operators.scores is None:
            raise _unexpected(module, "computes no product of queries and keys")
        if isinstance(output, tuple | list):
            return type(output)(None if isinstance(x, EagerScores) else x for x in output)
        return output

    return around


def tell_mask(call: ModelCall, layer: nn.Module) -> Callable[..., Any]:
    """Return the hook by which a layer's mask knows its batch, also when the layer is run again."""

    # Hooks of a layer run outside of the checkpointed function, which keeps the arguments of the first run.
    @_layer_patch
    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def with_sharding(x: Any) -> Any:
            return replace(x, sharding=call.sharding_of(layer)) if isinstance(x, LayerMask) else x

        return tuple(map(with_sharding, args)), {key: with_sharding(x) for key, x in kwargs.items()}

    return before


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the models of `FAMILIES` inside `model`."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and family_of(part)]
    layers = {id(layer): layer for part in parts for layer in part.modules()}
    return [layer for layer in layers.values() if isinstance(layer, GradientCheckpointingLayer)]


class _NumberedCall:
    """Note the positions of a model's tokens, for the modules of it that number tokens by themselves."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._call, self._signature = adapter.call, adapter.call.signature
        self._noted: Tensor | None = None

    def hook(self) -> Callable[..., Any]:
        """Return the hook of the model, which runs behind that of its call."""

        @_call_patch
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            refuse_other_inputs(self._call.name, kwargs)
            given = dict(self._signature.bind_partial(*args, **kwargs).arguments) | kwargs
            ids = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
            position_ids = given.get("position_ids")
            if position_ids is None:  # in a generation
                self._noted = _positions_in(given[SHARDING], ids.device).expand(ids.shape[0], -1)
                return None
            self._noted = position_ids.expand(ids.shape[0], -1)  # XLM asks for each sample's
            return args, kwargs | {"position_ids": self._noted}

        return before

    def position_ids(self, module: nn.Module) -> Tensor | None:
        """Return the positions of the tokens that a module gets; None before the first call."""
        found = self._call.position_ids(module)
        return self._noted if found is None else found


def _positions_in(sharding: BatchSharding, device: torch.device) -> Tensor:
    """Return the positions of local tokens in the sequence, [S]; 0 for padding of the layout."""
    if sharding.is_replicated:
        found: Tensor = sharding.q_positions  # type: ignore[attr-defined]
        return found.to(device)
    slots = sharding.with_slots(device).slots
    assert slots is not None
    return slots.clamp_min(0)


def around_positions(
    model: PreTrainedModel, family: Family, module: nn.Module, position_ids: Callable[[], Tensor | None]
) -> Callable[..., Tensor]:
    """Return what runs in place of the forward of a module that numbers tokens by itself."""

    @_positions_patch
    def around(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        noted = position_ids()
        if model.config._attn_implementation != NAME or noted is None:
            return forward(*args, **kwargs)
        assert family.numbered is not None
        return family.numbered(module, noted, forward, args[0])

    return around

"""The object that replaces the scores of queries and keys while a module computes attention in its own code.

[Note: eager attention]
Such a module computes softmax(q @ k.T * scale + mask) @ v. While it runs, `ScoreOperators` returns an
`EagerScores` for the product of queries and keys. It holds no scores. It records what the module does to them
(a scale, a bias, a mask), and its product with the values is the ring's attention. So projections, rotary
embeddings and norms are the module's own. An operation that is not recorded raises an error. The module gets
no mask; what the mask hides is the layer's pattern.

Shapes: B samples, H query heads, S local tokens, K keys, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_ring.contrib.families.eager_attention.families import Family, RoundedAlibi
from ds_ring.data.batch import SHARDING
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.errors import RingPatternError
from ds_ring.models.attention_name import NAME
from ds_ring.models.layer_masks import LayerMask
from ds_ring.patterns.documents.pattern import Documents


@dataclass(frozen=True)
class ModuleAttention:
    """The attention of one call of a module."""

    module: nn.Module
    config: Any  # the model's
    family: Family
    sharding: BatchSharding
    mask: LayerMask | None
    samples: int  # B
    implementation: str  # that the model has without a ring: "eager", "sdpa"

    def __call__(self, scores: EagerScores, value: Tensor) -> Tensor:
        """Return the ring's attention [..., S, D], with the leading dimensions of the scores."""
        family, mask = self.family, self.mask
        if family.pattern is not None:
            mask = LayerMask(family.pattern(self.module, self.config))
        if mask is None or scores.masked != (family.pattern is not None):
            raise unexpected(self.module, "does not mask the scores as its class is known to do")
        changed = None
        if scores.bias is not None:
            assert family.bias is not None
            changed = family.bias(self.module, scores.bias, self.implementation)
            packed = any(isinstance(group.pattern, Documents) for group in self.sharding.groups)
            if isinstance(changed, RoundedAlibi) and packed:
                expected = "expected no documents beside config.alibi, got some"
                raise RingPatternError(f'{type(self.module).__name__}: {expected}; set "documents": false')
        # Models compute scores in float32 where a kernel does so by itself.
        query, key = (self._unflatten_heads(x).to(value.dtype) for x in (scores.query, scores.key))
        out_BSHD, _ = ALL_ATTENTION_FUNCTIONS[NAME](
            self.module, query, key, self._unflatten_heads(value), mask, scaling=scores.scale,
            dropout=scores.dropout, score_mod=changed, **{SHARDING: self.sharding},
        )  # fmt: skip
        out_BHSD: Tensor = out_BSHD.transpose(1, 2)
        return out_BHSD.reshape(*scores.shape[:-1], value.shape[-1])

    def _unflatten_heads(self, x: Tensor) -> Tensor:
        """Return [B, H, S, D] of itself or of [B * H, S, D]."""
        return x if x.ndim == 4 else x.unflatten(0, (self.samples, -1))


@dataclass(frozen=True, eq=False)
class EagerScores:
    """Replace the scores of queries and keys while a module computes attention of them."""

    # Not a subclass of Tensor: there are no numbers in it, and nothing may take it for some.

    attend: ModuleAttention
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
            raise unexpected(self.attend.module, f"views scores {list(self.shape)} as {list(sizes)}")
        return replace(self, shape=shape)

    def to(self, *_: Any, **__: Any) -> EagerScores:
        return self  # the kernel computes scores in float32 in any case

    float = type_as = to

    def masked_fill_(self, mask: Tensor, value: Any) -> EagerScores:
        object.__setattr__(self, "masked", self.masked_fill(mask, value).masked)
        return self

    def masked_fill(self, mask: Tensor, value: Any) -> EagerScores:
        if self.attend.family.pattern is None or self.is_normalized:
            raise unexpected(self.attend.module, f"masks scores by a tensor {list(mask.shape)}")
        return replace(self, masked=True)

    def __mul__(self, factor: Any) -> EagerScores:
        if isinstance(factor, Tensor) and factor.numel() != 1:
            return self.masked_fill(factor, 0)  # GPT's causal mask of zeros and ones
        number = float(factor)
        if self.is_normalized:
            raise unexpected(self.attend.module, "multiplies what softmax returned")
        return replace(
            self, scale=self.scale * number, bias=None if self.bias is None else self.bias * number
        )

    def __truediv__(self, divisor: Any) -> EagerScores:
        return self * (1.0 / float(divisor))

    def __add__(self, term: Any) -> EagerScores:
        if term is None:
            return self  # a mask, which the module was not given
        if self.masked and isinstance(term, Tensor):
            return self  # of the mask, too: a term of hidden scores
        if self.attend.family.bias is None or self.bias is not None or self.is_normalized:
            raise unexpected(self.attend.module, "adds a term to the scores")
        return replace(self, bias=1.0)

    __rmul__, __radd__ = __mul__, __add__

    def softmax(self, *_: Any, **__: Any) -> EagerScores:
        return replace(self, is_normalized=True)

    def __matmul__(self, value: Tensor) -> Tensor:
        if not self.is_normalized:
            raise unexpected(self.attend.module, "multiplies scores by values without softmax")
        return self.attend(self, value)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note what a function of torch does to scores, or raise."""
        positional, named = list(args), dict(kwargs or {})
        scores: EagerScores = next(x for x in (*positional, *named.values()) if isinstance(x, EagerScores))
        match getattr(function, "__name__", ""), positional:
            case "softmax", _:
                return scores.softmax()
            case "dropout", _:
                rate = positional[1] if len(positional) > 1 else named.get("p", 0.5)
                is_on = positional[2] if len(positional) > 2 else named.get("training", True)
                return replace(scores, dropout=float(rate) if is_on else 0.0)
            case "matmul" | "bmm" | "__matmul__", [EagerScores(), Tensor() as value]:
                return scores @ value
            case "where", [Tensor() as mask, EagerScores(), value]:
                return scores.masked_fill(mask, value)
            case "masked_fill", [EagerScores(), Tensor() as mask, value]:
                return scores.masked_fill(mask, value)
            case "expand_as", [Tensor() as mask, EagerScores()]:
                return mask
        raise unexpected(
            scores.attend.module, f"calls {getattr(function, '__name__', function)} on its scores"
        )


def unexpected(module: nn.Module, what: str) -> RingPatternError:
    return RingPatternError(
        f"{type(module).__name__}: expected the eager attention that ds_ring knows in this class, got"
        f" a module of transformers {transformers.__version__} that {what}, which no ring computes; install a"
        " version of transformers from 5.17 on, or take a model of another type"
    )


class ScoreOperators(TorchFunctionMode):
    """Return `EagerScores` for the product of queries and keys: [Note: eager attention]."""

    def __init__(self, attend: ModuleAttention) -> None:
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

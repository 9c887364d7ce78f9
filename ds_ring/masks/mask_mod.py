"""`MaskMod`: a FlexAttention mask function as a pattern. Owns its checks, and nothing of tiles or blocks.

Not in `schedule/`, where all other patterns are: what a function shows is evaluated with tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ring.checked_numbers import true_or_false
from ds_ring.errors import RingPatternError, shown
from ds_ring.masks.mask_rule import MaskFunction, PairMask
from ds_ring.masks.mask_trace import (
    MaskFacts,
    captured_values,
    evaluate,
    evaluate_pairs,
    name_of,
    refusal,
    trace_mask,
)
from ds_ring.masks.pattern import Pattern

_SAMPLED = 64  # positions at which a mask is tried before the first pass, beside the first and the last


@dataclass(frozen=True)
class MaskMod(Pattern):
    """Any FlexAttention `mask_mod` in global positions; torch's `and_masks` and `or_masks` compose them.

    It is evaluated as FlexAttention does: with 0-d tensors, by vmap over samples, heads, queries and keys.
    One that depends on the head is asked head by head, with the head's number among all query heads of the
    model; one that depends on the batch is asked sample by sample, numbered in this rank's batch.

    The function is a value: ranks compare its code and what it captured, numbers and tensors, before
    anything is sent. Whoever changes what it captured makes a new MaskMod.

    What the function hides inside a block is not known to the plan: every pair counts as work, and every key
    travels, unless another pattern composed with `&` says otherwise (`MaskMod(f) & SlidingWindow(1024)`).

    Attributes:
        function: `mask_mod(batch, head, q_position, k_position) -> bool`, of int64 tensors without
            dimensions.
        is_known_causal: set it if the function never shows a key after its query; with `&` Causal() it
            need not be.

    Raises:
        RingPatternError: no function; at its first use, a function that raises, draws random numbers, writes
            to what it captured, or returns no boolean for a pair.
    """

    function: MaskFunction
    is_known_causal: bool = False
    _tried: set[tuple[int, int, int, str]] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise RingPatternError(
                "MaskMod: expected a mask_mod(batch, head, q_position, k_position), got"
                f" {shown(self.function)}; pass a function"
            )
        true_or_false(self.is_known_causal, "MaskMod: is_known_causal", RingPatternError)
        try:
            hash(self.function)
        except Exception as error:
            raise RingPatternError(
                f"MaskMod: expected a hashable function, got {name_of(self.function)}, whose hash raises"
                f" {type(error).__name__}; wrap it into a function"
            ) from error

    @cached_property
    def facts(self) -> MaskFacts:
        """What a trace says of the function; made when first asked for.

        Raises:
            RingPatternError: it is no mask.
        """
        self.__dict__["_captured"] = list(captured_values(self.function))
        return trace_mask(self.function)

    @property
    def is_causal(self) -> bool:
        return self.is_known_causal

    @property
    def masks(self) -> tuple[PairMask, ...]:
        assert not self.facts.by_head, "a mask that depends on heads: bind it first"
        return (AskedMask(self),)

    def bind(self, heads: tuple[int, ...], query_heads: int, kv_heads: int) -> Pattern:
        return BoundMaskMod(self, heads) if self.facts.by_head else self

    def check(self, tokens: int, samples: int, query_heads: int, device: str) -> None:
        facts = self.facts
        if facts.tensors_changed() or self.__dict__["_captured"] != list(captured_values(self.function)):
            raise RingPatternError(
                f"MaskMod {name_of(self.function)}: expected what it captured to stay as it was at its first"
                " use, got other values; make a new MaskMod for a new mask"
            )
        key = (tokens, samples, query_heads, device)
        if key not in self._tried:
            some = torch.linspace(0, tokens - 1, min(_SAMPLED, tokens), device=device).long()
            evaluate(self.function, facts, samples, tuple(range(query_heads)), some, some)
            self._tried.add(key)

    def multiplicity(self, head: int, query_heads: int, kv_heads: int, q: Any, k: Any) -> Any:
        if self.facts.by_batch:
            raise refusal(self.function, "a mask that is the same for all samples here", "one that is not")
        shape = np.broadcast_shapes(q.shape, k.shape)
        flat = [torch.from_numpy(np.maximum(np.broadcast_to(x, shape), 0).reshape(-1)) for x in (q, k)]
        if not flat[0].numel():
            return np.zeros(shape, dtype=np.int64)
        return evaluate_pairs(self.function, head, *flat).numpy().reshape(shape).astype(np.int64)

    def __str__(self) -> str:
        """The function by name, with a digest of its code and of what it captured."""
        try:
            contents = f", contents {self.facts.contents}"
        except RingPatternError:
            contents = ""
        return f"MaskMod({name_of(self.function)}{contents})"


@dataclass(frozen=True)
class BoundMaskMod(Pattern):
    """A mask that depends on heads, for those that share a K/V head.

    Attributes:
        whole: the pattern of all heads.
        heads: their numbers among all query heads.
    """

    whole: MaskMod
    heads: tuple[int, ...]

    @property
    def is_causal(self) -> bool:
        return self.whole.is_causal

    @property
    def masks(self) -> tuple[PairMask, ...]:
        return (AskedMask(self.whole, self.heads),)

    def __str__(self) -> str:
        return f"{self.whole} of heads {list(self.heads)}"


@dataclass(frozen=True)
class AskedMask:
    """The `PairMask` of a function: see `masks/mask_rule.py`.

    Attributes:
        whole: the pattern.
        heads: numbers of the query heads it is asked for; empty where all are alike.
    """

    whole: MaskMod
    heads: tuple[int, ...] = ()

    @property
    def function(self) -> MaskFunction:
        return self.whole.function

    def __call__(self, samples: int, q: Tensor, k: Tensor) -> Tensor:
        return evaluate(self.whole.function, self.whole.facts, samples, self.heads, q, k)

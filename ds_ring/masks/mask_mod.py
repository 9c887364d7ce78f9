"""`MaskMod`: a FlexAttention mask function as a pattern. Owns its checks, and nothing of tiles or blocks.

The other patterns are labels and bands, in numpy; what a function shows is evaluated with tensors.

[Note: a mask function is a branch]
A `MaskMod` is one branch with a predicate. The predicate is evaluated inside blocks of 256 positions
(`joins.py`). The trace says whether it depends on the head or the batch, and its digest is part of the header
that ranks compare ([Note: the trace of a mask] in mask_graph.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ds_ring.checked_numbers import true_or_false
from ds_ring.errors import RingPatternError, shown
from ds_ring.masks.branches import Branch
from ds_ring.masks.mask_graph import name_of, refusal
from ds_ring.masks.mask_trace import MaskFacts, captured_values, evaluate, evaluate_pairs, trace_mask
from ds_ring.masks.pair_mask import MaskFunction
from ds_ring.masks.pattern import Head, Pattern
from ds_ring.masks.slot_ranges import IntArray

_SAMPLED = 64  # positions at which a mask is tried before the first pass, beside the first and the last


@dataclass(frozen=True)
class MaskMod(Pattern):
    """Attend by a FlexAttention `mask_mod` of global positions; torch's `and_masks`, `or_masks` compose it.

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
        # plans are cached by pattern, so it has to hash
        try:
            hash(self.function)
        except Exception as error:
            raise RingPatternError(
                f"MaskMod: expected a hashable function, got {name_of(self.function)}, whose hash raises"
                f" {type(error).__name__}; wrap it into a function"
            ) from error

    @cached_property
    def facts(self) -> MaskFacts:
        """Return what a trace says of the function; made when first asked for.

        Raises:
            RingPatternError: it is no mask.
        """
        # the dataclass is frozen; `AskedMask.check` compares with it later
        self.__dict__["_captured"] = list(captured_values(self.function))
        return trace_mask(self.function)

    def branches(self, head: Head) -> tuple[Branch, ...]:
        return (Branch(masks=(AskedMask(self, (head.number,)),)),)

    def __str__(self) -> str:
        """Return the function by name, with a digest of its code and of what it captured."""
        try:
            contents = f", contents {self.facts.contents}"
        # the first use refuses the function; a text of it must not
        except RingPatternError:
            contents = ""
        return f"MaskMod({name_of(self.function)}{contents})"


@dataclass(frozen=True)
class AskedMask:
    """Represent a function as a `PairMask`: see `masks/pair_mask.py`.

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

    @property
    def is_causal(self) -> bool:
        return self.whole.is_known_causal

    def for_heads(self, heads: tuple[int, ...]) -> AskedMask:
        """Ask for other heads; for none in particular where the function does not depend on them."""
        return AskedMask(self.whole, heads if self.whole.facts.by_head else ())

    def check(self, tokens: int, samples: int, query_heads: int, device: str) -> None:
        """Try the function at some positions, once for each kind of call; see `Pattern.check`."""
        whole, facts, function = self.whole, self.whole.facts, self.whole.function
        if facts.tensors_changed() or whole.__dict__["_captured"] != list(captured_values(function)):
            raise RingPatternError(
                f"MaskMod {name_of(function)}: expected what it captured to stay as it was at its first"
                " use, got other values; make a new MaskMod for a new mask"
            )
        key = (tokens, samples, query_heads, device)
        if key not in whole._tried:
            # spread over the whole sequence, first and last position included
            some = torch.linspace(0, tokens - 1, min(_SAMPLED, tokens), device=device).long()
            evaluate(function, facts, samples, tuple(range(query_heads)), some, some)
            whole._tried.add(key)

    def pairs(self, q: IntArray, k: IntArray) -> IntArray:
        """Return bool of pairs of positions, for the first of the heads.

        Raises:
            RingPatternError: a function that differs from sample to sample.
        """
        function = self.whole.function
        if self.whole.facts.by_batch:
            raise refusal(function, "a mask that is the same for all samples here", "one that is not")
        if not q.size:
            return np.zeros(q.shape, dtype=bool)
        ours, theirs = (torch.from_numpy(x.flatten()) for x in (q, k))  # copies: q and k may be read-only
        found: IntArray = evaluate_pairs(function, self.heads[0], ours, theirs).numpy().reshape(q.shape)
        return found

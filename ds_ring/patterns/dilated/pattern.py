"""Dilated attention (LongNet) as a pattern: a sum of branches, each of segments and residues."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ds_ring.errors import RingPatternError, check_bool, check_whole_number, shown
from ds_ring.masks.branches import Branch, match_labels
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.masks.tiles import UNBOUNDED
from ds_ring.patterns.dilated.residues import Residue

HEAD_OFFSETS = ("paper", "paper_kv", "torchscale", "zero")


@dataclass(frozen=True)
class Dilated(Pattern):
    """Dilated attention (Ding et al. 2023, LongNet): branches of (segment length, dilation rate).

    LongNet mixes its branches by their softmax denominators. That equals a single softmax over all keys with
    log m added to the score, m the number of branches in which a pair takes part (`joins.py`).

    A pair takes part in branch i if both positions are in the same segment of length w_i, both have offset
    o(h, i) modulo r_i in it, and, if causal, the key is not after the query.

    Attributes:
        segment_lengths: w_i in tokens, strictly increasing; longer than the sequence means all of it.
        dilation_rates: r_i, strictly increasing, one for each segment length.
        causal: no key after its query.
        head_offsets: "paper": h mod r_i; "paper_kv": the same with the K/V head; "torchscale":
            h // ceil(H / r_i); "zero".

    Raises:
        RingPatternError: lists of different length, not positive, not increasing; unknown offset rule.
    """

    made_in_graphs = True
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    causal: bool = True
    head_offsets: str = "paper"

    def __post_init__(self) -> None:
        for name in ("segment_lengths", "dilation_rates"):
            values = _whole_numbers(getattr(self, name), name)
            object.__setattr__(self, name, values)
            if any(b <= a for a, b in itertools.pairwise(values)):
                raise RingPatternError(
                    f"Dilated: {name}: expected strictly increasing numbers, got {list(values)}"
                )
        if len(self.segment_lengths) != len(self.dilation_rates):
            raise RingPatternError(
                f"Dilated: expected {len(self.segment_lengths)} dilation rates, got"
                f" {len(self.dilation_rates)}"
            )
        check_bool(self.causal, "Dilated: causal", RingPatternError)
        if not isinstance(self.head_offsets, str) or self.head_offsets not in HEAD_OFFSETS:
            names, got = ", ".join(HEAD_OFFSETS), shown(self.head_offsets)
            raise RingPatternError(f"Dilated: head_offsets: expected one of {names}, got {got}")

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        offsets, least = self.offsets(*head), 0 if self.causal else -UNBOUNDED
        numbers = zip(self.segment_lengths, self.dilation_rates, offsets, strict=True)
        return tuple(match_labels(Residue(w, r, o), least) for w, r, o in numbers)

    def offsets(self, head: int, query_heads: int, kv_heads: int) -> tuple[int, ...]:
        """Return o(h, i) of every branch."""
        if self.head_offsets == "zero":
            return (0,) * len(self.dilation_rates)
        if self.head_offsets == "torchscale":
            # ceil(H / r) consecutive heads share an offset
            return tuple(head // -(-query_heads // rate) for rate in self.dilation_rates)
        # by the K/V head, all query heads of a group read the same tokens
        index = head if self.head_offsets == "paper" else head // (query_heads // kv_heads)
        return tuple(index % rate for rate in self.dilation_rates)


def _whole_numbers(numbers: object, name: str) -> tuple[int, ...]:
    """Return the positive integers of a list, or raise RingPatternError."""
    if not isinstance(numbers, (list, tuple)) or not numbers:
        raise RingPatternError(f"Dilated: {name}: expected a list of positive integers, got {shown(numbers)}")
    try:
        return tuple(check_whole_number(x, name, RingPatternError) for x in numbers)
    except RingPatternError:
        text = shown(list(numbers)).removeprefix("list ")
        raise RingPatternError(f"Dilated: {name}: expected positive integers, got {text}") from None

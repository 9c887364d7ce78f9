"""Mask functions in the manner of attention-gym, with their dense truth by FlexAttention's own create_mask.

Owns the table that tests of `MaskMod` go through, on every kernel and layout. A new mask is one row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_mask, noop_mask, or_masks

from ds_ring import Causal, MaskMod, SlidingWindow
from ds_ring.masks.pattern import Pattern
from tests.cases import Shape, document_ids, tensors
from tests.reference import Dense, attend_by_counts

MaskFunction = Callable[[Any, Any, Any, Any], Any]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def every_third(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k % 3 == 0


def sliding_window(size: int) -> MaskFunction:
    return and_masks(causal, lambda b, h, q, k: q - k <= size)


def prefix_lm(length: int) -> MaskFunction:
    return or_masks(lambda b, h, q, k: k < length, causal)


def documents(ids: Tensor, inner: MaskFunction = causal) -> MaskFunction:
    """attention-gym's generate_doc_mask_mod: the inner mask in positions of the document."""
    offsets = torch.cat(
        [torch.zeros(1, dtype=torch.long), torch.unique_consecutive(ids, return_counts=True)[1].cumsum(0)]
    )
    number = torch.unique_consecutive(ids, return_inverse=True)[1]

    def document_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        logical_q, logical_k = q - offsets[number[q]], k - offsets[number[k]]
        return (number[q] == number[k]) & inner(b, h, logical_q, logical_k)

    return document_mask


def natten(width: int, kernel: int) -> MaskFunction:
    """attention-gym's neighbourhood attention on a canvas of `width` columns."""

    def natten_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        q_x, q_y, k_x, k_y = q // width, q % width, k // width, k % width
        centre_x = q_x.clamp(kernel // 2, (width - 1) - kernel // 2)
        centre_y = q_y.clamp(kernel // 2, (width - 1) - kernel // 2)
        return ((centre_x - k_x).abs() <= kernel // 2) & ((centre_y - k_y).abs() <= kernel // 2)

    return natten_mask


def dilated_window(size: int, dilation: int) -> MaskFunction:
    return lambda b, h, q, k: ((q - k).abs() <= size) & ((q - k) % dilation == 0)


def window_by_head(sizes: Tensor) -> MaskFunction:
    return and_masks(causal, lambda b, h, q, k: q - k <= sizes[h])


def first_head_only(b: Any, h: Any, q: Any, k: Any) -> Any:
    """The issue's: all other heads see nothing."""
    return (q >= k) & (h == 0)


def lengths_by_sample(lengths: Tensor) -> MaskFunction:
    return lambda b, h, q, k: (k < lengths[b]) & (q >= k)


def by_sample_and_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + h) % (b + 2) >= k % (h + 2)


class Strided:
    """A callable object whose number is an attribute."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k) % self.step == 0

    def shifted(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k) % self.step == 1


def step_of(step: int, b: Any, h: Any, q: Any, k: Any) -> Any:
    return q % step == k % step


# For so many tokens, two samples and at least four query heads.
MASKS: dict[str, Callable[[int], MaskFunction]] = {
    "noop": lambda tokens: noop_mask,
    "causal": lambda tokens: causal,
    "sliding window": lambda tokens: sliding_window(37),
    "prefix LM": lambda tokens: prefix_lm(50),
    "documents": lambda tokens: documents(torch.from_numpy(document_ids(tokens))),
    "prefix LM in documents": lambda tokens: documents(torch.from_numpy(document_ids(tokens)), prefix_lm(7)),
    "natten": lambda tokens: natten(8, 3),
    "dilated window": lambda tokens: dilated_window(60, 3),
    "window or prefix in documents": lambda tokens: and_masks(
        documents(torch.from_numpy(document_ids(tokens, seed=1)), noop_mask),
        or_masks(sliding_window(20), prefix_lm(9)),
    ),
    "first head only": lambda tokens: first_head_only,
    "window by head": lambda tokens: window_by_head(torch.tensor([3, 300, 17, 60, 1, 9, 2, 80])),
    "lengths by sample": lambda tokens: lengths_by_sample(torch.tensor([tokens // 3, tokens])),
    "by sample and head": lambda tokens: by_sample_and_head,
    "callable object": lambda tokens: Strided(5),
    "bound method": lambda tokens: Strided(4).shifted,
    "partial": lambda tokens: functools.partial(step_of, 3),
}
COMPOSED: dict[str, Callable[[Pattern], Pattern]] = {
    "alone": lambda pattern: pattern,
    "& Causal()": lambda pattern: pattern & Causal(),
    "& SlidingWindow(70)": lambda pattern: SlidingWindow(70, causal=False) & pattern,
}


def patterns(name: str, composed: str, tokens: int) -> tuple[Pattern, Tensor]:
    """A pattern, and its truth for a batch of two and eight heads: bool [2, 8, T, T]."""
    function = MASKS[name](tokens)
    # create_mask counts the parameters of what it is given, those of methods and partials wrongly
    want = create_mask(lambda b, h, q, k: function(b, h, q, k), 2, 8, tokens, tokens, device="cpu")
    gap = torch.arange(tokens)[:, None] - torch.arange(tokens)
    bands = {"alone": gap == gap, "& Causal()": gap >= 0, "& SlidingWindow(70)": gap.abs() < 70}
    return COMPOSED[composed](MaskMod(function)), want & bands[composed]


def attention_by_mask(shape: Shape, mask: Tensor) -> Dense:
    """Dense float64 attention of `tensors(shape)` under bool [2, 8, T, T], heads and samples cut to size."""
    return attend_by_counts(*tensors(shape, torch.float64), mask[: shape.batch, : shape.query_heads])

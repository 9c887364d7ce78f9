"""Terms of scores: score_mods, and terms of keys that travel with the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ring.masks.pair_masks import ScoreFunction


@dataclass(frozen=True)
class Softcap:
    """Limit scores to -cap .. cap by cap * tanh(score / cap), as Gemma 2 does: a `score_mod`."""

    made_in_graphs = True  # see `Pattern`
    cap: float

    def __call__(self, score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        return self.cap * torch.tanh(score / self.cap)


@dataclass(frozen=True)
class Alibi:
    """Add slope * (key position - query position) to the scores of each head: a `score_mod`.

    With `both_ways` it is -slope * |query position - key position|, as in FlashAttention. For keys up to the
    query both are the same.
    """

    made_in_graphs = True
    slopes: tuple[float, ...] | Tensor  # of the model's query heads; constants
    both_ways: bool = False

    def __call__(self, score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        slopes = torch.as_tensor(self.slopes, dtype=score.dtype, device=score.device)
        distance = -(query - key).abs() if self.both_ways else key - query
        return score + slopes[head] * distance


@dataclass(frozen=True, eq=False)
class AlongPaths:
    """Give a score_mod the number of each token in its path instead of its position in the sequence.

    Attributes:
        score_mod: which changes the scores.
        depths: of each position of the sequence, int64 [T], on the CPU (`Tree.depths`).
    """

    score_mod: ScoreFunction
    depths: Tensor

    def __call__(self, score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        return self.score_mod(score, batch, head, self.depths[query], self.depths[key])


@dataclass(frozen=True)
class BetweenSequences:
    """Give a score_mod of two sequences, which a pass lays out as one, the positions in each of them.

    Attributes:
        score_mod: which changes the scores.
        first_query: the position of the first query in the pass; the first key is at 0.
        queries, keys: tokens of the two sequences. Slots of padding have other positions, and get those of a
            token: their scores are masked, and a table of the tokens has no entry for them.
    """

    score_mod: ScoreFunction
    first_query: int
    queries: int
    keys: int

    def __call__(self, score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        query = (query - self.first_query).clamp(0, self.queries - 1)
        return self.score_mod(score, batch, head, query, key.clamp(0, self.keys - 1))

    @property
    def __wrapped__(self) -> ScoreFunction:  # whose name messages have
        return self.score_mod


_WIDTH = 8  # head dims of kernels are multiples of it


def with_key_terms(q: Tensor, k: Tensor, terms: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return q and k with more dimensions, which add a term of each key to its scores. Differentiable.

    So terms travel with the keys, every kernel adds them, and they get their gradient.

    Args:
        q, k: [B, H, S, D] and [B, G, S, D].
        terms: [B, G, S], finite; added to the scores after these are multiplied by `scale`.
        scale: factor of the scores.
    """
    # 1 / scale as a sum of two numbers, which in bfloat16 have 16 bits together.
    inverse = torch.tensor(1 / scale, dtype=torch.float64, device="cpu")
    high = inverse.to(q.dtype)
    low = inverse - high.double()
    # Filled on the device: a copy would make the host wait.
    both = [q.new_full((*q.shape[:-1], 1), float(value)) for value in (high, low)]
    terms = terms.to(k.dtype).unsqueeze(-1).expand(-1, -1, -1, 2)
    fill = -(q.shape[-1] + 2) % _WIDTH
    return pad(torch.cat([q, *both], dim=-1), (0, fill)), pad(torch.cat([k, terms], dim=-1), (0, fill))

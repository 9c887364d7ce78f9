"""Change scores pair by pair as FlexAttention's `score_mod` does: soft caps, ALiBi, any function of a pair.

Positions and heads are global.

[Note: changed scores]
A `score_mod` is a value, as a mask function is: it is traced, and its digest is part of the header. A kernel
gets it with the numbers of the heads that it computes and the positions of its tiles. A kernel that cannot
evaluate it never gets it: "auto" takes `reference` where the fast kernel of the device cannot, and logs a
warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from ds_ring.errors import RingConfigError, shown
from ds_ring.masks.mask_mod import digest_of, first_line, indexed_by_tensors, name_of

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Softcap:
    """Limit scores to -cap .. cap by cap * tanh(score / cap), as Gemma 2 does: a `score_mod`."""

    cap: float

    def __call__(self, score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        return self.cap * torch.tanh(score / self.cap)


@dataclass(frozen=True)
class Alibi:
    """Add slope * (key position - query position) to the scores of each head: a `score_mod`."""

    slopes: tuple[float, ...]  # of the model's query heads

    def __call__(self, score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        slopes = torch.tensor(self.slopes, dtype=score.dtype, device=score.device)
        return score + slopes[head] * (key - query)


_WIDTH = 8  # head dims of kernels are multiples of it


def with_key_terms(q: Tensor, k: Tensor, terms: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return q and k with more dimensions, which add a term of each key to its scores. Differentiable.

    So terms travel with the keys, every kernel adds them, and they get their gradient.

    Args:
        q, k: [B, H, S, D] and [B, G, S, D].
        terms: [B, G, S], finite; what is added to the scores after they are multiplied by `scale`.
        scale: factor of the scores.
    """
    # 1 / scale as a sum of two numbers, which in bfloat16 have 16 bits together.
    inverse = torch.tensor(1 / scale, dtype=torch.float64)
    high = inverse.to(q.dtype)
    low = (inverse - high.double()).to(q.dtype)
    both = torch.stack([high, low]).to(q.device).expand(*q.shape[:-1], 2)
    terms = terms.to(k.dtype).unsqueeze(-1).expand(-1, -1, -1, 2)
    fill = -(q.shape[-1] + 2) % _WIDTH
    return pad(torch.cat([q, both], dim=-1), (0, fill)), pad(torch.cat([k, terms], dim=-1), (0, fill))


@dataclass(frozen=True)
class ScoreMod:
    """Hold a score_mod; equal on two ranks if its code and what it captured are."""

    function: ScoreFunction

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise RingConfigError(
                "score_mod: expected a function (score, batch, head, q_position, k_position) -> score, got"
                f" {shown(self.function)}; write it as for FlexAttention"
            )
        try:
            hash(self.function)
            text = self._contents
        except Exception as error:
            raise RingConfigError(
                f"score_mod {name_of(self.function)}: expected torch operators on tensors without dimensions,"
                f" got {first_line(error)}; write it as for FlexAttention, with nothing that needs a gradient"
            ) from error
        assert text

    @cached_property
    def _contents(self) -> str:
        score, index = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        with torch.no_grad(), indexed_by_tensors():
            graph = make_fx(self.function, tracing_mode="real")(score, index, index, index, index)
        constants = (value for value in vars(graph).values() if isinstance(value, Tensor))
        if any(value.requires_grad for value in constants):
            raise ValueError("a captured tensor that requires a gradient, which it would not get")
        return digest_of(graph)

    def __str__(self) -> str:
        return f"{name_of(self.function)}, contents {self._contents}"


class Scores(NamedTuple):
    """Hold a score_mod and the numbers of the query heads that a kernel is given, among all of the model."""

    mod: ScoreMod
    heads: range

    def of(self, heads: slice) -> Scores:
        """Return the same for some of the heads."""
        return self._replace(heads=self.heads[heads])

    def changed(self, scores_BHQK: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return the scores of all pairs as the function changes them."""
        evaluate: Callable[..., Tensor] = self.mod.function
        for argument in (4, 3, 2, 1):  # keys, queries, heads, samples: the innermost is the last dimension
            dims = [0, None, None, None, None]
            dims[argument] = 0
            evaluate = torch.vmap(evaluate, in_dims=tuple(dims))
        device = scores_BHQK.device
        batch, heads = (torch.tensor(x, device=device) for x in (range(len(scores_BHQK)), self.heads))
        with indexed_by_tensors():
            return evaluate(scores_BHQK, batch, heads, q_positions, k_positions).to(scores_BHQK.dtype)

    def gradient(self, scores_BHQK: Tensor, q_positions: Tensor, k_positions: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of what `changed` was given, from that of what it returned."""
        # torch.func works below autograd, where the ring's operators run
        pull: Any = torch.func.vjp(lambda x: self.changed(x, q_positions, k_positions), scores_BHQK)[1]
        found: Tensor = pull(grad)[0]
        return found

"""Compute the load balancing loss of a mixture of experts over all tokens of a sequence.

Owns its formula on a ring. transformers' `load_balancing_loss_func` multiplies the share of tokens that an
expert gets by the mean probability that the router gives it: a product of means, which is no sum over ranks.
Each rank adds up its own tokens, `ds_ring::sequence_sum` adds the ranks, and the product is taken of the
totals. Tokens of padding do not count, as with an attention_mask on one process.

Shapes: B samples, S local tokens, E experts.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ds_ring.errors import RingConfigError

_FUNCTION = "load_balancing_loss_func"

Sum = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RouterLoss:
    """Hold what a model's forward says of its load balancing loss."""

    experts: int  # E
    chosen: int  # experts for each token
    weight: float  # of this loss beside the other one

    def __call__(self, router_logits: Sequence[Tensor], counted_BS: Tensor | None, add_up: Sum) -> Tensor:
        """Return the loss [], equal to transformers' over the tokens of all ranks that `add_up` sums over.

        Args:
            router_logits: of each layer, [B * S, E].
            counted_BS: 1 for tokens that count, 0 for padding; None: all do.
            add_up: sums a tensor over the ranks of the sequence.
        """
        device = router_logits[0].device
        tokens_E = torch.zeros(self.experts, dtype=torch.float32, device=device)
        probability_E = torch.zeros(self.experts, dtype=torch.float32, device=device)
        rows = torch.zeros(1, dtype=torch.float32, device=device)
        for logits in router_logits:
            weights_NE = torch.softmax(logits.to(device).reshape(-1, self.experts), dim=-1).float()
            counts_N1 = weights_NE.new_ones(weights_NE.shape[0], 1)
            if counted_BS is not None:
                counts_N1 = counted_BS.reshape(-1, 1).to(weights_NE)
            chosen_NK = weights_NE.topk(self.chosen, dim=-1).indices
            one_hot_NE = torch.zeros_like(weights_NE).scatter(-1, chosen_NK, 1.0)
            tokens_E = tokens_E + (one_hot_NE * counts_N1).sum(dim=0)
            probability_E = probability_E + (weights_NE * counts_N1).sum(dim=0)
            rows = rows + counts_N1.sum()
        # One message for all three: the product of the means is taken of totals.
        tokens_E, probability_E, rows = add_up(torch.cat([tokens_E, probability_E, rows])).split(
            [self.experts, self.experts, 1]
        )
        return (tokens_E / rows * (probability_E / rows)).sum() * self.experts


def read_router_loss(model: nn.Module) -> RouterLoss | None:
    """Read off the model's code what it computes of its routers; None where there is no such loss.

    Raises:
        RingConfigError: it has a loss of its routers that is another one.
    """
    # Its own code is read: which attributes hold the number of experts, how many are chosen and the weight.
    # That its formula is the one here is tried on random numbers.
    forward = inspect.unwrap(type(model).forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError):
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == _FUNCTION]
    if not calls:
        return None
    added = [
        node.value.left
        for node in ast.walk(tree)
        if isinstance(node, ast.AugAssign)
        and isinstance(node.value, ast.BinOp)
        and "aux_loss" in ast.unparse(node.value.right)
    ]
    values = [_value(model, node) for node in (*calls[0].args[1:3], *added)]
    if len(calls) != 1 or len(values) != 3 or any(not isinstance(one, (int, float)) for one in values):
        _refuse(model)
    found = RouterLoss(int(values[0]), int(values[1]), float(values[2]))
    if not _is_the_same(getattr(sys.modules[forward.__module__], _FUNCTION), found):
        _refuse(model)
    return found


def _is_the_same(function: Callable[..., Any], ours: RouterLoss) -> bool:
    """Compare the model's function with ours on random routers, with and without padding."""
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(12, ours.experts, generator=generator) for _ in range(2))
    mask = (torch.arange(12).reshape(2, 6) % 5 > 0).long()
    for counted in (None, mask):
        try:
            theirs = function(logits, ours.experts, ours.chosen, counted)
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
        if not torch.allclose(torch.as_tensor(theirs), ours(logits, counted, lambda x: x), rtol=1e-5):
            return False
    return True


def _refuse(model: nn.Module) -> NoReturn:
    raise RingConfigError(
        f"{type(model).__name__}: its load balancing loss is not transformers' usual one, so a ring cannot"
        " compute it over the whole sequence, and each rank's own would change the router's gradient; set"
        " output_router_logits to False in the model's configuration"
    )


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _value(model: nn.Module, node: ast.expr) -> Any:
    """Return what `self.a.b` in a model's source is."""
    if isinstance(node, ast.Attribute):
        return getattr(_value(model, node.value), node.attr, None)
    return model if isinstance(node, ast.Name) and node.id == "self" else None

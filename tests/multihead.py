"""Multi-head attention by its formula, in float64, with its gradients: what the ring's is held against."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import ds_ring


def log_multiplicity(pattern: ds_ring.Causal, heads: int, kv_heads: int, tokens: int) -> Tensor:
    """What is added to the scores: [heads, T, T], 0 where a pair counts once, -inf where it does not."""
    at = np.arange(tokens)
    counts = [pattern.multiplicity(h, heads, kv_heads, at[:, None], at[None, :]) for h in range(heads)]
    return torch.from_numpy(np.stack(counts)).double().log()


def dense(
    module: ds_ring.MultiheadRingAttention, pattern: ds_ring.Causal, inputs: tuple[Tensor, ...], grad: Tensor
) -> dict[str, Tensor]:
    """Output, and the gradient of each of query, key, value [B, T, E] and of each parameter, by name."""
    heads, groups, width = module.num_heads, module.kv_heads, module.embed_dim // module.num_heads
    leaves = {name: x.detach().clone().requires_grad_() for name, x in module.named_parameters()}
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    rows = (heads * width, groups * width, groups * width)
    weights = leaves["in_proj_weight"].split(rows)
    bias = leaves.get("in_proj_bias", torch.zeros(sum(rows), dtype=torch.float64)).split(rows)
    q, k, v = (
        (x @ w.T + b).unflatten(-1, (-1, width)).transpose(1, 2)
        for x, w, b in zip(inputs, weights, bias, strict=True)
    )
    k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
    scores = q @ k.mT / width**0.5 + log_multiplicity(pattern, heads, groups, q.shape[2])
    out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    if "norm.weight" in leaves:
        centred = out - out.mean(-1, keepdim=True)
        out = centred / (centred.square().mean(-1, keepdim=True) + module.norm.eps).sqrt()
        out = out * leaves["norm.weight"] + leaves["norm.bias"]
    out = out @ leaves["out_proj.weight"].T + leaves.get("out_proj.bias", 0.0)
    out.backward(grad)
    named = dict(zip(("query", "key", "value"), inputs, strict=True)) | leaves
    return {"out": out.detach()} | {name: x.grad for name, x in named.items() if x.grad is not None}

"""The functions of modeling files that pass a state on or look back a few tokens, on a ring.

transformers' layers call functions of their modeling file by name (`causal_conv1d_fn`,
`torch_chunk_gated_delta_rule`, ...), which run fla's, mamba-ssm's or causal-conv1d's kernels where these are
installed, and torch otherwise. On a ring, a wrapper here calls the function itself for each piece of the
shard, and adds what comes from tokens on other ranks. So each kernel runs unchanged.

For delta rules (Yang et al. 2024, "Gated Delta Networks"; Kimi Linear 2025), M is a matrix: one call of the
kernel with K more value columns, which begin with the identity, gives out_t and reach_t, B and M. For
state-space models (Gu and Dao 2023, Dao and Gu 2024), M is a product of decays.

Shapes: B samples, S local slots, L tokens of a piece, H heads, K key dim, V value dim, N states, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_ring.contrib.families.recurrent.scan import (
    Original,
    add_halo,
    by_rows,
    get_sharding,
    recurrence,
    refuse_states,
)
from ds_ring.layers.scan.context import ScanContext
from ds_ring.layers.scan.recurrence import Computed


def convolution(
    original: Original, x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Convolve [B, C, S] causally with weight [C, width], as `causal_conv1d_fn`."""
    sharding = get_sharding(kwargs)
    if sharding is None:
        return original(x, weight, bias, *args, **kwargs)

    def run(context: ScanContext, x: Tensor) -> Tensor:
        return add_halo(
            context, x, weight.shape[-1] - 1, lambda tokens: original(tokens, weight, bias, *args, **kwargs)
        )

    return by_rows(sharding, run, x)


def delta_rule(
    original: Original, query: Tensor, key: Tensor, value: Tensor, *args: Any, g: Tensor, beta: Tensor,
    initial_state: Tensor | None = None, output_final_state: bool = False, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute a gated delta rule or Kimi delta attention of q and k [B, S, H, K] and v [B, S, H, V]."""
    sharding = get_sharding(kwargs)
    arguments = {
        "g": g,
        "beta": beta,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
    }
    if sharding is None:
        result: tuple[Tensor, Tensor | None] = original(query, key, value, *args, **arguments, **kwargs)
        return result
    refuse_states("delta rule", initial_state, output_final_state and torch.is_grad_enabled())
    kwargs = {name: x for name, x in kwargs.items() if name != "cu_seqlens"}

    def call(tensors: Sequence[Tensor], continues: bool) -> Computed:
        q, k, v, g, beta = tensors
        heads, (key_dim, value_dim) = v.shape[2], (k.shape[3], v.shape[3])
        begin = None
        if continues:
            v = torch.cat([v, v.new_zeros((*v.shape[:3], key_dim))], dim=3)
            # Not in the dtype of q: kernels keep states in float32.
            zeros = torch.zeros(key_dim, value_dim, dtype=torch.float32, device=v.device)
            identity = torch.eye(key_dim, dtype=torch.float32, device=v.device)
            begin = torch.cat([zeros, identity], dim=1).expand(len(v), heads, -1, -1).contiguous()
        state = {"g": g, "beta": beta, "initial_state": begin, "output_final_state": True}
        out, final = original(q, k, v, *args, **state, **kwargs)
        if not continues:
            return Computed(out, final, final.new_zeros((*final.shape[:3], key_dim)), None)
        reach = out[..., value_dim:].to(final.dtype)
        return Computed(
            out[..., :value_dim],
            final[..., :value_dim].contiguous(),
            final[..., value_dim:].contiguous(),
            lambda state: torch.einsum("blhk,bhkv->blhv", reach, state),
        )

    return recurrence(sharding, (query, key, value, g, beta), call, True, 1, output_final_state)


def mamba2(
    original: Original, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Compute Mamba 2's scan of x [B, S, H, P], dt [B, S, H], A [H], B and C [B, S, G, N]."""
    sharding = get_sharding(kwargs)
    if sharding is None:
        return original(x, dt, A, B, C, chunk_size, *args, **kwargs)
    z, state, returns_state = _run_whole_samples(kwargs, "z", "initial_states", "return_final_states")
    refuse_states("Mamba 2", state, returns_state and torch.is_grad_enabled())
    steps = [
        kwargs.get("dt_bias"),
        kwargs.get("dt_softplus", False),
        kwargs.get("dt_limit", (0.0, float("inf"))),
    ]

    def call(tensors: Sequence[Tensor], continues: bool) -> Computed:
        x, dt, B, C = tensors
        out, final = original(x, dt, A, B, C, chunk_size, *args, return_final_states=True, **kwargs)
        decays = torch.exp(_sum_steps(dt, A, *steps))  # [b, L, H]
        transition = decays[:, -1, :, None, None].to(final.dtype)

        def reach(state: Tensor) -> Tensor:
            select_heads = C.to(state.dtype).repeat_interleave(x.shape[2] // C.shape[2], dim=2)
            return torch.einsum("blhn,bhpn->blhp", select_heads * decays[..., None].to(state.dtype), state)

        return Computed(out, final, transition, reach if continues else None)

    out, state = recurrence(sharding, (x, dt, B, C), call, False, 1, returns_state)
    out = out if z is None else out * F.silu(z)
    return (out, state) if returns_state else out


def _run_whole_samples(kwargs: dict[str, Any], *names: str) -> tuple[Any, Any, bool]:
    """Take out the gate, the first state and whether the last one is returned: not for single pieces."""
    gate, first, returns_last = (kwargs.pop(name, None) for name in names)
    kwargs.pop("seq_idx", None)
    return gate, first, bool(returns_last)


def _sum_steps(
    dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float]
) -> Tensor:
    """Return A times the sum of the step sizes up to each token, [b, L, H], float32 at least."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = F.softplus(dt) if softplus else dt
    dt = dt.clamp(min=limit[0], max=limit[1])
    dtype = torch.promote_types(dt.dtype, torch.float32)
    return (A.to(dtype) * dt.to(dtype)).cumsum(dim=1)


def mamba1(
    original: Original, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Compute Mamba's selective scan: x and dt [B, C, S], A [C, N], B and C [B, N, S]; states [B, C, N]."""
    sharding = get_sharding(kwargs)
    if sharding is None:
        return original(x, dt, A, B, C, *args, **kwargs)
    z, state, returns_state = _run_whole_samples(kwargs, "z", "initial_state", "return_last_state")
    refuse_states("Mamba", state, returns_state and torch.is_grad_enabled())
    delta_bias, delta_softplus = kwargs.get("delta_bias"), kwargs.get("delta_softplus", False)

    def call(tensors: Sequence[Tensor], continues: bool) -> Computed:
        x, dt, B, C = tensors
        out, final = original(x, dt, A, B, C, *args, return_last_state=True, **kwargs)
        dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
        dt = F.softplus(dt) if delta_softplus else dt
        dtype = torch.promote_types(final.dtype, torch.float32)
        steps, rates = dt.to(dtype).cumsum(dim=2), A.to(dtype)  # [b, C, L], [C, N]

        def reach(state: Tensor) -> Tensor:
            # State by state, since [b, C, L, N] is N times an activation.
            parts = [
                torch.exp(rates[:, n, None] * steps) * (state[..., n, None] * C[:, n, None].to(dtype))
                for n in range(rates.shape[1])
            ]
            return sum(parts[1:], parts[0])

        transition = torch.exp(rates * steps[..., -1:])
        return Computed(out, final.to(dtype), transition, reach if continues else None)

    out, state = recurrence(sharding, (x, dt, B, C), call, False, 2, returns_state)
    out = out if z is None else out * F.silu(z)
    return (out, state) if returns_state else out


def not_fused(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Return None on a ring: the layer then calls the convolution and the scan one after the other."""
    return original(*args, **kwargs) if get_sharding(kwargs) is None else None

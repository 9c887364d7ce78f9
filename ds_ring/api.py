"""Attend over a sharded sequence: `ring_attention`, for tensors. (`attention_module.py` is for models.)

Tensors are local shards, [batch, heads, tokens, head_dim] as in PyTorch's
`scaled_dot_product_attention`. The caller shards them (`shard_sequence`, or `ds_ring.initialize` for a whole
DeepSpeed run).

Sinks (gpt-oss) are one logit per head in the softmax's denominator, like a key whose value is 0. The gradient
of the sinks on a rank covers only the queries of this rank. With Ulysses, it covers only the heads that the
rank computed, and is 0 for the other heads. Sum it over the sequence's ranks, as for other replicated
parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.config.pass_options import PassOptions
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import AskedContext, get_call_context
from ds_ring.ops.eager import attend
from ds_ring.schedule.layout import Layout

if TYPE_CHECKING:
    from ds_ring.masks.pair_masks import ScoreFunction


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, pattern: Pattern, layout: Layout | str, mesh: RingMesh,
    scale: float | None = None, sinks: Tensor | None = None, score_mod: ScoreFunction | None = None,
    kernel: str = "auto", return_lse: bool = False, options: PassOptions | None = None,
) -> Any:  # fmt: skip
    """Compute exact attention over a sequence that is sharded over the ranks of a ring. Differentiable.

    Ring attention (Liu, Zaharia, Abbeel 2023): K/V shards travel around the ring by point-to-point sends. So
    a rank holds its share plus, for each direction, keys of two other shards (up to four on two levels). In
    stages (GPUs of one node: `stage_bytes` of the options) it holds two buffers of a few shards each. Rows of
    padding, and rows without a key, are 0.

    Args:
        q: local queries [B, H, S, D]. S is layout.local_tokens divided by the Ulysses size.
        k, v: local keys [B, G, S, D] and values [B, G, S, E]; H a multiple of G. E may differ from D; values
            are sent unpadded.
        pattern: which query position attends to which key position, in global positions.
        layout: the rank and slot of each position; a name builds that layout for ring_size * U * S tokens,
            U being the Ulysses size.
        mesh: this process's place in the grid of ranks; all ranks of the sequence (ring x Ulysses) must call.
        scale: factor of the scores; None is 1 / sqrt(D).
        sinks: [H] of any floating dtype, the same on all ranks; all heads, even if Ulysses splits them.
        score_mod: as in FlexAttention, (score, batch, head, q_position, k_position) -> score, with global
            positions and the head's number in the model; batch is the index in this call's batch dimension.
            Ranks compare its code and captured values, as for `MaskMod`. A captured tensor that requires a
            gradient is refused: it would get none.
            Kernel "auto" then is "flex" on CUDA, and the slow "reference" on the CPU.
        kernel: a name of `plugin.KERNELS`: "cpu", "flex", "flash" or "reference"; or "auto": the kernel of
            the options, which is the device's fast one unless they say otherwise.
        return_lse: return the lse as well. Its gradient is exact.
        options: what is set once a run: transport, payload dtypes, deadlines, checks. Keys and values are
            those of the JSON's section, `ds_ring.PassOptions(check_finite=True)` say; a `RingConfig` is taken
            as well. torch.compile takes options that are made outside of the compiled function.

    Returns:
        out [B, H, S, E] in q's dtype; with `return_lse` also the natural logarithm of the softmax's
        denominator (sinks included), [B, H, S], float32 or float64: -inf where a row has no key and no sink.

    Raises:
        RingConfigError, RingMeshError: an option, a kernel, a score_mod or a mesh that cannot be used.
        RingShapeError, RingLayoutError, RingPatternError: tensors, a layout or a pattern that do not fit.
        RingMismatchError: ranks that call with different shapes, dtypes or settings; nothing was sent.
        RingPeerError: another rank failed or was too late.
        RingBufferError, RingKernelError: a tensor was written to while it was sent; the kernel failed.
        RingFiniteError: with `check_finite`, on the rank whose tensors have NaN or Inf.
    """
    request = AskedContext(pattern, layout, mesh, scale, kernel, options, score_mod)
    if torch.compiler.is_compiling():
        from ds_ring.ops.compiled import attend_compiled, get_handle

        return attend_compiled(q, k, v, get_handle(request), mesh, sinks, return_lse)
    return attend(q, k, v, get_call_context(request), sinks, return_lse)

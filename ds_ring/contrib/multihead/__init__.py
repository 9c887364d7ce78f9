"""Multi-head attention with its projections over a sharded sequence: `MultiheadRingAttention`.

Owns the parameters and the computation around the attention: projections, heads, the sub-layer norm. The
attention itself is `RingAttention`'s. Legend: B batch, S tokens of this rank, E embed_dim, H query heads, G
key and value heads, D = E / H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ds_ring.attention_module import RingAttention
from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import (
    RingConfigError,
    RingPatternError,
    RingShapeError,
    check_bool,
    check_whole_number,
    shown,
)
from ds_ring.limits import MAX_HEADS
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import ScoreFunction
from ds_ring.ops.checks import DTYPES, check_operand
from ds_ring.ops.compiled import make_refused_results, refusal_from
from ds_ring.patterns.dilated.pattern import Dilated
from ds_ring.schedule.layout import Layout

if TYPE_CHECKING:
    from ds_ring.config.section import RingConfig

_MAX_FEATURES = 1 << 20
_NAME = "MultiheadRingAttention"
# Arguments of torch.nn.MultiheadAttention that a ring cannot honour: the value that changes nothing, and what
# to do instead.
_ONLY_IN_TORCH = {
    "dropout": (0.0, "no rank keeps weights to drop; apply torch.nn.Dropout to the result"),
    "add_bias_kv": (
        False,
        "a learned key has no position in the layout; use sinks= of ds_ring.RingAttention",
    ),
    "add_zero_attn": (
        False,
        "use ds_ring.RingAttention with sinks=torch.zeros(num_heads), which is the same",
    ),
    "kdim": (None, "project the key to embed_dim before the call"),
    "vdim": (None, "project the value to embed_dim before the call"),
}


class MultiheadRingAttention(nn.Module):
    """Compute multi-head attention with its projections, as `torch.nn.MultiheadAttention`, over a ring.

    The result is `out_proj(attention(q, k, v))` of the projected query, key and value. The parameters have
    torch's names and shapes, so a state dict of `nn.MultiheadAttention` loads here, and one of this module
    there: in_proj_weight [E + 2 G D, E] and in_proj_bias [E + 2 G D] (queries, keys, values), out_proj.weight
    [E, E], out_proj.bias [E]. The gradient of a parameter is on each rank the part of the rank's own tokens:
    sum it over the ranks of the sequence (`ds_ring.initialize` does).

    With `segment_lengths` this is LongNet's attention (arXiv 2307.02486). The sub-layer norm and `gamma_init`
    are those of Magneto (arXiv 2210.06423), which LongNet uses.

    Args:
        embed_dim: E, features of a token.
        num_heads: H; divides E.
        mesh: this process's place.
        pattern: which position attends to which, or a `RingConfig`, as `RingAttention` takes it.
        segment_lengths: instead of `pattern`: causal `Dilated` attention with these segments.
        dilation_rates: one for each segment length. None: each segment length over the first one.
        layout: a layout, or a name for that layout of ring_size * S tokens. None: the config's, else "auto".
        kv_heads: G; divides H. None: H.
        bias: whether the projections have biases.
        sub_layer_norm: add `norm`, a LayerNorm [E] before the output projection.
        layer_norm_eps: of that norm.
        gamma_init: None: torch's initialization, `xavier_uniform_` of in_proj_weight. A number: Magneto's,
            `xavier_normal_` of each projection, with this gain for values and output.
        score_mod: see `ring_attention`.
        batch_first: True for [B, S, E], False (torch's default) for [S, B, E].
        device, dtype: of the parameters.
        only_in_torch: dropout, add_bias_kv, add_zero_attn, kdim and vdim of `nn.MultiheadAttention`, with the
            values that change nothing.

    Raises:
        RingConfigError: numbers that do not divide each other, or an argument that a ring cannot honour.
        RingPatternError: segment lengths and dilation rates that fit no `Dilated`.
    """

    # torch.nn.TransformerEncoderLayer reads this attribute. True would let it take its fused path in eval
    # mode, which never calls `forward`.
    _qkv_same_embed_dim = False
    in_proj_bias: nn.Parameter | None

    def __init__(
        self, embed_dim: int, num_heads: int, *, mesh: RingMesh, pattern: RingConfig | Pattern | None = None,
        segment_lengths: Sequence[int] | None = None, dilation_rates: Sequence[int] | None = None,
        layout: Layout | str | None = None, kv_heads: int | None = None, bias: bool = True,
        sub_layer_norm: bool = False, layer_norm_eps: float = 1e-5, gamma_init: float | None = None,
        score_mod: ScoreFunction | None = None, batch_first: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, **only_in_torch: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed_dim = check_whole_number(embed_dim, f"{_NAME}: embed_dim", RingConfigError, _MAX_FEATURES)
        self.num_heads = check_whole_number(num_heads, f"{_NAME}: num_heads", RingConfigError, MAX_HEADS)
        groups = self.num_heads if kv_heads is None else kv_heads
        self.kv_heads = check_whole_number(groups, f"{_NAME}: kv_heads", RingConfigError, MAX_HEADS)
        for name, n, divisor in (
            ("embed_dim", self.embed_dim, self.num_heads),
            ("num_heads", self.num_heads, self.kv_heads),
        ):
            if n % divisor:
                by = "num_heads" if name == "embed_dim" else "kv_heads"
                raise RingConfigError(
                    f"{_NAME}: expected {name} to be a multiple of {by}, got {n}, {divisor}"
                )
        for name, value in only_in_torch.items():
            _refuse_what_torch_alone_has(name, value, self.embed_dim)
        self.batch_first = check_bool(batch_first, f"{_NAME}: batch_first", RingConfigError)
        check_bool(bias, f"{_NAME}: bias", RingConfigError)
        check_bool(sub_layer_norm, f"{_NAME}: sub_layer_norm", RingConfigError)
        for name, number in (("layer_norm_eps", layer_norm_eps), ("gamma_init", gamma_init)):
            if not (name == "gamma_init" and number is None) and not (
                isinstance(number, (int, float)) and not isinstance(number, bool) and 0 < number < 1e30
            ):
                raise RingConfigError(f"{_NAME}: {name}: expected a positive number, got {shown(number)}")
        if dtype is not None and dtype not in DTYPES:
            expected = "a floating dtype (float64 to float16), or None"
            raise RingConfigError.wrong(f"{_NAME}: dtype", expected, f"{dtype}", "use torch.float32")
        self.gamma_init = gamma_init
        self.head_dim = self.embed_dim // self.num_heads
        self._widths = (self.embed_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim)
        ring_pattern = _pattern(pattern, segment_lengths, dilation_rates)
        self.attention = RingAttention(ring_pattern, mesh=mesh, layout=layout, score_mod=score_mod)
        self._mesh, self._is_causal = mesh, self.attention.context.pattern.is_causal

        self.in_proj_weight = nn.Parameter(
            torch.empty(sum(self._widths), self.embed_dim, device=device, dtype=dtype)
        )
        if bias:
            self.in_proj_bias = nn.Parameter(torch.empty(sum(self._widths), device=device, dtype=dtype))
        else:
            self.register_parameter("in_proj_bias", None)
        self.norm = (
            nn.LayerNorm(self.embed_dim, layer_norm_eps, device=device, dtype=dtype)
            if sub_layer_norm
            else None
        )
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the projections with gain `gamma_init`; None leaves out_proj.weight to `nn.Linear`."""
        if self.gamma_init is None:
            nn.init.xavier_uniform_(self.in_proj_weight)
        else:
            gains = (1.0, 1.0, self.gamma_init)
            for weight, gain in zip(self.in_proj_weight.split(self._widths), gains, strict=True):
                nn.init.xavier_normal_(weight, gain)
            nn.init.xavier_normal_(self.out_proj.weight, self.gamma_init)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: None = None,
        need_weights: bool = False, attn_mask: None = None, average_attn_weights: bool = True,
        is_causal: bool | None = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attend over local shards: the call of `nn.MultiheadAttention`, with its arguments in its order.

        Args:
            query, key, value: [B, S, E], or [S, B, E] without `batch_first`, all of one shape and in the
                module's layout. Key and value may come from another sequence of the same length.
            key_padding_mask, need_weights, attn_mask: None, False and None; others are refused.
            average_attn_weights: without effect, since no weights are returned.
            is_causal: None, or what the pattern is.

        Returns:
            the output, of query's shape and dtype (under autocast of its dtype), and None for the weights.

        Raises:
            RingConfigError: `need_weights` is true.
            RingPatternError: a mask, or an `is_causal` that contradicts the pattern.
            RingShapeError: tensors that are not of one shape [B, S, E], or not of the parameters' dtype.
            RingMismatchError, RingPeerError, RingFiniteError: as `ring_attention`.
        """
        arguments = (query, key, value, key_padding_mask, need_weights, attn_mask, is_causal)
        if torch.compiler.is_compiling():
            refusal = refusal_from(self._check, *arguments)
            if refusal is not None:
                return make_refused_results(query, self.embed_dim, refusal, self._mesh, False), None
        else:
            with collective(self._mesh, "attention"):
                self._check(*arguments)
        q, k, v = (
            (x if self.batch_first else x.transpose(0, 1)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for x in self._projected(query, key, value)
        )
        out = self.attention(q, k, v).transpose(1, 2).flatten(2)
        out = self.out_proj(out if self.norm is None else self.norm(out))
        return out if self.batch_first else out.transpose(0, 1), None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Return projected queries, keys and values: one matrix product where all three are one tensor."""
        if query is key and key is value:
            return linear(query, self.in_proj_weight, self.in_proj_bias).split(self._widths, dim=-1)
        weights = self.in_proj_weight.split(self._widths)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.split(self._widths)
        together = zip((query, key, value), weights, biases, strict=True)
        return [linear(x, weight, bias) for x, weight, bias in together]

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: object, need_weights: object,
        attn_mask: object, is_causal: object,
    ) -> None:  # fmt: skip
        """Raise the error for a call that cannot be honoured."""
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_operand(name, x)
            if x.dim() != 3 or x.shape[2] != self.embed_dim:
                order = "batch, tokens" if self.batch_first else "tokens, batch"
                raise RingShapeError(
                    f"{name}: expected [{order}, {self.embed_dim}], got {list(x.shape)}; unsqueeze it"
                )
            if x.shape != query.shape:
                raise RingShapeError(
                    f"{name}: expected {[*query.shape]}, as the query, got {[*x.shape]}; see decode_attention"
                )
            dtype = self.in_proj_weight.dtype
            if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
                raise RingShapeError.wrong(name, f"the parameters' {dtype}", f"{x.dtype}", "use autocast")
        if need_weights is not False:
            raise RingConfigError.wrong(
                "need_weights", "False", need_weights, "use return_lse=True of ds_ring.RingAttention"
            )
        if attn_mask is not None:
            raise RingPatternError.wrong(
                "attn_mask", "None", type(attn_mask).__name__, "make the module with pattern=MaskMod(fn)"
            )
        if key_padding_mask is not None:
            raise RingPatternError.wrong(
                "key_padding_mask", "None", type(key_padding_mask).__name__, "use ds_ring.Documents(ids)"
            )
        if is_causal is not None and is_causal is not self._is_causal:
            raise RingPatternError.wrong(
                "is_causal", f"None or {self._is_causal}", is_causal, "make another module"
            )

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, kv_heads={self.kv_heads}"


def _pattern(pattern: object, segment_lengths: Any, dilation_rates: Any) -> Any:
    """Return the pattern that was given, or the dilated one of LongNet, unchecked: others check their own."""
    if (pattern is None) == (segment_lengths is None):
        got = "neither" if pattern is None else "both"
        raise RingConfigError.wrong(
            _NAME, "either pattern or segment_lengths", got, "pass pattern=ds_ring.Causal() or Full()"
        )
    if segment_lengths is None:
        if dilation_rates is not None:
            raise RingConfigError.wrong(
                _NAME, "no dilation_rates with a pattern", dilation_rates, "pass ds_ring.Dilated"
            )
        return pattern
    if dilation_rates is None:
        one_each = range(1, len(segment_lengths) + 1) if isinstance(segment_lengths, (list, tuple)) else ()
        lengths = Dilated(segment_lengths, tuple(one_each)).segment_lengths  # checked
        if any(length % lengths[0] for length in lengths):
            raise RingPatternError.wrong(
                _NAME, f"multiples of {lengths[0]}", list(lengths), "pass dilation_rates as well"
            )
        dilation_rates = tuple(length // lengths[0] for length in lengths)
    return Dilated(segment_lengths, dilation_rates)


def _refuse_what_torch_alone_has(name: str, value: object, embed_dim: int) -> None:
    """Raise RingConfigError for an argument that is unknown, or that would change the result."""
    if name not in _ONLY_IN_TORCH:
        raise RingConfigError.wrong(_NAME, "the arguments of its documentation", repr(name), "leave it out")
    neutral, instead = _ONLY_IN_TORCH[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    same = value is neutral or (number and value == (embed_dim if neutral is None else neutral))
    if not same or (number and neutral is False):
        raise RingConfigError(f"{_NAME}: {name}: expected {neutral}, got {shown(value)}; {instead}")

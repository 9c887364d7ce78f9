"""T5's relative position bias on a ring: a learned term of scores for each head and bucket of distances.

[Note: a bias in bands]
T5 (Raffel et al. 2020) adds a number to the score of a query and a key that depends on the head and on the
bucket of their distance. The numbers are a table with a gradient. The pairs of a bucket are a band of
distances. So attention within each band is a ring pass of its own, its number is added to that pass's
log-sum-exps, and the bands merge by these as the parts of any attention do. Each pair is computed once, no
bias [S, T] exists, and autograd gives the table its gradient. A narrow band sends few tokens. What is kept
for the backward pass is an output for each band: up to 32 for T5, where attention without a bias keeps one.

Shapes: B samples, H query heads, S local tokens, D head dim, N buckets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.masks.catalog import Band
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import UNBOUNDED
from ds_ring.models.attention_name import NAME
from ds_ring.models.checks import not_compiled
from ds_ring.models.model import TABLE
from ds_ring.models.variant import INTERFACE, POSITIONS, Variant, find_forward_home
from ds_ring.patches import patch

if TYPE_CHECKING:
    from ds_ring.models.attention_call import AttentionCall
    from ds_ring.models.model_adapter import ModelAdapter

_patch = partial(
    patch, TABLE.given("biased"), stage="around_forward",
    when="attention adds a learned bias for each bucket of distances (T5)",
)  # fmt: skip
_bias = _patch(
    "compute_bias", kind="replaced", feature="relative bias",
    reason="hands the table of the bias on; calls the original without a ring",
)  # fmt: skip
_has_bias = _patch(
    "has_relative_attention_bias", kind="set", feature="relative bias.on",
    reason="cross attention asks for its bias, too, in place of zeros for all pairs",
)  # fmt: skip


# The model types that tests compare with one process. They take no position_ids, and need none.
_TYPES = ("mt5", "t5", "umt5")


class RelativePositionBias(Variant):
    """Layers that add a learned bias for each bucket of distances to the scores."""

    def matches(self, module: nn.Module) -> bool:
        return hasattr(module, "has_relative_attention_bias") and hasattr(module, "compute_bias")

    def covers(self, model: PreTrainedModel, as_is: bool) -> set[str]:
        known = (
            find_forward_home(model).startswith("transformers.models.") and model.config.model_type in _TYPES
        )
        return {INTERFACE, POSITIONS} if known and not as_is else set()

    def install(self, adapter: ModelAdapter) -> None:
        if not adapter.rewritten:
            super().install(adapter)

    def install_on(self, module: nn.Module, adapter: ModelAdapter) -> None:
        adapter.apply(_bias.to(wrap_bias(module)), _has_bias.to(True), biased=module)

    def read(self, call: AttentionCall) -> None:
        bias = call.arguments.get("position_bias")
        if isinstance(bias, RelativeBias):  # another one is refused
            del call.arguments["position_bias"]
        call.taken["bias"] = bias

    def attend(self, call: AttentionCall) -> Tensor | None:
        bias = call.taken["bias"]
        if not isinstance(bias, RelativeBias) or not bias.has_table:
            return None
        if call.pattern is None:
            raise not_compiled(call.name, "adds a learned bias of distances to the scores")
        return bias.attend(call.sharding, call.q_BHSD, call.k_BGSD, call.v_BGSE, call.pattern, call.scale)


class RelativeBias:
    """Stand for the bias of a module until attention; without a table for none."""

    # Not a tensor: the layers of T5 hand the first one's bias on. The table is read where it is used, so that
    # a checkpointed layer that runs again gives it a gradient.
    def __init__(self, module: Any, has_table: bool) -> None:
        self._module = module
        self.has_table = has_table

    def bands(self, tokens: int) -> list[tuple[int, int, int]]:
        """Return (least, most, bucket) of query minus key for each range of distances of one bucket.

        Those that `tokens` have: the ranges themselves are those of any length, as a generation requires.
        """
        # Beyond the greatest distance all have the last bucket of their side.
        reach = self._module.relative_attention_max_distance + 1
        distances = torch.arange(-reach, reach + 1, device="cpu")
        bucket_of = self._module._relative_position_bucket
        settings = {
            "bidirectional": not self._module.is_decoder,
            "num_buckets": self._module.relative_attention_num_buckets,
            "max_distance": self._module.relative_attention_max_distance,
        }
        # UMT5's reads these off the module.
        buckets = bucket_of(
            -distances, **(settings if "num_buckets" in inspect.signature(bucket_of).parameters else {})
        )
        starts = [0, *(buckets.diff().nonzero()[:, 0] + 1).tolist(), len(distances)]
        bands = []
        for first, end in pairwise(starts):
            least = -UNBOUNDED if first == 0 else int(distances[first])
            most = UNBOUNDED if end == len(distances) else int(distances[end - 1])
            if least < tokens and most > -tokens:
                bands.append((least, most, int(buckets[first])))
        return bands

    def attend(
        self, sharding: BatchSharding, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, pattern: Pattern,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        """Return attention with the bias [B, H, S, D]: [Note: a bias in bands]."""
        numbers = torch.arange(self._module.relative_attention_num_buckets, device=q_BHSD.device)
        table_NH = self._module.relative_attention_bias(numbers)
        outs, lses, (nearest, farthest) = [], [], pattern.distance
        for least, most, bucket in self.bands(sharding.layout.tokens):
            if most < nearest or least > farthest:
                continue
            attention = sharding.attention(scale, pattern & Band(least, most))
            out_BHSD, lse_BHS = attention(q_BHSD, k_BHSD, v_BHSD, return_lse=True)
            outs.append(out_BHSD)
            lses.append(lse_BHS + table_NH[bucket].to(lse_BHS.dtype)[:, None])
        # Added band by band: bands without pairs, which the length decides, do not change a bit of the sums.
        greatest_BHS = torch.stack(lses).detach().amax(dim=0)
        greatest_BHS = greatest_BHS.where(greatest_BHS > -torch.inf, 0.0)
        weights = [torch.exp(lse_BHS - greatest_BHS) for lse_BHS in lses]
        sum_BHS = sum(weights[1:], weights[0])
        parts = [weight[..., None] * out.to(weight.dtype) for weight, out in zip(weights, outs, strict=True)]
        total_BHSD = sum(parts[1:], parts[0]) / sum_BHS.where(sum_BHS > 0, 1.0)[..., None]
        return total_BHSD.to(q_BHSD.dtype)


def wrap_bias(module: Any) -> Callable[..., Any]:
    """Return what runs in place of `compute_bias`; without a ring that is the module's own, or zeros."""
    original, has_table = module.compute_bias, bool(module.has_relative_attention_bias)

    def compute_bias(queries: int, keys: int, device: Any = None, past_seen_tokens: Any = 0) -> Any:
        if module.config._attn_implementation == NAME:
            return RelativeBias(module, has_table)
        if has_table:
            return original(queries, keys, device=device, past_seen_tokens=past_seen_tokens)
        return torch.zeros(1, module.n_heads, queries, keys, device=device, dtype=module.q.weight.dtype)

    return compute_bias

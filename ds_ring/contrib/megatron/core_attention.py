"""Give megatron-core models the ring's attention: `RingCoreAttention` in a layer's spec.

Megatron shards the batch and numbers positions itself: context parallel rank r of P gets chunks r and
2P - 1 - r of each sequence, and the layouts made here say the same.

Shapes: S local tokens, B samples, H query heads and G key/value heads of this tensor parallel rank,
D head dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn

from ds_ring.api import ring_attention
from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.config.pass_options import PassOptions
from ds_ring.contrib.ring_flash_attn import mesh_of as mesh_of_group
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.masks.catalog import Causal, Full, SlidingWindow
from ds_ring.masks.pattern import Pattern
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.schedule.layout import Layout, make_layout
from ds_ring.schedule.pieces import PieceLayout

_CAUSAL = {AttnMaskType.causal, AttnMaskType.padding_causal}
_FULL = {AttnMaskType.no_mask, AttnMaskType.padding}
_PACKING_OF_ITS_OWN = ("local_cp_size", "cp_group")


class RingCoreAttention(nn.Module):
    """Compute core attention over the ring of context parallel ranks, in place of `TEDotProductAttention`.

    In a spec: `spec.submodules.self_attention.submodules.core_attention = RingCoreAttention`. The first one
    that is built makes the rings, and every rank of the world must build one then; where some build none (a
    pipeline stage without layers), call `mesh_of(cp_group)` on all ranks before.

    Args:
        config: a TransformerConfig; its windows, softmax_type, kv_channels and dropout are looked at.
        layer_number: counts from 1; windows may be in some layers only.
        attn_mask_type: the mask of calls that name none.
        attention_type: "self".
        attention_dropout: 0; None takes the config's.
        softmax_scale: None is 1 / sqrt(kv_channels).
        cp_comm_type: "p2p" or None.
        pg_collection: with the context parallel group `cp`; None takes Megatron's own.
        mesh: instead of one made of that group.
        kernel, hop_timeout_s: as of `ring_attention`.

    Raises:
        RingConfigError: what the ring would not do.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        mesh: RingMesh | None = None,
        kernel: str = "auto",
        hop_timeout_s: float = 60.0,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _check(attention_type, dropout, cp_comm_type)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp", "tp"])
        self.config, self.layer_number = config, max(1, layer_number)
        self.mesh = mesh_of(pg_collection.cp) if mesh is None else mesh
        self._mask_type = attn_mask_type
        skipped = getattr(config, "window_attn_skip_freq", None)
        # How many positions a token of this layer sees, itself included; None for all before it.
        self._window: int | None = None
        if is_layer_window_attention(config.window_size, skipped, self.layer_number):
            left = int(config.window_size[0])
            self._window = None if left < 0 else left + 1
        self._scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self._kernel, self._options = kernel, PassOptions(hop_timeout_seconds=hop_timeout_s)
        heads = max(1, config.num_attention_heads // pg_collection.tp.size())
        self.softmax_offset = _sinks(config, heads)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend over this rank's shard.

        Args:
            query, key, value: [S, B, H, D], [S, B, G, D], [S, B, G, D]; packed ("thd") [S, H, D] and so on.
            attention_mask: None; the type of the mask defines it.
            attn_mask_type: None takes that of the layer.
            attention_bias: None.
            packed_seq_params: sequences packed into one, by their cumulative lengths.

        Returns:
            [S, B, H * D]; packed [S, H * D].

        Raises:
            RingPatternError, RingShapeError: what the ring would not honour; on every rank, nothing is sent.
        """
        with collective(self.mesh, "attention"):
            pattern = self._pattern(attn_mask_type or self._mask_type, attention_mask, attention_bias)
            if packed_seq_params is None:
                layout = _chunks(query, key, self.mesh.ring_size)
            else:
                layout, documents = self._packing(packed_seq_params)
                pattern = pattern & documents
        packed = query.dim() == 3
        q, k, v = (x.unsqueeze(1) if packed else x for x in (query, key, value))
        out_BHSD = ring_attention(
            *(x.permute(1, 2, 0, 3) for x in (q, k, v)), pattern=pattern, layout=layout, mesh=self.mesh,
            scale=self._scale, sinks=self.softmax_offset, kernel=self._kernel,
            options=self._options,
        )  # fmt: skip
        out = out_BHSD.permute(2, 0, 1, 3).flatten(2)
        return out.squeeze(1) if packed else out

    def _pattern(
        self, mask_type: AttnMaskType, attention_mask: Tensor | None, attention_bias: Tensor | None
    ) -> Pattern:
        """Return what a call's mask type and the layer's window mean, or refuse a mask that is data."""
        if attention_bias is not None:
            raise RingPatternError("attention_bias: expected none, got one")
        if attention_mask is not None:
            raise RingPatternError(
                f"attention_mask: expected None, got {list(attention_mask.shape)}; pass attention_mask=None"
            )
        if mask_type in _CAUSAL:
            return Causal() if self._window is None else SlidingWindow(self._window)
        if mask_type not in _FULL or self._window is not None:
            raise RingPatternError.wrong(
                "attn_mask_type", "causal, padding or none", mask_type.name, "use one of these"
            )
        return Full()

    def _packing(self, packed: Any) -> tuple[Layout, Documents]:
        """Return layout and documents of packed sequences.

        Each call reads the numbers: the same tensor may have been filled with those of another batch.
        """
        lengths = packed.cu_seqlens_q
        padded = packed.cu_seqlens_q_padded if packed.cu_seqlens_q_padded is not None else lengths
        for name in _PACKING_OF_ITS_OWN:
            if getattr(packed, name, None) is not None:
                raise RingShapeError(f"packed_seq_params.{name}: expected None, got {getattr(packed, name)}")
        others = (packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded)
        if packed.qkv_format != "thd" or any(
            expected is not None and expected is not local and not torch.equal(expected, local)
            for expected, local in zip(others, (lengths, padded), strict=True)
        ):
            raise RingShapeError(
                'packed_seq_params: expected qkv_format "thd" and the same lengths of queries and keys, got'
                f" {packed.qkv_format!r}, {lengths} and {packed.cu_seqlens_kv}"
            )
        starts = tuple(lengths.tolist())
        return _packing(starts, starts if padded is lengths else tuple(padded.tolist()), self.mesh.ring_size)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the learnable softmax offset for Megatron's checkpoints, split by tensor parallel ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, dict.fromkeys(state, 0), sharded_offsets
        )
        return sharded


@lru_cache(maxsize=16)
def _packing(lengths: tuple[int, ...], padded: tuple[int, ...], ring_size: int) -> tuple[Layout, Documents]:
    """Cut every sequence into 2P chunks, as Megatron does; padding after a sequence belongs to no document.

    `lengths` and `padded` say where sequences begin, without and with their padding, and the end.
    """
    parts = 2 * ring_size if ring_size > 1 else 1
    spans = np.diff(padded)
    uneven = [int(span) for span in spans if span % parts]
    if uneven or len(lengths) != len(padded):
        raise RingShapeError(
            f"packed_seq_params: expected sequences padded to multiples of {parts} tokens (twice the context"
            f" parallel size), got {uneven[:4] or f'{len(lengths)} and {len(padded)} cumulative lengths'}"
        )
    starts = np.array(padded[:-1])[:, None] + np.arange(parts) * (spans // parts)[:, None]
    owners = [min(chunk, parts - 1 - chunk) for chunk in range(parts)] * len(spans)
    layout = PieceLayout(
        padded[-1], ring_size, boundaries=(*map(int, starts.flatten()), padded[-1]), owners=tuple(owners)
    )
    ids = np.full(padded[-1], -1, dtype=np.int64)
    for number, (first, length) in enumerate(zip(padded, np.diff(lengths), strict=False)):
        ids[first : first + length] = number
    return layout, Documents(ids)


def _chunks(query: Tensor, key: Tensor, ring_size: int) -> Layout:
    """Return Megatron's layout of one sequence a sample: chunks r and 2P - 1 - r of 2P equal ones."""
    tokens = query.shape[0]
    if tokens != key.shape[0] or query.dim() != 4 or (ring_size > 1 and tokens % 2):
        raise RingShapeError(
            "expected query and key [local tokens, samples, heads, head_dim] of two equal chunks each, got"
            f" {list(query.shape)} and {list(key.shape)}; pad to twice the context parallel size"
        )
    return make_layout("zigzag", tokens=tokens * ring_size, ring_size=ring_size)


def mesh_of(cp_group: Any) -> RingMesh:
    """Return the mesh whose rings are the context parallel groups, `cp_group` this rank's. Collective over
    the world at first.
    """
    return RingMesh.single() if cp_group.size() == 1 else mesh_of_group(cp_group)


def _check(attention_type: str, dropout: float, cp_comm_type: str | None) -> None:
    """Refuse settings of a layer that the ring would not honour."""
    if attention_type != "self":
        raise RingConfigError(f"attention_type: expected 'self', got {attention_type!r}")
    if dropout:
        raise RingConfigError.wrong("attention_dropout", "0", dropout, "set it in the TransformerConfig")
    if cp_comm_type not in (None, "p2p"):
        raise RingConfigError(f"cp_comm_type: expected 'p2p' or None, got {cp_comm_type!r}")


def _sinks(config: Any, heads: int) -> Tensor | nn.Parameter | None:
    """Return the sinks, logits added to the softmax's denominator, [H]; None for the plain softmax."""
    kind = getattr(config, "softmax_type", "vanilla")
    if kind == "vanilla":
        return None
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    if kind == "off-by-one":
        return torch.zeros(heads, dtype=torch.float32, device=device)
    if kind != "learnable":
        raise RingConfigError(f"softmax_type: expected vanilla, off-by-one or learnable, got {kind!r}")
    sinks = nn.Parameter(torch.empty(heads, device=device, dtype=config.params_dtype))
    if config.perform_initialization:
        config.init_method(sinks)
    return sinks

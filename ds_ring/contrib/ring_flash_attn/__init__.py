"""The functions of the package ring-flash-attn (github.com/zhuzilin/ring-flash-attention 0.1.8) over ds_ring.

Code that is written for that package, OpenRLHF's and axolotl's say, runs on ds_ring after these two lines:

    from ds_ring.contrib import ring_flash_attn
    ring_flash_attn.install()  # from here on `import ring_flash_attn` imports this module

Names, arguments, shapes and shards are those of ring-flash-attn. Shapes are q [B, S, H, D], k and v
[B, S, G, D], qkv [B, S, 3, H, D], kv [B, S, 2, G, D]; varlen functions have no batch dimension. S tokens are
this rank's shard; r is the rank and P the number of ranks:

    ring_*            part r of P
    zigzag_*          parts r and 2P - 1 - r of 2P
    stripe_*          every P-th token
    *_varlen_*        these parts of every document
    llama3_*          part r of P of all documents together

All return out, or (out, lse, None) with `return_attn_probs`: lse [B, H, S], or [H, S] for varlen, float32.

What differs: `llama3_` functions send K/V around the ring, where ring-flash-attn gathers all of them;
`window_size`, `alibi_slopes`, soft caps and attention sinks are computed; lengths need not be even.
`deterministic`, `heads_k_stride` and the longest lengths are not read.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from ds_ring.api import ring_attention
from ds_ring.comm.collective import collective
from ds_ring.comm.groups import gather_objects
from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError, RingMeshError, RingShapeError
from ds_ring.layers.scores import Alibi, Softcap
from ds_ring.masks.catalog import Band, Causal, Full, SlidingWindow
from ds_ring.masks.pair_masks import ScoreFunction
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import UNBOUNDED
from ds_ring.patches import PatchTable, apply, patch
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.schedule.layout import Layout, StripedLayout, make_layout
from ds_ring.schedule.pieces import PieceLayout

_PACKAGE = "ring_flash_attn"
_MODULES = (
    "adapters", "adapters.hf_adapter", "ring_flash_attn", "ring_flash_attn_varlen", "zigzag_ring_flash_attn",
    "zigzag_ring_flash_attn_varlen", "stripe_flash_attn", "stripe_flash_attn_varlen",
    "llama3_flash_attn_varlen",
)  # fmt: skip

# Layout and pattern: whose cumulative lengths, over how many ranks


@functools.lru_cache(maxsize=64)
def _documents(lengths: tuple[int, ...]) -> Documents:
    return Documents(np.repeat(np.arange(len(lengths)), lengths))


@functools.lru_cache(maxsize=64)
def _make_document_layout(family: str, lengths: tuple[int, ...], ring_size: int) -> Layout:
    """Cut every document into parts as ring-flash-attn's varlen functions expect them."""
    tokens = sum(lengths)
    if family == "stripe_flash_attn":  # every document begins at a multiple of P
        return StripedLayout(tokens, ring_size)
    owners = list(range(ring_size))
    if family == "zigzag_ring_flash_attn":
        owners += owners[::-1]
    bounds, begin = [0], 0
    for length in lengths:
        bounds += [begin + length * (part + 1) // len(owners) for part in range(len(owners))]
        begin += length
    return PieceLayout(tokens, ring_size, boundaries=tuple(bounds), owners=tuple(owners) * len(lengths))


def _make_pattern(causal: bool, window_size: Sequence[int]) -> Pattern:
    """Return the pattern of FlashAttention's `causal` and `window_size` (keys before, after; -1 for all)."""
    before, after = window_size
    if causal:
        after = 0
    if before < 0 and after <= 0:
        return Causal() if after == 0 else Full()
    if before >= 0 and after in (0, before):
        return SlidingWindow(before + 1, causal=after == 0)
    return Band(-UNBOUNDED if after < 0 else -after, UNBOUNDED if before < 0 else before)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, pattern: Pattern, layout: Layout, mesh: RingMesh, scale: float | None,
    dropout_p: float, alibi_slopes: Tensor | None, return_attn_probs: bool, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attend over [B, S, H, D]; return out, or (out, lse, None)."""
    if dropout_p:
        raise RingConfigError.wrong("dropout_p", "0", dropout_p, "the ring drops no scores")
    score_mod: ScoreFunction | None = None
    if alibi_slopes is not None:
        if alibi_slopes.ndim != 1 or softcap:
            raise RingConfigError(
                "alibi_slopes: expected one number for each head, and no softcap, got"
                f" {tuple(alibi_slopes.shape)}, softcap {softcap}; call ring_attention with a score_mod"
            )
        score_mod = Alibi(tuple(alibi_slopes.tolist()), both_ways=True)
    elif softcap:
        score_mod = Softcap(softcap)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = ring_attention(
        q, k, v, pattern=pattern, layout=layout, mesh=mesh, scale=scale, score_mod=score_mod, sinks=sinks,
        return_lse=True,
    )  # fmt: skip
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


_meshes: weakref.WeakKeyDictionary[ProcessGroup, dict[int, RingMesh]] = weakref.WeakKeyDictionary()


def mesh_of(group: ProcessGroup | None, ulysses_size: int = 1) -> RingMesh:
    """Return the mesh whose rings are the ranks of `group`, and those of the other ranks' groups.

    The first call for a group is collective over the world: each rank passes the group that it is in.

    Args:
        group: the ranks that share a sequence; None for the world.
        ulysses_size: how many of them, neighbours in the group, split heads.

    Raises:
        RingMeshError: the groups do not cut the world into rings of one size.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise RingMeshError("expected an initialised process group, got none; call init_process_group first")
    meshes = _meshes.setdefault(group, {})
    if ulysses_size not in meshes:
        groups = gather_objects(tuple(dist.get_process_group_ranks(group)))
        meshes[ulysses_size] = RingMesh.from_groups(sorted(set(groups)), ulysses_size)
    return meshes[ulysses_size]


def _batched(family: str) -> Callable[..., Any]:
    names = {
        "ring_flash_attn": "contiguous",
        "zigzag_ring_flash_attn": "zigzag",
        "stripe_flash_attn": "striped",
    }

    def attend(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: Sequence[int] = (-1, -1), alibi_slopes: Tensor | None = None,
        deterministic: bool = False, return_attn_probs: bool = False, group: ProcessGroup | None = None,
    ) -> Any:  # fmt: skip
        """Attend over this rank's shard; see the module."""
        mesh = mesh_of(group)
        layout = make_layout(names[family], tokens=q.shape[1] * mesh.ring_size, ring_size=mesh.ring_size)
        with collective(mesh, family):
            return _attend(
                q, k, v, pattern=_make_pattern(causal, window_size), layout=layout, mesh=mesh,
                scale=softmax_scale, dropout_p=dropout_p, alibi_slopes=alibi_slopes,
                return_attn_probs=return_attn_probs,
            )  # fmt: skip

    return attend


def _packed(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], layout: Layout, mesh: RingMesh, causal: bool,
    window_size: Sequence[int], return_attn_probs: bool, **options: Any,
) -> Any:  # fmt: skip
    with collective(mesh, "packed attention"):
        if not len(q) == len(k) == len(v) == layout.local_tokens:
            raise RingShapeError(
                f"expected {layout.local_tokens} tokens of q, k and v on each of {mesh.ring_size} ranks for"
                f" documents of {lengths}, got {len(q)}, {len(k)}, {len(v)}; pass this batch's cu_seqlens"
            )
        pattern = _make_pattern(causal, window_size) & _documents(lengths)
        q, k, v = (x[None] for x in (q, k, v))
        out, lse, none = _attend(
            q, k, v, pattern=pattern, layout=layout, mesh=mesh, return_attn_probs=True, **options
        )
    return (out[0], lse[0], none) if return_attn_probs else out[0]


def _lengths(cu_seqlens: Tensor) -> tuple[int, ...]:
    ends = cu_seqlens.tolist()
    if len(ends) < 2 or ends[0] != 0 or sorted(ends) != ends:
        raise RingShapeError(f"cu_seqlens: expected 0 and the ascending ends of all documents, got {ends}")
    return tuple(length for length in np.diff(ends).tolist() if length)


def _varlen(family: str) -> Callable[..., Any]:
    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
        softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int] = (-1, -1),
        alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
        group: ProcessGroup | None = None,
    ) -> Any:  # fmt: skip
        """Attend over this rank's shard; see the module."""
        mesh = mesh_of(group)
        lengths = tuple(length * mesh.ring_size for length in _lengths(cu_seqlens))
        layout = _make_document_layout(family, lengths, mesh.ring_size)
        return _packed(
            q, k, v, lengths, layout, mesh, causal, window_size, return_attn_probs, scale=softmax_scale,
            dropout_p=dropout_p, alibi_slopes=alibi_slopes,
        )  # fmt: skip

    return attend


# The lengths of all documents, by the tensor that `llama3_flash_attn_prepare_cu_seqlens` made for this rank,
# with that tensor's numbers: a buffer that is filled anew is another batch's.
_of_all = WeakTensorKeyDictionary()


def _gather_lengths(cu_seqlens_q: Tensor) -> tuple[int, ...]:
    lengths, ends = _of_all.get(cu_seqlens_q, (None, None))
    if lengths is None or ends != cu_seqlens_q.tolist():
        raise RingConfigError(
            "cu_seqlens_q: expected the tensor of llama3_flash_attn_prepare_cu_seqlens as it was made,"
            f" got {'another one' if lengths is None else 'other numbers in it'}; call it for each batch"
        )
    all_lengths: tuple[int, ...] = lengths
    return all_lengths


def _llama3() -> Callable[..., Any]:
    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0,
        softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int] = (-1, -1),
        alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
        group: ProcessGroup | None = None,
    ) -> Any:  # fmt: skip
        """Attend over this rank's shard; see the module."""
        with collective(mesh_of(group), "packed attention"):
            lengths = _gather_lengths(cu_seqlens_q)
        return _attend_llama3(
            q, k, v, lengths, group, causal, window_size, return_attn_probs, scale=softmax_scale,
            dropout_p=dropout_p, alibi_slopes=alibi_slopes,
        )  # fmt: skip

    return attend


def _attend_llama3(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], group: ProcessGroup | None, *args: Any,
    **options: Any,
) -> Any:  # fmt: skip
    mesh = mesh_of(group)
    layout = make_layout("contiguous", tokens=sum(lengths), ring_size=mesh.ring_size)
    return _packed(q, k, v, lengths, layout, mesh, *args, **options)


def _forms(attend: Callable[..., Any], dim: int) -> tuple[Callable[..., Any], ...]:
    """Return the function of q, k, v, that of q and kv, and that of qkv."""

    def kvpacked(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Attend over this rank's shard; see the module."""
        return attend(q, *kv.unbind(dim), *args, **kwargs)

    def qkvpacked(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Attend over this rank's shard; see the module."""
        return attend(*qkv.unbind(dim), *args, **kwargs)

    return attend, kvpacked, qkvpacked


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _forms(
    _batched("ring_flash_attn"), 2
)
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = (
    _forms(_batched("zigzag_ring_flash_attn"), 2)
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _forms(
    _batched("stripe_flash_attn"), 2
)
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = (
    _forms(_varlen("ring_flash_attn"), 1)
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _forms(_varlen("zigzag_ring_flash_attn"), 1)
(
    stripe_flash_attn_varlen_func,
    stripe_flash_attn_varlen_kvpacked_func,
    stripe_flash_attn_varlen_qkvpacked_func,
) = _forms(_varlen("stripe_flash_attn"), 1)
(
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
) = _forms(_llama3(), 1)


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Return what the `llama3_` functions take, for one rank of a packed sequence.

    Args:
        cu_seqlens: int [documents + 1], 0 and the ends of all documents of the whole sequence.
        causal: keys that only other ranks read are left out.
        rank, world_size: of the ranks that share the sequence.

    Returns:
        cu_seqlens_q and cu_seqlens_k, ends in this rank's queries and in the keys that they read; the longest
        document among each; and the slice of the keys within the sequence.

    Raises:
        RingShapeError: the ranks would have different numbers of tokens; pad the last document.
    """
    lengths = _lengths(cu_seqlens)
    if sum(lengths) % world_size:
        raise RingShapeError.wrong("cu_seqlens", f"a multiple of {world_size} tokens", sum(lengths), "pad it")
    share = sum(lengths) // world_size
    begin, end = rank * share, (rank + 1) * share
    ends = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    first = int(torch.searchsorted(ends, begin, right=True)) - 1  # the document of the first query
    last = int(torch.searchsorted(ends, end))  # the end of that of the last one
    mine = ends[first : last + 1]
    of_queries = mine.clamp(begin, end) - begin
    of_keys = (mine.clamp(max=end) if causal else mine) - mine[0]
    _of_all[of_queries] = lengths, of_queries.tolist()
    keys = slice(int(mine[0]), int(mine[0] + of_keys[-1]))
    longest = (int(x.diff().max()) for x in (of_queries, of_keys))
    return of_queries, of_keys, *longest, keys  # type: ignore[return-value]


# The adapter for transformers

DATA_PARAMS: dict[str, Any] = {}  # the arguments of the `llama3_` functions for the current batch
RING_ATTN_SWITCH = True


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: ProcessGroup) -> None:
    """Set the documents of the batch that comes next; see `llama3_flash_attn_prepare_cu_seqlens`."""
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    DATA_PARAMS.update(
        zip(names, llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, world_size), strict=True)
    )


def use_ring_attn(flag: bool) -> None:
    """Let models attend on the ring, or with False by transformers' own FlashAttention."""
    global RING_ATTN_SWITCH
    RING_ATTN_SWITCH = flag


def create_ring_flash_attention_forward(
    process_group: ProcessGroup, heads_k_stride: int
) -> list[Callable[..., Tensor]]:
    """Return replacements of transformers' `_flash_attention_forward`; here one serves all versions."""

    def forward(
        query_states: Tensor, key_states: Tensor, value_states: Tensor, attention_mask: Tensor | None,
        query_length: int, is_causal: bool, dropout: float = 0.0, softmax_scale: float | None = None,
        sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if attention_mask is not None or len(query_states) != 1:
            raise RingShapeError(
                f"expected one row of packed documents without a mask, got {len(query_states)} rows"
                f"{'' if attention_mask is None else ' and a mask'}; call update_ring_flash_attn_params first"
            )
        if "cu_seqlens_q" not in DATA_PARAMS:
            raise RingConfigError.wrong(
                "cu_seqlens", "the batch's", "none", "call update_ring_flash_attn_params first"
            )
        lengths = _gather_lengths(DATA_PARAMS["cu_seqlens_q"])
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        q, k, v = (x[0] for x in (query_states, key_states, value_states))
        out: Tensor = _attend_llama3(
            q, k, v, lengths, process_group, is_causal, window, False, scale=softmax_scale, dropout_p=dropout,
            alibi_slopes=None, softcap=softcap, sinks=s_aux,
        )  # fmt: skip
        return out[None]

    return [forward]


def substitute_hf_flash_attn(process_group: ProcessGroup, heads_k_stride: int) -> None:
    """Let models with `attn_implementation="flash_attention_2"` attend on the ring of `process_group`.

    Collective over the world, as `mesh_of`. Until `use_ring_attn(False)`.

    Raises:
        RingMeshError: as `mesh_of`.
        RingConfigError: this transformers has no such functions.
    """
    mesh_of(process_group)
    on_the_ring = create_ring_flash_attention_forward(process_group, heads_k_stride)[-1]
    apply(functools.partial(_switch_attention, on_the_ring), _register_attention)


_when_substituted = functools.partial(
    patch, stage="at_enable", when="ring_flash_attn.substitute_hf_flash_attn was called"
)
_TABLE = PatchTable("transformers", ">=4.56")


@_when_substituted(
    _TABLE.imported("transformers.modeling_flash_attention_utils"), "_flash_attention_forward",
    feature="ring_flash_attn", reason="computes FlashAttention on the ring",
)  # fmt: skip
def _switch_attention(
    on_the_ring: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return (on_the_ring if RING_ATTN_SWITCH else original)(*args, **kwargs)


@_when_substituted(
    _TABLE.imported("transformers"), "AttentionInterface", kind="registered",
    feature="ring_flash_attn.name", reason='"flash_attention_2" calls the function above',
)  # fmt: skip
def _register_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register("flash_attention_2", _attention)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend as transformers' `flash_attention_forward`, by the function that is in place at the time."""
    from transformers import modeling_flash_attention_utils as of_transformers

    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out: Tensor = of_transformers._flash_attention_forward(
        q,
        k,
        v,
        attention_mask,
        query_length=query.shape[2],
        is_causal=module.is_causal if is_causal is None else is_causal,
        dropout=dropout,
        softmax_scale=scaling,
        **kwargs,
    )
    return out, None


def install() -> None:
    """Let `import ring_flash_attn`, and the modules of that package, import this module.

    Raises:
        RingConfigError: the package itself has been imported; call `install()` before.
    """
    here = sys.modules[__name__]
    if sys.modules.get(_PACKAGE, here) is not here:
        raise RingConfigError("install: expected to come before `import ring_flash_attn`, got it imported")
    sys.modules[_PACKAGE] = here
    for name in _MODULES:
        sys.modules[f"{_PACKAGE}.{name}"] = here


adapters = hf_adapter = sys.modules[__name__]  # `ring_flash_attn.adapters.hf_adapter`

"""Call each contestant as its documentation does. A peer is one function: it prepares a cell on a rank.

It gets the cell and where the rank is, and returns the positions of the rank's shard and a differentiable
function of the shard's q, k, v, [batch, heads, tokens, head_dim]. `NotOfferedError` says that a package has
no argument for what a cell asks; any other exception is the package's own refusal, or its failure.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from ds_ring import (
    Causal,
    Documents,
    Full,
    RingMesh,
    SlidingWindow,
    make_layout,
    ring_attention,
    shard_sequence,
)
from ds_ring.masks.pattern import Pattern
from ds_ring.plugin import FAST_KERNELS, KERNELS

from .cells import Cell

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
BLOCK = 128  # rows of a block of masks, of kernels that have them


class NotOfferedError(Exception):
    """Report that a package has no argument for what a cell asks."""


class Entry(NamedTuple):
    """A contestant, ready on one rank."""

    positions: Tensor
    attend: Attend


class Where(NamedTuple):
    """Say which rank this is."""

    rank: int
    size: int
    device: str = "cpu"
    mesh: RingMesh | None = None  # that contestants of ds_ring share; they make one without

    @property
    def backend(self) -> str:
        """Return the backend of process groups."""
        return "nccl" if self.device == "cuda" else "gloo"

    def contiguous(self, tokens: int) -> Tensor:
        """Return the positions of this rank's shard when the sequence is cut into P pieces."""
        return torch.arange(tokens).chunk(self.size)[self.rank]

    def zigzag(self, tokens: int) -> Tensor:
        """Return pieces r and 2P - 1 - r of 2P."""
        pieces = torch.arange(tokens).chunk(2 * self.size)
        return torch.cat([pieces[self.rank], pieces[2 * self.size - 1 - self.rank]])

    def striped(self, tokens: int, bucket: int) -> Tensor:
        """Return consecutive buckets, each of every (T / bucket)-th position."""
        return torch.arange(tokens).view(bucket, -1).T.flatten().chunk(self.size)[self.rank]


Prepare = Callable[[Cell, Where], Entry]


class Peer(NamedTuple):
    """Hold a peer."""

    name: str
    package: str  # by the index's name
    prepare: Prepare
    note: str = ""
    dtype: torch.dtype | None = None  # the only one that it is made for
    take: str = ""  # what a user writes to have it

    def version(self) -> str | None:
        """Return the version, None if it is not installed."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


def make_pattern(cell: Cell) -> Pattern:
    """Return a cell's mask as a pattern."""
    pattern: Pattern = Causal() if cell.causal else Full()
    if cell.window is not None:
        pattern = pattern & SlidingWindow(cell.window)
    return pattern & Documents(cell.document_ids) if cell.documents else pattern


@cache
def _make_mesh(size: int, ulysses_size: int) -> RingMesh:
    return RingMesh.from_world(size // ulysses_size, ulysses_size, heartbeat_timeout_s=120)


def ds_ring(cell: Cell, where: Where, ulysses_size: int = 1) -> Entry:
    """Attend in a ring, layout auto, with heads divided among `ulysses_size` ranks; 0: all of them."""
    mesh, pattern = where.mesh or _make_mesh(where.size, ulysses_size or where.size), make_pattern(cell)
    blocks = KERNELS[FAST_KERNELS.get(where.device, "reference")].takes_blocks
    layout = make_layout(
        "auto", tokens=cell.tokens, ring_size=mesh.ring_size, pattern=pattern,
        multiple_of=mesh.ulysses_size, block_size=BLOCK if blocks else 1,
    )  # fmt: skip
    return Entry(
        shard_sequence(torch.arange(cell.tokens), layout, dim=0, mesh=mesh, pad_value=-1),
        partial(ring_attention, pattern=pattern, layout=layout, mesh=mesh),
    )


def ring_and_ulysses(cell: Cell, where: Where) -> Entry:
    """Attend in a ring of half the ranks, heads divided between two."""
    if where.size < 4 or where.size % 2:
        raise NotOfferedError("both together take four ranks or more, an even number")
    return ds_ring(cell, where, 2)


def attend_whole(cell: Cell, device: str = "cpu") -> Attend:
    """Return SDPA over all tokens: document by document; with a window, under a mask."""
    mask = cell.allowed.to(device) if cell.window is not None else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        if mask is not None:
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        cut = cell.documents or cell.tokens
        pieces = zip(q.split(cut, dim=2), k.split(cut, dim=2), v.split(cut, dim=2), strict=True)
        outs = [
            scaled_dot_product_attention(a, b, c, is_causal=cell.causal, enable_gqa=grouped)
            for a, b, c in pieces
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    return attend


def one_process(cell: Cell, where: Where) -> Entry:
    """Call SDPA with all tokens."""
    return Entry(torch.arange(cell.tokens), attend_whole(cell, where.device))


def deepspeed_ulysses(cell: Cell, where: Where) -> Entry:
    """Call `deepspeed.sequence.layer.DistributedAttention` around SDPA."""
    import deepspeed
    from deepspeed import comm
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # is compiled for two minutes, not used
    if not comm.is_initialized():
        comm.init_distributed(where.backend, dist_init_required=False, verbose=False)
    whole = attend_whole(cell, where.device)

    def local(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        return whole(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).contiguous()

    attention = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), 0)
        return out.transpose(1, 2)

    return Entry(where.contiguous(cell.tokens), attend)


def torch_context_parallel(cell: Cell, where: Where) -> Entry:
    """Call SDPA, by the name that it patches, inside torch's `context_parallel`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    if cell.documents or cell.window is not None:
        raise NotOfferedError("its ring of SDPA takes no mask")
    mesh, positions = init_device_mesh(where.device, (where.size,)), torch.arange(cell.tokens)
    positions = positions.to(where.device)
    with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
        mine = positions.cpu().clone()  # it cuts its buffers in place
    grouped = cell.heads != cell.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=cell.causal, enable_gqa=grouped)

    return Entry(mine, attend)


def _sequence_first(function: Callable[..., Tensor], **options: Any) -> Attend:
    """Call a function of [batch, tokens, heads, head_dim]."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), **options).transpose(1, 2)

    return attend


def _packed(function: Callable[..., Tensor], *arguments: Any, **options: Any) -> Attend:
    """Call a function of [tokens, heads, head_dim], whose result may have heads and head_dim in one."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        out = function(*rows, *arguments, **options)
        return out.reshape(len(out), q.shape[1], -1).transpose(0, 1)[None]

    return attend


def _window(cell: Cell) -> tuple[int, int]:
    return (-1, -1) if cell.window is None else (cell.window - 1, 0)


def _no_documents(cell: Cell, why: str = "no argument for documents") -> None:
    if cell.documents:
        raise NotOfferedError(why)


def _need_cuda(where: Where) -> None:
    if where.device != "cuda":
        raise NotOfferedError("it needs CUDA")


def _lend_to_ring_flash_attn() -> None:
    """Give it a name of transformers that its 0.1.8 imports and transformers 5 has not."""
    from transformers import modeling_flash_attention_utils as utils

    vars(utils).setdefault("is_flash_attn_greater_or_equal_2_10", lambda: True)


def ring_flash_attn_zigzag(cell: Cell, where: Where) -> Entry:
    """Call `zigzag_ring_flash_attn_func`; where nothing is causal, `ring_flash_attn_func`."""
    _lend_to_ring_flash_attn()
    from ring_flash_attn import ring_flash_attn_func, zigzag_ring_flash_attn_func

    _no_documents(cell, "llama3's function is for documents")
    options = {"causal": cell.causal, "window_size": _window(cell), "group": dist.group.WORLD}
    function = zigzag_ring_flash_attn_func if cell.causal else ring_flash_attn_func
    cut = where.zigzag if cell.causal else where.contiguous
    return Entry(cut(cell.tokens), _sequence_first(function, **options))


def ring_flash_attn_llama3(cell: Cell, where: Where) -> Entry:
    """Call `llama3_flash_attn_varlen_func`, which gathers K/V of some heads at a time."""
    _lend_to_ring_flash_attn()
    from ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func

    *sizes, keys = llama3_flash_attn_prepare_cu_seqlens(
        cell.ends.to(where.device), cell.causal, where.rank, where.size
    )
    attend = _packed(
        llama3_flash_attn_varlen_func, *sizes, heads_k_stride=1, local_k_slice=keys, causal=cell.causal,
        window_size=_window(cell), group=dist.group.WORLD,
    )  # fmt: skip
    return Entry(where.contiguous(cell.tokens), attend)


def yunchang_zigzag(cell: Cell, where: Where) -> Entry:
    """Call `LongContextAttention` with a ring of all ranks, `zigzag` where it is causal, FlashAttention 2."""
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    _no_documents(cell)
    set_seq_parallel_pg(1, where.size, where.rank, where.size)
    ring = "zigzag" if cell.causal else "basic"
    attention = LongContextAttention(ring_impl_type=ring, attn_type=AttnType.FA)
    options = {"causal": cell.causal, "window_size": _window(cell)}
    cut = where.zigzag if cell.causal else where.contiguous
    return Entry(cut(cell.tokens), _sequence_first(attention, **options))


def yunchang_torch(cell: Cell, where: Where) -> Entry:
    """Call `LongContextAttention` with a ring of all ranks, and torch's own kernel."""
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    _no_documents(cell)
    if cell.window is not None:
        raise NotOfferedError("its torch ring takes no window")
    set_seq_parallel_pg(1, where.size, where.rank, where.size)
    attention = LongContextAttention(ring_impl_type="basic_pytorch", attn_type=AttnType.TORCH_FLASH)
    return Entry(where.contiguous(cell.tokens), _sequence_first(attention, causal=cell.causal))


def ring_attention_pytorch(cell: Cell, where: Where) -> Entry:
    """Call `ring_flash_attn`, its ring in pure PyTorch; striped where it is causal."""
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    _no_documents(cell)
    if cell.window is not None:
        raise NotOfferedError("its look-back counts buckets, not tokens")
    bucket = 512 if cell.tokens >= 4096 else 8
    options = {
        "causal": cell.causal,
        "ring_reduce_col": where.size > 1,
        "striped_ring_attn": cell.causal,
        "bucket_size": bucket,
    }
    # Its query head h reads K/V head h mod G, ours h div (H / G).
    order = torch.arange(cell.heads).view(cell.kv_heads, -1).T.flatten()
    ring = _sequence_first(ring_flash_attn, **options)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring(q[:, order], k, v)[:, order.argsort()]

    if cell.causal and cell.tokens % bucket:
        raise NotOfferedError("its stripes are of whole buckets; its model pads, this function does not")
    positions = where.striped(cell.tokens, bucket) if cell.causal else where.contiguous(cell.tokens)
    return Entry(positions, attend)


def magi_attention(cell: Cell, where: Where) -> Entry:
    """Call MagiAttention's `calc_attn` with the tokens that its solver gives to this rank."""
    _need_cuda(where)
    from magi_attention.api import calc_attn, dispatch, magi_attn_varlen_key

    if cell.window is not None:
        raise NotOfferedError("its key of variable lengths is called without a window")
    ends = cell.ends.to(where.device)
    key = magi_attn_varlen_key(
        ends, ends, num_heads_q=cell.heads, num_heads_kv=cell.kv_heads, head_dim=cell.head_dim, pad_size=0,
        cp_group_or_mesh=dist.group.WORLD, causal=cell.causal,
    )  # fmt: skip
    every = torch.arange(cell.tokens, dtype=torch.float64, device=where.device)[:, None]
    positions = dispatch(every, key, pad_value=-1.0)[:, 0].long().cpu()
    return Entry(positions, _packed(lambda q, k, v: calc_attn(q, k, v, key)[0]))


def transformer_engine(cell: Cell, where: Where) -> Entry:
    """Call TransformerEngine's attention, as Megatron does: messages between pairs of ranks."""
    _need_cuda(where)
    from transformer_engine.pytorch import DotProductAttention

    if cell.window is not None or not cell.causal:
        raise NotOfferedError("its ring is called for causal attention without a window")
    attention = DotProductAttention(
        cell.heads, cell.head_dim, num_gqa_groups=cell.kv_heads, attention_dropout=0.0,
        attn_mask_type="padding_causal" if cell.documents else "causal",
        qkv_format="thd" if cell.documents else "bshd", cp_group=dist.group.WORLD,
        cp_global_ranks=list(range(where.size)), cp_stream=torch.cuda.Stream(), cp_comm_type="p2p",
    )  # fmt: skip
    if not cell.documents:
        attend = _sequence_first(lambda q, k, v: attention(q, k, v).unflatten(-1, (cell.heads, -1)))
        return Entry(where.zigzag(cell.tokens), attend)
    import transformer_engine_torch as tex

    ends, longest = cell.ends.to(where.device), max(cell.documents)
    positions = tex.thd_get_partitioned_indices(ends, cell.tokens, where.size, where.rank)
    sizes = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    return Entry(positions.long().cpu(), _packed(attention, **sizes))


_BF16 = torch.bfloat16
_LENT = "transformers 5 gets back a name that it imports"
ONE = Peer("one process", "torch", one_process, "SDPA, document by document", take="")
PEERS = (
    Peer("ring", "ds_ring", ds_ring, take='"ring_attention": {"ring_size": "auto"}'),
    Peer(
        "Ulysses", "ds_ring", partial(ds_ring, ulysses_size=0),
        take='"ring_attention": {"ulysses_size": P}, P the devices',
    ),
    Peer("ring and Ulysses", "ds_ring", ring_and_ulysses, take='"ring_attention": {"ulysses_size": 2}'),
    Peer(
        "DeepSpeed Ulysses", "deepspeed", deepspeed_ulysses, "around SDPA, document by document",
        take="deepspeed.sequence.layer.DistributedAttention",
    ),
    Peer(
        "torch context parallel", "torch", torch_context_parallel, "SDPA inside `context_parallel`",
        take="torch.distributed.tensor.experimental.context_parallel",
    ),
    Peer(
        "ring-flash-attn zigzag", "ring-flash-attn", ring_flash_attn_zigzag, _LENT, _BF16,
        "ring_flash_attn.zigzag_ring_flash_attn_func",
    ),
    Peer(
        "ring-flash-attn llama3", "ring-flash-attn", ring_flash_attn_llama3, _LENT, _BF16,
        "ring_flash_attn.llama3_flash_attn_varlen_func",
    ),
    Peer("MagiAttention", "magi-attention", magi_attention, dtype=_BF16, take="magi_attention.api.calc_attn"),
    Peer(
        "TransformerEngine", "transformer-engine", transformer_engine, dtype=_BF16,
        take="transformer_engine.pytorch.DotProductAttention with cp_group",
    ),
    Peer(
        "yunchang zigzag", "yunchang", yunchang_zigzag, dtype=_BF16,
        take="yunchang.LongContextAttention(ring_impl_type='zigzag')",
    ),
    Peer("yunchang, torch's kernel", "yunchang", yunchang_torch, take="yunchang.LongContextAttention"),
    Peer(
        "ring-attention-pytorch", "ring-attention-pytorch", ring_attention_pytorch,
        take="ring_attention_pytorch.ring_flash_attn",
    ),
)  # fmt: skip

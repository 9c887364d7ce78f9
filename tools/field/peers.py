"""Call each package as its documentation does. A peer is one function: it prepares a cell on a rank.

It gets the cell and where the rank is, and returns the positions of the rank's shard and a differentiable
function of the shard's q, k, v, [batch, heads, tokens, head_dim]. `NotOfferedError` says that a package has
no argument for what a cell asks; any other exception is the package's own refusal, or its failure.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from benchmarks.contestants import ContestSetup, Entry
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from ds_ring import Causal, Documents, Full, RingMesh, SlidingWindow, make_layout, ring_attention
from ds_ring.masks.pattern import Pattern

from . import flash_attn
from .cells import HEAD_DIM, Cell

SECONDS = 60


class NotOfferedError(Exception):
    """Report that a package has no argument for what a cell asks."""


class Where(NamedTuple):
    """Say which rank this is."""

    rank: int
    size: int

    def setup(self, cell: Cell) -> ContestSetup:
        """Return the shards that packages use."""
        return ContestSetup(self.rank, self.size, cell.tokens, None)


Prepare = Callable[[Cell, Where], Entry]


class Peer(NamedTuple):
    """Hold a peer."""

    name: str
    package: str  # by the index's name
    prepare: Prepare
    note: str = ""
    dtype: torch.dtype | None = None  # the only one that it is made for

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


def ds_ring(cell: Cell, where: Where) -> Entry:
    """Attend in a ring, layout auto."""
    mesh, pattern = RingMesh.from_world(where.size), make_pattern(cell)
    layout = make_layout("auto", tokens=cell.tokens, ring_size=where.size, pattern=pattern)
    return Entry(
        torch.from_numpy(layout.positions(where.rank)),
        lambda q, k, v: ring_attention(q, k, v, pattern=pattern, layout=layout, mesh=mesh),
    )


class _Swapped(torch.autograd.Function):
    """Give k and v on, and each the other one's gradient: a fault of rings that a sum of gradients hides."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.clone(), v.clone()

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        return dv, dk


def swapped(cell: Cell, where: Where) -> Entry:
    """Attend with a seeded fault: dk and dv are swapped."""
    positions, attend = ds_ring(cell, where)
    return Entry(positions, lambda q, k, v: attend(q, *_Swapped.apply(k, v)))


def ulysses(cell: Cell, where: Where) -> Entry:
    """Call `deepspeed.sequence.layer.DistributedAttention`; the mask is of all tokens."""
    import deepspeed
    from deepspeed import comm
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # is compiled for two minutes, not used
    if not comm.is_initialized():
        comm.init_distributed("gloo", dist_init_required=False, verbose=False)

    def local(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=cell.allowed, enable_gqa=True)
        return out.transpose(1, 2).contiguous()

    attention = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), 0)
        return out.transpose(1, 2)

    return Entry(where.setup(cell).contiguous, attend)


def torch_context_parallel(cell: Cell, where: Where) -> Entry:
    """Call SDPA, by the name that it patches, inside torch's `context_parallel`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh, positions = init_device_mesh("cpu", (where.size,)), torch.arange(cell.tokens)
    with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
        mine = positions.clone()  # it cuts its buffers in place
    causal = cell.causal and cell.window is None and not cell.documents

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None if causal or not cell.causal else cell.allowed[mine]
        with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
            return functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
            )

    return Entry(mine, attend)


def _sequence_first(
    function: Callable[..., Tensor], **options: Any
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Call a function of [batch, tokens, heads, head_dim]."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), **options).transpose(1, 2)

    return attend


def _window(cell: Cell) -> tuple[int, int]:
    return (-1, -1) if cell.window is None else (cell.window - 1, 0)


def _no_documents(cell: Cell, why: str = "no argument for documents") -> None:
    if cell.documents:
        raise NotOfferedError(why)


def _lend_to_ring_flash_attn() -> None:
    """Give it flash-attn, and a name of transformers that its 0.1.8 imports and transformers 5 has not."""
    from transformers import modeling_flash_attention_utils as utils

    flash_attn.install()
    vars(utils).setdefault("is_flash_attn_greater_or_equal_2_10", lambda: True)


def ring_flash_attn_zigzag(cell: Cell, where: Where) -> Entry:
    """Call `zigzag_ring_flash_attn_func`; where nothing is causal, `ring_flash_attn_func`."""
    _lend_to_ring_flash_attn()
    from ring_flash_attn import ring_flash_attn_func, zigzag_ring_flash_attn_func

    _no_documents(cell, "llama3's function is for documents")
    options = {"causal": cell.causal, "window_size": _window(cell), "group": dist.group.WORLD}
    function = zigzag_ring_flash_attn_func if cell.causal else ring_flash_attn_func
    setup = where.setup(cell)
    return Entry(setup.zigzag if cell.causal else setup.contiguous, _sequence_first(function, **options))


def ring_flash_attn_llama3(cell: Cell, where: Where) -> Entry:
    """Call `llama3_flash_attn_varlen_func`, which gathers K/V of some heads at a time."""
    _lend_to_ring_flash_attn()
    from ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func

    ends_q, ends_k, most_q, most_k, keys = llama3_flash_attn_prepare_cu_seqlens(
        cell.ends, cell.causal, where.rank, where.size
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        out: Tensor = llama3_flash_attn_varlen_func(
            *rows, ends_q, ends_k, most_q, most_k, heads_k_stride=1, local_k_slice=keys, causal=cell.causal,
            window_size=_window(cell), group=dist.group.WORLD,
        )  # fmt: skip
        return out.transpose(0, 1)[None]

    return Entry(where.setup(cell).contiguous, attend)


def yunchang_zigzag(cell: Cell, where: Where) -> Entry:
    """Call `LongContextAttention` with a ring of all ranks, `zigzag` where it is causal, FlashAttention 2."""
    flash_attn.install()
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    _no_documents(cell)
    set_seq_parallel_pg(1, where.size, where.rank, where.size)
    ring = "zigzag" if cell.causal else "basic"
    attention = LongContextAttention(ring_impl_type=ring, attn_type=AttnType.FA)
    setup = where.setup(cell)
    options = {"causal": cell.causal, "window_size": _window(cell)}
    return Entry(setup.zigzag if cell.causal else setup.contiguous, _sequence_first(attention, **options))


def yunchang_torch(cell: Cell, where: Where) -> Entry:
    """Call `LongContextAttention` with a ring of all ranks, and torch's own kernel."""
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    _no_documents(cell)
    if cell.window is not None:
        raise NotOfferedError("its torch ring takes no window")
    set_seq_parallel_pg(1, where.size, where.rank, where.size)
    attention = LongContextAttention(ring_impl_type="basic_pytorch", attn_type=AttnType.TORCH_FLASH)
    return Entry(where.setup(cell).contiguous, _sequence_first(attention, causal=cell.causal))


def ring_attention_pytorch(cell: Cell, where: Where) -> Entry:
    """Call `ring_flash_attn`, its ring in pure PyTorch; striped where it is causal."""
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    _no_documents(cell)
    if cell.window is not None:
        raise NotOfferedError("its look-back counts buckets, not tokens")
    bucket = 8
    options = {
        "causal": cell.causal,
        "ring_reduce_col": where.size > 1,
        "striped_ring_attn": cell.causal,
        "bucket_size": bucket,
    }
    setup, groups = where.setup(cell), cell.heads // cell.kv_heads
    # Its query head h reads K/V head h mod G, ours h div (H / G).
    order = torch.arange(cell.heads).view(cell.kv_heads, groups).T.flatten()
    ring = _sequence_first(ring_flash_attn, **options)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring(q[:, order], k, v)[:, order.argsort()]

    if cell.causal and cell.tokens % bucket:
        raise NotOfferedError("its stripes are of whole buckets; its model pads, this function does not")
    positions = setup.striped(bucket) if cell.causal else setup.contiguous
    return Entry(positions, attend)


def megatron(cell: Cell, where: Where) -> Entry:
    """Make Megatron core's own attention with a context-parallel size above one."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=cell.heads * HEAD_DIM, num_attention_heads=cell.heads,
        context_parallel_size=where.size,
    )  # fmt: skip
    DotProductAttention(config, 1, AttnMaskType.causal, "self")
    raise NotOfferedError("made, but its ranks attend to their own tokens alone")


def transformer_engine(cell: Cell, where: Where) -> Entry:
    """Call TransformerEngine's attention, Megatron's way to context parallelism."""
    from transformer_engine.pytorch import DotProductAttention

    DotProductAttention(cell.heads, HEAD_DIM, num_gqa_groups=cell.kv_heads, cp_group=dist.group.WORLD)
    raise NotOfferedError("it needs CUDA")


_FLASH = "bfloat16, as flash-attn has no float32; flash-attn's functions are a stand-in"
_BF16 = torch.bfloat16
_LENT = f"{_FLASH}, and a name that it imports from transformers and that 5.23 has not"
PEERS = (
    Peer("ds_ring", "ds_ring", ds_ring),
    Peer("ds_ring, bfloat16", "ds_ring", ds_ring, "the same in the dtype of flash-attn's callers", _BF16),
    Peer("DeepSpeed Ulysses", "deepspeed", ulysses, "the local SDPA gets the mask of all tokens"),
    Peer("torch context parallel", "torch", torch_context_parallel, "SDPA inside `context_parallel`"),
    Peer("ring-flash-attn zigzag", "ring-flash-attn", ring_flash_attn_zigzag, _LENT, _BF16),
    Peer("ring-flash-attn llama3", "ring-flash-attn", ring_flash_attn_llama3, _LENT, _BF16),
    Peer("yunchang zigzag", "yunchang", yunchang_zigzag, _FLASH, _BF16),
    Peer("yunchang, torch's kernel", "yunchang", yunchang_torch),
    Peer("ring-attention-pytorch", "ring-attention-pytorch", ring_attention_pytorch),
    Peer("Megatron core", "megatron-core", megatron),
    Peer("TransformerEngine", "transformer-engine", transformer_engine),
)
SEEDED = Peer("ds_ring, dk and dv swapped", "ds_ring", swapped, "a seeded fault")

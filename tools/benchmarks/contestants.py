"""Contestants of `attention.py`: each is one function that prepares causal attention on a rank.

It gets a `ContestSetup` and returns an `Entry`: the positions of this rank, and a differentiable function of
the rank's q, k, v, [batch, heads, local tokens, head_dim] each. An exception means that it does not run here;
its row has the message. Packages of others are optional:

    pip install --no-deps yunchang ring-attention-pytorch einops beartype jaxtyping wadler-lindig
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measuring import Attend
from ds_ring import Causal, PassOptions, RingMesh, make_layout, ring_attention

BUCKET = 512  # of the pure PyTorch ring
RANKS, WHOLE, ONE_THREAD = "ranks", "one process", "one process, one thread"


@dataclass(frozen=True)
class ContestSetup:
    """Where a contestant runs."""

    # rank, size: of the process group; 0 and 1 for one process
    rank: int
    size: int
    tokens: int  # of the whole sequence
    mesh: RingMesh | None  # of the ranks; None for one process

    @property
    def contiguous(self) -> Tensor:
        """The positions of this rank's shard when the sequence is cut into P pieces."""
        return torch.arange(self.tokens).chunk(self.size)[self.rank]

    @property
    def zigzag(self) -> Tensor:
        """Pieces r and 2P - 1 - r of 2P."""
        pieces = torch.arange(self.tokens).chunk(2 * self.size)
        return torch.cat([pieces[self.rank], pieces[2 * self.size - 1 - self.rank]])

    def striped(self, bucket: int) -> Tensor:
        """Consecutive buckets, each of every (T / bucket)-th position."""
        return torch.arange(self.tokens).view(bucket, -1).T.flatten().chunk(self.size)[self.rank]


class Entry(NamedTuple):
    """A contestant, ready on one rank."""

    positions: Tensor
    attend: Attend


class Contestant(NamedTuple):
    """How it is prepared, and on which processes it runs."""

    prepare: Callable[[ContestSetup], Entry]
    where: str


CONTESTANTS: dict[str, Contestant] = {}


def contestant(name: str, where: str = RANKS) -> Callable[[Callable[[ContestSetup], Entry]], Any]:
    """Enter the table under this name."""

    def enter(prepare: Callable[[ContestSetup], Entry]) -> Callable[[ContestSetup], Entry]:
        CONTESTANTS[name] = Contestant(prepare, where)
        return prepare

    return enter


def _sdpa(place: ContestSetup) -> Entry:
    return Entry(
        torch.arange(place.tokens), lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)
    )


contestant("SDPA, one process", WHOLE)(_sdpa)
contestant("SDPA, one thread", ONE_THREAD)(_sdpa)


def _ours(place: ContestSetup, layout_name: str = "zigzag", **options: Any) -> Entry:
    assert place.mesh is not None
    layout = make_layout(layout_name, tokens=place.tokens, ring_size=place.size)
    attend = functools.partial(
        ring_attention,
        pattern=Causal(),
        layout=layout,
        mesh=place.mesh,
        options=PassOptions(hop_timeout_seconds=600, **options),
    )
    return Entry(torch.from_numpy(layout.positions(place.rank)), attend)


contestant("ds_ring")(_ours)
contestant("ds_ring, no overlap")(functools.partial(_ours, overlap=False))
contestant("ds_ring, reproducible")(functools.partial(_ours, transport="reproducible"))
contestant("ds_ring, all_gather")(functools.partial(_ours, transport="all_gather"))


@contestant("all-gather + mask")
def all_gather_and_mask(place: ContestSetup) -> Entry:
    """What is written first by hand: gather K and V, one masked SDPA."""
    from torch.distributed.nn.functional import all_gather

    mine = place.contiguous
    visible = mine[:, None] >= torch.arange(place.tokens)[None, :]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole_k, whole_v = (torch.cat(all_gather(x.contiguous()), dim=2) for x in (k, v))
        return scaled_dot_product_attention(q, whole_k, whole_v, attn_mask=visible)

    return Entry(mine, attend)


@contestant("DeepSpeed Ulysses")
def ulysses(place: ContestSetup) -> Entry:
    """`deepspeed.sequence.layer.DistributedAttention` around SDPA, [b, s, h, d]."""
    import deepspeed
    from deepspeed import comm
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # is compiled for two minutes, not used

    def local(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()

    if not comm.is_initialized():
        comm.init_distributed("gloo", dist_init_required=False, verbose=False)
    attention = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), 0).transpose(1, 2)

    return Entry(place.contiguous, attend)


@contestant("torch context parallel")
def torch_context_parallel(place: ContestSetup) -> Entry:
    """`torch.distributed.tensor.experimental.context_parallel`, its ring of SDPA."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (place.size,))
    positions = torch.arange(place.tokens)  # it cuts one buffer at least

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Entry(place.zigzag, attend)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _lent_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """flash_attn's forward on the CPU: [b, s, h, d] in, out and lse [b, h, s]."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = _flash(*heads_first, 0.0, options["causal"], scale=softmax_scale)
    return out.transpose(1, 2), lse


def _lent_backward(*arguments: Any, **options: Any) -> None:
    """flash_attn's backward, which writes into the gradients that it is given."""
    grad, q, k, v, out, lse, dq, dk, dv, _, scale, causal = arguments[:12]
    del options
    first = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    grads = _flash_backward(*first, lse.contiguous(), 0.0, causal, scale=scale)
    for into, result in zip((dq, dk, dv), grads, strict=True):
        into.copy_(result.transpose(1, 2))


@contestant("yunchang zigzag ring")
def yunchang_zigzag(place: ContestSetup) -> Entry:
    """The zigzag ring of yunchang (and of ring-flash-attn), with PyTorch's CPU kernel lent to it.

    It is made for half precision: in float32 `dq_buffer.to(torch.float32)` is no copy, and dq adds to itself.
    """
    from yunchang.ring import zigzag_ring_flash_attn as module

    def lend(kind: object, stage: str, *_: object, **__: object) -> Callable[..., Any]:
        del kind
        return _lent_forward if stage == "fwd-only" else _lent_backward

    module.select_flash_attn_impl = lend

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = module.zigzag_ring_flash_attn_func(
            *(x.transpose(1, 2).contiguous() for x in (q, k, v)), causal=True, group=dist.group.WORLD
        )
        return out.transpose(1, 2)

    return Entry(place.zigzag, attend)


@contestant("ring-attention-pytorch")
def pure_pytorch_ring(place: ContestSetup) -> Entry:
    """The striped ring of ring-attention-pytorch in pure PyTorch."""
    from ring_attention_pytorch.ring_flash_attention import (
        ring_flash_attn,
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ring_flash_attn(
            *(x.transpose(1, 2).contiguous() for x in (q, k, v)),
            causal=True,
            ring_reduce_col=True,
            striped_ring_attn=True,
            bucket_size=BUCKET,
        )
        return out.transpose(1, 2)

    return Entry(place.striped(BUCKET), attend)

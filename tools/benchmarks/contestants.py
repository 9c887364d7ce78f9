"""Contestants of `attention.py`: each is one function that prepares causal attention on a rank.

Several are those of `ds-ring compare` (launcher/compare/peers.py). An exception means that one does not run
here; its row has the message. Packages of others are optional:

    pip install --no-deps yunchang ring-attention-pytorch einops beartype jaxtyping wadler-lindig
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ds_ring import Causal, PassOptions, make_layout, ring_attention
from ds_ring_launcher.compare import peers
from ds_ring_launcher.compare.cells import Cell
from ds_ring_launcher.compare.peers import Entry, Prepare, Where

RANKS, WHOLE, ONE_THREAD = "ranks", "one process", "one process, one thread"


class Contestant(NamedTuple):
    """How it is prepared, and on which processes it runs."""

    prepare: Prepare
    where: str


CONTESTANTS: dict[str, Contestant] = {}


def contestant(name: str, where: str = RANKS) -> Callable[[Prepare], Any]:
    """Enter the table under this name."""

    def enter(prepare: Prepare) -> Prepare:
        CONTESTANTS[name] = Contestant(prepare, where)
        return prepare

    return enter


contestant("SDPA, one process", WHOLE)(peers.one_process)
contestant("SDPA, one thread", ONE_THREAD)(peers.one_process)


def _ours(cell: Cell, where: Where, **options: Any) -> Entry:
    assert where.mesh is not None
    layout = make_layout("zigzag", tokens=cell.tokens, ring_size=where.size)
    attend = functools.partial(
        ring_attention,
        pattern=Causal(),
        layout=layout,
        mesh=where.mesh,
        options=PassOptions(hop_timeout_seconds=600, **options),
    )
    return Entry(torch.from_numpy(layout.positions(where.rank)), attend)


contestant("ds_ring")(_ours)
contestant("ds_ring, no overlap")(functools.partial(_ours, overlap=False))
contestant("ds_ring, reproducible")(functools.partial(_ours, transport="reproducible"))
contestant("ds_ring, all_gather")(functools.partial(_ours, transport="all_gather"))


@contestant("all-gather + mask")
def all_gather_and_mask(cell: Cell, where: Where) -> Entry:
    """What is written first by hand: gather K and V, one masked SDPA."""
    from torch.distributed.nn.functional import all_gather

    mine = where.contiguous(cell.tokens)
    visible = mine[:, None] >= torch.arange(cell.tokens)[None, :]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole_k, whole_v = (torch.cat(all_gather(x.contiguous()), dim=2) for x in (k, v))
        return scaled_dot_product_attention(q, whole_k, whole_v, attn_mask=visible)

    return Entry(mine, attend)


contestant("DeepSpeed Ulysses")(peers.deepspeed_ulysses)
contestant("torch context parallel")(peers.torch_context_parallel)

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
def yunchang_zigzag(cell: Cell, where: Where) -> Entry:
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

    return Entry(where.zigzag(cell.tokens), attend)


contestant("ring-attention-pytorch")(peers.ring_attention_pytorch)

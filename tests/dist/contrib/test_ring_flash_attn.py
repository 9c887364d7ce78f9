"""The functions of ring-flash-attn over ds_ring, against dense attention in float64 and one process.

The shards are cut here as that package's own tests cut them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ring.contrib import ring_flash_attn as module
from ds_ring.errors import RingConfigError
from ds_ring.masks.catalog import Band, Causal, Full, SlidingWindow
from ds_ring.masks.tiles import UNBOUNDED
from tests.dist.harness import Pool
from tests.reference import attend_by_counts, relative_error

LENGTHS = (16, 48, 8, 24)  # of documents, multiples of 2P
HEADS, GROUPS, DIM = 4, 2, 8
FAMILIES = ("ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn")
# Function, causal, window (before, after; -1 for all), whether there are slopes
CASES = [
    *((f"{family}{form}", True, (-1, -1), False) for family in FAMILIES for form in ("", "_varlen")),
    ("llama3_flash_attn_varlen", True, (-1, -1), False),
    ("ring_flash_attn", False, (-1, -1), False),
    ("ring_flash_attn_varlen", False, (-1, -1), False),
    ("llama3_flash_attn_varlen", False, (5, 5), False),
    ("zigzag_ring_flash_attn", True, (7, 0), False),
    ("ring_flash_attn", False, (-1, -1), True),
    ("zigzag_ring_flash_attn", False, (3, 3), True),
    ("stripe_flash_attn", True, (-1, -1), True),
    ("zigzag_ring_flash_attn_varlen", False, (-1, -1), True),
    ("llama3_flash_attn_varlen", False, (5, 2), True),
    ("ring_flash_attn", False, (-1, 0), False),
    ("ring_flash_attn", False, (2, 5), False),
    ("zigzag_ring_flash_attn", False, (-1, 4), False),
    ("llama3_flash_attn_varlen", False, (4, -1), False),
    ("ring_flash_attn", True, (6, 3), False),
    ("stripe_flash_attn", False, (0, 1), False),
]
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.03])


def part(x: Tensor, name: str, rank: int, world_size: int) -> Tensor:
    """This rank's tokens of x [T, ...]."""
    if name.startswith("stripe"):
        return x[rank::world_size]
    if name.startswith("zigzag"):
        parts = x.chunk(2 * world_size)
        return torch.cat([parts[rank], parts[2 * world_size - 1 - rank]])
    return x.chunk(world_size)[rank]


def shard(x: Tensor, name: str, rank: int, world_size: int) -> Tensor:
    """This rank's tokens of every document, or of the whole sequence."""
    if "varlen" not in name or name.startswith("llama3"):
        return part(x, name, rank, world_size)
    return torch.cat([part(document, name, rank, world_size) for document in x.split(LENGTHS)])


def flash_weights(name: str, causal: bool, window_size: tuple[int, int], biased: bool) -> Tensor:
    """How often a pair counts by FlashAttention's own definitions of windows and slopes, [1 or heads, T, T]."""
    i, j = torch.arange(sum(LENGTHS))[:, None], torch.arange(sum(LENGTHS))
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    before, after = window_size
    sees = (j <= i) | (not causal)
    sees = sees & ((j >= i - before) | (before < 0)) & ((j <= i + after) | (after < 0))
    sees = sees & ((ids[:, None] == ids) | ("varlen" not in name))
    return sees * (-SLOPES.double() * biased)[:, None, None].mul((i - j).abs()).exp()


def errors(
    rank: int, world_size: int, name: str, causal: bool, window_size: tuple[int, int], biased: bool
) -> list[float]:
    """Errors of out, lse, dq, dk, dv in float64, of the function of q, k, v; the packed ones give the same bits."""
    module._meshes.clear()  # their groups ended with the last call on this pool
    tokens, generator = sum(LENGTHS), torch.Generator().manual_seed(0)
    q, grad = (torch.randn(tokens, HEADS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(tokens, GROUPS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    weights = flash_weights(name, causal, window_size, biased)
    want = attend_by_counts(*(x.transpose(0, 1)[None] for x in (q, k, v, grad)), weights)
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    arguments: tuple[Any, ...] = ()
    if name.startswith("llama3"):
        *many, keys = module.llama3_flash_attn_prepare_cu_seqlens(ends, causal, rank, world_size)
        arguments = (*many, 1, keys)
    elif "varlen" in name:
        arguments = (ends // world_size, max(LENGTHS) // world_size)
    batched = "varlen" not in name
    mine = [shard(x, name, rank, world_size) for x in (q, k, v, grad)]
    q, k, v, grad = (x[None] if batched else x for x in mine)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend, of_pairs, packed = (
        functools.partial(
            getattr(module, f"{name}_{form}"), causal=causal, window_size=window_size,
            alibi_slopes=SLOPES if biased else None,
        )
        for form in ("func", "kvpacked_func", "qkvpacked_func")
    )  # fmt: skip
    out, lse, none = attend(*leaves, *arguments, return_attn_probs=True)
    assert none is None
    out.backward(grad)
    assert torch.equal(of_pairs(q, torch.stack([k, v], 2 if batched else 1), *arguments), out)
    every = torch.stack([q, *(x.repeat_interleave(2, -2) for x in (k, v))], 2 if batched else 1)
    assert relative_error(packed(every, *arguments), out) < 1e-12
    whole = (want.out, want.lse[..., None], want.dq, want.dk, want.dv)
    rows = (out, lse.transpose(-1, -2)[..., None], *(x.grad for x in leaves))
    wanted = (shard(x[0].transpose(0, 1), name, rank, world_size) for x in whole)
    return [relative_error(x[0] if batched else x, y) for x, y in zip(rows, wanted, strict=True)]


@pytest.mark.day(
    "2-zigzag_ring_flash_attn_varlen-True-window_size3-False",
    "2-stripe_flash_attn-True-window_size4-False",
    "2-llama3_flash_attn_varlen-True-window_size6-False",
    "4-ring_flash_attn_varlen-True-window_size1-False",
    "2-zigzag_ring_flash_attn-True-window_size10-False",
)
@pytest.mark.situation(
    "operators", "ring_flash_attn functions with alibi_slopes or any window_size, not causal"
)
@pytest.mark.parametrize(("name", "causal", "window_size", "biased"), CASES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_function_is_exact(
    rank_pool: Pool, world_size: int, name: str, causal: bool, window_size: tuple[int, int], biased: bool
) -> None:
    for result in rank_pool(world_size).run(errors, name, causal, window_size, biased):
        assert max(result) < 1e-12, result


@pytest.mark.parametrize(
    ("causal", "window_size", "pattern"),
    [
        (True, (-1, -1), Causal()), (False, (-1, -1), Full()), (False, (-1, 0), Causal()),
        (True, (7, 3), SlidingWindow(8)), (False, (7, 0), SlidingWindow(8)),
        (False, (3, 3), SlidingWindow(4, causal=False)), (False, (2, 5), Band(-5, 2)),
        (False, (-1, 4), Band(-4, UNBOUNDED)), (False, (4, -1), Band(-UNBOUNDED, 4)),
    ],
)  # fmt: skip
def test_a_window_is_the_pattern_of_the_same_pairs(
    causal: bool, window_size: tuple[int, int], pattern: object
) -> None:
    assert module._make_pattern(causal, window_size) == pattern


def test_documents_need_not_be_cut_evenly() -> None:
    """Ranks have equally many tokens of each."""
    layout = module._make_document_layout("zigzag_ring_flash_attn", (6, 10), 2)
    assert [layout.positions(rank).tolist() for rank in (0, 1)] == [
        [0, 4, 5, 6, 7, 13, 14, 15],
        [1, 2, 3, 8, 9, 10, 11, 12],
    ]


def trained(rank: int, world_size: int) -> list[float]:
    """Errors of the loss and of every gradient of a Llama, as OpenRLHF trains it: rows unpadded, packed, cut."""
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    module._meshes.clear()
    module.install()
    from ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params
    from ring_flash_attn.adapters.hf_adapter import DATA_PARAMS

    assert DATA_PARAMS is module.DATA_PARAMS and sys.modules["ring_flash_attn"] is module
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).double()  # fmt: skip
    rows = [torch.randint(64, (length,)) for length in (13, 7, 22, 5)]

    def loss_of(logits: Tensor, following: Tensor, counts: Tensor) -> Tensor:
        losses = torch.nn.functional.cross_entropy(logits, following, reduction="none")
        return (losses * counts).sum()

    want = sum(
        loss_of(model(row[None]).logits[0], row.roll(-1), torch.arange(len(row)) < len(row) - 1)
        for row in rows
    )
    want.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    substitute_hf_flash_attn(dist.group.WORLD, 1)
    model.config._attn_implementation = (
        "flash_attention_2"  # from_pretrained would ask for the package flash_attn
    )
    lengths = [len(row) for row in rows]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    filling = -int(ends[-1]) % world_size
    ends[-1] += filling  # as OpenRLHF does it: the padding continues the last document
    fill = torch.zeros(filling, dtype=torch.int64)
    ids = torch.cat([*rows, fill])
    following = torch.cat([*(row.roll(-1) for row in rows), fill])
    counts = torch.cat([*(torch.arange(n) < n - 1 for n in lengths), fill.bool()])
    positions = torch.cat([*map(torch.arange, lengths), fill])
    mine = [x.chunk(world_size)[rank] for x in (ids, positions, following, counts)]
    update_ring_flash_attn_params(ends.int(), dist.group.WORLD)
    logits = model(mine[0][None], position_ids=mine[1][None], use_cache=False).logits
    loss = loss_of(logits[0], *mine[2:])
    loss.backward()
    total = loss.detach()
    for x in (total, *(p.grad for p in model.parameters())):
        dist.all_reduce(x)
    return [
        relative_error(total, want),
        *(relative_error(p.grad, wanted[n]) for n, p in model.named_parameters()),
    ]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.day("4")
def test_a_transformers_model_trains_as_row_by_row(rank_pool: Pool, world_size: int) -> None:
    for result in rank_pool(world_size).run(trained):
        assert len(result) == 22
        assert max(result) < 1e-10, result


def refused(rank: int, world_size: int, what: str) -> None:
    """Each of these raises on every rank, also where only rank 0 is wrong."""
    module._meshes.clear()
    x = torch.zeros(8, HEADS, DIM)
    wrong = rank == 0
    ends = torch.tensor([0, 8])
    many = module.llama3_flash_attn_prepare_cu_seqlens(ends * world_size, True, rank, world_size)
    dense = functools.partial(module.ring_flash_attn_func, x[None], x[None], x[None], causal=True)
    zigzag, llama3 = (
        functools.partial(getattr(module, f"{name}_flash_attn_varlen_func"), x, x, x, causal=True)
        for name in ("zigzag_ring", "llama3")
    )
    calls: dict[str, Callable[[], Any]] = {
        "dropout": lambda: dense(dropout_p=0.1 * wrong),
        "slopes": lambda: dense(alibi_slopes=torch.ones(2, HEADS) if wrong else None),
        "tokens": lambda: zigzag(ends // (2 if wrong else 1), 8),
        "ends": lambda: llama3(many[0].clone(), *many[1:4], 1, many[4]),
        "filled anew": lambda: llama3(many[0].mul_(2 if wrong else 1), *many[1:4], 1, many[4]),
        "length": lambda: module.llama3_flash_attn_prepare_cu_seqlens(ends + 1, True, rank, world_size),
        "mask": lambda: module.create_ring_flash_attention_forward(None, 1)[-1](
            x[None], x[None], x[None], torch.ones(1, 8), 8, True
        ),
    }
    calls[what]()


@pytest.mark.parametrize(
    ("what", "says"),
    {
        "dropout": "dropout_p: expected 0, got 0.1",
        "slopes": "alibi_slopes: expected one number for each head, and no softcap, got (2, ",
        "tokens": "expected 4 tokens of q, k and v on each of 2 ranks",
        "ends": "expected the tensor of llama3_flash_attn_prepare_cu_seqlens as it was made, got another one",
        "filled anew": "got other numbers in it; call it for each batch",
        "length": "cu_seqlens: expected 0 and the ascending ends",
        "mask": "expected one row of packed documents without a mask",
    }.items(),
)
def test_what_the_ring_does_not_compute_is_refused(rank_pool: Pool, what: str, says: str) -> None:
    outcomes = rank_pool(2).collect(refused, what)
    assert all(item.error_type.startswith("Ring") for item in outcomes), outcomes
    assert says in outcomes[0].message


def test_the_package_itself_is_not_replaced_behind_its_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ring_flash_attn", pytest)
    with pytest.raises(RingConfigError, match="expected to come before"):
        module.install()

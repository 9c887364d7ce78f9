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

import ds_ring
from ds_ring.contrib.ring_flash_attn import _make_document_layout
from ds_ring.errors import RingConfigError
from ds_ring.masks.pattern import Pattern
from tests.dist.harness import Pool
from tests.reference import dense_attention, relative_error

LENGTHS = (16, 48, 8, 24)  # of documents, multiples of 2P
HEADS, GROUPS, DIM = 4, 2, 8
FAMILIES = ("ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn")
CASES = [
    *((f"{family}{form}", {"causal": True}) for family in FAMILIES for form in ("", "_varlen")),
    ("llama3_flash_attn_varlen", {"causal": True}),
    ("ring_flash_attn", {"causal": False}),
    ("ring_flash_attn_varlen", {"causal": False}),
    ("llama3_flash_attn_varlen", {"causal": False, "window_size": (5, 5)}),
    ("zigzag_ring_flash_attn", {"causal": True, "window_size": (7, 0)}),
]


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


def pattern_of(name: str, causal: bool, window_size: tuple[int, int] = (-1, -1)) -> Pattern:
    pattern: Pattern = ds_ring.Causal() if causal else ds_ring.Full()
    if window_size[0] >= 0:
        pattern = ds_ring.SlidingWindow(window_size[0] + 1, causal=causal)
    if "varlen" not in name:
        return pattern
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return pattern & ds_ring.Documents(ids)


def errors(rank: int, world_size: int, name: str, options: dict[str, Any]) -> list[float]:
    """Errors of out, lse, dq, dk, dv in float64, of the function of q, k, v; the packed ones give the same bits."""
    from ds_ring.contrib import ring_flash_attn as module

    module._meshes.clear()  # their groups ended with the last call on this pool
    tokens, generator = sum(LENGTHS), torch.Generator().manual_seed(0)
    q, grad = (torch.randn(tokens, HEADS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(tokens, GROUPS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    want = dense_attention(*(x.transpose(0, 1)[None] for x in (q, k, v, grad)), pattern_of(name, **options))
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    arguments: tuple[Any, ...] = ()
    if name.startswith("llama3"):
        *many, keys = module.llama3_flash_attn_prepare_cu_seqlens(ends, options["causal"], rank, world_size)
        arguments = (*many, 1, keys)
    elif "varlen" in name:
        arguments = (ends // world_size, max(LENGTHS) // world_size)
    batched = "varlen" not in name
    mine = [shard(x, name, rank, world_size) for x in (q, k, v, grad)]
    q, k, v, grad = (x[None] if batched else x for x in mine)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend = getattr(module, f"{name}_func")
    out, lse, none = attend(*leaves, *arguments, return_attn_probs=True, **options)
    assert none is None
    out.backward(grad)
    packed = getattr(module, f"{name}_kvpacked_func")(
        q, torch.stack([k, v], 2 if batched else 1), *arguments, **options
    )
    assert torch.equal(packed, out)
    every = torch.stack([q, *(x.repeat_interleave(2, -2) for x in (k, v))], 2 if batched else 1)
    assert (
        relative_error(getattr(module, f"{name}_qkvpacked_func")(every, *arguments, **options), out) < 1e-12
    )
    whole = (want.out, want.lse[..., None], want.dq, want.dk, want.dv)
    rows = (out, lse.transpose(-1, -2)[..., None], *(x.grad for x in leaves))
    wanted = (shard(x[0].transpose(0, 1), name, rank, world_size) for x in whole)
    return [relative_error(x[0] if batched else x, y) for x, y in zip(rows, wanted, strict=True)]


@pytest.mark.day(
    "2-zigzag_ring_flash_attn_varlen-options3",
    "2-stripe_flash_attn-options4",
    "2-llama3_flash_attn_varlen-options6",
    "4-ring_flash_attn_varlen-options1",
    "2-zigzag_ring_flash_attn-options10",
)
@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_function_is_exact(rank_pool: Pool, world_size: int, name: str, options: dict[str, Any]) -> None:
    for result in rank_pool(world_size).run(errors, name, options):
        assert max(result) < 1e-12, result


# Function, causal, window (before, after; -1 for all), whether there are slopes
FLASH = [
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


def as_flash_attention(rank: int, world_size: int) -> dict[str, float]:
    """Errors of out, dq, dk, dv where FlashAttention's own definitions of windows and slopes are written out."""
    from ds_ring.contrib import ring_flash_attn as module

    module._meshes.clear()
    tokens, generator, result = sum(LENGTHS), torch.Generator().manual_seed(0), {}
    q, grad = (torch.randn(tokens, HEADS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(tokens, GROUPS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.03])
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    for name, causal, (before, after), biased in FLASH:
        sees = (j <= i) if causal else torch.ones(tokens, tokens, dtype=torch.bool)
        sees = sees & (j >= i - before) if before >= 0 else sees
        sees = sees & (j <= i + after) if after >= 0 else sees
        sees = sees & (ids[:, None] == ids) if "varlen" in name else sees
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        keys, values = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in leaves[1:])
        scores = torch.einsum("ihd,jhd->hij", leaves[0], keys) / DIM**0.5
        if biased:
            scores = scores - slopes.double()[:, None, None] * (i - j).abs()
        out = torch.einsum("hij,jhd->ihd", scores.masked_fill(~sees, -torch.inf).softmax(-1), values)
        want = (out.detach(), *torch.autograd.grad(out, leaves, grad))
        arguments: tuple[Any, ...] = ()
        if name.startswith("llama3"):
            *many, local = module.llama3_flash_attn_prepare_cu_seqlens(ends, causal, rank, world_size)
            arguments = (*many, 1, local)
        elif "varlen" in name:
            arguments = (ends // world_size, max(LENGTHS) // world_size)
        mine = [shard(x, name, rank, world_size) for x in (q, k, v, grad)]
        if "varlen" not in name:
            mine = [x[None] for x in mine]
        owned = [x.requires_grad_() for x in mine[:3]]
        got = getattr(module, f"{name}_func")(
            *owned, *arguments, causal=causal, window_size=(before, after),
            alibi_slopes=slopes if biased else None,
        )  # fmt: skip
        rows = (got.detach(), *torch.autograd.grad(got, owned, mine[3]))
        wanted = (shard(x, name, rank, world_size) for x in want)
        case = f"{name} {causal} {before} {after} {biased}"
        result[case] = max(relative_error(x.view_as(y), y) for x, y in zip(rows, wanted, strict=True))
    return result


@pytest.mark.night
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.day("2")
@pytest.mark.situation(
    "operators", "ring_flash_attn functions with alibi_slopes or any window_size, not causal"
)
def test_slopes_and_windows_are_those_of_flash_attention(rank_pool: Pool, world_size: int) -> None:
    for result in rank_pool(world_size).run(as_flash_attention):
        assert max(result.values()) < 1e-12, result


def test_documents_need_not_be_cut_evenly() -> None:
    """Ranks have equally many tokens of each."""
    layout = _make_document_layout("zigzag_ring_flash_attn", (6, 10), 2)
    assert [layout.positions(rank).tolist() for rank in (0, 1)] == [
        [0, 4, 5, 6, 7, 13, 14, 15],
        [1, 2, 3, 8, 9, 10, 11, 12],
    ]


def trained(rank: int, world_size: int) -> list[float]:
    """Errors of the loss and of every gradient of a Llama, as OpenRLHF trains it: rows unpadded, packed, cut."""
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    from ds_ring.contrib import ring_flash_attn as module

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
    from ds_ring.contrib import ring_flash_attn as module

    module._meshes.clear()
    x = torch.zeros(8, HEADS, DIM)
    wrong = rank == 0
    ends = torch.tensor([0, 8])
    many = module.llama3_flash_attn_prepare_cu_seqlens(ends * world_size, True, rank, world_size)
    slopes, dense = (
        torch.ones(2, HEADS) if wrong else None,
        functools.partial(module.ring_flash_attn_func, x[None], x[None], x[None], causal=True),
    )
    zigzag, llama3 = (
        functools.partial(getattr(module, f"{name}_flash_attn_varlen_func"), x, x, x, causal=True)
        for name in ("zigzag_ring", "llama3")
    )
    calls: dict[str, Callable[[], Any]] = {
        "dropout": lambda: dense(dropout_p=0.1 * wrong),
        "slopes": lambda: dense(alibi_slopes=slopes),
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
    from ds_ring.contrib import ring_flash_attn

    monkeypatch.setitem(sys.modules, "ring_flash_attn", pytest)
    with pytest.raises(RingConfigError, match="expected to come before"):
        ring_flash_attn.install()

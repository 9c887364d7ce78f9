"""Indexers of Qwen 4, MiniMax M3 and GLM-5.3 on a ring, in float64: they choose the tokens that they do on one process.

Documents differ from row to row, one is shorter than a block, and shards cut blocks. Also: each family with
chosen blocks, entries or terms of keys is plain inside `engine.ring.off()`, and a generation on the ring is refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Glm5NextTextConfig, MiniMaxM3VLTextConfig, Qwen4ExpTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer

from ds_ring import Causal, Documents, RingMesh, gather_sequence, make_layout, shard_sequence
from ds_ring.contrib.families.indexed_blocks import layers as indexed_blocks
from ds_ring.data.packing import RowGroup
from ds_ring.layers.selection.total_order import TotalOrder
from ds_ring.layers.sparse import blocks as sparse
from tests.dist.deepspeed_ranks import json_config, start_engine, take_step
from tests.dist.harness import catch_refusal

TOKENS, SAMPLES, HIDDEN, DIM, ROTARY = 101, 3, 24, 8, 4
# Rows of documents by their lengths; the last one of the second row is padding.
LENGTHS = ((101,), (3, 47, 51), (3, 47, 51))
IDS = ((0,), (4, 0, -1), (4, 0, -1))


def made(kind: str) -> Any:
    """An indexer with random weights, the same on every rank."""
    torch.manual_seed(5)
    if kind == "qwen4":
        config = Qwen4ExpTextConfig(
            hidden_size=HIDDEN, head_dim=DIM, indexer_n_heads=3, indexer_kv_heads=1, indexer_head_dim=DIM,
            indexer_budget=12, indexer_compress_ratio=4,
        )  # fmt: skip
        indexer: Any = Qwen4ExpTextQSAIndexer(config, 0)
    elif kind.startswith("glm5"):
        config = Glm5NextTextConfig(
            hidden_size=HIDDEN, q_lora_rank=ROTARY, index_n_heads=3, index_head_dim=DIM, index_topk=15,
            index_kpool=5, index_kpool_always_select_tail=kind == "glm5",
        )  # fmt: skip
        indexer = Glm5NextTextIndexer(config, 0)
    else:
        config = MiniMaxM3VLTextConfig(
            hidden_size=HIDDEN, index_n_heads=2, index_head_dim=DIM, index_block_size=6, index_topk_blocks=5,
            index_local_blocks=2, num_attention_heads=2,
        )  # fmt: skip
        indexer = MiniMaxM3VLIndexer(config, 0)
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter)
    return indexer.double()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, and the rotary embedding's cosines and sines."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(SAMPLES, TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    angles = torch.rand(SAMPLES, TOKENS, ROTARY, generator=generator, dtype=torch.float64)
    return hidden, angles.cos(), angles.sin()


def alone(kind: str, packed: bool) -> Tensor:
    """Which tokens each query attends to, bool [B, H, T, T], of each document by itself."""
    indexer, rest = made(kind), inputs()
    heads = 2 if kind == "minimax_m3" else 1
    result = torch.zeros(SAMPLES, heads, TOKENS, TOKENS, dtype=torch.bool)
    for row in range(SAMPLES):
        edges = np.cumsum([0, *LENGTHS[row]]) if packed else [0, TOKENS]
        for first, end, number in zip(edges, edges[1:], IDS[row] if packed else [0], strict=False):
            if number < 0:
                continue
            hidden, cos, sin = (x[row : row + 1, first:end] for x in rest)
            causal = torch.ones(end - first, end - first, dtype=torch.bool).tril()
            with TotalOrder():
                if kind == "qwen4":
                    chosen = indexer(hidden, (cos, sin), causal[None, None], None)
                elif kind.startswith("glm5"):
                    indices = indexer(
                        hidden, cos, torch.ones_like(hidden[..., 0], dtype=torch.bool), None
                    ).long()
                    chosen = torch.zeros(1, 1, end - first, end - first + 1, dtype=torch.bool)
                    chosen[:, 0].scatter_(2, torch.where(indices < 0, end - first, indices), True)
                    chosen = chosen[..., :-1]
                else:
                    positions = torch.arange(end - first)[None]
                    blocks = indexer(hidden, (cos, sin), None, positions)
                    mask = indexer.build_block_mask(
                        blocks, None, end - first, torch.float64, torch.device("cpu"), positions
                    )
                    chosen = mask == 0
            result[row, :, first:end, first:end] = chosen[0] & causal
    return result


def on_the_ring(mesh: RingMesh, kind: str, packed: bool, name: str) -> Tensor:
    layout = make_layout(name, tokens=TOKENS, ring_size=mesh.ring_size, pattern=Causal())
    documents = [Documents(np.repeat(IDS[row], LENGTHS[row])) for row in (0, 1)]
    groups = (RowGroup(documents[1], (1, 2)), RowGroup(documents[0], (0,))) if packed else ()
    config = SimpleNamespace(hop_timeout_seconds=60)
    sharding: Any = SimpleNamespace(layout=layout, mesh=mesh, groups=groups, config=config)
    hidden, cos, sin = (shard_sequence(x, layout, mesh=mesh, dim=1, pad_value=float("nan")) for x in inputs())
    with torch.no_grad():
        second: Any = cos if kind.startswith("glm5") else (cos, sin)  # there, what queries are made of
        compute = getattr(indexed_blocks, kind.partition(",")[0])
        chosen = compute(made(kind), sharding, hidden, second)
    chosen = chosen.unsqueeze(1) if chosen.dim() == 3 else chosen
    every = gather_sequence(chosen, layout, mesh=mesh, dim=2)
    mask = torch.zeros(*every.shape[:3], TOKENS + 1, dtype=torch.bool)
    mask.scatter_(3, torch.where(every < 0, TOKENS, every), True)
    counts = (every >= 0).sum(-1)
    assert bool((counts == mask[..., :TOKENS].sum(-1)).all())  # each once
    return mask[..., :TOKENS]


CASES = [
    (kind, packed, name)
    for kind in ("qwen4", "minimax_m3", "glm5")
    for packed, name in ((False, "zigzag"), (True, "contiguous"), (True, "balanced"))
] + [("glm5, whole blocks", True, "contiguous")]


def choices(rank: int, world_size: int, cases: Any = CASES) -> dict[tuple[str, bool, str], int]:
    """The number of pairs that differ from those of one process."""
    mesh = RingMesh.from_world(world_size)
    return {case: int((on_the_ring(mesh, *case) != alone(*case[:2])).sum()) for case in cases}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.day("2")
def test_indexers_choose_what_they_choose_on_one_process(rank_pool, size):
    for result in rank_pool(size).run(choices):
        assert result == dict.fromkeys(CASES, 0)


def with_another_token(rank: int, world_size: int) -> dict[tuple[str, bool, str], int]:
    """Take the token before in place of each that comes from another rank."""
    halo = sparse.halo_op

    def careless(*args: Any) -> Tensor:
        return halo(*args).roll(1, dims=2)

    with mock.patch.object(sparse, "halo_op", careless):
        return choices(rank, world_size, [case for case in CASES if case[1:] == (True, "contiguous")])


def test_a_wrong_token_behind_a_cut_is_found(rank_pool):
    result = rank_pool(4).run(with_another_token)[0]
    assert result["qwen4", True, "contiguous"] > 0 and result["minimax_m3", True, "contiguous"] > 0
    assert result["glm5", True, "contiguous"] > 0


# Why they do not generate on a ring.
FAMILIES = {
    "qwen4_exp_text": "layers whose states transformers' cache holds",  # it has both
    **dict.fromkeys(("minimax_m3_vl_text", "doge", "deepseek_v32"), "got layers that choose theirs"),
    "deepseek_v4": "layers that attend to compressed entries, which a ring's cache lacks",
}


def losses(rank: int, world_size: int, family: str, stage: int) -> dict[str, Any]:
    """The loss on the ring, off it, and on it again; and what a generation on the ring raises."""
    import copy

    from ds_ring_launcher.check.small_model import build, make_batch, read_config, shrink

    # of Doge's, more than a shard has keys and fewer than there are
    config = shrink(read_config(family), 61, changes={"keep_window_size": 40} if family == "doge" else None)
    model, batch = build(config, "causal-lm", 0), make_batch(config, "causal-lm", 61, 0, True)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    with torch.no_grad(), TotalOrder():
        result: dict[str, Any] = {"alone": float(plain(**batch).loss)}
    section = {"hop_timeout_seconds": 20}
    engine = start_engine(model, json_config(world_size, 2, stage, ring_attention=section), 0.0)
    for name in ("before", "after"):
        result[name] = take_step(engine, batch)
        with engine.ring.off(), torch.no_grad(), TotalOrder():
            result[f"off {name}"] = float(engine.module(**batch).loss)
    result["generation"] = catch_refusal(
        engine.module.generate, batch["input_ids"][:1, :20], max_new_tokens=3
    )
    return result


@pytest.mark.night
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_model_is_plain_while_the_ring_is_off(rank_pool, family, stage):
    for result in rank_pool(2).run(losses, family, stage):
        for name in ("before", "off before", "after", "off after"):
            assert result[name] == pytest.approx(result["alone"], rel=1e-6), result
        assert result["generation"].startswith("RingConfigError"), result
        assert FAMILIES[family] in result["generation"], result
        assert "engine.ring.off()" in result["generation"], result

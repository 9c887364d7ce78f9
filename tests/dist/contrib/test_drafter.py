"""Drafters beside a trunk on a ring: 50 steps of EAGLE-3's training-time test and of DFlash, as in one process.

The trunk is a frozen Llama on the ring; a drafter reads its local hidden states. No file of ds_ring is for
drafters: they are modules of the user, with the pattern `Drafter` and a layout beside that of the trunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ring import Documents, Drafter, ring_attention, shard_sequence
from ds_ring.patterns.private.layout import beside
from tests.dist.deepspeed_ranks import VOCABULARY, Size, build_model, json_config, start_engine
from tests.unit.patterns.private import masks

SIZE = Size(hidden=32, layers=2, tokens=0, samples=1)
TRUNK, DRAFT, HEADS, DIM = 45, 3, 4, 8
IDS = np.repeat([0, 1, 2], [20, 14, 11])
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # q of a step, all keys and values so far, the step


class Eagle(nn.Module):
    """One layer that reads the trunk's states and tokens, and then its own states: step i predicts i + 1 ahead."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.join = nn.Embedding(VOCABULARY, 32), nn.Linear(64, 32)
        self.qkv, self.out, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, VOCABULARY)

    def heads(self, x: Tensor) -> Tensor:
        return self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)  # 3 of [B, H, S, D]

    def logits(self, states: Tensor, tokens: list[Tensor], attend: Attend) -> list[Tensor]:
        """Of each step, [B, S, V]; `tokens` are those of step 0 (the trunk), 1, .., moved one to the left each."""
        found, keys, values = [], [], []
        for step, ids in enumerate(tokens):
            x = self.join(torch.cat([states, self.embed(ids)], dim=-1))
            q, k, v = self.heads(x)
            keys.append(k)
            values.append(v)
            mixed = attend(q, torch.cat(keys, 2), torch.cat(values, 2), step)
            states = x + self.out(mixed.transpose(1, 2).flatten(2))
            found.append(self.head(states))
        return found


def drawn(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (1, TRUNK), generator=torch.Generator().manual_seed(step))


def moved(ids: Tensor, steps: int) -> Tensor:
    return torch.cat([ids[:, steps:], ids.new_zeros(1, steps)], dim=1)


def step_of(drafter: Eagle, states: Tensor, ids: list[Tensor], attend: Attend, sgd: Any, ring: bool) -> float:
    """Train the drafter by a step; tokens `ids[i]` are those of step i, and `ids[i + 1]` what it predicts."""
    logits = drafter.logits(states, ids[:-1], attend)
    losses = [nn.functional.cross_entropy(x.mT, t, ignore_index=-100, reduction="sum")
        for x, t in zip(logits, ids[1:], strict=True)]  # fmt: skip
    loss = torch.stack(losses).sum() / (TRUNK * len(losses))
    sgd.zero_grad()
    loss.backward()
    loss = loss.detach()
    if ring:
        for parameter in drafter.parameters():
            dist.all_reduce(parameter.grad)
        dist.all_reduce(loss)
    sgd.step()
    return float(loss)


def alone(steps: int, ids: np.ndarray | None) -> list[float]:
    trunk, drafter = build_model(SIZE, "sdpa"), Eagle()
    sgd = torch.optim.SGD(drafter.parameters(), lr=0.3)
    seen = torch.from_numpy(masks.eagle(TRUNK, DRAFT, ids))

    def attend(q: Tensor, k: Tensor, v: Tensor, step: int) -> Tensor:
        mask = seen[step * TRUNK : (step + 1) * TRUNK, : (step + 1) * TRUNK]
        return nn.functional.scaled_dot_product_attention(q, k, v, mask)

    losses = []
    own = np.zeros(TRUNK, dtype=int) if ids is None else ids
    places = torch.tensor([[int((own[:t] == own[t]).sum()) for t in range(TRUNK)]])
    causal = torch.from_numpy((own[:, None] == own) & np.tri(TRUNK, dtype=bool))[None, None]
    for step in range(steps):
        with torch.no_grad():
            states = trunk.model(drawn(step), causal, places).last_hidden_state
        all_ids = [moved(drawn(step), n) for n in range(DRAFT + 2)]
        losses.append(step_of(drafter, states, all_ids, attend, sgd, ring=False))
    return losses


def on_ring(rank: int, world_size: int, steps: int, ids: np.ndarray | None) -> list[float]:
    section = {"ring_attention": {"pattern": {"documents": ids is not None}}}
    engine = start_engine(build_model(SIZE, "sdpa"), json_config(world_size, 1, 0, **section))
    mesh, drafter = engine.ring.mesh, Eagle()
    sgd = torch.optim.SGD(drafter.parameters(), lr=0.3)
    whole = Drafter(TRUNK, DRAFT, documents=None if ids is None else Documents(ids))
    losses = []
    for step in range(steps):
        batch = {"input_ids": drawn(step)}
        if ids is not None:
            batch["document_ids"] = torch.from_numpy(ids)[None]
        local = engine.ring.shard_batch(batch)
        trunk = engine.ring.batches.current.layout
        with torch.no_grad():
            given = {key: local[key] for key in ("input_ids", "position_ids")}
            states = engine(**given, output_hidden_states=True).hidden_states[-1]
        real = trunk.valid_tokens(mesh.ring_rank)
        tokens = [
            shard_sequence(moved(drawn(step), n), trunk, mesh=mesh, dim=1, pad_value=-100)[:, :real]
            for n in range(DRAFT + 2)
        ]

        def attend(q: Tensor, k: Tensor, v: Tensor, number: int, trunk: Any = trunk) -> Tensor:
            if not number:
                pattern: Any = Drafter(TRUNK, 1, documents=whole.documents)
                rest = q.new_zeros(q.shape)  # no query of a step yet
                q, k, v = (torch.cat([x, rest], 2) for x in (q, k, v))
                out = of(pattern, q, k, v, trunk)
                return out[:, :, : out.shape[2] // 2]
            before = q.new_zeros(*q.shape[:2], number * q.shape[2], q.shape[3])
            return of(whole.step(number), torch.cat([before, q], 2), k, v, trunk)[:, :, before.shape[2] :]

        def of(pattern: Drafter, q: Tensor, k: Tensor, v: Tensor, trunk: Any) -> Tensor:
            layout = beside(trunk, ((pattern, 1),))
            pad = (0, 0, 0, layout.local_tokens - q.shape[2])
            q, k, v = (nn.functional.pad(x, pad) for x in (q, k, v))
            out = ring_attention(q, k, v, pattern=pattern, layout=layout, mesh=mesh)
            return out[:, :, : out.shape[2] - pad[3]]

        losses.append(step_of(drafter, states[:, :real], tokens, attend, sgd, ring=True))
    return losses


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("world", "steps"), [(2, 50), (4, 50), (2, 3)])
@pytest.mark.day("2-3-True")
def test_steps_have_the_losses_of_one_process(rank_pool: Any, world: int, steps: int, packed: bool) -> None:
    ids = IDS if packed else None
    want = alone(steps, ids)
    assert want[-1] != want[0]
    for losses in rank_pool(world).run(on_ring, steps, ids):
        assert max(abs(a - b) for a, b in zip(losses, want, strict=True)) < 1e-5

"""A frozen Llama with a drafter, and the training step of each drafter by itself, written from the papers.

Nothing here knows a ring but `Attend`. The references compute one document at a time, and DFlash's one block
at a time: they have no mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from tests.dist.deepspeed_ranks import VOCABULARY, Size, build_model

SIZE = Size(hidden=32, layers=3, tokens=0, samples=1)
HEADS, DIM, LAYERS = 4, 8, (1, 2)  # layers of the trunk that DFlash reads
MASK_TOKEN = VOCABULARY - 1
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, all keys so far, their values


def rotated(x_BHSD: Tensor, places_BS: Tensor) -> Tensor:
    """Rotary positions."""
    half = x_BHSD.shape[-1] // 2
    rate = 100.0 ** (-torch.arange(half, dtype=x_BHSD.dtype) / half)
    angle = (places_BS[..., None] * rate)[:, None]
    a, b = x_BHSD.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def select_heads(x_BSE: Tensor) -> Tensor:
    return x_BSE.unflatten(-1, (HEADS, DIM)).transpose(1, 2)


class Layer(nn.Module):
    """Attention whose keys are those of given states, and a gated MLP, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.gate, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norm, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)

    def keys(self, states: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(select_heads(self.k(states)), places), select_heads(self.v(states))

    def queries(self, states: Tensor, places: Tensor) -> Tensor:
        return rotated(select_heads(self.q(states)), places)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        inner = self.norm_mlp(x)
        return x + self.down(silu(self.gate(inner)) * self.up(inner))


class Eagle(nn.Module):
    """EAGLE-3's layer: it reads fused states of the trunk, and from step 1 on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fuse, self.join, self.layer = nn.Linear(64, 32), nn.Linear(64, 32), Layer(32)
        self.head = nn.Linear(32, VOCABULARY)

    def steps(
        self, states: Tensor, embedded: list[Tensor], places: list[Tensor], attend: Attend
    ) -> list[Tensor]:
        """Logits of each step, [B, S, V]."""
        result, keys, values = [], [], []
        for x, place in zip(embedded, places, strict=True):
            joined = self.join(torch.cat([states, x], dim=-1))
            inner = self.layer.norm(joined)
            k, v = self.layer.keys(inner, place)
            keys.append(k)
            values.append(v)
            out = attend(self.layer.queries(inner, place), torch.cat(keys, 2), torch.cat(values, 2))
            states = self.layer.finish(joined, out)
            result.append(self.head(states))
        return result


class DFlash(nn.Module):
    """Two layers whose keys are those of the trunk's states (section "KV injection") and of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.fuse, self.norm = nn.Linear(32 * len(LAYERS), 32), nn.RMSNorm(32)
        self.layers = nn.ModuleList([Layer(32), Layer(32)])

    def forward(
        self, context: Tensor, places: Tensor, x: Tensor, own_places: Tensor, attend: Attend
    ) -> Tensor:
        context = self.norm(self.fuse(context))
        for layer in self.layers:
            inner = layer.norm(x)
            shared, local = layer.keys(context, places), layer.keys(inner, own_places)
            k, v = (torch.cat(pair, dim=2) for pair in zip(shared, local, strict=True))
            x = layer.finish(x, attend(layer.queries(inner, own_places), k, v))
        return x


class Trained(nn.Module):
    """A frozen trunk and its drafter: what an engine is given. `ring` is `engine.ring`, from then on."""

    ring: Any = None

    def __init__(self, blocks: bool) -> None:
        super().__init__()
        self.trunk = build_model(SIZE, "sdpa").requires_grad_(False)
        torch.manual_seed(5)
        self.drafter: nn.Module = DFlash() if blocks else Eagle()

    def states(self, **inputs: Tensor) -> list[Tensor]:
        with torch.no_grad():
            result: list[Tensor] = self.trunk(**inputs, output_hidden_states=True).hidden_states
        return [result[layer] for layer in LAYERS]

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, draft_input_ids: Tensor, draft_position_ids: Tensor,
        **_: Tensor,
    ) -> Tensor:  # fmt: skip
        context = torch.cat(self.states(input_ids=input_ids, position_ids=position_ids), dim=-1)
        x = self.trunk.get_input_embeddings()(draft_input_ids)
        attend = self.ring.draft_attention
        if isinstance(self.drafter, Eagle):
            steps = draft_input_ids.shape[1] // input_ids.shape[1]
            places = [item.expand(len(x), -1) for item in draft_position_ids.chunk(steps, dim=1)]
            fused = self.drafter.fuse(context)
            return torch.cat(self.drafter.steps(fused, list(x.chunk(steps, 1)), places, attend), dim=1)
        places = position_ids.expand(len(x), -1)
        result: Tensor = self.trunk.lm_head(self.drafter(context, places, x, draft_position_ids, attend))
        return result


def documents_of(ids: np.ndarray) -> list[slice]:
    """The ranges of the documents of a row; padding is -1."""
    starts = [0, *(np.flatnonzero(np.diff(ids)) + 1), len(ids)]
    return [slice(a, b) for a, b in itertools.pairwise(starts) if ids[a] >= 0]


def eagle_loss(
    model: Trained, ids_BT: Tensor, ids: np.ndarray, steps: int, weights: list[float], soft: bool = False
) -> Tensor:
    """Step i of token t reads token t + 1 + i and sees step 0 up to t, then its own keys of earlier steps.

    It predicts token t + 2 + i, or learns what the trunk says there (`soft`).
    """
    total, count = torch.zeros((), dtype=next(model.parameters()).dtype), 0.0
    for row in ids_BT:
        for local in documents_of(ids):
            text = row[local][None]
            length = text.shape[1]
            places = torch.arange(length)[None]
            fused = model.drafter.fuse(torch.cat(model.states(input_ids=text, position_ids=places), dim=-1))
            reads = [torch.nn.functional.pad(text, (0, i + 1))[:, i + 1 :] for i in range(steps)]
            embedded = [model.trunk.get_input_embeddings()(item) for item in reads]

            def attend(q: Tensor, k: Tensor, v: Tensor, length: int = length) -> Tensor:
                scores = q @ k[:, :, :length].mT / DIM**0.5
                scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
                own_k, own_v = (x[:, :, length:].unflatten(2, (-1, length)) for x in (k, v))
                own_scores = (q[:, :, None] * own_k).sum(-1).transpose(2, 3) / DIM**0.5
                probabilities = torch.cat([scores, own_scores], dim=-1).softmax(-1)
                shared = probabilities[..., :length] @ v[:, :, :length]
                return shared + (probabilities[..., length:, None] * own_v.transpose(2, 3)).sum(3)

            each = model.drafter.steps(fused, embedded, [places + i for i in range(steps)], attend)
            for i, logits in enumerate(each):
                labels = text[:, i + 2 :]
                stored, count = logits[:, : labels.shape[1]], count + weights[i] * labels.numel()
                if soft:
                    said = model.trunk(input_ids=text, position_ids=places).logits.detach()
                    labels = said[:, i + 1 : length - 1].softmax(-1).mT
                total = total + weights[i] * cross_entropy(stored.mT, labels, reduction="sum")
    return total / count


def dflash_loss(
    model: Trained, ids_BT: Tensor, ids: np.ndarray, anchors_BN: Tensor, draft: int, weights: list[float]
) -> Tensor:
    """A block at a time: its tokens see the states before its anchor, and each other."""
    total, count = torch.zeros((), dtype=next(model.parameters()).dtype), 0.0
    for row, anchors in zip(ids_BT, anchors_BN.tolist(), strict=True):
        for local in documents_of(ids):
            text = row[local][None]
            places = torch.arange(text.shape[1])[None]
            context = torch.cat(model.states(input_ids=text, position_ids=places), dim=-1)
            for anchor in (item - local.start for item in anchors if local.start <= item < local.stop):
                block = torch.full((1, draft), MASK_TOKEN)
                block[0, 0] = text[0, anchor]
                x = model.trunk.get_input_embeddings()(block)
                before = context[:, :anchor], places[:, :anchor]
                at = anchor + torch.arange(draft)[None]
                x = model.drafter(*before, x, at, scaled_dot_product_attention)
                labels = text[:, anchor + 1 : anchor + draft]
                for k, logits in enumerate(model.trunk.lm_head(x)[0, 1 : 1 + labels.shape[1]], 1):
                    total = total + weights[k] * cross_entropy(logits[None], labels[:, k - 1])
                    count += weights[k]
    return total / count

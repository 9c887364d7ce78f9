"""Drafters beside a frozen, sharded trunk: 50 steps of EAGLE-3 and DFlash have the losses of one process.

No byte of a private key is sent: by the plan, and by what the ranks sent.
"""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from ds_ring import build_plan, shift_sequence
from ds_ring.comm.exchange import Exchange
from ds_ring.contrib.drafter.attention import _patterns
from ds_ring.contrib.drafter.batch import drafter_batch
from ds_ring.data.batch import IGNORE
from ds_ring.errors import RingPatternError, RingShapeError
from ds_ring.patterns.private.private_layout import beside
from tests.dist.deepspeed_ranks import VOCABULARY, Size, build_model, json_config, start_engine, train_by_sgd
from tests.dist.harness import catch_refusal
from tests.unit.patterns.private.test_private import private_slots_sent

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


ROOT = Path(__file__).resolve().parents[4]
TRUNK, DRAFT, SAMPLES = 45, 4, 2
IDS = np.repeat([0, 1, -1, 2], [20, 11, 3, 11])
RATE = 0.3
DECAY = [1.0, 1.0, 0.5, 0.25]  # DFlash's exp(-(k - 1) / gamma) for gamma = 1 / ln 2: exact in float32


def drawn(step: int) -> tuple[Tensor, Tensor]:
    """Trunk tokens, and anchors of another number in each row: two at one place, one none, one in padding."""
    drawing = torch.Generator().manual_seed(step)
    ids = torch.randint(0, MASK_TOKEN, (SAMPLES, TRUNK), generator=drawing)
    anchors = torch.randint(0, TRUNK, (SAMPLES, 6), generator=drawing)
    anchors[0, :3] = torch.tensor([7, 7, -1])
    anchors[1, 0] = 32
    return ids, anchors


def of_step(model: Trained, blocks: bool, step: int, ids: np.ndarray, soft: bool = False) -> Tensor:
    text, anchors = drawn(step)
    if blocks:
        return dflash_loss(model, text, ids, anchors, DRAFT, DECAY)
    return eagle_loss(model, text, ids, DRAFT, DECAY, soft)


def alone(blocks: bool, steps: int, packed: bool) -> list[float]:
    """In float64, one document (and block) at a time."""
    model, ids = Trained(blocks).double(), IDS if packed else np.zeros(TRUNK, dtype=int)
    losses_of = partial(of_step, model, blocks, ids=ids)
    return train_by_sgd(model.drafter.parameters(), losses_of, steps, RATE)


def started(
    world_size: int, blocks: bool, stage: int, packed: bool, dtype: torch.dtype = torch.float32
) -> Any:
    model = Trained(blocks).to(dtype)
    section = {"ring_attention": {"pattern": {"documents": packed}}}
    config = json_config(world_size, SAMPLES, stage, **section)
    if stage == 3:  # the example, without its optimizer
        config = json.loads((ROOT / "configs/private_keys.json").read_text())
        config |= section | {"sequence_parallel_size": world_size, "train_micro_batch_size_per_gpu": SAMPLES}
        del config["optimizer"]
    engine = start_engine(model, config, RATE)
    model.ring = engine.ring
    return engine


def batch_of(engine: Any, blocks: bool, step: int, packed: bool, draft: int = DRAFT) -> dict[str, Tensor]:
    text, anchors = drawn(step)
    extra = {"anchors": anchors, "mask_token": MASK_TOKEN} if blocks else {}
    ids = torch.from_numpy(IDS) if packed else None
    weights = DECAY if draft == DRAFT else None
    result: dict[str, Tensor] = engine.ring.drafter_batch(
        text, draft, document_ids=ids, weights=weights, **extra
    )
    return result


def on_ring(rank: int, world_size: int, blocks: bool, steps: int, stage: int, packed: bool) -> list[float]:
    engine = started(world_size, blocks, stage, packed)
    before, losses = engine.module.trunk.lm_head.weight.detach().clone(), []
    for step in range(steps):
        local = engine.ring.shard_batch(batch_of(engine, blocks, step, packed))
        loss = engine.ring.draft_loss(engine(**local), local)
        engine.backward(loss.backward_loss)
        engine.step()
        losses.append(float(loss.mean_loss))
    assert torch.equal(before, engine.module.trunk.lm_head.weight)
    return losses


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("world", "steps"), [(2, 50), (4, 50), (2, 2)])
@pytest.mark.day("2-2-False-3-True")
def test_steps_have_the_losses_of_one_process(
    rank_pool: Any, world: int, steps: int, blocks: bool, stage: int, packed: bool
) -> None:
    want = alone(blocks, steps, packed)
    assert want[-1] != want[0]
    for losses in rank_pool(world).run(on_ring, blocks, steps, stage, packed):
        assert max(abs(a - b) for a, b in zip(losses, want, strict=True)) < 1e-5


def gradients(rank: int, world_size: int, blocks: bool, soft: bool) -> dict[str, Tensor]:
    engine = started(world_size, blocks, 0, True, torch.float64)
    local = engine.ring.shard_batch(batch_of(engine, blocks, 0, True))
    # DeepSpeed reduces no float64: what it would do is written out
    logits = engine.module(**local)
    targets = None
    if soft:  # the trunk's distributions, from the ranks that have them
        inputs = {key: local[key] for key in ("input_ids", "position_ids")}
        said = engine.module.trunk(**inputs).logits.detach().softmax(-1)
        place = {"layout": engine.ring.layout, "mesh": engine.ring.mesh}
        moved = [shift_sequence(said, 1 + step, dim=1, **place) for step in range(DRAFT)]
        targets = torch.cat(moved, dim=1)
    loss = engine.ring.draft_loss(logits, local, targets).backward_loss
    named = dict(engine.module.drafter.named_parameters())
    mine = torch.autograd.grad(loss / engine.ring.gradient_divisor, list(named.values()))
    for item in mine:
        dist.all_reduce(item)
    return dict(zip(named, mine, strict=True))


@pytest.mark.parametrize(("blocks", "soft"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.day("2-False-True")
def test_each_gradient_is_that_of_the_reference(rank_pool: Any, world: int, blocks: bool, soft: bool) -> None:
    model = Trained(blocks).double()
    of_step(model, blocks, 0, IDS, soft).backward()
    want = {name: item.grad for name, item in model.drafter.named_parameters()}
    for result in rank_pool(world).run(gradients, blocks, soft):
        assert result.keys() == want.keys()
        for name, gradient in result.items():
            assert float((gradient - want[name]).abs().max()) < 1e-10, name


def sent_in(call: Callable[[], Any]) -> int:
    """The bytes that this rank sends during a call."""

    def now() -> int:
        return sum(item.counters.bytes_sent for item in gc.get_objects() if type(item) is Exchange)

    before = now()
    call()
    return now() - before


def bytes_sent(rank: int, world_size: int, blocks: bool, draft: int) -> tuple[int, int, int, int]:
    """Measured forward and backward, and by the plan those of shared and of private keys."""
    engine = started(world_size, blocks, 0, True)
    local = engine.ring.shard_batch(batch_of(engine, blocks, 0, True, draft))
    sharding = engine.ring.batches.current
    queries = local["draft_input_ids"].shape[1] if blocks else sharding.local_tokens
    private = queries if blocks else queries * (draft - 1)
    keys = sharding.local_tokens + private
    q, k, v = (torch.randn(SAMPLES, 4, n, 8, requires_grad=True) for n in (queries, keys, keys))
    outs: list[Tensor] = []
    forward = sent_in(lambda: outs.append(engine.ring.draft_attention(q, k, v)))
    backward = sent_in(lambda: outs[0].square().sum().backward())
    planned = np.zeros(2, dtype=int)
    for pattern, rows in _patterns(sharding, sharding.whole, draft - 1, SAMPLES, False).items():
        layout = beside(sharding.layout, ((pattern, 1),))
        assert build_plan(pattern, layout).tokens_sent == sum(private_slots_sent(pattern, layout))
        planned += len(rows) * 2 * 4 * 8 * 4 * np.array(private_slots_sent(pattern, layout))
    return forward, backward, int(planned[1]), int(planned[0])


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.day("2-True")
def test_no_private_key_is_sent(rank_pool: Any, world: int, blocks: bool) -> None:
    few, many = (rank_pool(world).run(bytes_sent, blocks, draft) for draft in (2, 6))
    for ranks in (few, many):
        shared, private = ranks[0][2:]
        assert private == 0 and sum(item[0] for item in ranks) == shared > 0
    # three times the private tokens send the same bytes, gradients included
    assert [item[:2] for item in few] == [item[:2] for item in many]


class _Session:
    """What `drafter_batch` needs of a session."""

    class needs:  # noqa: N801
        whole = None


def made(draft: int = 3, **extra: Any) -> dict[str, Tensor]:
    return drafter_batch(_Session(), torch.arange(10, 18)[None], draft, **extra)  # type: ignore[arg-type]


def test_the_tokens_and_labels_of_steps_and_blocks() -> None:
    ids = torch.tensor([0, 0, 0, 0, 0, 1, 1, -1])
    eagle = {key: x.reshape(-1, 8).tolist() for key, x in made(2, document_ids=ids).items()}
    assert eagle["draft_input_ids"] == [[11, 12, 13, 14, 0, 16, 0, 0], [12, 13, 14, 0, 0, 0, 0, 0]]
    none = [IGNORE] * 3
    assert eagle["draft_labels"] == [[12, 13, 14, *none, IGNORE, IGNORE], [13, 14, *none, *none]]
    assert eagle["draft_position_ids"][1] == [1, 2, 3, 4, 5, 1, 2, 1]
    anchors = torch.tensor([[3, -1, 5]])
    blocks = made(3, document_ids=ids, anchors=anchors, mask_token=9, weights=[0, 1, 0.5])
    of_blocks = {key: x.reshape(-1, 3).tolist() for key, x in blocks.items() if "draft_" in key}
    assert of_blocks["draft_input_ids"] == [[13, 9, 9], [0, 9, 9], [15, 9, 9]]
    assert of_blocks["draft_labels"] == [[IGNORE, 14, IGNORE], [IGNORE] * 3, [IGNORE, 16, IGNORE]]
    assert of_blocks["draft_weights"] == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]
    assert of_blocks["draft_position_ids"][2] == [0, 1, 2]
    shorter = made(2, predicted=torch.arange(8)[None] < 4)["draft_labels"].reshape(2, 8)
    assert (shorter != IGNORE).sum(1).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"draft": 0}, "drafter_batch: draft"),
        ({"anchors": torch.tensor([[1]])}, "a mask_token"),
        ({"anchors": torch.tensor([[8]]), "mask_token": 1}, "positions from -1"),
        ({"weights": [1.0]}, "expected 3 weights"),
    ],
)
def test_wrong_batches_are_refused(extra: dict[str, Any], words: str) -> None:
    with pytest.raises((RingPatternError, RingShapeError), match=words):
        made(**extra)


def refused(rank: int, world_size: int) -> list[str]:
    engine = started(world_size, True, 0, False)
    plain = engine.ring.shard_batch({"input_ids": drawn(0)[0]})
    x = torch.zeros(SAMPLES, 4, engine.ring.batches.current.local_tokens, 8)
    messages = [
        catch_refusal(engine.ring.draft_attention, x, x, x),
        catch_refusal(engine.ring.draft_loss, torch.zeros(SAMPLES, 3, VOCABULARY), plain),
    ]
    local = engine.ring.shard_batch(batch_of(engine, True, 0, False))
    messages.append(catch_refusal(engine.ring.draft_attention, x, x, x))
    return [*messages, str(local["draft_labels"].shape[1] % DRAFT)]


def test_calls_without_drafts_are_refused(rank_pool: Any) -> None:
    for batch, loss, keys, rest in rank_pool(2).run(refused):
        assert "expected a batch of drafter_batch" in batch and "got [2, 3, 61] and none" in loss
        assert "private keys: expected" in keys and rest == "0"


def refused_with_ulysses(rank: int, world_size: int, blocks: bool) -> str:
    model = Trained(blocks)
    engine = start_engine(
        model, json_config(world_size, SAMPLES, 0, ring_attention={"ulysses_size": 2}), RATE
    )
    return catch_refusal(lambda: engine.ring.shard_batch(batch_of(engine, blocks, 0, False)))


@pytest.mark.parametrize("blocks", [False, True])
def test_ulysses_ranks_are_refused(rank_pool: Any, blocks: bool) -> None:
    for message in rank_pool(2).run(refused_with_ulysses, blocks):
        assert 'got Ulysses ranks; leave "min_sequence_length" and "ulysses_size" out' in message

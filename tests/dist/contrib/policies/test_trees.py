"""Trees of rollouts against each rollout by itself: attention in float64, log-probabilities, a policy's step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_ring import (
    Causal,
    Chunked,
    Full,
    RingMesh,
    RingPatternError,
    RingShapeError,
    SlidingWindow,
    Tree,
    make_layout,
    ring_attention,
    simulate,
)
from ds_ring.contrib.policies.trees import TREE_ENDS, TreeBatch, find_ends, make_tree
from ds_ring.data.batch import LOSS_WEIGHTS
from ds_ring.schedule.layout import Layout
from tests.dist.deepspeed_ranks import (
    VOCABULARY,
    Size,
    build_model,
    check_gradients,
    full_gradient,
    json_config,
    start_deepspeed,
    start_engine,
)
from tests.dist.harness import catch_refusal, check_texts
from tests.parity import gathered_pass

HEADS, KV_HEADS, DIM = 4, 2, 8
LAYOUTS = ("zigzag", "contiguous", "balanced", "striped")


def random_tree(seed: int) -> Tree:
    """Up to 64 nodes, in depth-first order for every other seed; up to 16 leaves, perhaps padding."""
    rng = np.random.default_rng(seed)
    count, parents = int(rng.integers(1, 65)), [-1]
    while len(parents) < count:
        leaves = set(range(len(parents))) - set(parents)
        above = rng.choice(sorted(leaves)) if len(leaves) >= 16 else rng.integers(-1, len(parents))
        if seed % 2 and above >= 0:  # depth first: below the path that ends at the last node
            path = [len(parents) - 1]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            above = path[0] if len(leaves) >= 16 else rng.choice(path)
        parents.append(int(above))
    lengths = rng.integers(1, 7, len(parents)).tolist()
    return Tree(tuple(parents), tuple(lengths), sum(lengths) + int(rng.integers(0, 4)))


def rollouts_of(tree: Tree) -> list[Tensor]:
    """The positions of each path from a root to a leaf."""
    result = []
    for leaf in sorted(set(range(len(tree.parents))) - set(tree.parents)):
        nodes = [leaf]
        while tree.parents[nodes[-1]] >= 0:
            nodes.append(tree.parents[nodes[-1]])
        parts = [torch.arange(tree.starts[node], tree.starts[node + 1]) for node in reversed(nodes)]
        result.append(torch.cat(parts))
    return result


class Passed(NamedTuple):
    """What attention computes, [1, H, T, D] each, zeros at padding."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def operands(tree: Tree) -> list[Tensor]:
    """q, k, v and the gradient of the output, which is zero at padding."""
    torch.manual_seed(len(tree.parents))
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    result = [torch.randn(1, h, tree.tokens, DIM, dtype=torch.float64) for h in heads]
    result[3][:, :, tree.starts[-1] :] = 0
    return result


def one_by_one(tree: Tree) -> Passed:
    """Each rollout as a causal sequence of its own, with the tree's window.

    The gradient of a shared token belongs to one of them.
    """
    q, k, v, grad = operands(tree)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole, taken = torch.zeros_like(grad), torch.zeros(tree.tokens, dtype=torch.bool)
    for path in rollouts_of(tree):
        gap = torch.arange(len(path))[:, None] - torch.arange(len(path))
        part = torch.nn.functional.scaled_dot_product_attention(
            *(x[:, :, path] for x in leaves), enable_gqa=True,
            attn_mask=(gap >= 0) & (gap < (tree.window or len(path))),
        )  # fmt: skip
        new = ~taken[path]
        if taken[path].any():
            torch.testing.assert_close(part[:, :, ~new], whole[:, :, path[~new]].detach(), rtol=0, atol=1e-14)
        whole = whole.index_copy(2, path[new], part[:, :, new])
        taken[path] = True
    return Passed(whole.detach(), *torch.autograd.grad(whole, leaves, grad))


def largest_error(got: Passed, want: Passed) -> float:
    return max(float((a.nan_to_num() - b).abs().max()) for a, b in zip(got, want, strict=True))


def simulated_error(tree: Tree, layout: Layout, rollouts: Tree | None = None) -> float:
    """The largest error of a simulated ring, from the rollouts of this tree or of another one."""
    *inputs, grad = operands(rollouts or tree)
    result = simulate(*inputs, pattern=tree, layout=layout, grad_out=grad, measure_memory=False)
    return largest_error(Passed(result.out, result.dq, result.dk, result.dv), one_by_one(rollouts or tree))


# The day's trees need a fifth of the time of the first ones, which lie in many pieces in striped shards.
@pytest.mark.parametrize("seeds", [range(8, 18), range(8), *(range(n, n + 20) for n in range(18, 198, 20))])
@pytest.mark.day("seeds0")
def test_simulated_rings_compute_each_rollout(seeds: range) -> None:
    for seed in seeds:
        tree = random_tree(seed)
        layout = make_layout(
            LAYOUTS[seed % 4], tokens=tree.tokens, ring_size=(1, 2, 3, 4, 8)[seed % 5], pattern=tree
        )
        assert simulated_error(tree, layout) < 1e-12, (seed, tree, layout)


@pytest.mark.day("5")
@pytest.mark.parametrize("window", [1, 2, 5, 9, 40])
def test_windows_are_those_of_each_path(window: int) -> None:
    for seed in range(window, window + 6):
        tree = replace(random_tree(seed), window=window)
        layout = make_layout(
            LAYOUTS[seed % 4], tokens=tree.tokens, ring_size=(1, 2, 3, 4)[seed % 4], pattern=tree
        )
        assert simulated_error(tree, layout) < 1e-12, (seed, tree, layout)


def test_windows_and_chunks_of_a_layer_narrow_a_tree_and_other_patterns_are_refused() -> None:
    tree = Tree((-1, 0, 0), (5, 3, 4))
    assert tree.narrowed(Causal()) is tree
    narrow = tree.narrowed(Causal() & SlidingWindow(4))
    assert narrow == replace(tree, window=4) and narrow.narrowed(SlidingWindow(9)) == narrow
    assert str(narrow) != str(tree)
    in_chunks = tree.narrowed(Causal() & Chunked(4))
    assert (in_chunks.parents, in_chunks.lengths) == ((-1, -1, 1, 1, -1), (4, 1, 3, 3, 1))
    two_sizes = Chunked(4) & Chunked(3)
    for pattern in (SlidingWindow(4, causal=False), Full(), Chunked(4, causal=False), two_sizes):
        with pytest.raises(
            RingPatternError, match=r"a layer: expected Causal.* with a tree of rollouts, got"
        ):
            tree.narrowed(pattern)
    for window in (0, -1, 2.5):
        with pytest.raises(RingPatternError, match="Tree: window"):
            Tree((-1,), (3,), window=window)  # type: ignore[arg-type]


def attend(rank: int, world_size: int, seeds: range) -> list[Passed]:
    mesh, result = RingMesh.from_world(world_size), []
    for seed in seeds:
        tree = random_tree(seed)
        layout = make_layout(LAYOUTS[seed % 4], tokens=tree.tokens, ring_size=world_size, pattern=tree)
        call = partial(ring_attention, pattern=tree, layout=layout, mesh=mesh)
        result.append(Passed(*gathered_pass(call, operands(tree), layout, mesh)))
    return result


@pytest.mark.parametrize("ring_size", [2, 4])
@pytest.mark.day("4")
def test_rings_compute_each_rollout(rank_pool: Any, ring_size: int) -> None:
    seeds = range(1000, 1008)
    for of_rank in rank_pool(ring_size).run(attend, seeds):
        for seed, passed in zip(seeds, of_rank, strict=True):
            assert largest_error(passed, one_by_one(random_tree(seed))) < 1e-12, seed


def test_a_wrong_parent_is_found() -> None:
    tree, wrong = Tree((-1, 0, 0, 2), (5, 3, 4, 6)), Tree((-1, 0, 1, 2), (5, 3, 4, 6))
    layout = make_layout("zigzag", tokens=18, ring_size=2)
    assert simulated_error(wrong, layout, tree) > 1e-3


# --- rollouts as a batch ------------------------------------------------------------------------------


@given(
    base=st.lists(st.integers(0, 2), max_size=12),
    tails=st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), min_size=1, max_size=9)),
        min_size=1,
        max_size=12,
    ),
)
def test_a_tree_has_every_rollout(base: list[int], tails: list[tuple[int, list[int]]]) -> None:
    """Each token of a rollout sees the tokens before it, at their positions, and has the next one as its label."""
    rollouts = [np.array(base[:shared] + tail) for shared, tail in tails]
    batch = TreeBatch(rollouts, [np.arange(len(item)) for item in rollouts], tokens=400)
    tree, row = batch.tree, batch.batch["input_ids"][0].numpy()
    mask = tree.mask(np.arange(400), np.arange(400))
    assert (make_tree(find_ends(tree)).mask(np.arange(400), np.arange(400)) == mask).all()
    assert len(tree.parents) <= 2 * len(rollouts) and sum(tree.lengths) <= sum(map(len, rollouts))
    weights = np.zeros(400)
    for item, places in zip(rollouts, batch.places, strict=True):
        assert row[places].tolist() == item.tolist()
        assert batch.batch["shift_labels"][0].numpy()[places[:-1]].tolist() == item[1:].tolist()
        for at, place in enumerate(places):
            seen = np.flatnonzero(mask[place])
            assert row[seen].tolist() == item[: at + 1].tolist()
            assert batch.batch["position_ids"][0].numpy()[seen].tolist() == list(range(at + 1))
        weights[places[:-1]] += np.arange(1, len(item))
    assert batch.batch[LOSS_WEIGHTS][0].tolist() == weights.tolist()


WRONG_ROLLOUTS = {
    "none": ([], None, "at least one rollout, got none"),
    "empty": ([[1, 2], []], None, "rollout 1: expected token ids"),
    "floats": ([[1.0, 2.0]], None, "rollout 0: expected token ids, integers"),
    "a table": ([[[1, 2]]], None, r"got list \[\[1, 2\]\]"),
    "weights": ([[1, 2], [3]], [[1.0], [1.0]], r"one for each token, \[2, 1\]"),
}


@pytest.mark.parametrize("name", WRONG_ROLLOUTS)
def test_wrong_rollouts_are_refused(name: str) -> None:
    rollouts, weights, message = WRONG_ROLLOUTS[name]
    with pytest.raises(RingShapeError, match=message):
        TreeBatch(rollouts, weights)


@pytest.mark.parametrize("ends", [[3, 3, 3, 5, 4], [2, 1, 3], [0, 2], [5, 5], [0, 0]])
def test_ends_that_are_no_tree_are_refused(ends: list[int]) -> None:
    with pytest.raises(RingPatternError, match=TREE_ENDS):
        make_tree(np.array(ends))


# --- a policy -----------------------------------------------------------------------------------------

PROMPT, ANSWERS = 40, 6
SIZE = Size(hidden=32, layers=2, tokens=0, samples=0)


def answers() -> list[Tensor]:
    """Rollouts of two prompts; some answers begin alike."""
    drawn = torch.Generator().manual_seed(3)
    result = []
    for _ in range(2):
        prompt = torch.randint(0, VOCABULARY, (PROMPT,), generator=drawn)
        for number in range(ANSWERS):
            tail = torch.randint(0, VOCABULARY, (7 + 2 * number,), generator=drawn)
            tail[: number // 2] = torch.arange(number // 2)
            result.append(torch.cat([prompt, tail]))
    return result


def policy_loss(logprobs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    """GRPO's, for made-up advantages and old log-probabilities, and a bonus of entropy."""
    terms = []
    for number, (item, entropy) in enumerate(zip(logprobs, entropies, strict=True)):
        ratio, advantage = (item[PROMPT - 1 :] + 4.0 + 0.01 * number).exp(), (-1.0) ** number * (1 + number)
        clipped = ratio.clamp(0.8, 1.2)
        terms.append(-torch.minimum(ratio * advantage, clipped * advantage).mean() - 0.1 * entropy.mean())
    return torch.stack(terms).mean()


class Step(NamedTuple):
    """A policy's step: the loss, what it was computed from, and the gradients."""

    loss: float
    logprobs: list[Tensor]
    gradients: dict[str, Tensor]


def step_alone() -> Step:
    """Each rollout by itself, in one process."""
    model, logprobs, entropies = build_model(SIZE, "sdpa"), [], []
    for item in answers():
        all_of = model(input_ids=item[None]).logits[0, :-1].log_softmax(-1)
        logprobs.append(all_of.gather(1, item[1:, None])[:, 0])
        entropies.append(-(all_of.exp() * all_of).sum(-1))
    loss = policy_loss(logprobs, entropies)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step(float(loss.detach()), [item.detach() for item in logprobs], gradients)


def step_on_ring(rank: int, world_size: int, ring: int, stage: int, long_sequence: Any) -> Step:
    deepspeed = start_deepspeed()
    model = build_model(SIZE, "sdpa")
    section = {"long_sequence": long_sequence, "min_sequence_length": 4096}  # of which trees know nothing
    engine = start_engine(model, json_config(ring, 1, stage, ring_attention=section))
    tree = engine.ring.tree_batch(answers())
    batch = engine.ring.shard_batch(tree.batch)
    both = engine.ring.logprobs(engine, batch, entropies=True)
    logprobs, entropies = (tree.of_rollouts(engine.ring.gather(x)) for x in both)
    with torch.no_grad():  # the old ones, before the first update
        again = engine.ring.logprobs(engine, batch)
    assert torch.equal(again, both[0])
    loss = policy_loss(logprobs, entropies)
    engine.backward(loss)
    gradients = {name: full_gradient(deepspeed, p) for name, p in engine.module.named_parameters()}
    return Step(float(loss.detach()), [item.detach() for item in logprobs], gradients)


@pytest.mark.parametrize(
    ("world", "ring", "stage", "long_sequence"),
    [(2, 2, 1, {"tiled_loss": 16}), (2, 2, 3, {"tiled_loss": 16}), (4, 4, 2, "off"), (4, 2, 3, "off")],
)
@pytest.mark.day("2-2-3-long_sequence1")
def test_a_step_on_a_tree_is_that_on_its_rollouts(
    rank_pool: Any, world: int, ring: int, stage: int, long_sequence: Any
) -> None:
    want = step_alone()
    for got in rank_pool(world).run(step_on_ring, ring, stage, long_sequence):
        assert got.loss == pytest.approx(want.loss, abs=1e-6)
        for item, second in zip(got.logprobs, want.logprobs, strict=True):
            torch.testing.assert_close(item, second, rtol=2e-6, atol=2e-5)
        check_gradients(got.gradients, want.gradients, 2e-5)


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What each use that a tree does not allow says, on every rank."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 32, "vocab_size": VOCABULARY}
    tree = TreeBatch(answers())

    def message(config: Any, section: dict[str, Any] | None = None, **changes: Any) -> str:
        model = transformers.AutoModelForCausalLM.from_config(config)
        options = json_config(world_size, 1, 0, ring_attention=section or {})
        engine = start_engine(model, options)
        batch = {key: x for key, x in (tree.batch | changes).items() if x is not None}
        return catch_refusal(lambda: engine.ring.logprobs(engine, engine.ring.shard_batch(batch)))

    llama, ids = transformers.LlamaConfig(**sizes), tree.batch["input_ids"]
    return {
        "another pattern": message(llama, {"pattern": {"window": 8}}),
        "documents": message(llama, {"pattern": {"documents": True}}),
        "labels": message(llama, labels=ids),
        "a mask": message(llama, attention_mask=torch.ones_like(ids)),
        "no labels": message(llama, shift_labels=None),
    }  # fmt: skip


REFUSED = {
    "another pattern": "expected Causal() and no documents",
    "documents": "no documents or attention_mask with trees",
    "labels": "expected shift_labels with a tree",
    "a mask": "no documents or attention_mask with trees",
    "no labels": "logprobs: expected shift_labels",
}


def test_what_a_tree_does_not_allow_is_refused(rank_pool: Any) -> None:
    check_texts(rank_pool(2).run(refused), REFUSED)

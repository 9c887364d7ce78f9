"""Random trees of rollouts through layers and models, each against its rollouts by themselves on one process.

Owns a round of `tools/campaign.py tree`. `OPERATORS` are the parts of layers that mix tokens, in float64, by
plain formulas of one sequence that share no code with ds_ring. `MODELS` are small models of transformers by
their own configurations. Of both, outputs (of models log-probabilities) of each rollout and the gradients of
a loss of all are compared. Legend: H heads, G K/V heads, T tokens, L tokens of a rollout, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ring import Causal, Chunked, RingMesh, SlidingWindow, build_plan, make_layout, ring_attention
from ds_ring.contrib.policies.trees import TreeBatch
from ds_ring.errors import RingError
from ds_ring.layers.scan.context import scan_context
from ds_ring.layers.scan.sequence_runs import sequence_runs
from ds_ring.layers.scores import Alibi, AlongPaths
from ds_ring.masks.pattern import Pattern
from ds_ring.models.attention_name import NAME
from ds_ring.ops.shard import gather_sequence, shard_sequence
from ds_ring_launcher.check import small_model
from ds_ring_launcher.check.rounding import in_float64
from tests.dist.family_ranks import attached, start_session
from tests.dist.harness import RankPool
from tests.dist.layers import test_scan_trees as recurrences

TOKENS = 40  # of a model's small configuration
HEADS, KV_HEADS, DIM = 4, 2, 4
SLOPES = (0.5, 0.25, 0.125, 1.5)
TOLERANCE_OF_OPERATORS, TOLERANCE_OF_MODELS = 1e-10, 2e-5  # in float64, and in float32

# Model types, with values of their configurations.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {})
    for name in (
        "qwen3_5_text", "gpt_oss", "gemma3_text", "kimi_linear", "nemotron_h", "lfm2", "mamba", "mamba2",
        "recurrent_gemma", "rwkv", "qwen3_next", "falcon_h1", "minimax", "bamba", "mistral", "olmo_hybrid",
        "bloom", "mpt", "llama4_text",
    )
} | {"falcon, ALiBi": ("falcon", {"alibi": True})}  # fmt: skip


class Result(NamedTuple):
    """Outputs of each rollout, and the gradients of a loss of them; or why there are none."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    refused: str = ""


def random_rollouts(seed: int) -> list[Tensor]:
    """Rollouts of one to three prompts: branches within answers, equal ones, prefixes of others, one token."""
    drawn = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=drawn))

    def text(length: int) -> Tensor:
        return torch.randint(3, TOKENS, (length,), generator=drawn)

    result = list[Tensor]()
    for _ in range(number(1, 3)):
        make_prompt_features = [text(number(1, 13))]
        for _ in range(number(0, 4)):
            above = make_prompt_features[number(0, len(make_prompt_features) - 1)]
            stored = number(1, len(above)) if number(0, 9) else len(above)
            make_prompt_features.append(
                torch.cat([above[:stored], text(number(0, 9) if number(0, 9) else 0)])
            )
        result += make_prompt_features[number(0, 1) :] or make_prompt_features
    return result


def random_tree(seed: int) -> TreeBatch:
    """The rollouts as one row, every third one padded."""
    rollouts = random_rollouts(seed)
    tokens = TreeBatch(rollouts).tree.tokens or 0
    return TreeBatch(rollouts, tokens=tokens + seed % 7 if seed % 3 == 0 else None)


def loss_of(outputs: Sequence[Tensor], seed: int) -> Tensor:
    """A policy's loss, with random advantages of each token."""
    drawn = torch.Generator().manual_seed(seed)
    terms = [(item * torch.randn(item.shape, generator=drawn, dtype=item.dtype)).sum() for item in outputs]
    return torch.stack(terms).sum() / max(sum(map(len, outputs)), 1)


def summed(gradients: dict[str, Tensor], world_size: int) -> dict[str, Tensor]:
    """The gradients of a loss that each rank has whole."""
    for gradient in gradients.values() if world_size > 1 else ():
        torch.distributed.all_reduce(gradient)
        gradient /= world_size
    return gradients


def errors_of(got: Result, want: Result) -> tuple[float, float]:
    """The largest error of an output, and of a gradient over the largest norm."""
    of_outputs = [
        float((a - b).abs().max()) for a, b in zip(got.outputs, want.outputs, strict=True) if len(b)
    ]
    norm = max((float(item.norm()) for item in want.gradients.values()), default=0.0) or 1.0
    assert got.gradients.keys() == want.gradients.keys(), got.gradients.keys() ^ want.gradients.keys()
    each = [float((got.gradients[name] - item).norm()) / norm for name, item in want.gradients.items()]
    return max(of_outputs, default=0.0), max(each, default=0.0)


# --- operators ----------------------------------------------------------------------------------------


class Operator(NamedTuple):
    """What mixes tokens in a layer.

    Attributes:
        alone: of the inputs of one rollout: [B, L, ...].
        on_ring: of local inputs, and a `ScanContext`: [B, S, ...].
    """

    alone: Callable[[dict[str, Tensor]], Tensor]
    on_ring: Callable[[dict[str, Tensor], Any], Tensor]


def attention(pattern: Pattern, sees: Callable[[Tensor, Tensor], Tensor], alibi: bool = False) -> Operator:
    """Attention whose pairs are those of `sees(query's number, key's number)` on each path."""

    def alone(x: dict[str, Tensor]) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in "qkv")
        k, v = (item.repeat_interleave(HEADS // KV_HEADS, dim=1) for item in (k, v))
        at = torch.arange(q.shape[2])
        gap = at[:, None] - at
        scores = q @ k.mT / DIM**0.5
        if alibi:
            scores = scores - torch.tensor(SLOPES, dtype=q.dtype)[:, None, None] * gap
        hidden = (gap < 0) | ~sees(at[:, None], at[None])
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)

    def on_ring(x: dict[str, Tensor], context: Any) -> Tensor:
        tree = context.documents
        changed = AlongPaths(Alibi(SLOPES), torch.from_numpy(tree.depths)) if alibi else None
        result = ring_attention(
            *(x[name].transpose(1, 2) for name in "qkv"), pattern=tree.narrowed(pattern),
            layout=context.layout, mesh=context.mesh, score_mod=changed,
        )  # fmt: skip
        return result.transpose(1, 2)

    return Operator(alone, on_ring)


def recurrence(matrix: bool) -> Operator:
    """A short convolution, then a delta rule (`matrix`) or a decay."""

    def alone(x: dict[str, Tensor]) -> Tensor:
        width, tokens = recurrences.WIDTH, x["values"].shape[1]
        padded = torch.nn.functional.pad(x["values"], (0, 0, width - 1, 0))
        convolved = sum(x["weight"][i] * padded[:, i : i + tokens] for i in range(width))
        state, out = x["values"].new_zeros(len(padded), recurrences.K, recurrences.V), []
        for t in range(tokens):
            k, v = x["keys"][:, t], convolved[:, t]
            if matrix:
                state = state + k[..., None] * (v - torch.einsum("bk,bkv->bv", k, state))[:, None]
            else:
                state = state * x["decay"][:, t, :, None] + k[..., None] * v[:, None]
            out.append(torch.einsum("bk,bkv->bv", k, state))
        return torch.stack(out, dim=1)

    def on_ring(x: dict[str, Tensor], context: Any) -> Tensor:
        arguments = {"k": x["keys"], "v": x["values"], "decay": x["decay"], "weight": x["weight"]}
        return recurrences.layer(arguments, context, matrix)

    return Operator(alone, on_ring)


OPERATORS: dict[str, Operator] = {
    "attention": attention(Causal(), lambda q, k: q >= k),
    "windows": attention(SlidingWindow(5), lambda q, k: q - k < 5),
    "chunks": attention(Causal() & Chunked(6), lambda q, k: q // 6 == k // 6),
    "ALiBi": attention(Causal(), lambda q, k: q >= k, alibi=True),
    "ALiBi in windows": attention(SlidingWindow(7), lambda q, k: q - k < 7, alibi=True),
    "decay after a convolution": recurrence(False),
    "delta rule after a convolution": recurrence(True),
}


def operands(seed: int, tokens: int) -> dict[str, Tensor]:
    """Inputs of all operators, float64; all but "weight" have the tokens in dim 1."""
    drawn = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (HEADS, DIM), "k": (KV_HEADS, DIM), "v": (KV_HEADS, DIM), "keys": (recurrences.K,),
        "values": (recurrences.V,), "decay": (recurrences.K,),
    }  # fmt: skip
    result = {
        name: torch.randn(recurrences.B, tokens, *shape, generator=drawn, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    result["keys"] = torch.nn.functional.normalize(result["keys"], dim=-1)
    result["decay"] = 0.7 + 0.3 * result["decay"].sigmoid()
    return result | {"weight": torch.randn(recurrences.WIDTH, generator=drawn, dtype=torch.float64)}


def gradient_of(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def operator_alone(name: str, seed: int) -> Result:
    tree = random_tree(seed)
    inputs = {key: x.requires_grad_() for key, x in operands(seed, tree.tree.tokens or 0).items()}
    outputs = []
    for places in map(torch.from_numpy, tree.places):
        of_rollout = {key: x if key == "weight" else x[:, places] for key, x in inputs.items()}
        outputs.append(OPERATORS[name].alone(of_rollout).transpose(0, 1))
    loss_of(outputs, seed).backward()
    gradients = {key: gradient_of(x) for key, x in inputs.items()}
    return Result([item.detach() for item in outputs], gradients)


def operator_on_ring(rank: int, world_size: int, name: str, seeds: Sequence[int]) -> list[Result]:
    mesh, result = RingMesh.from_world(world_size), list[Result]()
    for seed in seeds:
        tree = random_tree(seed)
        tokens = tree.tree.tokens or 0
        layouts = ("zigzag", "contiguous", "balanced")
        layout = make_layout(layouts[seed % 3], tokens=tokens, ring_size=world_size, pattern=tree.tree)
        inputs = {
            key: (x if key == "weight" else shard_sequence(x, layout, mesh=mesh, dim=1)).requires_grad_()
            for key, x in operands(seed, tokens).items()
        }
        out = OPERATORS[name].on_ring(inputs, scan_context(layout, mesh, tree.tree))
        whole = gather_sequence(out, layout, mesh=mesh, dim=1)
        outputs = [whole[:, torch.from_numpy(places)].transpose(0, 1) for places in tree.places]
        loss_of(outputs, seed).backward()
        gradients = {}
        for key, x in inputs.items():
            if key == "weight":
                gradients |= summed({key: gradient_of(x)}, world_size)
            else:
                gradients[key] = gather_sequence(gradient_of(x), layout, mesh=mesh, dim=1) / world_size
        result.append(Result([item.detach() for item in outputs], gradients if rank == 0 else {}))
    return result


# --- models -------------------------------------------------------------------------------------------


def built(name: str, attention: str | None = None) -> Any:
    family, changes = MODELS[name]
    config = small_model.shrink(small_model.read_config(family), TOKENS, changes=changes)
    model = small_model.build(config, "causal-lm", 0)
    if attention is not None:
        model.config._attn_implementation = attention
    return model


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Take the gradients out of a model."""
    result = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return result


def model_alone(model: Any, seed: int) -> Result:
    """What a model of `built` computes of each rollout by itself."""
    outputs = []
    for ids in random_rollouts(seed):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        outputs.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    loss_of(outputs, seed).backward()
    return Result([item.detach() for item in outputs], gradients_of(model))


def model_on_ring(rank: int, world_size: int, name: str, seeds: Sequence[int]) -> list[Result]:
    session, result = start_session(world_size), list[Result]()
    # One rank keeps a model's own attention, which knows of no trees, unless it is asked for the ring's.
    model = attached(built(name, NAME if world_size == 1 else None), session)
    for seed in seeds:
        tree = random_tree(seed)
        try:
            batch = session.shard_batch(tree.batch)
            outputs = tree.of_rollouts(session.gather(session.logprobs(model, batch)))
        except RingError as error:
            result.append(Result([], {}, f"{type(error).__name__}: {error}"))
            continue
        loss_of(outputs, seed).backward()
        gradients = summed(gradients_of(model), world_size)
        result.append(Result([item.detach() for item in outputs], gradients if rank == 0 else {}))
    return result


# --- rounds -------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """One tree on one ring: errors of outputs and gradients, what is wrong, and whether it is refused."""

    of_outputs: float = 0.0
    of_gradients: float = 0.0
    wrong: str = ""
    refused: bool = False  # a recurrence with fewer tokens than ranks
    rounded: bool = False  # beyond the tolerance, but nearer to float64 than one process in float32 is


def play(
    name: str, seeds: Sequence[int], pool: RankPool, on_ring: Callable[..., Any] | None = None
) -> Iterator[Round]:
    """Yield the round of each seed of an operator or a model on the ring of a pool's ranks."""
    on_ring = on_ring or (operator_on_ring if name in OPERATORS else model_on_ring)
    tolerance = TOLERANCE_OF_OPERATORS if name in OPERATORS else TOLERANCE_OF_MODELS
    outcomes = pool.collect(on_ring, name, seeds, timeout_s=60 + 10 * len(seeds), grace_s=5)
    failed = next((item for item in outcomes if item.status != "returned"), None)
    model = None if name in OPERATORS else built(name)
    for number, seed in enumerate(seeds):
        where = f"{name}, tree {seed}, {pool.world_size} ranks"
        if failed is not None:
            yield Round(
                0, 0, f"{where}: rank {failed.rank} {failed.status} {failed.report or failed.message}"
            )
            continue
        of_ranks = [item.value[number] for item in outcomes]
        if refused := next((item.refused for item in of_ranks if item.refused), ""):
            is_short = "expected tokens on every rank" in refused
            yield Round(refused=is_short, wrong="" if is_short else f"{where}: {refused}")
            continue
        want = operator_alone(name, seed) if model is None else model_alone(model, seed)
        # Gradients were added over all ranks, and come from the first one.
        of_outputs = [errors_of(item._replace(gradients=want.gradients), want)[0] for item in of_ranks]
        result = Round(max(of_outputs), errors_of(of_ranks[0], want)[1])
        is_right = result.of_outputs <= tolerance and result.of_gradients <= tolerance  # NaN is not
        text = f"{where}: outputs off by {result.of_outputs:.2g}, gradients by {result.of_gradients:.2g}"
        if is_right:
            yield result
        elif model is not None and is_nearer(of_ranks[0], want, model_alone(in_float64(model), seed)):
            yield result._replace(rounded=True)
        else:
            yield result._replace(wrong=text)


def is_nearer(got: Result, want: Result, exact: Result) -> bool:
    """Whether a ring is nearer to float64 than one process: the difference between both is that one's rounding."""
    of_ring, of_one = errors_of(got, exact), errors_of(want, exact)
    return of_ring[0] <= max(of_one[0], TOLERANCE_OF_MODELS) and of_ring[1] <= of_one[1]


class Tokens(NamedTuple):
    """Tokens that all ranks compute, K/V tokens and states of recurrences that they send; of a layer forward."""

    computed: int = 0
    keys: int = 0
    states: int = 0

    def __add__(self, second: tuple[Any, ...]) -> Tokens:
        return Tokens(*map(sum, zip(self, second, strict=True)))


def tokens_of(seed: int, ring_size: int) -> tuple[Tokens, Tokens]:
    """Those of the tree, and of its rollouts as rows of their own, none padded."""
    tree = random_tree(seed).tree

    def of_pattern(pattern: Any, tokens: int, in_tree: Any = None) -> Tokens:
        layout = make_layout("auto", tokens=tokens, ring_size=ring_size, pattern=pattern)
        runs_layout = make_layout("zigzag", tokens=tokens, ring_size=ring_size)
        runs = sequence_runs(runs_layout, 1, in_tree)
        steps = [step for messages in (*runs.rounds(), runs.shift()) for step in messages]
        sent = sum(int(runs.ranks[item.of] != runs.ranks[item.to]) for item in steps)
        return Tokens(tokens, build_plan(pattern, layout).tokens_sent, sent)

    rows = sum((of_pattern(Causal(), len(item)) for item in random_rollouts(seed)), Tokens())
    return of_pattern(tree, tree.tokens or 0, tree), rows

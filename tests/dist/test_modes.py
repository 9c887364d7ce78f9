"""Every public function under every mode of torch: eager, compiled, checkpointed, without gradients, batched.

What a mode changes must not change a result: outputs and gradients are compared with those of a plain eager call.
What ds_ring cannot do is refused by name on every rank, and the mesh works afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ds_ring
from ds_ring import RingMesh
from ds_ring.layers.scores import Alibi, Softcap
from ds_ring.schedule.layout import Layout
from tests import calls
from tests.dist.harness import Pool, catch_refusal
from tests.reference import relative_error

pytestmark = pytest.mark.needs("compiler")

Run = Callable[..., Tensor]
RANKS, TOKENS, HEADS, WIDTH = 2, 32, 4, 16
SLOTS = TOKENS // RANKS
SLOPES = (0.5, 0.25, 0.125, 0.0625)
IDS = torch.arange(TOKENS) // 9
CAP = Softcap(2.0)


class Ring(NamedTuple):
    """Where a function runs."""

    mesh: RingMesh
    layout: Layout

    @property
    def where(self) -> dict[str, Any]:
        return {"mesh": self.mesh, "layout": self.layout}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(heads: int = HEADS) -> list[Tensor]:
    return [randn(2, n, SLOTS, WIDTH, seed=n) for n in (heads, 2, 2)]


def attention(
    ring: Ring, make: Callable[[], dict[str, Any]] = dict, **extra: Any
) -> tuple[Run, list[Tensor]]:
    """`make` returns options inside the call, as a model's forward makes them."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"pattern": ds_ring.Causal(), **ring.where, **extra, **make()}
        return calls.attend(q, k, v, **options)  # type: ignore[no-any-return]

    return run, qkv()


def with_sinks(ring: Ring) -> tuple[Run, list[Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        options = {"pattern": ds_ring.Causal(), "sinks": sinks, "return_lse": True, **ring.where}
        out, lse = calls.attend(q, k, v, **options)
        return torch.cat([out, lse.unsqueeze(-1)], dim=-1)

    return run, [*qkv(), randn(HEADS)]


def replicated(ring: Ring) -> tuple[Run, list[Tensor]]:
    run, (q, k, v) = attention(ring, queries="replicated")
    return run, [q[:, :, :4], k, v]


def called(
    ring: Ring, function: Callable[..., Tensor], make: Callable[[Ring], list[Tensor]], **options: Any
) -> tuple[Run, list[Tensor]]:
    """A function of the inputs that `make` returns, and of where it runs."""

    def run(*inputs: Tensor) -> Tensor:
        return function(*inputs, **ring.where, **options)

    return run, make(ring)


def latents(ring: Ring) -> list[Tensor]:
    q = randn(2, HEADS, SLOTS, 12)
    return [q, randn(2, 1, SLOTS, 6), randn(2, 1, SLOTS, 4), randn(HEADS * (8 + 8), 6)]


def local_tokens(ring: Ring) -> list[Tensor]:
    return [randn(2, SLOTS, 3)]


def states(ring: Ring) -> list[Tensor]:
    runs = len(ring.layout.runs(ring.mesh.ring_rank))
    return [randn(runs, 2, 3), randn(runs, 2, 3, seed=1)]


def module(ring: Ring, score_mod: Any = None) -> tuple[Run, list[Tensor]]:
    built = ds_ring.RingAttention(ds_ring.Causal(), **ring.where, score_mod=score_mod)
    return built, qkv()


def chosen(ring: Ring) -> tuple[Run, list[Tensor]]:
    """`ring_select` and `selected_attention`."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, queries = k.transpose(1, 2), q[:, :2]

        def scores(rows: slice, keys: Tensor) -> Tensor:
            return torch.einsum("bhqd,bnhd->bqn", queries[:, :, rows], keys)

        picked = ds_ring.ring_select(scores, 5, keys, pattern=ds_ring.Causal(), **ring.where)
        return ds_ring.selected_attention(q, k, v, picked, **ring.where)  # type: ignore[no-any-return]

    return run, qkv()


def largest(ring: Ring) -> tuple[Run, list[Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q * ds_ring.max_logits(q, k, pattern=ds_ring.Causal(), **ring.where).view(-1, 1, 1)

    return run, qkv()


def between(ring: Ring) -> tuple[Run, list[Tensor]]:
    keys = ds_ring.make_layout("contiguous", tokens=TOKENS // 2, ring_size=RANKS)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ds_ring.cross_attention(q, k, v, pattern=ds_ring.Full(), key_layout=keys, **ring.where)  # type: ignore[no-any-return]

    q, k, v = qkv()
    return run, [q, k[:, :, : SLOTS // 2], v[:, :, : SLOTS // 2]]


def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k < 9) & (IDS[q] == IDS[k])


def by_batch(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(TOKENS)[q] >= k + b  # no elementwise graph: by vmap


NEAR = ds_ring.MaskMod(near)
WINDOW_OR_SINKS = ds_ring.SlidingWindow(9) | ds_ring.Sinks(2)
DOCUMENTS = ds_ring.Documents(IDS)


def pattern(make: Callable[[], ds_ring.Causal | Any]) -> Callable[[Ring], tuple[Run, list[Tensor]]]:
    return partial(attention, make=lambda: {"pattern": make()})


def scored(make: Callable[[], Any]) -> Callable[[Ring], tuple[Run, list[Tensor]]]:
    return partial(attention, make=lambda: {"score_mod": make()})


FUNCTIONS: dict[str, Callable[[Ring], tuple[Run, list[Tensor]]]] = {
    "attention": attention,
    "sinks and lse": with_sinks,
    "replicated queries": replicated,
    "latents": partial(called, function=ds_ring.latent_attention, make=latents, pattern=ds_ring.Causal()),
    "keys of another sequence": between,
    "SlidingWindow": pattern(lambda: ds_ring.SlidingWindow(9)),
    "Dilated": pattern(lambda: ds_ring.Dilated((8, 16), (1, 2))),
    "Chunked": pattern(lambda: ds_ring.Chunked(8)),
    "PrefixLM": pattern(lambda: ds_ring.PrefixLM(8)),
    "window or sinks": pattern(lambda: WINDOW_OR_SINKS),
    "documents and a window": pattern(lambda: DOCUMENTS & ds_ring.SlidingWindow(5)),
    "MaskMod": pattern(lambda: ds_ring.MaskMod(near)),
    "MaskMod from outside": pattern(lambda: NEAR),
    "MaskMod by vmap": pattern(lambda: ds_ring.MaskMod(by_batch)),
    "Softcap": scored(lambda: Softcap(2.0)),
    "Softcap from outside": scored(lambda: CAP),
    "Alibi": scored(lambda: Alibi(SLOPES)),
    "score_mod": scored(lambda: lambda score, b, h, q, k: score + 0.1 * h * (k - q)),
    "RingAttention": module,
    "RingAttention, Softcap": partial(module, score_mod=CAP),
    "shard_sequence": partial(
        called, function=ds_ring.shard_sequence, make=lambda ring: [randn(2, TOKENS, 3)], dim=1
    ),
    "gather_sequence": partial(called, function=ds_ring.gather_sequence, make=local_tokens, dim=1),
    "shift_sequence": partial(called, function=ds_ring.shift_sequence, make=local_tokens, offset=1, dim=1),
    "halo": partial(called, function=ds_ring.halo, make=local_tokens, before=2, after=1, dim=1),
    "ring_scan": partial(called, function=ds_ring.ring_scan, make=states),
    "ring_select and selected_attention": chosen,
    "moba_attention": partial(
        called, function=ds_ring.moba_attention, make=lambda ring: qkv(), block_size=4, top_k=2
    ),
    "max_logits": largest,
}


def gradients(run: Run, inputs: list[Tensor]) -> list[Tensor]:
    """Output and gradients."""
    arguments = [x.detach().clone().requires_grad_() for x in inputs]
    out = run(*arguments)
    out.square().sum().backward()
    return [out.detach(), *(torch.zeros(()) if x.grad is None else x.grad for x in arguments)]


def compiled(run: Run, inputs: list[Tensor], backend: str = "aot_eager", **options: Any) -> list[Tensor]:
    torch._dynamo.reset()
    return gradients(torch.compile(run, backend=backend, fullgraph=True, **options), inputs)


def checkpointed(run: Run, inputs: list[Tensor], reentrant: bool) -> list[Tensor]:
    return gradients(lambda *arguments: checkpoint(run, *arguments, use_reentrant=reentrant), inputs)


def _saves_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def selective(run: Run, inputs: list[Tensor]) -> list[Tensor]:
    contexts = partial(create_selective_checkpoint_contexts, _saves_products)
    return gradients(lambda *x: checkpoint(run, *x, use_reentrant=False, context_fn=contexts), inputs)


def after_inference(run: Run, inputs: list[Tensor]) -> list[Tensor]:
    with torch.inference_mode():
        run(*inputs)
    return gradients(run, inputs)


def without_gradients(run: Run, inputs: list[Tensor]) -> list[Tensor]:
    """no_grad and inference_mode: the output alone."""
    with torch.no_grad():
        out = run(*inputs)
    with torch.inference_mode():
        assert torch.equal(run(*[x.clone() for x in inputs]), out)
    return [out]


def batched(run: Run, inputs: list[Tensor]) -> list[Tensor]:
    """Two gradients of the output at once."""
    arguments = [x.detach().clone().requires_grad_() for x in inputs]
    out = run(*arguments)
    vectors = torch.stack([2 * out.detach(), torch.ones_like(out)])
    result = torch.autograd.grad(out, arguments, vectors, is_grads_batched=True, allow_unused=True)
    return [out.detach(), *(torch.zeros(()) if x is None else x[0] for x in result)]


def mapped(run: Run, inputs: list[Tensor]) -> list[Tensor]:
    """torch.func.vmap over two equal entries."""
    arguments = [torch.stack([x, x]) for x in inputs]
    return [torch.func.vmap(run)(*arguments)[1]]


MODES: dict[str, Callable[[Run, list[Tensor]], list[Tensor]]] = {
    "compile": compiled,
    "dynamic": partial(compiled, dynamic=True),
    "inductor": partial(compiled, backend="inductor"),
    "reentrant": partial(checkpointed, reentrant=True),
    "non-reentrant": partial(checkpointed, reentrant=False),
    "selective": selective,
    "inference first": after_inference,
    "no gradients": without_gradients,
    "batched gradients": batched,
    "vmap": mapped,
}


EAGERLY = "runs eagerly: call it outside of the graph"
CHOSEN = ("ring_select and selected_attention", "moba_attention", "max_logits")
IN_GRAPHS = {
    **dict.fromkeys(
        ("keys of another sequence", "shard_sequence", "gather_sequence", "shift_sequence", *CHOSEN), EAGERLY
    )
}
# What is refused, with a part of the reason.
REFUSED: dict[str, dict[str, str]] = {
    **dict.fromkeys(("compile", "dynamic", "inductor"), IN_GRAPHS),
    "batched gradients": {"gather_sequence": "expected one gradient at a time, got several"},
    "vmap": dict.fromkeys(("gather_sequence", *CHOSEN), "expected a call outside of torch.func"),
}


def walk(rank: int, world_size: int, mode: str, names: list[str]) -> dict[str, str]:
    """For each function "" if it is exact, or what it raised, or by how much it is off."""
    mesh = RingMesh.from_world(world_size)
    ring = Ring(mesh, ds_ring.make_layout("zigzag", tokens=TOKENS, ring_size=world_size))
    result = {}
    for name in names:
        run, inputs = FUNCTIONS[name](ring)
        got, said = [], ""
        try:
            got = MODES[mode](run, inputs)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        run, inputs = FUNCTIONS[name](ring)
        want = gradients(run, inputs)  # after the mode, which meets empty caches; the mesh works afterwards
        errors = [
            relative_error(a, b) if b.abs().max() > 0 else float(a.abs().max())
            for a, b in zip(got, want, strict=False)
        ]
        worst = max(errors, default=0.0)
        result[name] = said or ("" if worst < 1e-12 else f"off by {worst}")
    return result


FEW = ["attention", "SlidingWindow", "MaskMod by vmap", "Softcap", "gather_sequence", "halo"]


@pytest.mark.day("selective-few", "vmap-few")
@pytest.mark.situation("modes", "public functions under compile, checkpoint, inference_mode, no_grad, vmap")
@pytest.mark.parametrize("names", [FEW, list(FUNCTIONS)], ids=["few", "all"])
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_of_torch_changes_no_result(rank_pool: Pool, mode: str, names: list[str]) -> None:
    refused = REFUSED.get(mode, {})
    for result in rank_pool(RANKS).run(walk, mode, names, timeout_s=600):
        for name, said in result.items():
            assert refused[name] in said if name in refused else not said, (mode, name, said)


@dataclass(frozen=True)
class Tilt:
    """A score_mod of a user's."""

    by: float

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + self.by * (k - q)


def made_inside(rank: int, world_size: int) -> str:
    """An object that Dynamo hands over without its attributes."""
    ring = Ring(RingMesh.single(), ds_ring.make_layout("contiguous", tokens=SLOTS, ring_size=1))
    run, inputs = attention(ring, make=lambda: {"score_mod": Tilt(0.5)})
    return catch_refusal(compiled, run, inputs)


@pytest.mark.night
@pytest.mark.situation("modes", "a pattern is made inside a compiled function")
def test_what_cannot_be_made_inside_a_graph_is_named(rank_pool: Pool) -> None:
    (result,) = rank_pool(1).run(made_inside)
    assert result.startswith("RingConfigError: Tilt: expected one that is made outside"), result

"""Modules and hooks of a user inside a transformers model: what mixes tokens is refused, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tests.dist.deepspeed_ranks import Size, build_batch, build_model, json_config, start_engine, take_step
from tests.dist.harness import Pool, catch_refusal

SIZE = Size(hidden=16, layers=2, tokens=29, samples=2)
H = SIZE.hidden


class Around(nn.Module):
    """A module in place of one of the model's, which it may call."""

    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.inner = inner


# What mixes tokens.


def mixes(name: str, forward: Callable[[Any, Tensor], Tensor]) -> type[Around]:
    """Make a class of this name that computes this of the module inside and its input."""
    return type(name, (Around,), {"forward": lambda self, x: forward(self.inner, x)})


class Convolved(Around):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.conv = nn.Conv1d(H, H, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.conv(x.transpose(1, 2)).transpose(1, 2)


class Capacity(Around):
    """Experts that drop the tokens beyond their capacity."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        stored = flat[:, 0].topk(len(flat) // 2).indices
        return torch.zeros_like(flat).index_add(0, stored, self.inner(flat[stored])).view_as(x)


class MixedExperts(Around):
    """An expert that reads the mean of the tokens that were given to it."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        stored = (flat[:, 0] > 0).nonzero()[:, 0]
        return torch.zeros_like(flat).index_add(0, stored, flat[stored] - flat[stored].mean(0)).view_as(x)


class LastToken(Around):
    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x).clone()
        out[:, -1] += 0.3
        return out


def last_token(_: Any, __: Any, output: Any) -> Any:
    x = output[0] if isinstance(output, tuple) else output
    x[:, -1] += 0.3


def last_token_anew(_: Any, __: Any, output: Any) -> Any:
    added = torch.zeros_like(output)
    added[:, -1] = 0.3
    return output + added


def centred_inputs(_: Any, args: Any) -> Any:
    return (args[0] - args[0].mean(1, keepdim=True),)


# What works token by token.


class Norm(Around):
    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class SwiGLU(Around):
    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(2 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class LowRank(Around):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.a, self.b = nn.Linear(inner.in_features, 2), nn.Linear(2, inner.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.b(functional.dropout(self.a(x), 0.1, self.training))


class Experts(Around):
    """Tokens sorted by their expert, as kernels want them."""

    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(H, 4), nn.ModuleList(SwiGLU() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        order = chosen.flatten().argsort()
        rows, counts = order // 2, chosen.flatten().bincount(minlength=4).tolist()
        parts = flat[rows].split(counts)
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        out = out * weights.flatten()[order, None]
        return torch.zeros_like(flat).index_add_(0, rows, out).view_as(x)


class LoopedExperts(Experts):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, H)
        weights, chosen = self.router(flat).softmax(-1).topk(1, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen[:, 0] == number)[0]
            out[rows] = expert(flat[rows]) * weights[rows]
        return out.view_as(x)


class Logged(Around):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = float(x.detach().abs().mean())
        return self.inner(x)


class Steered(Around):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.vector = nn.Parameter(torch.randn(H))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.vector * torch.sigmoid((x @ self.vector)[..., None])


class Layer(Around):
    """A decoder layer of the user's around the model's."""

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        out = self.inner(x, **kwargs)
        return x + 0.5 * (out - x)


def seen_mean(_: Any, __: Any, output: Any) -> None:
    seen.append(float((output[0] if isinstance(output, tuple) else output).detach().mean()))


def scaled(_: Any, __: Any, output: Any) -> Any:
    return (output[0] * 1.1, *output[1:]) if isinstance(output, tuple) else output * 1.1


seen: list[float] = []
MLP, LAYER, HEAD, NORM = "model.layers.1.mlp", "model.layers.0", "lm_head", "model.norm"


def replaced(path: str, kind: Any) -> Callable[[Any], Any]:
    def change(model: Any) -> None:
        model.set_submodule(path, kind(model.get_submodule(path)))

    return change


def hooked(path: str, hook: Any, name: str = "register_forward_hook") -> Callable[[Any], Any]:
    return lambda model: getattr(model.get_submodule(path), name)(hook)


def new_forward(model: Any) -> None:
    """What a script does that replaces a method."""
    mlp = model.get_submodule(MLP)
    local = mlp.forward
    mlp.forward = lambda x: local(x - x.mean(1, keepdim=True))


class Derived(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(1)).flip(1) + x.amax(1, keepdim=True)


class DerivedNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 1.5


MeanGate = mixes("MeanGate", lambda inner, x: inner(x) * torch.sigmoid(x.mean(1, keepdim=True)))
# by name: (what is done to the model, what the message names)
FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an MLP gated by a mean": (replaced(MLP, MeanGate), f"{MLP} (MeanGate)"),
    "a shifted MLP": (
        replaced(MLP, mixes("Shifted", lambda inner, x: inner(functional.pad(x, (0, 0, 1, -1))))),
        f"{MLP} (Shifted)",
    ),
    "a rolled MLP": (replaced(MLP, mixes("Rolled", lambda inner, x: inner(x) + 0.1 * x.roll(1, 1))), f"{MLP} (Rolled)"),
    "a cumulative sum": (
        replaced(MLP, mixes("Cumulative", lambda inner, x: inner(x) + x.cumsum(1) / 50)), f"{MLP} (Cumulative)"
    ),
    "a head that centres": (
        replaced(HEAD, mixes("Centred", lambda inner, x: inner(x - x.mean(dim=(0, 1))))), f"{HEAD} (Centred)"
    ),
    "a norm over all entries": (
        replaced(NORM, mixes("Normed", lambda inner, x: inner(x / x.flatten(1).norm(dim=1)[:, None, None]))),
        f"{NORM} (Normed)",
    ),
    "a softmax over tokens": (
        replaced(MLP, mixes("Softmaxed", lambda inner, x: inner(x) * x.softmax(1))), f"{MLP} (Softmaxed)"
    ),
    "a convolution": (replaced(NORM, Convolved), f"{NORM}.conv (Conv1d)"),
    "positions of its own": (
        replaced(MLP, mixes("Numbered", lambda inner, x: inner(x) + torch.arange(x.shape[1])[:, None] / 100)),
        f"{MLP} (Numbered)",
    ),
    "experts that drop tokens": (replaced(MLP, Capacity), f"{MLP} (Capacity)"),
    "experts that average": (replaced(MLP, MixedExperts), f"{MLP} (MixedExperts)"),
    "a module that changes the last token": (replaced(MLP, LastToken), f"{MLP} (LastToken)"),
    "a convolution in a Sequential": (
        replaced(NORM, lambda _: nn.Sequential(Transposed(), nn.Conv1d(H, H, 3, padding=1), Transposed())),
        f"{NORM}.1 (Conv1d)",
    ),
    "a hook that changes the last token": (hooked(LAYER, last_token), f"a forward hook of {LAYER}"),
    "such a hook of an MLP": (hooked(MLP, last_token_anew), f"a forward hook of {MLP}"),
    "a hook that centres inputs": (
        hooked(MLP, centred_inputs, "register_forward_pre_hook"), f"a forward pre-hook of {MLP}"
    ),
    "a forward that was replaced": (new_forward, f"{MLP} (LlamaMLP)"),
    "a class that inherits": (replaced(MLP, lambda mlp: derived(mlp, Derived)), f"{MLP} (Derived)"),
    "inside a layer of the user's": (
        lambda model: (replaced(f"{LAYER}.mlp", MeanGate)(model), replaced(LAYER, Layer)(model)),
        f"{LAYER}.inner.mlp (MeanGate)",
    ),
}  # fmt: skip
RIGHT: dict[str, Callable[[Any], Any]] = {
    "a norm": replaced(NORM, Norm),
    "SwiGLU": replaced(MLP, SwiGLU),
    "a low-rank adapter": replaced(f"{LAYER}.self_attn.q_proj", LowRank),
    "experts, sorted": replaced(MLP, Experts),
    "experts in a loop": replaced(MLP, LoopedExperts),
    "a module that logs": replaced(MLP, Logged),
    "a steering vector": replaced(MLP, Steered),
    "a layer": replaced(LAYER, Layer),
    "a Sequential": replaced(MLP, lambda mlp: nn.Sequential(mlp, nn.LayerNorm(H), nn.Dropout(0.1))),
    "a hook that logs": hooked(LAYER, seen_mean),
    "a hook that scales": hooked(LAYER, scaled),
    "a class that inherits": replaced(NORM, lambda norm: derived(norm, DerivedNorm)),
    "a hook that multiplies inputs": hooked(
        MLP, lambda _, args: (args[0] * 2,), "register_forward_pre_hook"
    ),
}  # fmt: skip


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def derived(module: Any, kind: Any) -> Any:
    module.__class__ = kind
    return module


def first_step(change: Callable[[Any], Any], section: dict[str, Any], checkpointing: bool, stage: int) -> str:
    torch.manual_seed(3)
    model: Any = build_model(SIZE, "sdpa")
    torch.manual_seed(3)
    change(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    engine = start_engine(model, json_config(2, 2, stage, ring_attention=section))
    text = catch_refusal(lambda: [take_step(engine, build_batch(SIZE)) for _ in range(2)])
    hooks = [
        x
        for item in model.modules()
        for x in (*item._forward_hooks.values(), *item._forward_pre_hooks.values())
    ]
    assert not any(
        hook.__module__.startswith("ds_ring.") and "module_watch" in hook.__module__ for hook in hooks
    )
    engine.destroy()
    return text.removeprefix("RingConfigError: ")


def table(rank: int, world_size: int, which: str) -> dict[str, str]:
    changes = {name: item[0] for name, item in FAULTS.items()} if which == "faults" else RIGHT
    return {
        name: first_step(change, {}, number % 3 == 1, 3 if number % 4 == 2 else 0)
        for number, (name, change) in enumerate(changes.items())
    }


@pytest.mark.situation("modules", "A module or a hook of the user's in a Llama mixes tokens.")
def test_what_mixes_tokens_is_refused_on_every_rank(rank_pool: Pool) -> None:
    for result in rank_pool(2).run(table, "faults"):
        for name, (_, named) in FAULTS.items():
            assert result[name].startswith(f"{named}: expected a result of each token"), (name, result[name])
            assert '"check_modules": false' in result[name]


@pytest.mark.night
@pytest.mark.situation("modules", "A module or a hook of the user's in a Llama works token by token.")
def test_what_works_token_by_token_is_not_refused(rank_pool: Pool) -> None:
    for result in rank_pool(2).run(table, "right"):
        assert result == dict.fromkeys(RIGHT, "")


def with_the_switch(rank: int, world_size: int) -> str:
    return first_step(FAULTS["a shifted MLP"][0], {"check_modules": False}, False, 0)


def test_a_switch_turns_it_off(rank_pool: Pool) -> None:
    assert rank_pool(2).run(with_the_switch) == [""] * 2


def after_a_short_batch(rank: int, world_size: int, stage: int) -> list[str]:
    """A batch of whole samples on each rank shows nothing; the next one does."""
    torch.manual_seed(3)
    model = build_model(SIZE, "sdpa")
    FAULTS["a shifted MLP"][0](model)
    engine = start_engine(model, json_config(2, 2, stage, ring_attention={"min_sequence_length": 20}))
    result = []
    for tokens in (12, 29):
        text = catch_refusal(take_step, engine, build_batch(SIZE._replace(tokens=tokens)))
        result.append(text.removeprefix("RingConfigError: ").partition(":")[0])
    return result


@pytest.mark.parametrize("stage", [0, 3])
def test_a_batch_that_is_not_cut_is_waited_out(rank_pool: Pool, stage: int) -> None:
    assert rank_pool(2).run(after_a_short_batch, stage) == [["", f"{MLP} (Shifted)"]] * 2


# Of families, all of whose modules are taken for a user's.
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gemma3n_text", "gpt_oss", "gpt2",
    "gpt_neox", "phi3", "mixtral", "deepseek_v2", "deepseek_v3", "olmo3", "cohere2", "falcon", "bloom", "mpt",
    "opt", "mamba", "mamba2", "jamba", "bamba", "qwen3_next", "recurrent_gemma", "minimax", "rwkv", "xlstm",
    "zamba2", "lfm2", "granitemoehybrid", "nemotron_h", "llama4_text", "modernbert-decoder", "doge", "stablelm",
    "xglm", "codegen",
)  # fmt: skip


def as_a_users(rank: int, world_size: int, family: str) -> int:
    """Take a step with a model whose modules are watched; return how many were."""
    from ds_ring.models import module_watch
    from ds_ring_launcher.check.small_model import build, read_config, shrink

    with pytest.MonkeyPatch.context() as patch:
        known = tuple(name for name in module_watch._KNOWN if name != "transformers")
        patch.setattr(module_watch, "_KNOWN", known)
        model = build(shrink(read_config(family), 58, 2, {}), "causal-lm", 0)
        engine = start_engine(model, json_config(2, 2, 0))
        counted: list[int] = []
        judge = module_watch.ModuleWatch._judge
        patch.setattr(module_watch.ModuleWatch, "_judge", lambda *args: (counted.append(1), judge(*args))[1])
        ids = torch.randint(3, 60, (2, 58), generator=torch.Generator().manual_seed(0))
        engine(**engine.ring.shard_batch({"input_ids": ids, "labels": ids}))
        engine.destroy()
    return len(counted)


@pytest.mark.day("qwen3_moe")
@pytest.mark.parametrize("family", FAMILIES)
def test_modules_of_families_would_not_be_refused_as_a_users(rank_pool: Pool, family: str) -> None:
    assert min(rank_pool(2).run(as_a_users, family)) >= 6

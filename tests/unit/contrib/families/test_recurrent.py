"""Which layers pass a state on, or look back, and which of them are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig
from ds_ring.contrib.families.recurrent import layers, methods, scan
from ds_ring.errors import RingConfigError
from ds_ring.layers.scan import recurrence
from ds_ring.models.attach import check_model
from tests.refusals import Refusals, refuse
from tests.unit.models.test_attention import FAMILIES, GROUPED, build

X = torch.zeros(1, 2, 4)


def named(layer: Any, hidden_states: Any, past_key_values: Any) -> None: ...


def given_a_cache(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """Call a layer's function on a ring, with what earlier tokens left."""

    def call() -> Any:
        scan.active.append(SimpleNamespace(is_replicated=False, masks_padding=False))  # type: ignore[arg-type]
        try:
            return function(named, *args, **kwargs)
        finally:
            scan.active.pop()

    return call


CASES: Refusals = {
    "no tokens for a state": (
        lambda: recurrence.group_pieces(
            SimpleNamespace(pieces=[], layout="contiguous", mesh=RingMesh.single())  # type: ignore[arg-type]
        ),
        RingConfigError,
        "got none on rank 0",
    ),
    "a state that is passed on": (
        lambda: scan.refuse_states("scan", None, True), RingConfigError, "a call without a cache on a ring"
    ),
    **{
        f"a cache in {says}": (call, RingConfigError, f"{says}: expected a call without a cache on a ring")
        for says, call in {
            "RWKV": given_a_cache(methods.wkv, X, X, X, X, state=X),
            "mLSTM": given_a_cache(methods.mlstm, None, X, X, X, X, X, c_initial=X),
            "lightning attention": given_a_cache(methods.lightning_attention, None, X, X),
            "RG-LRU": given_a_cache(methods.rg_lru, None, X, X, X, X),
            "compressed convolutional attention": given_a_cache(methods.compressed_convolution, None, X, X),
            "dynamic convolution": given_a_cache(methods.dynamic_convolution, None, X, X, past_key_values=X),
            "n-gram embedding": given_a_cache(methods.ngrams, None, X, X),
        }.items()
    },
}  # fmt: skip


test_it_is_refused = refuse(CASES)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        ("MiniMaxLightningAttention.forward", {"hidden_states": 1, "position_embeddings": 2}),
        ("ZayaCCAProjection.forward", {"hidden_states": 1, "conv_mask": 2}),
        ("Qwen4ExpTextNGramEmbedding.forward", {"input_ids": 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_wrapped_method_keeps_the_names_of_its_arguments(
    function: str, inputs: dict[str, Any], name: str
) -> None:
    def original(layer: Any, **kwargs: Any) -> Any:
        return kwargs

    request = inputs | {name: None}
    assert layers.WRAPPERS[function](original, SimpleNamespace(), **request) == request  # without a ring


def lfm2() -> Any:
    config = transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"])
    return build(config, "sdpa")


def with_another_mixer() -> Any:
    class Mixer(torch.nn.Module):
        def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
            return hidden_states.cumsum(dim=1)

    model = lfm2()
    model.model.layers[0].conv = Mixer()
    return model


def with_a_convolution() -> Any:
    model = build(FAMILIES["Llama"](), "sdpa")
    model.model.layers[0].mlp.add_module("mixing", torch.nn.Conv1d(32, 32, 3))
    return model


def with_a_convolution_that_is_called() -> Any:
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    class Called(Lfm2ShortConv):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            length = hidden_states.shape[1]
            return self.conv(hidden_states.transpose(1, 2))[..., :length].transpose(1, 2)

    model = lfm2()
    model.model.layers[0].conv.__class__ = Called
    return model


def with_a_convolution_beside_a_function() -> Any:
    from transformers.models.lfm2 import modeling_lfm2 as file

    class Both(file.Lfm2ShortConv):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            x = hidden_states.transpose(1, 2)
            x = file.causal_conv1d_fn(x, self.conv.weight.squeeze(1), self.conv.bias)
            return self.conv(x)[..., : x.shape[2]].transpose(1, 2)

    model = lfm2()
    model.model.layers[0].conv.__class__ = Both
    return model


def with_an_inner_function_that_is_covered() -> Any:
    """A subclass keeps the forward of its family, whose functions are wrapped where that stands."""
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    class Mine(Lfm2ShortConv):
        pass

    model = lfm2()
    model.model.layers[0].conv.__class__ = Mine
    return model


SEEDED: dict[str, tuple[Any, str]] = {
    "a layer of a known type with another mixer": (with_another_mixer,
        "its layers conv mix tokens otherwise"),
    "an nn.Conv1d": (with_a_convolution, "it convolves tokens"),
    "an nn.Conv1d that is called": (with_a_convolution_that_is_called,
        "its layers conv mix tokens otherwise"),
    "an nn.Conv1d that is called beside a function": (with_a_convolution_beside_a_function,
        "it convolves tokens"),
}  # fmt: skip


def check(make: Callable[[], Any], layout: str = "auto") -> None:
    check_model(make(), RingConfig(ring_size=2, layout=layout))


test_layers_that_no_wrapper_computes_are_refused = refuse(
    {what: (partial(check, make), RingConfigError, words) for what, (make, words) in SEEDED.items()}
)
test_layouts_of_single_tokens_are_refused_for_layers_that_pass_a_state_on = refuse({
    layout: (partial(check, lfm2, layout), RingConfigError, f'consecutive tokens, got "{layout}"')
    for layout in ("striped", "residue")
})  # fmt: skip


@pytest.mark.parametrize("make", [lfm2, with_an_inner_function_that_is_covered])
def test_layers_that_a_wrapper_computes_pass_the_check(make):
    check(make)

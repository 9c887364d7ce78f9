"""`MultiheadRingAttention` on one rank: torch's module, a plain formula, state dicts, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_ring
from ds_ring import Causal, Dilated, Full, MultiheadRingAttention, RingConfigError, RingError, RingMesh
from ds_ring.errors import RingPatternError, RingShapeError
from tests.multihead import dense

E, H, T = 16, 4, 24
MESH = RingMesh.single()
DILATED = Dilated((8, 16, 24), (1, 2, 3))


def made(**arguments: Any) -> MultiheadRingAttention:
    torch.manual_seed(3)
    plain = {"mesh": MESH, "dtype": torch.float64}
    plain |= {} if "segment_lengths" in arguments else {"pattern": Causal()}
    return MultiheadRingAttention(E, H, **(plain | arguments))


def random(*shape: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(4, *shape, generator=generator, dtype=torch.float64))


def results(call: Any, module: nn.Module, inputs: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """Output and every gradient, by name."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    module.zero_grad()
    out, weights = call(*inputs)
    assert weights is None
    out.backward(grad)
    named = dict(zip(("query", "key", "value"), inputs, strict=True)) | dict(module.named_parameters())
    return {"out": out.detach()} | {name: x.grad.clone() for name, x in named.items()}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-12, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_as_torchs_module(causal: bool, bias: bool, batch_first: bool) -> None:
    ours = made(pattern=Causal() if causal else Full(), bias=bias, batch_first=batch_first)
    theirs = nn.MultiheadAttention(E, H, bias=bias, batch_first=batch_first, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    mask = torch.ones(T, T, dtype=torch.bool).triu(1) if causal else None
    *inputs, grad = random(2, T, E) if batch_first else random(T, 2, E)
    want = results(
        lambda *x: theirs(*x, attn_mask=mask, need_weights=False, is_causal=causal), theirs, inputs, grad
    )
    assert_equal(results(lambda *x: ours(*x, is_causal=causal), ours, inputs, grad), want)
    same = (inputs[0],) * 3  # one matrix product for all three
    assert_equal({"out": ours(*same)[0]}, {"out": theirs(*same, attn_mask=mask, need_weights=False)[0]})


@pytest.mark.parametrize("pattern", [Causal(), Full(), DILATED], ids=str)
@pytest.mark.parametrize("more", [{"kv_heads": 2}, {"kv_heads": 1}, {"sub_layer_norm": True}], ids=str)
def test_as_the_formula(pattern: Any, more: dict[str, Any]) -> None:
    module = made(pattern=pattern, **more)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(
                torch.linspace(-0.3, 0.4, parameter.numel(), dtype=torch.float64).view_as(parameter)
            )
    *inputs, grad = random(2, T, E)
    assert_equal(results(module, module, inputs, grad), dense(module, pattern, inputs, grad))


def test_state_dicts_go_both_ways() -> None:
    """Also the first one: with the same seed, the two initialize alike."""
    ours = made(dtype=None)
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(E, H)
    for name, x in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], x)
    other = made(dtype=None, gamma_init=2.0)
    assert not torch.equal(other.in_proj_weight, ours.in_proj_weight)
    other.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(other.state_dict())
    assert list(theirs.state_dict()) == list(other.state_dict())
    assert torch.equal(other.in_proj_weight, ours.in_proj_weight)
    with pytest.raises(RuntimeError, match=r"norm\.weight"):
        made(sub_layer_norm=True).load_state_dict(theirs.state_dict())
    with pytest.raises(RuntimeError, match=r"in_proj_weight.*\[48, 16\].*\[32, 16\]"):
        made(kv_heads=2).load_state_dict(theirs.state_dict())


def test_magnetos_initialization() -> None:
    module = MultiheadRingAttention(256, 8, kv_heads=4, mesh=MESH, pattern=Full(), gamma_init=3.0)
    q, k, v = module.in_proj_weight.split((256, 128, 128))
    for weight, gain in ((q, 1), (k, 1), (v, 3), (module.out_proj.weight, 3)):
        assert weight.std().item() == pytest.approx(gain * (2 / sum(weight.shape)) ** 0.5, rel=0.03)
    assert not module.in_proj_bias.any() and not module.out_proj.bias.any()


def test_segments_as_in_longnet() -> None:
    assert made(segment_lengths=(8, 16, 24)).attention.context.pattern == DILATED
    assert made(segment_lengths=[8, 24], dilation_rates=[1, 2]).attention.context.pattern == Dilated(
        (8, 24), (1, 2)
    )


def test_inside_torchs_encoder() -> None:
    """In eval mode torch's layer would attend densely by itself, if it took ours for its own."""
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = made(segment_lengths=(8, 16, 24))
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = random(2, T, E)[0]
    want = encoder(x, is_causal=True)
    with torch.no_grad():
        got = encoder.eval()(x, is_causal=True)
    torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)


def test_compiled_is_one_graph() -> None:
    module = made(sub_layer_norm=True, kv_heads=2)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for tokens in (T, T, 40):
        *inputs, grad = random(2, tokens, E)
        assert_equal(results(compiled, module, inputs, grad), results(module, module, inputs, grad))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"dropout": 0.1}, RingConfigError, "dropout: expected 0.0, got 0.1; .*torch.nn.Dropout"),
        ({"add_bias_kv": True}, RingConfigError, "add_bias_kv: expected False, got True; .*sinks"),
        ({"add_zero_attn": True}, RingConfigError, "add_zero_attn: .*sinks=torch.zeros"),
        ({"add_zero_attn": 0}, RingConfigError, "expected False, got 0"),
        ({"kdim": 8}, RingConfigError, "kdim: expected None, got 8; project"),
        ({"vdim": 8}, RingConfigError, "vdim: expected None, got 8; project"),
        ({"rotary": True}, RingConfigError, "'rotary'"),
        ({"kv_heads": 3}, RingConfigError, "num_heads to be a multiple of kv_heads, got 4, 3"),
        ({"embed_dim": 18}, RingConfigError, "embed_dim to be a multiple of num_heads, got 18, 4"),
        ({"pattern": None}, RingConfigError, "either pattern or segment_lengths, got neither"),
        ({"pattern": Full(), "segment_lengths": (8,)}, RingConfigError, "got both"),
        ({"dilation_rates": (1,)}, RingConfigError, "expected no dilation_rates with a pattern"),
        ({"segment_lengths": (8, 12)}, RingPatternError, r"multiples of 8, .*\[8, 12\]"),
        ({"segment_lengths": 8}, RingPatternError, "segment_lengths: expected a list"),
        ({"gamma_init": 0}, RingConfigError, "gamma_init: expected a positive number, got 0"),
        ({"layer_norm_eps": None}, RingConfigError, "layer_norm_eps: expected a positive number"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_refused_when_made(arguments: dict[str, Any], error: type[RingError], words: str) -> None:
    plain = {"embed_dim": E, "num_heads": H, "mesh": MESH}
    plain |= {} if "segment_lengths" in arguments else {"pattern": Causal()}
    with pytest.raises(error, match=words):
        MultiheadRingAttention(**(plain | arguments))


def test_what_changes_nothing_is_taken() -> None:
    made(dropout=0.0, add_bias_kv=False, add_zero_attn=False, kdim=None, vdim=E)
    with pytest.raises(RingConfigError):
        made(kdim=True)


X = random(2, T, E)[0]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"need_weights": True}, RingConfigError, "need_weights: expected False, got True.*return_lse"),
        ({"attn_mask": torch.ones(T, T)}, RingPatternError, "attn_mask: .*pattern=MaskMod"),
        ({"key_padding_mask": torch.zeros(2, T)}, RingPatternError, "key_padding_mask: .*Documents"),
        ({"is_causal": False}, RingPatternError, "expected None or True, .*got False"),
        ({"query": X[0]}, RingShapeError, r"query: expected \[batch, tokens, 16\], got \[24, 16\]"),
        ({"value": X[..., :8]}, RingShapeError, r"value: expected .*, 16\], got"),
        ({"query": X[:, :5]}, RingShapeError, "key: .* as the query, .*decode_attention"),
        ({"query": X.float()}, RingShapeError, "query: expected the parameters' torch.float64"),
        ({"key": X.to("meta")}, RingShapeError, "key: .*meta"),
        ({"key": None}, RingShapeError, "key: expected a tensor, got NoneType"),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else "",
)
def test_refused_calls(arguments: dict[str, Any], error: type[RingError], words: str) -> None:
    module = made()
    call = {"query": X, "key": X, "value": X} | arguments
    with pytest.raises(error, match=words):
        module(**call)
    module(X, X, X)


def test_under_autocast_and_copied() -> None:
    module = copy.deepcopy(made(dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(X.float(), X.float(), X.float())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), module(X.float(), X.float(), X.float())[0], rtol=0.05, atol=0.05)
    assert isinstance(module, ds_ring.MultiheadRingAttention)

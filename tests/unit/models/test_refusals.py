"""What parts of a model's adapter refuse and pass on, each called by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_ring import Causal, RingMesh, SlidingWindow
from ds_ring.data.batch import REAL_TOKENS, SHARDING
from ds_ring.data.token_flow import Flow, ModuleFlow
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.masks.pattern import Pattern
from ds_ring.memory.host import head_stream, offloaded_checkpoints
from ds_ring.memory.host.host_memory import HostMemory
from ds_ring.memory.tiles import models_head, models_layers
from ds_ring.models import checks, families, layer_masks, positions, wrappers
from ds_ring.models.attention_name import NAME
from ds_ring.models.copies import TransformersCopies
from ds_ring.models.module_watch import _Call, _is_by_token, _run_before
from ds_ring.schedule.grid import Grid
from tests.refusals import Refusals, refuse
from tests.sessions import session_of
from tests.unit.models.calls import sharding

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


# --- whether a module works token by token ----------------------------------------------------------------

TOKENS = torch.arange(24.0).view(2, 4, 3)
BY_TOKEN: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "a product": (lambda x: x * 2, True),
    "whole numbers": (lambda x: (x[..., 0] > 3).long(), True),
    "a mean": (lambda x: x - x.mean(1, keepdim=True), False),
    "whole numbers of a mean": (lambda x: (x[..., 0] > x.mean()).long(), False),
    "tokens in another order": (lambda x: x.flip(1), False),
    "fewer results for fewer tokens": (lambda x: [x] * x.shape[1], False),
    "another dimension for fewer tokens": (lambda x: x if x.shape[1] == 4 else x[..., None], False),
    "two dimensions of tokens": (lambda x: x[..., :1] * x[:, None, :, 0], False),
    "an error for fewer tokens": (lambda x: x.view(2, 4, 3), False),
}


def call(run: Callable[[Tensor], Any], attends: bool = False, tokens: int = 4) -> _Call:
    return _Call(lambda arguments: run(arguments[0]), (TOKENS,), [Flow("tokens", 1)], None, tokens, attends)


@pytest.mark.parametrize("case", BY_TOKEN)
def test_a_module_is_run_on_other_tokens(case: str) -> None:
    run, is_by_token = BY_TOKEN[case]
    assert _is_by_token(call(run)) == is_by_token
    assert not _is_by_token(call(run, attends=True)) and not _is_by_token(call(run, tokens=1))


def test_pre_hooks_change_arguments_with_and_without_keywords() -> None:
    module = nn.Linear(1, 1)
    module.register_forward_pre_hook(lambda part, args: args[0] + 1)
    module.register_forward_pre_hook(lambda part, args, kwargs: (args, {"b": 3}), with_kwargs=True)
    module.register_forward_pre_hook(lambda part, args, kwargs: None, with_kwargs=True)
    hooks = list(module._forward_pre_hooks.items())
    assert _run_before(module, hooks, ((1,), {"b": 2})) == ((2,), {"b": 3})


def test_shapes_tell_the_dimension_of_tokens() -> None:
    flow = ModuleFlow(4, 2, None)
    shapes = [(2, 4, 3), (2, 3, 4, 5), (8, 3), (4, 2, 3), (2, 3, 4), (7, 3), (2, 3), ()]
    axes = [None if (known := flow.guess(torch.zeros(shape))) is None else known for shape in shapes]
    tokens = [Flow("tokens", axis) for axis in (1, 2, 0, 0, 2)]
    assert axes == [*tokens, Flow("tokens", 0, True), None, None]
    assert flow.guess(nn.Parameter(torch.zeros(2, 4))) is None
    assert flow._merged(torch.zeros(2, 3), None, torch.zeros(6)) is None
    assert flow._merged(torch.zeros(2, 4, 3), Flow("tokens", 1), torch.zeros(3, 8)) is None


# --- outputs of a user's class around a model -------------------------------------------------------------


@dataclass
class Output:
    logits: Tensor
    count: int


def test_outputs_of_a_dataclass_are_looked_into_and_made_anew() -> None:
    output = {"a": [Output(torch.ones(2), 3), None]}
    assert dict(wrappers._tensors(output)).keys() == {("a", 0, "logits")}
    doubled = wrappers._map_tensors(output, lambda path, x: x * 2)
    assert doubled["a"][0].logits.tolist() == [2.0, 2.0] and doubled["a"][0].count == 3
    assert doubled["a"][1] is None and output["a"][0].logits.tolist() == [1.0, 1.0]  # type: ignore[union-attr]
    assert wrappers._find_token_axis(None, torch.ones(2), sharding()) is None


def decided(flow: dict[str, Any], session: dict[str, Any], **current: Any) -> Any:
    """Decide on a module that mixes tokens."""
    wrapper: Any = object.__new__(wrappers.WrappedModel)
    batch = {"mesh": RingMesh(Grid(2, 2), 0), "encoder": None, "layout": SimpleNamespace(tokens=8)}
    facts = {"run_mesh": RingMesh(Grid(2, 2), 0), "gradient_divisor": 1.0}
    batches = SimpleNamespace(current=SimpleNamespace(**batch | current))
    wrapper._session, wrapper._name = SimpleNamespace(batches=batches, **facts | session), "Model"
    return wrapper._decide(
        SimpleNamespace(**{"fault": "mean at a.py:3", "shifts": False, "sends": False} | flow)
    )


def test_a_module_that_mixes_tokens_runs_on_whole_sequences(caplog: pytest.LogCaptureFixture) -> None:
    assert decided({}, {}) is True and "mean at a.py:3" in caplog.messages[-1]
    assert decided({"sends": True}, {}) is False and len(caplog.messages) == 2
    assert decided({"fault": None}, {}) is False and len(caplog.messages) == 2


def numbered(ids: Tensor) -> Any:
    """Call the hooks of a model whose part gets other position ids."""
    model = nn.Linear(1, 1)
    model.forward = lambda position_ids: None  # type: ignore[method-assign]
    check = positions.make_numbering_check(model, RingMesh.single())
    check.part(model, (ids,), {})  # before the model was called
    check.model[0](model, (), {"position_ids": torch.arange(4)[None]})
    check.part(model, ([0, 1],), {})
    check.part(model, (torch.arange(4)[None, None],), {})
    return check.part(model, (ids,), {})


class Rotary(nn.Module):
    rope_type = "dynamic"

    def forward(self, x: Any, position_ids: Any = None) -> Any:
        return position_ids[..., None].float()


class WithoutPositions(nn.Module):
    rope_type = "dynamic"

    def forward(self, x: Any) -> None: ...


def classified(**prepared: Any) -> Any:
    model: Any = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(pad_token_id=0))
    )
    return families.check_pooled_token(model, {REAL_TOKENS: torch.tensor([[1, 1, 0, 0]])} | prepared)


def adapted() -> Any:
    model: Any = nn.Linear(1, 1)
    model.peft_config = {"plain": SimpleNamespace(), "late": SimpleNamespace(alora_invocation_tokens=[3])}
    return checks.check_adapters(model)


def dropped_by_the_model(divides: bool) -> Any:
    guard = families.LossGuard(lambda **_: torch.zeros(()))
    guard.start(items=3 if divides else None, shift_labels=torch.ones(1))
    return guard(shift_labels=torch.ones(1))


def copied(window: int | None) -> Any:
    """Refuse a pattern beside a layer that another row has changed."""
    model, config = llama(), session_of(pattern={"window": window} if window else {"causal": True}).config
    layer = model.model.layers[0].mlp
    changes: list[Any] = [
        SimpleNamespace(owner=model, row=SimpleNamespace(feature="recurrence")),
        SimpleNamespace(owner=layer, row=SimpleNamespace(feature="numbering.part")),
        SimpleNamespace(owner=layer, row=SimpleNamespace(feature="recurrence")),
    ]
    return TransformersCopies().refuse_pattern(model, config, changes)


def tiled(head: Any, choice: Any = True, loss: Any = None) -> Any:
    model: Any = llama()
    if loss is not None:
        model.loss_function = loss
    model.get_output_embeddings = lambda: head
    return models_head.tiled_head(model, session_of(long_sequence={"tiled_loss": choice}))


def another_loss(*_: Any) -> None: ...


def cut(name: str, x: Any) -> Any:
    """Hand a tensor to a model inside a wrapper that runs on whole sequences."""
    wrapper: Any = object.__new__(wrappers.WrappedModel)
    wrapper._name, wrapper._call = "Model", SimpleNamespace(sharding=sharding(), local_of={})
    return wrapper._cut("Inner", name, x)


def test_what_a_wrapper_makes_of_whole_sequences_is_cut() -> None:
    whole, other = torch.arange(8).view(2, 4), torch.ones(2, 3)
    assert cut("hidden", whole).equal(whole) and cut("hidden", whole) is not whole
    assert cut("hidden", other) is other and cut("hidden", 3) == 3


REFUSED: Refusals = {
    "other tokens than the batch's": (lambda: cut("input_ids", torch.ones(2, 3)), RingShapeError,
        r"input_ids: expected the batch's 4 tokens from Model, got \[2, 3\]"),
    "a shift of shifted labels": (lambda: decided({"shifts": True}, {}), RingShapeError,
        r"Model: expected shift_labels to be used as they are, got a shift \(mean at a.py:3\)"),
    "a short batch": (lambda: decided({}, {}, mesh=RingMesh.single()), RingConfigError,
        'mean at a.py:3; the 8 tokens of this batch are on fewer ranks than the ring has; set "min_seq'),
    "two sequences": (lambda: decided({}, {}, encoder=1), RingConfigError, "two sequences it is not known"),
    "gradients that are added up": (lambda: decided({}, {"gradient_divisor": 2.0}), RingConfigError,
        '"gradient_allreduce_op": "sum" would count its loss once for every rank'),
    "a part that numbers tokens by itself": (lambda: numbered(torch.arange(4)[None] + 4), RingPatternError,
        "Linear: expected position_ids in its Linear, which numbers this rank's tokens by itself"),
    "a part that gets fewer tokens": (lambda: numbered(torch.arange(3)[None]), RingPatternError,
        "expected position_ids in its Linear"),
    "a rotary embedding without positions": (
        lambda: positions.check_lengths(nn.Sequential(WithoutPositions())), RingConfigError,
        r"WithoutPositions \(rope_type 'dynamic'\) depends on the length, and is computed without pos"),
    "padding of other ids": (lambda: classified(input_ids=torch.tensor([[5, 6, 7, 0]])), RingPatternError,
        "attention_mask shows where it reads sample 0, got padding with other ids than pad_token_id 0; give"),
    "padding of embeddings": (lambda: classified(position_ids=torch.arange(4)[None]), RingPatternError,
        "got inputs_embeds with padding there; pad on the left"),
    "adapters that begin at a token": (adapted, RingConfigError,
        "peft: adapter 'late': expected a plain LoRA, got alora_invocation_tokens"),
    "a model that drops the number of labels": (lambda: dropped_by_the_model(True), RingConfigError,
        "loss: expected a model that hands on num_items_in_batch, got one that drops it; install"),
    "a batch without the number of labels": (lambda: dropped_by_the_model(False), RingShapeError,
        "loss: expected num_items_in_batch with labels, got none"),
    "a window beside a recurrence": (lambda: copied(5), RingConfigError,
        r"a pattern that the model's own code knows, got another one, and LlamaMLP \(recurrence\)"),
    "a head of another class": (lambda: tiled(nn.Bilinear(1, 1, 1)), RingConfigError,
        'LlamaForCausalLM: .*: expected a torch.nn.Linear as its head, got Bilinear; set it to "auto"'),
    "a loss of another kind": (lambda: tiled(nn.Linear(1, 1), loss=another_loss), RingConfigError,
        "expected the loss of causal language models, ForCausalLMLoss, got another_loss"),
}  # fmt: skip
test_it_is_refused = refuse(REFUSED)


def test_what_is_right_beside_it_is_taken() -> None:
    numbered(torch.arange(4)[None])
    classified(input_ids=torch.tensor([[5, 6, 0, 0]]))
    classified(position_ids=torch.tensor([[2, 3, 0, 0]]))
    copied(None)


def test_a_row_is_removed_from_one_tensor_and_from_two() -> None:
    batches: Any = SimpleNamespace(current=SimpleNamespace(longest=torch.tensor([9])))
    rotary = Rotary()
    before, after = positions.make_rotary_hooks(rotary, batches)
    args, kwargs = before(rotary, (0,), {"position_ids": torch.arange(3)[None]})
    output = rotary(*args, **kwargs)
    assert output[..., 0].tolist() == [[0.0, 1.0, 2.0, 9.0]]
    assert after(rotary, args, kwargs, output).equal(output[:, :3])
    assert [x.shape for x in after(rotary, args, kwargs, (output, output))] == [(1, 3, 1)] * 2


@pytest.mark.parametrize(("window", "implementation"), [(5, NAME), (None, "eager")])
def test_the_copy_of_one_process_attends_by_the_pattern_of_the_json(
    window: int | None, implementation: str
) -> None:
    """By the model's own attention, which is compared, where it has that pattern."""
    config = session_of(pattern={"window": window} if window else {"causal": True}).config
    copy, model, copies = llama(), llama(), TransformersCopies()
    for part in (copy, model):
        part.set_attn_implementation(NAME)
    copies.set_attention(copy, model, config)
    assert copy.config._attn_implementation == implementation
    one = sharding()
    arguments = copies.arguments(copy, {"position_ids": torch.arange(4)[None]}, one)
    assert arguments == {"use_cache": False} | ({SHARDING: one} if window else {})


MASKS: dict[str, tuple[dict[str, Any], Pattern]] = {
    "causal": ({}, Causal()),
    "a window": ({"sliding_window": 3}, SlidingWindow(3)),
}


@pytest.mark.parametrize("case", MASKS)
def test_a_layer_without_a_mask_says_its_pattern_by_its_arguments(case: str) -> None:
    kwargs, pattern = MASKS[case]
    assert layer_masks.read_call_pattern(nn.Linear(1, 1), kwargs) == pattern


def test_a_window_of_nothing_is_a_mask_for_no_layer() -> None:
    """Qwen's configuration without windows."""

    def of(sliding_window: int) -> Any:
        return lambda b, h, q, k: q - k < sliding_window

    assert layer_masks.read_mask(of(0)) == layer_masks.LayerMask(None)


def test_a_mask_is_no_tensor_that_could_be_cast() -> None:
    mask = layer_masks.LayerMask(Causal())
    assert mask.to(torch.bool) is mask


# --- "auto" leaves out what a model does not allow --------------------------------------------------------


def test_auto_leaves_out_tiles_that_a_model_cannot_have(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ds_ring")
    assert tiled(nn.Bilinear(1, 1, 1), "auto") is None
    assert "computes its logits at once: expected a torch.nn.Linear as its head" in caplog.messages[-1]
    model: Any = nn.Sequential(nn.Bilinear(1, 1, 1))
    assert models_layers.tiled_layers(model, session_of(long_sequence={"tiled_mlp": "auto"})) == {}
    assert "the MLPs of Sequential stay whole: it has no module that is known for one" in caplog.messages[-1]
    long_sequence = {"offload_checkpoints": "auto"}
    session = replace(session_of(long_sequence=long_sequence), device=torch.device("cuda"))
    cannot: Any = SimpleNamespace(supports_gradient_checkpointing=False)
    assert offloaded_checkpoints.offloaded_checkpoints(cannot, session) is None
    assert "SimpleNamespace does not support checkpointing" in caplog.messages[-1]


def test_a_head_without_tiles_returns_what_the_model_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    head = models_head.TiledHead(nn.Linear(2, 3), 1, strict=False)
    head.deferring = True
    assert head.loss_function(lambda logits, labels: (logits, labels))(torch.ones(1), 2)[1] == 2  # type: ignore[arg-type, return-value]
    model, session = (
        nn.Linear(1, 1),
        SimpleNamespace(batches=SimpleNamespace(defers_logits=True, is_off=False)),
    )
    before = {hook.__name__: hook for hook in head.patches(model, session, None)[2:]}["before"]  # type: ignore[arg-type]
    before(model, (), {})
    assert head.deferring
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    before(model, (), {})
    assert not head.deferring


def test_a_module_that_is_not_tiled_is_called_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Without a ring, with fewer tokens than a tile has, with other things than tokens."""
    session: Any = SimpleNamespace(batches=SimpleNamespace(is_off=True))
    module, x = nn.Bilinear(2, 2, 3), torch.ones(5, 2)
    made = models_layers._TiledModule(module, "auto", session, 1)
    assert made.forward(x, x).equal(module(x, x))
    session.batches.is_off = False
    assert made.forward(x, x).equal(module(x, x)) and not caplog.messages
    models_layers._say_once.cache_clear()
    with pytest.raises(RuntimeError, match="do not match"):
        made.forward(x, torch.ones(4, 2))
    assert "Bilinear is called with other things than tokens, and stays whole" in caplog.messages[-1]


def test_a_graph_keeps_what_it_saves_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    with FakeTensorMode():
        saved: Any = (torch.ones(2),) * 5
    head_stream._say_that_graphs_keep_tensors.cache_clear()
    assert head_stream.saved_on_host(saved, HostMemory()) is saved
    assert "a compiled graph keeps what it saves on the device" in caplog.messages[-1]

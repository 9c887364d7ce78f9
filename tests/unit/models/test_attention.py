"""transformers models: the families that run, and every silent mistake that must be an error instead."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import create_causal_mask

import ds_ring
from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig
from ds_ring.contrib.families.eager_attention.families import Family
from ds_ring.contrib.families.eager_attention.scores import EagerScores, ModuleAttention
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError, RingError, RingPatternError, RingShapeError
from ds_ring.masks.catalog import Causal, SlidingWindow
from ds_ring.models.attach import attach, check_model
from ds_ring.models.layer_masks import LayerMask
from ds_ring.patches import describe
from tests.dist.test_long_sequence import Largest
from tests.refusals import refuse
from tests.sessions import session_of

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
GPT2_SIZES: dict[str, Any] = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4}
NO_DROPOUT: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
LOCAL_AND_GLOBAL: dict[str, Any] = {
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}

FAMILIES = {
    "Llama": lambda: transformers.LlamaConfig(**GROUPED),
    "Qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "Qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=8),
    "Mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=None),
    "Mistral, long window": lambda: transformers.MistralConfig(**GROUPED, sliding_window=33),
    "GPT-NeoX": lambda: transformers.GPTNeoXConfig(**SIZES),
    "GPT-2": lambda: transformers.GPT2Config(**GPT2_SIZES, **NO_DROPOUT),
    "Gemma 3": lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=8),
    "Gemma 3, local and global": lambda: transformers.Gemma3TextConfig(
        **GROUPED, head_dim=8, **LOCAL_AND_GLOBAL
    ),
    "Mistral, short window": lambda: transformers.MistralConfig(**GROUPED, sliding_window=7),
    "Mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4),
}
IDS = torch.randint(0, 61, (2, 33), generator=torch.Generator().manual_seed(1))


def build(config: Any, implementation: str = "ds_ring") -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def attached(config: Any = None, **section: Any) -> tuple[Any, RingSession]:
    model, session = build(config or FAMILIES["Llama"]()), session_of(**section)
    attach(model, session)
    return model, session


def check_logits(got, expected, session):
    """In the order of the shard."""
    order = torch.from_numpy(session.layout.positions(0))
    assert torch.allclose(got.logits, expected.logits[:, order], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_that_of_sdpa(family):
    expected = build(FAMILIES[family](), "sdpa")(input_ids=IDS, labels=IDS)
    model, session = attached(FAMILIES[family]())
    got = model(**session.shard_batch({"input_ids": IDS, "labels": IDS}))
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert got.past_key_values is None, "a cache would keep every layer's keys"
    check_logits(got, expected, session)


def test_a_pattern_that_is_not_causal_decides_alone_in_a_bidirectional_model():
    """By `config.is_causal`, as the refusal of a causal model says: a prefix of 7 tokens, as a dense mask."""
    visible = torch.ones(33, 33, dtype=torch.bool).tril()
    visible[:7, :7] = True
    bias = torch.zeros(33, 33).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected = build(FAMILIES["Llama"](), "sdpa")(input_ids=IDS, attention_mask=bias[None, None])
    config = FAMILIES["Llama"]()
    config.is_causal = False
    model, session = attached(config, pattern={"prefix": 7})
    got = model(**session.shard_batch({"input_ids": IDS}))
    check_logits(got, expected, session)


MODERN_BERT: dict[str, Any] = (
    SIZES
    | dict.fromkeys(("bos_token_id", "cls_token_id"), 1)
    | {
        "num_hidden_layers": 3,
        "local_attention": 8,
        **dict.fromkeys(("pad_token_id", "eos_token_id", "sep_token_id"), 0),
    }
)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (transformers.AutoModelForCausalLM, FAMILIES["Gemma 3, local and global"]()),
        (transformers.AutoModelForMaskedLM, transformers.ModernBertConfig(**MODERN_BERT)),
    ],
    ids=["causal", "two-sided"],
)
def test_a_configuration_says_of_layers_what_their_masks_say(kind, config, monkeypatch):
    """The layout is chosen by the configuration, attention reads the masks."""
    read, pattern_of = [], BatchSharding.get_layer_pattern

    def noted(sharding: BatchSharding, said: Any, *others: Any) -> Any:
        read.append(said)
        return pattern_of(sharding, said, *others)

    monkeypatch.setattr(BatchSharding, "get_layer_pattern", noted)
    model = kind.from_config(config, attn_implementation="ds_ring")
    session = session_of(pattern={"causal": kind is transformers.AutoModelForCausalLM})
    attach(model, session)
    model(**session.shard_batch({"input_ids": IDS}))
    assert session.needs.layers == tuple(read) and len(set(read)) == 2


def test_hooks_run_in_the_order_of_the_table():
    config = transformers.MixtralConfig(**GROUPED, num_local_experts=4)
    long = {"tiled_loss": 7, "offload_checkpoints": True}
    model, session = attached(config, long_sequence=long)

    def owners(hooks: Any) -> list[str]:
        return [hook.__qualname__.partition(".<locals>")[0] for hook in hooks.values()]

    before = ["Generation.patches", "TiledHead.patches", "offloaded_checkpoints", "make_numbering_check"]
    assert owners(model._forward_pre_hooks) == [*before, "ModelCall.hooks"]
    after = ["TiledHead.patches", "make_numbering_check", "router_loss", "ModelCall.hooks"]
    assert owners(model._forward_hooks) == after
    said = describe(session)
    assert "hook       model (numbering): notes" in said and "score" not in said
    with session.attached[0]():
        assert not model._forward_pre_hooks and model.generate == model.generate.__self__.generate
    assert owners(model._forward_pre_hooks) == [*before, "ModelCall.hooks"]
    model(**session.shard_batch({"input_ids": IDS, "labels": IDS})).loss.backward()
    assert "make_numbering_check" not in owners(model._forward_pre_hooks) + owners(model._forward_hooks)


# Logits that are capped and scaled, experts, checkpointed layers.
TILED: dict[str, Any] = {
    "Llama": FAMILIES["Llama"],
    "Gemma 3": lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=8, final_logit_softcapping=3.0),
    "Granite": lambda: transformers.GraniteConfig(**GROUPED, logits_scaling=4.0),
    "Mixtral": FAMILIES["Mixtral"],
}


@pytest.mark.parametrize("family", TILED)
def test_tiles_change_no_gradient(family):
    """And are taken: no operator returns all logits, or the MLP's widest rows of all tokens."""
    expected = build(TILED[family](), "sdpa").train()
    expected(input_ids=IDS, labels=IDS).loss.backward()
    model, session = attached(TILED[family](), long_sequence={"tiled_loss": 7, "tiled_mlp": 5})
    if family == "Llama":
        model.activation_checkpointing_enable({"use_reentrant": False})
    batch = session.shard_batch({"input_ids": IDS, "labels": IDS})
    with Largest() as seen:
        model.train()(**batch).loss.backward()
    if family != "Mixtral":  # whose parameter of all experts is larger than that
        assert seen.elements < IDS.numel() * 48, "the intermediate width, below the 61 words"
    norms = {name for name, part in model.named_modules() if type(part).__name__.endswith("Norm")}
    taken = {name for name, part in model.named_modules() if "forward" in vars(part)}
    assert taken & norms == {name for name in norms if "self_attn" not in name}, "those of a head stay"
    head = model.get_output_embeddings()
    assert isinstance(head(torch.zeros(1, 32)), Tensor), "logits are held back in forward passes alone"
    theirs = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-6)


def test_logits_are_plain_again_after_a_forward_pass_that_failed():
    model, session = attached(long_sequence={"tiled_loss": 7})
    batch = session.shard_batch({"input_ids": IDS + 61, "labels": IDS})
    with pytest.raises(IndexError):  # no such words
        model.train()(**batch)
    head = model.get_output_embeddings()
    assert isinstance(head(torch.zeros(1, 32)), Tensor)


@pytest.mark.parametrize("family", ["Qwen3", "GPT-2", "Gemma 3, local and global"])
@pytest.mark.day("Gemma 3, local and global")
def test_the_rings_attention_compiles_to_one_graph(family):
    """As engine.compile(backend="ds_ring") does it; every mask is read in the graph."""
    from ds_ring.contrib.compile.backend import backend_of

    expected = build(FAMILIES[family](), "sdpa")(input_ids=IDS, labels=IDS)
    model, session = build(FAMILIES[family]()), session_of()
    (attached_model,) = attach(model, session)
    attached_model.rewritten = True
    model.compile(backend=backend_of(session), fullgraph=True, options={"inner": "eager"})
    batch = session.shard_batch({"input_ids": IDS, "labels": IDS})
    assert model(**batch).loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    with pytest.raises(RingConfigError, match="does not go through the backend"):
        model._call_impl(**batch)  # uncompiled


def test_a_wrapped_model_is_attached_too():
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build(FAMILIES["Llama"]())

        def forward(self, **batch: Any) -> Any:
            return self.inner(**batch).loss

    model, session = Wrapped(), session_of()
    attach(model, session)
    assert model(**session.shard_batch({"input_ids": IDS, "labels": IDS})).item() > 0


def test_the_session_computes_the_same_loss_from_logits():
    model, session = attached()
    batch = session.shard_batch({"input_ids": IDS, "labels": IDS})
    expected = model(**batch).loss
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    loss = session.loss(logits, batch)
    assert loss.backward_loss.item() == pytest.approx(expected.item())
    assert loss.mean_loss.item() == pytest.approx(expected.item())
    assert loss.valid_tokens.item() == 2 * 32


FALCON_SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
PROPHETNET = transformers.ProphetNetConfig(
    vocab_size=61, hidden_size=32, num_encoder_layers=1, num_decoder_layers=1, encoder_ffn_dim=32,
    decoder_ffn_dim=32, num_encoder_attention_heads=4, num_decoder_attention_heads=4,
)  # fmt: skip


AS_IS = {"attention": "as_is"}


def test_another_attention_is_fine_on_one_rank_and_plain_causal():
    check_model(build(FAMILIES["Llama"](), "eager"), RingConfig(ring_size=1, **AS_IS))
    model = build(FAMILIES["Llama"](), "eager")
    assert attach(model, session_of()) == []
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
def test_attach_switches_every_model_inside(implementation):
    model = build(FAMILIES["Llama"](), implementation)
    attach(model, session_of(pattern={"window": 33}))
    assert {model.config._attn_implementation, model.model.config._attn_implementation} == {"ds_ring"}


def test_a_submodel_that_keeps_its_attention_is_refused():
    class Stubborn(type(build(FAMILIES["Llama"]()).model)):  # type: ignore[misc]
        @classmethod
        def _can_set_attn_implementation(cls) -> bool:
            return False

    model = build(FAMILIES["Llama"](), "sdpa")
    model.model = Stubborn(transformers.LlamaConfig(**GROUPED, attn_implementation="sdpa"))
    with pytest.raises(
        RingConfigError, match="Stubborn: expected attention by transformers' attention interface"
    ):
        attach(model, session_of(pattern={"window": 33}))


def call(**changes: Any) -> Any:
    model, session = attached()
    batch = session.shard_batch({"input_ids": IDS, "labels": IDS})
    return model(**{key: value for key, value in (batch | changes).items() if value is not None})


WRONG_CALLS: dict[str, tuple[dict[str, Any], type[RingError], str]] = {
    "no positions": ({"position_ids": None}, RingShapeError, "would number this rank's tokens from 0"),
    "a mask": ({"attention_mask": torch.ones_like(IDS)}, RingPatternError, "expected no attention_mask"),
    "one logit": ({"logits_to_keep": 1}, RingConfigError, "logits_to_keep: expected none on a shard"),
    "places": ({"logits_to_keep": torch.tensor([3])}, RingConfigError, r"logits_to_keep.*got \[1\]"),
    "an old cache": ({"past_key_values": transformers.DynamicCache()}, RingConfigError, "without a cache"),
    "weights": ({"output_attentions": True}, RingConfigError, "output_attentions: expected False, got True"),
    "labels alone": ({"shift_labels": None}, RingShapeError, "expected shift_labels with labels, got none"),
    "a local mean": ({"num_items_in_batch": None}, RingShapeError, "expected num_items_in_batch with labels"),
    "another length": ({"input_ids": IDS[:, :9]}, RingShapeError,
        "input_ids: expected 33 local tokens.*got 9"),
}  # fmt: skip


@pytest.mark.situation("inputs", "passed use_cache=True to a forward pass of training, or of an evaluation")
def test_a_cache_is_left_out_in_training_and_refused_by_its_name_elsewhere():
    expected, got = call(), call(use_cache=True)
    assert torch.equal(got.loss, expected.loss) and got.get("past_key_values") is None
    with torch.no_grad(), pytest.raises(RingConfigError, match="expected use_cache=False outside training"):
        call(use_cache=True)


def test_a_ring_of_one_generates_as_sdpa_does():
    model, _ = attached(FAMILIES["Qwen3"](), pattern={"window": 9})
    config = FAMILIES["Qwen3"]()
    config.use_sliding_window, config.sliding_window, config.layer_types = True, 9, ["sliding_attention"] * 2
    expected = build(config, "sdpa").eval().generate(IDS, max_new_tokens=5)
    assert torch.equal(model.eval().generate(IDS, max_new_tokens=5), expected)


def test_a_copy_or_a_rewritten_model_does_not_generate_on_the_ring():
    model, session = attached()
    copied = copy.deepcopy(model.eval())
    assert copied.generate.__self__ is copied, "the original's would go on with the original's weights"
    with pytest.raises(RingConfigError, match=r"call model\.generate"):
        copied.generate(IDS, max_new_tokens=2)
    rewritten = build(FAMILIES["Llama"]())
    (saved,) = attach(rewritten, session)
    saved.rewritten = True
    with pytest.raises(RingConfigError, match="the backend has rewritten"):
        rewritten.eval().generate(IDS, max_new_tokens=2)


def test_masks_that_no_pattern_stands_for_are_refused():

    model, session = attached()
    embeds = torch.zeros(2, 33, 32)
    with pytest.raises(RingPatternError, match="masks attention by or_masks"):
        create_causal_mask(model.config, embeds, None, None, or_mask_function=prefix)
    session.shard_batch({"input_ids": IDS})
    sharding = session.batches.current
    blocks = create_causal_mask(model.config, embeds, None, None, block_sequence_ids=torch.zeros_like(IDS))
    eager: Any = ModuleAttention(model, model.config, Family(), sharding, blocks, 2, "sdpa")
    x = torch.zeros(2, 4, 33, 8)
    scores = EagerScores(eager, x, x, torch.Size([2, 4, 33, 33]))
    for read in (blocks.check_blocks, lambda _: eager(scores, x)):
        with pytest.raises(RingPatternError, match="tokens of a block"):
            read(sharding)
    with pytest.raises(RingPatternError, match=r"attention_mask: expected none, got \[2, 33\]"):
        create_causal_mask(model.config, embeds, (IDS[0, 0] != IDS).long(), None)
    jumping = torch.tensor([0, 1, 2, 30, 31, 32]).expand(2, -1)
    mask = create_causal_mask(model.config, embeds[:, :6], None, None, position_ids=jumping)
    assert mask == LayerMask(Causal())


BY_NAME = """
from transformers import FalconConfig, FalconForCausalLM, LlamaConfig, LlamaForCausalLM
small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=61)
model = LlamaForCausalLM(LlamaConfig(attn_implementation="ds_ring", **small))
assert model.config._attn_implementation == "ds_ring"
for call, text in {
    lambda: FalconForCausalLM(FalconConfig(attn_implementation="ds_ring", **small)): "bypasses",
    lambda: model(model.dummy_inputs["input_ids"]): "start with ds_ring.initialize",
}.items():
    try:
        call()
    except ds_ring.RingError as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
"""


def test_transformers_knows_the_name_after_import_ds_ring():
    exec(BY_NAME, {"ds_ring": ds_ring})


@pytest.mark.parametrize("first", ["", "import transformers.modeling_utils"])
@pytest.mark.night
def test_whichever_was_imported_first(first):
    imported = f"import sys; {first}\nimport ds_ring\nassert ('transformers' in sys.modules) == {bool(first)}"
    code = imported + BY_NAME
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_mask_survives_copies_and_a_slice_of_everything():
    mask = LayerMask(Causal())
    for same in (mask[:, :, slice(-0, None), :], copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert same == mask


def prefix(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return k < 4


@pytest.mark.parametrize(
    ("replaces", "words"),
    [(True, "computed a loss by itself"), (False, "added a term to it that each rank would compute")],
)
def test_a_loss_that_is_not_that_of_all_tokens_is_refused(replaces, words):
    model, session = attached()
    original = type(model).forward

    def forward(self: Any, labels: Any = None, **kwargs: Any) -> Any:
        output = original(self, **kwargs) if replaces else original(self, labels=labels, **kwargs)
        mine = 0.01 * output.logits.mean()
        output.loss = mine if replaces else output.loss + mine
        return output

    model.forward = forward.__get__(model)
    with pytest.raises(RingConfigError, match=words):
        model(**session.shard_batch({"input_ids": IDS, "labels": IDS}))


def test_packed_positions_reach_the_model_and_its_mask_is_accepted():
    """transformers sees positions restart and builds a mask for them; the pattern has it already."""
    positions = torch.cat([torch.arange(20), torch.arange(13)]).expand(2, -1)
    batch = {"input_ids": IDS, "position_ids": positions}
    labels = IDS.masked_fill(positions == 0, -100)
    # with a cache, transformers 5 takes restarting positions for one document
    expected = build(FAMILIES["Llama"](), "sdpa")(**batch, labels=labels, use_cache=False)
    model, session = attached(pattern={"documents": True})
    got = model(**session.shard_batch({**batch, "labels": IDS}))
    check_logits(got, expected, session)
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("section", [{}, {"window": 7}])
def test_a_model_with_a_window_runs_where_the_pattern_has_none_or_the_same(section, documents):
    """Both count the token itself; with documents, transformers counts within each."""
    config = transformers.MistralConfig(**GROUPED, sliding_window=7)
    got, expected = logits_of_both(config, documents, section)
    assert torch.allclose(got, expected, atol=1e-5)


def logits_of_both(
    config: Any, documents: bool, section: Any, reference: Any = None
) -> tuple[Tensor, Tensor]:
    """On a ring of one, in the order of the sequence, and by sdpa of a model that `reference` configures."""
    batch = {"input_ids": IDS}
    if documents:
        batch["position_ids"] = torch.cat([torch.arange(20), torch.arange(13)]).expand(2, -1)
    expected = build(reference or config, "sdpa")(**batch, use_cache=False).logits
    model, session = attached(config, pattern=section | {"documents": documents})
    got = model(**session.shard_batch(batch)).logits
    return got, expected[:, torch.from_numpy(session.layout.positions(0))]


@pytest.mark.parametrize("documents", [False, True])
def test_layers_that_the_json_names_are_those_of_a_model_that_says_so(documents):
    mixed = transformers.Qwen2Config(**GROUPED, **LOCAL_AND_GLOBAL, use_sliding_window=True)
    plain = transformers.Qwen2Config(**GROUPED)
    for section in ({"layers": {"0": {"window": 7}}}, {"window": 7, "layers": {"1": {"window": None}}}):
        got, expected = logits_of_both(plain, documents, section, reference=mixed)
        assert torch.allclose(got, expected, atol=1e-5)
    again, _ = logits_of_both(mixed, documents, {"layers": {"0": {"window": 7}}})
    assert torch.equal(again, got), "the model and the JSON say the same"


def test_a_module_of_ones_own_says_its_layer():
    session = session_of(pattern={"layers": {"1": {"window": 7}}})
    session.shard_batch({"input_ids": IDS})
    with pytest.raises(RingPatternError, match=r"ring.attention\(layer=0\)"):
        session.attention()
    contexts = [session.attention(layer=layer).contexts[0][0] for layer in (0, 1)]
    assert [context.pattern for context in contexts] == [Causal(), SlidingWindow(7)]
    assert contexts[0].layout is contexts[1].layout is session.layout


DILATED = {"segment_lengths": [8, 32], "dilation_rates": [1, 2]}


def test_a_dilated_pattern_replaces_a_causal_models_mask():
    model, session = attached(pattern=DILATED)
    batch = session.shard_batch({"input_ids": IDS, "labels": IDS})
    assert model(**batch).loss.isfinite()
    expected = build(FAMILIES["Llama"](), "sdpa")(input_ids=IDS).logits
    order = torch.from_numpy(session.layout.positions(0))
    assert not torch.allclose(model(**batch).logits, expected[:, order], atol=1e-5)


def build_bert(head: str) -> Any:
    config = transformers.BertConfig(**SIZES, attention_probs_dropout_prob=0.0)
    return getattr(transformers, head).from_config(config, attn_implementation="ds_ring")


def forward(config: Any = None, model: Any = None, train: bool = False, **section: Any) -> Any:
    """A forward pass of a model that is attached: made by a configuration, or ready-made."""
    model, session = model or build(config or FAMILIES["Llama"]()), session_of(**section)
    attach(model, session)
    return model.train(train)(**session.shard_batch({"input_ids": IDS}))


def check(config: Any, implementation: str = "ds_ring", ring_size: int = 2, **section: Any) -> None:
    check_model(build(config, implementation), RingConfig(ring_size=ring_size, **section))


def check_encoder(config: Any) -> None:
    model = transformers.AutoModel.from_config(config, attn_implementation="ds_ring")
    check_model(model, RingConfig(ring_size=2))


LLAMA = FAMILIES["Llama"]()
WINDOW_5 = transformers.MistralConfig(**GROUPED, sliding_window=5)
WRITE_5 = 'write "window": 5 in the "pattern"'
TAKES_THE_MASK = "expected a model that hands its mask to attention as it is"
Refusal = tuple[Callable[[], object], type[RingError], str]
REFUSED: dict[str, Refusal] = {
    name: (partial(call, **changes), error, words) for name, (changes, error, words) in WRONG_CALLS.items()
} | {
    f"{saved} is kept": (partial(check, LLAMA, saved, **AS_IS), RingConfigError,
        f"'{saved}', which would .* this rank's tokens only")
    for saved in ("eager", "flex_attention")
} | {
    f"{pattern} on one rank": (partial(check, LLAMA, "eager", 1, pattern=pattern, **AS_IS), RingConfigError,
        "'eager', which would not apply the pattern")
    for pattern in (DILATED, {"documents": True}, {"window": 5})
} | {
    f"the mask as a tensor {number}": (partial(use, LayerMask(Causal())), RingPatternError, TAKES_THE_MASK)
    for number, use in enumerate((
        lambda mask: mask.dtype, lambda mask: mask[:, :, :, :7], lambda mask: torch.where(mask, 0.0, -1.0),
        lambda mask: torch.ones(2) + mask,
    ))
} | {
    "several tokens ahead": (
        lambda: check_model(
            transformers.AutoModelForCausalLM.from_config(PROPHETNET), RingConfig(ring_size=2)),
        RingConfigError, "it predicts several tokens ahead"),
    "eager without a causal pattern": (
        lambda: check(LLAMA, "eager", 1, pattern={"causal": False}, **AS_IS), RingConfigError,
        '"as_is" keeps .eager.'),
    "no ring": (lambda: build(LLAMA)(input_ids=IDS), RingConfigError,
        r"start with ds_ring.initialize\(model=...\)"),
    "a window of the cache alone": (
        lambda: attached(transformers.MoshiConfig(**SIZES, ffn_dim=48, sliding_window=9))[0].eval().generate(
            IDS, max_new_tokens=2),
        RingConfigError, "transformers' cache would forget tokens"),
    "dropout in training": (lambda: forward(transformers.GPT2Config(**GPT2_SIZES), train=True),
        RingConfigError, r"no dropout inside attention, got 0\.1"),
    "causal under a full pattern": (lambda: forward(pattern={"causal": False}), RingPatternError,
        r"the model is causal, the pattern Full\(\) is not causal; set model.config.is_causal = False"),
    "another window": (lambda: forward(WINDOW_5, pattern={"window": 6}), RingPatternError,
        f"SlidingWindow.window=5.* {WRITE_5}"),
    "a chunk": (lambda: forward(WINDOW_5, pattern={"chunk": 8}), RingPatternError, WRITE_5),
    "LongNet": (lambda: forward(WINDOW_5, pattern={"segment_lengths": [8], "dilation_rates": [2]}),
        RingPatternError, WRITE_5),
    "a named layer": (lambda: forward(WINDOW_5, pattern={"layers": {"1": {"window": 6}}}), RingPatternError,
        WRITE_5),
    "a window for all": (
        lambda: forward(FAMILIES["Gemma 3, local and global"](), pattern={"window": 7}), RingPatternError,
        "every layer takes its own from the model"),
    "Falcon's ALiBi": (
        lambda: check(transformers.FalconConfig(**FALCON_SIZES, alibi=True), "sdpa", **AS_IS),
        RingConfigError, "alibi adds a distance to each score"),
    # transformers raised KeyError('ds_ring'), or built it with its own attention.
    "Falcon": (lambda: build(transformers.FalconConfig(**FALCON_SIZES)), RingConfigError,
        "without attn_implementation"),
    "XGLM": (
        lambda: build(transformers.XGLMConfig(
            vocab_size=61, d_model=32, ffn_dim=32, num_layers=1, attention_heads=4)),
        RingConfigError, "without attn_implementation"),
    "ProphetNet": (lambda: build(PROPHETNET), RingConfigError, 'backend "ds_ring" cannot rewrite it either'),
    "MobileBERT's neighbours": (
        lambda: check_encoder(transformers.MobileBertConfig(**SIZES, embedding_size=32, trigram_input=True)),
        RingConfigError, "config.trigram_input joins each token's embedding"),
    "ESM's dropout of tokens": (
        lambda: check_encoder(
            transformers.EsmConfig(**SIZES, pad_token_id=1, mask_token_id=2, token_dropout=True)),
        RingConfigError, "config.token_dropout scales"),
    "a pooler": (lambda: forward(model=build_bert("AutoModel"), pattern={"causal": False}), RingConfigError,
        "its output pooler_output"),
    "answers": (
        lambda: forward(model=build_bert("AutoModelForQuestionAnswering"), pattern={"causal": False}),
        RingConfigError, "its output start_logits"),
    "classes": (
        lambda: forward(model=build_bert("AutoModelForSequenceClassification"), pattern={"causal": False}),
        RingConfigError, r"got logits \[2, 2\], pooled from"),
    "a tuple": (lambda: call(labels=None, shift_labels=None, num_items_in_batch=None, return_dict=False),
        RingConfigError, "leave out return_dict=False"),
    "documents without a pattern": (
        lambda: ds_ring.RingAttention(
            RingConfig(ring_size=1, pattern={"documents": True}), mesh=RingMesh.single()),
        RingConfigError, "expected a pattern beside a config with"),
}  # fmt: skip


test_what_would_be_silently_wrong_is_refused = refuse(REFUSED)


def test_what_is_right_beside_it_is_taken():
    for implementation in ("eager", "flex_attention"):
        check(LLAMA, implementation)  # it is switched
    check(transformers.FalconConfig(**FALCON_SIZES), "sdpa", **AS_IS)
    forward(transformers.GPT2Config(**GPT2_SIZES))  # dropout in evaluation

"""Eager attention on one rank: what is recorded, what is refused, what runs again; Falcon's rounded ALiBi."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import build_alibi_tensor
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.llama.modeling_llama import LlamaAttention

from ds_ring.contrib.families.eager_attention import families, layers, scores
from ds_ring.contrib.families.eager_attention.families import FAMILIES, find_family
from ds_ring.contrib.families.eager_attention.layers import find_parts
from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.models.attach import attach, check_model
from tests.refusals import Refusals, refuse
from tests.sessions import session_of
from tests.unit.models.calls import ON, sharding
from tests.unit.models.test_attention import IDS, RingConfig

# A class that computes attention in its own code in each version that is allowed; GPT-J does so up to 5.23.
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_multiple_size": 2, "max_position_embeddings": 64,
}  # fmt: skip
NO_DROPOUT: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
DOCUMENTS = {"pattern": {"causal": True, "documents": True}}


def neox_japanese(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPTNeoXJapaneseConfig(**SIZES | NO_DROPOUT | changes)
    return transformers.GPTNeoXJapaneseForCausalLM(config)


def attached(model: Any, **section: Any) -> Any:
    session = session_of(**section)
    attach(model, session)
    return session


def test_a_model_with_documents_is_its_documents_one_by_one():
    model, alone = neox_japanese(), neox_japanese()
    session = attached(model, **DOCUMENTS)
    ids_BT = IDS[:1]
    result = model(
        **session.shard_batch({"input_ids": ids_BT, "document_ids": (torch.arange(33) > 12)[None].long()})
    )
    expected = torch.cat([alone(input_ids=part).logits for part in (ids_BT[:, :13], ids_BT[:, 13:])], dim=1)
    torch.testing.assert_close(result.logits, expected, rtol=1e-5, atol=1e-5)


def gradients(checkpointed: bool) -> dict[str, Tensor]:
    """Two forward passes, whose documents differ, then both backward passes."""
    torch.manual_seed(0)
    config = transformers.XGLMConfig(
        vocab_size=61, d_model=32, ffn_dim=32, num_layers=2, attention_heads=4, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, layerdrop=0.0,
    )  # fmt: skip
    model = transformers.XGLMForCausalLM(config).train()
    session = attached(model, **DOCUMENTS)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    losses = []
    for border in (5, 20):
        documents_BT = (torch.arange(33) > border)[None].long().expand(2, -1)
        batch = session.shard_batch({"input_ids": IDS, "labels": IDS, "document_ids": documents_BT})
        losses.append(model(**batch).loss)
    sum(losses).backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def test_a_checkpointed_layer_runs_again_with_the_documents_of_its_batch():
    plain, checkpointed = gradients(False), gradients(True)
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, msg=name)


def test_off_is_the_models_own_attention():
    model, alone = neox_japanese().eval(), neox_japanese().eval()
    session = attached(model, **DOCUMENTS)
    with session.attached[0]():
        torch.testing.assert_close(model(input_ids=IDS).logits, alone(input_ids=IDS).logits)


def test_it_generates_the_tokens_of_its_own_attention():
    model, alone = neox_japanese().eval(), neox_japanese().eval()
    attached(model, pattern={"window": 33})
    expected = alone.generate(IDS[:, :9], max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(IDS[:, :9], max_new_tokens=6, do_sample=False), expected)


def scores_of(module: Any, query: Tensor, key: Tensor) -> Any:
    return torch.matmul(query, key.transpose(-1, -2)) / module.norm_factor


# What a module of another version might do to its scores.
FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "bias": (lambda module, q, k, v: (scores_of(module, q, k) + torch.ones(33, 33)).softmax(-1) @ v,
        "adds a term"),
    "mask": (
        lambda module, q, k,
            v: (scores_of(module, q, k).masked_fill(torch.ones(33, 33) > 0, -1e9).softmax(-1) @ v),
        "masks scores by a tensor",
    ),
    "sigmoid": (lambda module, q, k, v: torch.sigmoid(scores_of(module, q, k)) @ v,
        "calls sigmoid on its scores"),
    "no softmax": (lambda module, q, k, v: scores_of(module, q, k) @ v, "without softmax"),
    "weights": (lambda module, q, k, v: scores_of(module, q, k).softmax(-1) * 2 @ v,
        "multiplies what softmax"),
    "no scores": (lambda module, q, k, v: v, "computes no product of queries and keys"),
}  # fmt: skip


def forward(model: Any, section: dict[str, Any] | None = None, **batch: Any) -> Any:
    session = attached(model, **section or {"pattern": {"window": 9}})
    return model(**session.shard_batch({"input_ids": IDS} | batch))


def with_arithmetic(written: Callable[..., Any]) -> Any:
    """A model whose modules compute this."""
    model = neox_japanese()
    for _, _, module in find_parts(model):
        module._attn = lambda q, k, v, mask, module=module: (written(module, q, k, v), None)
    return model


@pytest.mark.situation("configurations", "Falcon with alibi, loaded with eager attention or with sdpa")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"new_decoder_architecture": True, "num_kv_heads": 2}], ids=str)
def test_falcons_alibi_is_that_of_the_attention_it_was_loaded_with(
    implementation: str, options: dict[str, Any]
) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True,
    }  # fmt: skip
    config = transformers.FalconConfig(**sizes, **options, attn_implementation=implementation)
    torch.manual_seed(0)
    model = transformers.FalconForCausalLM(config).double().eval()
    for parameter in model.parameters():  # scores of order one
        nn.init.normal_(parameter, std=0.2)
    expected = model(input_ids=IDS).logits
    session = attached(model, pattern={"window": 33})
    torch.testing.assert_close(model(**session.shard_batch({"input_ids": IDS})).logits, expected)


def test_falcons_alibi_is_that_of_sdpa_and_refused_beside_documents():
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes)).eval()
    assert model.config._attn_implementation == "sdpa"
    expected = model(input_ids=IDS).logits
    session = attached(model, pattern={"window": 33})
    torch.testing.assert_close(model(**session.shard_batch({"input_ids": IDS})).logits, expected)
    packed = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes)).eval()
    with pytest.raises(RingPatternError, match=r"expected no documents beside config\.alibi"):
        forward(packed, DOCUMENTS, document_ids=(torch.arange(33) > 12)[None].long())


def xlm() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}
    config = transformers.XLMConfig(**sizes, causal=True, is_decoder=True, pad_index=2, n_langs=1)
    return transformers.XLMWithLMHeadModel(config).eval()


@pytest.mark.situation("padding", "packed rows of XLM with padding between the documents")
def test_padding_between_xlms_documents_hides_no_token():
    model, alone = xlm(), xlm()
    session = attached(model, **DOCUMENTS)
    documents = torch.tensor([0, -1, 1]).repeat_interleave(torch.tensor([12, 7, 14]))[None]
    ids_BT = IDS[:1].masked_fill(IDS[:1] == 2, 3).masked_fill(documents < 0, 2)
    result = model(**session.shard_batch({"input_ids": ids_BT, "document_ids": documents})).logits
    for number in (0, 1):
        of_document = documents[0] == number
        torch.testing.assert_close(result[:, of_document], alone(input_ids=ids_BT[:, of_document]).logits)


@pytest.mark.situation("padding", "rows of XLM that have its padding token before other tokens")
@pytest.mark.parametrize("section", [DOCUMENTS, {"pattern": {"window": 33}}], ids=["documents", "rows"])
def test_xlms_padding_before_other_tokens_is_refused(section: dict[str, Any]):
    ids_BT = IDS[:1].masked_fill(IDS[:1] == 2, 3)
    ids_BT[0, 5] = 2
    documents = {"document_ids": (torch.arange(33) > 12)[None].long()} if section is DOCUMENTS else {}
    with pytest.raises(RingPatternError, match=r"input_ids: expected padding \(config\.pad_index, 2\) at"):
        forward(xlm(), section, input_ids=ids_BT, **documents)


def with_two_sequences() -> Any:
    config = transformers.XGLMConfig(
        vocab_size=61, d_model=32, ffn_dim=32, num_layers=1, attention_heads=4, add_cross_attention=True
    )
    model = transformers.XGLMForCausalLM(config).eval()
    batch = attached(model, pattern={"window": 9}).shard_batch({"input_ids": IDS})
    return model(**batch, encoder_hidden_states=torch.zeros(2, 33, 32))


def check_trocr() -> None:
    config = transformers.TrOCRConfig(
        vocab_size=61, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=32,
        use_learned_position_embeddings=False,
    )  # fmt: skip
    check_model(transformers.TrOCRForCausalLM(config), RingConfig(ring_size=2))


@pytest.mark.parametrize("block_size", [2, 16])
def test_block_sparse_attention_is_refused_where_batches_are_long(block_size):
    config = transformers.BigBirdConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32,
        block_size=block_size, num_random_blocks=1, is_decoder=True,
    )  # fmt: skip
    model = transformers.BigBirdForCausalLM(config).eval()
    session = attached(model, pattern={"window": 33})
    batch = session.shard_batch({"input_ids": IDS})
    if block_size == 2:
        with pytest.raises(RingConfigError, match="at random for more than 14 tokens, got 33"):
            model(**batch)
    else:
        model(**batch)
        assert model.bert.attention_type == "original_full"


def test_code_from_elsewhere_is_of_no_family():
    class GPTNeoXJapaneseAttention(nn.Module):
        pass

    class Other(transformers.GPTNeoXJapanesePreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.attn = GPTNeoXJapaneseAttention()

    assert find_family(neox_japanese()) is FAMILIES["gpt_neox_japanese"]
    assert find_family(Other(transformers.GPTNeoXJapaneseConfig(**SIZES))) is None


class Graph(nn.Module):
    """A model that compiled code calls."""

    def forward(self, hidden: Any) -> Any:
        return hidden


def written() -> Any:
    family: Any = SimpleNamespace(pattern=None, bias=None)
    call: Any = scores.ModuleAttention(Graph(), None, family, sharding(), None, 1, "sdpa")
    q = torch.zeros(1, 4, 8)
    return scores.EagerScores(call, q, q, torch.Size([1, 4, 4])), call, q


CASES: Refusals = {
    "positions by sample": (
        lambda: families._read_rotary_rows(None, torch.tensor([[0, 1], [0, 2]]), torch.sin, None),
        RingPatternError,
        "the same positions",
    ),
    "scores that are not masked": (
        lambda: written()[1](written()[0], written()[2]), RingPatternError, "does not mask the scores"
    ),
    "scores of another shape": (lambda: written()[0].view(2, 8), RingPatternError, "views scores"),
    "dropout inside attention": (
        lambda: forward(neox_japanese(attention_dropout=0.1).train()), RingConfigError,
        r"no dropout inside attention, got 0\.1",
    ),
    "a second sequence": (
        with_two_sequences, RingConfigError, "expected one sequence of tokens, got encoder_hidden_states"
    ),
    "positions of another class": (
        check_trocr, RingConfigError, "numbers its tokens otherwise than by TrOCRLearned"
    ),
    **{
        f"other arithmetic: {name}": (
            lambda function=function: forward(with_arithmetic(function)), RingPatternError, words
        )
        for name, (function, words) in FAULTS.items()
    },
}  # fmt: skip

COMPILED: Refusals = {
    "written out": (
        lambda: layers.around_attention(ON, None, Graph(), None, "sdpa")(len),  # type: ignore[arg-type]
        RingConfigError,
        "Graph computes attention in its own code",
    ),
}  # fmt: skip


test_it_is_refused = refuse(CASES)


test_compiled_code_is_refused = refuse(COMPILED, compiling=True)


@pytest.mark.parametrize("heads", [4, 6])
def test_falcons_alibi_is_rounded_as_falcon_rounds_it(heads: int) -> None:
    tokens, factor = 600, 0.25  # from 257 keys on bfloat16 has no number for each
    expected = build_alibi_tensor(torch.ones(1, tokens, dtype=torch.int64), heads, torch.float32)[:, 0]
    module: Any = SimpleNamespace(num_heads=heads)
    change = families._falcon_alibi(module, factor, "sdpa")
    got = change(
        torch.zeros(heads, tokens), None, torch.arange(heads)[:, None], None, torch.arange(tokens)[None]
    )
    assert torch.equal(got, expected * factor)
    assert not torch.equal(got, torch.tensor(change.slopes)[:, None] * torch.arange(tokens) * factor)


def test_attention_is_eager_where_the_class_does_not_ask_the_interface() -> None:
    class WritesItOut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    assert layers._asks_interface(LlamaAttention)
    assert not layers._asks_interface(WritesItOut)
    names = GPTJAttention.forward.__code__.co_names  # 5.24 hands it to the interface
    assert layers._asks_interface(GPTJAttention) == ("ALL_ATTENTION_FUNCTIONS" in names)


def test_the_slopes_of_alibi_are_the_models_own() -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    slopes = families._bloom_alibi(SimpleNamespace(num_heads=6), 2.0, "sdpa").slopes
    whole = build_alibi_tensor(torch.ones(1, 9, dtype=torch.int64), 6, torch.float64)[:, 0]
    result = torch.tensor(slopes, dtype=torch.float64)[:, None] * torch.arange(9) / 2
    torch.testing.assert_close(result, whole)

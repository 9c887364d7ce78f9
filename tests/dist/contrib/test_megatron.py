"""`RingCoreAttention` inside megatron-core's own GPTModel, on context parallel ranks of the CPU (gloo).

The other side is the same GPTModel with Megatron's own `DotProductAttention` on one process. Without
megatron-core these tests are skipped.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import ds_ring
from tests.dist.harness import Pool, catch_refusal
from tests.reference import dense_attention, relative_error

pytestmark = pytest.mark.needs("megatron")  # which the ranks import; both workers would, here

TOKENS, SAMPLES, VOCABULARY = 48, 2, 64
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {  # context parallel size, world size, of the config
    "causal": (2, 2, {}),
    "four ranks": (4, 4, {}),
    "window in every second layer": (2, 2, {"window_size": (7, 0), "window_attn_skip_freq": 2}),
    "off-by-one softmax": (2, 2, {"softmax_type": "off-by-one"}),
    "learnable softmax": (2, 2, {"softmax_type": "learnable"}),
    "scaled by layer": (2, 2, {"apply_query_key_layer_scaling": True}),
    "two replicas": (2, 4, {}),
}


def build(core_attention: Any, cp_size: int, changes: dict[str, Any]) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = dict.fromkeys(
        (
            "bias_dropout_fusion",
            "gradient_accumulation_fusion",
            "masked_softmax_fusion",
            "bias_activation_fusion",
        ),
        False,
    ) | {"attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": True}
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
        context_parallel_size=cp_size, **values | changes,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    if core_attention is not None:
        spec.submodules.self_attention.submodules.core_attention = core_attention
    torch.manual_seed(0)
    model = GPTModel(config, spec, VOCABULARY, TOKENS, position_embedding_type="rope")
    with torch.no_grad():  # so large that attention decides
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


class OnTheCpu(TorchFunctionMode):
    """Take the CPU where Megatron asks for a GPU by name: in its windows, rotary embeddings and batches."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def start_megatron(cp_size: int) -> None:
    """Start it anew, with its random numbers and buffers on the CPU."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.destroy_model_parallel()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    random.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trained(rank: int, world_size: int, cp_size: int, changes: dict[str, Any]) -> dict[str, float]:
    """The largest relative errors of loss and gradients against one process."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    from ds_ring.contrib.megatron.core_attention import RingCoreAttention

    start_megatron(cp_size)
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    ids = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=generator)
    positions, labels = torch.arange(TOKENS).expand(SAMPLES, -1), ids.roll(-1, 1)
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
    with OnTheCpu():
        model = build(RingCoreAttention, cp_size, changes)
        mine = get_batch_on_this_cp_rank({key: value.contiguous() for key, value in batch.items()})
        losses = model(**mine, attention_mask=None)
        losses.sum().backward()
        group = parallel_state.get_context_parallel_group()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        start_megatron(1)
        alone = build(None, 1, changes)
        expected = alone(**batch, attention_mask=torch.ones(1, 1, TOKENS, TOKENS).triu(1).bool())
        expected.sum().backward()
    result, wanted = gradients(model), gradients(alone)
    assert result.keys() == wanted.keys()
    errors = {name: relative_error(result[name], wanted[name]) for name in wanted}
    whole = expected.detach().gather(1, mine["position_ids"])
    return errors | {"loss": relative_error(losses.detach(), whole)}


@pytest.mark.day("four ranks")
@pytest.mark.parametrize("name", CASES)
def test_a_gpt_model_trains_as_on_one_process(rank_pool: Pool, name: str) -> None:
    cp_size, world_size, changes = CASES[name]
    for errors in rank_pool(world_size).run(trained, cp_size, changes):
        assert max(errors.values()) < 2e-5, {key: e for key, e in errors.items() if e > 2e-5}
        if name == "learnable softmax":
            assert any("softmax_offset" in key for key in errors)


def packed(rank: int, world_size: int) -> float:
    """The largest error of packed sequences with padding behind each, forward and backward.

    For a second batch the tensors of the first one are filled anew, by a write that torch does not count.
    """
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from ds_ring.contrib.megatron.core_attention import RingCoreAttention, mesh_of

    start_megatron(world_size)
    parts, generator = 2 * world_size, torch.Generator().manual_seed(0)
    config = build(RingCoreAttention, world_size, {}).config
    core = RingCoreAttention(
        config, 1, AttnMaskType.padding_causal, "self", softmax_scale=0.3,
        mesh=mesh_of(parallel_state.get_context_parallel_group()),
    )  # fmt: skip
    cu, cu_padded = (torch.zeros(4, dtype=torch.int32) for _ in range(2))
    inputs = PackedSeqParams("thd", cu, cu, cu_padded, cu_padded, 16, 16)
    errors = []
    for lengths in ([7, 16, 3], [16, 3, 7]):
        padded = [-(-length // parts) * parts for length in lengths]
        for buffer, numbers in ((cu, lengths), (cu_padded, padded)):
            buffer.numpy()[1:] = np.cumsum(numbers)
        total = sum(padded)
        q, k, v, grad = (torch.randn(total, heads, 8, generator=generator) for heads in (4, 2, 2, 4))
        # Chunks r and 2P - 1 - r of each sequence: Transformer Engine's thd_get_partitioned_indices.
        mine = torch.cat(
            [
                int(cu_padded[i]) + torch.arange(size // parts) + size // parts * item
                for i, size in enumerate(padded)
                for item in (rank, parts - 1 - rank)
            ]
        )
        local = [x[mine].requires_grad_() for x in (q, k, v)]
        out = core(*local, None, packed_seq_params=inputs)
        out.backward(grad[mine].flatten(1))
        ids = [
            number if t < lengths[number] else -1 for number, size in enumerate(padded) for t in range(size)
        ]
        pattern = ds_ring.Causal() & ds_ring.Documents(ids)
        factor = 0.3 * 8**0.5  # softmax_scale over the reference's own
        want = dense_attention(*(x.transpose(0, 1)[None] for x in (q * factor, k, v, grad)), pattern)
        pairs = [(out.detach().view(len(mine), 4, 8), want.out)]
        wanted = (want.dq * factor, want.dk, want.dv)
        pairs += [(x.grad, w) for x, w in zip(local, wanted, strict=True) if x.grad is not None]
        assert len(pairs) == 4
        errors += [relative_error(got, whole[0].transpose(0, 1)[mine]) for got, whole in pairs]
    return max(errors)


@pytest.mark.night
@pytest.mark.parametrize("ring_size", [2, 3, 4])
@pytest.mark.situation("operators", "Megatron's cu_seqlens in a buffer that is filled anew for each batch")
def test_packed_sequences_do_not_see_each_other(rank_pool: Pool, ring_size: int) -> None:
    assert max(rank_pool(ring_size).run(packed)) < 1e-5


def called(rank: int, world_size: int) -> dict[str, float]:
    """The largest error of each mask type, forward and backward, with values of another width than keys."""
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType

    from ds_ring.contrib.megatron.core_attention import RingCoreAttention, mesh_of

    start_megatron(world_size)
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 8), (2, 8), (2, 12), (4, 12))
    q, k, v, grad = (torch.randn(TOKENS, SAMPLES, *size, generator=generator) for size in sizes)
    chunks = torch.arange(TOKENS).chunk(2 * world_size)
    mine = torch.cat([chunks[rank], chunks[2 * world_size - 1 - rank]])
    config = build(RingCoreAttention, world_size, {}).config
    mesh, result = mesh_of(parallel_state.get_context_parallel_group()), {}
    for kind in (
        AttnMaskType.causal,
        AttnMaskType.padding_causal,
        AttnMaskType.no_mask,
        AttnMaskType.padding,
    ):
        core = RingCoreAttention(config, 1, AttnMaskType.causal, "self", mesh=mesh)
        local = [x[mine].requires_grad_() for x in (q, k, v)]
        out = core(*local, None, attn_mask_type=kind)
        out.backward(grad[mine].flatten(2))
        pattern = ds_ring.Causal() if "causal" in kind.name else ds_ring.Full()
        want = dense_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v, grad)), pattern)
        pairs = [(out.unflatten(2, (4, 12)), want.out), *zip((x.grad for x in local), want[2:], strict=True)]
        result[kind.name] = max(relative_error(got, item.permute(2, 0, 1, 3)[mine]) for got, item in pairs)
    return result


@pytest.mark.night
def test_mask_types_and_values_of_another_width(rank_pool: Pool) -> None:
    for errors in rank_pool(2).run(called):
        assert max(errors.values()) < 1e-5, errors


def refused(rank: int, world_size: int) -> list[str]:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from ds_ring.contrib.megatron.core_attention import RingCoreAttention

    start_megatron(world_size)
    model = build(RingCoreAttention, world_size, {})
    make = functools.partial(
        RingCoreAttention, config=model.config, layer_number=1, attn_mask_type=AttnMaskType.causal,
        attention_type="self",
    )  # fmt: skip
    core = make()
    q = torch.randn(6, 1, 4, 8)
    k = q[:, :, :2]
    uneven = torch.tensor([0, 3, 12])
    calls: list[Callable[[], Any]] = [
        lambda: make(attention_dropout=0.1),
        lambda: make(cp_comm_type="a2a"),
        lambda: make(attention_type="cross"),
        lambda: core(q, k, k, torch.ones(1, 1, 6, 12).bool()),
        lambda: core(q, k, k, None, attention_bias=torch.zeros(1, 4, 6, 12)),
        lambda: core(q, k, k, None, attn_mask_type=AttnMaskType.arbitrary),
        lambda: core(q[:5], k[:5], k[:5], None),
        lambda: core(q[:1], k, k, None),
        lambda: core(
            q[:, 0], k[:, 0], k[:, 0], None, packed_seq_params=PackedSeqParams("thd", uneven, uneven)
        ),
        lambda: core(q[:5] if rank else q, k[:5] if rank else k, k[:5] if rank else k, None),
    ]
    result = [catch_refusal(call) for call in calls]
    core(q, k, k, None)
    return result


def test_what_the_ring_does_not_do_is_refused_on_every_rank(rank_pool: Pool) -> None:
    words = (
        "attention_dropout: expected 0", "cp_comm_type", "attention_type", "attention_mask: expected None",
        "attention_bias", "got arbitrary", "two equal chunks", "pad to twice the context parallel size",
        "multiples of 4 tokens", "two equal chunks",
    )  # fmt: skip
    for result in rank_pool(2).run(refused):
        for word, text in zip(words, result, strict=True):
            assert word in text, text

"""What older versions of torch lack, seeded here: each test fails without what `compat/` has for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.variables import functions
from torch._guards import Source

import ds_ring
from ds_ring.compat import dynamo, torch_kernels
from ds_ring.compat import torch as compat
from tests.one_rank import one_rank_mesh


def tensors() -> list[Tensor]:
    return [torch.randn(2, heads, 24, 8, dtype=torch.float64) for heads in (4, 2, 2, 4)]


def read_behind(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
    """What torch 2.8 does with grouped heads: the query head's number is the K/V head's."""
    k, v = (x.as_strided((x.shape[0], q.shape[1], *x.shape[2:]), x.stride()) for x in (k, v))
    return _flash(q, k, v, *args, **options)


_flash = compat._cpu_flash


def test_the_probe_finds_an_operator_that_reads_behind_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_cpu_flash", read_behind)
    assert not compat.takes_grouped_heads.__wrapped__()


def test_heads_are_repeated_for_an_operator_without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, grad = tensors()
    repeated = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    expected_out, lse = compat.cpu_flash(q, *repeated, 0.0, True, scale=0.3)
    parts = compat.cpu_flash_backward(grad, q, *repeated, expected_out, lse, 0.0, True, scale=0.3)
    expected = [parts[0], *(x.unflatten(1, (2, 2)).sum(2) for x in parts[1:])]

    def refuse_groups(operator: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            assert len({x.shape[1] for x in args if isinstance(x, Tensor)}) == 1
            return operator(*args, **options)

        return call

    monkeypatch.setattr(compat, "_cpu_flash", refuse_groups(compat._cpu_flash))
    monkeypatch.setattr(compat, "_cpu_flash_backward", refuse_groups(compat._cpu_flash_backward))
    monkeypatch.setattr(compat, "takes_grouped_heads", lambda: False)
    out, lse = compat.cpu_flash(q, k, v, 0.0, True, scale=0.3)
    grads = compat.cpu_flash_backward(grad, q, k, v, out, lse, 0.0, True, scale=0.3)
    torch.testing.assert_close([out, *grads], [expected_out, *expected], rtol=0, atol=1e-12)


def invoke_as_before(tx: Any, fn: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The function of torch 2.11: objects are no constants."""

    def convert(x: Any) -> Any:
        return x.get_real_value() if x.is_tensor() else x.as_python_constant()

    result = fn(*map(convert, args), **{name: convert(value) for name, value in kwargs.items()})
    return tx.output.register_attr_or_module(result, name, source=functions.ConstantSource(name))


@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_a_compiled_call_takes_objects_as_torch_2_11_has_them(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert dynamo.takes_objects()
    monkeypatch.setattr(functions, "invoke_and_store_as_constant", invoke_as_before)
    assert not dynamo.takes_objects()
    pattern = ds_ring.Causal() if kind == "causal" else ds_ring.Documents(document_ids=torch.arange(24) // 7)
    layout = ds_ring.make_layout("zigzag", tokens=24, ring_size=1, pattern=pattern)
    q, k, v, _ = tensors()
    with one_rank_mesh("gloo", tmp_path) as mesh:

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return cast(
                Tensor, ds_ring.ring_attention(2 * q, k, v, pattern=pattern, layout=layout, mesh=mesh)
            )

        expected = attend(q, k, v)
        torch._dynamo.reset()
        out = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v)
        torch._dynamo.reset()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_a_guard_is_added_with_and_without_a_stack() -> None:
    class Old:
        def add_lambda_guard(self, arg0: Any, arg1: Any) -> None:
            """add_lambda_guard(self, arg0: object, arg1: object) -> None"""
            self.got = (arg0, arg1)

    class New:
        def add_lambda_guard(self, arg0: Any, arg1: Any, arg2: Any) -> None:
            """add_lambda_guard(self, arg0: object, arg1: object, arg2: object) -> None"""
            self.got = (arg0, arg1, arg2)

    old, new = Old(), New()
    dynamo.add_guard(old, bool, "text", "stack")
    dynamo.add_guard(new, bool, "text", "stack")
    assert old.got == (bool, ["text"]) and new.got == (bool, ["text"], "stack")


def test_a_source_is_resolved_by_its_name_where_it_has_no_value() -> None:
    class Root:
        f_globals, f_locals = {"table": [4, 5]}, {"x": 3}

    class Output:
        root_tx = Root()

    class Trace:
        output = Output()

    class Old:
        def name(self) -> str:
            return "G['table'][1] + L['x']"

    assert dynamo.resolve_source(Trace(), cast(Source, Old())) == 8


def test_an_all_to_all_works_where_gloo_has_none_of_lists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refusal = "Backend gloo does not support alltoall"

    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError(refusal)

    monkeypatch.setattr(dist, "all_to_all", refuse)
    with one_rank_mesh("gloo", tmp_path):
        group = dist.group.WORLD
        assert group is not None
        work, received, sent = compat.start_all_to_all([torch.arange(3)], group)
        work.wait()
        assert received[0].tolist() == [0, 1, 2] and len(sent) == 1
        refusal = "a peer is gone"
        with pytest.raises(RuntimeError, match="a peer is gone"):
            compat.start_all_to_all([torch.arange(3)], group)


def test_options_of_flex_attention_are_known_without_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention

    known = torch_kernels.list_flex_options()
    monkeypatch.delattr(flex_attention, "FlexKernelOptions")
    assert (
        {"BLOCK_M", "num_warps", "FORCE_USE_FLEX_ATTENTION"}
        <= torch_kernels.list_flex_options()
        <= known | {"OUTPUT_LOGSUMEXP"}
    )

"""FlashAttention 3 and 4 by their packages, and which implementation is used where one does not work."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_ring import Causal, Full, SlidingWindow, make_layout
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.kernels.flash import kernel as flash
from ds_ring.kernels.flash.executors import Cudnn, Executor, Flash, Platform
from ds_ring.kernels.flash.kernel import FlashKernel
from ds_ring.kernels.flash.packages import FLASH_4_WIDTHS, IMPLEMENTATIONS, Implementation
from ds_ring.kernels.interface import Operands, PassHeads
from ds_ring.masks.pattern import Pattern
from tests.cases import Shape, tensors
from tests.fake_cuda import fake_gpu, fake_tensors
from tests.flash_operators import INFINITY, _gradients, emulated, flash_backward, flash_forward
from tests.hops import ring_hops
from tests.mask_table import HEADS, KV_HEADS, MASKS, TOKENS
from tests.reference import dense_attention
from tests.unit.kernels.flash.test_flash import worst_error

_SIDES = "bool is_causal=False, int window_size_left=-1, int window_size_right=-1"
_FORWARD_3 = f"""fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None,
Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,
Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None,
int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None,
Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None,
Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, {_SIDES}, int attention_chunk=0,
float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0,
bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"""
_BACKWARD_3 = f"""bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None,
Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None,
int? max_seqlen_k=None, float? softmax_scale=None, {_SIDES}, float softcap=0.0, bool deterministic=False,
int sm_margin=0) -> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"""


@contextmanager
def flash_3(wrong_side: int = 0) -> Iterator[list[int]]:
    """Install FlashAttention 3; the left side of its windows is `wrong_side` too long.

    Yields the `sm_margin` of each call.
    """
    margins: list[int] = []

    def forward(*args: Any) -> tuple[Tensor, ...]:
        (q, k, v), ends, lengths, (scale, causal, left, right) = args[:3], args[7:9], args[12:14], args[23:27]
        left += wrong_side if left >= 0 else 0
        margins.append(args[-1])
        out, lse, *_ = flash_forward(
            q, k, v, *ends, *lengths, 0.0, causal, False,
            scale=scale, window_size_left=left, window_size_right=right, empty_lse=-INFINITY,
        )  # fmt: skip
        return out, lse, q.new_empty(0), q.new_empty(0)

    def backward(*args: Any) -> tuple[Tensor, ...]:
        operands, grads, ends, lengths = args[:6], args[6:9], args[9:11], args[13:15]
        scale, causal, left, right = args[15:19]
        margins.append(args[-1])
        found = flash_backward(
            *operands, *ends, *lengths, 0.0, causal, None, None,
            scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        for grad, result in zip(grads, found, strict=True):
            grad.copy_(result)
        return (*grads, *(operands[1].new_empty(0) for _ in range(5)))

    library = torch.library.Library("flash_attn_3", "DEF")
    try:
        for schema, function in ((_FORWARD_3, forward), (_BACKWARD_3, backward)):
            library.define(schema.replace("\n", " "))
            library.impl(schema.partition("(")[0], _filled(schema, function), "CPU")
        with mock.patch.dict("sys.modules", {"flash_attn_interface": ModuleType("flash_attn_interface")}):
            yield margins
    finally:
        library._destroy()


def _filled(schema: str, function: Any) -> Any:
    """A kernel that gets every argument of a schema by its position; torch leaves the last defaults out."""

    def kernel(*args: Any, **named: Any) -> Any:
        found = torch._C.parse_schema("flash_attn_3::" + schema.replace("\n", " "))
        defaults = [one.default_value for one in found.arguments[len(args) :]]
        names = [one.name for one in found.arguments[len(args) :]]
        return function(*args, *(named.get(name, value) for name, value in zip(names, defaults, strict=True)))

    return kernel


def _takes(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert all(x.stride(-1) == 1 for x in (q, k, v)) and q.shape[-1] == k.shape[-1]
    widths = q.shape[-1], v.shape[-1]
    equal = widths[0] == widths[1] <= 128 and widths[0] % 8 == 0
    assert equal or widths in ((192, 128), (256, 256)), f"head dimensions {widths}"


@contextmanager
def flash_4(results: int = 2) -> Iterator[None]:
    """Install FlashAttention 4, whose functions return so many results."""

    def side(given: int | None) -> int:
        assert given is None or given >= 0, "an open side of a window is None"
        return -1 if given is None else given

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, return_lse: bool,
        window_size_left: int | None, window_size_right: int | None, cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert return_lse
        out, lse, *_ = flash_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False,
            scale=softmax_scale, window_size_left=side(window_size_left),
            window_size_right=side(window_size_right), empty_lse=-INFINITY, check=_one_or_three,
        )  # fmt: skip
        return (out, lse, *(q.new_empty(0) for _ in range(results - 2)))

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad_out: Tensor, lse: Tensor, *, softmax_scale: float,
        causal: bool, window_size_left: int | None, window_size_right: int | None,
        cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, deterministic: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ends = (cu_seqlens_q, cu_seqlens_k)
        most = [q.shape[-3], k.shape[-3]]
        found = flash_backward(
            grad_out, q, k, v, out, lse, *ends, *most, 0.0, causal, None, None,
            scale=softmax_scale, window_size_left=side(window_size_left),
            window_size_right=side(window_size_right), check=_one_or_three,
        )  # fmt: skip
        return (*found, *(q.new_empty(0) for _ in range(results - 2)))

    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward  # type: ignore[attr-defined]
    names = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    modules = dict(zip(names, (ModuleType(names[0]), ModuleType(names[1]), interface), strict=True))
    with mock.patch.dict("sys.modules", modules):
        yield


@contextmanager
def cudnn_flex(shift: int = 0) -> Iterator[list[Any]]:
    """Install cuDNN's flex attention; its intervals end `shift` keys too late. Yields the masks planned."""
    masks: list[Any] = []

    def plan(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, *, build_backward: bool) -> Tensor:
        assert mask.dtype == torch.int32 and mask.is_contiguous() and mask.dim() == 3 and mask.shape[1] % 2
        assert (
            mask.shape[0] in (1, q.shape[-2]) and mask.shape[2] == q.shape[0] * q.shape[1] and build_backward
        )
        assert (mask[:, 1::2] <= mask[:, 2::2]).all() and mask.min() >= 0 and mask.max() <= k.shape[1]
        masks.append(mask)
        return mask

    def score(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Scores [B, H, S, n] of rows [B, S, H, D], and the keys of each query head."""
        at = torch.arange(k.shape[1])
        ends = mask.unflatten(2, q.shape[:2])[..., None]  # [Hmask, nfunc, B, S, 1]
        seen = at < ends[:, 0]
        for first in range(1, len(mask[0]), 2):
            seen = seen | ((at >= ends[:, first]) & (at < ends[:, first + 1] + shift))
        keys = k.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], dim=1)
        scores = q.transpose(1, 2) @ keys.mT * scale
        return scores.masked_fill(~seen.transpose(0, 1), -INFINITY), keys

    def forward(q: Tensor, k: Tensor, v: Tensor, *, mask_plan: Tensor, softmax_scale: float,
                return_lse: bool) -> tuple[Tensor, Tensor, None]:  # fmt: skip
        _takes(q, k, v)
        assert return_lse
        scores, _ = score(q, k, mask_plan, softmax_scale)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -INFINITY, 0)[..., None])
        values = v.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], dim=1)
        return (weights @ values).transpose(1, 2).contiguous(), lse, None

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor, *, mask_plan: Tensor,
        softmax_scale: float, deterministic: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        _takes(q, k, v)
        assert lse.is_contiguous() and lse.shape == (len(q), q.shape[2], q.shape[1])
        scores, keys = score(q, k, mask_plan, softmax_scale)
        values = v.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], dim=1)
        parts = (x.transpose(1, 2) for x in (grad, q, out))
        dq, dk, dv = _gradients(scores, lse, *parts, keys, values, softmax_scale)
        dk, dv = (x.unflatten(1, (k.shape[2], -1)).sum(2) for x in (dk, dv))
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    package, execution = ModuleType("cudnn.flex_attention"), ModuleType("cudnn.flex_attention.execution")
    package.create_mask_plan = plan  # type: ignore[attr-defined]
    execution._flex_attention_forward, execution._flex_attention_backward = forward, backward  # type: ignore[attr-defined]
    modules = {"cudnn": ModuleType("cudnn"), package.__name__: package, execution.__name__: execution}
    with mock.patch.dict("sys.modules", modules):
        yield masks


def _one_or_three(*tensors: Tensor) -> None:
    if len(tensors) == 3:
        _takes(*tensors)


@contextmanager
def broken(module: str, error: Exception) -> Iterator[None]:
    """Install a package whose import raises."""

    def importing(name: str) -> ModuleType:
        if name == module:
            raise error
        return import_module(name)

    with mock.patch("ds_ring.kernels.flash.packages.import_module", importing):
        yield


CPU = torch.device("cpu")
PACKAGES = {"FA3": flash_3, "FA4": flash_4, "cuDNN-flex": cudnn_flex}
Package = Callable[[], AbstractContextManager[Any]]
ABSENT_3 = partial(
    broken, "flash_attn_interface", ModuleNotFoundError("No module named 'flash_attn_interface'")
)
FOR_ANOTHER_TORCH = partial(broken, "flash_attn_interface", ImportError("undefined symbol: _ZN3c105Error"))
NO_FRONTEND = partial(broken, "cudnn.flex_attention", ModuleNotFoundError("No module named 'cudnn'"))
# flash-attn 2.8.3 ships the folder flash_attn/cute without what it needs.
ONLY_2 = partial(broken, "flash_attn.cute.interface", ModuleNotFoundError("No module named 'cutlass'"))


@pytest.mark.parametrize("mask", ["causal", "window", "documents", "dilated", "full"])
@pytest.mark.parametrize("name", ["FA3", "FA4", "cuDNN-flex"])
def test_a_package_computes_every_kind_of_call(name: str, mask: str) -> None:
    pattern = MASKS[mask].pattern
    given = [x.double() for x in tensors(Shape(1, HEADS, KV_HEADS, TOKENS, 64))]
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=3, pattern=pattern)
    with PACKAGES[name]():
        kernel = FlashKernel()
        kernel.executors = IMPLEMENTATIONS[name].make(8, Platform())
        if name == "cuDNN-flex":  # torch's own executors around it compute on the CPU
            kernel.executors = (Cudnn(emulated()), kernel.executors[1], Flash(emulated()))
        got = ring_hops(kernel, *given, pattern, layout)
    assert worst_error(got, dense_attention(*given, pattern)) < 1e-12


@pytest.mark.parametrize(("mask", "generation"), [("documents", 9), ("window", 10), ("window", 8)])
def test_cudnns_intervals_are_planned_once_where_mask_and_device_are_its(mask: str, generation: int) -> None:
    """Both passes and all layers share a plan; dense calls and other devices are not its."""
    pattern, layout = MASKS[mask].pattern, make_layout(
        "zigzag", tokens=TOKENS, ring_size=3, pattern=MASKS[mask].pattern
    )  # fmt: skip
    given = [x.double() for x in tensors(Shape(1, HEADS, KV_HEADS, TOKENS, 64))]
    with cudnn_flex() as masks:
        flex = IMPLEMENTATIONS["cuDNN-flex"].make(8, Platform(generation, 92600))[1]
        kernel = FlashKernel()
        kernel.executors = (Cudnn(emulated()), flex, Flash(emulated()))
        got = [ring_hops(kernel, *given, pattern, layout) for _ in range(2)]
    assert worst_error(got[1], dense_attention(*given, pattern)) < 1e-12
    assert bool(masks) == (generation != 8) and len(masks) == len({id(x) for x in masks})
    assert len(masks) <= 9  # hops of three ranks


def always(executors: tuple[Executor, ...], sm_margin: int, platform: Platform) -> tuple[Executor, ...]:
    return executors


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own implementations compute on the CPU."""
    own: dict[str, tuple[Executor, ...]] = {
        "FA2": (Flash(emulated()),), "cuDNN": (Cudnn(emulated()), Flash(emulated())),
    }  # fmt: skip
    for name, executors in own.items():
        here = IMPLEMENTATIONS[name]._replace(make=partial(always, executors))
        monkeypatch.setitem(IMPLEMENTATIONS, name, here)


def chosen(
    name: str | None, head_dim: int = 64, value_dim: int = 64, equal_bits: bool = False
) -> tuple[Executor, ...]:
    return flash._choose_executors.__wrapped__(name, 8, CPU, torch.float32, head_dim, value_dim, equal_bits)


TRIED: dict[str, tuple[int, Package, str, str]] = {
    "Hopper with its package": (9, flash_3, "FA3", ""),
    "Hopper without": (9, ABSENT_3, "cuDNN", "not installed"),
    "built for another torch": (9, FOR_ANOTHER_TORCH, "cuDNN", "FA3 is not used .* undefined symbol"),
    "wrong windows": (9, partial(flash_3, 1), "cuDNN", "FA3 is not used .* differs by"),
    "Blackwell with its package": (10, flash_4, "FA4", ""),
    "flash-attn-4 from b24 on": (10, partial(flash_4, 5), "FA4", ""),
    "flash-attn 2.8.3 alone": (10, ONLY_2, "cuDNN", "cutlass"),
    "Ampere": (8, flash_3, "FA2", ""),
}


@pytest.mark.parametrize("case", TRIED)
def test_the_default_is_the_first_that_works(
    case: str, on_cpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    generation, package, expected, said = TRIED[case]
    with package(), fake_gpu(get_device_capability=(generation, 0)), caplog.at_level("INFO"):
        found = chosen(None)
        wanted = IMPLEMENTATIONS[expected].make(8, Platform())
        assert [type(one) for one in found] == [type(one) for one in wanted]
        assert expected not in ("FA2", "cuDNN") or found == wanted
    (failed,) = [line for line in caplog.messages if "not" in line] or [""]
    assert (said == "") == (failed == "") and re.search(said, failed)


def test_cudnn_is_not_taken_where_bits_have_to_be_equal(on_cpu: None) -> None:
    """On an H200 its dQ differed from run to run."""
    with ABSENT_3(), fake_gpu(get_device_capability=(9, 0)):
        assert chosen(None, equal_bits=True) == IMPLEMENTATIONS["FA2"].make(8, Platform())
    with pytest.raises(RingConfigError, match=r'expected one that is deterministic.*got .cuDNN.; set "FA2"'):
        chosen("cuDNN", equal_bits=True)


@pytest.mark.parametrize(
    "widths", [(192, 192), (160, 160), (128, 129), (192, 128), (72, 72), (256, 256)], ids=str
)
def test_flash_4_computes_with_head_dimensions_that_it_takes(widths: tuple[int, int], on_cpu: None) -> None:
    with flash_4(), fake_gpu(get_device_capability=(10, 0)):
        (found,) = chosen(None, *widths)
    assert found.padded(*widths) in ((72, 72), (192, 128), (256, 256)) and found._widths == FLASH_4_WIDTHS


@pytest.mark.parametrize(
    ("name", "package", "said"),
    [
        ("FA3", ABSENT_3, "FA3: expected flash_attn_interface .* No module named"),
        ("FA3", partial(flash_3, 1), "FA3: expected flash_attn_interface .* differs by"),
        ("FA4", ONLY_2, "FA4: expected flash_attn.cute .*cutlass"),
        ("cuDNN-flex", NO_FRONTEND, "cuDNN-flex: expected cudnn.flex_attention .*No module"),
        ("cuDNN-flex", partial(cudnn_flex, 1), "cuDNN-flex: expected cudnn.flex_attention .* differs by"),
    ],
)
def test_what_was_asked_for_by_name_is_never_replaced(
    name: str, package: Package, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(On the CPU the dense calls beside cuDNN's intervals are emulated.)"""
    monkeypatch.setattr(Cudnn.__init__, "__defaults__", (emulated(), None))
    monkeypatch.setattr(Flash.__init__, "__defaults__", (emulated(), *Flash.__init__.__defaults__[1:]))
    with package(), pytest.raises(RingConfigError, match=said):
        chosen(name)


def test_a_head_dimension_that_is_too_wide_is_said() -> None:
    with flash_4(), pytest.raises(RingShapeError, match="at most 256, got 264"):
        chosen("FA4", 264, 264)


@pytest.mark.parametrize("name", [None, "FA2", "cuDNN"])
def test_operators_that_another_implementation_replaces_are_refused(name: str | None) -> None:
    aten = IMPLEMENTATIONS[name or "FA2"].make(8, Platform())
    q = mock.Mock(is_cpu=False, is_cuda=True, shape=(1, 2, 8, 64))
    with (
        mock.patch.object(flash, "_choose_executors", return_value=aten),
        mock.patch.object(flash, "current_flash_implementation", return_value="FA4"),
        pytest.raises(RingConfigError, match="expected torch's own operators, got FA4"),
    ):
        FlashKernel(name)._get_executors(q, 64)


def of_base_2(*args: Any, **named: Any) -> tuple[Tensor, ...]:
    out, lse, *rest = emulated().flash_forward(*args, **named)
    return out, lse * math.log2(math.e), *rest


def not_a_number(*args: Any, **named: Any) -> tuple[Tensor, ...]:
    dq, dk, dv = emulated().flash_backward(*args, **named)
    return dq, dk, dv * float("nan")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"flash_forward": of_base_2}, r"lse of Causal\(\) differs by 4\.\de-01"),
        ({"flash_backward": not_a_number}, r"dv of Causal\(\) differs by nan"),
    ],
)
def test_every_result_is_compared(wrong: dict[str, Any], said: str) -> None:
    made = Implementation(lambda *_: (Flash(emulated()._replace(**wrong)),), "torch")
    with mock.patch.dict(IMPLEMENTATIONS, {"FA2": made}), pytest.raises(RingConfigError, match=said):
        chosen("FA2")


def test_ranks_wait_longer_for_calls_of_a_new_kind() -> None:
    """FlashAttention 4 compiles for each; [Note: compile skew] in `cuda/patience.py`."""
    kernel, runs = FlashKernel(), np.array([[0, 1, 96]])
    with fake_tensors():
        q, k, v = (torch.empty(1, heads, 96, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))

    def compiles(pattern: Pattern, grad_out: Tensor | None = None, of_lse: bool = False) -> bool:
        part = PassHeads(4, 2, [pattern.tiles(runs, runs)])
        return kernel.compiles(Operands(q, k, v, grad_out, of_lse), part, 1.0)

    assert [compiles(pattern) for pattern in (Causal(), Causal(), SlidingWindow(9), Full())] == [1, 0, 1, 1]
    assert [compiles(Causal(), q), compiles(Causal(), q), compiles(Causal(), q, True)] == [1, 0, 1]
    assert not kernel.select_heads(slice(None)).compiles(Operands(q, k, v), PassHeads(4, 2, []), 1.0)


@pytest.mark.parametrize("sm_margin", [8, 0])
def test_flash_3_leaves_multiprocessors_to_messages(sm_margin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 96, 64)
    tiles = Causal().tiles(*[np.array([[0, 1, 96]])] * 2)
    with flash_3() as seen:
        kernel = FlashKernel("FA3", sm_margin)
        kernel.executors = IMPLEMENTATIONS["FA3"].make(sm_margin, Platform())
        (part,) = kernel.forward(q, q, q, tiles, 1.0)
        list(kernel.backward(q, q, q, q, part.out_BHSD, part.lse_BHS, tiles, 1.0))
    assert seen == [sm_margin] * 2


@pytest.mark.parametrize("sm_margin", [-1, 128, 8.0, True, "8"])
def test_a_margin_that_is_none_is_refused(sm_margin: Any) -> None:
    with pytest.raises(RingConfigError, match=r"sm_margin: expected a number .* from 0 to 127"):
        FlashKernel(sm_margin=sm_margin)

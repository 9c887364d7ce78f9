"""FlashAttention 3 and 4 by their packages, and which implementation is used where one does not work."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
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
from tests.flash_operators import emulated
from tests.flash_packages import broken, cudnn_flex, flash_3, flash_4
from tests.hops import ring_hops
from tests.mask_table import HEADS, KV_HEADS, MASKS, TOKENS
from tests.reference import dense_attention
from tests.unit.kernels.flash.test_flash import worst_error

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

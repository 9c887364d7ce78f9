"""The kernel "flex": FlexAttention, forward and backward, compiled once for all hops and layers of a shape.

Which pairs are attended comes as tensors (`block_mask.py`): a compiled function reads no Python
number that differs from hop to hop.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as forward_operator
from torch._higher_order_ops.flex_attention import flex_attention_backward as backward_operator
from torch.nn.attention.flex_attention import BlockMask

from ds_ring.comm.device_tables import DeviceTables
from ds_ring.comm.streams import is_fake
from ds_ring.compat.torch_kernels import derives_joint_graph
from ds_ring.errors import RingConfigError, RingError, RingShapeError
from ds_ring.kernels.flex.block_mask import (
    BandTensors,
    HopMask,
    HopMasks,
    HopTensors,
    TableOptions,
)
from ds_ring.kernels.flex.options import check_options, choose_options
from ds_ring.kernels.flex.workspace import OFFSETS
from ds_ring.kernels.interface import (
    Operands,
    PartialGrads,
    PartialOut,
    PassHeads,
    Rows,
    make_kernel_error,
)
from ds_ring.kernels.pairs import Scores
from ds_ring.kernels.trials import try_kernel
from ds_ring.masks.pair_masks import ByIdentity
from ds_ring.masks.pattern import BoundPattern
from ds_ring.masks.tiles import Tiles

# FlexAttention's mask_mod, score_mod and BlockMask, made from a hop's tensors inside the compiled function.
#
# [Note: labels for FlexAttention]
# A table of tiles carries the pattern that it was cut from. For each pair the mask loads two positions, and
# two labels for each branch. So one compiled function serves all hops, ranks and layers, and all patterns
# with the same numbers of branches and bands.


def collect_rule_constants(rule: BoundPattern, device: torch.device) -> Hashable:
    """Return what `make_block_mask` and `make_score_mod` make constants of, for all hops with this rule."""
    functions = tuple(
        tuple(collect_function_constants(mask.function(device)) for mask in band[2]) for band in rule.bands
    )
    branches = (len(rule.branches_by_head), len(rule.branches_by_head[0]))
    return (*branches, tuple(map(tuple, functions)), len(rule.mask_heads), rule.counts_twice)


def collect_function_constants(function: object) -> Hashable:
    """Return what torch.compile makes constants of in a traced function, or in what one captured.

    Dynamo knows a function by its code; a captured tensor is an input, of a fixed shape.
    """
    if isinstance(function, FunctionType):
        captured = [cell.cell_contents for cell in function.__closure__ or ()]
        return ByIdentity(function.__code__), collect_function_constants(tuple(captured))
    if isinstance(function, Tensor):
        return function.dtype, function.device, function.shape, function.stride(), function.requires_grad
    if isinstance(function, tuple):
        return tuple(map(collect_function_constants, function))
    plain = function is None or isinstance(function, (bool, int, float, str))
    return (type(function), function) if plain else ByIdentity(function)


class ScoreTensors(NamedTuple):
    """Hold a score_mod, its derivative, and the numbers of the query heads, int64 [heads]."""

    value: Callable[..., Tensor]
    derivative: Callable[..., Tensor]
    heads: Tensor


def _read_element(table: Tensor, *indices: Tensor) -> Tensor:
    """Return one element, as an operator: a joint graph is derived by a call; `table[i, j]` would read."""
    values: Tensor = torch.ops.aten.index.Tensor(table, indices)
    return values


def _count(mask: HopTensors) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return m of a pair; what all branches have in common, be it the band or the masks, is left out."""
    pairs = list(zip(mask.q.labels, mask.k.labels, strict=True))
    heads = pairs[0][0].shape[0]

    def count(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        total = None
        for number, (q_label, k_label) in enumerate(pairs):
            # One row of labels for all query heads of a K/V head, or one for each.
            head_in_group = head % heads
            query_label = _read_element(q_label, head_in_group, query)
            # A token without a label (-1) sees nothing, not even another one without.
            same = (query_label == _read_element(k_label, head_in_group, key)) & (query_label >= 0)
            # A band that all branches share is left to the mask_mod: once a pair, not once a branch.
            if len(mask.bands) > 1:
                same = same & _check_band(mask, mask.bands[number], batch, head, query, key)
            total = same.to(torch.int32) if total is None else total + same.to(torch.int32)
        assert total is not None
        return total

    return count


def _check_band(
    mask: HopTensors, band: BandTensors, batch: Tensor, head: Tensor, query: Tensor, key: Tensor
) -> Tensor:
    """Return whether the distance of a pair is in a band and the band's masks show the pair."""
    q_position, k_position = _read_element(mask.q.position, query), _read_element(mask.k.position, key)
    gap = q_position - k_position
    visible = (gap >= band.least) & (gap <= band.most)
    for function in band.functions:
        number = _read_element(mask.head_numbers, head % mask.head_numbers.shape[0])
        visible = visible & function(batch, number, q_position.long(), k_position.long())
    return visible


def make_block_mask(mask: HopTensors, block: int) -> BlockMask:
    """Return the BlockMask of a hop, its mask a function of captured tensors."""
    count, q, k = _count(mask), mask.q, mask.k

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = count(batch, head, query, key) > 0
        if len(mask.bands) == 1:
            visible = visible & _check_band(mask, mask.bands[0], batch, head, query, key)
        return visible

    return BlockMask(
        (q.position.shape[0], k.position.shape[0]),
        *mask.partial_rows,
        *mask.full_rows,
        *mask.partial_columns,
        *mask.full_columns,
        BLOCK_SIZE=(block, block),
        mask_mod=mask_mod,
    )


def make_score_mod(mask: HopTensors, scores: ScoreTensors | None) -> Callable[..., Tensor]:
    """Return a score_mod that changes scores as the caller's, and adds log m where it can be other than 0."""
    count = _count(mask)
    if scores is not None:
        scores_for_heads, _, heads = scores

        def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            q_position, k_position = (
                _read_element(mask.q.position, query).long(),
                _read_element(mask.k.position, key).long(),
            )
            score = scores_for_heads(score, batch, _read_element(heads, head), q_position, k_position, score)
            return weighted(score, batch, head, query, key) if mask.counts_twice else score

    def weighted(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # m is 0 for pairs that the mask hides: clamped, so that no log of 0 is formed.
        return score + count(batch, head, query, key).clamp(min=1).to(score.dtype).log()

    def plain(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score

    if scores is not None:
        return changed
    return weighted if mask.counts_twice else plain


# PyTorch's FlexAttention operators for one hop: the two functions that torch.compile compiles.

Call = Callable[..., tuple[Tensor, ...]]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: HopTensors,
    scores: ScoreTensors | None,
    block: int,
    scale: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of one hop; the lse as the operator has it."""
    blocks = make_block_mask(mask, block).as_tuple()
    out, lse, *_ = forward_operator(q, k, v, make_score_mod(mask, scores), blocks, scale, options)
    return out, lse


# [Note: the backward operator]
# The gradient of a hop needs the global out and lse, which autograd would not pass: PyTorch's operator
# `flex_attention_backward` takes them. Its lse is base 2, but natural for BACKEND="FLASH" (torch 2.13's
# `_finalize_outputs`, for the forward operator). In torch 2.11 Dynamo cannot derive the operator's
# joint graph; there a hop is recomputed and differentiated, 29 % more FLOPs, with a line in the log. With w =
# exp(lse of the hop - lse), d out / d out_hop = w and d out / d lse_hop = w (out_hop - out) are exact.
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    mask: HopTensors,
    scores: ScoreTensors | None,
    block: int,
    scale: float,
    options: dict[str, Any],
    joint_graph: Callable[..., Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of one hop from the global out and lse; the lse as the operator takes it."""
    blocks, score_mod = make_block_mask(mask, block).as_tuple(), make_score_mod(mask, scores)
    graph: Any = None if joint_graph is None else joint_graph(mask, scores)
    # A joint graph of None is derived from the score_mod by the compiler; [Note: the backward operator]
    dq, dk, dv, _ = backward_operator(
        q, k, v, out, lse, grad_out, grad_lse, score_mod, graph, blocks, scale, options, (), ()
    )
    return dq, dk, dv


def _make_joint_graph(mask: HopTensors, scores: ScoreTensors | None) -> Callable[..., list[Tensor | None]]:
    """Return the joint graph of `make_score_mod`: log m is added, so it has no part in the derivative.

    Nothing derives it where nothing is compiled: below autograd, where the ring's operator runs, torch would
    find no gradient.
    """

    def joint(
        score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, grad: Tensor
    ) -> list[Tensor | None]:
        if scores is not None:
            q_position, k_position = (
                _read_element(mask.q.position, query).long(),
                _read_element(mask.k.position, key).long(),
            )
            number = _read_element(scores.heads, head)
            grad = scores.derivative(score, batch, number, q_position, k_position, grad)
        return [grad, None, None, None, None]

    return joint


# [Note: one compilation]
# torch.compile makes constants of Python values and of sizes that are not marked dynamic. So everything that
# differs from hop to hop enters as a tensor whose token dimensions are marked dynamic (the batch too, from 2
# samples on), the BlockMask is put together inside the compiled function, and inputs are contiguous (strides
# are constants too). `Constants` names the rest, and each value of it has a code object of its own: Dynamo
# makes a size symbolic at the second value that a code object sees, which Inductor's CUDA lowering of flex
# refuses for heads, and it refuses the ninth compilation of a code object. By the same value a pass knows
# whether it will compile, and so its deadline (`ops/prepare.py`).
class Constants(NamedTuple):
    """The constants of a compiled function, other than the side of a block.

    Attributes:
        way: "forward", "backward", or "recomputed", the forward function with gradients.
        device: of the tensors.
        dtypes: of queries, of K, of V and of the gradient of the output (None in a forward pass).
        has_grad_lse: there is a gradient of the lse.
        inference: queries and keys are inference tensors.
        one_sample: the batch is 1.
        queries: 0 for many; else their number or a bound, where Inductor has another kernel for few.
        sizes: query heads, K/V heads, head_dim of queries and of values.
        rule: the part of the mask that is in the code, `collect_rule_constants`.
        scale: of the scores.
        scores: the score_mod, `collect_function_constants`; None for none.
        options: of FlexAttention, as pairs.
    """

    way: str
    device: torch.device
    dtypes: tuple[torch.dtype | None, ...]
    has_grad_lse: bool
    inference: tuple[bool, bool]
    one_sample: bool
    queries: int
    sizes: tuple[int, int, int, int]
    rule: Hashable
    scale: float
    scores: Hashable
    options: tuple[tuple[str, Any], ...]


MAX_COMPILED_CALLS = 1024
# Of a process, as the caches of torch.compile: kernels of equal options share what was compiled.
_compiled_calls: dict[tuple[str | None, Constants, int], Call] = {}
_numbers = itertools.count()


def compile_call(backend: str | None, constants: Constants, block: int) -> Call:
    """Return the function for some constants, compiled by a backend of torch.compile; None: not compiled."""
    key = (backend, constants, block)
    if key not in _compiled_calls:
        if len(_compiled_calls) >= MAX_COMPILED_CALLS:
            _compiled_calls.clear()  # what is still needed is compiled anew
        call: Any = _backward if constants.way == "backward" else _forward
        if backend is None:
            call = partial(call, joint_graph=_make_joint_graph) if call is _backward else call
        else:
            # Dynamo keeps its history of a function's inputs by file, line and name.
            code = call.__code__.replace(co_name=f"{call.__name__}_{next(_numbers)}")
            renamed = FunctionType(code, call.__globals__, code.co_name, call.__defaults__)
            call = torch.compile(renamed, backend=backend, fullgraph=True)
        _compiled_calls[key] = call
    return _compiled_calls[key]


ALL_HEADS = slice(None)
BLOCK = 128  # side of a block, slots: FlexAttention's own
SHORTEST = 128  # queries; Inductor compiles anew for fewer, with every BACKEND (torch 2.13)
_log = logging.getLogger(__name__)


class FlexKernel:
    """Call FlexAttention over blocks.

    Args:
        block_size: side of a block in slots.
        backend: of torch.compile; None computes densely without compiling, on any device, for tests.
        recompute: differentiate a recomputed hop; None does so where the operator cannot be compiled.
        scores: how scores are changed; None for not.
        device_blocks: take blocks and warps by device, [Note: blocks that do not spill]; else Inductor's.
        kernel_options: FlexAttention's `kernel_options`.
    """

    name = "flex"
    few_parts = True

    def __init__(
        self,
        block_size: int = BLOCK,
        backend: str | None = "inductor",
        recompute: bool | None = None,
        scores: Scores | None = None,
        device_blocks: bool = True,
        **kernel_options: Any,
    ) -> None:
        self._scores, self._device_blocks = scores, device_blocks
        self._options = tuple(check_options(kernel_options).items())
        self._natural = ("BACKEND", "FLASH") in self._options
        self._is_tried = not self._natural
        self._block = block_size
        self._tables, self._masks = DeviceTables(), HopMasks()
        self._backend = backend
        # Where Dynamo derives a joint graph, `slopes[head]` of a caller's function would read a number.
        able = derives_joint_graph() and scores is None
        self._recompute = recompute if recompute is not None else bool(backend) and not able
        if self._recompute:
            _log.warning(
                "ds_ring: kernel 'flex' computes every hop again in the backward pass (29 %% more FLOPs):"
                " torch %s does not compile flex_attention_backward by itself with %s",
                torch.__version__,
                "a score_mod" if scores is not None else "any function; torch 2.13 does",
            )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        if not len(tiles):
            return
        self._try_backend(q, v)
        mask, constants = (
            self._get_mask(q, tiles),
            self._collect_hop_constants(Operands(q, k, v), tiles, scale),
        )
        k, v = (_select_slots(x, mask.k_rows) for x in (k, v))
        # Inputs are computed in their own dtype; under autocast the operator would cast them.
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False), _name_failures(q, k, v):
            out, lse = self._attend(_select_slots(q, mask.q_rows), k, v, mask, constants)
        yield PartialOut(ALL_HEADS, _make_rows(mask.q_rows), out, lse)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        if not len(tiles):
            return
        self._try_backend(q, v)
        if self._natural and grad_lse is not None:
            expected = "a loss that does not read the log-sum-exp, of which FLASH has no gradient"
            raise RingConfigError.wrong('kernel "flex": BACKEND', expected, "one that does", 'use "TRITON"')
        chunks = _count_backward_chunks(q.shape, k.shape, v.shape)
        if chunks == 1:
            yield self._differentiate(grad_out, q, k, v, out, lse, tiles, scale, grad_lse)
            return
        parts = []
        for number in range(chunks):  # of K/V heads, with their query heads
            heads, kv = (
                slice(number * (x.shape[1] // chunks), (number + 1) * (x.shape[1] // chunks)) for x in (q, k)
            )
            part = self.select_heads(heads)._differentiate(
                grad_out[:, heads], q[:, heads], k[:, kv], v[:, kv], out[:, heads], lse[:, heads], tiles,
                scale, None if grad_lse is None else grad_lse[:, heads],
            )  # fmt: skip
            parts.append((part.dq, part.dk, part.dv))
        dq, dk, dv = (torch.cat(gradients, dim=1) for gradients in zip(*parts, strict=True))
        yield part._replace(dq=dq, dk=dk, dv=dv)

    def _differentiate(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None,
    ) -> PartialGrads:  # fmt: skip
        """Return the gradients of a hop, by one call."""
        call = self._recompute_gradients if self._recompute else self._run_operator
        mask, slots = self._get_mask(q, tiles), k.shape[2]
        operands = Operands(q, k, v, grad_out, grad_lse is not None)
        constants = self._collect_hop_constants(operands, tiles, scale)
        grad_out, q, out, lse = (_select_slots(x, mask.q_rows) for x in (grad_out, q, out, lse))
        k, v = (_select_slots(x, mask.k_rows) for x in (k, v))
        lse = lse.masked_fill(lse == float("-inf"), 0.0)  # of rows that see nothing: no NaN is formed
        if grad_lse is not None:
            grad_lse = _select_slots(grad_lse, mask.q_rows)
        # The ring's operators run below autograd, which must record here: a recomputed hop is differentiated,
        # and so is a score_mod, for its joint graph.
        below = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
        with (
            torch.autocast(q.device.type, enabled=False),
            below,
            torch.enable_grad(),
            _name_failures(q, k, v),
        ):
            dq, dk, dv = call(grad_out, q, out, lse, k, v, mask, constants, grad_lse)
        first, length = mask.k_rows
        if slots < first + length:  # the key that `_select_slots` has added
            length = slots - first
            dk, dv = dk[:, :, :length], dv[:, :, :length]
        return PartialGrads(ALL_HEADS, _make_rows(mask.q_rows), _make_rows((first, length)), dq, dk, dv)

    def select_heads(self, heads: slice) -> FlexKernel:
        if self._scores is None:
            return self
        kernel = copy(self)
        kernel._scores = self._scores.select(heads)
        return kernel

    def compiles(self, operands: Operands, part: PassHeads, scale: float) -> bool:
        """Return whether a pass is going to compile something, as far as is known before its tables."""
        if self._backend is None:
            return False
        q, k = operands.q, operands.k
        wanted = set()
        for hop, tiles in enumerate(part.hops):
            if len(tiles):
                # Received keys are in the pool's buffers, which are never inference tensors.
                inference = q.is_inference(), hop == 0 and k.is_inference()
                side = self._masks.side_beforehand(tiles, self._get_table_options(q), k.shape[2])
                wanted.add((_get_rule(tiles), side, inference))
        heads = part.query_heads, part.kv_heads
        if operands.grad_out is not None:
            sizes = ((x.shape[0], count, *x.shape[2:]) for x, count in zip((q, k), heads, strict=True))
            chunks = _count_backward_chunks(*sizes)
            heads = heads[0] // chunks, heads[1] // chunks
        keys = (
            (self._backend, self._collect_constants(operands, heads, rule, scale, inference), side)
            for rule, side, inference in wanted
        )
        return any(key[2] is None or key not in _compiled_calls for key in keys)

    def _collect_constants(
        self, operands: Operands, heads: tuple[int, int], rule: BoundPattern, scale: float,
        inference: tuple[bool, bool],
    ) -> Constants:  # fmt: skip
        """Return what the functions for these tensors are compiled for, but the side of a block."""
        q, k, v, grad_out, has_grad_lse = operands
        way = "forward" if grad_out is None else "recomputed" if self._recompute else "backward"
        return Constants(
            way,
            q.device,
            (q.dtype, k.dtype, v.dtype, None if grad_out is None else grad_out.dtype),
            has_grad_lse,
            inference,
            q.shape[0] == 1,
            0 if q.shape[2] >= SHORTEST else min(q.shape[2], 2),
            (*heads, q.shape[3], v.shape[3]),
            collect_rule_constants(rule, q.device),
            scale,
            collect_function_constants(self._get_score_functions(q)),
            self._options
            if not self._device_blocks
            else choose_options(self._options, q.device, max(q.shape[3], v.shape[3]), q.dtype, self._block),
        )

    def _collect_hop_constants(self, operands: Operands, tiles: Tiles, scale: float) -> Constants:
        q, k = operands.q, operands.k
        inference = q.is_inference(), k.is_inference()
        return self._collect_constants(operands, (q.shape[1], k.shape[1]), _get_rule(tiles), scale, inference)

    def count_executed_pairs(self, tiles: Tiles, backward: bool = False) -> int:
        if not len(tiles):
            return 0
        mask = self._masks.get(tiles, self._block, torch.device("cpu"))
        tensors = mask.tensors
        # int32 [1, heads, rows]: the mean over the heads is the figure of one head.
        counts = tensors.partial_rows.counts + tensors.full_rows.counts
        return int(counts.sum()) * mask.block**2 // counts.shape[1]

    def _try_backend(self, q: Tensor, v: Tensor) -> None:
        """Try flash-attn-4, if it is named, on the device of real tensors; [Note: a default is a try]."""
        if not self._is_tried and q.is_cuda and not is_fake(q):
            try_flash_backend(self._options, q.device, q.dtype, q.shape[-1], v.shape[-1])

    def _get_mask(self, q: Tensor, tiles: Tiles) -> HopMask:
        if q.shape[-1] < 16 and q.device.type != "cpu":
            raise RingShapeError(
                f'kernel "flex": expected head_dim 16 or more, got {q.shape[-1]}; use "reference"'
            )
        return self._masks.get(tiles, *self._get_table_options(q))

    def _get_table_options(self, q: Tensor) -> TableOptions:
        shortest, scored = min(q.shape[2], SHORTEST), self._scores is not None
        return TableOptions(self._block, q.device, shortest, q.shape[2], scored)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: HopMask, constants: Constants
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one hop, the lse natural."""
        call = compile_call(self._backend, constants, mask.block)
        out, lse = call(q, k, v, *self._get_compile_options(q, mask, constants))
        return out, lse if self._natural else lse * math.log(2)

    def _get_compile_options(self, q: Tensor, mask: HopMask, constants: Constants) -> tuple[Any, ...]:
        """Return the arguments that both compiled functions take last."""
        scores, functions = None, self._get_score_functions(q)
        if self._scores is not None and functions is not None:
            scores = ScoreTensors(*functions, self._tables.numbers(tuple(self._scores.heads), q.device))
        return _mark_tensors(mask.tensors), scores, mask.block, constants.scale, dict(constants.options)

    def _get_score_functions(self, q: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]] | None:
        """Return the score_mod and its derivative for queries like these; None for none."""
        if self._scores is None:
            return None
        dtype = torch.promote_types(q.dtype, torch.float32)
        # the compiler derives the gradient of the code that it is given
        return self._scores.functions(dtype, q.device, derived=self._backend is not None)

    def _run_operator(
        self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, mask: HopMask,
        constants: Constants, grad_lse: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return (dq, dk, dv) by the operator; the lse is finite."""
        if not self._natural:  # of the lse in base 2, and its gradient
            lse = _mark_like_hops(lse / math.log(2))
            grad_lse = None if grad_lse is None else _mark_like_hops(grad_lse * math.log(2))
        call = compile_call(self._backend, constants, mask.block)
        return call(grad_out, q, k, v, out, lse, grad_lse, *self._get_compile_options(q, mask, constants))

    def _recompute_gradients(
        self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, mask: HopMask,
        constants: Constants, grad_lse: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the same by autograd of a recomputed hop; see [Note: the backward operator]."""
        leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
        out_hop, lse_hop = self._attend(*leaves, mask, constants)
        with torch.no_grad():
            weight = torch.exp(lse_hop - lse).unsqueeze(-1)
            grad = grad_out.to(weight.dtype)
            of_lse = (weight * grad * (out_hop.to(weight.dtype) - out)).sum(-1)
            if grad_lse is not None:  # d lse / d lse_hop = w
                of_lse = of_lse + weight.squeeze(-1) * grad_lse
        return torch.autograd.grad((out_hop, lse_hop), leaves, ((weight * grad).to(out_hop.dtype), of_lse))


def _count_backward_chunks(*shapes: Sequence[int]) -> int:
    """Return into how many equal parts the K/V heads are split, for shapes [B, heads, S, D] of q, k and v.

    Raises:
        RingShapeError: one K/V head and its queries have too many elements.
    """
    largest, kv_heads = max(map(math.prod, shapes)), shapes[1][1]
    for chunks in range(1, kv_heads + 1):
        if kv_heads % chunks == 0 and largest // chunks < OFFSETS:
            return chunks
    raise RingShapeError.wrong(
        'kernel "flex"', f"fewer than {OFFSETS} elements of a K/V head and its queries in a backward pass",
        f"{largest // kv_heads}", "use more ranks or fewer samples",
    )  # fmt: skip


@contextmanager
def _name_failures(q: Tensor, k: Tensor, v: Tensor) -> Iterator[None]:
    """Raise RingKernelError for a kernel that fails while it is compiled or runs."""
    try:
        yield
    except (torch.OutOfMemoryError, RingError):
        raise
    except RuntimeError as error:
        advice = 'set "kernel": "flash" for windows, or other blocks in "kernel_options"'
        raise make_kernel_error('"flex"', error, advice, q=q, k=k, v=v) from error


@lru_cache(maxsize=64)  # a model has few head dimensions
def try_flash_backend(
    options: tuple[tuple[str, Any], ...], device: torch.device, dtype: torch.dtype, head_dim: int,
    value_dim: int, backend: str | None = "inductor",
) -> None:  # fmt: skip
    """Raise RingConfigError if FlexAttention's BACKEND "FLASH" does not compute small calls rightly here."""
    kernel = FlexKernel(backend=backend, **dict(options))
    kernel._is_tried = True
    try:
        try_kernel(kernel, device, dtype, head_dim, value_dim)
    except Exception as error:  # flash-attn-4 may raise anything
        expected = f"flash-attn-4 that works with torch {torch.__version__} here"
        got, advice = f"{type(error).__name__}: {error}", 'install one that does, or leave "BACKEND" out'
        raise RingConfigError.wrong('kernel "flex": BACKEND "FLASH"', expected, got, advice) from error


def _make_rows(first_and_length: tuple[int, int]) -> Rows:
    first, length = first_and_length
    return Rows(first, 1, length)


def _select_slots(x: Tensor, rows: tuple[int, int]) -> Tensor:
    """Return slots of x [B, heads, S, ...], contiguous and marked; [Note: one compilation]."""
    first, length = rows
    part = x.detach()[:, :, first : first + length].contiguous()
    if part.shape[2] < length:  # one key, and another one without a label: a size of 1 is a constant
        part = torch.cat([part, torch.zeros_like(part)], dim=2)
    strides = [math.prod(part.shape[dim + 1 :]) for dim in range(part.dim())]  # of sizes of 1 as well
    return _mark_like_hops(part.as_strided(part.shape, strides))


def _mark_like_hops(x: Tensor) -> Tensor:
    """Mark x [B, heads, S, ...]: samples and slots vary from call to call, other sizes are constants."""
    torch._dynamo.mark_static(x, [1, *range(3, x.dim())])
    return _mark_dynamic(x, 2) if x.shape[0] == 1 else _mark_dynamic(x, 0, 2)


def _get_rule(tiles: Tiles) -> BoundPattern:
    assert tiles.rule is not None, "flex: tiles that are cut from no rule"
    return tiles.rule


def _mark_dynamic(x: Tensor, *dims: int) -> Tensor:
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def _mark_tensors(tensors: HopTensors) -> HopTensors:
    """Return the same tensors, their token and block dimensions marked as dynamic (once: marks stay)."""
    for tokens in (tensors.q, tensors.k):
        _mark_dynamic(tokens.position, 0)
        for labels in tokens.labels:
            _mark_dynamic(labels, 1)
    for table in (tensors.partial_rows, tensors.full_rows, tensors.partial_columns, tensors.full_columns):
        _mark_dynamic(table.counts, 2)
        _mark_dynamic(table.blocks, 2, 3)
    return tensors

"""Run each operator on a token so that its bits do not depend on which other tokens are in the call.

A library chooses how to compute a product by its number of rows, a sum over a row by the number of rows, and
an element of `exp` by whether it is in the last, incomplete vector of a tensor. `BatchInvariant` calls them
with fixed shapes:

- products of matrices: tiles of `ROWS` rows, whose unused rows are zeros;
- sums, means, softmax, norms over the last dim: tiles of `ROWS` rows, too;
- functions of single elements that are not rounded correctly (exp, sin, SiLU): chunks of at most `CHUNK`
  elements, below the size at which torch splits a call among threads, each a whole number of vectors;
- attention: passes of the transport "reproducible", which compute squares of fixed shape.

Additions, products of elements, copies, look-ups and comparisons are exact or correctly rounded: they run as
they are. Any other operator is refused, as nothing is known of its bits. Does not own how passes do it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ring.decode.replicated_op import run_replicated
from ds_ring.errors import RingConfigError
from ds_ring.ops.context import get_ring_context
from ds_ring.ops.ring_op import run_forward

ROWS = 32  # of a product or a sum over rows; whole vectors of any instruction set
CHUNK, VECTOR = 16384, 64  # elements of a call, and what their number is a multiple of
_SIDE = 8  # sides of a matrix: the rows of products with others differ in float64
_CHECKED = 256  # shapes of products of which it is known

# Rounded correctly, or not computed with: the same bits in any call.
_NAMES = """
abs add alias all amax amin any arange argmax argsort as_strided bernoulli bincount bitwise_and bitwise_not
bitwise_or bitwise_xor cat ceil clamp clamp_max clamp_min clone constant_pad_nd copy detach diagonal div
embedding empty empty_like empty_strided eq equal expand exponential fill flip floor floor_divide full
full_like gather ge gt histc index index_add index_copy index_fill index_put index_select is_same_size
isfinite isinf isnan le lift_fresh _local_scalar_dense logical_and logical_not logical_or lt masked_fill
masked_select max maximum min minimum mul multinomial ne neg new_empty new_empty_strided new_full new_ones
new_zeros nonzero ones ones_like permute randint relu remainder repeat repeat_interleave _reshape_alias resize
roll round rsub
scalar_tensor scatter scatter_add searchsorted select sign slice sort split split_with_sizes sqrt squeeze
stack sub t _to_copy topk transpose tril triu trunc unbind unfold _unsafe_index _unsafe_view unsqueeze view
where zero zeros zeros_like
"""
_EXACT = set(_NAMES.split())
# Operators of ds_ring that send numbers as they are, or none; those of losses, which are no token's.
_MOVES = {"swap_heads_tokens", "refuse", "halo", "sequence_sum", "sequence_max"}
# Why passes have other bits in a generation than in training.
_DIFFER = {
    "latent_attention": "keys that are the same numbers in both, not latents that are expanded by rank",
}


class BatchInvariant(TorchDispatchMode):
    """Compute each token as in any other batch, as long as the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self._in_pass = False
        self._checked: OrderedDict[tuple[Any, ...], None] = OrderedDict()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        library, _, name = func._schema.name.partition("::")
        if library == "ds_ring":
            return self._pass(name, func, args, kwargs)
        if library != "aten" or not _is_computed(args, kwargs):
            return func(*args, **kwargs)
        plain = name.rstrip("_") if not name.startswith("__") else name
        if plain in _EXACT and kwargs.get("alpha", 1) == 1:
            return func(*args, **kwargs)
        if plain == "scatter_reduce" and {"amax", "amin"}.intersection((*args[4:], *kwargs.values())):
            return func(*args, **kwargs)  # in any order
        if plain in _PRODUCTS and not self._in_pass:
            return _PRODUCTS[plain](self, *args, **kwargs)
        if plain in _OVER_ROWS and not self._in_pass:
            return _OVER_ROWS[plain](func, *args, **kwargs)
        if torch.Tag.pointwise in func.tags:
            return _in_chunks(func, args, kwargs)
        if self._in_pass:
            return func(*args, **kwargs)  # of a kernel: its calls have one shape everywhere
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        raise RingConfigError.wrong(
            "batch_invariant", "operators whose bits do not depend on the batch", f"{name}", "leave it out"
        )

    def _pass(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of ds_ring."""
        passes: dict[str, Callable[..., Any]] = {
            "ring_attention": _run_ring, "replicated_attention": _run_replicated
        }  # fmt: skip
        if name in _MOVES:
            return func(*args, **kwargs)
        if name not in passes:
            expected = _DIFFER.get(name, "layers of softmax attention")
            raise RingConfigError.wrong(
                "batch_invariant", expected, f"a layer that calls {name}", "leave it out"
            )
        if args[0].device.type != "cpu":  # each element is computed by itself
            return func(*args, **kwargs)
        self._in_pass = True
        try:
            with self:
                return passes[name](*args, **kwargs)
        finally:
            self._in_pass = False

    # Products of matrices.

    def mm(self, a_MK: Tensor, b_KN: Tensor) -> Tensor:
        """Return the product, from calls of `ROWS` rows."""
        (rows, inner), columns = a_MK.shape, b_KN.shape[1]
        if inner <= 1:  # no sum
            return torch.mm(a_MK, b_KN)
        wide, long = -columns % _SIDE, -inner % _SIDE
        if wide or long or b_KN.data_ptr() % 64:
            b_KN = pad(b_KN, (0, wide, 0, long)) if wide or long else b_KN.clone()
        # Copied: calls of one shape have operands at the same place of a cache line, too.
        a = a_MK.new_zeros(-(-rows // ROWS) * ROWS, inner + long)
        a[:rows, :inner] = a_MK
        self._check(a, b_KN)
        out = a.new_empty(len(a), b_KN.shape[1])
        for first in range(0, len(a), ROWS):
            torch.mm(a[first : first + ROWS], b_KN, out=out[first : first + ROWS])
        return out[:rows, :columns].contiguous()

    def _check(self, a: Tensor, b_KN: Tensor) -> None:
        """Compare the rows of a product whose rows are all the same, once for each shape.

        Raises:
            RingConfigError: the library computes them differently.
        """
        key = a.device, a.dtype, *b_KN.shape, *b_KN.stride()
        if key in self._checked:
            return
        row = torch.arange(a.shape[1], dtype=torch.float32, device="cpu").mul_(0.7).sin_().to(a)
        products = torch.mm(row.expand(ROWS, -1).contiguous(), b_KN)
        if not torch.equal(products, products[:1].expand_as(products)):
            raise RingConfigError.wrong(
                "batch_invariant", f"equal rows of a product {ROWS} x {[*b_KN.shape]} to be equal",
                f"others in {a.dtype} on {a.device}", "use another dtype",
            )  # fmt: skip
        self._checked[key] = None
        if len(self._checked) > _CHECKED:
            self._checked.popitem(last=False)

    def addmm(self, bias: Tensor, a_MK: Tensor, b_KN: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """Return beta * bias + alpha * a b."""
        product = self.mm(a_MK, b_KN)
        product = product if alpha == 1 else product * alpha
        return product + (bias if beta == 1 else bias * beta)

    def bmm(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the products of pairs of matrices."""
        if a.shape[-1] <= 1 or not len(a):
            return torch.bmm(a, b)
        return torch.stack([self.mm(*pair) for pair in zip(a, b, strict=True)])

    def convolution(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    ) -> Tensor:  # fmt: skip
        """Return a convolution over tokens: [B, C, L] with a weight [C', C / groups, W]."""
        if x.ndim != 3 or transposed or stride[0] != 1:
            raise RingConfigError.wrong(
                "batch_invariant", "convolutions over tokens", "another one", "leave it out"
            )
        x, step, width = pad(x, (padding[0], padding[0])), dilation[0], weight.shape[2]
        length = x.shape[2] - step * (width - 1)
        taps = [x[:, :, i * step : i * step + length] for i in range(width)]
        if weight.shape[1] == 1 and groups == len(weight):  # of channels by themselves, tap after tap
            out = taps[0] * weight[:, 0, :1]
            for tap, of_tap in zip(taps[1:], weight[:, 0, 1:].split(1, dim=1), strict=True):
                out = out + tap * of_tap
        else:
            rows = torch.stack(taps, dim=-1).transpose(1, 2).unflatten(2, (groups, -1))  # [B, L, g, C/g, W]
            parts = [
                self.mm(part.flatten(2).flatten(0, 1), of_group.flatten(1).t()).unflatten(0, (len(x), -1))
                for part, of_group in zip(rows.unbind(2), weight.chunk(groups), strict=True)
            ]
            out = torch.cat(parts, dim=2).transpose(1, 2)
        return out if bias is None else out + bias[:, None]

    def baddbmm(self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """Return beta * bias + alpha * a b, for each pair of matrices."""
        product = self.bmm(a, b)
        product = product if alpha == 1 else product * alpha
        return product + (bias if beta == 1 else bias * beta)

    def grouped_mm(
        self, a_MK: Tensor, b: Tensor, offs: Tensor | None = None, bias: None = None, out_dtype: Any = None
    ) -> Tensor:
        """Return the products of groups of rows, which end at `offs`, with a matrix each."""
        if a_MK.ndim != 2 or b.ndim != 3 or offs is None or bias is not None:
            raise RingConfigError.wrong("batch_invariant", "groups of rows", "other groups", "leave them out")
        result = a_MK.new_zeros(len(a_MK), b.shape[2], dtype=out_dtype or a_MK.dtype)
        first = 0
        for end, matrix in zip(offs.tolist(), b, strict=True):
            if end > first:
                result[first:end] = self.mm(a_MK[first:end], matrix)
            first = end
        return result


_PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "mm": BatchInvariant.mm,
    "addmm": BatchInvariant.addmm,
    "bmm": BatchInvariant.bmm,
    "baddbmm": BatchInvariant.baddbmm,
    "_grouped_mm": BatchInvariant.grouped_mm,
    "convolution": BatchInvariant.convolution,
}


def _run_ring(q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None = None) -> Any:
    return run_forward(get_ring_context(handle), q, k, v, sinks)


def _run_replicated(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, handle: int, sinks: Tensor | None = None
) -> Any:
    return run_replicated(get_ring_context(handle), q, k, v, positions, sinks)


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    values = [*args, *kwargs.values()]
    flat = [y for x in values for y in (x if isinstance(x, (list, tuple)) else [x])]
    return [x for x in flat if isinstance(x, Tensor)]


def _is_computed(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator reads numbers that are not whole, and not meta."""
    return any(x.is_floating_point() and x.device.type != "meta" for x in _tensors(args, kwargs))


# Sums over a row.


def _run_on_rows(
    call: Callable[[Tensor], Any], x: Tensor, dims: Sequence[int]
) -> tuple[Any, tuple[int, ...]]:
    """Return what `call` makes of the rows [N, K] over some dims, and the shape of the other dims."""
    dims = [dim % x.ndim for dim in dims] or list(range(x.ndim))
    outer = [dim for dim in range(x.ndim) if dim not in dims]
    shape = tuple(x.shape[dim] for dim in outer)
    rows, width = math.prod(shape), math.prod(x.shape[dim] for dim in dims)
    tiles = x.new_zeros(max(-(-rows // ROWS), 1) * ROWS, width)
    tiles[:rows] = x.permute(*outer, *dims).reshape(rows, width)
    results = [call(tile) for tile in tiles.split(ROWS)]
    if isinstance(results[0], Tensor):
        return torch.cat(results)[:rows], shape
    return tuple(torch.cat(each)[:rows] for each in zip(*results, strict=True)), shape


# The overloads over some dims, where sums over all of them are one row.
_OF_DIMS = {"sum": "dim_IntList", "mean": "dim"}


def _reduce_rows(
    func: Any, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """Return a sum or a mean over some dims."""
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.ndim))
    x = x if dtype is None else x.to(dtype)
    if getattr(func, "_overloadname", None) == "default":
        func = getattr(func.overloadpacket, _OF_DIMS[func.overloadpacket.__name__])
    result, shape = _run_on_rows(lambda rows: func(rows, [-1]), x, dims)
    out: Tensor = result.reshape(shape)
    if keepdim:
        for axis in sorted(axis % x.ndim for axis in dims):
            out = out.unsqueeze(axis)
    return out


def _norm(
    func: Any, x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    return _reduce_rows(lambda rows, dims: func(rows, ord, dims), x, dim, keepdim, dtype=dtype)


def _softmax(func: Any, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return what has the shape of its input: softmax, its logarithm."""
    result, shape = _run_on_rows(lambda rows: func(rows, -1, half_to_float), x, [dim])
    out: Tensor = result.reshape(*shape, -1).movedim(-1, dim).contiguous()
    return out


def _cumsum(func: Any, x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    result, shape = _run_on_rows(lambda rows: func(rows, -1, dtype=dtype), x, [dim])
    out: Tensor = result.reshape(*shape, -1).movedim(-1, dim).contiguous()
    return out


def _normalize_rows(func: Any, x: Tensor, shape: Sequence[int], *args: Any) -> tuple[Tensor, ...]:
    """Return what a layer norm or RMS norm over the last dims returns."""
    dims = range(x.ndim - len(shape), x.ndim)
    weights = [w.reshape(-1) if isinstance(w, Tensor) else w for w in args]
    results, outer = _run_on_rows(lambda rows: func(rows, [rows.shape[-1]], *weights), x, dims)
    out, *rest = results
    return (out.reshape(x.shape), *(statistic.reshape(*outer, *[1] * len(shape)) for statistic in rest))


_OVER_ROWS: dict[str, Callable[..., Any]] = {
    "sum": _reduce_rows,
    "mean": _reduce_rows,
    "linalg_vector_norm": _norm,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "cumsum": _cumsum,
    "native_layer_norm": _normalize_rows,
    "_fused_rms_norm": _normalize_rows,
}


# Functions of single elements.


def _in_chunks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a function of single elements, from calls of whole vectors in one thread."""
    tensors = [x for x in _tensors(args, kwargs) if x.ndim]
    if not tensors or tensors[0].device.type != "cpu":
        return func(*args, **kwargs)
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    count = math.prod(shape)
    whole = count % VECTOR == 0 and 0 < count <= CHUNK
    if whole and all(x.shape == shape and x.is_contiguous() for x in tensors):
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        name, overload = func._schema.name.partition("::")[2].rstrip("_"), func._overloadname
        functional = getattr(getattr(torch.ops.aten, name), overload)
        return args[0].copy_(_in_chunks(functional, args, kwargs))

    def flat(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.ndim:
            return x
        return pad(x.expand(shape).reshape(-1), (0, -count % VECTOR))

    flat_args, flat_kwargs = [flat(x) for x in args], {name: flat(x) for name, x in kwargs.items()}

    def part(x: Any, first: int) -> Any:
        return x[first : first + CHUNK] if isinstance(x, Tensor) and x.ndim else x

    parts = [
        func(*(part(x, i) for x in flat_args), **{name: part(x, i) for name, x in flat_kwargs.items()})
        for i in range(0, max(count, 1), CHUNK)
    ]
    return torch.cat(parts)[:count].reshape(shape)

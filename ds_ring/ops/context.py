"""A ring context: pattern, layout, mesh and options of a call together, and what is computed from them once.

A context is kept alive by its mesh's table and by other references. Compiled graphs carry integers: one
table of weak references maps such a handle to its object.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.comm.streams import is_fake
from ds_ring.compat.torch import assume_constant
from ds_ring.config.pass_options import PassOptions
from ds_ring.errors import RingPatternError, shown
from ds_ring.kernels.select import Kernel, KernelNeeds, get_kernel
from ds_ring.kernels.select import get_block_side as get_block_side
from ds_ring.masks.pattern import KEPT_LARGE, SMALL_BYTES, Pattern
from ds_ring.ops.checks import check_layout
from ds_ring.ops.options import Options, as_value
from ds_ring.ops.passes import MakePass, SavedTensors
from ds_ring.plugin import DEVICES, SAVED_TENSORS, load
from ds_ring.ring.pool import PreparedPasses
from ds_ring.schedule.layout import Layout, check_layout_name, make_layout

if TYPE_CHECKING:
    from ds_ring.masks.pair_masks import ScoreFunction

T = TypeVar("T")


class _PatienceByDevice(dict[str, Any]):
    """Map a kind of device to a function: how many seconds must other ranks wait while this one compiles?

    The function is imported at its first use; None for a device for which nothing compiles.
    """

    def __missing__(self, device_type: str) -> Any:
        self[device_type] = load(DEVICES[device_type].patience) if device_type in DEVICES else None
        return self[device_type]


PATIENCE = _PatienceByDevice()


@dataclass(eq=False)
class RingContext:
    """Everything that a call needs besides its tensors.

    Attributes:
        pattern: which query attends to which key.
        layout: the rank and slot of each token; or a name, from which a layout is made for each length.
        mesh: the ranks and process groups.
        options: kernel, transport and further options.
        in_a_graph: True if a compiled graph carries the handle; then the context lives as long as the mesh.
        keeps_functions: True for modules: pattern and score_mod have the caller's own function objects, so
            `check_functions` tests whether captured values changed. Other contexts may have the objects of an
            earlier, equal call.
        make_pass: of the transport, from the table of passes.
        exchange: sends and receives tensors; None if the sequence has one rank.
        saved: what keeps tensors of a pass for its gradient.
        prepared: cache of `Prepared` (`prepare.py`), by descriptions of operands.
        passes: cache of what passes of a schedule and a shape need again.
    """

    pattern: Pattern
    layout: Layout | str
    mesh: RingMesh
    options: Options
    in_a_graph: bool = False
    keeps_functions: bool = False
    make_pass: MakePass = field(init=False, repr=False)
    exchange: Exchange | None = None
    saved: SavedTensors = field(init=False, repr=False)
    passes: PreparedPasses = field(default_factory=PreparedPasses, repr=False)
    prepared: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.mesh.sequence_size > 1:
            self.exchange = Exchange(self.mesh, self.options.hop_timeout_seconds)
        self.make_pass = load(self.options.transport_spec.home)
        self.saved = SavedTensors()
        if self.options.offload_attention is not False and "offload_attention" in SAVED_TENSORS:
            self.saved = load(SAVED_TENSORS["offload_attention"])()

    @cached_property
    def kept_results(self) -> Any:
        """Return the store for (out, lse) of passes in checkpointed regions; None if passes run again."""
        keeps = self.options.recompute_attention < 1 and "results" in SAVED_TENSORS
        return load(SAVED_TENSORS["results"])() if keeps else None

    @cached_property
    def captured_bytes(self) -> int:
        """Return the memory of the tensors that mask functions and the score_mod captured."""
        return self.pattern.captured_bytes + getattr(self.options.score_mod, "captured_bytes", 0)

    @cached_property
    def handle(self) -> int:
        """Return the integer by which the operator finds this context."""
        return new_handle(self, self.mesh.place, self._settings)

    def __reduce__(self) -> Any:
        """Refuse a pickle, of a module for example, as the mesh does."""
        return self.mesh.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> RingContext:
        """Return this context itself: callers cannot change it, and its mesh cannot be copied."""
        return self

    def with_pattern(self, pattern: Pattern, layout: Layout) -> RingContext:
        """Return the context of another pattern and layout, with the same mesh and options."""
        return make_ring_context(pattern, layout, self.mesh, self.options, self.keeps_functions)

    def layout_for(self, local_tokens: int, device_type: str) -> Layout:
        """Return the layout of a call on a kind of device, given the number of slots of its shards."""
        if isinstance(self.layout, Layout):
            return self.layout
        mesh, options = self.mesh, self.options
        block = get_block_side(options.kernel, device_type, (self.pattern,), options.block_size)
        layout = make_layout(
            self.layout, tokens=max(local_tokens, 1) * mesh.ring_size, ring_size=mesh.ring_size,
            pattern=self.pattern, multiple_of=mesh.ulysses_size, block_size=block,
        )  # fmt: skip
        if not options.transport_spec.whole_blocks:
            return layout
        from ds_ring.schedule.pieces import round_to_blocks

        return round_to_blocks(layout, options.block_size)

    def heads_here(self, q: Tensor) -> slice:
        """Return which of the query heads of all Ulysses ranks q [B, H, S, D] has in a pass."""
        first = self.mesh.ulysses_rank * q.shape[1]
        return slice(first, first + q.shape[1])

    def tokens_here(self, grad_out: Tensor) -> int:
        """Return the number of slots of grad_out [B, H, S, E] with tokens; padding follows them."""
        layout = self.layout_for(grad_out.shape[2], grad_out.device.type)
        return layout.valid_tokens(self.mesh.ring_rank)

    def check_functions(self) -> None:
        """Refuse functions with changed captured values, if this context does not trace them at each call.

        Called in forward passes only, since the backward pass computes with the values of the forward pass.

        Raises:
            RingPatternError: a mask function changed.
            RingConfigError: the score_mod changed.
        """
        if self.keeps_functions:
            self.pattern.check_unchanged()
            if self.options.score_mod is not None:
                self.options.score_mod.check_unchanged()

    def check_pairs(self, layout: Layout, q: Tensor, query_heads: int) -> None:
        """Refuse functions of pairs that fail for positions of a layout, before anything is sent.

        Args:
            layout: of the call.
            q: [B, ...]; its batch size and device matter.
            query_heads: the number on all ranks.

        Raises:
            RingPatternError: a mask function fails.
            RingConfigError: the score_mod fails.
        """
        self.pattern.check(layout.tokens, q.shape[0], query_heads, str(q.device))
        mod = self.options.score_mod
        if mod is not None and layout.is_one_sequence and not is_fake(q):
            mod.check(layout.tokens, q.shape[0], query_heads)

    def choose_kernel(self, q: Tensor) -> Kernel:
        """Return the kernel that the options, the pattern and q ask for."""
        options, scores = self.options, None
        if options.score_mod is not None:
            here = self.heads_here(q)
            scores = options.score_mod.for_heads(range(here.start, here.stop))
        needs = KernelNeeds(q.device.type, q.dtype, q.shape[-1], self.pattern)
        row = (options.kernel, q.device.type, options.kernel_pairs, options.block_size)
        return get_kernel(*row, scores, needs)

    def call(self, name: str, q: Tensor) -> collective:
        """Return a call on the mesh of this context; with fake tensors it tells nobody."""
        return collective(self.mesh, name, self.exchange, is_fake(q))

    def agree(
        self, call: collective, q: Tensor, k: Tensor, fields: Mapping[str, object] | None = None,
        compiles: bool = False,
    ) -> None:  # fmt: skip
        """Agree with the other ranks of the sequence on a call, the shapes of q and k, and `fields`.

        Args:
            call, q, k, fields: what is compared; from here on the call has this context's exchange.
            compiles: whether this rank is going to compile something.

        Raises:
            RingMismatchError: another rank refused its input, or calls with other arguments.
        """
        if not call.alone:
            call.use(self.exchange)
            ask = PATIENCE[q.device.type]
            patience = 0.0 if ask is None else ask(self, call.name, q, k, compiles)
            call.agree({**self.fields(q, k), **(fields or {})}, patience)

    @cached_property
    def _settings(self) -> dict[str, str]:
        """Return the settings that are the same in every call, by name. (A deadline may differ by rank.)"""
        options = {name: str(value) for name, value in self.options}
        del options["hop_timeout_seconds"], options["first_pass_timeout_seconds"]
        node_settings = {"ranks per node": str(self.mesh.ranks_per_node)}
        return {"pattern": str(self.pattern), "layout": str(self.layout), **options, **node_settings}

    def fields(self, q: Tensor, k: Tensor) -> dict[str, object]:
        """Return what ranks compare in every call, by the name for the message."""
        batch, heads, tokens, head_dim = q.shape
        return {
            **self._settings,
            "dtype of q": q.dtype,
            "dtype of k": k.dtype,
            "batch size": batch,
            "query heads": heads,
            "K/V heads": k.shape[1],
            "local tokens": tokens,
            "head_dim": head_dim,
        }

    def get_scale(self, q: Tensor) -> float:
        """Return the factor of the scores."""
        return self.options.scale if self.options.scale is not None else 1.0 / math.sqrt(q.shape[-1])


KEPT_CONTEXTS = 64  # per mesh; an older context lives as long as something else refers to it


def get_ring_context(handle: int) -> RingContext:
    """Return the context of a handle."""
    return get_object(handle, RingContext)


def make_ring_context(
    pattern: Pattern, layout: Layout | str, mesh: RingMesh, options: Options, keeps_functions: bool = False
) -> RingContext:
    """Return the context for these arguments: a cached one, or a new one (`cache_context`).

    Raises:
        RingPatternError, RingLayoutError: not a pattern or layout, or a layout for another ring size; a mask
            function that has captured other values since it was traced.
    """
    check_mesh(mesh)
    if not isinstance(pattern, Pattern):
        raise RingPatternError.wrong("pattern", "a pattern", shown(pattern), "use ds_ring.Causal()")
    if isinstance(layout, str):
        check_layout_name(layout)
    else:
        check_layout(layout, mesh.ring_size)
    pattern.check_unchanged()
    function_key: Hashable = (pattern.mask_ids, id(options.score_mod)) if keeps_functions else None

    def make() -> RingContext:
        return RingContext(pattern, layout, mesh, options, keeps_functions=keeps_functions)

    context: RingContext = cache_context(mesh, (pattern, layout, options, function_key), make)
    return context


class ContextCache:
    """Cache the contexts of a mesh, as long as the mesh lives.

    Attributes:
        by_key: contexts, by what they are made of: all of compiled graphs, up to `KEPT_CONTEXTS` others.
        recent: contexts of eager calls, by the arguments of the calls.
    """

    per_ring = True

    def __init__(self) -> None:
        self.by_key: OrderedDict[Any, Any] = OrderedDict()
        self.recent: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


def cache_context(mesh: RingMesh, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return the context of a key; drop the oldest. A pattern with document ids makes one for every batch."""
    table: OrderedDict[Any, Any] = mesh.owners[ContextCache].by_key
    if key not in table:
        table[key] = make()
        # A compiled graph may use its handle at any time, so never drop its context.
        passing = [old for old, context in table.items() if not context.in_a_graph]
        large = [old for old in passing if table[old].captured_bytes > SMALL_BYTES]
        for keys, most in ((passing, KEPT_CONTEXTS), (large, KEPT_LARGE)):
            if len(keys) > most:
                table.pop(keys[0], None)
    table.move_to_end(key)
    return table[key]


class AskedContext(NamedTuple):
    """The arguments of a public call from which its context is made; see `ring_attention`."""

    pattern: Pattern
    layout: Layout | str
    mesh: RingMesh
    scale: float | None = None
    kernel: str = "auto"
    options: PassOptions | None = None
    score_mod: ScoreFunction | None = None


def get_call_context(
    request: AskedContext, check: Callable[[RingContext], None] | None = None
) -> RingContext:
    """Return the context of an eager call; arguments that it or `check` refuses raise on all ranks."""
    pattern, layout, mesh, *settings, score_mod = request
    check_mesh(mesh)
    key: tuple[Any, ...] = ()
    context: RingContext | None = None
    with suppress(Exception):  # what cannot be hashed or compared is refused below, by name
        if score_mod is None:
            key = (pattern, layout, *settings, *map(type, settings), check)  # the types tell 1 from True
            context = mesh.owners[ContextCache].recent.get(key)
    if context is None:
        with collective(mesh, "attention"):
            context = make_context(request)
            if check is not None:
                check(context)
        # Functions are not kept here: the values that they captured may change.
        if key and not pattern.masks:
            mesh.owners[ContextCache].recent[key] = context
    return context


def make_context(request: AskedContext) -> RingContext:
    """Return the context of these arguments, or raise the RingError that refuses one of them."""
    pattern, layout, mesh, scale, kernel, pass_options, score_mod = request
    chosen = {} if isinstance(kernel, str) and kernel == "auto" else {"kernel": kernel}
    options = Options.make(pass_options, scale=scale, score_mod=as_value(score_mod), **chosen)
    return make_ring_context(pattern, layout, mesh, options)


_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_COUNT_BITS = 24


def get_object(handle: int, kind: type[T]) -> T:
    """Return the object behind a handle."""
    value = _owners.get(handle)
    assert isinstance(value, kind), (
        f"{kind.__name__} {handle} is gone: its mesh, model or batch was dropped before this call"
    )
    return value


# [Note: handles in compiled code]
# torch.compile runs a function marked `assume_constant_result` while it traces and keeps the result, here the
# integer by which the operator finds pattern, layout, mesh and options. It guards the arguments: numbers and
# texts by value, objects that come from outside by identity ([Note: guards of functions] in
# `traced_objects.py` has those of functions). An object that the traced code itself makes arrives here
# without its attributes, with defaults instead. So a caller must pass its arguments one by one, not wrapped
# in an object.


# [Note: handles in caches on disk]
# Inductor and AOTAutograd keep compiled graphs in files that all ranks and later runs share. The key is the
# text of the traced graph. It has the handle, but not what fake results and gradients read from its object
# (runs of a rank, the Ulysses rank, options). So the upper bits of a handle are a digest of those values.
@assume_constant
def new_handle(owner: object, *facts: object) -> int:
    """Return the integer by which an operator finds this object; `facts` are what a graph may depend on."""
    text = " | ".join(map(str, (type(owner).__name__, *facts)))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (_COUNT_BITS + 1)
    while (handle := digest << _COUNT_BITS | next(_numbers) % (1 << _COUNT_BITS)) in _owners:
        pass
    _owners[handle] = owner
    return handle

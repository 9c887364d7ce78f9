"""How long ranks wait for each other in a pass, some of which compile kernels first."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from torch import Tensor

from ds_ring.kernels.interface import Operands, PassHeads, compiles
from ds_ring.schedule.lowering import count_heads, get_kernel_calls, head_bytes, split_heads

if TYPE_CHECKING:
    from ds_ring.ops.context import RingContext
    from ds_ring.ops.prepare import Prepared

# [Note: compile skew]
# On a GPU each rank compiles its kernels at its own pace: one finds them in its cache, another one compiles
# for minutes, and peers that no call has met yet connect. Other ranks wait meanwhile for headers and
# messages. So a rank that is about to compile asks for `first_pass_timeout_seconds` in its header, and all
# ranks wait that long (`MeshState.patience_s`): in this pass and for the header of the next call, since one
# may compile at the last hop of a pass. Every other wait has `hop_timeout_seconds`. The kernel knows whether
# a pass compiles: flex looks into the table of the functions that it has compiled ([Note: one compilation] in
# `kernels/flex`). The first pass of its kind on a mesh counts as well, because its peers connect.


def patience_s(
    context: RingContext, name: str, q: Tensor, k: Tensor, compiling: bool = False,
    prepared: Prepared | None = None, operands: Operands | None = None,
) -> float:  # fmt: skip
    """Return the seconds that this rank asks for in a call that begins now; 0: the hop's are enough.

    Args:
        context, name, q, k: of the call; the mesh remembers what it has seen.
        compiling: whether the kernel is going to compile something.
        prepared, operands: of a pass, instead of `compiling`.
    """
    if prepared is not None and operands is not None:
        compiling = _check_compiles(context, prepared, operands)
    options, seen = context.options, context.mesh.state.operations
    kind: Hashable = (name, options.kernel, q.dtype, q.shape[1], k.shape[1], q.shape[-1])
    known = kind in seen
    seen.add(kind)
    return 0.0 if known and not compiling else options.first_pass_timeout_seconds


def _check_compiles(context: RingContext, prepared: Prepared, operands: Operands) -> bool:
    """Return whether this rank's pass is going to compile something."""
    options, (_, k, v, *_) = context.options, operands
    # These values decide what a pass compiles, and compiled code is kept.
    seen = (prepared.kernel, prepared.scale, options.transport, options.chunk_bytes, *operands.description)
    if seen in prepared.rank_plan.compiled:
        return False
    sizes = (head_bytes(k, v), prepared.chunk_bytes) if options.has_hops else (0, 1)  # (0, 1): all of a class
    parts = []
    for head_class in prepared.rank_plan.classes:
        tables = [step.tiles for step in get_kernel_calls(head_class, operands.grad_out is not None)]
        count = count_heads(
            split_heads(head_class.kv_heads, *sizes)[0]
        )  # all chunks of a class have one size
        parts.append(PassHeads(count * prepared.plan.group, count, tables))
    compiling = compiles(prepared.kernel, operands, parts, prepared.scale)
    if not compiling:
        prepared.rank_plan.compiled.add(seen)
    return compiling

"""One comparison for all layers: shards on a ring against the whole tensors on one process.

A layer is a function of a mesh and a case, at the top level of a module so that ranks can import it:

    def layer(mesh: RingMesh, layout: str) -> Layer:
        layout = make_layout(layout, tokens=T, ring_size=mesh.ring_size)
        return Layer(inputs(), alone, partial(operator, mesh=mesh, layout=layout), mesh, layout)

    same_as_one_process(rank_pool(2), layer, ["zigzag"], ["striped"])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_ring import RingMesh, gather_sequence, shard_sequence
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.layout import Layout
from tests.dist.harness import RankPool
from tests.reference import relative_error, worst

T = TypeVar("T")
Outputs = Tensor | Sequence[Tensor]


class Layer(NamedTuple):
    """What is compared.

    Attributes:
        inputs: whole tensors by name, the same on every rank.
        alone: the reference, of whole inputs by name.
        sharded: the operator, of this rank's inputs by name.
        mesh: of the ranks.
        layout: of the tokens.
        dim: of the tokens in inputs and outputs.
        parameters: inputs that every rank has whole; their gradients are summed over the ranks.
        layouts: of inputs that have another one.
        real: 1 for tokens and 0 for padding, [T], or [B, T] of [B, T, ...]; None if all are tokens.
        pad_value: what slots of padding hold.
    """

    inputs: dict[str, Tensor]
    alone: Callable[..., Outputs]
    sharded: Callable[..., Outputs]
    mesh: RingMesh
    layout: Layout
    dim: int = 2
    parameters: Sequence[str] = ()
    layouts: Mapping[str, Layout] = {}
    real: Tensor | None = None
    pad_value: float = 0.0


def make(name: str, *shape: int) -> Tensor:
    """Draw a global tensor, float64, the same on every rank."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def compare(layer: Layer) -> dict[str, float]:
    """Return the relative error of each output ("out", "out 1", ...) and of each gradient, by the input's name."""
    expected, grads, wanted = from_first_rank(lambda: _reference(layer))
    place: dict[str, Any] = {"mesh": layer.mesh, "dim": layer.dim}
    local = {
        name: x.detach().clone() if name in layer.parameters else
        shard_sequence(x.detach(), layer.layouts.get(name, layer.layout), pad_value=layer.pad_value, **place)
        for name, x in layer.inputs.items()
    }  # fmt: skip
    outputs = _as_list(layer.sharded(**{name: x.requires_grad_() for name, x in local.items()}))
    torch.autograd.backward(outputs, [shard_sequence(x, layer.layout, **place) for x in grads])

    errors = {}
    for number, (x, want) in enumerate(zip(outputs, expected, strict=True)):
        assert x.dtype == want.dtype, (x.dtype, want.dtype)
        got = _masked(gather_sequence(x.detach(), layer.layout, **place), layer)
        errors["out" + f" {number}" * (number > 0)] = _error(got, want)
    for name, x in local.items():
        if x.grad is None:
            assert wanted[name] is None, f"no gradient of {name}"
        elif name in layer.parameters:
            if layer.mesh.sequence_group is not None:
                dist.all_reduce(x.grad, group=layer.mesh.sequence_group)
            errors[name] = _error(x.grad, wanted[name])
        else:
            got = gather_sequence(x.grad, layer.layouts.get(name, layer.layout), **place)
            errors[name] = _error(got, wanted[name])
    return errors


def _reference(layer: Layer) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor | None]]:
    """Return outputs of one process, the gradients that they get, and those of the inputs."""
    whole = {name: x.detach().clone().requires_grad_() for name, x in layer.inputs.items()}
    expected = [_masked(x, layer) for x in _as_list(layer.alone(**whole))]
    torch.manual_seed(1)
    grads = [_masked(torch.randn_like(x), layer) for x in expected]
    torch.autograd.backward(expected, grads)
    return [x.detach() for x in expected], grads, {name: x.grad for name, x in whole.items()}


def from_first_rank(compute: Callable[[], T]) -> T:
    """Return what rank 0 computes, on every rank: references are slow, and equal everywhere."""
    results = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(results)
    return results[0]  # type: ignore[return-value]


def compare_cases(
    rank: int, world_size: int, layer: Callable[..., Layer], cases: Sequence[Sequence[Any]], ulysses: int
) -> list[dict[str, float]]:
    """Return the errors of each case, on one mesh."""
    mesh = RingMesh.from_world(world_size // ulysses, ulysses)
    return [compare(layer(mesh, *case)) for case in cases]


def same_as_one_process(
    pool: RankPool,
    layer: Callable[..., Layer],
    *cases: Sequence[Any],
    ulysses: int = 1,
    bound: float = 1e-12,
    count: int | None = None,
) -> None:
    """Compare the layer of each case on the ranks of a pool; `count`: of outputs and gradients."""
    for errors_by_case in pool.run(compare_cases, layer, cases, ulysses):
        for case, errors in zip(cases, errors_by_case, strict=True):
            assert len(errors) == (count or len(errors)) > 1, (case, errors)
            assert worst(errors.values()) < bound, (case, errors)


def attend_densely(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Return out and lse of softmax attention over all keys; log m of the pattern is added to the scores."""
    heads, groups = q.shape[1], k.shape[1]
    rows, columns = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None, :]
    counts = [pattern.multiplicity(head, heads, groups, rows, columns) for head in range(heads)]
    k_all, v_all = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
    scores = q @ k_all.mT / q.shape[-1] ** 0.5 + torch.from_numpy(np.stack(counts)).to(q.dtype).log()
    return scores.softmax(-1) @ v_all, scores.logsumexp(-1)


def _as_list(outputs: Outputs) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _masked(x: Tensor, layer: Layer) -> Tensor:
    if layer.real is None:
        return x
    return x * layer.real.view(*layer.real.shape, *[1] * (x.dim() - 1 - layer.dim))


def _error(got: Tensor, want: Tensor | None) -> float:
    return relative_error(got, want) if bool(want.any()) else float(got.abs().max())

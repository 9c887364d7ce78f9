"""Other defaults of torch: scripts set a device or dtype for their models, operators take those of their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from ds_ring import RingMesh
from tests.dist.harness import Pool
from tests.operator_table import OPERATORS, Operator, Place

DEFAULTS = {
    "device meta": ("meta", torch.float32),
    "dtype float64": ("cpu", torch.float64),
    "dtype float16": ("cpu", torch.float16),
}
# What the user's own code makes there: positions.
OF_THE_USER = {"device meta": {"selected_attention"}}


@contextmanager
def defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default device and dtype."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def results(row: Operator, place: Place, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The output and gradients of this rank under other defaults, of equal inputs."""
    whole = row.inputs(torch.int64 if row is OPERATORS["ngram_rows"] else torch.float32)
    arguments = row.shards(place.grid, whole, place.mesh.sequence_rank)
    for name in row.gradients:
        arguments[name].requires_grad_()
    with defaults(device, dtype):
        out = row.call(place, **arguments)
        if row.gradients:
            out.backward(torch.ones_like(out))
    result = {"out": out.detach(), **{name: arguments[name].grad for name in row.gradients}}
    return {name: x for name, x in result.items() if x is not None}


def differences(rank: int, world_size: int, ulysses_size: int, changed: str) -> dict[str, str]:
    """What operators have otherwise under other defaults, by name."""
    mesh, result = RingMesh.from_world(world_size // ulysses_size, ulysses_size), {}
    for name, row in OPERATORS.items():
        suits = row.ulysses == "any" or ulysses_size == 1
        if not suits or name in OF_THE_USER.get(changed, ()):
            continue
        place = Place(mesh, row.layout)
        want = results(row, place, "cpu", torch.float32)
        try:
            got = results(row, place, *DEFAULTS[changed])
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
            break
        equal = [x.dtype == want[key].dtype and torch.equal(x, want[key]) for key, x in got.items()]
        unequal = [key for key, same in zip(got, equal, strict=True) if not same]
        if unequal:
            result[name] = f"{unequal} differ"
    return result


@pytest.mark.day("device meta-2")
@pytest.mark.situation("dtypes", "the script sets torch's default device or dtype")
@pytest.mark.parametrize(
    ("changed", "ulysses_size"), [*((changed, 1) for changed in DEFAULTS), ("device meta", 2)]
)
def test_operators_do_not_depend_on_defaults(rank_pool: Pool, changed: str, ulysses_size: int) -> None:
    assert rank_pool(2).run(differences, ulysses_size, changed) == [{}, {}]

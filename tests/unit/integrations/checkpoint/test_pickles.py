"""What a pickled file of a checkpoint may hold, in both of torch's formats; nothing of it is run."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from ds_ring.errors import RingCheckpointError
from ds_ring.integrations.checkpoint.pickles import require_weights_only, weights_only_below


class Planted:
    """Pickles to a call that makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


class Attribute:
    """Pickles to an attribute of something, as members of an Enum did before Python 3.11.4."""

    def __init__(self, owner: Any, name: str) -> None:
        self.found = owner, name

    def __reduce__(self) -> tuple[Any, tuple[Any, str]]:
        return getattr, self.found


REFUSED = {
    "an attribute": (lambda folder: Attribute(torch.Tensor, "numpy"), "builtins.getattr"),
    "no member": (lambda folder: Attribute(ZeroStageEnum, "__init__"), "builtins.getattr"),
    "a fraction": (
        lambda folder: Fraction(1, 2),
        "fractions.Fraction",
    ),  # megatron allows paths, where imported
    "a frozenset": (lambda folder: frozenset([1]), "frozenset"),
    "an array of objects": (lambda folder: np.array([None]), "numpy.dtypes.ObjectDType"),
    "code": (lambda folder: Planted(folder / "was run"), "posix.mkdir"),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_what_loading_would_run_is_refused_and_not_run(tmp_path: Path, case: str, zipped: bool) -> None:
    make, name = REFUSED[case]
    torch.save({"x": make(tmp_path)}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        RingCheckpointError, match=rf"a\.pt: expected tensors.*got {name}, which loading would"
    ):
        require_weights_only(tmp_path, ["a.pt"])
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_plain_values_and_random_states_are_allowed(tmp_path: Path, zipped: bool) -> None:
    state = {
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "x": [1, 2.0, "3", None, {4}, np.int64(5), ZeroStageEnum.weights],
    }
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    require_weights_only(tmp_path, ["a.pt", "no pickle.bin"])
    with weights_only_below(tmp_path):
        assert torch.load(tmp_path / "a.pt", weights_only=False)["x"] == state["x"]


def test_a_stage_of_an_older_python_is_allowed(tmp_path: Path) -> None:
    torch.save([ZeroStageEnum.weights, Attribute(ZeroStageEnum, "weights")], tmp_path / "a.pt")
    require_weights_only(tmp_path, ["a.pt"])
    with weights_only_below(tmp_path):
        assert torch.load(tmp_path / "a.pt") == [ZeroStageEnum.weights] * 2


@pytest.mark.parametrize("data", [b"", b"junk", b"PK\3\4" + bytes(100), b"\x80\x02" + b"(" * 10**5])
def test_what_is_no_pickle_is_a_typed_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(RingCheckpointError, match=r"a\.pt: expected a file of torch\.save"):
        require_weights_only(tmp_path, ["a.pt"])


def test_torch_load_is_restricted_below_the_folder_only(tmp_path: Path) -> None:
    for folder in ("inside", "outside"):
        (tmp_path / folder).mkdir()
        torch.save(Planted(tmp_path / folder / "was run"), tmp_path / folder / "a.pt")
    load = torch.load
    with weights_only_below(tmp_path / "inside"):
        with pytest.raises(Exception, match=r"posix\.mkdir"):
            torch.load(tmp_path / "outside" / ".." / "inside" / "a.pt", weights_only=False)
        torch.load(tmp_path / "outside" / "a.pt", weights_only=False)
    assert torch.load is load
    assert not (tmp_path / "inside" / "was run").exists() and (tmp_path / "outside" / "was run").exists()

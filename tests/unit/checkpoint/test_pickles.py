"""What a pickled file of a checkpoint may hold, in both of torch's formats; nothing of it is run."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from ds_ring.checkpoint.pickles import require_weights_only, weights_only_below
from ds_ring.checkpoint.stand_ins import CALLS, CLASSES, STORAGES, VALUES
from ds_ring.errors import RingCheckpointError
from tests.hostile_pickles import FLOATS, HOSTILE, RAW, TWO_FLOATS, Call, mutated, tensor, write

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.situation("checkpoints", "a hostile or damaged .pt file")


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
    "a frozenset": (lambda folder: frozenset([1]), "builtins.frozenset"),
    "an array of objects": (lambda folder: np.array([None]), r"numpy\.dtype\('O8'\)"),
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
        "x": [1, 2.0, "3", None, {4}, np.int64(5), ZeroStageEnum.weights, Counter("aab")],
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


def test_what_the_user_marks_as_safe_is_allowed(tmp_path: Path) -> None:
    torch.save(Fraction(1, 2), tmp_path / "a.pt")
    with pytest.raises(RingCheckpointError, match=r"got fractions\.Fraction"):
        require_weights_only(tmp_path, ["a.pt"])
    with torch.serialization.safe_globals([Fraction]):
        require_weights_only(tmp_path, ["a.pt"])


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


STORED = [
    torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.uint16, torch.float8_e5m2,
]  # fmt: skip
DYNAMIC = DynamicLossScaler(2.0**8, 2.0, 1000, 1.0, 2, False)


@pytest.mark.parametrize("zipped", [True, False])
def test_what_checkpoints_hold_is_read_as_it_was(tmp_path: Path, zipped: bool) -> None:
    """Of torch, numpy and DeepSpeed; a tensor with attributes, a view, each storage of its own type."""
    stored = STORED if zipped else STORED[:-2]  # the older format has no untyped storages
    named = torch.ones(3)
    named.ds_id = "12_23"  # type: ignore[attr-defined]
    state = {
        "tensors": [torch.zeros((2, 0, 3), dtype=dtype) for dtype in stored],
        "views": [
            torch.arange(12.0).view(3, 4).t()[1:],
            torch.ones(1).expand(5),
            torch.tensor(3 + 4j).conj(),
        ],
        "named": named,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "numpy": [np.arange(6, dtype=">i4").reshape(2, 3).T, np.zeros((0, 2)), np.bool_(True), np.float16(2)],
        "torch": [torch.Size((1, 2)), torch.device("cpu"), torch.float32, torch.nn.Linear(2, 2).state_dict()],
        "python": [
            1 << 100, -5, b"\xff\x00", bytearray(b"ab"), {1, "a"}, 2 + 3j, {(1, "b", None): 2.0}, True,
        ],
        "deepspeed": [LossScaler(4.0), DYNAMIC, fragment_address(numel=3, start=1)],
    }  # fmt: skip
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    require_weights_only(tmp_path, ["a.pt"])
    with weights_only_below(tmp_path):
        found = torch.load(tmp_path / "a.pt")
    assert found["python"] == state["python"] and found["named"].ds_id == "12_23"
    assert [x.dtype for x in found["tensors"]] == stored
    assert all(torch.equal(x, y) for x, y in zip(found["views"], state["views"], strict=True))
    assert all(np.array_equal(x, y) for x, y in zip(found["numpy"], state["numpy"], strict=True))
    assert vars(found["deepspeed"][1]) == vars(state["deepspeed"][1])


STORED = [
    torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.uint16, torch.float8_e5m2,
]  # fmt: skip


def test_the_tables_of_names_are_those_of_torch_and_deepspeed() -> None:
    """Attributes that a scaler has, sizes that storages have."""
    for scaler in (LossScaler(1.0), DYNAMIC):
        name = f"{type(scaler).__module__}.{type(scaler).__name__}"
        CLASSES[name](dict.fromkeys(vars(scaler)))
    for name, size in STORAGES.items():
        if name != "torch.storage.UntypedStorage":
            assert getattr(torch, name.removeprefix("torch."))().element_size() == size, name
    allowed = set(torch._weights_only_unpickler._get_allowed_globals())
    assert allowed - set(CALLS) - set(CLASSES) - VALUES, "torch allows more, which is refused below"


# In a process of its own: before stand-ins were read first, the first of these ended it.
CHECK = """
import os
import sys
from pathlib import Path
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # DeepSpeed logs to the standard output, from its import on
from ds_ring.errors import RingCheckpointError
from ds_ring.checkpoint.pickles import require_weights_only
for path in sorted(Path(sys.argv[1]).glob("*.pt")):
    try:
        require_weights_only(path.parent, [path.name])
        print(path.stem, "was accepted", file=out, flush=True)
    except RingCheckpointError as error:
        print(path.stem, "RingCheckpointError", str(error).split("expected ")[1], file=out, flush=True)
"""


def checked(folder: Path) -> dict[str, str]:
    """What the checker says of each file of a folder."""
    command = [sys.executable, "-c", CHECK, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, (
        f"ended with {done.returncode} after {done.stdout[-300:]}{done.stderr[-2000:]}"
    )
    return {line.split()[0]: line.partition(" ")[2] for line in done.stdout.splitlines()}


def test_hostile_and_mutated_pickles_are_typed_errors_and_end_no_process(tmp_path: Path) -> None:
    """`python tools/fuzz_files.py --rounds 10000` does this at length."""
    names = dict(enumerate(HOSTILE))
    for number, name in names.items():
        write(tmp_path / f"{number:03}.pt", HOSTILE[name], TWO_FLOATS, RAW.get(name))
    draw, buffer = random.Random(38), io.BytesIO()
    torch.save({"a": torch.ones(2), "n": np.arange(3), "s": DYNAMIC, "t": [(1,), {"x": b"y"}]}, buffer)
    data = torch._C.PyTorchFileReader(io.BytesIO(buffer.getvalue())).get_record("data.pkl")
    for number in range(150):
        write(tmp_path / f"mutated{number:03}.pt", None, TWO_FLOATS, mutated(data, draw))
    write(tmp_path / "sound.pt", [tensor(FLOATS), {(1, "a"): 2}], TWO_FLOATS)
    said = checked(tmp_path)
    assert said.pop("sound") == "was accepted" and len(said) == len(HOSTILE) + 150
    accepted = [one for one, text in said.items() if not text.startswith("RingCheckpointError")]
    assert not [names[int(one)] for one in accepted if one.isdecimal()]
    assert len(accepted) < 75


@pytest.mark.night
def test_each_name_that_torch_allows_is_called_as_a_checkpoint_does_or_not_at_all(tmp_path: Path) -> None:
    """Whoever has marked it as safe, too: transformers marks numpy's."""
    marked = [np.ndarray, np.dtype, type(np.dtype("O")), Fraction]
    names = {*torch._weights_only_unpickler._get_allowed_globals(), *CALLS, *CLASSES, *VALUES}
    names |= {f"{one.__module__}.{one.__qualname__}" for one in marked}
    arguments: list[Any] = [(), ((1,), "O", b"A" * 8), (1 << 40,)]
    refused = 0
    with torch.serialization.safe_globals(marked):
        for name in sorted(names):
            for number, values in enumerate(arguments):
                for new in (False, True):
                    write(tmp_path / "a.pt", Call(name, *values, new=new))
                    try:
                        require_weights_only(tmp_path, ["a.pt"])
                    except RingCheckpointError:
                        refused += 1
                        continue
                    what = (name, number, new)
                    assert name in CALLS or name in CLASSES or name == "fractions.Fraction", what
    assert refused > 5 * len(names)

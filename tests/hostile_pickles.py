"""Pickles that a stranger writes: opcodes put together by hand, in the archive that torch.load reads."""

from __future__ import annotations

import pickle
import random
import zipfile
from pathlib import Path
from struct import pack
from typing import Any


class Global:
    """Named by a pickle, and not called."""

    def __init__(self, path: str) -> None:
        self.module, _, self.name = path.rpartition(".")


class Call:
    """A call that a pickle makes, then a state that it sets."""

    def __init__(self, path: str, *args: Any, state: Any = None, new: bool = False) -> None:
        self.path, self.args, self.state, self.new = path, args, state, new


class Stored:
    """A storage as a pickle names it."""

    def __init__(self, *fields: Any) -> None:
        self.fields = fields


def opcodes(value: Any) -> bytes:
    """The opcodes of protocol 2 that push `value`."""
    if isinstance(value, Global):
        return b"c" + f"{value.module}\n{value.name}\n".encode()
    if isinstance(value, Call):
        called = opcodes(Global(value.path)) + opcodes(value.args) + (b"\x81" if value.new else b"R")
        return called if value.state is None else called + opcodes(value.state) + b"b"
    if isinstance(value, Stored):
        return opcodes(tuple(value.fields)) + b"Q"
    if isinstance(value, (tuple, list)):
        items = b"(" + b"".join(map(opcodes, value))
        return items + b"t" if isinstance(value, tuple) else b"]" + items + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(opcodes(key) + opcodes(item) for key, item in value.items()) + b"u"
    if isinstance(value, bytes):
        return opcodes(Call("_codecs.encode", value.decode("latin-1"), "latin1"))
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + pack("<I", len(data)) + data
    return pickle.dumps(value, 2)[2:-1]


def write(path: Path, value: Any, storages: dict[str, bytes] | None = None, raw: bytes | None = None) -> None:
    """A file for torch.load that holds `value`, or the pickle `raw`."""
    data = b"\x80\x02" + opcodes(value) + b"." if raw is None else raw
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        for key, content in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", content)


def tensor(
    storage: Any, size: Any = (2,), stride: Any = (1,), offset: Any = 0, hooks: Any = None, *more: Any
) -> Call:
    """A tensor as torch.save writes it, or as it does not."""
    hooks = Call("collections.OrderedDict") if hooks is None else hooks
    return Call("torch._utils._rebuild_tensor_v2", storage, offset, size, stride, False, hooks, *more)


REBUILD, WITH_STATE = "torch._utils._rebuild_tensor_v2", "torch._tensor._rebuild_from_type_v2"
TENSOR, STAGE = Global("torch.Tensor"), "deepspeed.runtime.zero.config.ZeroStageEnum"
LONGS = Stored("storage", Global("torch.LongStorage"), "0", "cpu", 1)
FLOATS = Stored("storage", Global("torch.FloatStorage"), "0", "cpu", 2)
TWO_FLOATS = {"0": bytes(8)}
ARRAY = ("numpy._core.multiarray._reconstruct", Global("numpy.ndarray"), (0,), b"b")


def dtype(code: Any = "f4", state: Any = (3, "<", None, None, None, -1, -1, 0)) -> Call:
    """A numpy dtype as it is pickled."""
    return Call("numpy.dtype", code, False, True, state=state)


# Each would end the process, take all memory or call what nobody asked for, or is no pickle of torch.save.
HOSTILE: dict[str, Any] = {
    "an array of pointers": Call("numpy.ndarray", (1,), "O", b"AAAAAAAA"),
    "an array of pointers, made anew": Call("numpy.ndarray", (1,), "O", b"AAAAAAAA", new=True),
    "a dtype of pointers": Call("numpy.ndarray", (1,), Call("numpy.dtype", "O"), b"AAAAAAAA"),
    "an array's state of pointers": Call(*ARRAY, state=(1, (1,), dtype("O8"), False, b"A" * 8)),
    "an array of structures": Call(*ARRAY, state=(1, (1,), dtype("V8"), False, b"A" * 8)),
    "an array longer than its data": Call(*ARRAY, state=(1, (1 << 40,), dtype(), False, b"A" * 8)),
    "an array's list of objects": Call(*ARRAY, state=(1, (1,), dtype(), False, [None])),
    "a dtype with flags": dtype(state=(3, "<", None, None, None, -1, -1, 63)),
    "a dtype of another size": dtype(state=(3, "<", None, None, None, 1 << 30, -1, 0)),
    "a dtype with fields": dtype(state=(3, "<", None, ("a",), {"a": (dtype("O8"), 0)}, 8, 1, 27)),
    "a number of pointers": Call("numpy._core.multiarray.scalar", dtype("O8"), b"A" * 8),
    "a number longer than its data": Call("numpy._core.multiarray.scalar", dtype("f8"), b"A"),
    "an array of a tensor": Call("numpy._core.multiarray._reconstruct", Global("torch.Tensor"), (0,), b"b"),
    "a storage longer than its bytes": tensor(Stored(*FLOATS.fields[:4], 1 << 20), (1 << 20,)),
    "a storage of a negative length": tensor(Stored(*FLOATS.fields[:4], -2)),
    "a storage of no class": Stored("storage", 3, "0", "cpu", 2),
    "a storage elsewhere": Stored("storage", Global("torch.FloatStorage"), "0", "file:/etc", 2),
    "a storage that is not there": tensor(Stored("storage", Global("torch.FloatStorage"), "1", "cpu", 2)),
    "a storage of two sizes": [FLOATS, Stored("storage", Global("torch.DoubleStorage"), "0", "cpu", 2)],
    "a storage of another kind": Stored("module", Global("torch.FloatStorage"), "0", "cpu", 2),
    "a storage of too few fields": Stored("storage", "0"),
    "a tensor beyond its storage": tensor(FLOATS, (3,)),
    "a tensor behind its storage": tensor(FLOATS, offset=1),
    "a tensor before its storage": tensor(FLOATS, offset=-1),
    "a tensor of strides": tensor(FLOATS, (2,), (1 << 40,)),
    "a tensor of negative strides": tensor(FLOATS, (2,), (-1,)),
    "a tensor of too many elements": tensor(FLOATS, (1 << 40, 1 << 40), (0, 0)),
    "a tensor of too many dimensions": tensor(FLOATS, (1,) * 70, (1,) * 70),
    "a tensor of no storage": tensor(7),
    "a tensor with a hook": tensor(FLOATS, hooks={"a": 1}),
    "a tensor with a flag": tensor(FLOATS, (2,), (1,), 0, None, {"fake": True}),
    "a tensor of one number": tensor(FLOATS, 2, 1),
    "a gradient of whole numbers": Call(REBUILD, LONGS, 0, (1,), (1,), True, Call("collections.OrderedDict")),
    "a tensor whose data are set": Call(WITH_STATE, Global(REBUILD), TENSOR, tensor(FLOATS).args,
        {"data": 3}),
    "a tensor of another function": Call(WITH_STATE, Global("torch.Size"), TENSOR, ((1,),), {}),
    "a state for a tensor": Call("torch.Tensor", state=(FLOATS, 0, (1 << 40,), (1,))),
    "a tensor that is called": Call("torch.Tensor", 1 << 40),
    "a tensor without memory": Call("torch._utils._rebuild_meta_tensor_no_storage", 1, 2, 3, 4),
    "a tensor of numpy's": Call("torch._utils._rebuild_device_tensor_from_numpy", 1, 2, 3, 4),
    "a sparse tensor": Call("torch._utils._rebuild_sparse_tensor", 1, 2),
    "a subclass": Call("torch._utils._rebuild_wrapper_subclass", 1, 2, 3, 4, 5, 6, 7),
    "a parameter of a number": Call("torch._utils._rebuild_parameter", 3, True,
        Call("collections.OrderedDict")),
    "bytes by the gigabyte": Call("builtins.bytearray", 1 << 40),
    "bytes by a codec": Call("_codecs.encode", "a" * 100, "idna"),
    "an attribute of a dict": Call("collections.OrderedDict", state={"items": 3}),
    "a scaler's method": Call("deepspeed.runtime.fp16.loss_scaler.LossScaler", state={"update_scale": 3},
        new=True),
    "a scaler of an object": Call("deepspeed.runtime.fp16.loss_scaler.LossScaler", 3, new=True),
    "a stage that does not exist": Call(STAGE, 9),
    "a stage's attribute": Call("builtins.getattr", Global(STAGE), "mro"),
    "an attribute of numpy's": Call("builtins.getattr", Global("numpy.ndarray"), "tofile"),
    "a key that is a list": None,
    "a key that takes for ever": None,  # made below
    "a call of a number": None,
    "a state for a class": None,
    "a state for a storage": None,
    "a list's item without a list": None,
    "nothing on the stack": None,
    "no such opcode": None,
    "a size of nothing": Call("torch.Size", "abc"),
    "a device elsewhere": Call("torch.device", "file://x"),
    "a set of a list": Call("builtins.set", [[1]]),
    "a complex number of texts": Call("builtins.complex", "1", "2"),
    "a Counter of lists": Call("collections.Counter", {"a": [[1]]}),
    "too many arguments": Call("torch.Size", 1, 2, 3),
}  # fmt: skip

# A tuple of 2 ** 60 items, seven bytes a level; then a dict whose key it is.
_NESTED = b"()\x85q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"t}h\x00K\x01s\x86"
RAW = {
    "a key that takes for ever": b"\x80\x02" + _NESTED + b".",
    "a key that is a list": b"\x80\x02}]K\x01s.",
    "a call of a number": b"\x80\x02K\x01)R.",
    "a state for a class": b"\x80\x02" + opcodes(Global("torch.Size")) + opcodes({"path": "a"}) + b"b.",
    "a state for a storage": b"\x80\x02" + opcodes(FLOATS) + opcodes({"nbytes": 1 << 40}) + b"b.",
    "a list's item without a list": b"\x80\x02K\x01K\x02a.",
    "nothing on the stack": b"\x80\x02R.",
    "no such opcode": b"\x80\x02\x8eabcdefgh.",
}


_OPCODES = b"(.012FIJKLMNQRSTUVXYabcdehjlopqrstu})]\x80\x81\x85\x86\x87\x88\x89\x8a"
_NUMBERS = (b"\xff\xff\xff\x7f", bytes(4), b"\xff\xff\xff\xff")


def mutated(data: bytes, draw: random.Random) -> bytes:
    """One to four changes: a bit, an opcode, a number, a piece left out or doubled."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at, size = draw.randrange(len(changed)), draw.randint(1, 12)
        match draw.randrange(5):
            case 0:
                changed[at] ^= 1 << draw.randrange(8)
            case 1:
                changed[at] = draw.choice(_OPCODES)
            case 2:
                del changed[at : at + size]
            case 3:
                changed[at:at] = changed[draw.randrange(len(changed)) :][:size]
            case _:
                changed[at : at + 4] = draw.choice(_NUMBERS)
        changed = changed or bytearray(b".")
    return bytes(changed)

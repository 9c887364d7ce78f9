"""Read a file of torch.save symbolically: nothing that its pickle names is imported or called.

Owns the names and arguments that a checkpoint's pickles may have. torch's `weights_only` compares names
alone, and some allowed functions can be called so that the process ends: `numpy.ndarray((1,), "O", b"A" * 8)`
makes a pointer of the file's bytes, and a storage may claim more bytes than it has in the file.

[Note: pickles as stand-ins]
Only the opcodes of torch's restricted unpickler are known here. A name of the pickle becomes a `Name`, the
result of a call a `Made`, a storage a `StorageRecord` with its size. Each call is compared with the calls
that torch, numpy and DeepSpeed write. A file that passes is then read by torch itself.
"""

from __future__ import annotations

import pickletools
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Collection
from dataclasses import dataclass
from io import SEEK_END, BytesIO
from math import prod
from typing import Any, BinaryIO

import torch

_MAX_DIMS = 64
_MAX_ELEMENTS = 1 << 62
_MAX_KEY_ITEMS = 64  # of a tuple that is a key, tuples in it included: hashing visits them again and again
_LEGACY_HEADERS = 3  # a number, a version, facts about the machine
_PLAIN = (bool, int, float, str, bytes, type(None))

_STORAGE_BYTES = {
    "ByteStorage": 1, "CharStorage": 1, "BoolStorage": 1, "ShortStorage": 2, "HalfStorage": 2,
    "BFloat16Storage": 2, "IntStorage": 4, "FloatStorage": 4, "LongStorage": 8, "DoubleStorage": 8,
    "ComplexFloatStorage": 8, "ComplexDoubleStorage": 16,
}  # fmt: skip
STORAGES = {f"torch.{name}": size for name, size in _STORAGE_BYTES.items()} | {
    "torch.storage.UntypedStorage": 1
}
DTYPES = {str(one): one.itemsize for one in vars(torch).values() if isinstance(one, torch.dtype)}
# numpy's that hold numbers; the byte order comes with the state.
_NUMPY_DTYPE = re.compile(r"b1|[iu][1248]|f[248]|c8|c16")
_LOCATION = re.compile(r"[a-z]{1,16}(:\d{1,4})?")


class NotAllowed(Exception):
    """A pickle names, or calls, what a checkpoint has no need of; the text is its name."""


class Malformed(Exception):
    """A pickle is not of torch.save; the text describes the difference."""


@dataclass(frozen=True, eq=False)
class Name:
    """Stand for a class, a function or a dtype that a pickle names."""

    path: str


@dataclass(frozen=True, eq=False)
class StorageRecord:
    """Stand for the bytes of tensors."""

    item_bytes: int
    nbytes: int
    key: str


@dataclass(eq=False)
class Made:
    """Stand for what a call returns; `state` checks a state that is set on it, None if it takes none."""

    path: str
    state: Callable[[Made, Any], object] | None = None
    item_bytes: int = 0  # of a dtype


class Mapping(dict[Any, Any]):
    """Stand for an OrderedDict or a Counter."""


def _require(holds: object, what: str) -> None:
    if not holds:
        raise Malformed(what)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_ELEMENTS


def _is_plain(value: object) -> bool:
    """Whether it is a number, a text, a dtype, or a flat list or tuple of them."""
    items: Any = value if type(value) in (list, tuple) else (value,)
    return all(type(one) in _PLAIN or (isinstance(one, Name) and one.path in DTYPES) for one in items)


def _require_key(key: object, left: int = _MAX_KEY_ITEMS) -> int:
    """Raise Malformed for what cannot be, or takes long to be, a key; return the items that are left."""
    _require(left > 0, "a key of too many items")
    if type(key) is tuple:
        for item in key:
            left = _require_key(item, left - 1)
    elif type(key) not in _PLAIN and not isinstance(key, Name | Made):
        raise Malformed(f"a key of the type {type(key).__name__}")
    return left


# Allowed calls. Each function gets the arguments and returns a symbol of the result.


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, *rest: Any) -> Made:
    """Check `torch._utils._rebuild_tensor_v2`, or _v3 where `rest` begins with a dtype."""
    _require(isinstance(storage, StorageRecord), "a tensor without a storage")
    item_bytes, more = storage.item_bytes, list(rest)
    if more and isinstance(more[0], Name):
        _require(more[0].path in DTYPES, f"{more[0].path} for a dtype")
        item_bytes = DTYPES[more.pop(0).path]
    _require(type(size) is tuple and type(stride) is tuple and len(size) == len(stride), "a tensor's shape")
    _require(len(size) <= _MAX_DIMS, "a tensor of too many dimensions")
    _require(all(map(_is_size, (offset, *size, *stride))), "a tensor's numbers")
    _require(prod(size) < _MAX_ELEMENTS, "a tensor of too many elements")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    inside = not prod(size) or (last + 1) * item_bytes <= storage.nbytes
    _require(inside, f"a tensor of {size} beyond its storage of {storage.nbytes} bytes")
    _require(type(grad) is bool and type(hooks) is Mapping and not hooks, "a tensor with hooks")
    metadata = more.pop(0) if more else None
    bits = metadata is None or (type(metadata) is dict and metadata.keys() <= {"conj", "neg"})
    flags = all(type(one) is bool for one in (metadata or {}).values())
    _require(bits and flags and not more, "a tensor's bits")
    return Made("torch.Tensor")


def _parameter(data: Any, grad: Any, hooks: Any) -> Made:
    _require(isinstance(data, Made) and data.path == "torch.Tensor", "a parameter without a tensor")
    _require(type(grad) is bool and type(hooks) is Mapping and not hooks, "a parameter with hooks")
    return Made("torch.Tensor")


def _with_attributes(function: Any, kind: Any, args: Any, attributes: Any) -> Made:
    """Check a tensor that has attributes, such as DeepSpeed's `ds_id`."""
    _require(isinstance(function, Name) and function.path in _TENSORS, "a tensor's function")
    _require(isinstance(kind, Name) and kind.path == "torch.Tensor", "a tensor's type")
    _require(type(args) is tuple and type(attributes) is dict, "a tensor's attributes")
    for name, value in attributes.items():
        _require(type(name) is str and name.isidentifier(), "a tensor's attribute")
        _require(not hasattr(torch.Tensor, name) and _is_plain(value), f"the tensor's attribute {name:.40}")
    return _tensor(*args)


_TENSORS = {"torch._utils._rebuild_tensor_v2": _tensor, "torch._utils._rebuild_tensor_v3": _tensor}


def _size(numbers: Any = ()) -> Made:
    _require(type(numbers) is tuple and all(map(_is_size, numbers)), "a torch.Size")
    return Made("torch.Size")


def _device(kind: Any, index: Any = 0) -> Made:
    _require(type(kind) is str and _LOCATION.fullmatch(kind) and type(index) is int, "a torch.device")
    return Made("torch.device")


def _bytes(text: Any, encoding: Any) -> bytes:
    _require(type(text) is str and encoding in ("latin1", "latin-1"), "bytes")
    return text.encode("latin-1")


def _no_bytes() -> bytes:
    return b""


def _bytearray(data: Any = b"", encoding: Any = "latin-1") -> Made:
    _require(type(data) is bytes or _bytes(data, encoding) is not None, "a bytearray")
    return Made("bytearray")


def _complex(real: Any, imaginary: Any) -> complex:
    _require(type(real) is float and type(imaginary) is float, "a complex number")
    return complex(real, imaginary)


def _set(items: Any = ()) -> Made:
    _require(type(items) in (list, tuple), "a set")
    for item in items:
        _require_key(item)
    return Made("set")


def _ordered() -> Mapping:
    return Mapping()


def _counter(counts: Any = ()) -> Mapping:
    _require(type(counts) in (dict, tuple) and (counts or counts in ({}, ())), "a Counter")
    _require(all(map(_is_plain, counts.values() if type(counts) is dict else counts)), "a Counter")
    return Mapping(counts)


def _array(kind: Any, shape: Any, code: Any) -> Made:
    is_array = isinstance(kind, Name) and kind.path == "numpy.ndarray"
    _require(is_array and shape == (0,) and code in (b"b", "b"), "a numpy array")
    return Made("numpy.ndarray", _array_state)


def _array_state(_: Made, state: Any) -> None:
    _require(type(state) is tuple and len(state) == 5 and state[0] == 1, "the state of a numpy array")
    _, shape, dtype, fortran, data = state
    _require(type(shape) is tuple and len(shape) <= _MAX_DIMS, "a numpy array's shape")
    _require(all(map(_is_size, shape)), "a numpy array's shape")
    _require(isinstance(dtype, Made) and dtype.item_bytes and type(data) is bytes, "a numpy array's data")
    _require(type(fortran) is bool and prod(shape) * dtype.item_bytes == len(data), "a numpy array's size")


def _dtype(code: Any, align: Any, copy: Any) -> Made:
    _require(type(code) is str and align in (False, 0) and copy in (True, 1), "a numpy.dtype")
    if not _NUMPY_DTYPE.fullmatch(code):
        raise NotAllowed(f"numpy.dtype({code[:20]!r})")
    return Made("numpy.dtype", _dtype_state, int(code[1:]))


def _dtype_state(_: Made, state: Any) -> None:
    plain = type(state) is tuple and len(state) == 8 and state[1] in ("<", ">", "|", "=")
    _require(plain and state[0] == 3 and state[2:] == (None, None, None, -1, -1, 0), "a numpy.dtype's state")


def _scalar(dtype: Any, data: Any) -> Made:
    is_number = isinstance(dtype, Made) and dtype.item_bytes and type(data) is bytes
    _require(is_number and len(data) == dtype.item_bytes, "a number of numpy's")
    return Made("numpy.number")


_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
_STAGES = ("disabled", "optimizer_states", "gradients", "weights")


def _stage(number: Any) -> Made:
    _require(type(number) is int and 0 <= number < len(_STAGES), "a ZeRO stage")
    return Made(_STAGE)


def _member(owner: Any, name: Any) -> Made:
    """Check getattr, by which members of an Enum were pickled before Python 3.11.4."""
    if not isinstance(owner, Name) or owner.path != _STAGE or name not in _STAGES:
        raise NotAllowed("builtins.getattr")
    return Made(_STAGE)


def _fields(*names: str) -> Callable[[Made, Any], None]:
    """Return the check of a state that sets no other attributes than these, to plain values."""

    def check(made: Made, state: Any) -> None:
        known = type(state) is dict and state.keys() <= set(names)
        _require(known and all(map(_is_plain, state.values())), f"the state of a {made.path}")

    return check


def _ordered_state(state: Any) -> None:
    """Check what `Module.state_dict` sets on its OrderedDict: the versions of modules."""
    _require(type(state) is dict and state.keys() <= {"_metadata"}, "the state of an OrderedDict")
    _require(all(type(one) in (Mapping, dict) for one in state.values()), "the state of an OrderedDict")


CALLS: dict[str, Callable[..., Any]] = {
    **_TENSORS,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch.Size": _size,
    "torch.device": _device,
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counter,
    "_codecs.encode": _bytes,
    "builtins.bytes": _no_bytes,  # numpy's array of no elements
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "builtins.set": _set,
    "builtins.getattr": _member,
    _STAGE: _stage,
    "numpy.dtype": _dtype,
    **{
        f"{module}.{name}": check
        for module in ("numpy._core.multiarray", "numpy.core.multiarray")  # of numpy 2, of numpy 1
        for name, check in (("_reconstruct", _array), ("scalar", _scalar))
    },
}
_SCALER = ("cur_scale", "dynamic", "dtype")
_DYNAMIC = (
    *_SCALER, "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "min_scale", "delayed_shift",
    "cur_hysteresis", "consecutive_hysteresis", "raise_error_at_min_scale",
)  # fmt: skip
# Classes that are made without a call of their own, and their attributes.
CLASSES: dict[str, Callable[[Made, Any], None]] = {
    "deepspeed.utils.tensor_fragment.fragment_address": _fields("numel", "start"),
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _fields(*_SCALER),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _fields(*_DYNAMIC),
}
VALUES = {*STORAGES, *DTYPES, "torch.Tensor", "numpy.ndarray"}  # not called, but handed on
# Safe globals of these packages (transformers marks some) are still checked here with their arguments.
_OURS = ("torch", "numpy")


class StandInReader:
    """Read one pickle.

    Args:
        file: at its beginning; afterwards at its end.
        trusted: full names that the user has marked by `torch.serialization.add_safe_globals`.
        legacy: storages have a fifth field, as in torch's format before 1.6.

    Attributes:
        storages: that the pickle names, by key.
    """

    def __init__(self, file: BinaryIO, trusted: Collection[str] = (), legacy: bool = False) -> None:
        self.storages: dict[str, StorageRecord] = {}
        self._file, self._legacy = file, legacy
        self._trusted = {name for name in trusted if name.partition(".")[0] not in _OURS}
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        """Return a symbol of the whole object.

        Raises:
            NotAllowed: it names an object that a checkpoint does not need.
            Malformed, ValueError, IndexError, KeyError: it is no pickle of torch.save.
        """
        for opcode, argument, _ in pickletools.genops(self._file):
            act = _OPCODES.get(opcode.name)
            _require(act, f"the opcode {opcode.name}")
            assert act is not None
            act(self, argument)
            if opcode.name == "STOP":
                break
        return self._stack.pop()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _mark(self, _: Any) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _tuple(self, count: int) -> None:
        items = [self._stack.pop() for _ in range(count)]
        self._push(tuple(reversed(items)))

    def _append(self, items: list[Any]) -> None:
        _require(type(self._stack[-1]) is list, "a list's item without a list")
        self._stack[-1].extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        _require(type(target) in (dict, Mapping) and len(items) % 2 == 0, "a dict's item without a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            _require_key(key)
            target[key] = value

    def _name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        module = IMPORT_MAPPING.get(module, module)
        path = f"{module}.{name}"
        if path not in CALLS and path not in CLASSES and path not in VALUES and path not in self._trusted:
            raise NotAllowed(path)
        self._push(Name(path))

    def _reduce(self, _: Any) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        _require(type(args) is tuple and isinstance(function, Name), "a call without a function")
        check = CALLS.get(function.path)
        if check is None:
            if function.path not in self._trusted:
                raise NotAllowed(f"a call of {function.path}")
            self._push(Made(function.path, lambda made, state: None))
            return
        try:
            self._push(check(*args))
        except TypeError:  # as many arguments as it does not take
            raise Malformed(f"{function.path} of {len(args)} arguments") from None

    def _new(self, _: Any) -> None:
        args, kind = self._stack.pop(), self._stack.pop()
        _require(type(args) is tuple and isinstance(kind, Name), "an object without a class")
        if kind.path not in CLASSES and kind.path not in self._trusted:
            raise NotAllowed(f"an object of {kind.path}")
        _require(not args or kind.path in self._trusted, f"an object of {kind.path} with arguments")
        self._push(Made(kind.path, CLASSES.get(kind.path, lambda made, state: None)))

    def _build(self, _: Any) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is Mapping:
            _ordered_state(state)
        elif isinstance(target, Made) and target.state is not None:
            target.state(target, state)
        else:
            raise Malformed(f"a state for {getattr(target, 'path', type(target).__name__)}")

    def _storage(self, _: Any) -> None:
        named = self._stack.pop()
        _require(type(named) is tuple and len(named) == 5 + self._legacy, "a storage's fields")
        _require(named[0] == "storage", "something else than a storage")
        _, kind, key, location, count, *view = named
        _require(isinstance(kind, Name) and kind.path in STORAGES, "a storage's type")
        _require(type(key) is str, "a storage's key")
        _require(type(location) is str and _LOCATION.fullmatch(location), "a storage's device")
        _require(_is_size(count) and view in ([], [None]), "a storage's size")
        item_bytes = STORAGES[kind.path]
        made = StorageRecord(item_bytes, count * item_bytes, key)
        known = self.storages.setdefault(key, made)
        same = (known.item_bytes, known.nbytes) == (made.item_bytes, made.nbytes)
        _require(same, f"the storage {key!s:.40} with two sizes")
        self._push(made)


def _memoize(reader: StandInReader, index: int) -> None:
    reader._memo[index] = reader._stack[-1]


def _pushed(value: Any) -> Callable[[StandInReader, Any], None]:
    return lambda reader, _: reader._push(value)


def _one_item(reader: StandInReader, count: int) -> list[Any]:
    return [reader._stack.pop() for _ in range(count)][::-1]


_OPCODES: dict[str, Callable[[StandInReader, Any], None]] = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"), StandInReader._push),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _memoize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda reader, index: reader._push(reader._memo[index])),
    "NONE": _pushed(None),
    "NEWTRUE": _pushed(True),
    "NEWFALSE": _pushed(False),
    "EMPTY_TUPLE": _pushed(()),
    "EMPTY_LIST": lambda reader, _: reader._push([]),
    "EMPTY_DICT": lambda reader, _: reader._push({}),
    "MARK": StandInReader._mark,
    "TUPLE": lambda reader, _: reader._push(tuple(reader._to_mark())),
    "TUPLE1": lambda reader, _: reader._tuple(1),
    "TUPLE2": lambda reader, _: reader._tuple(2),
    "TUPLE3": lambda reader, _: reader._tuple(3),
    "APPEND": lambda reader, _: reader._append(_one_item(reader, 1)),
    "APPENDS": lambda reader, _: reader._append(reader._to_mark()),
    "SETITEM": lambda reader, _: reader._set_items(_one_item(reader, 2)),
    "SETITEMS": lambda reader, _: reader._set_items(reader._to_mark()),
    "GLOBAL": StandInReader._name,
    "REDUCE": StandInReader._reduce,
    "NEWOBJ": StandInReader._new,
    "BUILD": StandInReader._build,
    "BINPERSID": StandInReader._storage,
    "PROTO": lambda reader, _: None,
    "STOP": lambda reader, _: None,
}


def read_zip(file: BinaryIO, trusted: Collection[str] = ()) -> None:
    """Read a file of torch's format since 1.6, by torch's own reader of the archive.

    Raises:
        NotAllowed, or any error of the readers for arbitrary bytes: as `StandInReader.read`.
    """
    file.seek(0)
    archive = torch._C.PyTorchFileReader(file)
    file_bytes = file.seek(0, SEEK_END)
    _require(_record_bytes(archive, "data.pkl") <= file_bytes, "a pickle longer than its file")
    reader = StandInReader(BytesIO(archive.get_record("data.pkl")), trusted)
    reader.read()
    for storage in reader.storages.values():
        found = _record_bytes(archive, f"data/{storage.key}")
        _require(found == storage.nbytes, f"{found} bytes for a storage of {storage.nbytes}")


def read_legacy(file: BinaryIO, trusted: Collection[str] = ()) -> None:
    """Read a file of torch's format before 1.6: five pickles, then the bytes of each storage and their count.

    Raises:
        NotAllowed, or any error of the reader for arbitrary bytes: as `StandInReader.read`.
    """
    file.seek(0)
    for _ in range(_LEGACY_HEADERS):
        StandInReader(file).read()
    reader = StandInReader(file, trusted, legacy=True)
    reader.read()
    keys = StandInReader(file).read()
    _require(type(keys) is list and sorted(keys) == sorted(reader.storages), "other storages than it has")
    begin = file.tell()
    left = file.seek(0, SEEK_END) - begin
    wanted = sum(storage.nbytes for storage in reader.storages.values())
    _require(wanted <= left, f"{left} bytes for storages of {wanted}")


def _record_bytes(archive: Any, name: str) -> int:
    """Return the size of a record, which torch 2.11 can only read."""
    size = getattr(archive, "get_record_size", None)
    return int(size(name)) if size is not None else len(archive.get_record(name))

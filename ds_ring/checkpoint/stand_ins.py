"""Read a file of torch.save symbolically: nothing that its pickle names is imported or called.

Owns the names and arguments that a checkpoint's pickles may have. torch's `weights_only` compares names
alone, and some allowed functions can be called so that the process ends: `numpy.ndarray((1,), "O", b"A" * 8)`
makes a pointer of the file's bytes, and a storage may claim more bytes than it has in the file.

[Note: pickles as stand-ins]
Python's own unpickler in Python reads the opcodes of torch's restricted one, and no others. A name of the
pickle becomes a `Name`, the result of a call a `Made`, a storage a `StorageRecord` with its size. A call is
compared with the calls that torch, numpy and DeepSpeed write where torch's unpickler accepts more than
those. A file that passes is then read by torch itself, which raises for all others: tensors beyond their
storage, or arguments of another type.
"""

from __future__ import annotations

import pickle
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from io import SEEK_END, BytesIO
from typing import Any, BinaryIO, ClassVar, NoReturn

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
DTYPES = {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
# numpy's that hold numbers; the byte order comes with the state.
_NUMPY_DTYPE = re.compile(r"b1|[iu][1248]|f[248]|c8|c16")
_LOCATION = re.compile(r"[a-z]{1,16}(:\d{1,4})?")


class NotAllowed(Exception):
    """A pickle names, or calls, what a checkpoint has no need of; the text is its name."""


class Malformed(Exception):
    """A pickle is not of torch.save; the text describes the difference."""


@dataclass(frozen=True, eq=False)
class Name:
    """Stand for a class, a function or a dtype that a pickle names; `trusted` if with any arguments."""

    path: str
    trusted: bool = False

    def __call__(self, *args: Any) -> Any:
        if self.path in CALLS:
            return CALLS[self.path](*args)
        if not self.trusted:
            raise NotAllowed(f"a call of {self.path}")
        return Made(self.path, lambda state: None)

    def make_new(self, args: tuple[Any, ...]) -> Made:
        """Return an object that is made without a call."""
        if self.path not in CLASSES and not self.trusted:
            raise NotAllowed(f"an object of {self.path}")
        _require(not args or self.trusted, f"an object of {self.path} with arguments")
        return Made(self.path, CLASSES.get(self.path, lambda state: None))

    def __setstate__(self, state: Any) -> NoReturn:
        raise Malformed(f"a state for {self.path}")


@dataclass(frozen=True, eq=False)
class StorageRecord:
    """Stand for the bytes of tensors."""

    item_bytes: int
    nbytes: int

    __setstate__ = Name.__setstate__


@dataclass(eq=False)
class Made:
    """Stand for what a call returns; `check_state` is of a state that is set on it, None if it takes none."""

    path: str
    check_state: Callable[[Any], object] | None = None
    item_bytes: int = 0  # of a dtype

    def __setstate__(self, state: Any) -> None:
        _require(self.check_state, f"a state for a {self.path}")
        assert self.check_state is not None
        self.check_state(state)


class Mapping(dict[Any, Any]):
    """Stand for an OrderedDict or a Counter."""

    def __setstate__(self, state: Any) -> None:
        """Check what `Module.state_dict` sets on its OrderedDict: the versions of modules."""
        _require(type(state) is dict and state.keys() <= {"_metadata"}, "the state of an OrderedDict")
        values = [type(value) for value in state.values()]
        _require(set(values) <= {Mapping, dict}, "the state of an OrderedDict")


def _require(holds: object, what: str) -> None:
    if not holds:
        raise Malformed(what)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_ELEMENTS


def _is_plain(value: object) -> bool:
    """Whether it is a number, a text, a dtype, or a flat list or tuple of them."""
    items: Any = value if type(value) in (list, tuple) else (value,)
    return all(type(item) in _PLAIN or (isinstance(item, Name) and item.path in DTYPES) for item in items)


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


def _make(path: str) -> Callable[..., Made]:
    """Return the check of a call whose arguments torch's unpickler checks itself."""
    return lambda *args: Made(path)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, *rest: Any) -> Made:
    """Check `torch._utils._rebuild_tensor_v2`, or _v3 where `rest` begins with a dtype."""
    _require(type(size) is tuple and len(size) <= _MAX_DIMS, "a tensor of too many dimensions")
    _require(type(grad) is bool and type(hooks) is Mapping and not hooks, "a tensor with hooks")
    metadata = rest[-1] if rest and not isinstance(rest[-1], Name) else None
    _require(
        metadata is None or (type(metadata) is dict and metadata.keys() <= {"conj", "neg"}), "a tensor's bits"
    )
    return Made("torch.Tensor")


def _parameter(data: Any, grad: Any, hooks: Any) -> Made:
    _require(type(grad) is bool and type(hooks) is Mapping and not hooks, "a parameter with hooks")
    return Made("torch.Tensor")


def _with_attributes(function: Any, kind: Any, args: Any, attributes: Any) -> Made:
    """Check a tensor that has attributes, such as DeepSpeed's `ds_id`."""
    _require(isinstance(function, Name) and function.path in _TENSORS, "a tensor's function")
    _require(isinstance(kind, Name) and kind.path == "torch.Tensor", "a tensor's type")
    for name, value in attributes.items():
        _require(type(name) is str and name.isidentifier(), "a tensor's attribute")
        _require(not hasattr(torch.Tensor, name) and _is_plain(value), f"the tensor's attribute {name:.40}")
    return _tensor(*args)


_TENSORS = {"torch._utils._rebuild_tensor_v2": _tensor, "torch._utils._rebuild_tensor_v3": _tensor}


def _bytes(text: Any, encoding: Any) -> bytes:
    _require(type(text) is str and encoding in ("latin1", "latin-1"), "bytes")
    return text.encode("latin-1")


def _bytearray(data: Any = b"", encoding: Any = "latin-1") -> Made:
    _require(type(data) is bytes or _bytes(data, encoding) is not None, "a bytearray")
    return Made("bytearray")


def _set(items: Any = ()) -> Made:
    _require(type(items) in (list, tuple), "a set")
    for item in items:
        _require_key(item)
    return Made("set")


def _counter(counts: Any = ()) -> Mapping:
    _require(type(counts) in (dict, tuple) and (counts or counts in ({}, ())), "a Counter")
    _require(all(map(_is_plain, counts.values() if type(counts) is dict else counts)), "a Counter")
    return Mapping(counts)


def _array(kind: Any, shape: Any, code: Any) -> Made:
    is_array = isinstance(kind, Name) and kind.path == "numpy.ndarray"
    _require(is_array and shape == (0,) and code in (b"b", "b"), "a numpy array")
    return Made("numpy.ndarray", _array_state)


def _array_state(state: Any) -> None:
    """Check the dtype: numpy compares the shape with the bytes."""
    *_, dtype, _, data = state
    _require(isinstance(dtype, Made) and dtype.item_bytes and type(data) is bytes, "a numpy array's data")


def _dtype(code: Any, align: Any, copy: Any) -> Made:
    _require(type(code) is str and align in (False, 0) and copy in (True, 1), "a numpy.dtype")
    if not _NUMPY_DTYPE.fullmatch(code):
        raise NotAllowed(f"numpy.dtype({code[:20]!r})")
    return Made("numpy.dtype", _dtype_state, int(code[1:]))


def _dtype_state(state: Any) -> None:
    plain = type(state) is tuple and len(state) == 8 and state[1] in ("<", ">", "|", "=")
    _require(plain and state[0] == 3 and state[2:] == (None, None, None, -1, -1, 0), "a numpy.dtype's state")


def _scalar(dtype: Any, data: Any) -> Made:
    _require(isinstance(dtype, Made) and dtype.item_bytes and type(data) is bytes, "a number of numpy's")
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


def _fields(*names: str) -> Callable[[Any], None]:
    """Return the check of a state that sets no other attributes than these, to plain values."""

    def check(state: Any) -> None:
        known = type(state) is dict and state.keys() <= set(names)
        _require(known and all(map(_is_plain, state.values())), "the state of an object")

    return check


CALLS: dict[str, Callable[..., Any]] = {
    **_TENSORS,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch.Size": _make("torch.Size"),
    "torch.device": _make("torch.device"),
    "collections.OrderedDict": lambda: Mapping(),
    "collections.Counter": _counter,
    "_codecs.encode": _bytes,
    "builtins.bytes": lambda: b"",  # numpy's array of no elements
    "builtins.bytearray": _bytearray,
    "builtins.complex": _make("complex"),
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
CLASSES: dict[str, Callable[[Any], None]] = {
    "deepspeed.utils.tensor_fragment.fragment_address": _fields("numel", "start"),
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _fields(*_SCALER),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _fields(*_DYNAMIC),
}
VALUES = {*STORAGES, *DTYPES, "torch.Tensor", "numpy.ndarray"}  # not called, but handed on
# Safe globals of these packages (transformers marks some) are still checked here with their arguments.
_OURS = ("torch", "numpy")


_OPCODES = (
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "BINPUT", "LONG_BINPUT", "BINGET",
    "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "MARK", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "GLOBAL", "REDUCE", "BUILD", "BINPERSID", "PROTO",
    "STOP",
)  # fmt: skip
_UNPICKLER: Any = pickle._Unpickler  # the one in Python, whose memo is a dict, and whose opcodes are a table


class StandInReader(_UNPICKLER):  # type: ignore[misc]
    """Read one pickle; `load` returns a symbol of the whole object.

    `load` raises NotAllowed where the pickle names an object that a checkpoint does not need, and Malformed
    or what arbitrary bytes make where it is no pickle of torch.save.

    Args:
        file: at its beginning; afterwards at its end.
        trusted: full names that the user has marked by `torch.serialization.add_safe_globals`.
        legacy: storages have a fifth field, as in torch's format before 1.6.

    Attributes:
        storages: that the pickle names, by key.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: _UNPICKLER.dispatch[code] for code in (getattr(pickle, name)[0] for name in _OPCODES)
    }

    def __init__(self, file: BinaryIO, trusted: Collection[str] = (), legacy: bool = False) -> None:
        super().__init__(file)
        self.storages: dict[str, StorageRecord] = {}
        self._legacy = legacy
        self._trusted = {name for name in trusted if name.partition(".")[0] not in _OURS}

    def find_class(self, module: str, name: str) -> Name:
        """Return a stand-in for what a pickle names, by its name in Python 3."""
        module, name = NAME_MAPPING.get((module, name), (module, name))
        path = f"{IMPORT_MAPPING.get(module, module)}.{name}"
        if path not in CALLS and path not in CLASSES and path not in VALUES and path not in self._trusted:
            raise NotAllowed(path)
        return Name(path, path in self._trusted)

    def persistent_load(self, fields: Any) -> StorageRecord:
        """Return a stand-in for a storage."""
        _require(type(fields) is tuple and len(fields) == 5 + self._legacy, "a storage's fields")
        tag, kind, key, location, count, *view = fields
        _require(tag == "storage" and type(key) is str, "something else than a storage")
        _require(isinstance(kind, Name) and kind.path in STORAGES, "a storage's type")
        _require(type(location) is str and _LOCATION.fullmatch(location), "a storage's device")
        _require(_is_size(count) and view in ([], [None]), "a storage's size")
        record = StorageRecord(STORAGES[kind.path], count * STORAGES[kind.path])
        known = self.storages.setdefault(key, record)
        _require(vars(known) == vars(record), f"the storage {key!s:.40} with two sizes")
        return record

    def load_newobj(self) -> None:
        """Make an object without a call."""
        args, kind = self.stack.pop(), self.stack.pop()
        _require(type(args) is tuple and isinstance(kind, Name), "an object without a class")
        self.append(kind.make_new(args))

    def load_setitem(self) -> None:
        """Set one item of a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        """Set the items of a dict down to the mark."""
        self._set_items(self.pop_mark())

    def _set_items(self, items: Sequence[Any]) -> None:
        target = self.stack[-1]
        _require(type(target) in (dict, Mapping) and len(items) % 2 == 0, "a dict's item without a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            _require_key(key)
            target[key] = value

    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


def read_zip(file: BinaryIO, trusted: Collection[str] = ()) -> None:
    """Read a file of torch's format since 1.6, by torch's own reader of the archive.

    Raises:
        NotAllowed, or any error of the readers for arbitrary bytes: as `StandInReader.load`.
    """
    file.seek(0)
    archive = torch._C.PyTorchFileReader(file)
    file_bytes = file.seek(0, SEEK_END)
    _require(_record_bytes(archive, "data.pkl") <= file_bytes, "a pickle longer than its file")
    reader = StandInReader(BytesIO(archive.get_record("data.pkl")), trusted)
    reader.load()
    for key, storage in reader.storages.items():
        nbytes = _record_bytes(archive, f"data/{key}")
        _require(nbytes == storage.nbytes, f"{nbytes} bytes for a storage of {storage.nbytes}")


def read_legacy(file: BinaryIO, trusted: Collection[str] = ()) -> None:
    """Read a file of torch's format before 1.6: five pickles, then the bytes of each storage and their count.

    Raises:
        NotAllowed, or any error of the reader for arbitrary bytes: as `StandInReader.load`.
    """
    file.seek(0)
    for _ in range(_LEGACY_HEADERS):
        StandInReader(file).load()
    reader = StandInReader(file, trusted, legacy=True)
    reader.load()
    keys = StandInReader(file).load()
    _require(type(keys) is list and sorted(keys) == sorted(reader.storages), "other storages than it has")
    begin = file.tell()
    left = file.seek(0, SEEK_END) - begin
    wanted = sum(storage.nbytes for storage in reader.storages.values())
    _require(wanted <= left, f"{left} bytes for storages of {wanted}")


def _record_bytes(archive: Any, name: str) -> int:
    """Return the size of a record, which torch 2.11 can only read."""
    size = getattr(archive, "get_record_size", None)
    return int(size(name)) if size is not None else len(archive.get_record(name))

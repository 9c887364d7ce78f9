"""Find what there are several of: layouts, kernels, passes, patterns, model families, keys of the JSON.

A capability is a folder with a `plugin.py`, whose `PLUGIN` holds its rows. `plugins.json` is an index of
these files (`python tools/plugin_index.py` writes it): it has the dotted name of each object, which is
imported at its first use, so that words need neither torch nor numpy and an unused capability costs no
import. Rows of a folder that is not there are left out: deleting a folder removes a capability. Other
packages add rows of their own by the entry point group `ds_ring.plugins`.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from ds_ring.compat import EXTRAS, make_missing_error
from ds_ring.errors import RingConfigError

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
INDEX = _FOLDER / "plugins.json"
GROUP = "ds_ring.plugins"


class JsonKey(NamedTuple):
    """The key of the JSON's "pattern" section for a pattern that takes a number of tokens.

    Attributes:
        name: the key.
        meaning: of the pattern with n tokens.
        conflicts: other keys with which the pattern has no effect, and the reasons ("which ...").
    """

    name: str
    meaning: str
    conflicts: Mapping[str, str] = {}


# Objects in rows are functions and classes in a plugin.py of ds_ring, and dotted names in the index and in
# other packages, whose rows are read before ds_ring's modules are imported; `load` takes both.
Object = Any


class LayoutRow(NamedTuple):
    """Say where a layout is made.

    All are functions of tokens T, ring size P, what each shard's slots are a multiple of, and the patterns
    (`Mix`).

    Attributes:
        home: returns the layout.
        if_uneven: returns candidates for "auto" where contiguous and zigzag are uneven.
        always: returns candidates that "auto" compares with contiguous and zigzag, for their own patterns.
        for_labels: returns layouts that keep tokens of equal labels on few ranks; "auto" compares them, too,
            where contiguous and zigzag are uneven, and takes the one whose modelled time is least.
        for_blocks: returns layouts that "auto" compares for a kernel in blocks; None: not for these patterns.
    """

    home: Object
    if_uneven: Object = None
    always: Object = None
    for_blocks: Object = None
    for_labels: Object = None


class KernelRow(NamedTuple):
    """Describe a kernel without importing it.

    Attributes:
        home: the class.
        device: the kind of device for which "auto" takes the kernel; None: for none.
        anywhere: whether it also runs on other kinds of devices.
        first_for: kinds of tiles (`Pattern.tile_kind`) for which "auto" prefers it to the kernel that the
            device has for all patterns; empty for that kernel.
        takes_blocks: whether it takes `block_size` of the JSON.
        rates_layouts: function that rates the candidates of the layout "auto" by the work of its blocks.
        takes_scores: whether it can change scores pair by pair (`score_mod`).
        refuses: function of `KernelNeeds` that returns the error for what the kernel cannot do, or None;
            None: it can do all.
        workspace: function that returns its allocations; None if unknown.
    """

    home: Object
    device: str | None = None
    anywhere: bool = False
    first_for: tuple[str, ...] = ()
    takes_blocks: bool = False
    rates_layouts: Object = None
    takes_scores: bool = False
    refuses: Object = None
    workspace: Object = None

    def runs_on(self, device_type: str) -> bool:
        """Return whether it runs on a kind of device."""
        return self.anywhere or self.device in (None, device_type)


class DeviceRow(NamedTuple):
    """Name what ring passes use on a kind of device, beside its kernels.

    Attributes:
        streams: class that orders the streams of a device; without a row the host waits.
        watchdog: class that enforces the deadlines of messages for which a stream waits.
        merge: function that merges partial results in one pass over memory; without it torch's operators do.
        patience: function of the seconds that a rank asks the others for, because it compiles.
        warm_up: function that makes the first calls of new process groups; without it the first pass does.
    """

    streams: Object
    watchdog: Object
    merge: Object
    patience: Object
    warm_up: Object


class PassRow(NamedTuple):
    """Say where a pass is made, and what others must know before it is imported.

    A pass attends over the keys of all ranks, forward and backward (`Pass` in `ops/passes.py`).

    Attributes:
        home: function that makes it: of the context, `Prepared`, and what ends the header check.
        no_hops: why payload dtypes, chunks, stages and overlap have no effect; None: K/V go hop by hop.
        no_offload: why its operands cannot wait on the host; None: they can.
        no_hop_sums: why no kernel may keep a sum over the hops of a rank; None: one may.
        whole_blocks: its layouts have runs of whole blocks of `block_size` tokens.
        checks_layout: function of a layout and `block_size` that raises RingLayoutError for one that has not.
        few_queries: function that makes its forward pass of queries that all ranks have; None: the usual.
        plans: function that makes its plan of a ring's, with the ranks of a node, the most bytes of a stage
            and the bytes of K and V of a token; None: it goes by the ring's.
    """

    home: Object
    no_hops: str | None = None
    no_offload: str | None = None
    no_hop_sums: str | None = None
    whole_blocks: bool = False
    checks_layout: Object = None
    few_queries: Object = None
    plans: Object = None


class PayloadRow(NamedTuple):
    """Describe how dK and dV travel.

    Attributes:
        element_bytes: bytes of an element in a message.
        exact: what arrives equals what was sent.
    """

    element_bytes: int
    exact: bool = True


class Plugin(NamedTuple):
    """The rows of a capability, by kind and name.

    Attributes:
        order: the place of its rows among those of other capabilities: lower ones come first.
        requires: folders of other capabilities, "layers/scan", without which this one is left out.
        needs: packages that its objects import, and the extra of ds_ring that installs them ("" for none).
        layouts, kernels, devices, passes: values of keys of the JSON, and what is used on a kind of device.
        gradient_payloads: the values of "gradient_payload". Gradients are added in the accumulators' dtype:
            [Note: where gradients are added] in `schedule/head_class.py`.
        patterns: patterns that have a `json_key`, by their names.
        pattern_keys: further keys of "pattern" (`FurtherKeys` in `config/messages.py`), in the order in which
            their patterns are composed.
        json_keys: keys of the section, subclasses of `Section` in `config/messages.py`.
        part_keys: keys of a part of the section, by "part.capability" (`PartKeys` in `config/messages.py`).
        rates: what finds the fastest of some kernels on a kind of device, by measured rates.
        tracers: what makes a function of pairs a value that ranks compare. `for_heads` returns `Scores` in
            `kernels/pairs.py`; `captured` holds what a function captured.
        saved_tensors: what keeps tensors for a pass's gradient (`SavedTensors` in `ops/passes.py`).
        engine_parts: what is added to an engine (`EnginePart`), from the inside out.
        model_parts: what is added to a transformers model (`ModelPart`).
        families: attention variants of transformers models (`Variant` in `models/variant.py`): one that
            chooses which sequence a layer reads comes before those that attend.
        row_kinds: kinds of rows by the tensor of a batch that has their patterns (`RowKind`).
        session_methods: functions that are methods of `engine.ring`: the first argument is the session.
        trainers: functions that put the trainers of a package on a ring, for `ds_ring.enable`.
        hooks: functions and classes that other capabilities use if they are there, by their own names.
    """

    order: int = 0
    requires: tuple[str, ...] = ()
    needs: Mapping[str, str] = {}
    layouts: Mapping[str, LayoutRow] = {}
    kernels: Mapping[str, KernelRow] = {}
    devices: Mapping[str, DeviceRow] = {}
    passes: Mapping[str, PassRow] = {}
    gradient_payloads: Mapping[str, PayloadRow] = {}
    patterns: Mapping[str, Object] = {}
    pattern_keys: Mapping[str, Object] = {}
    json_keys: Mapping[str, Object] = {}
    part_keys: Mapping[str, Object] = {}
    rates: Mapping[str, Object] = {}
    tracers: Mapping[str, Object] = {}
    saved_tensors: Mapping[str, Object] = {}
    engine_parts: Mapping[str, Object] = {}
    model_parts: Mapping[str, Object] = {}
    families: Mapping[str, Object] = {}
    row_kinds: Mapping[str, Object] = {}
    session_methods: Mapping[str, Object] = {}
    trainers: Mapping[str, Object] = {}
    hooks: Mapping[str, Object] = {}


_ROW_TYPES: dict[str, Any] = {
    "layouts": LayoutRow, "kernels": KernelRow, "devices": DeviceRow, "passes": PassRow,
    "gradient_payloads": PayloadRow,
}  # fmt: skip
KINDS = [name for name, value in Plugin._field_defaults.items() if value == {} and name != "needs"]


_FIELDS: dict[str, dict[str, Any]] = json.loads(INDEX.read_text())  # of each `Plugin`, by folder


def _read_index() -> dict[str, Plugin]:
    """Return the plug-ins whose folders and required folders are there, in the order of their rows."""
    plugins: dict[str, Plugin] = {}
    for folder, fields in _FIELDS.items():
        rows = {
            kind: {name: row_type(**row) for name, row in fields[kind].items()}
            for kind, row_type in _ROW_TYPES.items()
            if kind in fields
        }
        plugins[folder] = Plugin(**fields | rows)
    is_there = {folder: (_FOLDER / folder / "plugin.py").is_file() for folder in plugins}

    def is_whole(folder: str) -> bool:
        return is_there.get(folder, False) and all(map(is_whole, plugins[folder].requires))

    return {folder: plugin for folder, plugin in plugins.items() if is_whole(folder)}


def _read_entry_points() -> dict[str, Plugin]:
    """Return the plug-ins of other packages.

    Raises:
        RingConfigError: an entry point cannot be imported, or is no `Plugin`.
    """
    plugins = {}
    for point in entry_points(group=GROUP):
        where = f"the entry point {point.name} = {point.value} of {GROUP}"
        try:
            plugin = point.load()
        except Exception as error:
            advice = "import ds_ring.plugin alone there, and write objects as 'package.module.name'"
            raise RingConfigError.wrong(where, "a ds_ring.plugin.Plugin", repr(error), advice) from error
        if not isinstance(plugin, Plugin):
            raise RingConfigError.wrong(where, "a ds_ring.plugin.Plugin", type(plugin).__name__, "name one")
        plugins[where] = plugin
    return plugins


def _table(kind: str) -> dict[str, Any]:
    """Return the rows of a kind by name; raise RingConfigError if two plug-ins have one name."""
    rows: dict[str, Any] = {}
    for home, plugin in PLUGINS.items():
        for name, row in getattr(plugin, kind).items():
            if name in rows:
                raise RingConfigError.wrong(
                    f"plug-ins: {kind}", f"one row {name!r}", f"two ({home})", "rename it"
                )
            rows[name] = row
    return rows


def load(home: Object) -> Any:
    """Import what a row names, "package.module.name"; an object itself is returned as it is.

    Raises:
        RingConfigError: a package is missing that the plug-in needs.
    """
    if not isinstance(home, str):
        return home
    module, _, name = home.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        folder = module.replace(".", "/").removeprefix("ds_ring/")
        for place, plugin in PLUGINS.items():
            if missing in plugin.needs and f"{folder}/".startswith(f"{place}/"):
                raise make_missing_error(place, missing, plugin.needs[missing]) from error
        if missing in EXTRAS:
            raise make_missing_error(name, missing) from error
        raise


def load_available(rows: Mapping[str, Object]) -> list[Any]:
    """Import what rows name, but for those of which the installed version of a package lacks something."""
    objects = []
    for name, home in rows.items():
        try:
            objects.append(load(home))
        except ImportError as error:
            if (error.name or "ds_ring").partition(".")[0] == "ds_ring":
                raise
            _warn_left_out(name, str(error).partition(" (")[0])
    return objects


@functools.lru_cache(maxsize=64)
def _warn_left_out(name: str, why: str) -> None:
    log.warning("%s is left out, and models that need it are refused: %s; install a later version", name, why)


PLUGINS = _read_index()
_MISSING = tuple(f"ds_ring.{folder.replace('/', '.')}." for folder in _FIELDS if folder not in PLUGINS)
PLUGINS |= _read_entry_points()

LAYOUTS: dict[str, LayoutRow] = _table("layouts")
KERNELS: dict[str, KernelRow] = _table("kernels")
DEVICES: dict[str, DeviceRow] = _table("devices")
PASSES: dict[str, PassRow] = _table("passes")
GRADIENT_PAYLOADS: dict[str, PayloadRow] = _table("gradient_payloads")
PATTERNS, PATTERN_KEYS, JSON_KEYS = _table("patterns"), _table("pattern_keys"), _table("json_keys")
PART_KEYS, RATES, TRACERS = _table("part_keys"), _table("rates"), _table("tracers")
SAVED_TENSORS, ENGINE_PARTS = _table("saved_tensors"), _table("engine_parts")
MODEL_PARTS, FAMILIES, ROW_KINDS = _table("model_parts"), _table("families"), _table("row_kinds")
SESSION_METHODS = _table("session_methods")
TRAINERS, HOOKS = _table("trainers"), _table("hooks")

# What "auto" takes on a kind of device, for all patterns.
FAST_KERNELS = {
    row.device: name for name, row in KERNELS.items() if row.device is not None and not row.first_for
}


def _public_names() -> dict[str, str]:
    """Return the public names of `ds_ring` and where they are: lines of __init__.pyi, for type checkers, too.

    Names of a capability that is not there are left out.
    """
    lines = (line.split() for line in (_FOLDER / "__init__.pyi").read_text().splitlines())
    names = {line[-1]: f"{line[1]}.{line[3]}" for line in lines if line[:1] == ["from"]}
    return {name: home for name, home in names.items() if not home.startswith(_MISSING)}


PUBLIC = _public_names()


def unmeasured(device_type: str, kinds: Iterable[str], able: Iterable[str]) -> str:
    """Return the kernel that "auto" takes without rates; see [Note: which kernel auto is].

    Args:
        device_type: "cpu" or "cuda".
        kinds: of the tiles: of `Pattern.tile_kind`.
        able: names of the kernels that can compute it.
    """
    first = (name for name in able if KERNELS[name].device == device_type and KERNELS[name].first_for)
    kinds = set(kinds)
    return next(
        (name for name in first if kinds.issubset(KERNELS[name].first_for)), FAST_KERNELS[device_type]
    )


def make_index() -> str:
    """Return the text of `plugins.json`: the rows of every plugin.py, with dotted names for their objects."""
    plugins = {}
    for path in _FOLDER.rglob("plugin.py"):
        if path != Path(__file__):
            folder = path.parent.relative_to(_FOLDER).as_posix()
            plugins[folder] = import_module(f"ds_ring.{folder.replace('/', '.')}.plugin").PLUGIN
    ordered = sorted(plugins.items(), key=lambda item: (item[1].order, item[0]))
    return json.dumps({folder: _as_json(plugin) for folder, plugin in ordered}, indent=1) + "\n"


def _as_json(value: Any) -> Any:
    if hasattr(value, "_field_defaults"):  # a row: without its defaults
        fields = value._asdict().items()
        return {name: _as_json(x) for name, x in fields if x != value._field_defaults.get(name, ...)}
    if isinstance(value, Mapping):
        return {name: _as_json(x) for name, x in value.items()}
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return value

"""Patches of other packages: everything that ds_ring replaces, wraps or hooks there.

`@patch(owner, "name", stage=...)` decorates the replacement, and adds a row to the table of a
package. `apply` makes the change, `undo` takes it back, `describe` prints the rows. No other file assigns an
attribute of a foreign object or registers a hook; tests/test_architecture.py checks this.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import pkgutil
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

from ds_ring.errors import RingConfigError

PatchStage = Literal[
    "at_import", "at_enable", "at_initialize", "at_exit", "in_loader", "around_init", "around_call",
    "before_forward", "around_forward", "after_forward", "around_loss", "around_generate", "in_backward",
    "around_backward", "around_step", "around_save", "around_load", "around_compile", "around_off",
]  # fmt: skip
PatchKind = Literal["replaced", "wrapped", "hook", "set", "added", "registered"]
_HOOKS = {
    "before_forward": "register_forward_pre_hook",
    "after_forward": "register_forward_hook",
    "in_backward": "register_hook",  # of a tensor
}
F = TypeVar("F", bound=Callable[..., Any])


class PatchTable:
    """The rows of one package, in the order in which their files are imported.

    Args:
        package: the distribution whose objects the rows change.
        versions: of it, for which the rows were written.
    """

    def __init__(self, package: str, versions: str) -> None:
        self.package, self.versions = package, versions
        self.rows: list[Patch] = []
        _tables.append(self)

    def given(self, path: str, class_name: str = "") -> Owner:
        """Return the owner that `apply` is given by name ("engine"), or an object in it ("engine._config").

        Args:
            path: the name, with which targets begin.
            class_name: the dotted name of its class, in which `check` looks for attributes; "" for any class.
        """
        return Owner(self, path, class_name)

    def imported(self, path: str) -> Owner:
        """Return the owner that is a module, or a class or a dictionary in one, by its dotted name."""
        return Owner(self, path, None)

    def check(self) -> None:
        """Raise RingConfigError for the first row whose target the installed package does not have."""
        for row in (row for row in self.rows if row.available):
            try:
                is_there = _is_there(row)
            except (ImportError, AttributeError, KeyError):
                is_there = False
            if not is_there:
                raise _lacks(row)


@dataclass(frozen=True)
class Owner:
    """An object that rows of a table change; made by `PatchTable.given` or `PatchTable.imported`.

    Attributes:
        class_name: of an object that is given to `apply`, its class; None for an imported object.
    """

    table: PatchTable
    path: str
    class_name: str | None

    @property
    def root(self) -> str:
        """Return the name by which `apply` is given the object."""
        return self.path.partition(".")[0]

    def find(self, objects: Mapping[str, Any]) -> Any:
        """Return the owner itself; `objects` are those given to `apply`."""
        if self.class_name is None:
            return pkgutil.resolve_name(self.path)
        return functools.reduce(getattr, self.path.split(".")[1:], objects[self.root])


@dataclass(frozen=True)
class Patch:
    """A row of a table: one change to an object of another package.

    Attributes:
        owner: of the changed attribute.
        name: of the attribute; "" for a hook on the owner itself.
        stage: when the change acts.
        kind: of the replacement. "wrapped": a function f(original, *args, **kwargs). "replaced", "set"
            or "added" (a new attribute): the value. "hook": a function that torch calls, with keyword
            arguments too (or with the gradient, if the owner is a tensor). "registered": a function without
            arguments, which `apply` calls and which changes the owner in an official way; it may return a
            function that takes the change back.
        feature: name of the feature that needs the change; "checkpoint.files" is a part of "checkpoint".
        when: the condition in words; "" if always.
        options: names of options of the hook's registration that are True.
        available: whether the installed version needs the row, as a probe in `compat/` says.
    """

    owner: Owner
    name: str
    stage: PatchStage
    kind: PatchKind
    feature: str
    reason: str
    when: str = ""
    options: tuple[str, ...] = ()
    available: bool = True

    @property
    def target(self) -> str:
        """Return the dotted name of the changed attribute."""
        return f"{self.owner.path}.{self.name}" if self.name else self.owner.path

    @property
    def main_feature(self) -> str:
        """Return the feature of which the row's is a part."""
        return self.feature.partition(".")[0]

    def __str__(self) -> str:
        why = f"{self.reason}; if {self.when}" if self.when else self.reason
        return f"{self.stage:<15} {self.kind:<10} {self.target} ({self.feature}): {why}"


@dataclass(frozen=True)
class AppliedPatch:
    """An applied row. `undo` takes it back; `handle` is the one of a hook; `owner` is what was changed."""

    row: Patch
    undo: Callable[[], object]
    handle: Any = None
    owner: Any = None


_tables: list[PatchTable] = []
_ENDING = ("engine", "tensor")  # objects whose changes end with them; others are taken back with the session
# applied rows, in the order of application: of classes, modules and the interpreter, and of each session
_of_process: dict[Patch, None] = {}
_of_session: weakref.WeakKeyDictionary[Any, dict[Patch, None]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class PatchRows:
    """PatchRows with one replacement: a decorator of the function or class that it is."""

    rows: tuple[Patch, ...]

    def __call__(self, replacement: F) -> F:
        marked: Any = replacement
        marked.patch_rows = (*self.rows, *getattr(replacement, "patch_rows", ()))
        return replacement

    def to(self, value: Any) -> BoundPatch:
        """Return the rows with a value, for `apply`."""
        return BoundPatch(self.rows, value)


@dataclass(frozen=True)
class BoundPatch:
    """PatchRows and what they put in place."""

    patch_rows: tuple[Patch, ...]
    value: Any


def patch(
    owner: Owner,
    *names: str,
    stage: PatchStage,
    feature: str,
    reason: str,
    kind: PatchKind | None = None,
    when: str = "",
    options: tuple[str, ...] = (),
    available: bool = True,
) -> PatchRows:
    """Add a row for each of the owner's attributes `names`, or for a hook on the owner if there are none.

    It decorates the replacement, in a module or in a class there. A replacement that is made later takes its
    rows from the module: `rows = patch(...)`, then `@rows` or `rows.to(value)`.

    Args:
        kind: by default "hook" without names, and "wrapped" with names.
        stage, feature, reason, when, options, available: of `Patch`.
    """
    kind = kind or ("wrapped" if names else "hook")
    rows = [
        Patch(owner, name, stage, kind, feature, reason, when, options, available) for name in names or ("",)
    ]
    owner.table.rows += rows
    return PatchRows(tuple(rows))


def apply(*replacements: Any, session: Any = None, **objects: Any) -> list[AppliedPatch]:
    """Apply the rows of replacements to `objects`, in this order; all of them or none.

    Of two rows that wrap one method, the later one is outside.

    Args:
        replacements: functions and classes that `patch` decorates, partials of such functions, objects that
            have such methods, or `PatchRows.to(value)`.
        session: the session for which `describe` lists the rows; None for changes of the whole process. Its
            list `changes`, if it has one, gets those of objects that may outlive it.
        objects: by the names with which targets begin. PatchRows of objects that are not given are left out.

    Raises:
        RingConfigError: the installed package has no such target.
    """
    changes = _apply_all(replacements, objects)
    _note(changes, session)
    record = getattr(session, "changes", None)
    if record is not None:
        known = {(change.row.target, id(change.owner)) for change in record}
        record += [
            change
            for change in changes
            if change.row.owner.root not in _ENDING
            # What was set twice is as it was before the first time.
            and (change.row.kind != "set" or (change.row.target, id(change.owner)) not in known)
        ]
    return changes


@contextmanager
def applied(*replacements: Any, session: Any = None, **objects: Any) -> Iterator[None]:
    """Apply the rows inside the context only; without a session `describe` does not learn of it."""
    changes = _apply_all(replacements, objects)
    if session is not None:
        _note(changes, session)
    try:
        yield
    finally:
        undo(changes)


def undo(changes: list[AppliedPatch]) -> None:
    """Take changes back, the latest first."""
    while changes:
        changes.pop().undo()


@contextmanager
def paused(changes: Sequence[AppliedPatch]) -> Iterator[None]:
    """Remove the hooks of `changes` inside the context; afterwards all hooks have their order again."""
    keys = [
        (change.handle.hooks_dict_ref(), change.handle.id) for change in changes if change.handle is not None
    ]
    ours = [(hooks, key) for hooks, key in keys if hooks is not None and key in hooks]
    before = [(hooks, dict(hooks)) for hooks in {id(hooks): hooks for hooks, _ in ours}.values()]
    for hooks, key in ours:
        del hooks[key]
    try:
        yield
    finally:
        for hooks, order in before:
            mine = {key for others, key in ours if others is hooks}
            now = dict(hooks)
            hooks.clear()
            hooks.update({key: hook for key, hook in order.items() if key in mine or key in now} | now)


def describe(session: Any) -> str:
    """Return the rows that apply to a session and its process, by table, in the order of application.

    PatchRows of their features that were not applied yet come last.
    """
    rows = _of_process | _of_session.get(session, {})
    features = {(row.owner.table, row.main_feature) for row in rows}
    waiting = [
        row
        for table in _tables
        for row in table.rows
        if (table, row.main_feature) in features and row.available
    ]
    return _printed(dict.fromkeys([*rows, *waiting]))


def describe_all() -> str:
    """Return the rows of all tables, after an import of all files that have some."""
    import_all()
    return _printed(row for table in _tables for row in table.rows)


def import_all() -> None:
    """Import the files that have rows; those for a package that is not installed are left out."""
    for file in pkgutil.walk_packages([str(Path(__file__).parent)], "ds_ring."):
        loader: Any = importlib.util.find_spec(file.name).loader  # type: ignore[union-attr]
        if not re.search(r"\bpatch\b|\bPatchTable\b", loader.get_source(file.name)):
            continue
        try:
            importlib.import_module(file.name)
        except ModuleNotFoundError as error:
            if is_own_fault(error):
                raise


def is_own_fault(error: ImportError) -> bool:
    """Return whether ds_ring itself lacks what is imported: no version of another package has it."""
    return (error.name or "").partition(".")[0] == "ds_ring"


@contextmanager
def guard_imports(feature: str, package: str, since: str = "") -> Iterator[None]:
    """Refuse a feature by its name if an import inside fails: the installed package lacks something.

    Raises:
        RingConfigError: in place of the ImportError, but for one of ds_ring's own modules.
    """
    try:
        yield
    except ImportError as error:
        if is_own_fault(error):
            raise
        raise RingConfigError(
            f"{feature}: expected another version of {package}, got {version(package)}: {error};"
            f" install {since or 'one'}"
        ) from error


def find_patched(module: str, execute: Callable[..., None]) -> ModuleSpec | None:
    """Find a module as other finders do, with a replacement of its loader's `exec_module` applied."""
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.loader is not None:
        apply(execute, loader=spec.loader)
    return spec


def _printed(rows: Iterable[Patch]) -> str:
    by_table: dict[PatchTable, list[str]] = {table: [] for table in _tables}
    for row in rows:
        by_table[row.owner.table].append(f"  {row}")
    return "\n".join(
        line
        for table, lines in by_table.items()
        for line in ([f"{table.package} {table.versions}", *lines] if lines else [])
    )


def _note(changes: Sequence[AppliedPatch], session: Any) -> None:
    noted = _of_process if session is None else _of_session.setdefault(session, {})
    noted.update((change.row, None) for change in changes)


def _bound(replacement: Any) -> Iterator[BoundPatch]:
    """Yield the rows of a replacement with what they put in place."""
    marked = replacement.func if isinstance(replacement, functools.partial) else replacement
    if hasattr(marked, "patch_rows"):
        yield (
            replacement if isinstance(replacement, BoundPatch) else BoundPatch(marked.patch_rows, replacement)
        )
        return
    # In the order in which the bases and the class define them.
    names = dict.fromkeys(name for kind in reversed(type(replacement).__mro__) for name in vars(kind))
    methods = [name for name in names if hasattr(getattr(type(replacement), name, None), "patch_rows")]
    assert methods, f"{replacement!r}: expected what `patch` decorates, got none of it"
    for method in (getattr(replacement, name) for name in methods):
        yield BoundPatch(method.patch_rows, method)


def _apply_all(replacements: Iterable[Any], objects: Mapping[str, Any]) -> list[AppliedPatch]:
    changes: list[AppliedPatch] = []
    try:
        for bound in itertools.chain.from_iterable(map(_bound, replacements)):
            for row in bound.patch_rows:
                is_given = row.owner.class_name is None or row.owner.root in objects
                if is_given and row.available:
                    changes.append(_apply(row, bound.value, objects))
    except BaseException:
        undo(changes)
        raise
    return changes


def _apply(row: Patch, value: Any, objects: Mapping[str, Any]) -> AppliedPatch:
    if row.kind == "registered":
        back = value()
        return AppliedPatch(row, back if callable(back) else lambda: None)
    name = row.name
    try:
        owner = row.owner.find(objects)
        before = None if row.kind in ("added", "hook") else _get(owner, name)
    except (ImportError, AttributeError, KeyError):
        raise _lacks(row) from None
    if row.kind == "hook":
        options = {} if row.stage == "in_backward" else dict.fromkeys(("with_kwargs", *row.options), True)
        handle = getattr(owner, _HOOKS[row.stage])(value, **options)
        return AppliedPatch(row, handle.remove, handle, owner)
    is_set_here = name in (owner if type(owner) is dict else vars(owner))
    # or a property that can be set
    is_set_here = is_set_here or name == "__class__" or hasattr(getattr(type(owner), name, None), "__set__")
    _set(owner, name, _wrapped(before, value) if row.kind == "wrapped" else value)
    back = (lambda: _set(owner, name, before)) if is_set_here else (lambda: _delete(owner, name))
    return AppliedPatch(row, back, owner=owner)


def _wrapped(call: Any, part: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return part(call, *args, **kwargs)

    return wrapped


def _get(owner: Any, name: str) -> Any:
    return owner[name] if type(owner) is dict else getattr(owner, name)


def _set(owner: Any, name: str, value: Any) -> None:
    if type(owner) is dict:
        owner[name] = value
    else:
        setattr(owner, name, value)


def _delete(owner: Any, name: str) -> None:
    with suppress(AttributeError):  # somebody else has taken it away
        delattr(owner, name)


def _is_there(row: Patch) -> bool:
    """Return whether the installed package has the target; raises the errors of looking for it."""
    owner, name = row.owner, row.name
    if owner.class_name is None:
        parent = owner.find({})
        if row.kind != "added":
            _get(parent, name)
        return True
    if not owner.class_name:
        return True
    kind = pkgutil.resolve_name(owner.class_name)
    # Objects have what their class has, or what a method of it assigns.
    assigned = re.compile(rf"self\.{name}\b[^=\n]*=").search
    sources = (inspect.getsource(base) for base in kind.__mro__[:-1])
    return not name or row.kind == "added" or hasattr(kind, name) or any(map(assigned, sources))


def _lacks(row: Patch) -> RingConfigError:
    table = row.owner.table
    return RingConfigError(
        f"{row.target}: expected it in {table.package} {table.versions}, got {table.package}"
        f" {version(table.package)} without it; install a version that this row was written for: {row}"
    )

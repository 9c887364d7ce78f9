"""Tables of everything that ds_ring replaces, wraps or hooks in another package.

Each adapter (for DeepSpeed, for transformers, for trainers) holds one table. No other file assigns an
attribute of a foreign object or registers a hook; tests/test_architecture.py checks this.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

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


@dataclass(frozen=True)
class Patch:
    """One change to an object of another package.

    Attributes:
        target: "torch.load", or an attribute of an object that `apply` is given by name: "engine.step".
            The target of a hook is the object itself: "engine".
        stage: when the change acts. The feature has a part of this name: feature.around_step, say.
        kind: what the part is. "wrapped": a function f(original, *args, **kwargs). "replaced", "set" or
            "added" (a new attribute): the value. "hook": a function that torch calls, with keyword arguments
            too (or with the gradient, if the target is a tensor). "registered": a function without arguments,
            which `apply` calls and which changes the target in an official way; it may return what takes the
            change back.
        feature: name of what asks for the change; "checkpoint.files" is a part of "checkpoint".
        versions: of the table's package, as in pip ("<0.20"); "" if the row is for all supported versions.
        when: the condition in words; "" if always.
        options: names of options of the hook's registration that are True.
    """

    target: str
    stage: PatchStage
    kind: PatchKind
    feature: str
    reason: str
    versions: str = ""
    when: str = ""
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = f"{self.target} [{self.versions}]" if self.versions else self.target
        why = f"{self.reason}; if {self.when}" if self.when else self.reason
        return f"{self.stage:<15} {self.kind:<10} {what} ({self.feature}): {why}"


@dataclass(frozen=True)
class AppliedPatch:
    """An applied row. `undo` takes it back; `handle` is the one of a hook; `owner` is what was changed."""

    row: Patch
    undo: Callable[[], object]
    handle: Any = None
    owner: Any = None


_tables: list[PatchTable] = []
_ENDING = ("engine", "tensor")  # objects whose changes end with them; others are taken back with the session
_of_process: set[tuple[PatchTable, str]] = set()  # features that changed classes, modules or the interpreter
_of_subject: weakref.WeakKeyDictionary[Any, set[tuple[PatchTable, str]]] = weakref.WeakKeyDictionary()


class PatchTable:
    """Rows in the order in which they are applied: of two that wrap one method, the later one is outside.

    Args:
        package: the distribution whose objects the rows change.
        versions: of it, for which the rows were written.
        rows: in order.
        classes: dotted names of the classes of the objects with which targets begin, {"engine":
            "deepspeed..."}, and of objects inside these, {"engine.checkpoint_engine": ...}; "" for any class.
    """

    def __init__(
        self, package: str, versions: str, rows: Sequence[Patch], classes: Mapping[str, str]
    ) -> None:
        self.package, self.versions, self.rows, self.classes = package, versions, tuple(rows), dict(classes)
        _tables.append(self)

    def apply(self, features: Mapping[str, Any], subject: Any = None, **objects: Any) -> list[AppliedPatch]:
        """Apply the rows of `features` to `objects`, in the table's order; all of them or none.

        Args:
            features: by name, objects whose attributes are named like the stages of the feature's rows.
            subject: the session for which `describe` lists the rows; None for changes of the whole process.
                Its list `changes`, if it has one, gets those of objects that may outlive the session.
            objects: by the names with which targets begin. Rows of objects that are not given are left out.

        Raises:
            RingConfigError: the installed package has no such target.
        """
        changes = self._apply_all(features, objects)
        self._note(changes, subject)
        record = getattr(subject, "changes", None)
        if record is not None:
            known = {(change.row.target, id(change.owner)) for change in record if change.row.kind == "set"}
            record += [
                change
                for change in changes
                if change.row.target.partition(".")[0] not in _ENDING
                # What was set twice is as it was before the first time.
                and (change.row.kind != "set" or (change.row.target, id(change.owner)) not in known)
            ]
        return changes

    def _note(self, changes: Sequence[AppliedPatch], subject: Any) -> None:
        found = _of_process if subject is None else _of_subject.setdefault(subject, set())
        found.update((self, change.row.feature.partition(".")[0]) for change in changes)

    def _apply_all(self, features: Mapping[str, Any], objects: Mapping[str, Any]) -> list[AppliedPatch]:
        changes: list[AppliedPatch] = []
        try:
            for row in self.rows:
                root = row.target.partition(".")[0]
                is_given = root in objects or root not in self.classes
                if is_given and row.feature in features and self._is_for_installed(row):
                    changes.append(self._apply(row, getattr(features[row.feature], row.stage), objects))
        except BaseException:
            undo(changes)
            raise
        return changes

    @contextmanager
    def applied(self, features: Mapping[str, Any], subject: Any = None, **objects: Any) -> Iterator[None]:
        """Apply the rows inside the context only; without a subject `describe` does not learn of it."""
        changes = self._apply_all(features, objects)
        if subject is not None:
            self._note(changes, subject)
        try:
            yield
        finally:
            undo(changes)

    def check(self) -> None:
        """Raise RingConfigError for the first row whose target the installed package does not have."""
        for row in filter(self._is_for_installed, self.rows):
            begins = [name for name in self.classes if f"{row.target}.".startswith(f"{name}.")]
            begin = max(begins, key=len, default="")
            name = row.target.removeprefix(begin).strip(".")
            try:
                if not begin:
                    owner, name = self._owner(row, {})
                    if row.kind != "added":
                        _get(owner, name)
                elif self.classes[begin]:
                    kind = pkgutil.resolve_name(self.classes[begin])
                    # Objects have what their class has, or what a method of it assigns.
                    assigned = re.compile(rf"self\.{name}\b[^=\n]*=").search
                    sources = (inspect.getsource(one) for one in kind.__mro__[:-1])
                    if (
                        name
                        and row.kind != "added"
                        and not (hasattr(kind, name) or any(map(assigned, sources)))
                    ):
                        raise self._lacks(row)
            except (ImportError, AttributeError, KeyError):
                raise self._lacks(row) from None

    def _owner(self, row: Patch, objects: Mapping[str, Any]) -> tuple[Any, str]:
        """Return the object that has the target's last name, and that name."""
        path, _, name = row.target.rpartition(".")
        root, _, inner = path.partition(".")
        if root in objects:
            return functools.reduce(getattr, inner.split(".") if inner else (), objects[root]), name
        return pkgutil.resolve_name(path), name

    def _apply(self, row: Patch, part: Any, objects: Mapping[str, Any]) -> AppliedPatch:
        if row.kind == "registered":
            back = part()
            return AppliedPatch(row, back if callable(back) else lambda: None)
        if row.kind == "hook":
            options = {} if row.stage == "in_backward" else dict.fromkeys(("with_kwargs", *row.options), True)
            handle = getattr(objects[row.target], _HOOKS[row.stage])(part, **options)
            return AppliedPatch(row, handle.remove, handle, objects[row.target])
        try:
            owner, name = self._owner(row, objects)
            before = None if row.kind == "added" else _get(owner, name)
        except (ImportError, AttributeError, KeyError):
            raise self._lacks(row) from None
        own = name in (owner if type(owner) is dict else vars(owner))
        # or a property that can be set
        own = own or name == "__class__" or hasattr(getattr(type(owner), name, None), "__set__")
        _set(owner, name, _wrapped(before, part) if row.kind == "wrapped" else part)
        back = (lambda: _set(owner, name, before)) if own else (lambda: _delete(owner, name))
        return AppliedPatch(row, back, owner=owner)

    def _is_for_installed(self, row: Patch) -> bool:
        return not row.versions or version(self.package) in SpecifierSet(row.versions, prereleases=True)

    def _lacks(self, row: Patch) -> RingConfigError:
        return RingConfigError(
            f"{row.target}: expected it in {self.package} {row.versions or self.versions}, got {self.package}"
            f" {version(self.package)} without it; install a version that this row was written for: {row}"
        )


@contextmanager
def imports_of(feature: str, package: str) -> Iterator[None]:
    """Refuse a feature by its name where an import inside fails: the installed package lacks what it needs.

    Raises:
        RingConfigError: in place of the ImportError.
    """
    try:
        yield
    except ImportError as error:
        raise RingConfigError(
            f"{feature}: expected a version of {package} that has what it needs, got {package}"
            f" {version(package)}: {error}; install a version that ds_ring allows, or do without {feature}"
        ) from error


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


def undo(changes: list[AppliedPatch]) -> None:
    """Take changes back, the latest first."""
    while changes:
        changes.pop().undo()


@contextmanager
def paused(changes: Sequence[AppliedPatch]) -> Iterator[None]:
    """Remove the hooks of `changes` inside the context; afterwards all hooks have their order again."""
    found = [(one.handle.hooks_dict_ref(), one.handle.id) for one in changes if one.handle is not None]
    ours = [(hooks, key) for hooks, key in found if hooks is not None and key in hooks]
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


def describe(subject: Any = None) -> str:
    """Return the rows that apply to a session and its process, by table; without a session all rows."""
    found = _of_process | _of_subject.get(subject, set()) if subject is not None else None
    lines = []
    for table in _tables:
        rows = [r for r in table.rows if found is None or (table, r.feature.partition(".")[0]) in found]
        lines += [f"{table.package} {table.versions}", *(f"  {row}" for row in rows)] if rows else []
    return "\n".join(lines)

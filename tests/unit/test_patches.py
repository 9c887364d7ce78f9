"""Patches of other packages: order, errors, undoing and what is printed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ring import contrib
from ds_ring import patches as adapter
from ds_ring.errors import RingConfigError
from ds_ring.patches import PatchTable, applied, apply, describe, patch, paused, undo


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> PatchTable:
    """A table, away from the real ones."""
    monkeypatch.setattr(adapter, "_tables", [])
    monkeypatch.setattr(adapter, "_of_process", {})
    return PatchTable("torch", ">=2")


def row(owner: adapter.Owner, *names: str, feature: str = "one", **others: Any) -> adapter.PatchRows:
    return patch(owner, *names, feature=feature, **{"stage": "around_forward", "reason": "a", **others})


class Around:
    """Note each call under a name."""

    def __init__(self, noted: list[str], name: str) -> None:
        self.noted, self.name = noted, name

    def around(self, call: Any, *args: Any) -> Any:
        self.noted.append(self.name)
        return call(*args)

    def hook(self, *_: Any) -> None:
        self.noted.append(self.name)


def test_every_target_exists_in_the_installed_packages() -> None:
    """Those of diffusers and TRL, which take long to import, are looked for by tests/dist."""
    adapter.import_all()
    for table in adapter._tables:
        if table.package in ("deepspeed", "accelerate", "transformers"):
            table.check()


def test_a_target_that_the_installed_package_lacks_is_one_error_that_names_it() -> None:
    engine_class = "deepspeed.runtime.engine.DeepSpeedEngine"
    for make, name in (
        (lambda table: table.given("engine", engine_class), "stepped"),
        (lambda table: table.given("engine.checkpoint_engine", engine_class), "saved"),
        (lambda table: table.imported("deepspeed"), "initialise"),
    ):
        made = PatchTable("deepspeed", "<1")
        adapter._tables.remove(made)
        row(owner := make(made), name, reason="a renamed target")
        with pytest.raises(
            RingConfigError, match=rf"{owner.path}\.{name}: expected it in deepspeed <1, got deepspeed"
        ):
            made.check()


def test_replacements_are_applied_in_the_order_of_the_call_and_taken_back(table: PatchTable) -> None:
    module, other = table.given("model", "torch.nn.Module"), table.given("any")
    model, noted, session = torch.nn.Identity(), list[str](), torch.nn.Identity()

    class Hooks(Around):
        @row(module, feature="second", stage="before_forward", reason="b")
        @row(module, feature="second", stage="after_forward")
        def both(self, *_: Any) -> None:
            self.hook()

        @row(other, feature="second", stage="before_forward", reason="an object that is not given")
        def around(self, *_: Any) -> None:
            raise AssertionError

    prepended = row(module, feature="first", stage="before_forward", options=("prepend",))
    inner = row(module, "forward", feature="inner")
    outer = row(module, "forward", feature="outer", reason="c", when="asked")
    row(module, "later", feature="first.part")  # of a feature that is on, as `second` of "any"
    row(module, "other", feature="off")
    changes = apply(
        inner.to(Around(noted, "inner").around),
        Hooks(noted, "second"),
        prepended.to(Around(noted, "first").hook),
        outer.to(Around(noted, "outer").around),
        session=session,
        model=model,
    )
    assert model(3) == 3 and noted == ["first", "second", "outer", "inner", "second"]
    printed = [line.split()[2:4] for line in describe(session).splitlines()[1:]]
    assert printed == [
        ["model.forward", "(inner):"], ["model", "(second):"], ["model", "(second):"], ["model", "(first):"],
        ["model.forward", "(outer):"], ["any", "(second):"],
        ["model.later", "(first.part):"],
    ]  # fmt: skip
    assert describe(torch.nn.Identity()) == "" and "(outer): c; if asked" in describe(session)
    undo(changes)
    noted.clear()
    assert model(3) == 3 and noted == [] and "forward" not in vars(model)


def test_what_is_decorated_may_be_a_function_a_partial_of_it_a_class_or_a_later_function(
    table: PatchTable,
) -> None:
    module = table.given("model", "torch.nn.Module")

    @row(module, "forward")
    def scaled(factor: int, forward: Any, x: int) -> int:
        return factor * int(forward(x))

    @row(module, "kind", stage="at_enable", kind="added")
    class Kind:
        pass

    later = row(module, "training", stage="at_enable", kind="set")

    def registered() -> Any:
        names.append("made")
        return lambda: names.append("taken back")

    model, names = torch.nn.Identity(), list[str]()
    register = row(module, "register", stage="at_enable", kind="registered").to(registered)
    changes = apply(partial(scaled, 5), Kind, later.to(None), register, model=model)
    assert model(3) == 15 and model.kind is Kind and model.training is None and names == ["made"]
    undo(changes)
    assert model(3) == 3 and not hasattr(model, "kind") and model.training and names == ["made", "taken back"]

    @later
    def made_later() -> None: ...

    with applied(made_later, model=model):
        assert model.training is made_later
    with pytest.raises(AssertionError, match="expected what `patch` decorates"):
        apply(len)


def test_hooks_are_paused_and_what_others_do_to_theirs_meanwhile_stays(table: PatchTable) -> None:
    ours = row(table.given("model", "torch.nn.Module"), stage="before_forward")
    model, noted = torch.nn.Identity(), list[str]()
    handles = {"before": model.register_forward_pre_hook(Around(noted, "before").hook)}
    changes = apply(ours.to(Around(noted, "ours").hook), model=model)
    handles["after"] = model.register_forward_pre_hook(Around(noted, "after").hook)
    with paused(changes):
        assert model(3) == 3 and noted == ["before", "after"]
        handles["before"].remove()
        model.register_forward_pre_hook(Around(noted, "new").hook)
    noted.clear()
    assert model(3) == 3 and noted == ["ours", "after", "new"]


def test_of_patches_without_a_target_none_is_applied(table: PatchTable) -> None:
    module = table.given("model", "torch.nn.Module")
    there = row(module, "forward")
    lost = row(module, "forwards", reason="a renamed method")
    model = torch.nn.Identity()
    with pytest.raises(
        RingConfigError, match=r"model\.forwards: expected it in torch >=2, got torch 2\."
    ) as e:
        apply(there.to(Around([], "").around), lost.to(Around([], "").around), model=model)
    assert "a renamed method" in str(e.value) and "forward" not in vars(model)
    with pytest.raises(RingConfigError, match=r"model\.forwards: expected"):
        table.check()
    for path, name in (
        ("torch", "no_such_function"),
        ("torch.no_such_module", "load"),
        ("no_such_package", "load"),
    ):
        table.rows.clear()
        row(table.imported(path), name, stage="at_enable", kind="set")
        with pytest.raises(RingConfigError, match=f"{path}.{name}"):
            table.check()
    table.rows.clear()
    row(module, "training", stage="at_enable", kind="set", reason="assigned by __init__")
    row(table.imported("torch"), "gone", stage="at_enable", kind="set", available=False)  # of other versions
    table.check()
    changes = apply(row(table.imported("torch"), "gone", available=False).to(len))
    assert changes == []


def test_a_function_of_a_module_is_replaced_inside_the_context_only(table: PatchTable) -> None:
    before = torch.load
    load = row(table.imported("torch"), "load", stage="around_load", kind="replaced")
    with applied(load.to(len)):
        assert torch.load is len
    assert torch.load is before
    with applied(load.to(len), session=(session := torch.nn.Identity())):
        assert "torch.load" in describe(session)
    assert torch.load is before


def test_a_file_that_imports_what_ds_ring_lacks_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose package is not installed is."""
    monkeypatch.setattr(contrib, "__path__", [*contrib.__path__, str(tmp_path)])
    (tmp_path / "not_installed.py").write_text("import a_package_that_is_not_installed  # patch\n")
    adapter.import_all()
    (tmp_path / "renamed.py").write_text("import ds_ring.renamed  # patch\n")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'ds_ring\.renamed'"):
        adapter.import_all()


def test_the_printed_tables_have_the_rows_of_all_files() -> None:
    printed = adapter.describe_all()
    for line in (
        "around_step     wrapped    engine.step (monitor): writes Ring/* events",
        "around_load     wrapped    torch.load (checkpoint.weights_only)",
        "at_enable       registered diffusers.models.attention_dispatch._AttentionBackendRegistry.register",
        "at_enable       wrapped    transformers.modeling_flash_attention_utils._flash_attention_forward",
    ):
        assert line in printed
    rows = [one for table in adapter._tables for one in table.rows]
    assert (
        len(rows) == len(set(rows)) == len(printed.splitlines()) - sum(bool(t.rows) for t in adapter._tables)
    )

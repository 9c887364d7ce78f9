"""The table of changes to other packages: order, errors, undoing and what is printed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_ring.errors import RingConfigError
from ds_ring.integrations import adapter
from ds_ring.integrations.adapter import Patch, PatchTable, describe, paused, undo
from ds_ring.integrations.deepspeed.engine import DEEPSPEED


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tables of a test away from the real ones."""
    monkeypatch.setattr(adapter, "_tables", [])


@pytest.mark.usefixtures("tables")
def test_every_target_exists_in_the_installed_packages() -> None:
    DEEPSPEED.check()
    for lost in ("engine.stepped", "engine.checkpoint_engine.saved", "deepspeed.initialise"):
        row = Patch(lost, "around_step", "wrapped", "one", "a renamed target")
        with pytest.raises(
            RingConfigError, match=f"{lost}: expected it in deepspeed >=0.19.8,<0.20, got deepspeed"
        ):
            PatchTable("deepspeed", DEEPSPEED.versions, (*DEEPSPEED.rows, row), DEEPSPEED.classes).check()


def part(said: list[str], word: str) -> Any:
    def around(call: Any, *args: Any) -> Any:
        said.append(word)
        return call(*args)

    def hook(*_: Any) -> None:
        said.append(word)

    return SimpleNamespace(around_forward=around, before_forward=hook, after_forward=hook, at_enable={})


def table(*rows: Patch) -> PatchTable:
    return PatchTable("torch", ">=2", rows, {"model": "torch.nn.Module", "any": ""})


@pytest.mark.usefixtures("tables")
def test_rows_run_in_the_order_of_the_table_and_are_taken_back() -> None:
    made = table(
        Patch("model.forward", "around_forward", "wrapped", "inner", "a"),
        Patch("model", "before_forward", "hook", "second", "b"),
        Patch("model", "before_forward", "hook", "first", "b", options=("prepend",)),
        Patch("model", "after_forward", "hook", "second", "b"),
        Patch("model.forward", "around_forward", "wrapped", "outer", "c", when="asked"),
        Patch("any", "before_forward", "hook", "inner", "an object that is not given"),
    )
    model, said, subject = torch.nn.Identity(), list[str](), torch.nn.Identity()
    features = {name: part(said, name) for name in ("outer", "second", "first", "inner")}
    changes = made.apply(features, subject, model=model)
    assert model(3) == 3 and said == ["first", "second", "outer", "inner", "second"]
    named = [line.split()[2] for line in describe(subject).splitlines()[1:]]
    assert named == ["model.forward", "model", "model", "model", "model.forward", "any"]
    assert describe(torch.nn.Identity()) == "" and "(outer): c; if asked" in describe()
    undo(changes)
    said.clear()
    assert model(3) == 3 and said == [] and "forward" not in vars(model)


@pytest.mark.usefixtures("tables")
def test_hooks_are_paused_and_what_others_do_to_theirs_meanwhile_stays() -> None:
    made = table(Patch("model", "before_forward", "hook", "ours", "a"))
    model, said = torch.nn.Identity(), list[str]()
    handles = {"before": model.register_forward_pre_hook(part(said, "before").before_forward)}
    changes = made.apply({"ours": part(said, "ours")}, model=model)
    handles["after"] = model.register_forward_pre_hook(part(said, "after").before_forward)
    with paused(changes):
        assert model(3) == 3 and said == ["before", "after"]
        handles["before"].remove()
        model.register_forward_pre_hook(part(said, "new").before_forward)
    said.clear()
    assert model(3) == 3 and said == ["ours", "after", "new"]


@pytest.mark.usefixtures("tables")
def test_a_row_without_its_target_is_one_error_that_names_it_and_changes_nothing() -> None:
    rows = (
        Patch("model.forward", "around_forward", "wrapped", "one", "a"),
        Patch("model.forwards", "around_forward", "wrapped", "one", "a renamed method"),
    )
    model = torch.nn.Identity()
    with pytest.raises(
        RingConfigError, match=r"model\.forwards: expected it in torch >=2, got torch 2\."
    ) as e:
        table(*rows).apply({"one": part([], "")}, model=model)
    assert "a renamed method" in str(e.value) and "forward" not in vars(model)
    with pytest.raises(RingConfigError, match=r"model\.forwards: expected"):
        table(*rows).check()
    for lost in ("torch.no_such_function", "torch.no_such_module.load", "no_such_package.load"):
        with pytest.raises(RingConfigError, match=lost):
            table(Patch(lost, "at_enable", "set", "one", "b")).check()
    table(rows[0], Patch("model.training", "at_enable", "set", "one", "assigned by __init__")).check()
    table(Patch("torch.gone", "at_enable", "set", "one", "b", versions="<2")).check()  # of other versions


@pytest.mark.usefixtures("tables")
def test_a_function_of_a_module_is_replaced_inside_the_context_only() -> None:
    before, rows = torch.load, (Patch("torch.load", "around_load", "replaced", "one", "a"),)
    with table(*rows).applied({"one": SimpleNamespace(around_load=len)}):
        assert torch.load is len
    assert torch.load is before
    with table(*rows).applied({"one": SimpleNamespace(around_load=len)}, subject := torch.nn.Identity()):
        assert "torch.load" in describe(subject)
    assert torch.load is before

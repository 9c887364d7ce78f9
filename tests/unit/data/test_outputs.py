"""Outputs of every form: what has a name is gathered when it is read, elements of tuples at once."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from ds_ring.data.outputs import LocalOutput, make_whole_output


def test_a_number_that_has_a_name_of_its_own_is_made_whole_by_it() -> None:
    """Counts of tokens, which are no losses."""
    output = CausalLMOutputWithPast(loss=torch.tensor(1.0))
    output["counted"], output["all"] = torch.tensor(2.0), torch.tensor(3)
    names = {"counted": lambda x: x * 100, "all": lambda x: x * 100}
    whole = make_whole_output(output, lambda x: x * 10, lambda x: x, names)
    assert [float(whole[name]) for name in ("loss", "counted", "all")] == [10.0, 200.0, 300.0]


class Named(NamedTuple):
    loss: Any
    logits: Any


@dataclasses.dataclass
class Fields:
    loss: Any
    logits: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    loss: Any
    logits: Any


class Dotted(dict[str, Any]):
    """A dict whose items are attributes as well."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__.update(items)


class Made:
    """An object of a class with a constructor of its own."""

    def __new__(cls, loss: Any, logits: Any) -> Made:
        return super().__new__(cls)

    def __init__(self, loss: Any, logits: Any) -> None:
        self.loss, self.logits = loss, logits


BY_NAME: dict[str, Any] = {
    "ModelOutput": CausalLMOutputWithPast,
    "dict": lambda **items: items,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda **items: defaultdict(list, items),
    "UserDict": UserDict,
    "dict with attributes": Dotted,
    "dataclass": Fields,
    "frozen dataclass with slots": Frozen,
    "namespace": SimpleNamespace,
    "object": Made,
}


class Gathered:
    """What makes an output whole here: a number grows by 10, a sequence by 100; it counts."""

    def __init__(self) -> None:
        self.sequences = self.numbers = 0

    def number(self, x: Tensor) -> Tensor:
        self.numbers += 1
        return x + 10

    def sequence(self, x: Tensor) -> Tensor:
        self.sequences += 1
        return x + 100

    def of(self, output: Any, **by_name: Any) -> Any:
        return make_whole_output(output, self.number, self.sequence, by_name)


def read(output: Any, name: str) -> Any:
    return output[name] if isinstance(output, Mapping) else getattr(output, name)


@pytest.mark.parametrize("form", BY_NAME)
def test_what_has_a_name_is_gathered_when_it_is_read(form: str) -> None:
    whole, logits = Gathered(), torch.zeros(2, 3)
    given = BY_NAME[form](loss=torch.tensor(1.0), logits=logits)
    found = whole.of(given)
    assert isinstance(found, dict if form == "UserDict" else type(given))
    assert (whole.numbers, whole.sequences) == (1, 0)
    assert float(read(found, "loss")) == 11
    for _ in range(2):
        assert read(found, "logits").equal(logits + 100)
    assert whole.sequences == 1
    assert read(given, "loss") == 1, "the module keeps its own"


@pytest.mark.parametrize("form", ["ModelOutput", "dict", "OrderedDict", "dict with attributes"])
def test_all_ways_of_reading_a_dict_gather(form: str) -> None:
    logits = torch.zeros(2, 3)
    ways: dict[str, Any] = {
        "get": lambda x: x.get("logits"),
        "items": lambda x: dict(x.items())["logits"],
        "values": lambda x: list(x.values())[1],
        "dict": lambda x: dict(x)["logits"],
        "**": lambda x: {**x}["logits"],
        "|": lambda x: (x | {})["logits"],
        "copy": lambda x: x.copy()["logits"],
    }
    if form == "ModelOutput":
        ways |= {"attribute": lambda x: x.logits, "integer": lambda x: x[1], "slice": lambda x: x[1:][0]}
        ways |= {"tuple": lambda x: x.to_tuple()[1]}
    else:
        ways |= {"pop": lambda x: x.pop("logits"), "setdefault": lambda x: x.setdefault("logits")}
    if form == "dict with attributes":
        ways["attribute"] = lambda x: x.logits
    for way, call in ways.items():
        found = Gathered().of(BY_NAME[form](loss=torch.tensor(1.0), logits=logits))
        assert list(found) == ["loss", "logits"]
        assert call(found).equal(logits + 100), way
        with pytest.raises(KeyError):
            found["hidden_states"]
        assert found.get("hidden_states") is None
        found["logits"] = logits
        assert read(found, "logits").equal(logits), "what was set is as it was set"


def test_elements_are_gathered_at_once_and_inner_outputs_like_outer_ones() -> None:
    whole, loss, logits = Gathered(), torch.tensor(1.0), torch.zeros(2, 3)
    for given in ((loss, logits), [loss, logits], Named(loss, logits)):
        found = whole.of(given)
        assert type(found) is type(given) and found[0] == 11 and found[1].equal(logits + 100)
    assert whole.of(logits).equal(logits + 100)
    count = torch.tensor(3)
    inner = CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=(logits, logits))
    found = whole.of({"inner": inner, "count": count, "name": "x", "cache": object()})
    assert found["inner"].loss == 11 and found["inner"].hidden_states[1].equal(logits + 100)
    assert found["count"] is not None and found["name"] == "x"
    by_name = whole.of({"logits": logits, "entropy": logits}, entropy=lambda x: x + 7)
    assert by_name["entropy"].equal(logits + 7)


def test_what_is_local_or_has_no_tensor_stays() -> None:
    whole, local = Gathered(), LocalOutput(found=torch.zeros(2, 3))
    assert whole.of(local) is local and float(local["found"].sum()) == 0
    for given in (None, "x", 3, object(), {}):
        assert whole.of(given) is given


def test_fields_that_are_set_or_replaced_are_whole() -> None:
    logits = torch.zeros(2, 3)
    found = Gathered().of(Fields(torch.tensor(1.0), logits))
    found.logits = logits
    assert found.logits is logits
    found = dataclasses.replace(Gathered().of(Fields(torch.tensor(1.0), logits)), loss=None)
    assert found.loss is None and found.logits.equal(logits + 100)

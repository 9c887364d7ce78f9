"""Probes of the public names: every argument of every call gets what it does not take, and some that it does.

Each probe ends below a second in a RingError that says what was expected and got, or in the result that the
plain value gives; never in a raw error from inside. A new name is one entry of CALLS, an argument a row.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import ds_ring
from ds_ring import Causal, Documents, Full, PassOptions, RingConfig, RingError, RingMesh
from ds_ring.config.pattern_section import PATTERNS_BY_KEY
from ds_ring.errors import shown
from tests import calls

SECONDS = 1.0
NO_FILE = ("file does not exist", "expected a file that can be read")  # what a text that is no path gets
TRIES = 3  # other programs on the machine can only add to a time


class Hostile:
    """Raises whatever it is asked."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    __hash__ = None  # type: ignore[assignment]


class MyTensor(Tensor):
    """A subclass without a behaviour of its own."""


NUMBERS = (np.int32, np.int64, np.uint8)
NOTHING = (None, "", "x", "8", b"8", [], [8], (), {}, {"a": 1}, object(), int, Hostile())
NAN, INF = float("nan"), float("inf")
NO_COUNT = (
    *NOTHING, 0, -1, True, False, 2.5, 8.0, NAN, INF, 10**30, 10**5000, 1j, np.float64(8), torch.tensor(8.0),
)  # fmt: skip
NO_FLAG = (*NOTHING, 0, 1, 2.0, NAN, np.int64(1))
NO_PATTERN = (*NOTHING, 3, "causal", Causal, torch.ones(8, 8), lambda b, h, q, k: q >= k)
NO_LAYOUT = (*(x for x in NOTHING if not isinstance(x, str)), "zigzack", 3, 2.5, NAN)
NO_MESH = (*NOTHING, 3, RingMesh, Causal())
NO_NAME = (*NOTHING, 3, 2.5, NAN, "pigeon", "CPU")
NO_DIM = (*NOTHING, True, 2.0, NAN, 4, -5, 10**30)
NO_LIST = (
    None, 3, 2.5, "8", b"8", {}, [], (), [0], [-1], [True], [2.5], ["8"], [None], [[8]], [NAN], [10**30],
    Hostile(), [Hostile()],
)  # fmt: skip


def no_scales() -> tuple[object, ...]:
    return (
        *(x for x in NOTHING if x is not None), NAN, INF, -INF, True, 1j, 10**400, np.float32(0.5),
        torch.tensor(0.5),
    )  # fmt: skip


def no_tensors(x: Tensor) -> tuple[object, ...]:
    """What is no q, k or v, made of one that is."""
    return (
        *NOTHING, 3, 2.5, x.numpy(), x.tolist(), x.to("meta"), x.to_sparse(), x[0, 0].to_sparse_csr(),
        x.int(), x.bool(), x.to(torch.complex64), x.to(torch.float8_e4m3fn), x[:, :, :0], x[:0], x[0],
        x[None], x[:, :, :3], x[..., 0], torch.tensor(1.0), torch.nested.nested_tensor([x[0], x[0, :, :2]]),
        torch.nested.nested_tensor([x[0, 0], x[0, 0, :2]], layout=torch.jagged),
        torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    )  # fmt: skip


class Argument(NamedTuple):
    """Of one call: what an argument does not take, and what it takes beside the plain value, with the same"
    " result."""

    refused: tuple[object, ...] = ()
    equal: tuple[object, ...] = ()


class Call(NamedTuple):
    """A public name, its plain arguments, and those that are probed."""

    function: Callable[..., Any]
    plain: dict[str, Any]
    probed: dict[str, Argument]


MESH = RingMesh.single()
LAYOUT = ds_ring.make_layout("contiguous", tokens=8, ring_size=1)
TWO = ds_ring.make_layout("contiguous", tokens=8, ring_size=2)
Q = torch.arange(64.0).reshape(1, 2, 8, 4).sin()
QKV = {"q": Q, "k": Q.flip(2), "v": Q + 1}


def tensor(x: Tensor) -> Argument:
    subclass, leaf = x.clone().as_subclass(MyTensor), x.clone().requires_grad_()
    return Argument(no_tensors(x), (x.clone(), leaf, subclass, torch.nn.Parameter(x.clone())))


TENSORS = [tensor(x) for x in QKV.values()]
SCALE = Argument(no_scales(), (0.5, np.float64(0.5)))


def counted(value: int, *more: object) -> Argument:
    return Argument((*NO_COUNT, *more), (*(number(value) for number in NUMBERS),))


def simple(kind: type[Any]) -> Call:
    """A pattern of a number of tokens, and of flags."""
    first, *flags = (field.name for field in dataclasses.fields(kind))
    return Call(kind, {first: 8}, {first: counted(8)} | {flag: Argument(NO_FLAG, (True,)) for flag in flags})


def attend(q: Any, k: Any, v: Any, **rest: Any) -> Tensor:
    return calls.attend(q, k, v, **rest)


def module_call(**arguments: Any) -> Tensor:
    made = ds_ring.RingAttention(Causal(), mesh=MESH, layout=LAYOUT)
    return made(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)


def simulated(**arguments: Any) -> Tensor:
    names = {field.name for field in dataclasses.fields(ds_ring.SimulationOptions)}
    given = {name: arguments.pop(name) for name in names & set(arguments)}
    options = ds_ring.SimulationOptions(**({"progress": False} | given))
    return ds_ring.simulate(**({"measure_memory": False} | arguments), options=options).out


ATTENTION = {**QKV, "pattern": Causal(), "layout": LAYOUT, "mesh": MESH, "scale": 0.5}
CALLS: dict[str, Call] = {
    "make_layout": Call(
        ds_ring.make_layout,
        {"name": "zigzag", "tokens": 8, "ring_size": 2, "multiple_of": 2},
        {
            "name": Argument(NO_NAME),
            "tokens": counted(8),
            "ring_size": counted(2, 1 << 40),
            "multiple_of": counted(2),
            "block_size": counted(2),
            "pattern": Argument(tuple(x for x in NO_PATTERN if x is not None), (None, Causal())),
        },
    ),
    "build_plan": Call(
        ds_ring.build_plan,
        {"pattern": Causal(), "layout": TWO, "query_heads": 4, "kv_heads": 2},
        {
            "pattern": Argument((*NO_PATTERN, Documents([0] * 7)), (Causal(),)),
            "layout": Argument((*NO_LAYOUT, "zigzag")),
            "query_heads": counted(4, 3, 1 << 40),
            "kv_heads": counted(2, 3, 1 << 40),
            "prune": Argument(NO_FLAG, (True,)),
            "gradient_payload": Argument(NO_NAME, ("float32",)),
            "ranks_per_node": Argument((*(x for x in NO_COUNT if x is not None), 3), (None, 1, 2)),
            "stage_shards": Argument(tuple(x for x in NO_COUNT if x is not None), (None,)),
            "directions": Argument((3, "up", [1], Hostile()), (None,)),
        },
    ),
    "SlidingWindow": Call(ds_ring.SlidingWindow, {"window": 8},
        {"window": counted(8), "causal": Argument(NO_FLAG, (True,))}),
    "DilatedWindow": Call(ds_ring.DilatedWindow, {"window": 8, "rate": 2},
        {"window": counted(8), "rate": counted(2), "causal": Argument(NO_FLAG, (True,))}),
    **{kind.__name__: simple(kind) for _, kind in PATTERNS_BY_KEY.values()},
    "Sinks": Call(ds_ring.Sinks, {"sinks": 8}, {"sinks": counted(8), "causal": Argument(NO_FLAG, (True,))}),
    "Slices": Call(
        ds_ring.Slices,
        {"slices": [((0, 8), (0, 8), "full")]},
        {
            "slices": Argument(
                (
                    *NO_LIST,
                    [((0, 8), (0, 8))],
                    [((0, 8), (0, 8), "round")],
                    [((8, 8), (0, 8), "full")],
                    [((-1, 8), (0, 8), "full")],
                    [((0, 2.5), (0, 8), "full")],
                    [((0, 8), Hostile(), "full")],
                    [((0, 8), (0, 8), Hostile())],
                    [((0, 8), (0, 8), "full"), ((4, 9), (7, 9), "causal")],
                ),
                ([[[0, 8], [0, 8], "full"]],),
            )
        },
    ),
    "Tree": Call(
        ds_ring.Tree,
        {"parents": (-1, 0, 0), "lengths": (2, 1, 3)},
        {
            "parents": Argument((*NO_LIST, (-1, 0), (-1, 1, 0), (-2, 0, 0), (0, 0, 0)), ([-1, 0, 0],)),
            "lengths": Argument((*NO_LIST, (2, 1), (2, 0, 3)), ([2, 1, 3],)),
            "tokens": Argument((*(x for x in NO_COUNT if x is not None), 5), (None, 6)),
        },
    ),
    "Dilated": Call(
        ds_ring.Dilated,
        {"segment_lengths": (4, 8), "dilation_rates": (1, 2)},
        {
            "segment_lengths": Argument((*NO_LIST, (8, 4), (4,)), ([4, 8], (np.int64(4), np.int32(8)))),
            "dilation_rates": Argument((*NO_LIST, (2, 1), (2, 2), (1,)), ([1, 2],)),
            "causal": Argument(NO_FLAG, (True,)),
            "head_offsets": Argument(NO_NAME, ("paper",)),
        },
    ),
    "Documents": Call(
        Documents,
        {"document_ids": [0, 0, 1, 1]},
        {
            "document_ids": Argument(
                (
                    None, 3, 2.5, "8", "ab", b"8", {}, [], [2.5], [NAN], [None], ["a"], [[0], [0, 1]],
                    [10**30], Hostile(), [Hostile()], np.zeros((2, 2), int), np.array([True]), torch.zeros(4),
                    torch.zeros(4, device="meta"), np.array([1 << 63], dtype=np.uint64),
                    torch.zeros(4, dtype=torch.bfloat16),
                ),
                (
                    (0, 0, 1, 1),
                    np.array([0, 0, 1, 1]),
                    torch.tensor([[0, 0, 1, 1]]),
                    np.array([0, 0, 1, 1], np.uint8),
                ),
            ),
            "position_ids": Argument(([0, 1], 3, Hostile())),  # beside document_ids
        },
    ),
    "MaskMod": Call(
        ds_ring.MaskMod,
        {"function": Hostile.__repr__},
        {
            "function": Argument((*NOTHING, 3, NAN, torch.ones(2, 2))),
            "is_known_causal": Argument(NO_FLAG, (False,)),
        },
    ),
    "&": Call(lambda a, b: a & b, {"a": Causal(), "b": Full()}, {"b": Argument(NO_PATTERN)}),
    "|": Call(lambda a, b: a | b, {"a": Causal(), "b": Full()}, {"b": Argument(NO_PATTERN)}),
    "ring_attention": Call(
        attend,
        ATTENTION,
        {
            **dict(zip("qkv", TENSORS, strict=True)),
            "pattern": Argument((*NO_PATTERN, Documents([0] * 7)), (Causal(),)),
            "layout": Argument((*NO_LAYOUT, TWO, ds_ring.make_layout("contiguous", tokens=9, ring_size=1)),
                ("contiguous",)),
            "mesh": Argument(NO_MESH),
            "scale": SCALE,
            "kernel": Argument((*NO_NAME, "flex"), ("cpu", "auto")),
            "transport": Argument(NO_NAME, ("ring", "all_gather")),
            "overlap": Argument(NO_FLAG, (True, False)),
            "prune": Argument(NO_FLAG, (True, False)),
            "hop_timeout_seconds": Argument((*NOTHING, 0, -1, NAN, INF, 1e300, 10**400, True), (60, 1.5)),
            "check_finite": Argument(NO_FLAG, (True, False)),
            "gradient_payload": Argument(NO_NAME, ("float32", "bfloat16")),
            "options": Argument((0.5, "x", Hostile(), {"overlap": False}, Causal()), (None, PassOptions())),
            "sinks": Argument(
                (0.5, "x", Hostile(), [0.0] * Q.shape[1], Q, Q[0, 0, 0, :1].int(), Q.to("meta")),
                (None, torch.full(Q.shape[1:2], -1e30)),
            ),
            "return_lse": Argument((None, 1, "x", Hostile()), (False,)),
            "score_mod": Argument((1, "x", Hostile(), Causal), (None,)),
        },
    ),
    "cross_attention": Call(
        lambda q, k, v, **rest: ds_ring.cross_attention(q, k, v, **rest),
        ATTENTION | {"pattern": Full(), "key_layout": LAYOUT},
        {
            "pattern": Argument((*NO_PATTERN, Causal(), Documents([0] * 8)), (Documents([0] * 16),)),
            "layout": Argument((*NO_LAYOUT, "contiguous", TWO)),
            "key_layout": Argument((*(x for x in NO_LAYOUT if x is not None), "contiguous", TWO)),
            "return_lse": Argument((None, 1, "x", Hostile()), (False,)),
        },
    ),
    "latent_attention": Call(
        attend,
        {
            **ATTENTION,
            **{"q": torch.ones(1, 2, 8, 6), "k": torch.ones(1, 1, 8, 3), "v": torch.ones(1, 1, 8, 2)},
            "up_projection": torch.ones(2 * (4 + 5), 3),
        },
        {"up_projection": Argument((0.5, "x", Hostile(), Q, Q[0, 0], Q.to("meta")))},
    ),
    "decode_attention": Call(
        attend,
        ATTENTION | {"queries": "replicated", "positions": list(range(8))},
        {
            "positions": Argument(
                (
                    "x", b"8", [], [[0] * 8], [0.5] * 8, [None] * 8, [8] * 8, [-1] * 8, [0] * 7, [10**30] * 8,
                    [NAN] * 8, {}, object(), Hostile(), [Hostile()] * 8, torch.zeros(8), torch.arange(7), 3,
                ),
                (None, tuple(range(8)), np.arange(8), torch.arange(8), torch.arange(8, dtype=torch.int32)),
            ),
            "q": Argument((*NOTHING, 3, Q.to("meta"), Q.to_sparse(), Q.int(), Q[0], Q[:, :, :0], Q[:, :1])),
            "mesh": Argument(NO_MESH),
            "transport": Argument(("all_gather",)),
        },
    ),
    "RingAttention": Call(
        lambda **a: ds_ring.RingAttention(a.pop("what"), **a)(Q, Q.flip(2), Q + 1),
        {"what": Causal(), "mesh": MESH, "layout": LAYOUT, "scale": 0.5},
        {
            "what": Argument(NO_PATTERN, (Causal(),)),
            "mesh": Argument(NO_MESH),
            "layout": Argument(tuple(x for x in NO_LAYOUT if x is not None), ("contiguous", None)),
            "scale": SCALE,
        },
    ),
    "RingAttention's call": Call(
        module_call,
        {"query": Q, "key": Q.flip(2), "value": Q + 1},
        {
            **dict(zip(("query", "key", "value"), TENSORS, strict=True)),
            "batch_dim_idx": Argument((*(x for x in NOTHING if x is not None), 2, -1, True, 1.0, NAN),
                (None,)),
            "dropout": Argument((0.1, "x", Hostile(), NAN, [0.0]), (0, 0.0, None)),
            "mask": Argument((torch.ones(8, 8), 0, "x", Hostile()), (None,)),
        },
    ),
    "RingAttention's call, tokens before heads": Call(
        module_call,
        {
            "query": Q.transpose(1, 2),
            "key": Q.transpose(1, 2),
            "value": Q.transpose(1, 2),
            "batch_dim_idx": 0,
        },
        {"query": Argument((*NOTHING, Q[0], Q[None], Q.to("meta"), Q.to_sparse(), Q))},
    ),
    "shard_sequence": Call(
        ds_ring.shard_sequence,
        {"x_global": Q, "layout": LAYOUT, "dim": 2, "ring_rank": 0},
        {
            "x_global": Argument(
                (*NOTHING, 3, Q.numpy(), Q.to("meta"), Q.to_sparse(), Q[:, :, :3], Q[0, 0, 0]), (Q.clone(),)
            ),
            "layout": Argument((*NO_LAYOUT, "contiguous")),
            "dim": Argument(NO_DIM, (-2,)),
            "ring_rank": Argument((*NOTHING, 1, -1, True, 0.0, NAN, 10**30), (np.int64(0),)),
            "pad_value": Argument((*NOTHING, True, torch.tensor(1.0)), (7, NAN)),
            "mesh": Argument((MESH, 3)),  # beside ring_rank
        },
    ),
    "gather_sequence": Call(
        ds_ring.gather_sequence,
        {"x_local": Q, "layout": LAYOUT, "mesh": MESH, "dim": 2},
        {
            "x_local": Argument(
                (*NOTHING, 3, Q.numpy(), Q.to("meta"), Q.to_sparse(), Q[:, :, :3], Q[0, 0, 0]), (Q.clone(),)
            ),
            "layout": Argument((*NO_LAYOUT, "contiguous", TWO)),
            "mesh": Argument(NO_MESH),
            "dim": Argument(NO_DIM, (-2,)),
        },
    ),
    "simulate": Call(
        simulated,
        {**QKV, "pattern": Causal(), "layout": TWO, "scale": 0.5},
        {
            **dict(zip("qkv", TENSORS, strict=True)),
            "pattern": Argument((*NO_PATTERN, Documents([0] * 7)), (Causal(),)),
            "layout": Argument((*NO_LAYOUT, "zigzag", ds_ring.make_layout("zigzag", tokens=9, ring_size=2))),
            "scale": SCALE,
            "grad_out": Argument((True, "x", 3, Q[:, :1], Q.int(), Hostile()), (None, Q)),
            "kernel": Argument((*NO_NAME, "flex"), ("cpu", "auto")),
            "kernel_options": Argument((3, "x", [1], {"blok": 1}, {3: 4}, {"block": "x"}, Hostile()),
                ({}, None, {"block": 64, "triangle": 64})),
            "chunk_bytes": Argument(tuple(x for x in NO_COUNT if x is not None), (1, np.int64(1))),
            "ranks": Argument(
                ([2], [-1], [0, 0], 3, "01", [True], [0.0], itertools.count(), Hostile(), [Hostile()]),
                (None, range(2), (1, 0)),
            ),
            "threads": Argument((0, -1, True, "1", 2.0, 10**9, Hostile()), (1, None)),
            "prune": Argument(NO_FLAG, (True, False)),
            "gradient_payload": Argument(NO_NAME, ("float32", "bfloat16")),
            "ranks_per_node": Argument((*(x for x in NO_COUNT if x is not None), 3), (None, 1, 2)),
            "stage_bytes": Argument(tuple(x for x in NO_COUNT if type(x) is not int or x),
                (0, "auto", 1, 1 << 30)),
            "trace": Argument(NO_FLAG, (True, False)),
        },
    ),
    "RingConfig": Call(
        lambda source: RingConfig.from_deepspeed(source).layout,
        {"source": {"ring_attention": {}}},
        {
            "source": Argument(
                (
                    *NOTHING, 3, NAN, {"ring_attention": 3}, {"ring_attention": None},
                    {"ring_attention": {"ring_size": NAN}}, {"ring_attention": {"ring_size": -1}},
                    {"ring_attention": {"layout": Hostile()}}, {"ring_attention": {Hostile: 1}},
                    {"ring_attention": {3: 1}}, {1: {}}, "/nowhere/x.json", "\0",
                    {"ring_attention": {"pattern": []}}, {"ring_attention": {"hop_timeout_seconds": -1}},
                ),
            )
        },
    ),
    "RingMesh.from_world": Call(
        RingMesh.from_world,
        {"ring_size": 1},
        {"ring_size": Argument((*NO_COUNT, 1))},  # no process group here
    ),
}  # fmt: skip


def probes() -> list[Any]:
    """Every call with one argument changed: name, argument, number of the value, refused or equal."""
    return [
        pytest.param(name, argument, *values, id=f"{name}: {argument}")
        for name, call in CALLS.items()
        for argument, values in call.probed.items()
    ]


def outcome(call: Call, arguments: dict[str, Any]) -> tuple[Any, float]:
    """What comes of a call, an exception or a result, and the least of three times."""
    least = INF
    for _ in range(TRIES):
        started = time.perf_counter()
        try:
            result: Any = call.function(**arguments)
        except Exception as error:
            result = error
        least = min(least, time.perf_counter() - started)
        if least < SECONDS:
            break
    return result, least


def named(value: object) -> str:
    try:
        return f"{type(value).__name__} {value!r:.60}".replace("\n", " ")
    except Exception:
        return type(value).__name__


def is_equal(got: Any, want: Any) -> bool:
    if isinstance(want, Tensor):
        return isinstance(got, Tensor) and torch.allclose(got.detach(), want, atol=1e-5)
    return bool(got == want)


@pytest.mark.parametrize(("name", "argument", "refused", "equal"), probes())
def test_a_typed_error_or_the_right_result(
    name: str, argument: str, refused: tuple[object, ...], equal: tuple[object, ...]
) -> None:
    call, wrong = CALLS[name], []
    for value in refused:
        found, seconds = outcome(call, call.plain | {argument: value})
        text = str(found)
        if not isinstance(found, RingError):
            wrong.append(f"{named(value)}: {type(found).__name__} {text[:150]}")
        elif not (("expected" in text and "got" in text) or any(words in text for words in NO_FILE)):
            wrong.append(f"{named(value)}: does not say expected and got: {text}")
        elif len(text) > 1500 or seconds > SECONDS:
            wrong.append(f"{named(value)}: {len(text)} characters after {seconds:.2f} s")
    for value in equal:
        default = call.plain if argument in call.plain else call.plain | {argument: equal[0]}
        want, _ = outcome(call, default)
        found, seconds = outcome(call, call.plain | {argument: value})
        if not is_equal(found, want) or seconds > SECONDS:
            wrong.append(f"{named(value)}: {named(found)} after {seconds:.2f} s, wanted {named(want)}")
    assert not wrong, "\n".join(wrong)


# Functions of layers, each with arguments that it takes: their other wrong inputs are in tests/dist/layers.
HERE = {"layout": LAYOUT, "mesh": MESH}
X, IDS = torch.ones(1, 8, 4), torch.zeros(1, 8, 1, dtype=torch.int64)
LATENTS = {"q": torch.ones(1, 2, 8, 6), "latent": torch.ones(1, 1, 8, 3), "rope": torch.ones(1, 1, 8, 2)}
LAYERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "halo": (ds_ring.halo, {"x": X, "before": 1, "after": 1, "dim": 1} | HERE),
    "shift_sequence": (ds_ring.shift_sequence, {"x": X, "offset": 1, "dim": 1} | HERE),
    "ring_scan": (ds_ring.ring_scan, {"transition": X[0, :1], "increment": X[0, :1], "matrix": False} | HERE),
    "ngram_rows": (
        ds_ring.ngram_rows, {"ids": IDS[..., 0], "multipliers": [3, 5], "sizes": [[7, 11]]} | HERE,
    ),
    "sharded_rows": (ds_ring.sharded_rows, {"table": X[0], "rows": IDS, "mesh": MESH}),
    "max_logits": (ds_ring.max_logits, {"q": Q, "k": Q} | HERE),
    "selected_attention": (ds_ring.selected_attention, {**QKV, "chosen": IDS} | HERE),
    "moba_attention": (ds_ring.moba_attention, {**QKV, "block_size": 4, "top_k": 1} | HERE),
    "latent_attention": (
        ds_ring.latent_attention, {**LATENTS, "up_projection": torch.ones(18, 3), "pattern": Causal()} | HERE,
    ),
    "Softcap": (lambda cap: attend(**ATTENTION, score_mod=ds_ring.Softcap(cap)), {"cap": 3.0}),
}  # fmt: skip
MANY = list(range(1000, 2000))  # the ids of a sequence's tokens, say


def test_layers_take_their_plain_arguments() -> None:
    for function, arguments in LAYERS.values():
        function(**arguments)


@pytest.mark.parametrize("name", [*CALLS, *LAYERS])
def test_no_message_prints_a_list_of_ids(name: str) -> None:
    """(A dispatcher's own error had all of them: 12,000 letters.)"""
    if name in CALLS:
        function, plain, names = CALLS[name].function, CALLS[name].plain, [*CALLS[name].probed]
    else:
        function, plain = LAYERS[name]
        names = [*plain]
    wrong = []
    for argument, value in itertools.product(names, (MANY, [MANY], tuple(MANY), torch.tensor(MANY))):
        result, _ = outcome(Call(function, plain, {}), plain | {argument: value})
        text = str(result) if isinstance(result, Exception) else "expected, got"
        is_typed = isinstance(result, RingError) or not isinstance(result, Exception)
        if not (is_typed and "expected" in text and "got" in text) or len(text) > 500:
            wrong.append(f"{argument}, {named(value)}: {type(result).__name__} {text[:200]}")
        elif re.search(r"(\d+, ){6}", text):
            wrong.append(f"{argument}, {named(value)}: {text}")
    assert not wrong, "\n".join(wrong)


def test_many_items_are_counted_and_arrays_are_shapes() -> None:
    assert shown(MANY) == "list [1000, 1001, 1002, 1003, ...] of 1,000 items"
    assert shown((3, 4)) == "tuple (3, 4)" and shown([[1, 2], [3]]) == "list [[1, 2], [3]]"
    assert shown([MANY]) == "list [[1000, 1001, 1002, 1003, ...]]"
    assert shown(torch.tensor(MANY)) == "Tensor of shape (1000,), torch.int64"
    assert shown(np.zeros((2, 3))) == "ndarray of shape (2, 3), float64"
    assert shown(np.float32(2)) == f"float32 {np.float32(2)!r}"
    with pytest.raises(ds_ring.RingConfigError) as error:
        RingConfig.from_deepspeed({"sequence_parallel_size": 1, "ring_attention": {"chunk_bytes": [MANY]}})
    assert not re.search(r"(\d+, ){6}", str(error.value))


def test_there_are_enough_probes() -> None:
    count = sum(len(a.refused) + len(a.equal) for call in CALLS.values() for a in call.probed.values())
    assert count >= 200, count

"""Wrong inputs: a typed error that says what to do, on every rank, in under a second; and the ring goes on.

One row is one mistake. After each the same ring makes a correct pass, held against float64: a refused call
must leave nothing behind, neither in the process nor on the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import ds_ring.errors
from ds_ring import (
    Causal,
    Dilated,
    Documents,
    Full,
    RingAttention,
    RingConfig,
    RingError,
    RingMesh,
    RingMeshError,
    RingMismatchError,
    gather_sequence,
    make_layout,
    shard_sequence,
)
from ds_ring.comm.exchange import Exchange
from tests import calls
from tests.cases import Shape, tensors
from tests.dist.harness import Pool, RankPool, catch_failure, first_in_time
from tests.parity import errors, gathered_pass
from tests.reference import dense_attention

Arguments = dict[str, Any]
SHAPE = Shape(batch=2, query_heads=8, kv_heads=4, tokens=64, head_dim=16)
SECONDS = 1.0  # from the call to the error, on every rank


class Refusal(NamedTuple):
    """What one rank saw of a wrong call, and of the correct one after it.

    Attributes:
        error: class name of what was raised; "" for nothing.
        families: names of all its base classes.
        text: the message.
        seconds: from the call to the error.
        afterwards: largest relative error of output and gradients of the correct pass on the same mesh.
    """

    error: str
    families: tuple[str, ...]
    text: str
    seconds: float
    afterwards: float


def right_arguments(mesh: RingMesh, shape: Shape = SHAPE) -> Arguments:
    """A correct call of `ring_attention` on this rank."""
    layout = make_layout(
        "zigzag", tokens=shape.tokens, ring_size=mesh.ring_size, multiple_of=mesh.ulysses_size
    )
    q, k, v, _ = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in tensors(shape))
    return {"q": q, "k": k, "v": v, "pattern": Causal(), "layout": layout, "mesh": mesh}


def attend(arguments: Arguments) -> Tensor:
    """`ring_attention` with q, k and v by position, as people call it."""
    rest = {name: value for name, value in arguments.items() if name not in ("q", "k", "v")}
    return calls.attend(arguments["q"], arguments["k"], arguments["v"], **rest)


def error_of_a_correct_pass(mesh: RingMesh) -> float:
    """Forward and backward on `mesh`, against dense float64 attention."""
    arguments, whole = right_arguments(mesh), tensors(SHAPE)

    def call(*qkv: Tensor) -> Tensor:
        return attend(arguments | dict(zip(("q", "k", "v"), qkv, strict=True)))

    result = gathered_pass(call, whole, arguments["layout"], mesh)
    return max(errors(result, dense_attention(*whole, Causal())).values())


def refusal(act: Callable[[], object], mesh: RingMesh) -> Refusal:
    """What `act` raises here, and how a correct pass fares after it."""
    return Refusal(*catch_failure(act), error_of_a_correct_pass(mesh))


def check_refusal(result: Refusal, error: str, says: tuple[str, ...]) -> None:
    """The right type, of the user's family, quickly, with these words; and the ring still works."""
    assert result.error == error, result
    assert issubclass(getattr(ds_ring.errors, error), RingError) and "ValueError" in result.families
    missing = [words for words in says if words not in result.text]
    assert not missing, f"{missing} not in: {result.text}"
    assert result.seconds < SECONDS, result
    assert result.afterwards < 1e-5, result


def outcomes(pool: RankPool, fn: Callable[..., Any], *args: object) -> list[Refusal]:
    """The refusals by rank; a rank that hangs, raises or exits fails the test with its stack."""

    def run() -> list[Refusal]:
        result = pool.collect(fn, *args, timeout_s=30)
        assert all(item.status == "returned" for item in result), [
            item.report for item in result if item.report
        ]
        return [item.value for item in result]

    return first_in_time(run, lambda result: all(item.seconds < SECONDS for item in result))


# --- wrong arguments of ring_attention -------------------------------------------------------------


@dataclass(frozen=True)
class Wrong:
    """One wrong argument.

    Attributes:
        change: what is wrong, done to the arguments of a correct call.
        error: the error of the ranks that are wrong (of all where `ranks` merely differ).
        says: what its message must contain: what was got, what was expected, what to do.
        ranks: who is wrong; None for all.
    """

    change: Callable[[Arguments], Any]
    error: str
    says: tuple[str, ...]
    ranks: tuple[int, ...] | None = (1,)


def on(*names: str, do: Callable[[Tensor], Any]) -> Callable[[Arguments], Any]:
    """Replace some tensors."""

    def change(arguments: Arguments) -> None:
        arguments.update({name: do(arguments[name]) for name in names})

    return change


def put(**values: object) -> Callable[[Arguments], Any]:
    """Replace or add some arguments."""
    return lambda arguments: arguments.update(values)


def shape(**sizes: int) -> Callable[[Arguments], Any]:
    """Correct arguments, but for a whole sequence of another shape."""

    def change(arguments: Arguments) -> None:
        arguments.update(right_arguments(arguments["mesh"], replace(SHAPE, **sizes)))

    return change


def layout(name: str = "zigzag", **sizes: int) -> Callable[[Arguments], Any]:
    """Another layout, and tensors of which it is not known who cut them."""

    def change(arguments: Arguments) -> None:
        old = arguments["layout"]
        arguments.update({key: arguments[key].clone() for key in QKV if key in arguments})
        arguments["layout"] = make_layout(
            name, **({"tokens": old.tokens, "ring_size": old.ring_size, "multiple_of": 1} | sizes)
        )

    return change


def latents(**changed: Callable[[Tensor], Any]) -> Callable[[Arguments], Any]:
    """Latents and an up-projection that fit q, but for what is changed."""

    def change(arguments: Arguments) -> None:
        k, v = arguments["k"][:, :1], arguments["v"][:, :1, :, :4]  # L = 16, R = 4, so N = 12; E = 8
        right = {"q": arguments["q"], "k": k, "v": v, "up_projection": k.new_ones((8 * (12 + 8), 16))}
        arguments.update({name: changed.get(name, lambda x: x)(x) for name, x in right.items()})

    return change


def as_dtensor(x: Tensor) -> Tensor:
    """This rank's tensor as one of a mesh of the world."""
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    devices = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return DTensor.from_local(x, devices, [Replicate()], run_check=False)


ALL, QKV = None, ("q", "k", "v")
TYPED, MISMATCH = "RingShapeError", "RingMismatchError"
WRONG = {
    # What only a comparison of ranks can find: all of them raise, and name both ranks and the field.
    "tokens differ": Wrong(shape(tokens=32), MISMATCH,
        ("local tokens: ring rank 0 has 32, ring rank 1 has 16", "same model")),
    "batch differs": Wrong(shape(batch=3), MISMATCH, ("batch size: ring rank 0 has 2, ring rank 1 has 3",)),
    "heads differ": Wrong(shape(query_heads=4), MISMATCH,
        ("query heads: ring rank 0 has 8, ring rank 1 has 4",)),
    "K/V heads differ": Wrong(shape(kv_heads=2), MISMATCH,
        ("K/V heads: ring rank 0 has 4, ring rank 1 has 2",)),
    "head_dim differs": Wrong(shape(head_dim=32), MISMATCH,
        ("head_dim: ring rank 0 has 16, ring rank 1 has 32",)),
    "dtype differs": Wrong(on(*QKV, do=Tensor.bfloat16), MISMATCH,
        ("dtype of q", "ring rank 1 has torch.bfloat16", "ring rank 0 has torch.float32", "same model")),
    "pattern differs": Wrong(put(pattern=Full()), MISMATCH,
        ("pattern: ring rank 0 has Causal(), ring rank 1 has Full()", "same model")),
    "layout differs": Wrong(layout("striped"), MISMATCH,
        ("layout: ring rank 0 has zigzag", "ring rank 1 has striped layout of 64 tokens")),
    "scale differs": Wrong(put(scale=0.25), MISMATCH, ("scale: ring rank 0 has None, ring rank 1 has 0.25",)),
    "transport differs": Wrong(put(transport="all_gather"), MISMATCH,
        ("transport: ring rank 0 has ring, ring rank 1 has all_gather",)),
    "pruning differs": Wrong(put(prune=False), MISMATCH,
        ("prune: ring rank 0 has True, ring rank 1 has False",)),
    "kernel differs": Wrong(put(kernel="reference"), MISMATCH,
        ("kernel: ring rank 0 has auto, ring rank 1 has reference",)),
    # What the rank that is wrong sees by itself: it says what, the others say who.
    "k in another dtype": Wrong(on("k", do=Tensor.half), TYPED,
        ("k is torch.float16", "q is torch.float32", "cast")),
    "integers": Wrong(on(*QKV, do=Tensor.int), TYPED,
        ("q: expected a floating dtype", "torch.int32", "cast")),
    "complex": Wrong(on(*QKV, do=lambda x: x.to(torch.complex64)), TYPED, ("torch.complex64", "cast")),
    "three dimensions": Wrong(on(*QKV, do=lambda x: x[0]), TYPED,
        ("expected 4 dimensions", "(8, 32, 16)", "unsqueeze")),
    "five dimensions": Wrong(on("v", do=lambda x: x[None]), TYPED,
        ("v: expected 4 dimensions", "(1, 2, 4, 32, 16)")),
    "k shorter than v": Wrong(on("k", do=lambda x: x[:, :, 1:]), TYPED,
        ("(2, 4, 31, 16)", "(2, 4, 32, 16)", "equal batch, heads and tokens")),
    "batch of k": Wrong(on("k", "v", do=lambda x: x[:1]), TYPED, ("(1, 4, 32, 16)", "batch (dim 0)")),
    "head_dim of k": Wrong(on("k", "v", do=lambda x: x[..., :8]), TYPED,
        ("(2, 4, 32, 8)", "head_dim (dim 3)")),
    "heads no multiple": Wrong(on("k", "v", do=lambda x: x[:, :3]), TYPED,
        ("a multiple of K/V heads, got 8 and 3", "grouped-query")),
    "empty": Wrong(on(*QKV, do=lambda x: x[:, :, :0]), TYPED, ("(2, 8, 0, 16)", "at least a slot")),
    "q alone too short": Wrong(on("q", do=lambda x: x[:, :, :9]), TYPED,
        ("32 slots per rank", "q with 9", "shard_sequence")),
    "meta": Wrong(on(*QKV, do=lambda x: x.to("meta")), TYPED,
        ("q: expected a tensor with values", "meta", "to_empty")),
    "no tensor": Wrong(put(v=None), TYPED, ("v: expected a tensor, got NoneType",)),
    "sparse": Wrong(on("k", do=Tensor.to_sparse), TYPED, ("k: expected a dense tensor", "to_dense")),
    "layout of other tokens": Wrong(layout(tokens=128), TYPED,
        ("expected 64 slots per rank", "got q with 32", "shard_sequence")),
    "layout for another ring": Wrong(layout(ring_size=7), "RingLayoutError",
        ("for 2 ranks (the mesh's ring), got one for 7 ranks", "make_layout(..., ring_size=2)")),
    # (Attention of tokens in another order: silently off by the size of the result.)
    "layout of other shards": Wrong(put(layout="contiguous"), "RingLayoutError",
        ("q: expected a shard of the layout of the call", "pass layout=, that of shard_sequence")),
    "layout unknown": Wrong(put(layout="zigzack"), "RingLayoutError",
        ("contiguous, zigzag, striped", "got 'zigzack'")),
    "layout a number": Wrong(put(layout=4), "RingLayoutError", ("got 4", "make_layout")),
    "pattern a text": Wrong(put(pattern="causal"), "RingPatternError", ("got 'causal'", "ds_ring.Causal()")),
    "options that are none": Wrong(put(options={"transport": "ring"}), "RingConfigError",
        ("options: expected PassOptions, got", "use ds_ring.PassOptions(transport=...)")),
    "transport unknown, all": Wrong(put(transport="pigeon"), "RingConfigError",
        ('transport: expected one of "ring", "reproducible", "all_gather", "direct", "fastest", got "pigeon"',),
        ALL),
    "kernel unknown": Wrong(put(kernel="fast"), "RingConfigError",
        ('kernel: expected one of "auto", "reference", ', 'got "fast"')),
    "scale not finite": Wrong(put(scale=float("nan")), "RingConfigError", ("got NaN", "1 / sqrt(head_dim)")),
    "scale a text": Wrong(put(scale="big"), "RingConfigError", ('a finite number, got "big"',)),
    "replicated queries, meta": Wrong(
        lambda arguments: arguments.update(queries="replicated", k=arguments["k"].to("meta")),
        TYPED,
        ("k: expected a tensor with values", "to_empty"),
    ),
    "replicated queries, positions no numbers": Wrong(put(queries="replicated", positions=["first"]), TYPED,
        ("positions: expected integers [Q], got ['first']",)),
    "replicated queries that differ": Wrong(
        lambda arguments: arguments.update(
            queries="replicated", q=arguments["q"] + arguments["mesh"].ring_rank
        ),
        MISMATCH,
        ("values of q: ring rank 0 has checksum", "ring rank 1 has checksum"),
        ALL,
    ),
    "DTensor": Wrong(on("q", do=as_dtensor), TYPED, ("got a DTensor", ".to_local()", "shard_sequence"), ALL),
    "nested": Wrong(on("k", do=lambda x: torch.nested.nested_tensor(list(x))), TYPED,
        ("nested", "Documents")),
    "quantized": Wrong(on("v", do=lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)), TYPED,
        ("dequantize",)),
    "latents on one rank": Wrong(
        lambda arguments: latents()(arguments) if arguments["mesh"].ring_rank else None,
        MISMATCH,
        ("K/V heads: ring rank 0 has 4, ring rank 1 has 1",),
        ALL,
    ),
    "values of another width differ": Wrong(
        lambda arguments: latents(
            up_projection=(lambda x: torch.cat([x, x[:8]])) if arguments["mesh"].ring_rank else torch.clone
        )(arguments),
        MISMATCH,
        ("up_projection: ring rank 0 has (160, 16), ring rank 1 has (168, 16)",),
        ALL,
    ),
    "up-projection of another latent": Wrong(latents(up_projection=lambda x: x[:, 1:]), TYPED,
        ("up_projection: expected shape", "(160, 15)", "L = 16")),
    "up-projection of another width": Wrong(latents(up_projection=lambda x: x[1:]), TYPED,
        ("up_projection: expected shape", "(159, 16)", "N = 12")),
    "up-projection without values": Wrong(latents(up_projection=lambda x: x[: 8 * 12]), TYPED,
        ("E of at least 1", "(96, 16)")),
    "up-projection of another dtype, all": Wrong(latents(up_projection=Tensor.half), TYPED,
        ("up_projection: expected torch.float32 on cpu, as q", "torch.float16"), ALL),
    "up-projection no tensor": Wrong(latents(up_projection=Tensor.tolist), TYPED,
        ("up_projection: expected a tensor, got list",)),
    "latents of several heads": Wrong(
        latents(k=lambda x: x.expand(-1, 2, -1, -1), v=lambda x: x.expand(-1, 2, -1, -1)),
        TYPED,
        ("latent: expected [batch, 1, tokens, L], got several heads", "what all heads share"),
    ),
    "rotary key wider than queries": Wrong(latents(v=lambda x: x.repeat(1, 1, 1, 5)), TYPED,
        ("at most q's head_dim 16, got 20",)),
    "payloads of replicated queries": Wrong(
        lambda arguments: arguments.update(queries="replicated", gradient_payload="bfloat16"),
        "RingConfigError",
        ('sends no K/V: expected gradient_payload "float32", got "bfloat16"',),
    ),
    "latents, and heads that differ": Wrong(
        lambda arguments: (
            latents()(arguments),
            arguments.update(pattern=Dilated((16, 64), (1, 4), causal=True)),
        ),
        "RingPatternError",
        ("the same for all heads", "head_offsets"),
    ),
    "no time at all": Wrong(put(hop_timeout_seconds=0.0), "RingConfigError",
        ("seconds above 0, got 0.0", "use 10 or 60"), ALL),
}  # fmt: skip


def call_wrongly(rank: int, world_size: int, name: str, ulysses_size: int) -> Refusal:
    """The wrong call of a row of WRONG, then a correct one."""
    mesh, case = RingMesh.from_world(world_size // ulysses_size, ulysses_size), WRONG[name]
    arguments = right_arguments(mesh)
    if case.ranks is None or rank in case.ranks:
        case.change(arguments)
    return refusal(lambda: attend(arguments), mesh)


@pytest.mark.situation("inputs", "a wrong argument")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_end_in_a_typed_error_on_every_rank(rank_pool: Pool, name: str) -> None:
    case = WRONG[name]
    for rank, result in enumerate(outcomes(rank_pool(2), call_wrongly, name, 1)):
        if case.error == MISMATCH or case.ranks is None or rank in case.ranks:
            check_refusal(result, case.error, case.says)
        else:
            check_refusal(result, MISMATCH, ("ring rank 1 refused its own input: ", *case.says))


@pytest.mark.parametrize(
    "name", ["tokens differ", "dtype differs", "three dimensions", "meta", "kernel unknown"]
)
@pytest.mark.parametrize(("world_size", "ulysses_size"), [(2, 2), (3, 1), (4, 2), (4, 4)])
@pytest.mark.covering(1)  # what is wrong does not depend on where
def test_every_rank_of_the_sequence_hears_of_it(
    rank_pool: Pool, name: str, world_size: int, ulysses_size: int
) -> None:
    """Before Ulysses' all-to-all, too, and in rings and Ulysses groups that the wrong rank is not in."""
    for rank, result in enumerate(outcomes(rank_pool(world_size), call_wrongly, name, ulysses_size)):
        wrong_itself = rank == 1 and WRONG[name].error != MISMATCH
        ring_rank, ulysses_rank = divmod(1, ulysses_size)
        place = f"ring rank {ring_rank}" + (f", Ulysses rank {ulysses_rank}" if ulysses_size > 1 else "")
        check_refusal(
            result, WRONG[name].error if wrong_itself else MISMATCH, () if wrong_itself else (place,)
        )


def documents_of_other_tokens(rank: int, world_size: int) -> str:
    """What a pattern of too few tokens raises on Ulysses ranks, which cannot exchange heads meanwhile."""
    mesh = RingMesh.from_world(1, world_size)
    arguments = right_arguments(mesh) | {"pattern": ds_ring.Documents([0] * 7)}
    sending = mock.patch.object(Exchange, "all_to_all", side_effect=AssertionError("heads were sent"))
    with sending, pytest.raises(RingError) as raised:
        attend(arguments)
    return f"{raised.type.__name__}: {raised.value}"


def test_a_pattern_of_other_tokens_is_refused_before_heads_are_exchanged(rank_pool: Pool) -> None:
    for result in rank_pool(2).run(documents_of_other_tokens):
        assert result.startswith("RingPatternError") and "of 64 tokens, as the layout, got one of 7" in result


def heads_over_ulysses(rank: int, world_size: int) -> Refusal:
    """Two K/V heads cannot be split over four Ulysses ranks."""
    mesh = RingMesh.from_world(1, world_size)
    arguments = right_arguments(mesh, replace(SHAPE, kv_heads=2))
    return refusal(lambda: attend(arguments), mesh)


def test_heads_that_ulysses_cannot_split(rank_pool: Pool) -> None:
    says = ("expected a divisor of 2 K/V heads (of 8 query heads), got 4", "use a divisor of 2")
    for result in outcomes(rank_pool(4), heads_over_ulysses):
        check_refusal(result, TYPED, says)


def one_of_two_rings(rank: int, world_size: int) -> Refusal:
    """Data parallel: rank 1 is wrong, its ring (0, 1) refuses, the ring (2, 3) has nothing to do with it."""
    mesh = RingMesh.from_world(2)
    arguments = right_arguments(mesh)
    if rank == 1:
        arguments["k"] = arguments["k"].half()
    return refusal(lambda: attend(arguments), mesh)


def test_another_ring_is_not_disturbed(rank_pool: Pool) -> None:
    first, wrong, *others = outcomes(rank_pool(4), one_of_two_rings)
    check_refusal(first, MISMATCH, ("ring rank 1 (rank 1 of the world) refused",))
    check_refusal(wrong, TYPED, ("k is torch.float16",))
    assert [result.error for result in others] == ["", ""]
    assert max(result.afterwards for result in others) < 1e-5


# --- wrong calls: the module, the order of calls, shards, meshes, configurations -------------------


@dataclass(frozen=True)
class WrongCall:
    """One wrong call.

    Attributes:
        act: makes it; gets the rank and the mesh, and the ranks decide by themselves who is wrong.
        errors: the error of rank 0 and of rank 1.
        says: what both messages must contain, or those of rank 0 and rank 1 apart.
    """

    act: Callable[[int, RingMesh], object]
    errors: tuple[str, str]
    says: tuple[str, ...] | tuple[tuple[str, ...], tuple[str, ...]]


def attention_of(
    mesh: RingMesh, options: dict[str, object] | None = None, **section: object
) -> RingAttention:
    """The module that a JSON with these keys gives."""
    section = {"ring_size": mesh.ring_size, **section, **({"kernel_options": options} if options else {})}
    return RingAttention(RingConfig.from_deepspeed({"ring_attention": section}), mesh=mesh)


def module_call(who: int | None, *args: object, **kwargs: object) -> Callable[[int, RingMesh], Tensor]:
    """RingAttention's forward with more than q, k and v, on one rank or (None) on all."""

    def act(rank: int, mesh: RingMesh) -> Tensor:
        arguments = right_arguments(mesh)
        tensors_ = (arguments[name] for name in ("q", "k", "v"))
        if who is None or rank == who:
            return attention_of(mesh)(*tensors_, *args, **kwargs)
        return attention_of(mesh)(*tensors_)

    return act


def module_of(**section: object) -> Callable[[int, RingMesh], Tensor]:
    """A JSON that parses, but not for what is installed here; on all ranks."""

    def act(rank: int, mesh: RingMesh) -> Tensor:
        arguments = right_arguments(mesh)
        module = attention_of(mesh, **({"layout": "zigzag"} | section))
        return module(arguments["q"], arguments["k"], arguments["v"])

    return act


def forward_against_backward(rank: int, mesh: RingMesh) -> None:
    """Rank 0 goes on with another forward where rank 1 goes back."""
    arguments = right_arguments(mesh)
    arguments["q"].requires_grad_()
    out = attend(arguments)
    if rank == 0:
        attend(arguments)
    else:
        out.sum().backward()


def one_call_more(rank: int, mesh: RingMesh) -> None:
    """Rank 1 makes two passes with a gradient, rank 0 one: seen at the first that has no partner."""
    arguments = right_arguments(mesh)
    arguments["q"].requires_grad_()
    out = sum((attend(arguments) for _ in range(rank + 1)), torch.zeros(()))
    out.sum().backward()


def attention_against_gather(rank: int, mesh: RingMesh) -> None:
    """Rank 0 attends where rank 1 gathers."""
    arguments = right_arguments(mesh)
    if rank == 0:
        attend(arguments)
    else:
        gather_sequence(arguments["q"], arguments["layout"], mesh=mesh, dim=2)


def different_contexts(rank: int, mesh: RingMesh) -> None:
    """A refusal in different contexts leaves the ranks in step: what they have in common still works."""
    arguments = right_arguments(mesh)
    mine = arguments | {"scale": 0.5 if rank == 0 else 0.25}
    with pytest.raises(RingMismatchError):
        attend(mine)
    attend(arguments | {"scale": 0.5})
    attend(arguments | {"scale": 0.25})
    attend(mine)


def gather(
    who: int | None, cut: Callable[[Tensor], Tensor], dim: int = 2
) -> Callable[[int, RingMesh], Tensor]:
    """gather_sequence of a changed shard, on one rank or (None) on all."""

    def act(rank: int, mesh: RingMesh) -> Tensor:
        arguments = right_arguments(mesh)
        q = cut(arguments["q"]) if who is None or rank == who else arguments["q"]
        return gather_sequence(q, arguments["layout"], mesh=mesh, dim=dim)

    return act


def both(error: str) -> tuple[str, str]:
    return error, error


PATTERN = both("RingPatternError")
CONFIG, LAYOUT, MESH = both("RingConfigError"), both("RingLayoutError"), both("RingMeshError")
SHAPES, REFUSED = both(TYPED), ("RingMismatchError", "RingConfigError")
WHO = ("ring rank 1 refused its own input",)
CALLS = {
    "dropout": WrongCall(module_call(None, dropout=0.1), CONFIG, ("dropout: expected 0, got 0.1", "model's")),
    "dropout on rank 1": WrongCall(module_call(1, dropout_p=0.1), REFUSED, (WHO, ("dropout_p", "0.1"))),
    "attention mask": WrongCall(module_call(None, attention_mask=torch.ones(2, 64)), CONFIG,
        ("attention_mask", "express masks as a pattern")),
    "attention mask on rank 1": WrongCall(module_call(1, attention_mask=torch.ones(2, 64)), REFUSED,
        (WHO, ("attention_mask", "pattern"))),
    "mask by position": WrongCall(module_call(None, None, torch.ones(2, 64)), CONFIG,
        ("'Tensor'", "express masks as a pattern")),
    "batch_dim_idx 2": WrongCall(module_call(None, 2), CONFIG, ("got 2", "1 for [S, B, H, D]")),
    "batch_dim_idx 2 on rank 1": WrongCall(module_call(1, 2), REFUSED, (WHO, ("got 2",))),
    "no configuration": WrongCall(
        lambda rank, mesh: RingAttention({"causal": True}, mesh=mesh),  # type: ignore[arg-type]
        CONFIG,
        ("expected a RingConfig or a Pattern, got dict", "from_deepspeed"),
    ),
    "kernel not there": WrongCall(module_of(kernel="flesh"), CONFIG,
        ('expected one of "auto", "reference"', 'got "flesh"')),
    "kernel of another device": WrongCall(module_of(kernel="flex"), CONFIG,
        ('kernel "flex"', "got cpu", 'use "auto"')),
    "kernel option unknown": WrongCall(module_of(options={"blok": 64}), CONFIG,
        ("'blok': 64", "kernel 'cpu'", "unexpected keyword argument 'blok'")),
    "layout not there": WrongCall(module_of(layout="residue"), LAYOUT,
        ('layout "residue"', "Dilated(...)", "got Causal()")),
    "documents without any": WrongCall(module_of(pattern={"documents": True}), both("RingConfigError"),
        ("documents", "got none", "pass")),
    "forward against backward": WrongCall(forward_against_backward, both(MISMATCH),
        ("operation: ring rank 0 has attention forward, ring rank 1 has attention backward",)),
    "one call more": WrongCall(one_call_more, both(MISMATCH),
        ("operation: ring rank 0 has attention backward, ring rank 1 has attention forward",)),
    "attention against gather": WrongCall(attention_against_gather, both(MISMATCH),
        ("operation: ring rank 0 has attention forward, ring rank 1 has gather_sequence",)),
    "different contexts": WrongCall(different_contexts, both(MISMATCH),
        ("scale: ring rank 0 has 0.5, ring rank 1 has 0.25",)),
    "gather of a wrong length": WrongCall(gather(None, lambda x: x[:, :, :30]), SHAPES,
        ("expected 32 slots", "got 30 in dim 2", "its layout")),
    "gather of a wrong length on rank 1": WrongCall(gather(1, lambda x: x[:, :, :30]), (MISMATCH, TYPED),
        (WHO, ("expected 32 slots", "got 30 in dim 2"))),
    "gather of different batches": WrongCall(gather(1, lambda x: x[:1]), both(MISMATCH),
        ("shape: ", "32, 16)", "same model")),
    "gather along a dimension that is not there": WrongCall(gather(None, lambda x: x, dim=4), SHAPES,
        ("dim 4", "(2, 8, 32, 16)")),
    "ring size 3 of 2 ranks": WrongCall(lambda rank, mesh: RingMesh.from_world(3), MESH,
        ("3", "does not divide world size 2", "use 1 or 2")),
    "no mesh": WrongCall(lambda rank, mesh: attend(right_arguments(mesh) | {"mesh": None}), MESH,
        ("RingMesh.from_world",)),
    "documents of another length": WrongCall(
        lambda rank, mesh: attend(right_arguments(mesh) | {"pattern": Documents([0] * 63)}),
        PATTERN,
        ("expected a pattern of 64 tokens", "got one of 63", "63 tokens"),
    ),
    "documents of another length on rank 1": WrongCall(
        lambda rank, mesh: attend(right_arguments(mesh) | {"pattern": Documents([0] * (64 + rank))}),
        (MISMATCH, "RingPatternError"),
        (WHO, ("got one of 65",)),
    ),
}  # fmt: skip


def act_wrongly(rank: int, world_size: int, name: str) -> Refusal:
    """The wrong call of a row of CALLS, then a correct one."""
    mesh = RingMesh.from_world(world_size)
    return refusal(lambda: CALLS[name].act(rank, mesh), mesh)


@pytest.mark.situation("inputs", "a wrong call")
@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls_end_in_a_typed_error_on_every_rank(rank_pool: Pool, name: str) -> None:
    case = CALLS[name]
    for rank, result in enumerate(outcomes(rank_pool(2), act_wrongly, name)):
        apart = isinstance(case.says[0], tuple)
        check_refusal(result, case.errors[rank], case.says[rank] if apart else case.says)  # type: ignore[arg-type]


def test_a_mesh_before_the_process_group() -> None:
    with pytest.raises(RingMeshError, match=r"not initialised.*init_process_group"):
        RingMesh.from_world(2)


# --- inside torch.compile --------------------------------------------------------------------------


def compiled_wrongly(rank: int, world_size: int, name: str, backend: str) -> Refusal:
    """The same mistakes under torch.compile(fullgraph=True)."""
    mesh, case = RingMesh.from_world(world_size), WRONG[name]
    arguments = right_arguments(mesh)
    if rank == 1:
        case.change(arguments)
    function, rest = calls.function_of({n: value for n, value in arguments.items() if n not in QKV})

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = function(q, k, v, return_lse=True, **rest)
        return out + lse[..., None]

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    result = refusal(lambda: compiled(*(arguments[n] for n in QKV)), mesh)
    return result._replace(seconds=0.0)  # most of them are the compiler's


@pytest.mark.situation("inputs", "a wrong call inside a compiled function")
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",  # as inductor runs the operator, without half a minute of C++
        pytest.param("inductor", marks=[pytest.mark.night, pytest.mark.needs("compiler")]),
    ],
)
@pytest.mark.parametrize(
    "name", ["heads no multiple", "layout of other tokens", "batch differs", "kernel unknown"]
)
@pytest.mark.day("heads no multiple-aot_eager", "kernel unknown-aot_eager")
def test_errors_come_through_torch_compile_as_they_are(rank_pool: Pool, name: str, backend: str) -> None:
    case = WRONG[name]
    for rank, result in enumerate(outcomes(rank_pool(2), compiled_wrongly, name, backend)):
        wrong = case.error == MISMATCH or rank == 1
        says = case.says if wrong else ("ring rank 1 refused its own input", *case.says)
        check_refusal(result, case.error if wrong else MISMATCH, says)

"""Turn a plan into the steps of a rank, and decide their order.

The steps of one direction are in `ways.py`, of stages in `stages.py`. Together they decide everything
about time and memory: overlap, head chunks, double buffers, and when direct sends and gradient returns leave.

[Note: head chunks]
A backward pass in one direction, on one level, needs up to twelve shard-sized tensors, packed copies not
counted: K and V in use and arriving (4), dK and dV arriving, in use and leaving (6), and dK and dV of the own
shard that return (2). Heads are independent, so they go around the ring in chunks, one after the other. With
n equal chunks a buffer has one n-th of the size. A chunk must be large enough that its messages use the
network well; `chunk_bytes_on` returns the least size.

[Note: one chunk after another]
A chunk receives no keys during its last hop, and its last gradients return after that hop. With two ranks,
all gradients return then, and they would overlap with no computation. So the next chunk starts early: its
first keys and values travel during the last hop of this chunk, and the gradients of this chunk return while
the next chunk computes. During that time the buffers of both chunks exist. If there are fewer chunks than
`MANY_CHUNKS`, the buffers are large, so each chunk of a backward pass starts one batch later. Its first keys
and values then travel while the gradients of the previous chunk return.

The last gradients of the last chunk have no later chunk to overlap with: see [Note: a part for the end]. A
rank may read nothing at some hops before its last one (with a window and sinks, for example). In their
batches it computes nothing, but may send and receive, in each chunk. The next chunk does not start earlier
for that: all ranks start a chunk in the same batch, so messages of two ranks have the same order on both.

[Note: a part for the end]
In a backward pass, gradients return to owners after a rank's last hop. If the rank computes at every hop,
this takes one batch. Gradients from another node of R ranks take R batches. A rank that stops earlier has
more batches, as later ranks still read its shard. In a contiguous causal ring of 4 ranks, rank 0 computes at
hop 0 alone and has four (1 to 4). Rank 1 has two (2 and 3). The first half of the own shard's queries is cut
into parts of at least `LEAST_KEPT` queries. The last batches compute one part each. On causal zigzag shards
they form one triangle. The first batch computes the other queries, and a half below `LEAST_KEPT`.
TransformerEngine also computes its diagonal last. All chunks have this order, so the number of chunks changes
no bit of the result. Each part has all keys of its queries, so a kernel can apply the pattern (`Tiles.rule`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from ds_ring.masks.joins import cut_queries, find_middle_slot
from ds_ring.masks.slots import count_slots
from ds_ring.schedule.rank_plan import (
    DirectionPlan,
    HeadClassPlan,
    RankPlan,
)
from ds_ring.schedule.steps import (
    RESULTS,
    Accumulate,
    Buffer,
    ChunkSteps,
    Compute,
    Free,
    HeadChunk,
    Payload,
    Round,
    Schedule,
)
from ds_ring.schedule.ways import HopByHop

MANY_CHUNKS = 16  # from this number on, one chunk is small compared with the shard
CHUNK_BYTES_CPU = 1 << 20  # in rings of at most two ranks
LEAST_BYTES_CPU = 128 << 10
CHUNK_BYTES_GPU = 64 << 20  # fewer heads would not fill the device
STAGE_BYTES_GPU = 128 << 20  # K, V of four shards of 8 Ki tokens, 8 heads, D 128; longer shards gain less
LEAST_KEPT = 2048  # queries of a part for the end; a smaller part costs more to launch than to compute
LONG_SHARD = 131_072  # tokens; from here on copies to the host and back take less time than the pass


def chunk_bytes_on(device_type: str, ring_size: int) -> int:
    """Return the least bytes of K, or of V, for which a head chunk of its own pays.

    On the CPU this is 1 MiB for two ranks. For more ranks it is 2 MiB divided by the ring size, but at least
    128 KiB. So for one sequence the message buffers shrink in larger rings, as the shards do.
    """
    if device_type != "cpu":
        return CHUNK_BYTES_GPU
    return max(2 * CHUNK_BYTES_CPU // max(ring_size, 2), LEAST_BYTES_CPU)


def heads_on_host(setting: bool | Literal["auto"], device_type: str, local_tokens: int) -> bool:
    """Return whether the tensors of attention are kept in host memory between forward and backward pass.

    "auto" does for shards of at least `LONG_SHARD` tokens, except on the CPU.
    """
    return device_type != "cpu" and local_tokens >= LONG_SHARD if setting == "auto" else setting


def stage_shards(
    setting: int | Literal["auto"], device_type: str, ring_size: int, ranks_per_node: int | None,
    shard_bytes: int,
) -> int | None:  # fmt: skip
    """Return how many shards a stage may have; None for a pass hop by hop. See [Note: stages].

    Args:
        setting: most bytes of K and V of a stage, 0 for none; "auto" takes `STAGE_BYTES_GPU` on a GPU if all
            ranks of the ring share a node, else 0.
        device_type: "cpu" or "cuda".
        ring_size: number of ranks.
        ranks_per_node: neighbours on the ring that share a node; None if that is not known.
        shard_bytes: bytes of K and V of a shard.
    """
    if setting == "auto":
        setting = STAGE_BYTES_GPU if device_type != "cpu" and ranks_per_node == ring_size else 0
    most = min(setting // max(shard_bytes, 1), ring_size - 1)
    # Stages of one shard save nothing, except in a ring of two, which has only one.
    return most if most >= min(2, ring_size - 1) > 0 else None


def head_bytes(k: Any, v: Any) -> int:
    """Return the bytes of one head of local K or V, [B, G, S, ...] tensors, whichever is smaller."""
    return min(k.nbytes, v.nbytes) // int(k.shape[1])


def split_heads(kv_heads: slice, head_bytes: int, chunk_bytes: int) -> list[slice]:
    """Split K/V heads with equal patterns into equal chunks; see `lower_pass`."""
    step = kv_heads.step or 1
    heads = range(kv_heads.start, kv_heads.stop, step)
    # Only divisors, so that all chunks have one size.
    sizes = [n for n in range(1, len(heads) + 1) if len(heads) % n == 0]
    # all heads if they have too few bytes for a chunk, or if `head_bytes` is 0
    size = next((n for n in sizes if n * head_bytes >= chunk_bytes), len(heads))
    chunks = (heads[first : first + size] for first in range(0, len(heads), size))
    return [slice(chunk[0], chunk[-1] + 1, step) for chunk in chunks]


def get_query_heads(kv_heads: slice, group: int) -> slice:
    """Return the query heads that share the K/V heads of a slice, `group` query heads for each."""
    # With group 1 a slice may have a step; with larger groups it has none (`find_head_classes`, `plan.py`).
    if group == 1:
        return kv_heads
    return slice(kv_heads.start * group, kv_heads.stop * group)


def count_heads(heads: slice) -> int:
    """Return the number of heads of a slice."""
    return len(range(*heads.indices(heads.stop)))


def lower_pass(
    classes: Iterable[HeadClassPlan], group: int, *, backward: bool, head_bytes: int = 0, chunk_bytes: int = 1
) -> Schedule:
    """Return the schedule of one rank.

    Args:
        classes: the rank's part of the plan, one entry for each class of K/V heads with equal patterns.
        group: number of query heads that share a K/V head.
        backward: whether this is the backward pass.
        head_bytes: bytes of the local K (or V) of one head; 0 puts all heads of a class into one chunk.
        chunk_bytes: minimum bytes of K (or V) of a chunk; see `chunk_bytes_on`.
    """
    cut = [
        (head_class, kv)
        for head_class in classes
        for kv in split_heads(head_class.kv_heads, head_bytes, chunk_bytes)
    ]
    # Few chunks have large buffers, so they start one batch later: [Note: one chunk after another].
    later = int(backward and len(cut) < MANY_CHUNKS)
    chunks = (
        HeadChunk(
            kv,
            get_query_heads(kv, group),
            lower_class(head_class, backward),
            max(head_class.limit + later, 1),
        )
        for head_class, kv in cut
    )
    return Schedule(cut[0][0].ring_rank, backward, tuple(chunks))


def lower_rank(plan: RankPlan, *, backward: bool, head_bytes: int = 0, chunk_bytes: int = 1) -> Schedule:
    """Return the schedule of one rank, cached by pass and chunk size; see `lower_pass`."""
    key = (backward, head_bytes, chunk_bytes)
    if key not in plan.schedules:
        sizes = {"head_bytes": head_bytes, "chunk_bytes": chunk_bytes}
        plan.schedules[key] = lower_pass(plan.classes, plan.group, backward=backward, **sizes)
    schedule: Schedule = plan.schedules[key]
    return schedule


def lower_class(plan: HeadClassPlan, backward: bool) -> ChunkSteps:
    """Return the steps of any head chunk of a class, cached with the plan for each pass."""
    if backward in plan.lowered:
        chunk_steps: ChunkSteps = plan.lowered[backward]
        return chunk_steps
    own_shard = plan.directions[0].at(0)
    assert own_shard is not None, "a rank always has its own shard"
    valid = count_slots(own_shard.held)
    # buffers number 0 and 1 are SHARD and RESULTS
    buffers = [Buffer(Payload.KEYS, valid), Buffer(Payload.GRADIENTS, valid)]
    directions = [_choose_way(direction)(direction, buffers, backward) for direction in plan.directions]
    rounds: list[Round] = []
    arrived: list[Accumulate | Free] = [step for direction in directions for step in direction.begin()]
    lengths = (
        direction.backward_batches if backward else direction.forward_batches for direction in plan.directions
    )
    for hop in range(max(lengths)):
        posted = [step for direction in directions for step in direction.post(hop)]
        # The own shard is computed once, although it may travel in two directions.
        computing = directions if hop else directions[:1]
        computed = [step for direction in computing for step in direction.compute(hop)]
        rounds.append(Round(tuple(arrived), tuple(posted), tuple(computed)))
        arrived = [step for direction in directions for step in direction.arrive(hop)]
    for direction in directions:  # the keys that are left at the end of the pass
        arrived += [Free(keys) for keys in direction.left]
    if backward:
        _keep_for_the_end(rounds)
    rounds.append(Round((*arrived, Free(RESULTS))))
    plan.lowered[backward] = steps = ChunkSteps(tuple(buffers), tuple(rounds))
    return steps


def _choose_way(plan: DirectionPlan) -> Callable[..., Any]:
    """Return the class that lowers a direction."""
    if plan.lowering is not None:
        return plan.lowering
    if not plan.direction.stages:
        return HopByHop
    from ds_ring.schedule.stages import Stages

    return Stages


def get_kernel_calls(plan: HeadClassPlan, backward: bool) -> list[Compute]:
    """Return the computations of a pass, in order; those of each head chunk of the class."""
    return [step for step_round in lower_class(plan, backward).rounds for step in step_round.computed]


def _keep_for_the_end(rounds: list[Round]) -> None:
    """Move queries of the own shard to the batches after the last hop; [Note: a part for the end]."""
    (own_step,) = rounds[0].computed
    computing = max(number for number, step_round in enumerate(rounds) if step_round.computed)
    middle = find_middle_slot(own_step.tiles)
    count = min(len(rounds) - 1 - computing, middle // LEAST_KEPT)
    if count:
        slots = [middle * part // count for part in range(1, count + 1)]
        *deferred, first = cut_queries(own_step.tiles, slots)
        for number, tiles in zip(range(-count, 1), (*deferred, first), strict=True):
            rounds[number] = rounds[number]._replace(computed=(replace(own_step, tiles=tiles),))

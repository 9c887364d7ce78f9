"""The schedule of a rank as a table for people."""

from __future__ import annotations

from itertools import zip_longest

from ds_ring.masks.slots import count_slots
from ds_ring.schedule.steps import (
    RESULTS,
    Accumulate,
    Free,
    HeadChunk,
    Payload,
    Recv,
    Round,
    Schedule,
    Send,
    get_buffer_name,
)  # fmt: skip

COLUMNS = ("batch", "heads", "put in place, free", "send", "receive", "compute meanwhile")


def format_schedule(schedule: Schedule) -> str:
    """Return a schedule as a table for people; `ds_ring/DESIGN.md` explains an example.

    The table leaves out the copies that a send makes of tokens of the shard, or of several ranges.
    """
    rows: list[tuple[str, ...]] = [COLUMNS]
    for batch in schedule.batches:
        for index, part in batch.rounds:
            chunk = schedule.chunks[index]
            heads = f"{chunk.kv_heads.start}:{chunk.kv_heads.stop}"
            cells = zip_longest([str(batch.number)], [heads], *_cells(chunk, part), fillvalue="")
            rows += [tuple(row) for row in cells]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    title = f"rank {schedule.ring_rank}, {'backward' if schedule.backward else 'forward'}"
    return "\n".join([title, *(line.rstrip() for line in lines)])


def _cells(chunk: HeadChunk, part: Round) -> list[list[str]]:
    """Return the entries of the last four columns."""
    sends = [f"{_message(step)} to {step.peer}" for step in part.posted if isinstance(step, Send)]
    receives = [
        f"{_message(step)} from {step.peer} in {get_buffer_name(step.buffer)}"
        for step in part.posted
        if isinstance(step, Recv)
    ]
    computing = [
        f"hop {step.hop}: {get_buffer_name(step.buffer)}"
        + ("" if step.gradients is None else f" -> {get_buffer_name(step.gradients)}")
        for step in part.computed
    ]
    return [_arrivals(chunk, part), sends, receives, computing]


def _arrivals(chunk: HeadChunk, part: Round) -> list[str]:
    posted = (step for steps in chunk.steps.rounds for step in steps.posted)
    copies = {step.packed for step in posted if isinstance(step, Send)}
    freed = [step.buffer for step in part.arrived if isinstance(step, Free) and step.buffer not in copies]
    signs = ["+=" if buffer.payload is Payload.GRADIENTS else "=" for buffer in chunk.steps.buffers]
    texts = [
        f"{get_buffer_name(step.buffer)} {signs[step.buffer]} {get_buffer_name(step.source)}"
        for step in part.arrived
        if isinstance(step, Accumulate)
    ]
    if names := [get_buffer_name(buffer) for buffer in freed if buffer != RESULTS]:
        texts.append(f"free {' '.join(names)}")
    return [*texts, "results are done"] if RESULTS in freed else texts


def _message(step: Send | Recv) -> str:
    return f"{'K' if step.payload.names == 'K/V' else 'G'}{step.origin}[{count_slots(step.slots)}]"

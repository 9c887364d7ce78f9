"""Print a rank's schedule, batch by batch.

Owns the words and columns; the steps are `steps.py`'s. `ds_ring/DESIGN.md` shows and explains what comes out.
"""

from __future__ import annotations

from itertools import zip_longest

from ds_ring.masks.slot_ranges import count_slots
from ds_ring.schedule import steps

COLUMNS = ("batch", "heads", "put in place, free", "send", "receive", "compute meanwhile")


def format_schedule(schedule: steps.Schedule) -> str:
    """Return a schedule as a table for people: a few lines for each batch of each head chunk.

    K2[512] are 512 keys and values of rank 2's shard, G2[512] their gradients, b3 is a buffer of the head
    chunk. Copies that a send makes where its tokens do not lie side by side are left out.
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


def _cells(chunk: steps.HeadChunk, part: steps.Round) -> list[list[str]]:
    """Return the entries of the last four columns."""
    sends = [f"{_tokens(step)} to {step.peer}" for step in part.posted if isinstance(step, steps.Send)]
    receives = [
        f"{_tokens(step)} from {step.peer} in {steps.name_of(step.buffer)}"
        for step in part.posted
        if isinstance(step, steps.Recv)
    ]
    return [_arrivals(chunk, part), sends, receives, [_computing(step) for step in part.computed]]


def _arrivals(chunk: steps.HeadChunk, part: steps.Round) -> list[str]:
    posted = (step for one in chunk.steps.rounds for step in one.posted)
    copies = {step.packed for step in posted if isinstance(step, steps.Send)}
    freed = [
        step.buffer for step in part.arrived if isinstance(step, steps.Free) and step.buffer not in copies
    ]
    texts = [_put(chunk, step) for step in part.arrived if isinstance(step, steps.Accumulate)]
    if names := [steps.name_of(buffer) for buffer in freed if buffer != steps.RESULTS]:
        texts.append(f"free {' '.join(names)}")
    return [*texts, "results are done"] if steps.RESULTS in freed else texts


def _tokens(step: steps.Send | steps.Recv) -> str:
    return f"{'K' if step.payload is steps.Payload.KEYS else 'G'}{step.origin}[{count_slots(step.slots)}]"


def _put(chunk: steps.HeadChunk, step: steps.Accumulate) -> str:
    sign = "+=" if chunk.steps.buffers[step.buffer].payload is steps.Payload.GRADIENTS else "="
    return f"{steps.name_of(step.buffer)} {sign} {steps.name_of(step.source)}"


def _computing(step: steps.Compute) -> str:
    into = "" if step.gradients is None else f" -> {steps.name_of(step.gradients)}"
    return f"hop {step.hop}: {steps.name_of(step.buffer)}{into}"

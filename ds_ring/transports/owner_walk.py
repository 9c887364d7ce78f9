"""A way to exchange: each owner sends its keys to their readers directly, and gets their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ds_ring.comm.exchange import Exchange
from ds_ring.comm.messages import Message


def walk_owners(
    exchange: Exchange | None, ring_rank: int, ring_size: int, local: Sequence[Tensor],
    sent_to: Callable[[int], Sequence[Tensor]], received_from: Callable[[int], Sequence[Tensor]],
    compute: Callable[[int, Sequence[Tensor]], Sequence[Tensor]],
    returned_by: Callable[[int], Sequence[Tensor]],
    add: Callable[[int, Sequence[Tensor]], None] | None,
) -> None:  # fmt: skip
    """Call `compute` with the keys of one owner after the other, at hop s with those of rank p - s.

    Each owner sends directly to its readers, while the keys of the owner before are computed with. Lists of
    tensors are K and V in turn.

    Args:
        exchange: of the ring; None for a ring of one.
        ring_rank, ring_size: of this rank p.
        local: its keys, as `compute` gets them.
        sent_to: returns the keys for a reader.
        received_from: returns empty tensors for those of an owner.
        compute: takes an owner and its keys; its result is sent back to the owner if `add` is given.
        returned_by: returns empty tensors for the result of a reader.
        add: takes a reader, first this rank, and the reader's result; called in the order of hops.
    """
    here: Sequence[Tensor] = local
    gradients: Sequence[Tensor] = ()
    for hop in range(ring_size + (add is not None and ring_size > 1)):
        sends: list[Message] = []
        receives: list[Message] = []
        arriving: Sequence[Tensor] = ()
        returned: Sequence[Tensor] = ()
        if hop + 1 < ring_size:
            reader, owner = (ring_rank + hop + 1) % ring_size, (ring_rank - hop - 1) % ring_size
            arriving = received_from(owner)
            sends += _in_turn(sent_to(reader), reader, ("K", "V"))
            receives += _in_turn(arriving, owner, ("K", "V"))
        # Gradients of the hop before: of rank p - hop + 1, and of this rank's keys at rank p + hop - 1.
        reader, owner = (ring_rank + hop - 1) % ring_size, (ring_rank - hop + 1) % ring_size
        if add is not None and hop > 1:
            returned = returned_by(reader)
            sends += _in_turn(gradients, owner, ("dK", "dV"))
            receives += _in_turn(returned, reader, ("dK", "dV"))
        pending = exchange.post(sends, receives, hop) if exchange is not None else None
        if hop < ring_size:
            gradients = compute((ring_rank - hop) % ring_size, here)
            if add is not None and hop == 0:
                add(ring_rank, gradients)
        if pending is not None:
            pending.wait()
        if add is not None and hop > 1:
            add(reader, returned)
        here = arriving


def _in_turn(tensors: Sequence[Tensor], peer: int, what: tuple[str, str]) -> list[Message]:
    """Return the messages of tensors that are labelled in turn; none if they have no rows."""
    if not tensors or not tensors[0].numel():
        return []
    return [Message(x.contiguous(), peer, what[i % 2]) for i, x in enumerate(tensors)]

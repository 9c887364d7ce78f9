"""The exception tree of ds_ring, how a value is shown in a message, and checks of numbers.

Every error that ds_ring raises on purpose is a `RingError`. Its message has three parts: what was expected,
what was got, and what to do (`wrong`). Mistakes of the caller are `ValueError`s as well, so that code which
catches the standard family keeps working; faults of other machines are `RuntimeError`s.

`check_whole_number` and `check_bool` check a caller's argument: numpy's integers are accepted, strings and
floats are not.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Collection
from numbers import Integral
from typing import TYPE_CHECKING

from ds_ring.limits import MAX_TOKENS

if TYPE_CHECKING:
    from typing_extensions import Self

_SHOWN_CHARACTERS = 120
_SHOWN_ITEMS = 4


class _Items(reprlib.Repr):
    """Show the first items of lists, of lists in lists, too."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = _SHOWN_ITEMS
        self.maxstring = self.maxother = _SHOWN_CHARACTERS


def show_items(values: Collection[object]) -> str:
    """Return the first items of a list, and their number if there are more: of the ids of tokens, say."""
    text = _cut(_Items().repr(values))
    return f"{text} of {len(values):,} items" if len(values) > _SHOWN_ITEMS else text


def shown(value: object) -> str:
    """Return the type and repr of a value for a message: short, and safe if the repr raises.

    Of a list it has `show_items`, of an array its shape.
    """
    kind = type(value).__name__
    if isinstance(value, int) and abs(value) >= 10**30:  # a million digits take seconds to print
        return f"{kind} of {value.bit_length()} bits"
    try:
        if getattr(value, "ndim", 0) and hasattr(value, "dtype"):
            return f"{kind} of shape {tuple(value.shape)}, {value.dtype}"  # type: ignore[attr-defined]
        if isinstance(value, (list, tuple, set, frozenset)):
            return f"{kind} {show_items(value)}"
        text = _cut(repr(value))
    except Exception as error:
        return f"{kind}, whose repr raises {type(error).__name__}"
    return text if isinstance(value, (int, float, str, bytes, bool, type(None))) else f"{kind} {text}"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


class RingError(Exception):
    """Root of every error that ds_ring raises on purpose.

    Attributes:
        peers_know: the other ranks of the sequence raise as well, or were notified of this error.
    """

    peers_know: bool = False

    @classmethod
    def wrong(cls, name: str, expected: str, got: object, advice: str) -> Self:
        """Return the error "name: expected ..., got ...; advice"; `got` is text, or a value to show."""
        got_text = got if isinstance(got, str) else shown(got).removeprefix("list ")
        return cls(f"{name}: expected {expected}, got {got_text}; {advice}")


class RingConfigError(RingError, ValueError):
    """The DeepSpeed JSON, a cluster file or an argument names something that cannot be."""


class RingMeshError(RingConfigError):
    """Sizes of the parallel axes do not fit the world, or the world is not there yet."""


class RingShapeError(RingError, ValueError):
    """A tensor's shape, dtype, device or memory format is not what the operation takes."""


class RingLayoutError(RingError, ValueError):
    """A layout cannot be built, or does not fit the tensor, the pattern or the mesh it is used with."""


class RingPatternError(RingError, ValueError):
    """A pattern cannot be built, or cannot express a request (such as a padding mask)."""


class RingMismatchError(RingError, ValueError):
    """Ranks of one ring disagree on configuration, shapes or dtypes. Raised before any payload moves."""


class RingScheduleError(RingError, RuntimeError):
    """The schedules of a ring's ranks do not fit together; found before anything was run.

    Attributes:
        ring_rank: whose schedule is at fault, as far as one rank's is.
        batch: number of its batch; None where the whole schedule is meant.
        step: the step in words; "" where no single one is meant.
        expected, got: in words.
    """

    def __init__(self, ring_rank: int, batch: int | None, step: str, expected: str, got: str) -> None:
        self.ring_rank, self.batch, self.step, self.expected, self.got = ring_rank, batch, step, expected, got
        where = "".join([f", batch {batch}" if batch is not None else "", f", {step}" if step else ""])
        super().__init__(
            f"schedule of ring rank {ring_rank}{where}: expected {expected}, got {got}; nothing was run. This"
            " is a fault of ds_ring, or of code that changes it: please report it"
        )

    def __reduce__(self) -> tuple[type[RingScheduleError], tuple[int, int | None, str, str, str]]:
        return type(self), (self.ring_rank, self.batch, self.step, self.expected, self.got)


class RingPeerError(RingError, RuntimeError):
    """Another rank failed, left, or did not answer before the deadline.

    Attributes:
        ring_rank: the rank that raises (its place in the ring).
        hop: the hop it was waiting for; None outside a pass.
        peer: the ring rank it blames; None if it cannot name one.
        cause: one line of text, what was seen.
    """

    peers_know = True

    def __init__(self, ring_rank: int, hop: int | None, peer: int | None, cause: str) -> None:
        self.ring_rank, self.hop, self.peer, self.cause = ring_rank, hop, peer, cause
        where = "outside a pass" if hop is None else f"at hop {hop}"
        whom = "a peer that cannot be named" if peer is None else f"ring rank {peer}"
        super().__init__(f"ring rank {ring_rank} {where}: waiting for {whom}: {cause}")

    def __reduce__(self) -> tuple[type[RingPeerError], tuple[int, int | None, int | None, str]]:
        return type(self), (self.ring_rank, self.hop, self.peer, self.cause)


class RingBufferError(RingError, RuntimeError):
    """A tensor was written to while it was on its way to another rank."""


class RingKernelError(RingError, RuntimeError):
    """An attention kernel failed while it ran; the message names the kernel, its shapes and what to set."""


class RingFiniteError(RingError, ArithmeticError):
    """`check_finite` found a NaN or an infinity; the message names rank, tensor and hop."""


class RingVerifyError(RingError, ArithmeticError):
    """`verify_first_batch`: the ring and one process differ; the message names layer and parameter."""


class RingCheckpointError(RingError, RuntimeError):
    """A checkpoint is incomplete, does not match its manifest, or cannot be written."""


class RingCheckpointMissingError(RingCheckpointError):
    """The requested checkpoint does not exist: no such tag, or no `latest` to name one."""


def check_whole_number(value: object, what: str, error: type[RingError], most: int = MAX_TOKENS) -> int:
    """Return the value as an int from 1 to `most`; raise `error`, which names it as `what`, for another."""
    if not isinstance(value, bool) and isinstance(value, Integral):
        number = operator.index(value)
        if 1 <= number <= most:
            return number
        if number > most:
            raise error(f"{what}: expected a positive integer of at most {most}, got {shown(value)}")
    raise error(f"{what}: expected a positive integer, got {shown(value)}; pass an int, 1 or more")


def check_bool(value: object, what: str, error: type[RingError]) -> bool:
    """Return the value if it is a bool; raise `error`, which names it as `what`, for anything else."""
    if not isinstance(value, bool):
        raise error(f"{what}: expected True or False, got {shown(value)}")
    return value

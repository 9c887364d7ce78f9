"""Say where in its program this process is: the collectives that it has begun, and a line of its stack.

Reads torch.distributed and the interpreter and changes nothing. The thread of `DetectorClient` calls it while
the training thread computes or waits.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ds_ring.health.failure_detector.wire import NOT_COMPARED

MAX_GROUPS = 256  # whose numbers a heartbeat carries
_OF_OTHERS = (
    sysconfig.get_paths()["stdlib"],
    sysconfig.get_paths()["purelib"],
    sysconfig.get_paths()["platlib"],
    str(Path(__file__).resolve().parents[1]),
    "<",  # <frozen importlib>, <string>
)


def _get_c10d() -> Any:
    """Return torch's module of process groups; None if it is not imported."""
    return sys.modules.get("torch.distributed.distributed_c10d")


def get_default_group_id() -> int | None:
    """Return the identity of the default process group, whose groups are counted; None without one."""
    c10d = _get_c10d()
    group = None if c10d is None else c10d.GroupMember.WORLD
    return None if group is None else id(group)


def get_group_names(groups: Iterable[object]) -> set[str]:
    """Return the names of process groups, the same on all ranks; groups that are gone have none."""
    c10d = _get_c10d()
    known = {} if c10d is None else c10d._world.pg_names
    return {str(known[group]) for group in groups if group in known}


def collective_calls(not_compared: Container[str]) -> dict[str, int]:
    """Return the number of the last collective that this rank has begun, by the name of the process group.

    Names in `not_compared` get a mark. The name "" counts the groups that all ranks of the world have made
    together. Backends that count nothing (MPI) are left out.
    """
    world = _get_c10d()._world
    calls = {"": int(world.group_count)}
    for group in list(world.pg_map)[:MAX_GROUPS]:
        with suppress(RuntimeError, KeyError):  # no count; destroyed by now
            name = str(world.pg_names[group])
            mark = NOT_COMPARED if name in not_compared else ""
            calls[f"{mark}{name}"] = int(group._get_sequence_number_for_group())
    return calls


def describe_place(thread: int) -> str:
    """Return the innermost function of a thread and the innermost one of the user's code, with lines."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "a thread that has ended"
    innermost, place = frame, _find_user_frame(frame)
    if place is None or place is innermost:
        return _place(innermost)
    return f"{_place(innermost)}, called by {_place(place)}"


def _find_user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that belongs to no installed package, to Python or to ds_ring."""
    while frame is not None and frame.f_code.co_filename.startswith(_OF_OTHERS):
        frame = frame.f_back
    return frame


def _place(frame: FrameType) -> str:
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
    return f"{name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"

"""Say where an error was raised: by a collective, by the storage, or by the script."""

from __future__ import annotations

import errno
import opcode
import re

from ds_ring.errors import RingCheckpointError, RingError, RingPeerError


def compiled_in(error: BaseException) -> str | None:
    """Return the module that called the compiled code which raised an error; None where a `raise` did.

    gloo's errors are plain RuntimeErrors: the module distinguishes them from a script's own, their text does
    not.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_code[trace.tb_lasti] in _RAISES:
        return None
    return str(trace.tb_frame.f_globals.get("__name__"))


def is_inside(name: str | None, *modules: str) -> bool:
    """Return whether `name` is one of these modules or packages, or inside one."""
    return name is not None and any(name == module or name.startswith(f"{module}.") for module in modules)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def get_failure_kind(error: BaseException) -> tuple[str, int | None]:
    """Return what ended a rank ("error", "lost" or "storage"), and the rank that the error names.

    By the error's type and by where it was raised, or those of the error that was being handled then: its
    text is never looked at, as a script's own error may speak of NCCL ([Note: who stopped first] in
    launcher/run/culprit.py).
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RingPeerError):
            # the world's number is in the text alone, which is ds_ring's own
            named = re.match(r"rank (\d+) of the world: ", cause.cause)
            return "lost", int(named[1]) if named else cause.peer
        is_dist = any(base.__name__ == "DistError" for base in type(cause).__mro__)
        if is_dist or _is_compiled_error_in(cause, "torch.distributed", "deepspeed.comm"):
            return "lost", None
        if isinstance(cause, RingCheckpointError) or (isinstance(cause, OSError) and cause.errno in _FULL):
            return "storage", None
        if _is_compiled_error_in(cause, "torch.serialization"):
            return "storage", None
        cause = cause.__cause__ or cause.__context__
    return "error", None


def _is_compiled_error_in(error: BaseException, *modules: str) -> bool:
    return isinstance(error, RuntimeError) and is_inside(compiled_in(error), *modules)


_RAISES = (opcode.opmap["RAISE_VARARGS"], opcode.opmap["RERAISE"])


def is_distributed_error(error: BaseException, *callers: str) -> bool:
    """Return whether a collective raised this error: by its type and its caller, not by its text.

    Args:
        error: of any kind.
        callers: other modules than torch's and DeepSpeed's whose calls of compiled code may be collectives.
    """
    import torch.distributed as dist

    if isinstance(error, RingError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or is_inside(
        compiled_in(error), "torch.distributed", "deepspeed", "ds_ring", *callers
    )

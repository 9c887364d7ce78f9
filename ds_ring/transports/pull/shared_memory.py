"""Share memory, with signals, between the ranks of a node: torch's symmetric memory, or memfds and pipes.

Owns the memory, its signals, and the refusals where ranks cannot share any. `signals.py` owns its contents.

[Note: shared memory]
On CUDA the memory and the signals are those of torch.distributed._symmetric_memory. A stream of its own waits
and copies: the copies are done by the copy engines of the GPU, and a signal is a kernel of one warp, so
attention keeps all multiprocessors. No host waits. (It ran between ranks of one GPU, never between several.)

[Note: a release past a stuck queue]
A driver maps the streams of a process to few queues, 8 by default (CUDA_DEVICE_MAX_CONNECTIONS), and what is
in one queue runs in order. A write that ends a stream's wait would then stand behind that wait if both
streams are in one queue. So the writes go to as many streams as there may be queues: those in other queues
than the stuck one pass. Writes that come late do no harm, because no result is used after an abort. With one
queue there is no such stream, so a process with one is refused.

On the CPU the memory is a memfd, which other ranks open by /proc, and a signal is a number in a pipe. Neither
has a name in a file system, so both are gone with the last process that has them, however it ends. A pipe
orders the copy after the sender's writes, and it ends when the other rank does.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ring.comm.collective import gather_texts
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.in_flight import Pending
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.waiting import POLL_S, CallSite, first_line
from ds_ring.compat.torch import list_missing
from ds_ring.errors import RingBufferError, RingConfigError
from ds_ring.limits import ABORT_S
from ds_ring.transports.devices import OF_SYMMETRIC_MEMORY, has_one_queue, may_share

QUEUES = 32  # most that a driver has: the largest CUDA_DEVICE_MAX_CONNECTIONS
READY, TAKEN = 0, 1  # signals; on CUDA the channels of a signal pad
_SIGNAL = struct.Struct("=Bq")  # kind and number


class Pull(NamedTuple):
    """A message to receive: its offset in the sender's memory, in bytes, and the tensor to fill."""

    place: int
    into: Tensor


class _HostWork:
    """A part of a batch that is done when it is waited for; has the method of a Work of torch."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def wait(self, timeout: Any = None) -> bool:
        self._act()
        return True


class HostShared:
    """Memory of this rank that the other ranks of a ring read, and signals, on the CPU.

    Args:
        nbytes: size of the memory.
        device: of the tensors.
        peers: the group ranks of the others.
    """

    def __init__(self, nbytes: int, device: torch.device, peers: Sequence[int]) -> None:
        self.nbytes, self.device = nbytes, device
        self._open: set[int] = set()
        self._fd = self._opened(os.memfd_create("ds_ring"))
        os.ftruncate(self._fd, nbytes)
        pipes = {peer: [self._opened(end) for end in os.pipe()] for peer in peers}
        self._from, self._for = ({peer: ends[i] for peer, ends in pipes.items()} for i in (0, 1))
        self._memory = self._map(self._fd)
        self.storage = self._memory.untyped_storage()
        self._of: dict[int, Tensor] = {}  # the memory of each peer, and the end of a pipe to it
        self._to: dict[int, int] = {}
        self._put: Counter[tuple[int, int]] = Counter()  # number of the last signal, by kind and peer
        self._heard: Counter[tuple[int, int]] = Counter()

    @property
    def ipc_handles(self) -> dict[str, Any]:
        """Return what others need to open this rank's memory and signals; JSON makes texts of the ranks."""
        return {"pid": os.getpid(), "memory": self._fd, "signals": self._for}

    def open(self, ipc_handles: Mapping[int, Mapping[str, Any]], group: dist.ProcessGroup) -> None:
        """Open the memory and the signals of the others, by group rank."""
        me = str(dist.get_rank(group))
        for peer, handles in ipc_handles.items():
            folder = f"/proc/{handles['pid']}/fd"
            memory = os.open(f"{folder}/{handles['memory']}", os.O_RDWR)
            self._of[peer] = self._map(memory)
            os.close(memory)
            self._to[peer] = self._opened(os.open(f"{folder}/{handles['signals'][me]}", os.O_WRONLY))

    def close_handles(self) -> None:
        """Close the pipes to others: all ranks have opened theirs. A pipe then ends with its writer."""
        for fd in (self._fd, *self._for.values()):
            os.close(fd)
            self._open.discard(fd)

    def __del__(self) -> None:
        for fd in self._open:
            os.close(fd)

    def begin_pass(self) -> None:
        """Order a pass after the one before, which is over on the CPU."""

    def begin(self, receivers: Sequence[int], pulls: Mapping[int, list[Pull]]) -> list[Any]:
        """Signal READY, and return the works of a batch; see [Note: one-sided pulls].

        Raises:
            RingBufferError: a batch before this one was not waited for.
        """
        for peer in receivers:
            if self._put[READY, peer] != self._heard[TAKEN, peer]:
                raise RingBufferError(
                    f'transport "pull": expected that rank {peer} of the ring has taken the last batch, got'
                    " the next one: buffers in flight could be written. Wait for each batch. This is a fault"
                    " of ds_ring, or of code that changes it: please report it"
                )
            self._signal(READY, peer)
        takes = [_HostWork(partial(self._take, peer, messages)) for peer, messages in pulls.items()]
        return takes + [_HostWork(partial(self._hear, TAKEN, peer)) for peer in receivers]

    def _take(self, peer: int, messages: list[Pull]) -> None:
        self._hear(READY, peer)
        start = self._of[peer].data_ptr()
        for place, into in messages:
            # Not `copy_`: torch would start threads of its own in each thread that copies.
            ctypes.memmove(into.data_ptr(), start + place, into.nbytes)
        self._signal(TAKEN, peer)

    def _signal(self, kind: int, peer: int) -> None:
        self._put[kind, peer] += 1
        os.write(self._to[peer], _SIGNAL.pack(kind, self._put[kind, peer]))

    def _hear(self, kind: int, peer: int) -> None:
        """Wait for the next signal of a kind; RuntimeError, as torch's works raise, if it cannot come."""
        due = self._heard[kind, peer] + 1
        while self._heard[kind, peer] < due:
            data = os.read(self._from[peer], _SIGNAL.size)
            if len(data) < _SIGNAL.size:
                raise RuntimeError("its signals have ended: the process is gone")
            what, number = _SIGNAL.unpack(data)
            if number != self._heard[what, peer] + 1:
                expected = self._heard[what, peer] + 1
                raise RuntimeError(f"expected signal {expected} of kind {what} from it, got {number}")
            self._heard[what, peer] = number

    def _opened(self, fd: int) -> int:
        self._open.add(fd)
        return fd

    def _map(self, fd: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.frombuffer(mmap.mmap(fd, self.nbytes), dtype=torch.uint8)


class _DeviceWork:
    """Be complete when a stream has come so far; has the methods of a Work of torch."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event, self._device = stream.record_event(), stream.device

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())


class CudaShared:
    """The same on CUDA, by torch's symmetric memory. (It ran between ranks of one GPU.)"""

    ipc_handles: ClassVar[dict[str, Any]] = {}  # torch has its own

    def __init__(self, nbytes: int, device: torch.device, peers: Sequence[int]) -> None:
        from torch.distributed import _symmetric_memory

        self.nbytes, self.device, self._peers = nbytes, device, list(peers)
        self._rendezvous = _symmetric_memory.rendezvous
        self._memory = _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        self.storage = self._memory.untyped_storage()
        # A high priority keeps persistent kernels from holding up signals. torch has 32 streams of it.
        self._pulling, *self._releasing = (torch.cuda.Stream(device, priority=-1) for _ in range(QUEUES))
        self._used_by: torch.cuda.Stream | None = None
        self._handle: Any = None

    def open(self, ipc_handles: Mapping[int, Mapping[str, Any]], group: dist.ProcessGroup) -> None:
        """Map the memory of the others. Collective over the ring."""
        torch.cuda.set_device(self.device)  # a thread has its own
        self._handle = self._rendezvous(self._memory, group)

    def close_handles(self) -> None:
        """Do nothing: torch has closed its own."""

    def begin_pass(self) -> None:
        """Order a pass after the one before, which another stream may have run."""
        here = torch.cuda.current_stream(self.device)
        if self._used_by is not None and self._used_by != here:
            here.wait_stream(self._used_by)
        self._used_by = here

    def begin(self, receivers: Sequence[int], pulls: Mapping[int, list[Pull]]) -> list[Any]:
        """Launch a batch after the work of the current stream; see [Note: one-sided pulls].

        Signals have no timeout on the device: it would end the process. `abort` releases a stream that waits
        in vain, when the watchdog calls it.
        """
        handle, works = self._handle, []
        self._pulling.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._pulling):
            for peer in receivers:
                handle.put_signal(peer, READY, 0)
            for peer, messages in pulls.items():
                handle.wait_signal(peer, READY, 0)
                for place, into in messages:
                    there = handle.get_buffer(peer, into.shape, into.dtype, place // into.dtype.itemsize)
                    into.copy_(there)
                handle.put_signal(peer, TAKEN, 0)
                works.append(_DeviceWork(self._pulling))
            for peer in receivers:
                handle.wait_signal(peer, TAKEN, 0)
                works.append(_DeviceWork(self._pulling))
        return works

    def abort(self) -> None:
        """Release all signals that are waited for: a rank has failed, and no result is used any more.

        Whatever the host had launched by then runs to its end, batch after batch.
        """
        torch.cuda.set_device(self.device)
        end = time.monotonic() + ABORT_S
        while not self._pulling.query() and time.monotonic() < end:
            for puts in (False, True):  # in turn: what releases a wait here holds up a put elsewhere
                self._release(puts)
                time.sleep(POLL_S)

    def _release(self, puts: bool) -> None:
        """Let the next wait end, as if its signal had come; or the next put, as if the last were heard."""
        handle = self._handle
        size = handle.world_size
        for stream in self._releasing:  # [Note: a release past a stuck queue]
            with torch.cuda.stream(stream):
                for peer in self._peers:
                    pad = handle.get_signal_pad(peer if puts else handle.rank, (2 * size,), torch.uint32)
                    for kind in (READY, TAKEN):
                        sender = handle.rank if puts else peer
                        handle.stream_write_value32(pad, kind * size + sender, int(not puts))


def share_memory(exchange: Exchange, nbytes: int, device: torch.device) -> HostShared | CudaShared:
    """Return memory that the ranks of the ring share. Collective over the sequence.

    Raises:
        RingConfigError: they cannot share any; on every rank.
        RingPeerError: another rank failed during the call.
    """
    mesh, group = exchange.mesh, exchange.mesh.ring_group
    assert group is not None, "a ring of one"
    ring = range(mesh.ulysses_rank, mesh.sequence_size, mesh.ulysses_size)  # as ranks of the sequence
    others = {
        dist.get_group_rank(group, mesh.global_rank_in_sequence(rank)): rank
        for rank in ring
        if rank != mesh.sequence_rank
    }
    shared, peer_info = None, get_peer_info(device)
    if mesh.collectives is not None and device.type == "cuda" and peer_info["refused"] is None:
        peer_info["refused"] = "its ring, of dynamic rings, has no process group by which GPUs open memory"
    if peer_info["refused"] is None:
        try:
            shared = (CudaShared if device.type == "cuda" else HostShared)(nbytes, device, list(others))
        except (OSError, RuntimeError) as error:
            peer_info["refused"] = first_line(error)
    peer_info["ipc_handles"] = None if shared is None else shared.ipc_handles
    peer_infos = [json.loads(text) for text in gather_texts(exchange, json.dumps(peer_info))]
    why = why_not_together(mesh, peer_infos)
    failed: list[str] = []

    def open_doors() -> None:
        assert shared is not None, "a rank that refused"
        try:
            shared.open({peer: peer_infos[rank]["ipc_handles"] for peer, rank in others.items()}, group)
        except (OSError, RuntimeError) as error:
            failed.append(first_line(error))

    if why is None:
        works: list[Any] = [_HostWork(open_doors)]
        peers = [tuple(mesh.global_rank_in_sequence(rank) for rank in others.values())]
        Pending(works, peers, mesh, CallSite(exchange.call, None), exchange.deadline_s, [], []).wait()
        for rank, text in enumerate(gather_texts(exchange, "".join(failed))):
            if text.strip() and why is None:
                what = f"{mesh.describe(rank)}, which cannot open the memory of its ring: {text.strip()}"
                why = f'expected ranks that share memory for "pull", got {what}'
    if why is not None:
        refusal = RingConfigError(f'transport: {why}; use "transport": "ring"')
        refusal.peers_know = True  # every rank has the same facts
        raise refusal
    assert shared is not None, "a rank that refused"
    shared.close_handles()
    return shared


# What is used of torch.distributed._symmetric_memory, with its parameters; a test compares them with torch's.
OF_MODULE = {
    "empty": ("size", "dtype", "device"),
    "rendezvous": ("tensor", "group"),
    "get_backend": ("device",),
}
OF_HANDLE = {
    "get_buffer": ("rank", "sizes", "dtype", "storage_offset"),
    "get_signal_pad": ("rank", "sizes", "dtype"),
    "put_signal": ("dst_rank", "channel", "timeout_ms"),
    "wait_signal": ("src_rank", "channel", "timeout_ms"),
    "stream_write_value32": ("tensor", "offset", "val"),
    "rank": (),
    "world_size": (),
}


def get_peer_info(device: torch.device) -> dict[str, Any]:
    """Return this rank's node, its GPU, and the reason why it can share no memory, or None."""
    peer_info: dict[str, Any] = {"node": _node(), "refused": _why_not(device)}
    if device.type == "cuda" and peer_info["refused"] is None:
        index, count = device.index, torch.cuda.device_count()
        blind = [i for i in range(count) if i != index and not torch.cuda.can_device_access_peer(index, i)]
        peer_info |= {"gpu": index, "shares": may_share(OF_SYMMETRIC_MEMORY), "cannot read": blind}
    return peer_info


def _node() -> list[str]:
    """Return this node's name, and a value that is equal for ranks that can open each other's memory."""
    name = socket.gethostname()
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return [name, f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"]
    except OSError:
        return [name, name]


def _why_not(device: torch.device) -> str | None:
    if device.type == "cpu":
        is_there = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
        return None if is_there else "its system has no memfd or no /proc; Linux has both"
    if device.type != "cuda":
        return f"its tensors are on {device}; they must be on CUDA or the CPU"
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory
    except ImportError as error:
        return f"its torch {torch.__version__} has no symmetric memory ({error})"
    if has_one_queue():
        return "its CUDA_DEVICE_MAX_CONNECTIONS is 1: no stream could end a wait after a fault; use 2"
    if missing := [*list_missing(_symmetric_memory, OF_MODULE), *list_missing(_SymmetricMemory, OF_HANDLE)]:
        return f"symmetric memory of its torch {torch.__version__} has no {', '.join(missing)}"
    if (backend := _symmetric_memory.get_backend(device)) != "CUDA":
        return f"its symmetric memory has the backend {backend}, and only CUDA's has these signals"
    return None


def why_not_together(mesh: RingMesh, peer_infos: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why the ranks of a sequence cannot share memory, by the facts of all ranks; None if they can."""
    for rank, info in enumerate(peer_infos):
        if info["refused"] is not None:
            who = mesh.describe(rank)
            return f'expected that every rank can share memory for "pull", got {who}: {info["refused"]}'
    for rank, info in enumerate(peer_infos):
        for peer_rank in range(rank % mesh.ulysses_size, rank, mesh.ulysses_size):  # of the same ring
            peer, both = peer_infos[peer_rank], f"{mesh.describe(peer_rank)} and {mesh.describe(rank)}"
            if info["node"][1] != peer["node"][1]:
                names = f"{peer['node'][0]} and {info['node'][0]}"
                return f'expected a ring on one node, in one container, for "pull", got {both} on {names}'
            if "gpu" in info and info["gpu"] == peer["gpu"] and not (info["shares"] and peer["shares"]):
                what = (
                    f"{both} on GPU {info['gpu']}; let each rank see all GPUs, or set {OF_SYMMETRIC_MEMORY}=1"
                )
                return f'expected ranks on GPUs of different indices for "pull", got {what}'
            if "gpu" in info and (info["gpu"] in peer["cannot read"] or peer["gpu"] in info["cannot read"]):
                return f'expected GPUs that read each other\'s memory for "pull", got {both}, which cannot'
    return None

"""Join the failure detector of an initialised world, before anything else that ranks do together.

In order: what ranks write to the process group's store (`RankPresence`), waiting until all have come
(`Arrival`, `FirstCollective`), starting the monitor process and connecting to it (`join`).
"""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ds_ring.errors import RingConfigError, RingError, RingMeshError, RingPeerError
from ds_ring.health.client import LINGER_S, DetectorClient
from ds_ring.health.failure_detector import handshake
from ds_ring.health.failure_detector.wire import WARNED_PART, Fault
from ds_ring.health.stuck_waits import keep_for_ever, make_peer_error
from ds_ring.limits import Limit, Timeouts
from ds_ring.schedule.grid import Grid

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch._C._distributed_c10d import Store

# Functions import torch where they use it: ranks without torch join, too (tests/dist/light_ranks.py).

PROBE_S = 1.0  # for the collective to end, once everybody is here
_LOOK_S = 0.002


class FirstCollective:
    """An all-reduce over gloo's default group, in the background: it fails on neighbours of a dead rank."""

    def __init__(self) -> None:
        import torch

        self._number = torch.zeros(1, dtype=torch.float32, device="cpu")
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """Take part from now on."""
        import torch.distributed as dist

        self._work = dist.all_reduce(self._number, async_op=True)

    def is_broken(self) -> bool:
        """Return whether the collective has failed here."""
        try:
            if self._work is not None and self._work.is_completed():
                self._work.wait()
        except RuntimeError:
            return True
        return False

    def end(self) -> None:
        """Wait until the collective ends, which it does now that everybody is here."""
        end = time.monotonic() + PROBE_S
        while self._work is not None and not self._work.is_completed() and time.monotonic() < end:
            time.sleep(_LOOK_S)
        self.leave()

    def leave(self) -> None:
        """Go on without its end; torch may write to the number for as long as the process lives."""
        if self._work is not None and not self._work.is_completed():
            keep_for_ever(self._work, self._number)


LOOPBACK = "127.0.0.1"


class RankPresence(NamedTuple):
    """The host and process of a rank."""

    host: str  # equal on ranks that share the network interfaces of one host
    processes: str  # equal on ranks that see each other's process ids
    pid: int  # of the rank


def presence() -> RankPresence:
    """Return where this process is."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network, processes = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid"))
        return RankPresence(f"{boot}/{network}", f"{boot}/{processes}", os.getpid())
    except OSError:  # not Linux
        return RankPresence(platform.node(), platform.node(), os.getpid())


def _is_running(pid: int) -> bool:
    """Return whether a process of this host is there, and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


START_S = 60.0  # time for the monitor process to start
FIRST_LOOK_S, LOOK_S = 0.002, 0.05  # between two queries of the store
NEWCOMERS = 32  # ranks whose announcement one query asks for
LOOK_S_PER_RANK = 1e-3  # so that one store answers 2,000 queries a second, however many ranks ask
ENDED = "its process ended while the ranks were starting (killed, or crashed)"
log = logging.getLogger(__name__)

T = TypeVar("T")
START = Limit(Timeouts().start, "timeout_s")


# [Note: joining] Every rank announces its host and process in the store of the process group. When all have
# done so, rank 0 starts the monitor and publishes its address; all ranks connect. We wait for a rank that is
# late (it may load a model for minutes), but not for one that is dead. A dead rank is found in three ways:
# - A rank that has announced itself and is on this host is checked by its process id.
# - If the default group is gloo, a collective of one number runs in the background. It fails in a neighbour
#   of a rank that dies. The rank that has not announced itself is then the dead one.
# - Once the monitor runs, all ranks are known to be there. A rank that does not join in time has failed.
# A rank that sees a death writes it to the store for the others.
class PeerLost(Exception):
    """A rank failed before all ranks had joined; `fault` has the rank and the observation."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.cause)
        self.fault = fault


class Arrival:
    """Track the ranks of a job until they are connected to the monitor.

    Args:
        store: of the process group.
        name: of this arrival; a process may join several times.
        rank, world_size: of the world.
        limit: within which all ranks must have come.
        collective: a running collective of the same ranks; None if their default group has no collective that
            breaks when a rank dies.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        world_size: int,
        limit: Limit,
        collective: FirstCollective | None,
    ) -> None:
        self.store, self.name, self.rank, self.world_size = store, name, rank, world_size
        self._limit, self._began, self._collective = limit, time.monotonic(), collective
        self._warned = False
        self._keys = [f"{name}/{rank}" for rank in range(world_size)]
        self._mine = presence()
        self._complete_at: float | None = None  # time at which all ranks were known to have come
        self._known: dict[int, RankPresence] = {}
        # Rank 0 watches all ranks; each other rank watches rank 0 and its two neighbours. So two ranks see
        # every death.
        near = range(1, world_size) if rank == 0 else (0, (rank + 1) % world_size, rank - 1)
        self._unknown = deque(frozenset(near) - {rank})  # watched ranks that have not announced themselves

    def announce(self) -> None:
        """Write this rank's host and process to the store."""
        self.store.set(f"{self.name}/{self.rank}", json.dumps(self._mine))
        if self._collective is not None:
            self._collective.begin()

    def check(self) -> None:
        """Raise PeerLost if a rank that had come has died since."""
        fault = self._ask_store(self._look)
        if fault is not None:
            raise self._tell(fault)

    def wait_for(self, key: str) -> bytes:
        """Wait until the key is in the store, and return its value."""
        self._wait(lambda: self.store.check([f"{self.name}/{key}"]))
        return self.store.get(f"{self.name}/{key}")

    def wait_for_all(self) -> list[RankPresence]:
        """Wait until every rank has announced itself; return host and process of all."""
        self._wait(lambda: self.store.check(self._keys))
        presences = [RankPresence(*json.loads(text)) for text in self.store.multi_get(self._keys)]
        self._known |= {rank: presences[rank] for rank in self._unknown}
        self._unknown.clear()
        return presences

    def _wait(self, ready: Callable[[], bool]) -> None:
        pause_s = FIRST_LOOK_S
        while not self._ask_store(ready):
            self.check()
            seconds = time.monotonic() - self._began
            if seconds > self._limit.seconds:
                missing = self._ask_store(self._find_missing) or [0]
                late = f"it did not come to where ds_ring starts within {self._limit.seconds:g} s"
                raise self._tell(Fault(missing[0], f"{late} ({self._limit.key})"))
            if not self._warned and seconds > WARNED_PART * self._limit.seconds:
                self._warned = True
                self._warn(seconds)
            time.sleep(pause_s)
            # The pause grows with the number of ranks, because all of them query one store.
            pause_s = min(2 * pause_s, LOOK_S + self.world_size * LOOK_S_PER_RANK)

    def _warn(self, seconds: float) -> None:
        """Log which ranks have not come, on the first rank that has."""
        missing = self._ask_store(self._find_missing)
        if missing and self.rank == min(set(range(self.world_size)) - set(missing), default=-1):
            named = ", ".join(map(str, missing[:8])) + (" and others" if len(missing) > 8 else "")
            log.warning(
                "the ranks %s are late: the others have waited %.1f s where ds_ring starts; they count as"
                " failed after %g s (%s)", named, seconds, self._limit.seconds, self._limit.key,
            )  # fmt: skip

    def _ask_store(self, ask: Callable[[], T]) -> T:
        """Return the result of a query, or raise PeerLost if the store is lost with its host."""
        try:
            return ask()
        except RuntimeError as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            cause = f"the process group's store is lost, and so, it seems, is the rank that hosts it: {text}"
            raise PeerLost(Fault(0, cause)) from error

    def _look(self) -> Fault | None:
        """Return the rank that is known to be dead, if any; write deaths that are seen here to the store.

        Rank 0 decides which rank that is, as long as it lives; after all have come, the monitor decides.
        """
        fault = self._judge()
        if fault is not None:
            return fault
        for _ in range(min(len(self._unknown), NEWCOMERS)):
            rank = self._unknown.popleft()
            if self.store.check([f"{self.name}/{rank}"]):
                self._known[rank] = RankPresence(*json.loads(self.store.get(f"{self.name}/{rank}")))
            else:
                self._unknown.append(rank)
        for rank, presence in self._known.items():
            if not self._check_alive(presence):
                # It may have ended because it saw a fault, which it wrote after the query above.
                fault = self._judge()
                if fault is not None or 0 in (rank, self.rank):
                    return fault or Fault(rank, ENDED)
                self._write("dead", str(rank))
        if self._collective is not None and self._collective.is_broken():
            self._write("broken", "")
        return None

    def _judge(self) -> Fault | None:
        """Return the rank that failed first, if the deaths written to the store tell."""
        # One query for all keys, because a thousand ranks query one store.
        if not self.store.check([f"{self.name}/alarm"]):
            return None
        if self.store.check([f"{self.name}/fault"]):
            return Fault(*json.loads(self.store.get(f"{self.name}/fault")))
        if self.rank == 0 and self.store.check([f"{self.name}/dead"]):
            return Fault(int(self.store.get(f"{self.name}/dead")), ENDED)
        if self.store.check([f"{self.name}/broken"]):
            missing = self._find_missing()
            if len(missing) == 1 and 0 in (missing[0], self.rank):
                return Fault(missing[0], "its process ended before it came to where ds_ring starts")
            self._complete_at = None if missing else self._complete_at or time.monotonic()
            if self._complete_at is not None and time.monotonic() > self._complete_at + START_S:
                return Fault(0, f"it did not start the monitor process within {START_S:g} s")
        return None

    def _write(self, key: str, value: str) -> None:
        """Write what this rank saw, and set the alarm key so that others read it."""
        self.store.set(f"{self.name}/{key}", value)
        self.store.set(f"{self.name}/alarm", "")

    def _check_alive(self, presence: RankPresence) -> bool:
        """Return False if the rank is known to be dead."""
        # A process id is valid within one host and namespace only.
        if presence[:2] != self._mine[:2]:
            return True
        return _is_running(presence.pid)

    def _find_missing(self) -> list[int]:
        return [rank for rank, key in enumerate(self._keys) if not self.store.check([key])]

    def _tell(self, fault: Fault) -> PeerLost:
        try:
            self._write("fault", json.dumps(fault))
        except RuntimeError:
            log.warning("the store is lost: other ranks cannot be told that rank %d has failed", fault.rank)
        if self._collective is not None:
            self._collective.leave()
        if self.rank == 0:  # it may host the store, and would take the news with it
            time.sleep(LINGER_S)
        return PeerLost(fault)


CONNECT_S = 2.0  # for one address of the monitor
HANDSHAKE_S = 5.0
JOIN_S = 60.0  # tries of all addresses together


# [Note: the secret]
# The handshake needs a secret that is known to the ranks alone. A launcher hands one over (`secret`), and the
# store does not contain it. Otherwise rank 0 makes one and publishes it in the store: then every process that
# can read the process group's store, which has no password, can connect to the monitor.
class MonitorAddress(NamedTuple):
    """The address of the monitor, and the settings of rank 0 that hold for all ranks."""

    port: int
    hosts: list[str]  # tried in order
    secret: str | None  # None where the launcher has handed one over
    heartbeat_timeout_s: float


_NO_SECRET = (
    "ranks of several hosts without a secret: whoever reaches the port of torch's store can end the job; set"
    " DS_RING_SECRET to one value on all hosts (openssl rand -hex 32)"
)


def join(
    store: Store,
    rank: int,
    world_size: int,
    heartbeat_timeout_s: float,
    exit_after_s: float | None = None,
    secret: str | None = None,
    limit: Limit = START,
    collective: FirstCollective | None = None,
) -> DetectorClient:
    """Join the failure detector of this job; rank 0 starts it. All ranks must call it in the same order.

    Args:
        store: of the process group.
        rank, world_size: of the world.
        heartbeat_timeout_s: a rank that is silent for so long has failed; rank 0's holds.
        exit_after_s: of `DetectorClient`.
        secret: what the launcher handed over, the same on all ranks; None without one.
        limit: until every rank has come here.
        collective: of `Arrival`.

    Raises:
        PeerLost: a rank died, or did not come in time.
        RingConfigError: the secret is too short to be one.
        RingMeshError: the monitor did not start or cannot be reached, or not all ranks have a secret.
    """
    if secret is not None and len(secret.encode()) < handshake.SECRET_BYTES:
        expected = f"at least {handshake.SECRET_BYTES} characters"
        raise RingConfigError.wrong("secret", expected, str(len(secret)), "use `openssl rand -hex 32`")
    name = f"ds_ring/detector/{store.add(f'ds_ring/detector/of/{rank}', 1)}"
    arrival = Arrival(store, name, rank, world_size, limit, collective)
    arrival.announce()
    if rank == 0:
        presences, hosts = arrival.wait_for_all(), [LOOPBACK]
        if len({presence.host for presence in presences}) > 1:
            from ds_ring.health.hosts import find_listening_hosts

            hosts = find_listening_hosts(store)
        published = None if secret is not None else secrets.token_hex(32)
        if published is not None and hosts != [LOOPBACK]:
            log.warning(_NO_SECRET)
        port = start_monitor(hosts[0], world_size, heartbeat_timeout_s, secret or published or "")
        arrival.check()  # from here on the monitor would wait for the dead
        hosts = hosts[::-1]  # loopback first
        if hosts == [""]:  # fe80 is of one cable only
            from ds_ring.health.hosts import find_addresses

            outside = [a for a in find_addresses() if not a.startswith(("127.", "::1", "fe80"))]
            hosts = [LOOPBACK, *outside, socket.gethostname()]
        address = MonitorAddress(port, hosts, published, heartbeat_timeout_s)
        store.set(f"{name}/monitor", json.dumps(address))
    else:
        address = MonitorAddress(*json.loads(arrival.wait_for("monitor")))
    known = secret or address.secret
    if known is None or (secret is not None and address.secret is not None):
        has, rank_0_has = ("none", "one") if secret is None else ("one", "none")
        got = f"{rank_0_has} on rank 0 and {has} on rank {rank}"
        advice = "start all hosts by one `ds-ring launch`, or set DS_RING_SECRET"
        raise RingMeshError.wrong("secret", "one on every rank or on none", got, advice)
    connection = _connect(address, known.encode(), rank)
    detector = DetectorClient(rank, connection, 0, address.heartbeat_timeout_s, exit_after_s)
    if collective is not None:
        collective.end()
    return detector


def start_monitor(host: str, world_size: int, heartbeat_timeout_s: float, secret: str) -> int:
    """Start a monitor on this machine, as a process of its own that ends by itself; return its port.

    Args:
        host: the address to listen at; "" for every one.
        world_size, heartbeat_timeout_s, secret: of `join`.
    """
    command = [sys.executable, "-I", "-S", str(Path(handshake.__file__).parent)]
    settings = {"host": host, "world_size": world_size, "secret": secret}
    settings |= {"heartbeat_timeout_s": heartbeat_timeout_s}
    done = subprocess.run(
        command, input=json.dumps(settings) + "\n", capture_output=True, text=True, timeout=START_S
    )
    if done.returncode or not done.stdout.strip():
        got = f"exit code {done.returncode} and {done.stderr.strip()[-500:]!r}"
        advice = "mend it on the host of rank 0"
        raise RingMeshError.wrong(sys.executable, "it to start the monitor process", got, advice)
    return int(done.stdout)


def _connect(address: MonitorAddress, secret: bytes, rank: int) -> socket.socket:
    """Connect to the first host that answers as this job's monitor; try again while it may only be busy."""
    deadline, tried = time.monotonic() + JOIN_S, dict[str, str]()
    pause_s = 0.05
    while True:
        for host in dict.fromkeys(address.hosts):
            with ExitStack() as opened:
                try:
                    connection = socket.create_connection((host, address.port), timeout=CONNECT_S)
                    opened.enter_context(connection)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    handshake.authenticate(connection, secret, rank, HANDSHAKE_S)
                    opened.pop_all()
                    return connection
                except handshake.HandshakeError as error:
                    tried[host] = f"another service: {error}"
                except OSError as error:
                    tried[host] = str(error)
        # Where every address refuses there is no monitor to wait for.
        refused = all("refused" in text or "another service" in text for text in tried.values())
        if refused or time.monotonic() > deadline:
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
    got = "; ".join(f"{host} ({text})" for host, text in tried.items())
    expected = f"an answer of rank 0's monitor process at port {address.port}"
    advice = "let the hosts reach each other on all ports, as gloo and NCCL need it too"
    raise RingMeshError.wrong("RingMesh", expected, got, advice)


def join_detector(
    grid: Grid,
    heartbeat_timeout_s: float,
    exit_after_fault_s: float | None,
    secret: str | None,
    limit: Limit = START,
) -> DetectorClient | None:
    """Join the failure detector of this world; arguments as in `RingMesh.from_world`. Collective.

    Returns:
        None where there is no other rank: the world has one rank, or its process group is fake.

    Raises:
        RingPeerError: another rank died during the call, or did not come in time; names it.
        RingMeshError, RingConfigError: of `join`.
    """
    import torch.distributed as dist

    if grid.world_size == 1 or dist.get_backend() == "fake":
        return None
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    collective = FirstCollective() if dist.get_backend() == "gloo" else None
    settings = (heartbeat_timeout_s, exit_after_fault_s, secret, limit, collective)
    try:
        return join(store, rank, grid.world_size, *settings)
    except PeerLost as lost:
        raise make_peer_error(grid, rank, None, lost.fault) from lost


@contextmanager
def leave_on_error(detector: DetectorClient | None) -> Iterator[None]:
    """Leave the failure detector where a start fails, and say why before that."""
    try:
        yield
    except BaseException as error:
        if detector is not None and isinstance(error, RingPeerError):
            detector.noticed = True
        elif detector is not None:
            if not isinstance(error, RingError):  # those are of the user: every rank raises one
                text = str(error).splitlines()[0][:300] if str(error) else ""
                detector.report_failure(f"{type(error).__name__} while the ranks were starting: {text}")
            detector.leave()
        raise

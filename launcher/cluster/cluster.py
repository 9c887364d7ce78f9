"""Define the cluster YAML as a frozen model: which engine starts which script on which hosts.

The only file that knows the keys, what each takes and its default. How a file becomes a model, and which keys
go together: cluster_file.py; engines: engines/; whether files, hosts and ports
are really there in checks.py.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from ds_ring.config.messages import Accepted, Refused, Section, sentence, shown
from ds_ring.config.problems import did_you_mean

from ..engines.engine import ENGINES, Engine
from ..run.job import LOOPBACK, LOOPBACK_6, SECRET_VARIABLE

MAX_SLOTS = 4096  # of one host: more than any has devices or cores
_MAX_LETTERS = 4096  # Linux's own limit of a path; of a variable it is 128 KiB
LOCAL_NAME = "localhost"
# Every engine sets these for each rank by itself; a value from the YAML would be lost or, worse, win.
_SET_BY_THE_ENGINE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_FILE = Accepted("the path of a file", "write it relative to the folder of this YAML, or absolute")
_WORD = Accepted("a word", "write one of these words")
_WORDS = Accepted("a list", "write ['--steps', 100], or one '- item' on each line")
_VARIABLES = Accepted("a mapping of names to values", "write 'NAME: value' lines")
_NAMES = Accepted(
    "a list of names of the caller's environment variables",
    "write [MY_TOKEN, 'MY_*'], and NAME: value lines under environment",
)
_NAME = Accepted("a host name or address", "write letters, digits, dots, dashes and colons only")
_HOSTS = Accepted(
    "'local' or a list of hosts", "write 'local' and slots: 2, or '- {name: node-0, slots: 8}' lines"
)
_SLOTS = Accepted("a whole number of at least 1", "slots are the processes of one host, one for each device")
_YES_NO = Accepted("true or false", "write true or false, without quotes")
_PORT = Accepted("a port from 1024 to 65535", "leave it out and a free one is taken")
_SSH_PORT = Accepted("a port from 1 to 65535", "leave it out where it is ssh's own")
_FOLDER = Accepted("the path of a folder", "write it relative to the folder of this YAML, or absolute")
_ATTEMPTS = Accepted("a whole number from 1 to 1000", "1 starts the job once")
_SECONDS = Accepted("a number of seconds from 0 to 86400", "write 10, or leave it out")
_RING = Accepted(
    "a whole number of at least 1", "write the smallest ring that the memory of its ranks allows"
)
_RELAUNCH = Accepted("a mapping", "write 'relaunch: {checkpoints: FOLDER}', or leave it out")


def _path(value: object, info: ValidationInfo) -> Path:
    if (
        not isinstance(value, str)
        or not value.strip()
        or len(value) > _MAX_LETTERS
        or not value.isprintable()
    ):
        raise Refused(sentence(_FILE.what, shown(value), _FILE.advice))
    folder: Path = (info.context or {}).get("folder", Path())
    try:
        return (folder / value).resolve()
    except UnicodeEncodeError:
        got = f"{shown(value)}, which this locale ({sys.getfilesystemencoding()}) has no letters for"
        raise Refused(sentence(_FILE.what, got, "export LC_ALL=C.UTF-8")) from None
    except (OSError, RuntimeError, ValueError):  # links in a circle
        raise Refused(sentence(_FILE.what, f"{shown(value)}, a link to itself", _FILE.advice)) from None


def _script(value: object, info: ValidationInfo) -> Path:
    """Return the file of a path, or of an installed module's name."""
    path = _path(value, info)
    words = str(value).split(".")
    if path.exists() or len(words) < 2 or words[-1] == "py" or not all(map(str.isidentifier, words)):
        return path
    try:
        module = find_spec(str(value))
    except ImportError:  # of a package around it
        module = None
    return Path(module.origin) if module is not None and module.origin is not None else path


def _text(value: object) -> str:
    # YAML makes a bool of an unquoted yes, on or true, and the text that the user wrote cannot be had back.
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise Refused(sentence("text or a number", _kind(value), "put it in quotes"))
    if isinstance(value, int) and abs(value) >= 10**30:
        raise Refused(sentence("a number of at most 30 digits", "a longer one", "put it in quotes"))
    if any(character in str(value) for character in "\n\r\0"):
        raise Refused(sentence("text of one line", "a line break in it", "remove the line break"))
    if any("\ud800" <= character <= "\udfff" for character in str(value)):
        raise Refused(sentence("text in UTF-8", "half of a character", "remove the \\ud... in it"))
    return str(value)


def _kind(value: object) -> str:
    """Describe a value by its type alone: it may be secret."""
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else type(value).__name__
    )


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise Refused(sentence(_WORDS.what, shown(value), _WORDS.advice))
    return tuple(_text(item) for item in value)


def _variables(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Refused(sentence(_VARIABLES.what, _kind(value), _VARIABLES.advice))
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            advice = "use letters, digits and underscores"
            raise Refused(sentence("names of environment variables", shown(name), advice))
        if name in _SET_BY_THE_ENGINE:
            advice = "use master_address, master_port and slots"
            raise Refused(sentence("variables that the engine leaves alone", name, advice))
        if name == SECRET_VARIABLE:
            advice = "remove it: every launch makes its own (with ssh: false export one on each host)"
            raise Refused(sentence("variables that the launcher leaves alone", name, advice))
    return {name: _text(item) for name, item in value.items()}


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise Refused(sentence(_NAMES.what, shown(value), _NAMES.advice))
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*\*?", name, re.ASCII):
            raise Refused(sentence(_NAMES.what, shown(name), _NAMES.advice))
    return tuple(value)


def _engine(value: object) -> str:
    if not isinstance(value, str) or value not in ENGINES:
        words, got = ", ".join(map(shown, ENGINES)), shown(value)
        near = did_you_mean(value, ENGINES) if isinstance(value, str) else None
        raise Refused(
            sentence(f"one of {words}", got, f"did you mean {shown(near)}?" if near else _WORD.advice)
        )
    return value


_HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9:][A-Za-z0-9._:-]*$", max_length=253)]
_File = Annotated[Path, BeforeValidator(_path), _FILE]
_Script = Annotated[Path, BeforeValidator(_script), _FILE]
_Texts = Annotated[tuple[str, ...], BeforeValidator(_texts), _WORDS]


class Host(Section):
    """Describe one machine and how many processes it runs."""

    name: Annotated[_HostName, _NAME]
    slots: Annotated[int, Field(ge=1, le=MAX_SLOTS), _SLOTS]


_Seconds = Annotated[
    float,
    Field(ge=0, le=86400),
    BeforeValidator(
        lambda value: float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    ),
    _SECONDS,
]


class Relaunch(Section):
    """Say how a job is started again after a fault.

    Attributes:
        checkpoints: what the script gives `save_checkpoint`.
        max_attempts: attempts in a row that end without a checkpoint newer than the one they began with.
        backoff_seconds: pause before the second attempt; it doubles with every attempt that failed.
        backoff_most_seconds: the longest pause.
        smallest_ring_size: ranks that share a sequence, at least, where hosts are gone.
        host_seconds: how long a host has to answer before each attempt.
        wait_for_hosts_seconds: how long to wait for hosts that are gone before a smaller ring is taken.
    """

    checkpoints: Annotated[Path, BeforeValidator(_path), _FOLDER]
    max_attempts: Annotated[Annotated[int, Field(ge=1, le=1000)], _ATTEMPTS] = 3
    backoff_seconds: _Seconds = 1.0
    backoff_most_seconds: _Seconds = 300.0
    smallest_ring_size: Annotated[Annotated[int, Field(ge=1)], _RING] = 1
    host_seconds: _Seconds = 10.0
    wait_for_hosts_seconds: _Seconds = 0.0


class Cluster(Section):
    """Describe a run: engine, hosts, environment, script. Paths are absolute; `local` is a host, too."""

    engine: Annotated[str, BeforeValidator(_engine), _WORD] = "deepspeed"
    device: Annotated[Literal["auto", "cpu", "cuda"], _WORD] = "auto"
    hosts: Annotated[tuple[Host, ...], Field(min_length=1), _HOSTS]
    ssh: Annotated[bool, _YES_NO] = True
    ssh_port: Annotated[Annotated[int, Field(ge=1, le=65535)] | None, _SSH_PORT] = None
    master_address: Annotated[_HostName | None, _NAME] = None
    master_port: Annotated[Annotated[int, Field(ge=1024, le=65535)] | None, _PORT] = None
    environment: Annotated[dict[str, str], BeforeValidator(_variables), _VARIABLES] = Field(
        default_factory=dict
    )
    env: Annotated[tuple[str, ...], BeforeValidator(_names), _NAMES] = ()
    script: _Script
    deepspeed_config: _File
    script_args: _Texts = ()
    engine_args: _Texts = ()
    run_folder: Annotated[Annotated[Path, BeforeValidator(_path)] | None, _FOLDER] = None
    grace_seconds: _Seconds = 15.0
    relaunch: Annotated[Relaunch | None, _RELAUNCH] = None

    @property
    def starter(self) -> Engine:
        """Return the engine by its name."""
        return ENGINES[self.engine]

    @property
    def world_size(self) -> int:
        """Count the processes on all hosts together."""
        return sum(host.slots for host in self.hosts)

    @property
    def is_local(self) -> bool:
        """Return whether this machine runs all of it."""
        return len(self.hosts) == 1 and self.hosts[0].name in (LOCAL_NAME, LOOPBACK, LOOPBACK_6)

    @property
    def reaches_out(self) -> bool:
        """Return whether one call starts other hosts too; else each host is started by its own call."""
        return (self.ssh or self.starter.has_daemons) and not self.is_local

    @property
    def asks_by_ssh(self) -> bool:
        """Return whether hosts are reached by ssh."""
        return self.reaches_out and not self.starter.has_daemons

    @property
    def starts_agents(self) -> bool:
        """Return whether ds-ring starts an agent on each host, as the engine starts one host only."""
        return self.asks_by_ssh and not self.starter.starts_all_hosts

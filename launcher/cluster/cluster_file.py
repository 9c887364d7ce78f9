"""Read a cluster YAML: `local` written out, all problems in one error, keys that do not go together.

What a single key takes is cluster.py's.

PyYAML keeps the last of two equal keys without a word, and an empty file is None. Both are refused here, and
so is what no file of ours needs and a hostile one uses: aliases, tags, keys that are no single words, depth.
Dates are words: nothing here is one.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ds_ring.config.json_text import SECTION, read_small
from ds_ring.config.messages import sentence, shown
from ds_ring.config.problems import Problem, config_error, did_you_mean, list_problems
from ds_ring.errors import RingConfigError

from ..engines import engines as engines  # fills ENGINES, which the model reads
from ..run.job import LOOPBACK, LOOPBACK_6
from .cluster import LOCAL_NAME, Cluster, Host

MAX_BYTES = 2**17  # some thousand hosts; PyYAML reads about a MB in two seconds
MAX_NESTED = 16
_Loader: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader  # in C, ten times as fast
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class _StrictLoader(_Loader):  # type: ignore[misc]  # yaml has no types
    """Refuse a mapping with a key that occurs twice, and read no dates."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # PyYAML itself would keep the last of two equal keys.
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                what = "expected a word for a key, got a list or a mapping; write 'key: value'"
                raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
            if key_node.value in seen:
                what = f"expected every key once, got {key_node.value[:80]!r} twice; keep one of them"
                raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
            seen.add(key_node.value)
        built: dict[Any, Any] = super().construct_mapping(node, deep)
        return built


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping at the top of the file `path`; RingConfigError if it cannot be read."""
    try:
        text = read_small(path, MAX_BYTES)
    except FileNotFoundError:
        raise config_error(str(path), missing_file(path, "a cluster YAML")) from None
    except IsADirectoryError:
        raise config_error(str(path), "expected a file, got a directory; name the file in it") from None
    try:
        _require_plain(text)
        value = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader: builds plain data only
    except yaml.YAMLError as error:
        raise config_error(str(path), _where_and_what(error, text)) from None
    except (ValueError, RecursionError) as error:  # an integer of 5000 digits
        got = str(error).split(";")[0]
        raise config_error(str(path), sentence("values that can be read", got, "correct them")) from None
    if value is None:
        raise config_error(
            str(path), "expected a mapping, got an empty file; copy quickstart.yaml of ds-ring configs"
        )
    odd = [key for key in value if not isinstance(key, str)] if isinstance(value, dict) else []
    if not isinstance(value, dict) or odd:
        got = f"the key {shown(odd[0])}, which is no word" if odd else type(value).__name__
        raise config_error(
            str(path), f"expected 'key: value' lines, got {got}; see quickstart.yaml of ds-ring configs"
        )
    return value


def _require_plain(text: str) -> None:
    """Raise yaml.YAMLError for what a plain mapping has not; without recursion, before anything is built."""
    depth = 0
    # Events only: an alias bomb is refused before it is expanded.
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        what, tag = "", getattr(event, "tag", None)
        if depth > MAX_NESTED:
            what = f"expected at most {MAX_NESTED} levels in each other, got more; is this the right file?"
        elif isinstance(event, yaml.AliasEvent):
            what = f"expected plain values, got the alias *{str(event.anchor)[:80]}; write the value itself"
        elif tag not in (None, "!"):
            what = f"expected plain values, got the tag {tag[:80]}; remove it"
        if what:
            mark: Any = event.start_mark  # the stubs have two classes for the same
            raise yaml.constructor.ConstructorError(None, None, what, mark)


def missing_file(path: Path, what: str) -> str:
    """Format the sentence for a file that is not there, with the name that was probably meant."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        advice = "ds-ring configs writes it" if path.parts[:1] == ("configs",) else "check the path"
        return f"expected {what}, but the folder {path.parent} does not exist; {advice}"
    near = did_you_mean(path.name, names)
    advice = f"did you mean '{near}'?" if near else "check the path"
    return f"expected {what}, but there is no '{path.name}' in {path.parent.resolve()}; {advice}"


def _where_and_what(error: yaml.YAMLError, text: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"expected YAML, got what is none: {str(error).splitlines()[0]}; correct it"
    what = getattr(error, "problem", None) or "cannot be read"
    lines = text.splitlines()
    tab = mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]
    advice = "" if ";" in what else "; indent with blanks" if tab else "; correct it here or just before"
    expected = "" if "expected" in what else "expected YAML, got: "
    return f"not YAML at line {mark.line + 1}, column {mark.column + 1}: {expected}{what}{advice}"


# A hostfile has DeepSpeed's format: a line `node-0 slots=8` for each host; `#` starts a comment. DeepSpeed
# trains on this machine alone when the file is missing, with a warning, and accepts slots=0. Both are errors
# here, and so is a host that is listed twice.

_LINE = re.compile(r"(?P<name>\S{1,253})\s+slots\s*=\s*(?P<slots>\d{1,12})", re.ASCII)


def read_hostfile(path: Path) -> tuple[list[dict[str, Any]], list[Problem]]:
    """Return the hosts as a YAML would list them, and the faults of the file, with line numbers."""
    try:
        text = read_small(path, MAX_BYTES)
    except FileNotFoundError:
        return [], [Problem("hostfile", missing_file(path, "a hostfile"))]
    except IsADirectoryError:
        return [], [
            Problem("hostfile", f"expected a hostfile, got the directory {path}; name the file in it")
        ]
    except RingConfigError as error:
        return [], [Problem("hostfile", str(error))]
    hosts: list[dict[str, Any]] = []
    problems: list[Problem] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#")[0].strip()
        if not content:
            continue
        problem = _find_problem(content, number, seen)
        if problem:
            problems.append(Problem("hostfile", f"{path}, line {number}: {problem}"))
        elif (match := _LINE.fullmatch(content)) is not None:
            hosts.append({"name": match["name"], "slots": int(match["slots"])})
            seen[match["name"]] = number
    if not hosts and not problems:
        expected = sentence("a line 'node-0 slots=8' for each host", "no host", "write them down")
        problems.append(Problem("hostfile", f"{path}: {expected}"))
    return hosts, problems


def _find_problem(content: str, number: int, seen: dict[str, int]) -> str:
    match = _LINE.fullmatch(content)
    if match is None:
        got = repr(content) if len(content) <= 80 else shown(content)
        return sentence("'node-0 slots=8'", got, "write the name, a blank, slots=number")
    if int(match["slots"]) == 0:
        return sentence("at least one slot", f"{match['name']} slots=0", "remove the line, or give it slots")
    if match["name"] in seen:
        first = f"{match['name']} on line {seen[match['name']]} and again"
        return sentence("every host once", first, "add its slots up in one line")
    return ""


_Raw = dict[str, Any]


def read_cluster(path: Path) -> Cluster:
    """Return the cluster of the YAML at `path`, or raise one RingConfigError that lists all its problems."""
    mapping = read_mapping(path)
    if SECTION in mapping:
        got = f'a DeepSpeed JSON (it has "{SECTION}")'
        advice = "write a YAML that names it as its deepspeed_config, as configs/quickstart.yaml does"
        raise config_error(str(path), sentence("a cluster YAML", got, advice))
    # A hostfile becomes a list of hosts first, so that both are checked alike.
    raw, from_file = _with_hostfile(mapping, path.absolute().parent)
    raw, problems = _with_hosts(raw)
    problems = from_file or problems
    # A key that is missing is treated as null, so that its error is that key's own.
    required = [name for name, field in Cluster.model_fields.items() if field.is_required()]
    try:
        cluster = Cluster.model_validate(
            {**dict.fromkeys(required), **raw}, context={"folder": path.absolute().parent}
        )
    except ValidationError as error:
        # A faulty host is named by itself: the list that lacks it needs no error of its own.
        named_in_detail = "hosts" if problems else None
        key_problems = [
            problem for problem in list_problems(error, Cluster, "") if problem.key != named_in_detail
        ]
        raise config_error(str(path), *problems, *key_problems) from None
    problems += _misfits(cluster)
    if problems:
        raise config_error(str(path), *problems)
    return cluster


def _with_hostfile(raw: _Raw, folder: Path) -> tuple[_Raw, list[Problem]]:
    """Return `raw` with the hosts that its `hostfile` lists, if any, and the faults of that file."""
    if "hostfile" not in raw:
        return raw, []
    rest = {key: value for key, value in raw.items() if key != "hostfile"}
    if raw.get("hosts") is not None:
        return rest, [Problem("hostfile", sentence("none beside hosts", "both", "keep one of them"))]
    named = raw["hostfile"]
    if not isinstance(named, str) or not named.strip():
        wrong = sentence("the path of a file", shown(named), "write it relative to the folder of this YAML")
        return rest | {"hosts": []}, [Problem("hostfile", wrong)]
    hosts, problems = read_hostfile(folder / named)
    return rest | {"hosts": hosts}, problems


def _with_hosts(raw: _Raw) -> tuple[_Raw, list[Problem]]:
    """Return `raw` with a tuple of `Host` for its hosts, and their faults."""
    listed = raw.get("hosts")
    if listed == "local":
        for key in raw if "slots" not in raw else ():
            if did_you_mean(key, ["slots"], cutoff=0.8):
                wrong = sentence("a known key", f"the unknown key '{key[:80]}'", "did you mean 'slots'?")
                return {name: raw[name] for name in raw if name != key} | {"hosts": ()}, [Problem(key, wrong)]
        without_slots = {key: value for key, value in raw.items() if key != "slots"}
        host, problems = _host({"name": LOCAL_NAME, "slots": raw.get("slots")}, "")
        return {**without_slots, "hosts": (host,) if host else ()}, problems
    if not isinstance(listed, list):
        return raw, []
    pairs = [_host(entry, f"hosts[{index}]") for index, entry in enumerate(listed)]
    problems = [problem for _, host_problems in pairs for problem in host_problems]
    if "slots" in raw:
        advice = "move it into each line: '- {name: node-0, slots: 8}'"
        problems.append(
            Problem("slots", sentence("none beside a list of hosts", shown(raw["slots"]), advice))
        )
        raw = {key: value for key, value in raw.items() if key != "slots"}
    return {**raw, "hosts": tuple(host for host, _ in pairs if host)}, problems


def _host(entry: object, key: str) -> tuple[Host | None, list[Problem]]:
    if not isinstance(entry, dict):
        wrong = sentence("a name and slots", shown(entry), "write '- {name: node-0, slots: 8}'")
        return None, [Problem(key, wrong)]
    try:
        return Host.model_validate({"name": None, "slots": None, **entry}), []
    except ValidationError as error:
        return None, list_problems(error, Host, key)


def _misfits(cluster: Cluster) -> Iterator[Problem]:
    """Yield problems of keys that are right by themselves and do not go together."""
    names = [host.name for host in cluster.hosts]
    twice = ", ".join(sorted(name for name, count in Counter(names).items() if count > 1))
    on_each_host = not cluster.is_local and not cluster.reaches_out
    on_loopback = not cluster.is_local and len(names) > 1 and names[0] in (LOCAL_NAME, LOOPBACK, LOOPBACK_6)
    if twice:
        got = f"{twice} more than once"
        yield Problem("hosts", sentence("every host once", got, "add its slots up in one line"))
    if on_each_host and cluster.master_port is None:
        advice = "write one down: all hosts must know the same"
        yield Problem("master_port", sentence("a port, as ssh is false", "none", advice))
    if on_loopback and cluster.master_address is None:
        expected, advice = "an address that all hosts reach", "write that of the first host"
        yield Problem("master_address", sentence(expected, names[0], advice))
    if cluster.ssh_port is not None and not cluster.asks_by_ssh:
        expected = "none, as nothing is started by ssh"
        yield Problem("ssh_port", sentence(expected, str(cluster.ssh_port), "remove it"))
    if any(re.match(r"(-H|--hostfile)\b", argument) for argument in cluster.engine_args):
        advice = "name it by the key hostfile of this YAML"
        yield Problem("engine_args", sentence("no hostfile of the engine's", "one", advice))
    unset = cluster.starter.unset
    options = [
        name for name in cluster.environment if any(fnmatch.fnmatchcase(name, wildcard) for wildcard in unset)
    ]
    if options:
        expected = f"variables that {cluster.engine} does not read as options"
        advice = "remove it; options of the engine belong in engine_args"
        yield Problem("environment", sentence(expected, options[0], advice))
    yield from cluster.starter.problems(cluster)
    if cluster.relaunch is None:
        return
    if cluster.run_folder is None:
        advice = "name a folder that all hosts share"
        yield Problem("relaunch", sentence("run_folder beside it", "none", advice))
    if on_each_host:
        advice = "set ssh: true, so that one ds-ring starts all hosts, or let Slurm do so (engine: slurm)"
        yield Problem("relaunch", sentence("one call that starts all hosts", "ssh: false", advice))
    if any(re.match(r"--max[-_]restarts\b", argument) for argument in cluster.engine_args):
        expected, advice = "no restarts of the engine's own", "remove it, or relaunch"
        yield Problem("engine_args", sentence(expected, "--max-restarts", advice))

"""Judge the answers of hosts and ranks: one finding for each need of a run. Prints nothing."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import inf, isnan
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from ..cluster.cluster import Cluster
from ..run.job import Job, module_command
from .hosts import HostAnswers

OK, WARNING, WRONG, NOT_LOOKED_AT = "ok", "warning", "wrong", "not looked at"
MUST_AGREE = ("python", "ds_ring", "torch", "deepspeed", "numpy")
MAX_ERROR = {"float32": 1e-5, "bfloat16": 2e-2}  # of the largest value, against float64
# of a pass, times ring size, over that of one rank: 1.0 to 1.2 on a ring, P where keys are gathered
MAX_MEMORY = 1.7
MAX_HEADERS = 8  # the integers that a rank sends have no more than 1 / so much of the numbers of a shard
LEAST_MEMORY = 0.5  # of the same: a pass that takes less was not measured
LEAST_BYTES_PER_S = 100e6  # between hosts: below it not even a gigabit network is in use
SLOWER = 5.0  # than the median of its kind: a link that is named
MAX_CLOCK_S = 1.0
MAX_KEYS = 5  # that differ, in one line

Hosts = Mapping[str, Mapping[str, Any]]


class Finding(NamedTuple):
    """Say how one thing is.

    Attributes:
        what: a word or two.
        state: `OK`, `WARNING`, `WRONG` or `NOT_LOOKED_AT`.
        says: a sentence; for a fault, its cause and its remedy.
    """

    what: str
    state: str
    says: str


def judge_hosts(cluster: Cluster, hosts: HostAnswers) -> list[Finding]:
    """Return the findings about hosts, in the order in which they should be read."""
    answers = hosts.answers
    if not answers:
        others = ("port", "interfaces", "versions", "devices", "script", "configuration", "folders")
        return [
            _presence(cluster, hosts),
            *(Finding(topic, NOT_LOOKED_AT, "no host answered") for topic in others),
        ]
    return [
        _presence(cluster, hosts),
        _port(answers),
        _interfaces(cluster, hosts),
        _versions(answers),
        _devices(cluster, answers),
        _files(cluster, answers),
        _configuration(answers),
        _folders(cluster, hosts),
    ]


def _presence(cluster: Cluster, hosts: HostAnswers) -> Finding:
    if hosts.missing:
        text = "; ".join(f"{name}: {why}" for name, why in hosts.missing.items())
        return Finding("hosts", WRONG, f"missing {text}. Start it, or mend its name, network or ssh")
    names = ", ".join(f"{name} ({answer['node']})" for name, answer in hosts.answers.items())
    return Finding("hosts", OK, f"{len(hosts.answers)} of {len(cluster.hosts)} answered: {names}")


def _port(answers: Hosts) -> Finding:
    for name, answer in answers.items():
        if answer.get("port_holder"):
            says = (
                f"the master's port is taken on {name} by {answer['port_holder']}; end it, or choose another"
            )
            return Finding("port", WRONG, f"{says} master_port")
    return Finding("port", OK, "the master's port is free")


def _interfaces(cluster: Cluster, hosts: HostAnswers) -> Finding:
    wrong, ways = [], []
    for name, answer in hosts.answers.items():
        way = answer.get("way", {})
        reached = hosts.ways.get(name) or (way.get("address"), way.get("interface"))
        wrong += [f"{name}: {text}" for text in _wrong_interfaces(cluster, answer, reached)]
        ways.append(f"{name} by {reached[1]} ({reached[0]})" if reached[0] else f"{name} is the master")
    for name, answer in hosts.answers.items():
        unknown = [peer for peer, address in answer["names"].items() if address is None]
        if unknown:
            wrong.append(f"{name} does not know the name {', '.join(unknown)}; add it to /etc/hosts or DNS")
    if wrong:
        return Finding("interfaces", WRONG, "; ".join(wrong))
    return Finding("interfaces", OK, "loopback" if cluster.is_local else ", ".join(ways))


def _wrong_interfaces(cluster: Cluster, answer: Mapping[str, Any], reached: tuple[Any, Any]) -> Iterable[str]:
    """Yield faults of the interfaces that a host's variables choose, or with gloo's own choice."""
    there = answer["interfaces"]
    has = ", ".join(f"{name} ({' '.join(i['addresses'])})" for name, i in there.items() if i["addresses"])
    for variable, value in answer["chosen"].items():
        if variable.startswith("NCCL") and value[:1] in "^=":
            continue  # a list of what not to take, or a list of exact names that NCCL checks
        for name in value.split(","):
            matching = [n for n in there if n == name or (variable.startswith("NCCL") and n.startswith(name))]
            if not matching:
                yield f"{variable}={value}: there is no such interface, it has {has}"
            elif not any(there[n]["up"] and there[n]["addresses"] for n in matching):
                yield f"{variable}={value}: that interface is down or has no address, it has {has}"
            elif reached[1] and reached[1] not in matching:
                yield f"{variable}={value}, but the master is reached by {reached[1]} ({reached[0]})"
    own_address = answer["own_address"] or ""
    # With a run_folder every rank names the interface by itself (rank.py).
    if (
        not cluster.is_local
        and cluster.run_folder is None
        and "GLOO_SOCKET_IFNAME" not in answer["chosen"]
        and own_address.startswith("127.")
    ):
        yield (
            f"its own name {answer['node']} stands for {own_address}, where gloo would listen; set"
            f" run_folder, or GLOO_SOCKET_IFNAME in environment, it has {has}"
        )


def _versions(answers: Hosts) -> Finding:
    packages = sorted({package for answer in answers.values() for package in answer["versions"]})
    differ = {
        package: _by_value(
            {name: answer["versions"].get(package, "none") for name, answer in answers.items()}
        )
        for package in packages
    }
    differences = [f"{name} {_hosts_by_value(values)}" for name, values in differ.items() if len(values) > 1]
    if differences:
        severe = any(len(differ.get(name, {})) > 1 for name in MUST_AGREE)
        return Finding(
            "versions", WRONG if severe else WARNING, f"{'; '.join(differences)}. Install the same everywhere"
        )
    first = next(iter(answers.values()))["versions"]
    return Finding("versions", OK, ", ".join(f"{name} {version}" for name, version in first.items()))


def _devices(cluster: Cluster, answers: Hosts) -> Finding:
    wrong, lines = [], []
    for host in cluster.hosts:
        if host.name not in answers:
            continue
        devices = answers[host.name]["devices"]
        gpus, cores = len(devices["gpus"]), devices["cores"]
        lines.append(f"{host.name}: {gpus} GPUs" if gpus else f"{host.name}: {cores} cores, no GPU")
        if cluster.device == "cuda" and gpus < host.slots:
            wrong.append(f"{host.name} has {gpus} GPUs for {host.slots} slots; correct slots, or its driver")
    if wrong:
        return Finding("devices", WRONG, "; ".join(wrong))
    return Finding("devices", OK, ", ".join(lines))


def _files(cluster: Cluster, answers: Hosts) -> Finding:
    values = _by_value({name: str(answer["files"]["script"]) for name, answer in answers.items()})
    absent = values.get("None", [])
    if absent:
        return Finding("script", WRONG, f"there is no {cluster.script} on {', '.join(absent)}; copy it there")
    if len(values) > 1:
        return Finding(
            "script", WRONG, f"{cluster.script} differs: {_hosts_by_value(values)} (sha256); copy one of them"
        )
    return Finding("script", OK, f"{cluster.script.name}, the same on all hosts")


def _configuration(answers: Hosts) -> Finding:
    """Compare the DeepSpeed JSON and the cluster YAML of all hosts, key by key."""
    unread = [name for name, answer in answers.items() if answer["config"] is None]
    if unread:
        return Finding("configuration", WRONG, f"the DeepSpeed JSON cannot be read on {', '.join(unread)}")
    differences = []
    for what, part in (("the DeepSpeed JSON", "config"), ("the cluster YAML", "cluster")):
        keys = sorted({key for answer in answers.values() for key in answer[part]})
        for key in keys:
            values = _by_value({name: answer[part].get(key, "nothing") for name, answer in answers.items()})
            if len(values) > 1:
                differences.append(f"{key} of {what}: {_hosts_by_value(values)}")
    if differences:
        rest = f" and {len(differences) - MAX_KEYS} more" if len(differences) > MAX_KEYS else ""
        return Finding(
            "configuration", WRONG, f"{'; '.join(differences[:MAX_KEYS])}{rest}. Copy one to all hosts"
        )
    return Finding("configuration", OK, "the DeepSpeed JSON and the cluster YAML are the same on all hosts")


def _folders(cluster: Cluster, hosts: HostAnswers) -> Finding:
    folders = sorted({folder for answer in hosts.answers.values() for folder in answer["folders"]})
    if not folders:
        return Finding("folders", NOT_LOOKED_AT, "the cluster YAML names no run_folder")
    wrong = [
        f"{name} cannot write to {folder}: {why}"
        for name, answer in hosts.answers.items()
        for folder, why in answer["folders"].items()
        if why
    ]
    everybody = {index for index, host in enumerate(cluster.hosts) if host.name in hosts.answers}
    for name, seen in hosts.seen.items():
        for folder, there in seen.items():
            unseen = [cluster.hosts[index].name for index in sorted(everybody - set(there))]
            if unseen and not wrong:
                wrong.append(f"{name} does not see in {folder} what {', '.join(unseen)} wrote; share it")
    if wrong:
        return Finding("folders", WRONG, "; ".join(wrong))
    return Finding("folders", OK, f"{', '.join(folders)}: written by all hosts, seen by all")


def _by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the hosts that have each value, of host -> value."""
    names_by_value: dict[str, list[str]] = defaultdict(list)
    for name, value in values.items():
        names_by_value[value].append(name)
    return dict(names_by_value)


def _hosts_by_value(values: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{value[:60]} on {' '.join(hosts)}" for value, hosts in values.items())


def judge_ring(ranks: list[dict[str, Any]]) -> list[Finding]:
    """Return the findings about the ring; `ranks` are `RankAnswer`s as JSON, by rank."""
    return [_exact(ranks), _travels(ranks), _memory(ranks), _links(ranks), _clocks(ranks)]


def _size(value: float) -> float:
    """Return the magnitude of a figure; NaN, which compares with nothing, counts as infinite."""
    return inf if isnan(value) else abs(float(value))


def _exact(ranks: list[dict[str, Any]]) -> Finding:
    worst = max(ranks, key=lambda rank: _size(rank["error"]))
    text = f"largest error against float64 {worst['error']:.1e} ({worst['dtype']}), on rank {worst['rank']}"
    if not worst["error"] <= MAX_ERROR[worst["dtype"]]:
        return Finding(
            "exact", WRONG, f"{text} of {worst['host']}; its device or its messages are not to be trusted"
        )
    return Finding("exact", OK, text)


def _travels(ranks: list[dict[str, Any]]) -> Finding:
    """Say whether K and V travel as a ring: point-to-point alone, as much as planned, a shard at most."""
    for rank in ranks:
        if (why := _no_ring(rank)) is not None:
            says = f"this is no ring: {why}, on rank {rank['rank']} of {rank['host']}"
            return Finding(
                "ring", WRONG, f'{says}; set "transport": "ring" in the JSON, or find who replaced it'
            )
    if ranks[0]["ring_size"] == 1:
        return Finding("ring", OK, "a ring of one sends nothing")
    traffic = ranks[0]["traffic"]
    says = f"{traffic['sends']} sends of {traffic['sent']} numbers a rank and pass, as planned"
    return Finding("ring", OK, f"{says}, none larger than a shard ({ranks[0]['shard']})")


def _no_ring(rank: Mapping[str, Any]) -> str | None:
    """Return what a rank moved that a ring does not move, or did not move that it does."""
    traffic, shard = rank["traffic"], rank["shard"]
    if traffic["others"] and rank["ring_size"] > 1:
        return "a pass called " + ", ".join(f"{n} {name}" for name, n in traffic["others"].items())
    if traffic["largest"] > shard:
        return f"one message had {traffic['largest'] / shard:.1f} shards"
    for way in ("sent", "received"):
        if traffic[way] != (planned := rank[f"planned_{way}"]):
            return f"a pass {way} {traffic[way]} numbers of K, V and gradients, its plan says {planned}"
    if traffic["integers"] > shard // MAX_HEADERS:
        return f"a pass sent {traffic['integers']} integers, which is more than its headers"
    if rank["ring_size"] > 1 and not traffic["sent"] + traffic["received"]:
        return "a pass moved nothing, and so did its plan"
    return None


def _memory(ranks: list[dict[str, Any]]) -> Finding:
    size, alone = ranks[0]["ring_size"], ranks[0]["alone_bytes"]
    worst = max(ranks, key=lambda rank: _size(rank["memory_bytes"]))
    share = worst["memory_bytes"] / alone
    text = f"a pass takes {share:.2f} of one rank's memory on a ring of {size} (1/{size} is {1 / size:.2f})"
    if not share * size <= MAX_MEMORY:
        return Finding(
            "memory", WRONG, f"memory does not fall with the ring: {text}, on rank {worst['rank']}"
        )
    least = min(ranks, key=lambda rank: float(rank["memory_bytes"]))
    if (share := least["memory_bytes"] / alone) * size < LEAST_MEMORY:
        says = f"memory was not measured: a pass takes {share:.2f} of one rank's, less than its shards"
        return Finding("memory", WRONG, f"{says}, on rank {least['rank']}")
    return Finding("memory", OK, text)


def _links(ranks: list[dict[str, Any]]) -> Finding:
    links = [rank["link"] for rank in ranks if rank["link"] is not None]
    if ranks[0]["ring_size"] == 1:
        return Finding("links", NOT_LOOKED_AT, "a ring of one has none")
    for rank in ranks:
        if rank["link"] is None or not rank["link"]["bytes_per_s"] > 0:
            says = f"rank {rank['rank']} of {rank['host']} measured no link to the next rank"
            return Finding("links", WRONG, says)
    place = {rank["rank"]: rank["place"] for rank in ranks}
    host = {rank["rank"]: rank["host"] for rank in ranks}
    for link in links:
        link["crosses"] = place[link["source"]] != place[link["target"]]
    slowest = min(links, key=lambda slow_link: float(slow_link["bytes_per_s"]))
    text = f"slowest {_named(slowest, host)}"
    for rank in sorted(links, key=lambda slow_link: float(slow_link["bytes_per_s"])):
        alike = [link_row["bytes_per_s"] for link_row in links if link_row["crosses"] == rank["crosses"]]
        too_slow = rank["crosses"] and rank["bytes_per_s"] < LEAST_BYTES_PER_S
        if too_slow or rank["bytes_per_s"] * SLOWER < median(alike):
            says = (
                f"slow link {_named(rank, host)}; its kind has {median(alike) / 1e6:.0f} MB/s in the middle"
            )
            advice = "its cable and interface" if rank["crosses"] else f"other work on {host[rank['target']]}"
            return Finding("links", WRONG if too_slow else WARNING, f"{says}. Look at {advice}")
    return Finding("links", OK, text)


def _named(link: Mapping[str, Any], host: Mapping[int, str]) -> str:
    ends = (f"rank {link[end]} ({host[link[end]]})" for end in ("source", "target"))
    return f"{' to '.join(ends)}: {link['bytes_per_s'] / 1e6:.0f} MB/s, {1e6 * link['latency_s']:.0f} us"


def _clocks(ranks: list[dict[str, Any]]) -> Finding:
    worst = max(ranks, key=lambda rank: _size(rank["clock_s"]))
    ahead_ms, error_ms = 1e3 * worst["clock_s"], 1e3 * worst["clock_error_s"]
    text = f"rank {worst['rank']}'s is {ahead_ms:+.1f} ms from rank 0's (within {error_ms:.1f})"
    if not abs(worst["clock_s"]) - worst["clock_error_s"] <= MAX_CLOCK_S:
        return Finding("clocks", WARNING, f"{text} on {worst['host']}: logs of hosts do not line up; run NTP")
    return Finding("clocks", OK, text)


# The ring that `ds-ring doctor` measures is started by the engine of the cluster YAML, as a run is.

_JSON = {"train_batch_size": 2, "sequence_parallel_size": 2, "ring_attention": {"pattern": {"causal": True}}}
SELF_TEST = Path(__file__).with_name("self_test.py")
MARK = "DS_RING_DOCTOR "  # before what rank 0 of it prints
_GRACE_SECONDS = 20.0
_SHOWN_LINES = 3


def own_machine(folder: Path) -> Path:
    """Return a cluster YAML for this machine alone: two ranks on its CPU."""
    (folder / "ds_config.json").write_text(json.dumps(_JSON))
    path = folder / "cluster.yaml"
    settings = {
        "engine": "torchrun", "device": "cpu", "hosts": "local", "slots": 2,
        "script": str(SELF_TEST), "deepspeed_config": "ds_config.json",
    }  # fmt: skip
    path.write_text(yaml.safe_dump(settings))
    return path


def ring_findings(job: Job, hosts: list[Finding], seconds: float) -> list[Finding]:
    """Return the findings about the ring; none of it is started where hosts are not as they must be."""
    wrong = [finding.what for finding in hosts if finding.state == WRONG]
    if wrong:
        return [Finding("ring", NOT_LOOKED_AT, f"mend first: {', '.join(wrong)}")]
    path = job.folder / "doctor.yaml"
    path.touch(mode=0o600, exist_ok=False)  # it has the values of variables
    path.write_text(yaml.safe_dump(_describe_self_test(job)))
    command = [*module_command("ds_ring_launcher.cli"), "launch", str(path)]
    if not job.cluster.is_local and not job.cluster.reaches_out:
        command += ["--node-rank", str(job.node_rank)]
    status, output, complaints = _run(command, dict(job.caller_environment), seconds)
    line = next((text_line for text_line in output if MARK in text_line), None)
    if status == 0 and line is not None:
        return judge_ring(json.loads(line.split(MARK, 1)[1]))
    if status == 0 and job.node_rank:
        return [Finding("ring", NOT_LOOKED_AT, "rank 0's host has the findings")]
    ended = (
        f"did not end within {seconds:g} s and was ended" if status is None else f"ended with status {status}"
    )
    # The lines that say why: errors of ds_ring first, or else the last ones.
    stripped = [text.strip() for text in complaints if text.strip()]
    named = [text for text in stripped if "Error: " in text or text.startswith("ds-ring: error")]
    last = list(dict.fromkeys(named))[:_SHOWN_LINES] or stripped[-_SHOWN_LINES:] or ["it said nothing"]
    return [Finding("ring", WRONG, f"the ring test failed, it {ended}: {' / '.join(last)}")]


def _describe_self_test(job: Job) -> dict[str, object]:
    """Return the YAML's keys with the self-test for a script."""
    cluster = job.cluster
    settings: dict[str, object] = {
        "engine": cluster.engine,
        "device": cluster.device,
        "environment": {"KINETO_LOG_LEVEL": "99", **cluster.environment},  # no lines of the profiler
        "engine_args": list(cluster.engine_args),
        "script": str(SELF_TEST),
        "deepspeed_config": str(cluster.deepspeed_config),
    }
    if cluster.is_local:
        return {**settings, "hosts": "local", "slots": cluster.hosts[0].slots}
    settings |= {"hosts": [host.model_dump() for host in cluster.hosts], "ssh": cluster.ssh}
    if cluster.run_folder is not None:  # as in the run itself, ranks then choose their interface
        settings["run_folder"] = str(cluster.run_folder / "doctor")
    for name in ("ssh_port", "master_address", "master_port"):
        if getattr(cluster, name) is not None:
            settings[name] = getattr(cluster, name)
    return settings


def _run(
    command: list[str], environment: dict[str, str], seconds: float
) -> tuple[int | None, list[str], list[str]]:
    """Return the exit status (None: the deadline passed), and the lines of stdout and stderr."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            output, complaints = process.communicate(timeout=seconds)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks, on all hosts
            status = None
            try:
                output, complaints = process.communicate(timeout=_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                output, complaints = process.communicate()
        except BaseException:
            process.terminate()
            raise
    return status, output.splitlines(), complaints.splitlines()

"""`ds-ring doctor`: what hosts and ranks say, judged; and the real command, here and on two hosts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_ring_launcher.cluster.cluster import Cluster, Host
from ds_ring_launcher.doctor import probe as doctor_probe
from ds_ring_launcher.doctor.findings import NOT_LOOKED_AT, OK, WARNING, WRONG, judge_hosts, judge_ring
from ds_ring_launcher.doctor.hosts import HostAnswers
from tests.dist.namespaces import two_hosts

ROOT = Path(__file__).resolve().parents[2]
JSON = {"train_batch_size": 2, "sequence_parallel_size": 4, "ring_attention": {"pattern": {"causal": True}}}


def cluster(**keys: Any) -> Cluster:
    hosts = (Host(name="node-0", slots=2), Host(name="node-1", slots=2))
    files = {
        "script": str(ROOT / "launcher/demo/train_lm.py"),
        "deepspeed_config": str(ROOT / "configs/quickstart.json"),
    }
    return Cluster.model_validate({"hosts": hosts, "device": "cpu", **files, **keys})


def answer(name: str, **keys: Any) -> dict[str, Any]:
    there = {"addresses": ["10.0.0.2"], "up": True, "mbit": 1000}
    found = {
        "host": name,
        "node": name,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "devices": {"cores": 8, "memory": 1 << 34, "gpus": []},
        "interfaces": {"lo": {"addresses": ["127.0.0.1"], "up": True, "mbit": 0}, "eth0": there},
        "chosen": {},
        "own_address": "10.0.0.2",
        "names": {"node-0": "10.0.0.1", "node-1": "10.0.0.2"},
        "cluster": {"engine": '"torchrun"'},
        "files": {"script": "abc"},
        "config": {"train_batch_size": "2"},
        "folders": {},
    }
    if name == "node-1":
        found["way"] = {"address": "10.0.0.2", "interface": "eth0", "why": ""}
    return {**found, **keys}


def states(found: HostAnswers, **keys: Any) -> dict[str, tuple[str, str]]:
    return {one.what: (one.state, one.says) for one in judge_hosts(cluster(**keys), found)}


def of_two(**keys: Any) -> HostAnswers:
    """Answers of two hosts; `keys` are what node-1 says differently."""
    return HostAnswers({"node-0": answer("node-0"), "node-1": answer("node-1", **keys)})


UP = {"addresses": ["10.0.0.2"], "up": True, "mbit": 1000}
DOWN = {"eth0": UP, "eth1": {**UP, "addresses": []}}


def test_healthy_hosts_have_nothing_wrong() -> None:
    found = states(of_two(chosen={"NCCL_SOCKET_IFNAME": "^docker"}))
    assert {state for state, _ in found.values()} == {OK, NOT_LOOKED_AT}, found


@pytest.mark.parametrize(
    ("what", "found", "says"),
    [
        ("hosts", HostAnswers({"node-0": answer("node-0")}, {"node-1": "gone"}), ["node-1: gone"]),
        ("port", HostAnswers({"node-0": answer("node-0", port_holder="nc")}), ["node-0 by nc"]),
        ("interfaces", of_two(chosen={"GLOO_SOCKET_IFNAME": "ib7"}), ["node-1", "no such interface", "eth0"]),
        ("interfaces", of_two(chosen={"GLOO_SOCKET_IFNAME": "lo"}), ["node-1", "reached by eth0 (10.0.0.2)"]),
        ("interfaces", of_two(chosen={"NCCL_SOCKET_IFNAME": "l"}), ["node-1", "reached by eth0 (10.0.0.2)"]),
        ("interfaces", of_two(chosen={"GLOO_SOCKET_IFNAME": "eth1"}, interfaces=DOWN),
            ["node-1: GLOO_SOCKET_IFNAME=eth1: that interface is down or has no address, it has eth0"]),
        ("interfaces", of_two(own_address="127.0.1.1"), ["127.0.1.1", "set run_folder, or GLOO_SOCKET"]),
        ("interfaces", of_two(names={"node-0": None}), ["node-1 does not know the name node-0"]),
        ("versions", of_two(versions={"torch": "2.11.0"}), ["torch 2.13.0 on node-0, 2.11.0 on node-1"]),
        ("script", of_two(files={"script": None}), ["node-1", "copy it there"]),
        ("script", of_two(files={"script": "def"}), ["differs: abc on node-0, def on node-1 (sha256)"]),
        ("configuration", of_two(config=None), ["the DeepSpeed JSON cannot be read on node-1"]),
        ("configuration", of_two(config={"train_batch_size": "4"}), ["2 on node-0, 4 on node-1"]),
        ("configuration", of_two(cluster={"engine": '"mpirun"'}), ["engine of the cluster YAML"]),
        ("folders", of_two(folders={"/x": "Read-only"}), ["node-1 cannot write to /x: Read-only"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_host(what: str, found: HostAnswers, says: list[str]) -> None:
    state, text = states(found)[what]
    assert state == WRONG
    assert all(word in text for word in says), text


def test_hosts_of_which_none_answers_are_missing_and_the_rest_is_not_looked_at() -> None:
    found = states(HostAnswers({}, {"node-0": "no such name", "node-1": "no such name"}))
    assert found.keys() == states(of_two()).keys()
    assert found["hosts"][0] == WRONG and "node-1: no such name" in found["hosts"][1]
    assert {state for what, (state, _) in found.items() if what != "hosts"} == {NOT_LOOKED_AT}


def test_too_few_gpus_and_a_folder_that_is_not_shared() -> None:
    assert states(of_two(), device="cuda")["devices"][0] == WRONG
    devices = {"cores": 8, "memory": 1 << 34, "gpus": ["H100"] * 2}
    enough = HostAnswers({name: answer(name, devices=devices) for name in ("node-0", "node-1")})
    assert states(enough, device="cuda")["devices"] == (OK, "node-0: 2 GPUs, node-1: 2 GPUs")
    folder = {"/shared": ""}
    found = HostAnswers(
        {name: answer(name, folders=folder) for name in ("node-0", "node-1")},
        seen={"node-0": {"/shared": [0]}, "node-1": {"/shared": [1]}},
    )
    assert "node-0 does not see in /shared what node-1 wrote" in states(found)["folders"][1]
    found.seen = {name: {"/shared": [0, 1]} for name in ("node-0", "node-1")}
    assert states(found)["folders"] == (OK, "/shared: written by all hosts, seen by all")


MOVED = {"sends": 8, "sent": 512, "received": 512, "largest": 64, "others": {}, "integers": 8}
NONE_PLANNED = {"planned_sent": 0, "planned_received": 0}


def moved(**keys: Any) -> dict[str, Any]:
    return {"traffic": {**MOVED, **keys}}


def rank(number: int, **keys: Any) -> dict[str, Any]:
    link = {"source": number, "target": (number + 1) % 4, "bytes_per_s": 1e9, "latency_s": 1e-5}
    found = {
        "rank": number, "ring_rank": number, "ring_size": 4, "host": f"node-{number // 2}",
        "place": f"p{number // 2}", "dtype": "float32", "error": 1e-7, "traffic": MOVED,
        "planned_sent": 512, "planned_received": 512, "shard": 64, "memory_bytes": 28.0,
        "alone_bytes": 100.0 * (number == 0), "link": link, "clock_s": 0.0, "clock_error_s": 1e-3,
    }  # fmt: skip
    return {**found, **keys}


SLOW = {"source": 1, "target": 2, "bytes_per_s": 1e7, "latency_s": 1e-3}


def ring_states(**keys: Any) -> dict[str, tuple[str, str]]:
    """Of four ranks, of which rank 1 says something else."""
    ranks = [rank(n, **(keys if n == 1 else {})) for n in range(4)]
    return {one.what: (one.state, one.says) for one in judge_ring(ranks)}


def test_a_healthy_ring_has_nothing_wrong() -> None:
    assert {state for state, _ in ring_states().values()} == {OK}
    alone = {one.what: (one.state, one.says) for one in judge_ring([rank(0, ring_size=1, link=None)])}
    assert alone["ring"] == (OK, "a ring of one sends nothing")
    assert alone["links"] == (NOT_LOOKED_AT, "a ring of one has none")


@pytest.mark.parametrize(
    ("what", "state", "keys", "says"),
    [
        ("exact", WRONG, {"error": 1e-3}, "rank 1"),
        ("exact", WRONG, {"error": float("nan")}, "rank 1"),
        ("ring", WRONG, moved(largest=256), "no ring: one message had 4.0 shards, on rank 1"),
        ("ring", WRONG, moved(others={"all_gather": 4}), "a pass called 4 all_gather, on rank 1"),
        ("ring", WRONG, moved(sent=513), "sent 513 numbers of K, V and gradients, its plan says 512"),
        ("ring", WRONG, moved(received=1), "received 1 numbers"),
        ("ring", WRONG, moved(integers=512), "512 integers"),
        ("ring", WRONG, moved(sends=0, sent=0, received=0, largest=0), "sent 0 numbers"),
        ("ring", WRONG, {**moved(sent=0, received=0), **NONE_PLANNED}, "moved nothing"),
        ("memory", WRONG, {"memory_bytes": 100.0}, "does not fall with the ring"),
        ("memory", WRONG, {"memory_bytes": float("nan")}, "does not fall with the ring"),
        ("memory", WRONG, {"memory_bytes": 0.0}, "memory was not measured"),
        ("links", WRONG, {"link": None}, "rank 1 of node-0 measured no link"),
        ("links", WRONG, {"link": {**SLOW, "bytes_per_s": float("nan")}}, "rank 1 of node-0 measured no"),
        ("links", WRONG, {"link": SLOW}, "rank 1 (node-0)"),
        ("links", WARNING, {"link": {**SLOW, "bytes_per_s": 1e8}}, "slow link rank 1 (node-0)"),
        ("clocks", WARNING, {"clock_s": 9.0}, "rank 1"),
        ("clocks", WARNING, {"clock_s": float("nan")}, "rank 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_the_ring_is_named(what: str, state: str, keys: dict[str, Any], says: str) -> None:
    found = ring_states(**keys)[what]
    assert found[0] == state
    assert says in found[1], found[1]


def test_a_link_inside_a_node_is_compared_with_its_own_kind() -> None:
    """Links between nodes are slower by nature; one of them that is a tenth of the others is not."""
    ranks = [rank(n) for n in range(4)]
    for n in (1, 3):
        ranks[n]["link"]["bytes_per_s"] = 2e8
    assert {one.what: one.state for one in judge_ring(ranks)}["links"] == OK


@pytest.mark.parametrize(("number", "advice"), [(0, "other work on node-0"), (1, "its cable and interface")])
def test_only_a_link_between_hosts_has_a_cable(number: int, advice: str) -> None:
    ranks = [rank(n) for n in range(4)]
    ranks[number]["link"]["bytes_per_s"] = 1e7
    assert {one.what: one.says for one in judge_ring(ranks)}["links"].endswith(f"Look at {advice}")


def doctor(path: Path, *more: str) -> tuple[int, dict[str, tuple[str, str]], str]:
    """The real command, on this machine."""
    command = [sys.executable, "-m", "ds_ring_launcher.cli", "doctor", str(path), "--json", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    found = json.loads(done.stdout)["findings"]
    return done.returncode, {one["what"]: (one["state"], one["says"]) for one in found}, done.stderr


def write(folder: Path, number: int = 0, **keys: Any) -> Path:
    """A cluster YAML (JSON is YAML) and its DeepSpeed JSON."""
    section = keys.pop("section", {})
    text = {**JSON, **keys.pop("top", {}), "ring_attention": {**JSON["ring_attention"], **section}}  # type: ignore[dict-item]
    (folder / f"ds{number}.json").write_text(json.dumps(text))
    told = {
        "engine": "torchrun",
        "device": "cpu",
        "script": str(ROOT / "launcher/demo/train_lm.py"),
        "deepspeed_config": f"ds{number}.json",
        **keys,
    }
    path = folder / f"cluster{number}.yaml"
    path.write_text(json.dumps(told))
    return path


@pytest.mark.slow
@pytest.mark.needs("mpirun")  # which starts without torch
@pytest.mark.night  # by day tests/dist/test_self_test.py finds it on ranks that have torch loaded already
def test_an_all_gather_in_the_place_of_a_ring_is_found_out(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        engine="mpirun",
        hosts="local",
        slots=2,
        section={"transport": "all_gather"},
        top={"sequence_parallel_size": 2},
    )
    status, found, errors = doctor(path)
    assert status == 1, errors
    assert found["ring"][0] == WRONG and "all_gather" in found["ring"][1], found
    assert found["memory"][0] == WRONG and "does not fall" in found["memory"][1], found
    assert {found[what][0] for what in ("exact", "hosts", "port", "clocks")} == {OK}, found


def test_a_port_that_is_taken_is_named_with_who_has_it(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        path = write(tmp_path, hosts="local", slots=4, master_port=server.getsockname()[1])
        status, found, errors = doctor(path)
    assert status == 1, errors
    assert found["port"][0] == WRONG and f"process {os.getpid()}" in found["port"][1]
    assert found["ring"] == (NOT_LOOKED_AT, "mend first: port")


TWO_HOSTS: dict[str, Any] = {
    "hosts": [{"name": f"node-{n}", "slots": 2} for n in (0, 1)],
    "ssh": False, "master_address": "10.231.0.1", "master_port": 29511,
}  # fmt: skip


def findings_in(log: Path) -> list[dict[str, str]]:
    """What the command printed; torch may have warned before it."""
    text = log.read_text()
    found: list[dict[str, str]] = json.loads(text[text.index("{") :])["findings"]
    return found


@pytest.mark.needs("namespaces")
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.night
def test_two_hosts_meet_and_differ(tmp_path: Path) -> None:
    """An interface that is not there and a JSON of another version, both on host 1."""
    changed = ({"environment": {"GLOO_SOCKET_IFNAME": "ib7"}}, {"section": {"layout": "striped"}})
    paths = [write(tmp_path, n, **TWO_HOSTS, **(changed[0] | changed[1] if n else {})) for n in (0, 1)]
    with two_hosts() as hosts:
        words = ("-m", "ds_ring_launcher.cli", "doctor", "--json", "--no-ring")
        calls = [
            hosts.start(n, *words, str(paths[n]), "--node-rank", str(n), log=tmp_path / f"{n}.log")
            for n in (0, 1)
        ]
        assert [call.wait(timeout=120) for call in calls] == [1, 1]
    for n in (0, 1):
        found = {one["what"]: one for one in findings_in(tmp_path / f"{n}.log")}
        assert found["hosts"]["state"] == OK, found
        assert "node-1: GLOO_SOCKET_IFNAME=ib7: there is no such interface" in found["interfaces"]["says"]
        assert "ring_attention.layout of the DeepSpeed JSON" in found["configuration"]["says"]


@pytest.mark.needs("namespaces")
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.night
def test_a_host_that_never_came_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, **TWO_HOSTS)
    with two_hosts() as hosts:
        words = ("-m", "ds_ring_launcher.cli", "doctor", str(path), "--json", "--host-seconds", "2")
        call = hosts.start(0, *words, "--node-rank", "0", log=tmp_path / "log")
        assert call.wait(timeout=60) == 1
    found = findings_in(tmp_path / "log")
    assert found[0]["state"] == WRONG and "node-1: did not come to 10.231.0.1" in found[0]["says"]


def test_the_probe_looks_at_this_machine() -> None:
    there = doctor_probe.interfaces()
    assert there["lo"]["up"]
    assert doctor_probe.way_to("127.0.0.1")["interface"] == "lo"
    assert doctor_probe.way_to("256.0.0.1")["address"] is None

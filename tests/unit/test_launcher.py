"""The launcher up to the command line: what a cluster YAML may say, what becomes of it. Starts nothing."""

from __future__ import annotations

import io
import json
import os
import shlex
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_ring.compat import deepspeed_launcher
from ds_ring.data.run_folder import FOLDER_VARIABLE
from ds_ring.errors import RingConfigError
from ds_ring_launcher import cli
from ds_ring_launcher.cluster import checks
from ds_ring_launcher.cluster.checks import secret_for
from ds_ring_launcher.cluster.cluster_file import read_cluster
from ds_ring_launcher.engines import torchrun
from ds_ring_launcher.engines.engine import ssh_command
from ds_ring_launcher.engines.engines import ENGINES
from ds_ring_launcher.run import agent, environment_file, job, process, start
from ds_ring_launcher.run.job import FOLDER, RANK_SCRIPT, Invocation, Job
from tests.clock import unqueued_seconds

LOCAL = "hosts: local\nslots: 2\nscript: train.py\ndeepspeed_config: ds.json\n"
SCRIPT = "script: train.py\ndeepspeed_config: ds.json\n"
HOSTS = "hosts: [{name: node-0, slots: 4}, {name: node-1, slots: 2}]\n"
RELAUNCH = "relaunch: {checkpoints: checkpoints}\n"
ON_EACH_HOST = HOSTS + "ssh: false\nmaster_port: 23456\n" + SCRIPT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script and a DeepSpeed JSON whose sequences are shared by two ranks."""
    (tmp_path / "train.py").write_text("print('trains')\n")
    section = {"sequence_parallel_size": 2, "ring_attention": {"ring_size": 2}}
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **section}))
    return tmp_path


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def invocation(
    folder: Path, text: str, node_rank: int = 0, caller: dict[str, str] | None = None
) -> Invocation:
    """What the YAML `text` becomes on the host `node_rank`, with port 20001 where it names none."""
    cluster = read_cluster(write(folder, text))
    port = cluster.master_port or 20001
    return cluster.starter.invocation(Job(cluster, node_rank, port, folder, caller or {}, ("--steps", "3")))


BAD_YAML = {
    "empty": ("", "expected a mapping, got an empty file"),
    "list": ("- a\n- b\n", "got list"),
    "syntax": ("engine: [deepspeed\n", "not YAML at line 2"),
    "tab": ("environment:\n\tA: 1\n", "not YAML at line 2, column 1"),
    "key twice": (LOCAL + "slots: 3\n", "'slots' twice"),
    "unknown key": (LOCAL + "enginge: torchrun\n", "did you mean 'engine'?"),
    "unknown engine": (LOCAL + "engine: deepsped\n", 'did you mean "deepspeed"?'),
    "unknown device": (LOCAL + "device: tpu\n", 'one of "auto", "cpu", "cuda", got "tpu"'),
    "no hosts": (SCRIPT, "hosts: expected 'local' or a list of hosts, got null"),
    "hosts empty": ("hosts: []\n" + SCRIPT, "hosts: expected 'local' or a list of hosts, got []"),
    "hosts a word": ("hosts: node-0\n" + SCRIPT, 'got "node-0"'),
    "no slots": ("hosts: local\n" + SCRIPT, "slots: expected a whole number of at least 1, got null"),
    "slots 0": (LOCAL.replace("2", "0"), "slots: expected a whole number of at least 1, got 0"),
    "slots quoted": (LOCAL.replace("2", "'2'"), 'at least 1, got "2"'),
    "slots true": (LOCAL.replace("2", "true"), "at least 1, got true"),
    "host slots 0": (HOSTS.replace("2", "0") + SCRIPT,
        "hosts[1].slots: expected a whole number of at least 1"),
    "host key": (HOSTS.replace("slots: 2", "slot: 2") + SCRIPT,
        "the unknown key 'slot'; did you mean 'slots'?"),
    "host a word": ("hosts: [node-0]\n" + SCRIPT, 'hosts[0]: expected a name and slots, got "node-0"'),
    "host name": (HOSTS.replace("node-1", "'node 1'") + SCRIPT, "hosts[1].name: expected a host name"),
    "host twice": (HOSTS.replace("node-1", "node-0") + SCRIPT, "expected every host once, got node-0 more"),
    "slots and list": (HOSTS + "slots: 2\n" + SCRIPT, "slots: expected none beside a list of hosts, got 2"),
    "no script": ("hosts: local\nslots: 2\ndeepspeed_config: ds.json\n",
        "script: expected the path of a file"),
    "no json": ("hosts: local\nslots: 2\nscript: train.py\n",
        "deepspeed_config: expected the path of a file"),
    "a key twice": (LOCAL + "slots: 3\n",
        "line 5, column 1: expected every key once, got 'slots' twice; keep one of them"),
    "environment list": (LOCAL + "environment: [A=1]\n",
        "environment: expected a mapping of names to values"),
    "environment name": (LOCAL + "environment: {A-B: 1}\n",
        'expected names of environment variables, got "A-B"'),
    "environment yes": (LOCAL + "environment: {A: yes}\n",
        "expected text or a number, got true; put it in quotes"),
    "environment line": (LOCAL + 'environment: {A: "1\\n2"}\n', "expected text of one line"),
    "environment rank": (LOCAL + "environment: {MASTER_PORT: 29500}\n", "use master_address, master_port"),
    "arguments text": (LOCAL + "script_args: --steps 3\n", "script_args: expected a list"),
    "port small": (LOCAL + "master_port: 80\n", "master_port: expected a port from 1024 to 65535, got 80"),
    "port large": (LOCAL + "master_port: 70000\n", "master_port: expected a port from 1024 to 65535"),
    "no port": (HOSTS + "ssh: false\n" + SCRIPT, "master_port: expected a port, as ssh is false, got none"),
    "loopback master": (
        "hosts: [{name: localhost, slots: 1}, {name: node-1, slots: 1}]\nssh: false\nmaster_port: 23456\n"
        + SCRIPT,
        "master_address: expected an address that all hosts reach, got localhost",
    ),
    "environment secret": (LOCAL + "environment: {DS_RING_SECRET: x}\n",
        "expected variables that the launcher leaves alone, got DS_RING_SECRET"),
    "loopback master by ssh": (HOSTS.replace("node-0", "localhost") + SCRIPT,
        "master_address: expected an address that all hosts reach, got localhost"),
    "deepspeed's own launcher": (HOSTS + SCRIPT + "engine_args: [--launcher=slurm]\n",
        "engine_args: expected no --launcher, got one"),
    "NCCL's variables in the log": (
        LOCAL + "environment: {NCCL_DEBUG: x}\nengine_args: [--log_level, info]\n",
        "engine_args: expected a --log_level of warning or above beside environment.NCCL_DEBUG, got info",
    ),
    "ssh port": (LOCAL + "ssh_port: 2222\n",
        "ssh_port: expected none, as nothing is started by ssh, got 2222"),
    **{f"a second hostfile by {argument}": (LOCAL + f"engine_args: ['{argument}']\n",
        "engine_args: expected no hostfile") for argument in ("-H", "--hostfile=other", "--hostfile")},
    "a hostfile beside hosts": (LOCAL + "hostfile: hosts.txt\n", "hostfile: expected none beside hosts"),
    "a hostfile that is a number": ("hostfile: 3\n" + SCRIPT, "hostfile: expected the path of a file, got 3"),
    "env a number": (f"engine: torchrun\n{LOCAL}env: 3\n",
        "env: expected a list of names of the caller's environment variables, got 3"),
    "env a name that is none": (f"engine: torchrun\n{LOCAL}env: [A-B]\n", 'got "A-B"'),
    "an option of torchrun": (f"engine: torchrun\n{LOCAL}environment: {{PET_NNODES: 2}}\n",
        "that torchrun does not read as options, got PET_NNODES"),
    "a list for a key": (LOCAL + "? [a]\n: 1\n", "expected a word for a key, got a list or a mapping"),
    "an integer of 5000 digits": (f"slots: {'9' * 5000}\n", "expected values that can be read, got"),
    "too deep": ("[" * 17, "line 1, column 17: expected at most 16 levels in each other, got more"),
    "an alias": (f"script_args: &x [a]\nengine_args: *x\n{LOCAL}",
        "line 2, column 14: expected plain values, got the alias *x; write the value itself"),
    "a tag": (LOCAL + "engine_args: !!set {a}\n", "got the tag tag:yaml.org,2002:set; remove it"),
    "a character that is none": (LOCAL + "engine: \x01\n", "expected YAML, got what is none: "),
    "a relaunch without a run_folder": (LOCAL + RELAUNCH,
        "relaunch: expected run_folder beside it, got none"),
    "a relaunch on each host": (f"{ON_EACH_HOST}{RELAUNCH}run_folder: runs\n",
        "relaunch: expected one call that starts all hosts, got ssh: false"),
    **{f"two relaunches by {argument}": (
        f"engine: torchrun\n{LOCAL}{RELAUNCH}run_folder: runs\nengine_args: [{argument}]\n",
        "engine_args: expected no restarts of the engine's own, got --max-restarts",
    ) for argument in ("--max-restarts=3", "--max_restarts")},
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD_YAML.values(), ids=BAD_YAML)
def test_bad_yaml_is_refused(folder: Path, text: str, message: str) -> None:
    with pytest.raises(RingConfigError) as caught:
        read_cluster(write(folder, text))
    assert message in str(caught.value)
    assert str(folder / "cluster.yaml") in str(caught.value)


def test_all_problems_come_at_once(folder: Path) -> None:
    with pytest.raises(RingConfigError, match="4 problems") as caught:
        read_cluster(
            write(
                folder, "engine: mpi\nhosts: [{name: a, slots: 0}]\nscript: 3\ndeepspeed_config: x\nprot: 1\n"
            )
        )
    for key in ("engine:", "hosts[0].slots:", "script:", "prot:"):
        assert key in str(caught.value)


def test_missing_yaml_names_the_near_one(folder: Path) -> None:
    write(folder, LOCAL)
    with pytest.raises(RingConfigError, match=r"no 'clutser\.yaml' in .*; did you mean 'cluster\.yaml'\?"):
        read_cluster(folder / "clutser.yaml")
    with pytest.raises(RingConfigError, match="does not exist"):
        read_cluster(folder / "nowhere" / "cluster.yaml")
    with pytest.raises(RingConfigError, match="got a directory"):
        read_cluster(folder)
    (folder / "train.py").unlink()
    (folder / "train.py").symlink_to("train.py")
    with pytest.raises(RingConfigError, match=r"script: expected .*train\.py"):
        checks.require_inputs(read_cluster(folder / "cluster.yaml"))


def test_a_script_is_named_as_an_installed_module(folder: Path) -> None:
    text = LOCAL.replace("train.py", "ds_ring_launcher.demo.train_lm")
    (folder / "ds_ring_launcher.demo").mkdir()  # no file of that name
    assert read_cluster(write(folder, text)).script.as_posix().endswith("/demo/train_lm.py")
    for missing in ("ds_ring_launcher.demo.train_ml", "nowhere.train", "ds_ring_launcher"):
        cluster = read_cluster(write(folder, LOCAL.replace("train.py", missing)))
        with pytest.raises(RingConfigError, match=f"expected a Python file, but there is no '{missing}'"):
            checks.require_inputs(cluster)


def test_paths_are_relative_to_the_yaml(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(folder, LOCAL)
    monkeypatch.chdir("/")
    cluster = read_cluster(path)
    assert cluster.script == folder / "train.py"
    assert cluster.deepspeed_config == folder / "ds.json"


BAD_HOSTFILES = {
    "missing": (None, "expected a hostfile, but there is no 'hosts.txt'"),
    "empty": ("", "expected a line 'node-0 slots=8' for each host, got no host"),
    "comments only": ("# node-0 slots=8\n\n", "got no host"),
    "doubled": (
        "node-0 slots=2\nnode-1 slots=2\nnode-0 slots=4\n",
        "line 3: expected every host once, got node-0 on line 1",
    ),
    "slots=0": ("node-0 slots=0\n", "line 1: expected at least one slot, got node-0 slots=0"),
    "no slots": ("node-0\n", "line 1: expected 'node-0 slots=8', got 'node-0'"),
    "slots a word": ("node-0 slots=two\n", "line 1: expected 'node-0 slots=8'"),
    "slots negative": ("node-0 slots=-1\n", "line 1: expected 'node-0 slots=8'"),
    "a name that is none": ("node-0;rm slots=2\n", "hosts[0].name: expected a host name or address"),
    "a folder": ("/", "expected a hostfile, got the directory"),
    "another kind of file": ("a\n" * 50, "50 problems\n  - hostfile: "),
    "too large": ("#" * 2**17 + "\n", "hosts.txt: expected at most 131,072 bytes, got more"),
}


@pytest.mark.parametrize(("text", "message"), BAD_HOSTFILES.values(), ids=BAD_HOSTFILES)
def test_bad_hostfile_ends_with_status_2_within_a_second(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    if text == "/":
        (folder / "hosts.txt").mkdir()
    elif text is not None:
        (folder / "hosts.txt").write_text(text)
    path = write(folder, "hostfile: hosts.txt\nssh: false\nmaster_port: 23456\n" + SCRIPT)
    started = unqueued_seconds()
    assert cli.main(["launch", str(path), "--node-rank", "0"]) == 2
    assert unqueued_seconds() - started < 1.0
    assert message in capsys.readouterr().err


def test_a_hostfile_is_the_hosts(folder: Path) -> None:
    (folder / "hosts.txt").write_text("# ours\nnode-0 slots=4  # the fast one\n\nnode-1   slots = 2\n")
    cluster = read_cluster(write(folder, "hostfile: hosts.txt\n" + SCRIPT))
    assert cluster == read_cluster(write(folder, HOSTS + SCRIPT))


BAD_LAUNCHES = {
    "script missing": (LOCAL.replace("train.py", "trian.py"), [], "did you mean 'train.py'?"),
    "json missing": (LOCAL.replace("ds.json", "dds.json"), [], "dds.json"),
    "does not divide": (LOCAL.replace("2", "3"), [], "2 does not divide world size 3"),
    "node rank local": (LOCAL, ["--node-rank", "0"],
        "--node-rank: expected none, got 0; the YAML starts this machine"),
    "node rank by ssh": (HOSTS + SCRIPT, ["--node-rank", "1"], "--node-rank: expected none, got 1"),
    "node rank none": (ON_EACH_HOST, [],
        "--node-rank: expected 0 to 1, got none; without ssh, use 0 on node-0"),
    "node rank 2": (ON_EACH_HOST, ["--node-rank", "2"], "--node-rank: expected 0 to 1, got 2"),
    "node rank -1": (ON_EACH_HOST, ["--node-rank=-1"], "--node-rank: expected 0 to 1, got -1"),
    "mpirun each": ("engine: mpirun\n" + ON_EACH_HOST, ["--node-rank", "0"],
        "expected ssh: true with mpirun"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "options", "message"), BAD_LAUNCHES.values(), ids=BAD_LAUNCHES)
def test_bad_launch_ends_with_status_2(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, options: list[str], message: str
) -> None:
    assert cli.main(["launch", str(write(folder, text)), "--dry-run", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("ds-ring: error: ")
    assert message in printed.err


def test_a_deepspeed_json_is_no_cluster_yaml() -> None:
    with pytest.raises(
        RingConfigError, match=r"quickstart.json: expected a cluster YAML, got a DeepSpeed JSON"
    ):
        read_cluster(Path(__file__).parents[2] / "configs/quickstart.json")


def test_json_errors_pass_through(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ds.json").write_text('{"ring_attention": {"ring_sise": 2}}')
    assert cli.main(["launch", str(write(folder, LOCAL))]) == 2
    assert "did you mean 'ring_size'?" in capsys.readouterr().err


def test_port_in_use_is_refused_where_the_master_is(folder: Path, busy_port: int) -> None:
    local = read_cluster(write(folder, LOCAL + f"master_port: {busy_port}\n"))
    with pytest.raises(RingConfigError, match=f"master_port: expected {busy_port} to be free"):
        checks.resolve_port(local, 0)
    each = read_cluster(write(folder, ON_EACH_HOST.replace("23456", str(busy_port))))
    with pytest.raises(RingConfigError, match="port in use"):
        checks.resolve_port(each, 0)
    assert checks.resolve_port(each, 1) == busy_port  # the master is another host: not ours to look at


def test_chosen_ports_are_free_and_differ() -> None:
    chosen = {checks.choose_free_port() for _ in range(20)}
    assert len(chosen) > 10
    assert all(checks.is_free(port) and 20000 <= port < 29500 for port in chosen)


def test_a_machine_without_a_free_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_free", lambda port: False)
    with pytest.raises(RingConfigError, match="expected a free port in 20000-29500, got none"):
        checks.choose_free_port()


def test_missing_program_is_named() -> None:
    with pytest.raises(RingConfigError, match="expected the program pdsh on PATH, got none; install it"):
        checks.require_program("pdsh", "/nowhere", "install it")


def test_a_new_engine_is_a_class_and_a_row(folder: Path) -> None:
    """Nothing else in the launcher names engines: a row of the table is a word of the YAML."""
    path = write(folder, "engine: flux\nssh: false\n" + HOSTS + SCRIPT)
    program = f"""
from ds_ring_launcher.engines.engine import Engine
from ds_ring_launcher.engines.engines import ENGINES
from ds_ring_launcher.run.job import Invocation
class Flux(Engine):
    starts_all_hosts = has_daemons = True
    def invocation(self, job):
        return Invocation(["flux", "run", f"-n{{job.cluster.world_size}}", *job.script_command], {{}})
ENGINES["flux"] = Flux()
from ds_ring_launcher.cli import main
raise SystemExit(main(["launch", {str(path)!r}, "--dry-run"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "exec flux run -n6 " in done.stdout, done.stderr


def test_local_deepspeed(folder: Path) -> None:
    made = invocation(folder, LOCAL + "device: cpu\nenvironment: {A: 1}\nscript_args: [--lr, 0.1]\n")
    assert made.files == {folder / "hostfile": "localhost slots=2\n"}
    assert made.argv == [
        *(sys.executable, "-P", "-u", "-m", "deepspeed.launcher.runner", f"--hostfile={folder / 'hostfile'}"),
        *("--master_port=20001", "--no_ssh", "--node_rank=0", "--master_addr=127.0.0.1"),
        "--log_level=critical",  # who failed is said by ds-ring
        *(str(RANK_SCRIPT), "--first=0", "--only"),
        *(str(folder / "train.py"), "--deepspeed", "--deepspeed_config", str(folder / "ds.json")),
        *("--lr", "0.1", "--steps", "3"),
    ]
    own_environment = {name: value for name, value in made.environment.items() if name != "PATH"}
    assert own_environment == {
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "A": "1", "PYTHONSAFEPATH": "ds-ring"
    }  # fmt: skip
    assert made.environment["PATH"].startswith(str(Path(sys.executable).parent))


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    """Let DeepSpeed's launcher be looked at again, after the test, too."""
    yield
    deepspeed_launcher.takes_log_level.cache_clear()


@pytest.mark.usefixtures("fresh_probe")
def test_a_deepspeed_that_has_no_log_level_is_not_given_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.16.9 refuses the option, and writes NCCL's variables into the log: these are refused then."""
    for text, takes in (("parser.add_argument('--quiet')", False), ("'--log_level'", True)):
        runner = folder / f"{takes}/launcher/runner.py"
        runner.parent.mkdir(parents=True)
        runner.write_text(text)
        spec = ModuleSpec("deepspeed", None, is_package=True)
        spec.submodule_search_locations = [str(folder / str(takes))]
        monkeypatch.setattr(deepspeed_launcher, "find_spec", lambda _, spec=spec: spec)
        deepspeed_launcher.takes_log_level.cache_clear()
        assert deepspeed_launcher.takes_log_level() is takes
        argv = invocation(folder, LOCAL).argv
        assert any("--log_level" in argument for argument in argv) is takes
        if not takes:
            with pytest.raises(RingConfigError, match="got a DeepSpeed that has no such option"):
                read_cluster(write(folder, LOCAL + "environment: {NCCL_DEBUG: x}\n"))


def test_device_sets_only_what_it_says(folder: Path) -> None:
    assert set(invocation(folder, LOCAL).environment) == {"PATH", "PYTHONSAFEPATH"}
    assert invocation(folder, LOCAL + "device: cuda\n").environment["DS_ACCELERATOR"] == "cuda"
    own = LOCAL + "device: cpu\nenvironment: {OMP_NUM_THREADS: 4}\n"
    assert invocation(folder, own).environment["OMP_NUM_THREADS"] == "4"


def test_deepspeed_on_each_host(folder: Path) -> None:
    made = invocation(folder, ON_EACH_HOST + "engine_args: [--quiet]\n", node_rank=1)
    assert made.files == {folder / "hostfile": "node-0 slots=4\nnode-1 slots=2\n"}
    options = made.argv[5 : made.argv.index(str(RANK_SCRIPT))]
    assert options[1:] == [
        "--master_port=23456", "--no_ssh", "--node_rank=1", "--master_addr=node-0", "--log_level=warning",
        "--quiet",
    ]  # fmt: skip


@pytest.mark.parametrize("engine", ["deepspeed", "torchrun"])
def test_other_hosts_are_reached_by_an_agent_each(folder: Path, engine: str) -> None:
    text = f"engine: {engine}\nenvironment: {{A: it's 2 words}}\nssh_port: 2222\nmaster_address: 10.0.0.1\n"
    cluster = read_cluster(write(folder, text + HOSTS + SCRIPT))
    secret = secret_for(cluster)
    assert secret is not None and len(secret) == 64
    caller = {"PATH": "/mine", "NCCL_DEBUG": "WARN", "OTHER": "1"}
    made = start.on_each_host(Job(cluster, 0, 20001, folder, caller, (), secret))
    assert list(made) == ["node-0", "node-1"]
    for rank, one in enumerate(made.values()):
        own = {name: one.environment[name] for name in ("NCCL_DEBUG", "A", "DS_RING_SECRET")}
        assert own == {"NCCL_DEBUG": "WARN", "A": "it's 2 words", "DS_RING_SECRET": secret}
        assert not {"OTHER", "PATH"} & set(one.environment)
        assert f"--node{'_' if engine == 'deepspeed' else '-'}rank={rank}" in one.argv
        assert not any("2 words" in argument or secret in argument for argument in one.argv)
        assert all(str(path).startswith(str(FOLDER)) for path in one.files)
    command = ssh_command("node-1", cluster.ssh_port)
    assert command[-2] == "node-1" and command[2:4] == ["-p", "2222"]
    assert command[-1].endswith("-m ds_ring_launcher.run.agent")


def test_a_secret_is_new_for_each_launch_and_stands_nowhere(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rank of one launch gets DS_RING_SECRET; hosts that are started each by hand have to agree."""
    local = read_cluster(write(folder, LOCAL))
    assert len({secret_for(local) for _ in range(3)}) == 3
    assert secret_for(read_cluster(write(folder, ON_EACH_HOST))) is None
    for engine in ENGINES:
        path = write(folder, f"engine: {engine}\n{LOCAL}environment: {{TOKEN: hf_12345}}\n")
        job = Job(read_cluster(path), 0, 20001, folder, {}, (), "ab" * 32)
        made = job.cluster.starter.invocation(job)
        assert made.environment["DS_RING_SECRET"] == "ab" * 32
        for text in (shlex.join(made.argv), made.as_shell(), *made.files.values()):
            assert "hf_12345" not in text and "ab" * 32 not in text
        assert "DS_RING_SECRET" in made.as_shell() and "TOKEN" in made.as_shell()
        assert cli.main(["launch", str(path), "--dry-run"]) == 0
        assert "hf_12345" not in capsys.readouterr().out


def test_visible_devices_are_kept(folder: Path) -> None:
    made = invocation(folder, LOCAL, caller={"CUDA_VISIBLE_DEVICES": "2,5,6"})
    assert "--include=localhost:2,5" in made.argv
    assert made.files[folder / "hostfile"] == "localhost slots=6\n"
    first = invocation(folder, LOCAL, caller={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    on_cpu = invocation(folder, LOCAL + "device: cpu\n", caller={"CUDA_VISIBLE_DEVICES": "2,5"})
    for plain in (first, on_cpu):
        assert plain.files[folder / "hostfile"] == "localhost slots=2\n"
        assert not any("--include" in argument for argument in plain.argv)
    each = invocation(folder, ON_EACH_HOST, 1, {"CUDA_VISIBLE_DEVICES": "6,7"})
    assert "--include=node-0@node-1:6,7" in each.argv


@pytest.mark.parametrize("devices", ["2", "GPU-1,GPU-2", "2,"])
def test_visible_devices_that_do_not_fit_are_refused(folder: Path, devices: str) -> None:
    with pytest.raises(RingConfigError, match="CUDA_VISIBLE_DEVICES: expected at least 2 device numbers"):
        invocation(folder, LOCAL, caller={"CUDA_VISIBLE_DEVICES": devices})


def test_torchrun(folder: Path) -> None:
    made = invocation(folder, "engine: torchrun\n" + ON_EACH_HOST, node_rank=1)
    assert made.argv[1:10] == [
        *("-P", "-u", "-m", "ds_ring_launcher.engines.torchrun", "--nnodes=2", "--nproc-per-node=2"),
        *("--node-rank=1", "--master-addr=node-0", "--master-port=23456"),
    ]


def test_a_signal_that_ended_a_rank_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    torchrun._report({0: -9, 1: -15, 2: 1})
    assert capsys.readouterr().err == "ds-ring: rank 0 was ended by SIGKILL\n"
    assert list(folder.glob("rank-*")) == []  # 2 ended with the others


def test_engines_are_brief_where_ds_ring_names_who_failed(folder: Path) -> None:
    cluster = read_cluster(write(folder, "engine: torchrun\n" + LOCAL))
    for engine, brief in (("torchrun", "--brief"), ("deepspeed", "--log_level=critical")):
        one = cluster.model_copy(update={"engine": engine})
        job = Job(one, 0, 20001, folder, {})
        assert brief in job.cluster.starter.invocation(job).argv
        job = replace(job, verbose=True)
        assert brief not in job.cluster.starter.invocation(job).argv
    far = Job(read_cluster(write(folder, "engine: torchrun\n" + ON_EACH_HOST)), 0, 20001, folder, {})
    assert not far.names_culprit and replace(far, attempt_folder=folder).names_culprit


def test_mpirun(folder: Path) -> None:
    made = invocation(folder, "engine: mpirun\nenvironment: {A: a b}\n" + HOSTS + SCRIPT)
    command = shlex.join(made.argv)
    assert "mpirun -n 6 --host node-0:4,node-1:2" in command
    assert "-x MASTER_ADDR -x MASTER_PORT -x DS_RING_ENVIRONMENT_FILE" in command and "-x A " not in command
    assert made.by_file == {"A": "a b"}
    by_port = invocation(folder, "engine: mpirun\nssh_port: 2222\n" + HOSTS + SCRIPT)
    assert "--prtemca plm_ssh_args '-p 2222'" in shlex.join(by_port.argv)
    assert (made.environment["MASTER_ADDR"], made.environment["MASTER_PORT"]) == ("node-0", "20001")


def test_dry_run_prints_the_script_of_each_host(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", str(write(folder, HOSTS + SCRIPT)), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for rank, name in enumerate(("node-0", "node-1")):
        script = printed.partition(f"# on {name}, reached by ssh; beside this, one new DS_RING_SECRET")[2]
        assert f"--node_rank={rank} " in script.partition("# on ")[0]


def test_dry_run_prints_a_script(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(folder, LOCAL + "device: cpu\nenvironment: {A: a b}\n")
    assert cli.main(["launch", str(path), "--dry-run", "--", "--text", "it's"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "localhost slots=2" in lines
    assert {"export DS_ACCELERATOR=cpu", "export OMP_NUM_THREADS=1"} <= set(lines)
    assert any(line.endswith("export A") for line in lines) and "a b" not in "".join(lines)
    command = shlex.split(lines[-1])
    assert command[:2] == ["exec", sys.executable]
    assert command[-2:] == ["--text", "it's"]


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("", process.ORPHAN_GRACE_SECONDS),
        (f"\n{agent.END_AFTER_FAULT}\n", process.FAULT_GRACE_SECONDS),
        (f"{agent.END}\n", 60.0),
    ],
)
def test_an_agents_ranks_have_the_grace_of_what_ends_them(
    said: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No launcher any more, a fault on another host, or a signal: then as long as the YAML says."""
    monkeypatch.setattr(agent, "_end", lambda why: None)
    grace = process.Grace(60.0)
    agent._listen(io.StringIO(said), grace)
    assert grace.seconds == seconds


def test_local_ranks_of_hosts_of_different_sizes_begin_at_0(folder: Path) -> None:
    """DeepSpeed's launcher says 1 and 0 to ranks 1 and 2, on the second of two hosts of 1 and 2 slots."""
    text = f"hosts: [{{name: node-0, slots: 1}}, {{name: node-1, slots: 2}}]\n{SCRIPT}"
    cluster = read_cluster(write(folder, text))
    made = start.on_each_host(Job(cluster, 0, 20001, folder, {}))["node-1"]
    (folder / "train.py").write_text("import os, sys; print(os.environ['LOCAL_RANK'], sys.argv[1])\n")
    command = made.argv[made.argv.index(str(RANK_SCRIPT)) :]
    told = []
    for rank, given in ((1, 1), (2, 0)):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(given), "PYTHONSAFEPATH": "ds-ring"}
        words = [sys.executable, command[0], f"--local_rank={given}", *command[1:]]
        told.append(subprocess.run(words, env=environment, capture_output=True, text=True).stdout.split())
    assert told == [["0", "--local_rank=0"], ["1", "--local_rank=1"]]


def test_the_callers_settings_of_libraries_reach_other_hosts(folder: Path) -> None:
    caller = {
        "WANDB_API_KEY": "a", "HF_TOKEN": "b", "GLOO_SOCKET_IFNAME": "eth0", "MY_TOKEN": "c", "MY_OTHER": "d",
        "CUDA_VISIBLE_DEVICES": "1", "HOME": "/h", "TORCHELASTIC_USE_AGENT_STORE": "True", "PET_NNODES": "9",
    }  # fmt: skip
    for engine in ("deepspeed", "torchrun", "mpirun"):
        text = f"engine: {engine}\nenv: [MY_T*, NOWHERE]\n{HOSTS}{SCRIPT}"
        cluster = read_cluster(write(folder, text))
        job = Job(cluster, 0, 20001, folder, caller, (), "ab" * 32)
        if engine == "mpirun":
            made = cluster.starter.invocation(job)
            found, command = made.by_file, shlex.join(made.argv)
            assert not any(name in command for name in ("WANDB", "SECRET", "MY_TOKEN"))
            assert "WANDB_API_KEY" in made.as_shell() and '"a"' not in made.as_shell()
        else:
            found = start.on_each_host(job)["node-1"].environment
        expected = list(caller)[:4]
        assert {name for name in caller if name in found} == set(expected)
        assert [found[name] for name in expected] == ["a", "b", "eth0", "c"]
        assert found["DS_RING_SECRET"] == "ab" * 32


def test_an_engine_gets_no_options_from_the_environment(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caller = {
        "PET_MAX_RESTARTS": "3", "RANK": "5", "TORCHELASTIC_USE_AGENT_STORE": "True", "DLTS_JOB_ID": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_prte_default_hostfile": "/x",
        "SLURM_EXPORT_ENV": "NONE", "PYTHON_EXEC": "/bin/false", "OMPI_MCA_btl": "tcp", "SLURM_JOB_ID": "7",
    }  # fmt: skip
    left = {
        "deepspeed": {*list(caller)[4:]},
        "torchrun": {*list(caller)[4:7], *list(caller)[8:]},
        "mpirun": {*list(caller)[6:]},
        "slurm": {*list(caller)[4:6], *list(caller)[7:]},
    }
    for engine, names in left.items():
        assert set(process.without_options(caller, ENGINES[engine].unset)) == names
        assert "left out of the engine's environment: " in capsys.readouterr().err
    shell = invocation(folder, LOCAL).as_shell().splitlines()[0]
    done = subprocess.run(
        ["sh", "-c", f"{shell}\nenv"], env={**os.environ, **caller}, capture_output=True, text=True
    )
    assert "PET_MAX" not in done.stdout and "OMPI_MCA_btl=tcp" in done.stdout and not done.stderr


def test_a_host_that_is_named_eof_ends_no_here_document(tmp_path: Path) -> None:
    text = "EOF\nnode-1\n"
    script = Invocation(["true"], {}, {tmp_path / "it's tasks": text}).as_shell()
    subprocess.run(["sh", "-c", script], check=True)
    assert (tmp_path / "it's tasks").read_text() == text


def test_the_environment_of_a_host_stands_in_a_file_of_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "environment"
    request = json.dumps({"path": str(path), "values": {"TOKEN": "x"}})
    seen = []

    class Lines(io.StringIO):
        def read(self, *_: object) -> str:  # the end of the run is near
            seen.append((stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)))
            seen.append(environment_file.read_environment(str(path)))
            if len(seen) == 2:
                environment_file.main(Lines(request + "\n"))  # another name of the same host
            return ""

    environment_file.main(Lines(request + "\n"))
    assert seen == [(0o600, 0o700), {"TOKEN": "x"}] * 2 and not path.parent.exists()
    assert capsys.readouterr().out.count("written") == 2
    path.parent.mkdir(mode=0o755)
    with pytest.raises(SystemExit, match="expected a folder of this user alone"):
        environment_file.main(Lines(request + "\n"))
    with pytest.raises(SystemExit, match="expected a folder of this user alone"):
        environment_file.read_environment(str(path))
    path.parent.chmod(0o700)
    with pytest.raises(SystemExit, match="expected the environment that ds-ring has written"):
        environment_file.read_environment(str(path))
    with pytest.raises(SystemExit, match="expected a request from ds-ring"):
        environment_file.main(io.StringIO("hello\n"))


def test_a_path_that_the_locale_has_no_letters_for_is_named(folder: Path) -> None:
    path = folder / "cluster.yaml"
    path.write_text(LOCAL.replace("train.py", "é.py"), encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "ds_ring_launcher.cli", "launch", str(path), "--dry-run"]
    done = subprocess.run(command, env={**os.environ, **ascii_only}, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and "this locale (ascii) has no letters for; export LC_ALL=C.UTF-8" in done.stderr
    )


def test_an_address_of_ip_version_6_is_one(folder: Path) -> None:
    cluster = read_cluster(write(folder, LOCAL + 'master_address: "::1"\n'))
    assert cluster.master_address == "::1"
    local = read_cluster(write(folder, 'hosts: [{name: "::1", slots: 2}]\n' + SCRIPT))
    assert local.is_local


def test_a_full_tmp_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.tempfile, "tempdir", "/proc/none")
    with pytest.raises(RingConfigError, match="expected a temporary folder"), process.private_folder():
        pass


def test_python_3_10_takes_no_module_of_the_working_folder_either(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('the json of the working folder')")
    monkeypatch.setattr(job, "sys", SimpleNamespace(executable=sys.executable, flags=SimpleNamespace()))
    command = [*job.module_command("json.tool"), "--help"]
    assert "-P" not in command
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--sort-keys" in done.stdout, done.stderr

"""Command lines that a user, or somebody who means harm, may type: wrong options, files of every wrong kind.

Owns the generator: deterministic, and made from the commands' own parsers, so that a new option of a new
command is probed by itself. What must hold of each is tests/integration/test_cli_probes.py's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ds_ring_launcher import cli

ROOT = Path(__file__).resolve().parents[1]
CPU_YAML = (ROOT / "configs/hardware/cpu.yaml").read_text()
CLUSTER = "hosts: local\nslots: 2\nscript: train.py\ndeepspeed_config: ds.json\n"
BY_HOST = "hosts: [{name: node-0, slots: 2}]\nssh: false\nmaster_port: 23456\n"
FROM_HOSTFILE = (
    "hostfile: hosts.txt\nssh: false\nmaster_port: 23456\nscript: train.py\ndeepspeed_config: ds.json\n"
)
SECTION = {"sequence_parallel_size": 2, "ring_attention": {"ring_size": 2}}
MODEL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 128,
}  # fmt: skip


class Probe(NamedTuple):
    """A command line, and the exit statuses that are right: 2 for what is refused, 0 where it is fine."""

    name: str
    argv: list[str]
    statuses: tuple[int, ...] = (2,)


def base_of(command: str, folder: Path) -> list[str]:
    """A command line that the command accepts, and that would take a moment only; files are in `folder`."""
    sizes = ["--tokens", "64", "--heads", "2", "--head-dim", "8"]
    return {
        "configs": [str(folder / "new")],
        "launch": ["--dry-run", str(folder / "cluster.yaml")],
        "doctor": [str(folder / "cluster.yaml"), "--no-ring"],
        "plan": ["--tokens", "512", "--devices", "2", "--hardware", "cpu", "--dtype", "float32",
                 "--hf-config", str(folder / "config.json")],
        "simulate": [*sizes, "--ring-sizes", "2"],
        "tune": ["--tokens", "4096", "--heads", "4", "--head-dim", "64", "--processes", "2",
                 "--threads", "0"],  # refused after everything else: no rank is started
        "compare": ["--tokens", "64", "--gpus", "2", "--device", "cpu", "--heads", "4", "--head-dim", "16",
                    "--only", "nothing that there is"],  # the same
        "status": [str(folder / "run")],
        "verify-checkpoint": [str(folder / "checkpoints")],
        "resize-checkpoint": [str(folder / "checkpoints"), "--world-size", "2"],
        "check-model": [str(folder / "config.json"), "--deadline-seconds", "0"],  # the same
    }[command]  # fmt: skip


# Neither is a number that any option takes; those that some options take end with 0 there.
NEVER_NUMBERS = (
    "x", "", "1.5.2", "0x10", "²", "--", "9" * 10_000, "1e5000", "nan", "true", "\x1b[31m7", "-" * 500,
)  # fmt: skip
ODD_NUMBERS = ("0", "-1", "-9999999999999999999", str(10**9), str(10**18), "9" * 300)
NEVER_WORDS = ("bogus", "", "\x00", "a" * 10_000, "\udcff", "😀")
NEVER_JSON = {
    "brackets": "[" * 60_000,
    "braces": '{"a":' * 60_000,
    "digits": '{"window": ' + "9" * 10_000 + "}",
    "digits inside": '{"window": ' + "9" * 4_000 + "}",
    "exponent": '{"window": 1e999}',
    "not a number": '{"window": NaN}',
    "keys twice": "{" + ", ".join('"window": 4' for _ in range(40_000)) + "}",
    "40 000 keys": json.dumps({f"k{n}": n for n in range(40_000)}),
    "lone surrogate": '{"\\ud800": "\\ud800"}',
    "control characters": '{"\\u001b[2J": "\\u0000"}',
    "a list": "[1, 2]",
    "null": "null",
    "a number": "3",
    "a string": '"window"',
    "trailing comma": '{"window": 4,}',
    "long list": json.dumps({"segment_lengths": list(range(1, 60_000))}),
    "python": "{'window': None}",
    "empty key": '{"": {"": {"": 1}}}',
}


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    whole = cli._parser()
    (found,) = [one for one in whole._actions if isinstance(one, argparse._SubParsersAction)]
    return dict(found.choices)


def odd_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Paths that are no plain text file: name and path. Makes them."""
    made: dict[str, Callable[[Path], object]] = {
        "a folder": lambda path: path.mkdir(),
        "a FIFO": os.mkfifo,
        "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
        "a link to a FIFO": lambda path: path.symlink_to(folder / "odd-1"),
        "a link to itself": lambda path: path.symlink_to(path),
        "a link to nothing": lambda path: path.symlink_to(folder / "nothing"),
        "empty": lambda path: path.write_bytes(b""),
        "blanks": lambda path: path.write_bytes(b" \n\n "),
        "zeros": lambda path: path.write_bytes(bytes(5000)),
        "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00a: 1"),
        "half a character": lambda path: path.write_bytes(b"a: \xe2\x82"),
        "sparse, 10 GB": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 10**10),
        "junk, 20 MB": lambda path: path.write_bytes(b"a: [" * 5_000_000),
        "a line of 3 MB": lambda path: path.write_bytes(b'{"a": "' + b"x" * 3_000_000),
    }
    for number, (name, make) in enumerate(made.items()):
        path = folder / f"odd-{number}"
        make(path)
        yield name, str(path)
    yield from {
        "/dev/zero": "/dev/zero",
        "/dev/null": "/dev/null",
        "/dev/stdin": "/dev/stdin",
        "below a file": str(folder / "cluster.yaml" / "x"),
        "no such": str(folder / "no-such.yaml"),
        "a name of 5000": "x" * 5000,
        "a zero byte": f"{folder}/a\x00b",
        "no characters": "",
        "a surrogate": f"{folder}/\udcff.yaml",
        "memory": "/proc/self/mem",
        "a blank": " ",
        "a line break": f"{folder}/a\nb",
    }.items()


def option_probes(folder: Path) -> Iterator[Probe]:
    """Every option of every command, with values that it cannot take."""
    for command, parser in parsers().items():
        base = [command, *base_of(command, folder)]
        yield Probe(f"{command}: unknown option", [*base, "--bogus"])
        yield Probe(f"{command}: one word too many", [*base, "more", "words"])
        yield Probe(f"{command}: after --", [*base, "--", "x"], (0,) if command == "launch" else (2,))
        for number, action in enumerate(parser._actions):
            if not action.option_strings or isinstance(action, argparse._HelpAction) or action.nargs == 0:
                continue
            option = action.option_strings[0]
            if action.nargs != "?":
                yield Probe(f"{command} {option}: nothing", [*base, option])
            if action.type in (int, float):
                # all of them read numbers alike: each option gets a third of what is none
                values = [(value, (2,)) for value in NEVER_NUMBERS[number % 3 :: 3]]
                values += [(value, (0, 2)) for value in ODD_NUMBERS]
            elif action.choices is not None or option in (
                "--layout",
                "--dtype",
                "--device",
                "--hardware",
                "--tag",
            ):
                values = [(value, (2, 3)) for value in NEVER_WORDS]
            elif option == "--pattern":
                values = [(value, (2,)) for value in NEVER_JSON.values()]
            else:
                continue
            for value, statuses in values:
                yield Probe(f"{command} {option}={value!r:.40}", [*base, f"{option}={value}"], statuses)


def file_probes(folder: Path) -> Iterator[Probe]:
    """Every place that a file may be named in, with every wrong kind of file."""
    odd = list(odd_files(folder))
    for name, path in odd:
        yield Probe(f"launch {name}", ["launch", "--dry-run", path])
        for command in ("plan", "simulate", "tune"):
            yield Probe(f"{command} --config {name}", [command, *base_of(command, folder), "--config", path])
        base = base_of("plan", folder)
        # /dev/null and the like are no hardware either
        yield Probe(f"plan --hardware {name}", ["plan", *base, "--hardware", path])
        yield Probe(f"plan --hf-config {name}", ["plan", *base, "--hf-config", path])
        yield Probe(f"status {name}", ["status", path])
        # an empty name is this folder: it has no checkpoint either
        yield Probe(f"verify-checkpoint {name}", ["verify-checkpoint", path], (2, 3))
        if os.path.isdir(path) or name in (
            "below a file",
            "a name of 5000",
            "a zero byte",
            "no characters",
        ):
            command = ["tune", *base_of("tune", folder), "--hardware-output", path]
            yield Probe(f"tune --hardware-output {name}", command)
        for key in ("script", "deepspeed_config", "hostfile"):
            text = FROM_HOSTFILE if key == "hostfile" else CLUSTER
            lines = [line for line in text.splitlines() if not line.startswith(f"{key}:")]
            written = _file(folder, f"{key}-{name}.yaml", "\n".join([*lines, f"{key}: {json.dumps(path)}"]))
            more = ["--node-rank", "0"] if key == "hostfile" else []
            # any plain file may be a script, whatever stands in it
            fine = (0, 2) if key == "script" else (2,)
            yield Probe(f"launch, {key} {name}", ["launch", "--dry-run", *more, written], fine)


CLUSTER_TEXTS = {
    "a date for a script": CLUSTER.replace("train.py", "2020-01-01"),
    "a date that is none": CLUSTER.replace("train.py", "2020-13-45"),
    "a time": CLUSTER + "master_address: 2001-12-14t21:59:43.10-05:00",
    "a date for a key": CLUSTER + "2020-01-01: x",
    "a list for a key": CLUSTER + "? [a, b]\n: x",
    "a mapping for a key": CLUSTER + "? {a: b}\n: x",
    "a mapping for a key, inline": CLUSTER + "environment: {{a: b}: c}",
    "null for a key": CLUSTER + "~: x",
    "a number for a key": CLUSTER + "environment: {1: x}",
    "true for a key": "hosts: [{name: a, slots: 1, true: 2}]\nscript: a\ndeepspeed_config: b",
    "a list for a key of a host": "hosts: [{name: a, slots: 1, [x]: 2}]\nscript: a\ndeepspeed_config: b",
    "deep brackets": CLUSTER + "environment: " + "[" * 60_000,
    "deep brackets, closed": CLUSTER + "environment: " + "[" * 50_000 + "]" * 50_000,
    "deep braces": CLUSTER + "environment: " + "{a: " * 20_000,
    "deep dashes": CLUSTER + "environment:\n " + "- " * 60_000,
    "deep questions": "? " * 60_000,
    "an integer of 10^4 digits": CLUSTER.replace("2", "9" * 10_000),
    "a hexadecimal of 10^4 digits": CLUSTER.replace("2", "0x" + "f" * 10_000),
    "an integer in base 60": CLUSTER.replace("2", ":".join(["59"] * 20_000)),
    "40 000 keys twice": CLUSTER + "a: 1\n" * 40_000,
    "40 000 keys": CLUSTER + "".join(f"k{n}: 1\n" for n in range(20_000)),
    "40 000 hosts twice": "hosts: [" + "{name: a, slots: 1}, " * 10_000 + "]\nscript: a\ndeepspeed_config: b",
    "10^9 slots": CLUSTER.replace("2", "1000000000"),
    "10^18 slots": CLUSTER.replace("2", "1" + "0" * 18),
    "infinitely many slots": CLUSTER.replace("2", ".inf"),
    "slots that are no number": CLUSTER.replace("2", ".nan"),
    "10^9 slots of a host": BY_HOST.replace("2}", "1000000000}") + "script: a\ndeepspeed_config: b",
    "a Python object": CLUSTER + "environment: !!python/object/apply:os.system [true]",
    "a binary": CLUSTER + "environment: !!binary x",
    "a timestamp by a tag": CLUSTER + "environment: !!timestamp x",
    "an integer by a tag": CLUSTER + "environment: !!int x",
    "a boolean by a tag": CLUSTER + "environment: !!bool x",
    "a float by a tag": CLUSTER + "environment: !!float x",
    "a set by a tag": CLUSTER + "environment: !!set {a, b}",
    "pairs by a tag": CLUSTER + "environment: !!pairs [a]",
    "a tag of its own": CLUSTER + "environment: !mine x",
    "lists in lists in lists": "a0: &a0 [x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)) + CLUSTER,
    "a list of itself": CLUSTER + "environment: &a [*a]",
    "a mapping of itself": CLUSTER + "environment: &a {b: *a}",
    "an alias of nothing": CLUSTER + "environment: *nobody",
    "a merge of a number": CLUSTER + "environment: {<<: 3}",
    "two documents": CLUSTER + "---\n" + CLUSTER,
    "a directive": "%YAML 9.9\n---\n" + CLUSTER,
    "a directive twice": "%YAML 1.1\n%YAML 1.1\n---\n" + CLUSTER,
    "a tab": CLUSTER + "\tenvironment: {}",
    "a zero byte": CLUSTER + "environment: {A: \x00}",
    "a control character": CLUSTER + "\x1b[31m: 1",
    "a text that does not end": CLUSTER + 'environment: {A: "',
    "a carriage return": CLUSTER + 'environment: {A: "\\r"}',
    "a lone surrogate": CLUSTER + 'environment: {A: "\\ud800"}',
    "a surrogate for a script": CLUSTER.replace("train.py", '"\\ud800"'),
    "a script of 5000 characters": CLUSTER.replace("train.py", "x" * 5000),
    "a name of 5000 characters": BY_HOST.replace("node-0", "n" * 5000),
    "a variable of 5000 characters": CLUSTER + f"environment: {{{'A' * 5000}=: 1}}",
    "an unknown key of 50 000 characters": CLUSTER + "? " + "k" * 50_000 + "\n: 1",
    "words of an engine that are a mapping": CLUSTER + "engine_args: {a: b}",
    "words of an engine that are mappings": CLUSTER + "engine_args: [{a: b}]",
    "a port that is a list": CLUSTER + "master_port: [1]",
    "a port that is a float": CLUSTER + "master_port: 23456.5",
    "null for everything": "hosts: ~\nslots: ~\nscript: ~\ndeepspeed_config: ~\nengine: ~\nssh: ~",
    "a list for everything": "hosts: []\nslots: []\nscript: []\ndeepspeed_config: []\nengine: []\nssh: []",
    "a mapping for everything": "hosts: {}\nslots: {}\nscript: {}\ndeepspeed_config: {}\nengine: {}\nssh: {}",
    "a text": "hosts",
    "a number": "3",
    "JSON in a YAML": '{"hosts": "local", "slots": 0, "script": "a", "deepspeed_config": "b"}',
}  # fmt: skip
HOSTFILES = {
    "10^9 slots": "node-0 slots=1000000000\n",
    "10^4 digits": f"node-0 slots={'9' * 10_000}\n",
    "other digits": "node-0 slots=\u0663\n",
    "40 000 times one host": "node-0 slots=1\n" * 40_000,
    "40 000 wrong lines": "node-0\n" * 40_000,
    "a long line": "n" * 200_000,
    "blanks without end": "node-0" + " " * 100_000 + "slots",
    "a name that is an option": "-oProxyCommand=x slots=1\n",
    "a zero byte": "node\x000 slots=1\n",
    "an escape": "\x1b[31mnode slots=1\n",
}
SECTIONS: dict[str, object] = {
    "zero_optimization is a number": {"zero_optimization": 3},
    "zero_optimization is a list": {"zero_optimization": [3]},
    "stage is a word": {"zero_optimization": {"stage": "three"}},
    "stage 9": {"zero_optimization": {"stage": 9}},
    "stage -1": {"zero_optimization": {"stage": -1}},
    "stage true": {"zero_optimization": {"stage": True}},
    "a bucket of -1": {"zero_optimization": {"stage": 1, "reduce_bucket_size": -1}},
    "a bucket of 10^400": {"zero_optimization": {"stage": 1, "reduce_bucket_size": 10**400}},
    "a bucket that is a list": {"zero_optimization": {"stage": 1, "reduce_bucket_size": [5]}},
    "parameters that are a word": {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": "x"}},
    "overlap_comm is a word": {"zero_optimization": {"stage": 3, "overlap_comm": "yes"}},
    "bf16 is true": {"bf16": True},
    "bf16 is a list": {"bf16": [1]},
    "fp16 is a word": {"fp16": "yes"},
    "bf16.enabled is a word": {"bf16": {"enabled": "yes"}},
    "a micro batch of 0": {"train_micro_batch_size_per_gpu": 0},
    "a micro batch of -4": {"train_micro_batch_size_per_gpu": -4},
    "a micro batch of 10^30": {"train_micro_batch_size_per_gpu": 10**30},
    "a micro batch that is a word": {"train_micro_batch_size_per_gpu": "four"},
    "a micro batch that is true": {"train_micro_batch_size_per_gpu": True},
}
OURS: dict[str, object] = {
    "a ring of 10^9": {"ring_size": 10**9},
    "a ring of 10^30": {"ring_size": 10**30},
    "a ring of -1": {"ring_size": -1},
    "Ulysses of 10^18": {"ulysses_size": 10**18},
    "a block of 2^200": {"block_size": 2**200},
    "a timeout of 10^400": {"ring_size": 2, "hop_timeout_seconds": 10**400},
    "an option of the kernel that is a list": {"ring_size": 2, "kernel_options": []},
    "an unknown option of the kernel": {"ring_size": 2, "kernel": "cpu", "kernel_options": {"x": 1}},
    "a pattern that is a list": {"ring_size": 2, "pattern": []},
    "a layout that is a number": {"ring_size": 2, "layout": 3},
    "a window of 10^30": {"ring_size": 2, "pattern": {"window": 10**30}},
    "segments of 10^30": {"ring_size": 2,
        "pattern": {"segment_lengths": [10**30], "dilation_rates": [10**29]}},
    "60 000 segments": {"ring_size": 2,
        "pattern": {"segment_lengths": list(range(1, 60_000)), "dilation_rates": [1]}},
    "the section is a list": [],
    "the section is null": None,
}  # fmt: skip
MODELS: dict[str, object] = {
    **{f"{key} is {value!r:.20}": {key: value}
       for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
       for value in (0, -1, "x", 1.5, None, [], 10**30)},
    **{f"{key} is {value!r:.20}": {key: value}
       for key in ("num_key_value_heads", "head_dim") for value in (-1, "x", 1.5, [], {}, True, 10**30)},
    "text_config is a number": {"hidden_size": None, "text_config": 3},
    "text_config is empty": {"text_config": {}, "hidden_size": "x"},
    "3 heads": {"num_attention_heads": 3},
}  # fmt: skip


def content_probes(folder: Path) -> Iterator[Probe]:
    """Files of the right kind with contents of every wrong kind."""
    for name, text in CLUSTER_TEXTS.items():
        fine = (0,) if name == "a time" else (2,)  # it is a word, and could be a host's name
        written = _file(folder, f"cluster {name}.yaml", text)
        yield Probe(f"cluster: {name}", ["launch", "--dry-run", written], fine)
    for name, text in HOSTFILES.items():
        where = folder / f"hosts {name}"
        where.mkdir()
        _file(where, "hosts.txt", text)
        written = _file(where, "cluster.yaml", FROM_HOSTFILE)
        yield Probe(f"hostfile: {name}", ["launch", "--dry-run", "--node-rank", "0", written])
    for name, text in NEVER_JSON.items():
        written = _file(folder, f"json {name}.json", text)
        yield from _with_json(folder, f"JSON: {name}", written)
        yield Probe(f"hf-config: {name}", ["plan", *base_of("plan", folder), "--hf-config", written])
        base = [*base_of("plan", folder)[:-2], "--hf-config"]
        yield Probe(f"hf-config, text: {name}", ["plan", *base, text])
    for name, change in SECTIONS.items():
        written = _file(folder, f"ds {name}.json", json.dumps({**SECTION, **change}))  # type: ignore[dict-item]
        yield Probe(f"DeepSpeed's keys: {name}", ["plan", *base_of("plan", folder), "--config", written])
    for name, section in OURS.items():
        text = json.dumps({"ring_attention": section})
        yield from _with_json(folder, f"section: {name}", _file(folder, f"ours {name}.json", text))
    for name, change in MODELS.items():
        written = _file(folder, f"model {name}.json", json.dumps({**MODEL, **change}))  # type: ignore[dict-item]
        yield Probe(f"model: {name}", ["plan", *base_of("plan", folder)[:-1], written])
    yield from _hardware_probes(folder)


def _hardware_probes(folder: Path) -> Iterator[Probe]:
    keys = [line.split(":")[0] for line in CPU_YAML.splitlines() if line[:1].isalpha()]
    for key in keys:
        numbers = ("-1", "1.0e-300", "1.0e+300", "9" * 400, ".nan")
        for value in (*numbers, "[]", "x", "~", "2020-01-01", "{1: 2}", "[[[["):
            kept = [line for line in CPU_YAML.splitlines() if not line.startswith((f"{key}:", " "))]
            if key not in ("peak_flops", "attention_efficiency", "source"):
                kept = [line for line in CPU_YAML.splitlines() if not line.startswith(f"{key}:")]
            text = "\n".join([*kept, f"{key}: {value}"])
            written = _file(folder, f"hardware {key} {value[:10]}.yaml", text)
            # a name may be any word, and a rate may be small
            yield Probe(f"hardware: {key}: {value:.20}",
                        ["plan", *base_of("plan", folder), "--hardware", written], (0, 2))  # fmt: skip


def _with_json(folder: Path, name: str, written: str) -> Iterator[Probe]:
    """A DeepSpeed JSON, in every place where one is read."""
    for command in ("plan", "simulate", "tune"):
        argv = [command, *base_of(command, folder), "--config", written]
        # to these a section's number of ranks says nothing: wrong are the pattern and the kernel
        fine = (0, 2) if name.startswith("section") else (2,)
        yield Probe(f"{command}, {name}", argv, fine)
    cluster = _file(folder, f"{Path(written).stem}.yaml", CLUSTER.replace("ds.json", json.dumps(written)))
    fine = (0, 2) if "kernel" in name else (2,)  # the ranks' to judge
    yield Probe(f"launch, {name}", ["launch", "--dry-run", cluster], fine)


def _file(folder: Path, name: str, text: str) -> str:
    path = folder / name.replace("/", "_").replace("\n", "_").replace("\x00", "_")
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return str(path)


def cli_probes(folder: Path) -> list[Probe]:
    """All of them, with the files that they name in `folder`."""
    _file(folder, "cluster.yaml", CLUSTER)
    _file(folder, "train.py", "")
    _file(folder, "ds.json", json.dumps(SECTION))
    _file(folder, "config.json", json.dumps(MODEL))
    (folder / "checkpoints").mkdir()
    (folder / "run/attempt-1").mkdir(parents=True)
    return [*option_probes(folder), *file_probes(folder), *content_probes(folder)]

"""Every fenced block of our documents does what its document says.

BLOCKS says of each block how it is run: the text itself, in full; what takes long is given smaller sizes,
which stand here. `only_reads(reason)` is for what a laptop cannot run: the text is compiled, its options and
the names that it imports are looked up. A block without an entry fails, and so does an entry without a block.
Commands in backquotes and links are checked as well.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import pytest
from deepspeed.monitor.config import WandbConfig
from deepspeed.monitor.monitor import MonitorMaster
from packaging.requirements import Requirement

from ds_ring import RingConfig
from ds_ring_launcher.cluster.checks import choose_free_port
from ds_ring_launcher.cluster.cluster_file import read_cluster
from ds_ring_launcher.plan.hardware import read_hardware
from tests.document_readers import read_command, read_python
from tests.documents import (
    OF_THE_CODE,
    ROOT,
    SMALL_RUN,
    TEXTS,
    TROUBLESHOOTING,
    Block,
    Place,
    anchors,
    blocks,
    changed,
    figures,
    inline_commands,
    links,
    messages,
    prose,
    read_results,
    rows_without_head,
    words,
)
from tests.integration.test_train_lm import QUICK_START, check_quick_start
from tests.machine import skip_without
from tools import build_site

pytestmark = pytest.mark.slow

MODEL = """
import copy, torch, ds_ring
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation="sdpa")
alone = copy.deepcopy(model)
"""
TENSORS = """
import torch, ds_ring
torch.manual_seed(0)
T, pattern = 50, ds_ring.Causal()
q, k, v, grad_out = torch.randn(4, 1, 2, T, 8)
q_BHTD, k_BHTD, v_BHTD = q, k, v
sdpa = torch.nn.functional.scaled_dot_product_attention
"""


HALVES = """
import torch.distributed as dist
T, S = 48, 24
q, k, v = (x[:, :, :T] for x in (q, k, v))
whole = sdpa(q, k, v, is_causal=True)
contiguous = slice(rank * S, rank * S + S)
zigzag = [*range(rank * 12, rank * 12 + 12), *range((3 - rank) * 12, (3 - rank) * 12 + 12)]
"""
ULYSSES = """
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes two minutes
deepspeed.comm.init_distributed("gloo", dist_init_required=False, verbose=False)
group = dist.group.WORLD


def local(q, k, v, *rest):
    return sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2).contiguous()


q, k, v = (x[:, :, contiguous].transpose(1, 2).contiguous() for x in (q, k, v))
"""


LOSSES = (
    "losses = []\nprint = losses.append",
    """
assert len(losses) == (8 if rank == 0 else 0)  # one for each batch, near ln(256)
result = max((abs(loss - 5.55) for loss in losses), default=0.0)
""",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A fresh clone with the DeepSpeed JSON of the tutorial and the config.json of a small model in it."""
    place = Place(tmp_path_factory.mktemp("clone"))
    (place.folder / "ds_config.json").write_text(block_of("{").text)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    shape |= {"model_type": "llama", "vocab_size": 1000, "num_key_value_heads": 2}
    for path in (place.folder / "config.json", place.folder / "my-model/config.json"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(shape))
    return place


def block_of(key: str) -> Block:
    """The one block whose first line is `key`, or begins with it."""
    found = [block for block in blocks() if block.first_line == key]
    found = found or [block for block in blocks() if block.first_line.startswith(key)]
    assert len(found) == 1, f"{key!r}: expected one block that begins so, got {found}"
    return found[0]


def check_installed(place: Place) -> None:
    """`pip install` as printed asks for versions that are installed here, and for extras that exist."""
    command, *words = place.installed()
    assert command == "install"
    extras = metadata.metadata("ds_ring").get_all("Provides-Extra", [])
    for word in words:
        if word.startswith(".["):
            assert word[2:-1] in extras
        elif not word.startswith("-"):
            wanted = Requirement(word)
            assert metadata.version(wanted.name).split("+")[0] in wanted.specifier


def quick_start(place: Place, text: str) -> None:
    launch = "ds-ring launch configs/quickstart.yaml"
    output = place.bash(text, {launch: f"{launch} -- {QUICK_START}"})
    check_installed(place)
    assert "loss of the trained model on 4 x 512 tokens, one process" in output
    assert "INFO" not in output and "USDT" not in output, "the libraries' own lines hide ours"
    check_quick_start(place.folder / "runs/train_lm")


def pass_the_tests(place: Place, text: str) -> None:
    """With one file of the suite, which this test is part of."""
    pytest_ = "--dist loadfile"
    output = place.bash(text, {pytest_: f"{pytest_} -p no:cacheprovider tests/unit/config/test_json_text.py"})
    check_installed(place)
    assert " passed" in output


def parse(place: Place, text: str) -> None:
    config = RingConfig.from_deepspeed(json.loads(text))
    config.validate_world(config.sequence_parallel_size)
    assert config.ring_size in (2, 4)


def own_run(place: Place, text: str) -> None:
    """All three blocks of the section: JSON, script and command; its port is free while others test."""
    (place.folder / "train.py").write_text(block_of("import torch").text)
    output = place.bash(text, {"deepspeed": f"deepspeed --master_port {choose_free_port()}"})
    assert "INFO" not in output and "shm_comm" not in output, output
    losses = [float(line) for line in output.split() if line.startswith("5.")]
    assert len(losses) == 8, output  # one for each batch, near ln(256)
    assert all(5.4 < loss < 5.7 for loss in losses)


def own_script(place: Place, text: str) -> None:
    """On ranks that have torch loaded already; the command starts it at night."""
    assert place.python(2, LOSSES[0], text, LOSSES[1]) < 0.15


def ragged_samples(place: Place, text: str) -> None:
    """In the script, with documents and the check of the first batch; the loop is the script's."""
    script = block_of("import torch").text.replace("for batch in loader:", f"{text}\nfor batch in loader:")
    script = script.replace('config="ds_config.json"', "config=section")
    before = f"""
import json, pathlib
section = json.loads(pathlib.Path("ds_config.json").read_text())
section["ring_attention"] |= {{"pattern": {{"causal": True, "documents": True}}, "verify_first_batch": True}}
{LOSSES[0]}"""
    after = """
assert sum(len(batch["input_ids"]) for batch in padded) == 16
assert len(losses) == (len(loader) if rank == 0 else 0)
result = max((abs(loss - 5.55) for loss in losses), default=0.0)
"""
    assert place.python(2, before, script, after) < 0.15


def evaluation(place: Place, text: str) -> None:
    """After one round of the script's loop; the losses are those of the trained model without the ring."""
    after = """
with engine.ring.off(), torch.no_grad():
    alone = [engine.module(**{key: x[None] for key, x in sample.items()}).loss.item() for sample in held_out]
assert texts.shape == (2, 24) and torch.equal(texts[:, :16], prompts) and engine.training
result = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
"""
    once = {"for batch in loader:": "for batch in itertools.islice(loader, 1):"}
    script = changed(block_of("import torch").text, once) + text
    after += """
result = max(result, abs(float(mean) - losses[-1]), abs(float(perplexity.log()) - sum(alone) / 4))
"""
    assert place.python(2, "import itertools", script, after) < 1e-5


def own_model(place: Place, text: str) -> None:
    """With "verify_first_batch", which raises unless the step is that of one process."""
    before = f"""
import json, os, pathlib
config = json.loads(pathlib.Path("ds_config.json").read_text())
config["ring_attention"]["verify_first_batch"] = True
pathlib.Path(f"own{{rank}}").mkdir()
os.chdir(f"own{{rank}}")
pathlib.Path("ds_config.json").write_text(json.dumps(config))
{LOSSES[0]}"""
    assert place.python(2, before, text, LOSSES[1]) < 0.6  # an embedding of width 1


def is_run_with_its_command(place: Place, text: str) -> None:
    compile(text, "train.py", "exec")


def compiled_engine(place: Place, text: str) -> None:
    """At ZeRO 1, since the block compiles one graph."""
    before = """
import json, pathlib
config = json.loads(pathlib.Path("ds_config.json").read_text()) | {"zero_optimization": {"stage": 1}}
pathlib.Path(f"rank{rank}").mkdir()
os.chdir(f"rank{rank}")
pathlib.Path("ds_config.json").write_text(json.dumps(config))
"""
    after = """
ids = torch.arange(40)[None] % 61
alone.load_state_dict(model.state_dict())
batch = engine.ring.shard_batch({"input_ids": ids, "labels": ids})
loss = engine(**batch).loss
engine.backward(loss)
result = float(engine.ring.mean_loss(loss) - alone(input_ids=ids, labels=ids).loss)
"""
    options = '{"fullgraph": True, "options": {"inner": "aot_eager"}}'  # Inductor's C++ takes a minute
    text = changed(text, {'{"fullgraph": True}': options})
    assert place.python(2, "import os\n" + MODEL + before, text, after) < 1e-5


def compiled_model(place: Place, text: str) -> None:
    before = """
T = 40
ids = torch.arange(T)[None] % 61
mesh = ds_ring.RingMesh.from_world(ring_size=2)
layout = ds_ring.make_layout("zigzag", tokens=T, ring_size=2)
"""
    after = """
whole = alone(input_ids=torch.arange(T)[None] % 61).logits
result = float((ds_ring.gather_sequence(logits, layout, mesh=mesh, dim=1) - whole).abs().max())
"""
    text = changed(text, {"options = {": 'options = {"inner": "aot_eager", '})
    assert place.python(2, MODEL + before, text, after) < 1e-5


def verify_checkpoints(place: Place, text: str) -> None:
    """Those of the quick start, and a copy of one without its manifest."""
    quick = place.folder / "runs/train_lm/checkpoints"
    if not quick.exists():
        run_block(place, block_of("python3 -m venv .venv && . .venv/bin/activate && pip"))
    mine, earlier = (place.folder / "checkpoints" / name for name in ("mine", "global_step20"))
    for copy in (mine, earlier):
        shutil.copytree(quick / (quick / "latest").read_text(), copy, dirs_exist_ok=True)
    (mine / "ds_ring_manifest.json").unlink()
    place.bash(text)
    assert (mine / "ds_ring_manifest.json").exists()


def check_model(place: Place, text: str) -> None:
    assert "exact" in place.bash(text)


def attention_alone(place: Place, text: str) -> None:
    after = "result = float((whole - sdpa(q_BHTD, k_BHTD, v_BHTD, is_causal=True)).abs().max())"
    assert place.python(4, TENSORS, text, after) < 1e-5


def simulate_in_python(place: Place, text: str) -> None:
    before = 'layout, rank = ds_ring.make_layout("zigzag", tokens=T, ring_size=4), 3'
    after = "result = float((result.out - sdpa(q, k, v, is_causal=True)).abs().max())"
    assert place.python(1, TENSORS + before, text, after) < 1e-5


def plan(place: Place, text: str) -> None:
    output = place.bash(text)
    assert output.count("longest sequence on ring") == 3, output


def plan_worked_case(place: Place, text: str) -> None:
    """The table that follows it has the figures of the output."""
    output = place.bash(text, {"--compare": "--compare --json"})
    rows = json.loads(output[output.index("{") :])["compared"]
    document = (ROOT / "configs/recipes/README.md").read_text()
    table = document[document.index(text) :].split("\n\n")[1]
    for method, row in zip((0, 1, 2, 3, 4, 5, 6, 8, 7), table.splitlines()[2:], strict=True):
        figures, expected = [cell.strip() for cell in row.split("|")[2:-1]], rows[method]
        gib = [f"{expected[key] / 2**30:.1f}" for key in ("peak_bytes", "host_bytes")]
        assert figures == [*gib, f"{expected['step_s']:.1f}", f"{expected['longest_tokens']:,}"], row


def accelerate_launch(place: Place, text: str) -> None:
    """The same on two CPU ranks, with an example's script."""
    script = "configs/examples/accelerate_loop.py"
    changes = {
        "processes 8": "processes 2",
        "bf16": "no",
        "--deepspeed_config_file ds_config.json train.py": "",
    }
    config = "--deepspeed_config_file configs/examples/ds_config.json"
    command = text.replace("\\\n", " ").strip()
    for before, after in changes.items():
        command = command.replace(before, after)
    output = place.bash(f"DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 {command} {config} {script}\n")
    assert "{'step': 7, 'loss': 4." in output


def simulate(place: Place, text: str) -> None:
    """The table that follows it has rows of the output, in their order."""
    output = place.bash(text, {"8192": "256"})
    document = (ROOT / "launcher/README.md").read_text()
    table = document[document.index(text) :].split("\n\n")[2]
    named = [cells.split("|")[1].strip() for cells in table.splitlines() if not cells.startswith("|---")]
    rows = [re.split("[│┃]", line)[1].strip() for line in output.splitlines() if line[:1] in ("│", "┃")]
    assert len(named) > 5 and named == [row for row in rows if row in named]
    assert {"zigzag", "1", "2", "4", "8", "16"} <= set(output.split())


def launch(place: Place, text: str) -> None:
    output = place.bash(text)
    assert output.count("launcher/demo/train_lm.py --deepspeed") == 2
    assert "--node_rank=0 --master_addr=node-0" in output


def minimal_change(place: Place, text: str) -> None:
    """What it adds stands in the run to copy, too."""
    lines = [line[1:] for line in text.splitlines() if line.startswith("+")]
    compile("\n".join(lines), "diff", "exec")
    run = " ".join(block_of("import torch").text.split())
    for part in (
        "import ds_ring",
        "engine, optimizer, loader, scheduler = ds_ring.initialize(",
        "mean_loss(loss)",
    ):
        assert any(part in line for line in lines)
        assert part in run


def stands_in_the_examples(place: Place, text: str) -> None:
    """What it adds is all that the example scripts have of ds_ring; tests/dist/test_trainers.py runs them."""
    added = [line[1:] for line in text.splitlines() if line.startswith("+")]
    scripts = [path.read_text().splitlines() for path in (ROOT / "configs/examples").glob("*_*.py")]
    scripts = [lines for lines in scripts if "ds_ring.enable()" in lines]  # ray_train.py: initialize
    assert len(scripts) == 5
    for lines in scripts:
        assert [line for line in lines if line.startswith(("import ds_ring", "ds_ring."))] == added


def make_plan(place: Place, text: str) -> None:
    assert place.python(1, "import ds_ring", text, "result = plan.tokens_sent - plan.tokens_needed") == 0


def instead_of_all_gather(place: Place, text: str) -> None:
    after = """
out = attend(*(x[:, :, contiguous] for x in (q, k, v)))
result = float((out - whole[:, :, contiguous]).abs().max())
"""
    assert place.python(2, TENSORS + HALVES, text, after) < 1e-5


def instead_of_ulysses(place: Place, text: str) -> None:
    before = TENSORS + HALVES + ULYSSES + block_of("# before: `local` attends").text + "theirs = out\n"
    after = """
want = whole[:, :, contiguous].transpose(1, 2)
result = max(float((x - want).abs().max()) for x in (out, theirs))
"""
    assert place.python(2, before, text, after) < 1e-5


def as_ring_flash_attn(place: Place, text: str) -> None:
    qkv = "qkv = torch.stack([q, k, v], 2).transpose(1, 3)"  # [B, T, 3, H, D]
    before = f"{TENSORS}{HALVES}\n{qkv}\nrank, world_size = torch.distributed.get_rank(), 2"
    after = "result = float((out - whole[:, :, zigzag].transpose(1, 2)).abs().max())"
    assert place.python(2, before, text, after) < 1e-5


def instead_of_context_parallel(place: Place, text: str) -> None:
    """Every gradient is that of one process."""
    before = """
ids = torch.arange(40)[None] % 61
labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
device_mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
"""
    after = """
alone_logits = alone(input_ids=ids).logits
torch.nn.functional.cross_entropy(alone_logits.flatten(0, 1), labels.flatten()).backward()
pairs = zip(model.parameters(), alone.parameters(), strict=True)
result = max(float((mine.grad - wanted.grad).abs().max()) for mine, wanted in pairs)
"""
    text = changed(text, {"options = {": 'options = {"inner": "aot_eager", '})
    assert place.python(2, MODEL + before, text, after) < 1e-5


def tune(place: Place, text: str) -> None:
    smaller = "512 --heads 2 --head-dim 16 --processes 2"
    place.bash(text, {"32k --heads 8 --head-dim 64 --processes 4": smaller})
    assert read_hardware(str(place.folder / "here.yaml")).devices_per_node == 2


def packed(place: Place, text: str) -> None:
    port, script = f"deepspeed --master_port {choose_free_port()} --num", "--deepspeed_config"
    output = place.bash(text, {"deepspeed --num": port, script: f"{SMALL_RUN} {script}"})
    assert "peak memory per rank" in output


def tensorboard(place: Place, text: str) -> None:
    """Its keys, beside those of the quick start; the wandb of its paragraph is read."""
    keys = json.loads("{" + text + "}")
    (wandb,) = re.findall(r'`"wandb": ({.*?})`', (ROOT / "launcher/README.md").read_text())
    assert WandbConfig(**json.loads(wandb)).project == "ring" and callable(MonitorMaster.write_events)
    config = json.loads((ROOT / "configs/quickstart.json").read_text()) | keys
    assert RingConfig.from_deepspeed(config).monitor and config["tensorboard"]["enabled"]
    skip_without("tensorboard")
    (place.folder / "monitored.json").write_text(json.dumps(config))
    command = f"DS_ACCELERATOR=cpu deepspeed --num_gpus 2 --master_port {choose_free_port()} --module"
    script = "ds_ring_launcher.demo.train_lm --deepspeed_config monitored.json --compare_tokens 0"
    place.bash(f"{command} {script} {SMALL_RUN} --output runs/monitored")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place.folder / keys["tensorboard"]["output_path"] / "ring"))
    tags = set(events.Reload().Tags()["scalars"])
    rows = re.findall(r"`(Ring/\w+)`", (ROOT / "launcher/README.md").read_text())
    assert len(rows) >= 9 and {*rows, "Train/Samples/lr"} <= tags, tags


def cluster_keys(place: Place, text: str) -> None:
    """Keys of a cluster YAML, beside those of the quick start."""
    path = place.folder / "cluster/with_more_keys.yaml"  # configs/ is the repository's own
    path.parent.mkdir(exist_ok=True)
    path.write_text((place.folder / "configs/quickstart.yaml").read_text() + text)
    assert read_cluster(path).relaunch is not None


def only_reads(why: str) -> Callable[[Place, str], None]:
    """An entry of BLOCKS for what is not run here, and why not."""
    assert why

    def read(place: Place, text: str) -> None:
        if text.startswith("DS_ACCELERATOR=cpu "):
            script = next(word for word in text.split() if word.endswith(".py"))
            assert (ROOT / script).exists()
        elif text.startswith(("python ", "ds-ring ")):
            with pytest.MonkeyPatch.context() as monkeypatch:
                for line in text.splitlines():
                    read_command(line, monkeypatch)
        else:
            read_python(text)

    return read


def is_a_picture(why: str) -> Callable[[Place, str], None]:
    """An entry of BLOCKS for text that nobody is to run."""
    assert why
    return lambda place, text: None


def contributors_set_up(place: Place, text: str) -> None:
    """Its installation is asked for; its tests are not run, and the files that they name must be there."""
    lines = text.splitlines()
    place.bash("\n".join(line for line in lines if line.startswith(("python", "pip"))))
    check_installed(place)
    assert (ROOT / ".pre-commit-config.yaml").is_file()
    tests = [line.split("#")[0].split() for line in lines if line.startswith("pytest")]
    assert len(tests) == 3
    assert all((ROOT / word).exists() for words in tests for word in words if "/" in word)


def summary_of_a_plan(place: Place, text: str) -> None:
    """Its lines are those of `plan.summary()` for causal attention on four zigzag ranks."""
    before = (
        'plan = ds_ring.build_plan(ds_ring.Causal(), ds_ring.make_layout("zigzag", tokens=4096, ring_size=4))'
    )
    after = f"""
printed = [line.split() for line in plan.summary().splitlines()]
result = sum(line.split() not in printed for line in {text!r}.strip().splitlines())
"""
    assert place.python(1, "import ds_ring", before, after) == 0


def tables_of_changes(place: Place, text: str) -> None:
    output = place.bash(text)
    assert all(name in output for name in ("deepspeed", "transformers", "accelerate"))


BLOCKS: dict[str, Callable[[Place, str], None]] = {
    # README.md
    "python3 -m venv .venv && . .venv/bin/activate && pip": quick_start,
    "python3 -m venv .venv && .venv/bin/pip": pass_the_tests,
    "-import deepspeed": minimal_change,
    # ds_ring/TUTORIAL.md
    "{": parse,  # README's, too
    "import torch": own_script,
    "# a model in plain PyTorch": own_model,
    "# samples of 100 to 1000 tokens": ragged_samples,
    "# the loss of each whole sequence": evaluation,
    "DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 --log_level": own_run,
    "+import ds_ring": stands_in_the_examples,
    "DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 configs/examples": only_reads(
        "tests/dist/test_trainers.py runs the scripts"
    ),
    # MIGRATING.md
    "# q, k, v [B, H, T/P, D]": instead_of_all_gather,
    "# before: `local` attends": is_run_with_its_command,
    "# after: the same call": instead_of_ulysses,
    "# after: no registration": only_reads("README's run, which is run"),
    "# two lines before the others": as_ring_flash_attn,
    "# after: the model calls": instead_of_context_parallel,
    "# in Megatron: one line": only_reads("tests/dist/contrib/test_megatron.py trains such models"),
    "# in diffusers: the two lines": only_reads("tests/dist/contrib/test_diffusers.py splits such models"),
    # configs/README.md
    "DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 --module": packed,
    # ds_ring/README.md
    "mesh = ds_ring.RingMesh.from_world(ring_size=4)": attention_alone,
    "pattern = ds_ring.Causal() & ": make_plan,
    "chosen = ds_ring.ring_select(": only_reads("tests/dist/layers/test_selection.py makes such calls"),
    "out = ds_ring.moba_attention(": only_reads("tests/dist/layers/test_sparse.py makes such calls"),
    "from ds_ring.layers.distance_bias.attention": only_reads(
        "tests/dist/layers/test_distance_bias.py makes such calls"
    ),
    "tree = engine.ring.tree_batch(": only_reads(
        "tests/dist/contrib/policies/test_trees.py makes such calls"
    ),
    "class Trained(torch.nn.Module):": only_reads("tests/dist/contrib/drafter trains such a module"),
    "engine, *_ = ds_ring.initialize(": compiled_engine,
    "# the rest is compiled by Inductor": compiled_model,
    "engine.eval()": only_reads("tests/dist/test_generation.py runs such calls"),
    "result = ds_ring.simulate(": simulate_in_python,
    # launcher/README.md
    "ds-ring launch": launch,
    "run_folder: ../runs/mine": cluster_keys,  # tests/integration/test_relaunch.py starts such jobs
    "engine.ring.should_stop()": only_reads("tests/integration/test_train_lm.py's script does so"),
    "ds-ring status": only_reads("tests/integration/test_run_status.py has a run to look at"),
    '"ring_attention": {"ring_size": "auto", "monitor": true},': tensorboard,
    "ds-ring plan --hf-config config.json": plan,
    "ds-ring plan --hf-config llama-3-8b": plan_worked_case,
    "ds-ring doctor configs/recipes": only_reads("eight GPUs"),
    "# on the machine with the GPU": is_a_picture("needs a GPU; test_gpu_first.py reads the command"),
    "config = AutoConfig.from_pretrained": only_reads("weights of a hub"),
    "accelerate launch --num_processes 8": accelerate_launch,
    "ds-ring simulate --tokens 8192": simulate,
    "ds-ring tune": tune,
    "ds-ring compare": only_reads("tests/integration/test_compare.py runs it on CPU ranks"),
    "ds-ring check-model": check_model,
    "ds-ring verify-checkpoint": verify_checkpoints,
    "ds-ring resize-checkpoint": only_reads("tests/dist/test_resize.py goes on with such checkpoints"),
    # tools/upstream/README.md
    "python -m tools.upstream.apply": only_reads("tests/integration/test_upstream.py applies the patches"),
    # CONTRIBUTING.md
    "# once": contributors_set_up,
    "python tools/build_site.py": only_reads("tests/integration/test_build_site.py runs it"),
    # ds_ring/DESIGN.md
    "DeepSpeed JSON ->": is_a_picture("of the flow"),
    "loader or shard_batch": is_a_picture("of the way of a batch"),
    "rank hop origin": summary_of_a_plan,
    "rank 1, forward": is_a_picture("the command before it prints one like it, and is read"),
    # ds_ring/contrib/training_commands/README.md, whose tests run such commands where the packages are
    "FORCE_TORCHRUN=1": is_a_picture("of a command of LLaMA-Factory; test_llama_factory.py"),
    "pip install deepspeed ds_ring": is_a_picture("of an environment that excludes this one"),
    # ds_ring/models/PATCHES.md
    '@patch(ENGINE, "step"': only_reads("run_report.py's; tests/unit/test_patches.py applies such"),
    '.venv/bin/python -c "from ds_ring.patches': tables_of_changes,
}

# Numbers of a measurement's kind that are none, by the words that their row or paragraph begins with.
NOT_MEASURED: dict[tuple[str, str], str] = {
    ("configs/README.md", "| `hardware/a100.yaml`"): "its name",
    ("configs/README.md", "- `chunk_bytes`"): "a default",
    ("configs/README.md", "- `stage_bytes`"): "a default",
    ("configs/README.md", "- `true` means tiles"): "a default",
    ("configs/README.md", "- Batches are divided"): "a threshold of the code",
    ("launcher/README.md", "| `peak, of 65.9"): "constants of the planner",
    ("launcher/README.md", "| `transfers hide`"): "a threshold of the code",
    ("launcher/README.md", "| `memory to spare`"): "thresholds of the code",
    ("tools/README.md", "| LongNet, 8 ranks"): "counted in a plan, the same everywhere; the row has the call",
    ("ds_ring/NOTES.md", "| the cost of a layout"): "a threshold of the code",
    ("ds_ring/NOTES.md", "| how large tables are"): "a bound of the code",
}  # fmt: skip


def run_block(place: Place, block: Block) -> None:
    entries = [run for key, run in BLOCKS.items() if block.first_line.startswith(key)]
    assert len(entries) == 1, f"{block.document}, line {block.line}: say in BLOCKS how this block is run"
    entries[0](place, block.text)


def by_day_or_night(block: Block) -> Any:
    """README and the tutorial by day; the others at night, with README's two commands, the start of the
    tutorial's script and two of its blocks that train. By day scripts run on ranks that have torch loaded.
    """
    started = "DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 --log_level"
    slow = ("python3 -m venv .venv && ", started, "# samples of 100 to 1000", "# the loss of each whole")
    quick = block.document in ("README.md", "ds_ring/TUTORIAL.md") and not block.first_line.startswith(slow)
    name = f"{block.document}:{block.first_line[:40]}"
    return pytest.param(block, id=name, marks=() if quick else pytest.mark.night)


@pytest.mark.parametrize("block", map(by_day_or_night, blocks()))
def test_block_does_what_its_document_says(place: Place, block: Block) -> None:
    run_block(place, block)


@pytest.mark.parametrize("key", BLOCKS)
def test_entry_has_its_block(key: str) -> None:
    assert block_of(key)


def test_no_fence_is_missed() -> None:
    fences = sum(
        line.startswith(("```", "~~~"))
        for document in TEXTS
        for line in (ROOT / document).read_text().splitlines()
    )
    assert fences == 2 * len(blocks())


def test_unknown_blocks_fail(place: Place) -> None:
    with pytest.raises(AssertionError, match="say in BLOCKS how this block is run"):
        run_block(place, Block("README.md", 1, "bash", "echo new\n"))


@pytest.mark.parametrize(("document", "command"), inline_commands())
def test_inline_command_is_understood(document: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_command(command, monkeypatch)


def leads_somewhere(document: str, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = ((ROOT / document).parent / path).resolve() if path else ROOT / document
    return file.exists() and (not anchor or anchor in anchors(file))


@pytest.mark.parametrize(("document", "target"), links())
def test_link_leads_somewhere(document: str, target: str) -> None:
    assert leads_somewhere(document, target)


@pytest.mark.parametrize("target", ["GONE.md", "TUTORIAL.md", "ds_ring/TUTORIAL.md#9-gone", "#gone"])
def test_a_dead_link_is_noticed(target: str) -> None:
    assert leads_somewhere("README.md", "ds_ring/TUTORIAL.md#3-your-own-model")
    assert not leads_somewhere("README.md", target)


def test_every_text_is_read() -> None:
    assert sorted(TEXTS) == sorted(build_site.TEXTS), "test_build_site.py compares these with git's"


@pytest.mark.parametrize("document", TEXTS)
def test_figure_has_its_command_and_date(document: str) -> None:
    found = figures(document, (ROOT / document).read_text())
    starts = [start for name, start in NOT_MEASURED if name == document]
    assert all(any(one.text.startswith(start) for one in found) for start in starts), (
        "no such figure any more"
    )
    lacking = [
        f"{document}:{one.line} lacks {one.lacks()}: {one.text[:80]}"
        for one in found
        if one.lacks() and not one.text.startswith(tuple(starts))
    ]
    assert not lacking, "write it beside the figure, or the reason in NOT_MEASURED:\n" + "\n".join(lacking)


RUN = "`python tools/soak.py`"
FIGURES: dict[str, tuple[str, list[str]]] = {
    "nothing": (f"It takes 3.2 s.\n\n## Next\n\n{RUN}, 1 November 2026\n", ["a command or a test"]),
    "a command": (f"It takes 3.2 s ({RUN}).\n", ["a date"]),
    "both": (f"It takes 3.2 s ({RUN}, 1 November 2026).\n", [""]),
    "a test": ("Errors are below 2e-6 (`pytest tests/dist`).\n", [""]),
    "a block": ("```bash\npython tools/soak.py\n```\n\n0.97 of it, 1 November 2026.\n", [""]),
    "items": (f"- 12 MiB ({RUN}, 1 November 2026)\n- 13 MiB\n", ["", "a command or a test"]),
    "rows": (f"| a |\n|---|\n| 5 %, {RUN}, 1 November 2026 |\n| 6 % |\n", ["", "a command or a test"]),
    "a table": (f"{RUN}, 1 November 2026:\n\n| a |\n|---|\n| 5 % |\n", [""]),
    "evidence": ("1.5e-7, [see](tools/README.md#memory).\n", [""]),
    "none": ("Version 2.13.0, 2 ranks, `at 3 s`, torch 2.15, T = 512.\n", []),
}  # fmt: skip


@pytest.mark.parametrize("case", FIGURES)
def test_a_figure_without_its_command_or_date_is_noticed(case: str) -> None:
    text, lacks = FIGURES[case]
    assert [one.lacks() for one in figures("README.md", text)] == lacks


@pytest.mark.parametrize("document", TEXTS)
def test_figures_are_those_of_the_pages_that_commands_write(document: str) -> None:
    """How many types of models are exact, and what a GPU has run."""
    wrong = read_results().contradictions(document, (ROOT / document).read_text())
    assert not wrong, "\n".join(wrong)


# What a page says, what a document then says wrongly, and the document.
CONTRADICTIONS = {
    "exact types": ("CHANGELOG.md", "191 of the 196", "184 of the 196"),
    "types": ("tools/README.md", "| 196 causal types", "| 189 causal types"),
    "a table": ("ds_ring/README.md", "| 196 | 191 | 3 |", "| 196 | 196 | 3 |"),
    "packed": ("ds_ring/README.md", "| 196 | 187 | 7 |", "| 196 | 191 | 7 |"),
    "trees": ("ds_ring/README.md", "[172 of 189 types are exact]", "[191 of 196 types are exact]"),
    "no GPU": ("README.md", "**One GPU has run it**", "**No GPU has run it**"),
    "two GPUs": ("README.md", "**One GPU has run it**", "**Two GPUs have run it**"),
    "another GPU": ("ds_ring/kernels/flash/README.md", "One H200 ran it", "One B200 ran it"),
    "a transport": ("ds_ring/transports/README.md", "## Limits\n", "`ring` has not run on a GPU.\n"),
    "a folder": ("ds_ring/kernels/flash/README.md", "One H200 ran it", "It has not run on a GPU"),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_figure_that_is_not_the_pages_is_noticed(what: str) -> None:
    document, right, wrong = CONTRADICTIONS[what]
    text = (ROOT / document).read_text()
    assert text.count(right) == 1
    assert len(read_results().contradictions(document, text.replace(right, wrong))) == 1


def rows_below(document: str, head: str) -> list[list[str]]:
    """Return the cells of the table that begins with a head, this included, without emphasis."""
    lines = (ROOT / document).read_text().replace("**", "").split(head, 1)[1].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in (head + lines[0], *lines[2:])]


def is_repeated(peers: list[list[str]], speeds: list[list[str]]) -> bool:
    """Whether README's two tables have the figures of the pages from which they are."""
    evidence = {row[0]: iter(row) for row in rows_below("tools/README.md", "| T | SDPA")}
    for name, *cells in speeds[1:]:
        words = {*name.replace(",", "").split()}
        key = max((key for key in evidence if {*key.split()} <= words), key=len)
        if not all(cell in evidence[key] for cell in cells if cell):  # in the same order
            return False
    page = rows_below("tools/results/conformance.md", "| peer |")
    columns = [next(i for i, cell in enumerate(page[0]) if name in cell) for name in peers[0][1:]]
    for name, *cells in peers[1:]:
        row = next(row for row in page if {*name.replace(",", "").split()} <= {*row[0].split()})
        for cell, column in zip(cells, columns, strict=True):
            if not {*cell.split()} <= {*row[column].replace(";", "").split(), "dk,", "dv"}:
                return False
    return True


def test_readme_repeats_the_figures_of_the_pages() -> None:
    speeds, peers = rows_below("README.md", "| | ds_ring |"), rows_below("README.md", "| | causal |")
    assert len(speeds) == 6 == len(peers) and is_repeated(peers, speeds)
    assert not is_repeated(peers, [speeds[0], ["4096 tokens", "1.29", "1.14"]])
    assert not is_repeated([peers[0], ["yunchang 0.6.4, zigzag", *["exact"] * 5]], speeds)


@pytest.mark.parametrize("document", OF_THE_CODE)
def test_files_and_names_in_them_are_there(document: str) -> None:
    """Files of ds_ring/ and launcher/ are named from there, others from the top or from beside the document.

    "`NAME` in `file.py`" is looked up, and in the table of patches "`file.py`: `NAME`".
    """
    text = (ROOT / document).read_text()
    folders = (ROOT, ROOT / "ds_ring", ROOT / "launcher", (ROOT / document).parent)
    for name, path in re.findall(r"(?:`(\w+)` in )?`([\w/]+/\w+\.py)`", text):
        files = [folder / path for folder in folders if (folder / path).is_file()]
        assert files, f"{document} names {path}"
        assert not name or re.search(rf"\b{name}\b", files[0].read_text()), f"{document}: no {name} in {path}"
    for path, name in re.findall(r"`([\w/]+\.py)`: `(?:\w+\.)?(\w+)`", text):
        files = list((ROOT / "ds_ring").rglob(path))
        assert any(re.search(rf"(def|class) {name}\b", file.read_text()) for file in files), (path, name)


LONGEST_SENTENCE, LONGEST_CELL = 25, 12  # words


@pytest.mark.parametrize("document", TEXTS)
def test_sentences_and_cells_are_short(document: str) -> None:
    sentences, cells = prose((ROOT / document).read_text())
    long = [one for one in sentences if words(one) > LONGEST_SENTENCE]
    long += [one for one in cells if words(one) > LONGEST_CELL]
    assert not long, "\n\n".join(f"{words(one)} words: {one}" for one in long)


@pytest.mark.parametrize("document", TEXTS)
def test_every_table_has_a_head(document: str) -> None:
    """(A blank line cut three keys off the table of the cluster YAML.)"""
    assert rows_without_head((ROOT / document).read_text()) == []


def test_a_table_that_a_blank_line_cuts_is_noticed() -> None:
    table = "text\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert rows_without_head(f"{table}\n```bash\n| no | table |\n```\n") == []
    assert rows_without_head(f"{table}\n| 3 | 4 |\n| 5 | 6 |\n") == ["| 3 | 4 |"]


def test_a_long_sentence_and_a_long_cell_are_noticed() -> None:
    text = "# A heading of `code`\n\nOne [two](three) `four five`. Six\nseven: 8.\n\n- Nine.\n- Ten `a. B`\n"
    text += "\n```\nno word\n```\n\n| a b | c |\n|---|---|\n| `d e` f | |\n"
    sentences, cells = prose(text)
    assert [words(one) for one in sentences] == [3, 3, 1, 2]
    assert [words(one) for one in cells] == [2, 1, 0, 0, 2, 0]


# Of pip, torch, accelerate, Python, its argparse and the system, and a folder of torch's.
MESSAGES_OF_OTHERS = {
    "No matching distribution found for ds_ring",
    "requires a different Python",
    "module 'ds_ring' has no attribute",
    "conflicting dependencies",
    "Using the Trainer with PyTorch requires accelerate",
    "No module named 'mpi4py'",
    "unrecognized arguments: --local_rank",
    "unexpected keyword argument 'position_ids'",
    "~/.cache/torch_extensions",
    "Address already in use",
    "stack expects each tensor to be equal size",
    "Connection closed by peer",
    "CUDA out of memory",
    "A module has unknown inputs or outputs type",
}


@pytest.mark.night
def test_messages_to_search_for_are_raised() -> None:
    """Each part between dots of a message in TROUBLESHOOTING's first column is in a text of the code."""
    raised = messages()

    def is_raised(text: str) -> bool:
        return all(any(part.strip() in one for one in raised) for part in text.split("..."))

    rows = [row for row in (ROOT / TROUBLESHOOTING).read_text().splitlines() if row.startswith("| ")]
    quoted = {text for row in rows for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])}
    gone = [text for text in quoted - MESSAGES_OF_OTHERS if not is_raised(text)]
    assert not gone, f"{TROUBLESHOOTING} quotes what no message says any more: {gone}"
    assert len(quoted) > 60 and quoted >= MESSAGES_OF_OTHERS
    assert not is_raised("expected a ... that nobody asks for")


# To learn, look up, understand and fix: all but the pages of single folders.
MOST_WORDS = 24_000  # by `wc -w`
PAGES = (
    *("README.md", "MIGRATING.md", "CHANGELOG.md", "CONTRIBUTING.md", "launcher/README.md", TROUBLESHOOTING),
    *(f"ds_ring/{name}.md" for name in ("README", "TUTORIAL", "DESIGN", "NOTES", "READING")),
    *("configs/README.md", "tools/README.md"),
)


def total_words(texts: Iterable[str]) -> int:
    return sum(len(text.split()) for text in texts)


def test_the_pages_together_are_short() -> None:
    assert len({*PAGES}) == 13 and {*PAGES} <= {*TEXTS}
    texts = [(ROOT / page).read_text() for page in PAGES]
    assert total_words(texts) <= MOST_WORDS, "move or remove what another page says, too"
    assert total_words(["| a | b |\n\nOne two.", ""]) == 7
    assert total_words([*texts, "word " * MOST_WORDS]) > MOST_WORDS


def test_readme_and_changelog_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    versions = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert all(len(version.strip().splitlines()) <= 30 for version in versions)

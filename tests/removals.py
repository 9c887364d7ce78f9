"""Capabilities that a deletion removes: their places, and a copy of the package without one.

`removed` deletes a capability's files and its tests from a copy of the tree, and its rows: lines of
`__init__.pyi` and of pyproject.toml, and entries of registry.py's tables that name one of its modules.
Nothing else is changed. tests/integration/test_removals.py runs what is left. `python -m tests.removals`
prints the table: files and lines of each capability, the files of its tests, lines of the core that name it.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests import test_architecture as architecture

ROOT = Path(__file__).resolve().parents[1]

# For the processes of a copy, by PYTHONPATH: an editable install finds in the original what the copy lacks.
_SITE = """import sys

sys.meta_path = [one for one in sys.meta_path if "__editable__" not in getattr(one, "__module__", "")]
"""


class Capability(NamedTuple):
    """Describe what is deleted, and what the core may say of it.

    Attributes:
        places: modules and packages below ds_ring.
        tests: files and folders below tests/ that go along, beside the folders of the same names.
        with_it: capabilities that are made of this one, and go with it.
        words: regular expression for its names in the code of the core.
        named: lines of the core that name it all the same, its row in registry.py aside; at most 5.
        why: the reason for these lines.
        family: of an attention variant of transformers models, a model that needs it.
        reason: a part of the reason for which that model is refused then; "" if it is exact without it.
        other: a model of another variant, which still trains.
    """

    places: tuple[str, ...]
    tests: tuple[str, ...] = ()
    with_it: tuple[str, ...] = ()
    words: str = ""
    named: int = 0
    why: str = ""
    family: str = ""
    reason: str = ""
    other: str = ""


CAPABILITIES = {
    "kernel flash": Capability(("kernels.flash",), words=r"\bflash", named=2,
        why="help texts of the JSON's kernel and kernel_options"),
    "kernel flex": Capability(
        ("kernels.flex",),
        ("gpu/test_flex.py",),
        words=r"\bflex\b|\bFlexKernel|kernels\.flex",
        named=2,
        why="help texts of the JSON's kernel and block_size",
    ),
    "CUDA": Capability(("cuda",),
        ("dist/test_checkpoint.py", "dist/test_first_pass.py", "dist/test_mesh_groups.py",
            "unit/ring/test_merge.py", "integration/test_cuda_code.py", "gpu"),
        words=r"ds_ring\.cuda|(?i:\btriton)|\bCudaStreams|\babort_groups"),
    "kernel cpu": Capability(("kernels.cpu",), words=r"\bCpuKernel|kernels\.cpu|\bcpu_bytes"),
    "transport pull": Capability(("transports.pull",), words=r"\btransports\.pull|\bPullExchange"),
    "transport reproducible": Capability(("transports.reproducible",), ("unit/decode/test_cache_layout.py",),
        with_it=("batch invariance",), words=r"\breproducible"),
    "batch invariance": Capability(("contrib.batch_invariant",),
        words=r"\bbatch_invariant|\bgenerated_logprobs"),
    "invariant steps": Capability(("contrib.batch_invariant.steps",), words=r"\bbatch_invariant\.steps"),
    "invariant choices": Capability(("contrib.batch_invariant.chosen",),
        words=r"\bbatch_invariant\.chosen"),
    "transport tiles": Capability(("transports.tiles",), words=r"\btransports\.tiles|\bTilePass|\bTileGrid"),
    "transport all_gather": Capability(("transports.all_gather.gather_pass",),
        words=r"\bGatherPass|transports\.all_gather"),
    "cross attention": Capability(("layers.cross",), ("dist/layers/test_cross_attention.py",), ("diffusers",),
        words=r"\bcross_attention|\bCrossAttention|layers\.cross"),
    "selected keys": Capability(
        ("layers.selection", "layers.selection.rows"),
        ("dist/layers/test_selection.py", "dist/test_chosen_key_generation.py"),
        with_it=("invariant choices", "MoBA and NSA", "variant compressed", "variant indexed",
            "variant key_terms"),
        words=r"\bring_select|\bselected_attention|layers\.selection",
    ),
    "MoBA and NSA": Capability(("layers.sparse",), ("dist/layers/test_sparse.py",),
        with_it=("variant indexed_blocks",), words=r"(?i)\bmoba|\bnsa|layers\.sparse"),
    "distance bias": Capability(("layers.distance_bias",), ("dist/layers/test_distance_bias.py",),
        with_it=("variant distance_bias", "variant prompt", "variant relative_keys"),
        words=r"\bDistanceBias|\bProfile|layers\.distance_bias"),
    "latents": Capability(("layers.latents",), ("dist/layers/test_latents.py",), with_it=("variant latents",),
        words=r"(?i)\blatent_|\blatents?\.|LatentKernel|up_projection|layers\.latents"),
    "scans and halos": Capability(
        ("layers.scan", "layers.scan.simulation"),
        ("dist/layers/test_scan.py", "dist/test_plan_bytes.py"),
        with_it=("MoBA and NSA", "variant compressed", "variant recurrent",
            "serial states", "n-gram tables", "whole heads"),
        words=r"\bring_scan|\bhalos?\b|\bshift_sequence|layers\.scan",
    ),
    "serial states": Capability(("layers.serial",), with_it=("invariant steps",),
        words=r"\bserial_scan|layers\.serial"),
    "n-gram tables": Capability(("layers.ngrams", "layers.ngrams.sharded_tables"),
        words=r"(?i)\bngram|\bsharded_rows|layers\.ngrams"),
    "whole heads": Capability(("contrib.whole_heads", "contrib.whole_heads"),
        words=r"\bwhole_heads|\bstates_by_heads"),
    "decode and generation": Capability(
        (
            "decode", "decode.generation", "decode.ring_cache",
            "decode.encoder_decoder", "decode.selection",
            "decode.cross",
        ),
        (
            "dist/test_generation.py", "dist/contrib/encoder_decoder/test_generation.py",
            "dist/test_chosen_key_generation.py",
        ),
        with_it=("batch invariance",),
        words=r"\bdecode_attention|\breplicated|\bdecode\.",
        named=1,
        why="a refusal of queries that are no shard says what takes them",
    ),
    "simulation": Capability(("simulation",),
        ("unit/patterns/test_pattern_rounds.py", "unit/test_simulate.py"), words=r"\bsimulat"),
    "saved results": Capability(("memory.saved_results.keep_results",), ("dist/test_checkpointing.py",),
        words=r"saved_results|\bKeepResults"),
    "offload to the host": Capability(("memory.host", "memory.host.offloaded_checkpoints"),
        words=r"\bhost_memory|\bHostMemory|\bOnHost|\bHeadStream|memory\.host"),
    "tiles over tokens": Capability(
        ("memory.tiles", "models.tiles"),
        ("dist/test_long_sequence.py",),
        words=r"\btiled_(call|loss|mlp|layers|head)\b|\bDeferredLogits|memory\.tiles",
        named=3,
        why="keys of the JSON's long_sequence, and whether one of them is on",
    ),
    "measure": Capability(
        ("measure", "measure"),
        ("dist/test_rank_speeds.py", "dist/test_run_report.py", "unit/launcher/profile"),
        with_it=("simulation",),
        words=r"\bmeasure\.|\btracing\b|\bTrace\b",
    ),
    "torch.compile": Capability(("contrib.compile",), ("dist/test_backend.py",),
        words=r"integrations\.compile|\bbackend_of\b"),
    "checkpoints": Capability(
        ("checkpoint",),
        (
            "dist/test_checkpoint.py", "dist/test_resize.py", "dist/test_resume_otherwise.py",
            "dist/test_background_save.py", "dist/test_checkpoint_folder.py", "unit/test_relaunch.py",
        ),
        words=r"integrations\.checkpoint",
    ),
    "trainers": Capability(("engines.trainers",), ("dist/test_trainers.py", "dist/test_trainer_logs.py"),
        with_it=("training commands",), words=r"(?i)\baccelerate\b|\btrl\b"),
    "dilated attention": Capability(
        ("patterns.dilated",),
        with_it=("MultiheadRingAttention",),
        words=r"\bDilated\b|\bResidue|patterns\.dilated|segment_lengths|\bLongNet",
        named=1,
        why="the prefix pattern refuses the key segment_lengths",
    ),
    "layout balanced": Capability(
        ("layouts.balanced.pieces",),
        words=r"\bbalanced\b|\beven_pieces",
        named=3,
        why="the name of layouts of pieces, which the core has; two refusals advise it",
    ),
    "block diffusion": Capability(("contrib.diffusion",), words=r"\bdiffusion_|contrib\.diffusion"),
    "drafters": Capability(("contrib.drafter",), words=r"\bdraft_|\bdrafter_|contrib\.drafter"),
    "private keys": Capability(("patterns.private", "patterns.private.attention"),
        with_it=("block diffusion", "drafters"),
        words=r"\bBlockDiffusion|\bDrafter|\bPrivate|patterns\.private|private_keys"),
    "slices": Capability(("patterns.slices",), words=r"\bSlices\b|\bSliceKeys|patterns\.slices"),
    "functions of pairs": Capability(
        ("patterns.captured",),
        ("dist/test_mask_mod.py", "dist/test_beyond_softmax.py"),
        words=r"\bMaskMod\b|\bTraced\b|\bHeadMask\b|patterns\.captured",
        named=1,
        why="a refusal of | advises it",
    ),
    "diffusers": Capability(("contrib.diffusers",), words=r"\bdiffusers"),
    "Megatron": Capability(("contrib.megatron",), words=r"(?i)\bmegatron"),
    "encoder-decoders": Capability(("contrib.encoder_decoder",),
        ("dist/contrib/batch_invariant/test_pairs.py",), words=r"(?i)\bdecoder|encoder_decoder",
        family="t5", reason="it is an encoder-decoder", other="bloom"),
    "images": Capability(("contrib.images",), with_it=("sound",), words=r"\bimage|\bvideo"),
    "sound": Capability(("contrib.sound",), words=r"\bsound"),
    "trees and policies": Capability(("contrib.policies",),
        words=r"\bTreeBatch|\btree_batch|contrib\.policies"),
    "training commands": Capability(("contrib.training_commands",), words=r"(?i)\bswift|llama_?factory"),
    "ring-flash-attn's functions": Capability(("contrib.ring_flash_attn",), with_it=("diffusers", "Megatron"),
        words=r"\bring_flash_attn"),
    "MultiheadRingAttention": Capability(("contrib.multihead",), words=r"\bmultihead|MultiheadRing"),
    "codec float8": Capability(("codecs.float8", "codecs.float8_cuda"), ("gpu/test_float8.py",),
        words=r"(?i)\bfloat8|\bcodecs\.float8"),
}  # fmt: skip
_BYPASSES = "its attention bypasses transformers' attention interface"
_VARIANTS = {
    "eager_attention": ("bloom", _BYPASSES, "t5"),
    "recurrent": ("qwen3_next", _BYPASSES, "deepseek_v4"),
    "compressed": ("deepseek_v4", "its layers compressed_sparse_attention", "deepseek_v32"),
    "indexed": ("deepseek_v32", "its layers indexed_attention mix tokens otherwise", "deepseek_v4"),
    "indexed_blocks": ("minimax_m3_vl_text", "its layers minimax_m3_sparse", "deepseek_v32"),
    "latents": ("deepseek_v3", "", "mamba2"),
    "relative_bias": ("t5", _BYPASSES, "bart"),
    "distance_bias": ("inkling_text", "expected no position_bias", "t5"),
    "relative_keys": ("xlnet", _BYPASSES, "t5"),
    "prompt": ("cpmant", _BYPASSES, "t5"),
    "key_terms": ("doge", "expected a model that hands its mask to attention as it is", "llama4_text"),
    "query_scale": ("llama4_text", "config.attn_temperature_tuning scales queries", "doge"),
}
VARIANTS_FOLDER = "contrib.families"
for _name, (_family, _reason, _other) in _VARIANTS.items():
    CAPABILITIES[f"variant {_name}"] = Capability(
        (f"{VARIANTS_FOLDER}.{_name}",), (f"dist/variants/test_{_name}.py",),
        ("whole heads", "invariant steps") if _name == "recurrent" else (),
        words=rf"\bvariants\.{_name}\b", family=_family, reason=_reason, other=_other,
    )  # fmt: skip


def whole(name: str) -> tuple[str, ...]:
    """Return a capability and those that go with it."""
    found = [name]
    for one in found:
        found.extend(other for other in CAPABILITIES[one].with_it if other not in found)
    return tuple(found)


def places_of(name: str) -> tuple[str, ...]:
    return tuple(place for one in whole(name) for place in CAPABILITIES[one].places)


def files_of(name: str) -> list[Path]:
    """Return the modules of a capability, without those that go with it."""
    places = CAPABILITIES[name].places
    return [
        path
        for module, path in architecture.MODULES.items()
        if any(architecture.is_in(module, place) for place in places)
    ]


def own_tests_of(name: str) -> list[Path]:
    """Return the files and folders of tests that go with a capability, without those that go with it."""
    found = [ROOT / "tests" / one for one in CAPABILITIES[name].tests]
    for place in CAPABILITIES[name].places:
        path = place.replace(".", "/")
        parent, _, last = path.rpartition("/")
        for kind in ("unit", "dist"):
            found += [ROOT / "tests" / kind / path, ROOT / "tests" / kind / parent / f"test_{last}.py"]
    return [path for path in found if path.exists()]


def still_needing(name: str) -> list[str]:
    """Return the imports of a capability by modules that stay when it goes."""
    places, found = places_of(name), []
    for module in architecture.MODULES:
        if module and not any(architecture.is_in(module, place) for place in places):
            imported = architecture.own_imports_of(module)
            needs = sorted(one for one in imported if any(architecture.is_in(one, p) for p in places))
            found += [f"{module} imports {one}" for one in needs]
    return found


class CodeLine(NamedTuple):
    """A line of code of the core, without its comment."""

    place: str
    code: str


@cache
def code_of_the_core() -> tuple[CodeLine, ...]:
    """Return the lines of code of the core, comments and docstrings left out."""
    parts = [part for floor in architecture.CORE for part in floor]
    found = []
    for module, path in architecture.MODULES.items():
        if module == "registry" or not any(architecture.is_in(module, part) for part in parts):
            continue
        prose = {
            number
            for node in architecture.nodes_of(architecture.tree_of(path))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if number not in prose:
                found.append(CodeLine(f"{module}, line {number}", line.split("#", 1)[0]))
    return tuple(found)


def core_lines(name: str) -> list[str]:
    """Return the lines of code of the core that name a capability."""
    word = re.compile(CAPABILITIES[name].words)
    return [f"{place}: {code.strip()}" for place, code in code_of_the_core() if word.search(code)]


def copy_tree(folder: Path) -> None:
    """Copy what git tracks, and what is new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for file in listed.splitlines():
        if (ROOT / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)


def removed(name: str, folder: Path) -> Path:
    """Make a copy of the tree without a capability, and return it."""
    copy_tree(folder)
    places = places_of(name)
    for place in places:
        path = folder / "ds_ring" / place.replace(".", "/")
        _delete(path if path.is_dir() else path.with_suffix(".py"))
    for test in {test.relative_to(ROOT) for part in whole(name) for test in own_tests_of(part)}:
        _delete(folder / test)
    _remove_rows(folder, places)
    (folder / "sitecustomize.py").write_text(_SITE)
    (folder / "ds_ring_launcher").symlink_to("launcher")  # its installed name
    return folder


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _remove_rows(folder: Path, places: tuple[str, ...]) -> None:
    """Remove the rows that name a module of these places."""
    named = re.compile("|".join(rf"\bds_ring\.{re.escape(place)}\b" for place in places))
    for file in ("pyproject.toml", "ds_ring/__init__.pyi"):
        lines = (folder / file).read_text().splitlines()
        (folder / file).write_text("\n".join(line for line in lines if not named.search(line)) + "\n")
    table = folder / "ds_ring/models/variants/__init__.py"
    inside = [place.rpartition(".")[2] for place in places if ".variants." in place]
    lines = table.read_text().splitlines()
    rows = [line for line in lines if line.startswith(tuple(f'    "{name}.' for name in inside))]
    assert len(rows) == len(inside), f"expected a row for each of {inside}, got {rows}"
    rows += [line for line in lines if named.search(line)]
    table.write_text("\n".join(line for line in lines if line not in rows) + "\n")
    registry = folder / "ds_ring/registry.py"
    text = registry.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None and named.search(ast.unparse(value)):
                    for number in range(key.lineno - 1, value.end_lineno or value.lineno):
                        lines[number] = ""
    registry.write_text("\n".join(lines) + "\n")


def table() -> str:
    """Return a row for each capability: files, their lines, files of tests, and lines of the core."""
    rows = ["| capability | files | lines | files of tests | goes with it | named by the core |"]
    rows += ["|---|---|---|---|---|---|"]
    for name, one in CAPABILITIES.items():
        lines = sum(len(path.read_text().splitlines()) for path in files_of(name))
        tests = set()
        for path in own_tests_of(name):
            tests |= {path} if path.is_file() else set(path.rglob("test_*.py"))
        others = ", ".join(other for other in whole(name) if other != name)
        named = str(len(core_lines(name))) + (f" ({one.why})" if one.why else "")
        rows.append(f"| {name} | {len(files_of(name))} | {lines:,} | {len(tests)} | {others} | {named} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())

"""The architecture as tables, checked against the syntax trees: who may import whom, and who may do what.

A module is judged by its text, not by importing it: an import inside a function counts like any other.
"""

from __future__ import annotations

import ast
import fnmatch
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import ds_ring
from ds_ring.config.section import RingConfig
from ds_ring.masks.pattern import Pattern
from ds_ring.plugin import PUBLIC
from ds_ring_launcher.cluster.cluster_file import read_cluster
from ds_ring_launcher.plan.hardware import read_hardware

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up. A module imports from its own layer or a lower one; a package stands for all in it.
CORE = [
    ["errors", "error_origins", "limits", "plugin", "compat"],
    ["masks"],
    ["config"],
    ["schedule"],
    ["health"],
    ["comm"],
    ["kernels.interface", "kernels.pairs", "kernels.select",
        "kernels.reference", "kernels.workspace", "kernels.trials"],
    ["ring"],
    ["ops"],
    ["api", "attention_module"],
]  # fmt: skip
CAPABILITIES = [
    ["layouts", "patterns", "kernels.cpu", "kernels.flash", "kernels.flex", "cuda", "transports",
        "layers", "decode", "memory", "measure", "simulation"],
    ["patches", "written_files", "data", "models", "engines", "start", "checkpoint",
        "measure.run_report", "measure.step_metrics",
        "memory.tiles.models_head", "memory.tiles.models_layers",
        "memory.host.offloaded_checkpoints", "layers.selection.rows", "layers.ngrams.sharded_tables"],
    ["contrib", "decode.generation", "decode.ring_cache"],
]  # fmt: skip
LAYERS = [*CORE, *CAPABILITIES]

# Parts of the runtime that do not import each other, and the modules that may import them.
SEPARATE = ["kernels", "comm.exchange", "ring.merge"]
IMPORTERS = {
    "ring.ring_pass": set(SEPARATE),
    "ring.buffers": {"kernels"},  # rows of a part that returned
    "ring.accumulator": {"kernels", "ring.merge"},  # the sums of a pass
    "transports.owner_walk": {"comm.exchange"},  # a way to exchange
    "transports.all_gather.gather_pass": {"comm.exchange", "kernels", "ring.merge"},  # the yardstick
    "transports.reproducible.blocks": {"kernels", "ring.merge"},
    "transports.reproducible.sharded": {"comm.exchange", "kernels", "ring.merge"},
    "transports.reproducible.few_queries": {"kernels", "ring.merge"},
    "ops.ring_op": {"kernels", "ring.merge"},  # dtypes and operands
    "ops.passes": {"kernels"},  # in annotations
    "comm.collective": {"comm.exchange"},  # compares headers
    "decode.replicated": {"comm.exchange", "kernels", "ring.merge"},
    "decode.replicated_op": {"kernels"},  # whether a pass compiles
    "layers.selection.select": {"kernels"},
    "layers.selection.selected_pass": {"kernels", "ring.merge"},
    "layers.selection.max_logits": {"ring.merge"},  # the accumulators' dtype
    "ops.context": {"comm.exchange", "kernels"},  # makes both, uses neither
    "ops.prepare": {"kernels"},  # chooses them
    "ops.extra_operand": {"kernels"},  # may wrap one
    "ops.finite": {"kernels"},  # a kernel around another one
    "cuda.patience": {"kernels"},  # asks whether one compiles
    "memory.tiles.tiled_loss": {"ring.merge"},  # the same
    "memory.tiles.tiled_call": {"ring.merge"},  # the accumulators' dtype
    "layers.sparse.moba": {"ring.merge"},  # the same
    "layers.scan.context": {"comm.exchange"},
    "data.batch_sharder": {"comm.exchange"},  # so that its collectives are watched
    "contrib.compile.graph_sharding": {"comm.exchange"},
    "data.loss": {"comm.exchange", "ring.merge"},  # the accumulators' dtype
    "measure.step_metrics": {"comm.exchange"},  # the limit of a sum
    "data.dynamic_ring.sample_times": {"comm.exchange"},  # measures it
    "data.dynamic_ring.intervals": {"comm.exchange"},  # collectives of rings without groups
    "decode.generation": {"comm.exchange"},  # the prompt's last logits, to all ranks
    "contrib.images.model": {"comm.exchange"},  # features, to the ranks of their tokens
    "decode.ring_cache": {"comm.exchange"},  # a convolution's last inputs
    "layers.latents.kernel": {"kernels", "ring.merge"},  # a kernel around another one
    "layers.distance_bias.kernel": {"kernels", "ring.merge"},  # a kernel; the accumulators' dtype
    "simulation.simulate": {"kernels", "ring.merge"},  # chooses; the accumulators' dtype
    "simulation.rank": {"comm.exchange", "kernels"},  # the tokens of what stays at home
}
ON_THE_CPU = {"contrib.policies.trees"}  # index tensors of the CPU
PASSES = {
    "ring.ring_pass", "transports.all_gather.gather_pass", "decode.replicated",
    "transports.reproducible.sharded", "transports.reproducible.few_queries",
}  # fmt: skip
MAY_IMPORT_A_PASS = {
    "ops.ring_op",
    "decode.replicated_op",
    "simulation.rank",
}  # for real ranks, and for virtual ones

# A package from outside, and the places that may import it.
OUTSIDE = {
    "deepspeed": (
        "compat.deepspeed",
        "engines",
        "start",
        "checkpoint",
        "contrib.compile",
        "measure",
        "memory.tiles",
    ),
    "transformers": (
        "compat.transformers",
        "models",
        "engines.trainers",
        "contrib.families",
        "memory.tiles.models_head",
        "memory.tiles.models_layers",
        "memory.host.offloaded_checkpoints",
        "decode",
        "contrib.ring_flash_attn",
        "contrib.encoder_decoder",
        "contrib.images",
        "contrib.sound",
        "contrib.diffusion",
    ),
    "accelerate": ("engines.trainers",),
    "megatron": ("contrib.megatron",),
    "diffusers": ("contrib.diffusers",),
}
NEVER_IN_ARITHMETIC = {"torch", "deepspeed", "transformers"}
ARITHMETIC = ("masks", "schedule", "patterns", "layouts")  # index arithmetic in numpy
MAY_USE_TORCH = ("patterns.captured", "patterns.private.attention")  # mask functions; a layer
NEVER_IN_DS_RING = {
    "launcher", "ds_ring_launcher", "tools", "tests", "matplotlib", "rich", "yaml",
}  # fmt: skip
APPLICATIONS = {"estimator", "profiling", "tuning"}  # they are launcher/plan and tune

# A secret reaches a rank in no other way that other users of the host cannot see; one variable, one function.
# How many ranks share a node: engines say it in the environment alone.
# Where a launcher wants the figures of a rank, it says in the environment, too.
# Whether ranks may share a GPU is said to NCCL and to torch by the environment alone.
READS_THE_ENVIRONMENT = {
    "data.config_agreement", "data.run_folder", "transports.devices",
}  # fmt: skip

POINT_TO_POINT = {"isend", "irecv", "batch_isend_irecv", "P2POp", "send_object_list", "recv_object_list"}
# Sockets, pipes and the exchange have such methods as well: these count where they are torch.distributed's.
OF_TORCH_DISTRIBUTED = {
    "send", "recv", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all",
    "all_to_all_single", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
}  # fmt: skip
# Methods of a group's backend send as well.
ASKS_FOR_A_BACKEND = {"comm.waiting"}  # which aborts
SENDS = {
    "comm.exchange",
    "compat.torch",
    "cuda.warm_up",
    "ring.naive",
}  # connects the ranks of new groups; for readers


def name_of(path: Path) -> str:
    """`comm.mesh` for ds_ring/comm/mesh.py, `comm` for that package's __init__, "" for ds_ring's."""
    parts = path.relative_to(ROOT / "ds_ring").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): path for path in sorted((ROOT / "ds_ring").rglob("*.py"))}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def imports_of(name: str) -> Iterator[str]:
    """Every dotted name that the module imports, wherever in the file, with `from a import b` as a.b."""
    path = MODULES[name]
    package = ["ds_ring", *name.split(".")] if name else ["ds_ring"]
    if path.name != "__init__.py":
        package.pop()
    for node in nodes_of(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def own_imports_of(name: str) -> frozenset[str]:
    """The modules of ds_ring that the module imports, by their names here; "" is the package itself."""
    return _own_imports_of(name, MODULES[name])


@cache
def _own_imports_of(name: str, path: Path) -> frozenset[str]:
    found = set()
    for imported in imports_of(name):
        parts = imported.split(".")
        if parts[0] != "ds_ring":
            continue
        inner = parts[1:]
        while inner and ".".join(inner) not in MODULES:
            inner.pop()  # the last part is a name inside the module
        found.add(".".join(inner))
    return frozenset(found)


def is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def layer_of(name: str) -> int:
    """Return the layer of the longest part that a module is in."""
    layers = {part: index for index, parts in enumerate(LAYERS) for part in parts if is_in(name, part)}
    assert layers, f"ds_ring.{name} is in no layer: give it a place in LAYERS"
    return layers[max(layers, key=len)]


def is_plugin(name: str) -> bool:
    """A plugin.py names the objects of its folder, wherever they are; nothing but the index imports it."""
    return name.endswith(".plugin")


def imports_go_downward(name: str) -> None:
    if not MODULES[name].stat().st_size or not name or is_plugin(name):
        return
    own_layer = layer_of(name)
    for imported in own_imports_of(name):
        assert imported, f"ds_ring.{name} imports the package itself, which imports everything"
        assert layer_of(imported) <= own_layer, f"ds_ring.{name} imports ds_ring.{imported}, a layer above it"


def parts_of_the_runtime_do_not_import_each_other(name: str) -> None:
    allowed = IMPORTERS.get(name, set())
    for imported in own_imports_of(name) if not is_plugin(name) else ():
        parts = {part for part in SEPARATE if is_in(imported, part) and not is_in(name, part)}
        assert parts <= allowed, (
            f"ds_ring.{name} imports {sorted(parts)}; only {sorted(IMPORTERS)} may, as listed"
        )


def only_autograd_sees_a_pass(name: str) -> None:
    if name not in MAY_IMPORT_A_PASS | PASSES and not is_plugin(name):
        seen = own_imports_of(name) & PASSES
        assert not seen, f"ds_ring.{name} imports {sorted(seen)}; only {sorted(MAY_IMPORT_A_PASS)} may"


def test_no_module_imports_a_plugin() -> None:
    found = [(name, one) for name in MODULES if name for one in own_imports_of(name) if is_plugin(one)]
    assert not found


def test_passes_do_not_know_each_other() -> None:
    for name in PASSES & set(MODULES):
        assert not (own_imports_of(name) & PASSES)


def outside_packages_stay_in_their_place(name: str) -> None:
    roots = {imported.split(".")[0] for imported in imports_of(name)}
    for package, places in OUTSIDE.items():
        assert package not in roots or any(is_in(name, place) for place in places), (
            f"ds_ring.{name} imports {package}; only {places} may"
        )
    assert not (roots & NEVER_IN_DS_RING), f"ds_ring.{name} imports {sorted(roots & NEVER_IN_DS_RING)}"
    if any(is_in(name, part) for part in ARITHMETIC) and not any(is_in(name, part) for part in MAY_USE_TORCH):
        assert not (roots & NEVER_IN_ARITHMETIC), (
            f"ds_ring.{name} is arithmetic: no {sorted(roots & NEVER_IN_ARITHMETIC)}"
        )


def nothing_below_the_launcher_reads_the_environment(name: str) -> None:
    if name in READS_THE_ENVIRONMENT:
        return
    readers = {"environ", "environb", "getenv", "getenvb", "putenv"}
    for node in nodes_of(tree_of(MODULES[name])):
        if isinstance(node, ast.Attribute):
            assert node.attr not in readers, f"ds_ring.{name}, line {node.lineno}: os.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            taken = {alias.name for alias in node.names} & readers
            assert not taken, f"ds_ring.{name}, line {node.lineno}: from os import {taken}"


def arrays_go_to_a_device_without_a_wait(name: str) -> None:
    """A copy of pageable memory to a GPU makes the host wait: `on_device` copies through pinned memory."""
    for node in nodes_of(tree_of(MODULES[name])):
        found: Iterable[ast.AST] = ()
        if isinstance(node, ast.Attribute) and node.attr == "to":
            found = [node.value]
        elif isinstance(node, ast.Subscript):
            found = ast.walk(node.slice)
        for one in found:
            called = ast.unparse(one.func) if isinstance(one, ast.Call) else ""
            assert called not in ("torch.from_numpy", "torch.tensor") or name in ON_THE_CPU, (
                f"ds_ring.{name}, line {one.lineno}: {ast.unparse(node)}; use comm.device_tables.on_device"
            )


# What torch.set_default_device changes, and of these what torch.set_default_dtype does for any arguments.
FACTORIES = {function.__name__ for function in _device_constructors()}
OF_THE_DEFAULT_DTYPE = {
    "empty",
    "empty_strided",
    "eye",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "zeros",
}


def new_tensors_say_where_and_of_what(name: str) -> None:
    """A script may set another default device or dtype: nothing of the library's own depends on them."""
    for node in nodes_of(tree_of(MODULES[name])):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("torch."):
            continue
        function, given = ast.unparse(node.func).removeprefix("torch."), {one.arg for one in node.keywords}
        wanted = {
            name for name, of in (("device", FACTORIES), ("dtype", OF_THE_DEFAULT_DTYPE)) if function in of
        }
        if None not in given:  # else **options may have them
            where = f"ds_ring.{name}, line {node.lineno}: {ast.unparse(node)}"
            assert wanted <= given, f"{where}; say device= (and dtype=)"


def only_the_exchange_sends_from_rank_to_rank(name: str) -> None:
    tree, sends = tree_of(MODULES[name]), name in SENDS
    names = distributed_names(tree)
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            of_torch = any(owner == one or owner.startswith(f"{one}.") for one in names)
            sent = node.attr in POINT_TO_POINT or (of_torch and node.attr in OF_TORCH_DISTRIBUTED)
            asked = node.attr == "_get_backend" and name not in ASKS_FOR_A_BACKEND
            assert not asked and (sends or not sent), (
                f"ds_ring.{name}, line {node.lineno}: only comm/exchange.py sends"
            )
    taken = {
        imported.split(".")[-1] for imported in imports_of(name) if imported.startswith("torch.distributed")
    }
    assert sends or not taken & (POINT_TO_POINT | OF_TORCH_DISTRIBUTED)


@pytest.mark.parametrize(
    "rule",
    [
        imports_go_downward,
        parts_of_the_runtime_do_not_import_each_other,
        only_autograd_sees_a_pass,
        outside_packages_stay_in_their_place,
        nothing_below_the_launcher_reads_the_environment,
        only_the_exchange_sends_from_rank_to_rank,
        arrays_go_to_a_device_without_a_wait,
        new_tensors_say_where_and_of_what,
    ],
    ids=lambda rule: rule.__name__,
)
def test_a_rule_holds_for_every_module(rule: Callable[[str], None]) -> None:
    for name in MODULES:
        rule(name)


# Rows of other packages' classes and dictionaries that say nothing of a version.
NO_VERSION = {
    "hasattr(torch.Tensor, name)": "whether a tensor's attribute is the user's own, in a pickle",
    "hasattr(Tensor, name)": "whether a name is a tensor's at all",
}
NO_PLACE_YET: set[str] = set()
FOREIGN_MODULES = re.compile(r"\b(sys\.modules|import_module|resolve_name|find_spec)\b")
VERSIONS = re.compile(r"\b(__version__|version_info|(version|Version|SpecifierSet)\()")
COMPARES = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq, ast.In, ast.NotIn)


def foreign_names(tree: ast.Module) -> set[str]:
    """The names under which a module has what other packages than Python's and ours export."""
    own = {"ds_ring", "ds_ring_launcher", *sys.stdlib_module_names}
    names = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif (
            isinstance(node, ast.ImportFrom) and not node.level and str(node.module).split(".")[0] not in own
        ):
            names |= {alias.asname or alias.name for alias in node.names}
    return names - own


def version_probes(tree: ast.Module) -> list[str]:
    """Every question of a module whether another package has a name, and every comparison of versions."""
    found, foreign = [], foreign_names(tree)
    for node in nodes_of(tree):
        text = ast.unparse(node) if isinstance(node, (ast.Call, ast.Compare)) else ""
        if isinstance(node, ast.Call) and (
            text.startswith("hasattr(") or (text.startswith("getattr(") and len(node.args) == 3)
        ):
            root = node.args[0]
            while isinstance(root, ast.Attribute):
                root = root.value
            is_foreign = isinstance(root, ast.Name) and root.id in foreign
            if (is_foreign or FOREIGN_MODULES.search(ast.unparse(node.args[0]))) and text not in NO_VERSION:
                found.append(f"line {node.lineno}: {text}")
        elif isinstance(node, ast.Compare) and any(isinstance(sign, COMPARES) for sign in node.ops):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            if any(VERSIONS.search(side) for side in sides):
                found.append(f"line {node.lineno}: {text}")
    return found


def test_only_compat_knows_versions_of_other_packages() -> None:
    for name, path in MODULES.items():
        if not is_in(name, "compat") and name not in NO_PLACE_YET:
            assert not version_probes(tree_of(path)), f"ds_ring.{name}: {version_probes(tree_of(path))}"
    for path in sorted((ROOT / "launcher").rglob("*.py")):
        assert not version_probes(tree_of(path)), f"{path}: {version_probes(tree_of(path))}"


PROBES = """if hasattr(dist, "ring"): pass
x = getattr(torch.nn.attention, "flex", None)
x = getattr(PreTrainedModel, "generate", None)
if torch.__version__ < "2.12": pass
old = Version(version("deepspeed")) >= Version("0.19")
if version("trl") in SpecifierSet("<1"): pass
if deepspeed.__version__ == "0.18.9": pass
x = hasattr(sys.modules.get("transformers"), "X")
x = getattr(import_module("peft"), "Y", None)"""


def test_a_seeded_probe_and_a_seeded_comparison_are_found() -> None:
    good = """
import sys, torch, deepspeed, json
import torch.distributed as dist
from importlib.metadata import version
from packaging.version import Version
from transformers import PreTrainedModel
def f(model, config):
    hasattr(model, "config"), getattr(config, "head_dim", None), getattr(torch, "float32")
    hasattr(sys.flags, "safe_path"), getattr(json, "x", 1), torch.version.hip is not None
    return f"torch {torch.__version__}", version("deepspeed"), model._versions != config._versions
"""
    assert version_probes(ast.parse(good)) == []
    for fault in PROBES.splitlines():
        (found,) = version_probes(ast.parse(good + fault))
        assert "line 11" in found, fault


# Python 3.10 is the oldest that pyproject.toml allows; a later one runs the tests.
_NEWER = """
typing.Self typing.Unpack typing.Never typing.Required typing.NotRequired typing.LiteralString
typing.TypeVarTuple typing.assert_never typing.assert_type typing.reveal_type typing.override
hashlib.file_digest datetime.UTC datetime.datetime.UTC tomllib enum.StrEnum enum.ReprEnum contextlib.chdir
asyncio.TaskGroup asyncio.timeout asyncio.Runner itertools.batched math.exp2 math.cbrt operator.call
logging.getLevelNamesMapping sys.exception sys.monitoring inspect.getmembers_static warnings.deprecated
copy.replace types.get_original_bases ExceptionGroup BaseExceptionGroup
"""
NEWER_NAMES = frozenset(_NEWER.split())
NEWER_LAST = frozenset(name.rpartition(".")[2] for name in NEWER_NAMES)
NEWER_NODES = ("TryStar", "TypeAlias", "TypeVarTuple", "ParamSpec", "TypeVar", "TemplateStr")


def newer_than_3_10(text: str) -> list[str]:
    """What Python 3.10 does not have, among syntax, names and arguments; blocks for types are left out.

    Also a look into a class's dictionary for its annotations, which Python 3.14 no longer keeps there.
    """
    tree = ast.parse(text, feature_version=(3, 10))
    blocks = [
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    skipped = {id(node) for block in blocks for part in block for node in ast.walk(part)}
    found = []
    for node in (node for node in ast.walk(tree) if id(node) not in skipped):
        # Only the last part is looked at first: to write each name out took 3 s.
        last = getattr(node, "attr", getattr(node, "id", None))
        names = {ast.unparse(node)} if last in NEWER_LAST else set()
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        found += [f"{name}" for name in names & NEWER_NAMES]
        if type(node).__name__ in NEWER_NODES:
            found.append(type(node).__name__)
        if isinstance(node, ast.Subscript) and any(
            isinstance(part, ast.Starred) for part in getattr(node.slice, "elts", ())
        ):
            inside = str(ast.get_source_segment(text, node.slice))
            if inside[0] != "(":
                found.append(f"x[{inside}]")
        if isinstance(node, ast.Call):
            call = getattr(node.func, "attr", getattr(node.func, "id", None))
            arguments = {keyword.arg for keyword in node.keywords}
            bytes_of = call in ("from_bytes", "to_bytes") and "byteorder" not in arguments
            if (call == "catch_warnings" and "action" in arguments) or (bytes_of and len(node.args) < 2):
                found.append(ast.unparse(node))
            if call == "get" and "__annotations__" in (text_of_call := ast.unparse(node)):
                of_class = re.search(r"vars\(|__dict__", ast.unparse(node.func))
                found += [text_of_call] * (of_class is not None)
    return found


def test_nothing_needs_a_later_python_than_the_oldest() -> None:
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert requires == ">=3.10"
    for folder in ("ds_ring", "launcher"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            assert not newer_than_3_10(path.read_text()), (path, newer_than_3_10(path.read_text()))


NEWER = """from typing import Self
import tomllib
digest = hashlib.file_digest(file, "sha256")
table[*pair, 3] = 1
number = int.from_bytes(digest)
with warnings.catch_warnings(action="ignore"): pass
raise ExceptionGroup("several", errors)
fields = vars(kind).get("__annotations__", {})"""


def test_what_a_later_python_has_is_found() -> None:
    good = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from typing import Self
table[(*pair, 3)], table[1, 2] = int.from_bytes(digest, "big"), inspect.get_annotations(kind)
"""
    assert newer_than_3_10(good) == []
    for fault in NEWER.splitlines():
        assert len(newer_than_3_10(good + fault)) == 1, fault


def distributed_names(tree: ast.Module) -> set[str]:
    """What torch.distributed and its parts are called in a module."""
    names = {"torch.distributed"}
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname for a in node.names if a.asname and a.name.startswith("torch.distributed")}
        elif isinstance(node, ast.ImportFrom):
            origins = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            names |= {one for one, origin in origins.items() if origin.startswith("torch.distributed")}
    return names


def test_applications_are_no_part_of_the_library() -> None:
    inside = [name for name in MODULES if set(name.split(".")) & APPLICATIONS]
    assert not inside, f"{inside}: ds_ring does not need them; launcher/ and tools/ have applications"


def test_public_names_stand_where_their_rows_say() -> None:
    assert ds_ring.__all__ == sorted(PUBLIC) and set(PUBLIC) <= set(dir(ds_ring))
    for name, home in PUBLIC.items():
        assert f"{getattr(ds_ring, name).__module__}.{name}" == home
    with pytest.raises(AttributeError, match="no attribute 'Ring'"):
        _ = ds_ring.Ring
    modules = {path.stem for path in (ROOT / "ds_ring").iterdir()}
    assert not modules & set(PUBLIC), "importing that module would hide the name"


def test_every_pattern_is_public() -> None:
    made = {
        "Pattern",
        "BoundPattern",
        "Intersection",
        "Union",
        "HeadShard",
        "Before",  # of queries that see an entry for each block of tokens
        "Band",  # of other packages' windows, and of buckets of distances
    }  # the base, and what is made of others
    for name in MODULES:
        if is_in(name, "masks") or is_in(name, "patterns"):
            for found in vars(import_module(f"ds_ring.{name}")).values():
                if isinstance(found, type) and found.__module__ == f"ds_ring.{name}":
                    named = issubclass(found, Pattern) and found.__name__ not in made
                    assert not named or found.__name__ in PUBLIC, (
                        f"{found} needs a row in ds_ring/__init__.pyi"
                    )


@pytest.mark.parametrize(
    ("statements", "absent"),
    [
        (
            (
                "import ds_ring",
                "from ds_ring.health.joining import join",  # a thousand ranks on one machine
                "from ds_ring import RingConfig, RingError",
                "from ds_ring import Causal, Documents, build_plan, make_layout",
            ),
            ("torch", "transformers"),
        ),
        (
            ("from ds_ring import RingMesh, ring_attention, simulate", "import ds_ring.kernels.cpu.kernel"),
            ("deepspeed", "transformers", "torch._dynamo"),  # Dynamo: 1.3 s, for every rank
        ),
        (
            ("import ds_ring, torch; x = torch.ones(1, 2, 8, 8); mesh = ds_ring.RingMesh.single()",
                "ds_ring.ring_attention(x, x, x, pattern=ds_ring.Causal(), layout='zigzag', mesh=mesh)",
                "files = [m.__file__ for n, m in list(sys.modules.items()) if n.startswith('ds_ring')]",
                "assert len(files) <= 60 and sum(len(open(f).readlines()) for f in files) <= 10_750"),
            tuple(
                f"ds_ring.{one}"
                for one in (
                    "comm.groups", "cuda", "config.section", "decode", "health.client", "health.joining",
                    "health.failure_detector.verdicts", "kernels.flex", "measure", "layers", "models",
                    "ops.compiled", "ops.sinks", "ops.ulysses", "patches", "patterns", "transports",
                )
            ),
        ),
    ],
    ids=["without torch", "without Dynamo", "a causal pass"],
)  # fmt: skip
def test_a_public_name_imports_what_it_needs(statements: tuple[str, ...], absent: tuple[str, ...]) -> None:
    """One process asks for one name after the other: what is absent at the end was never imported."""
    code = "import sys\n" + "\n".join(
        f"{statement}; assert sys.modules.keys().isdisjoint({absent}), {statement!r}"
        for statement in statements
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.json")), ids=lambda path: path.name)
def test_json_configurations_parse(path: Path) -> None:
    if path.parent.name == "models":  # a config.json of transformers
        assert json.loads(path.read_text())["model_type"]
    else:
        RingConfig.from_deepspeed(path)


@pytest.mark.parametrize(
    "path",
    sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "configs/recipes").glob("*_gpus.yaml")]),
    ids=lambda path: path.name,
)
def test_cluster_configurations_parse(path: Path) -> None:
    cluster = read_cluster(path)
    assert cluster.script.is_file()
    RingConfig.from_deepspeed(cluster.deepspeed_config).validate_world(cluster.world_size)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs/hardware").glob("*.yaml")), ids=lambda path: path.name
)
def test_hardware_descriptions_parse(path: Path) -> None:
    read_hardware(str(path))


def test_every_configuration_has_its_row() -> None:
    rows = re.findall(
        r"^\| `([^`]+\.(?:json|yaml|py|ipynb))` \|", (ROOT / "configs/README.md").read_text(), re.MULTILINE
    )
    folder = ROOT / "configs"
    files = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix in (".json", ".yaml", ".py", ".ipynb")
    }
    listed = [path.relative_to(folder).as_posix() for row in rows for path in folder.glob(row)]
    assert sorted(listed) == sorted(files)


def test_every_module_says_what_it_owns() -> None:
    folders = ("ds_ring", "launcher", "tools", "configs")
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        tree = tree_of(path)
        assert not tree.body or ast.get_docstring(tree), f"{path.relative_to(ROOT)} has no docstring"


NOTE = re.compile(r"\[Note: ([^\]]+)\]")
# The name of a note stands alone in its line, or before a sentence.
DEFINITION = re.compile(r"^[ \t]*(?:# |\"{3})?\[Note: ([^\]]+)\](?=$| [A-Z])", re.MULTILINE)
FILE = re.compile(r"[\w/-]*\w\.py\b")
# A script of the user's, a placeholder in a command, a module of Python's.
NOT_OURS = {"train.py", "SCRIPT.py", "socket.py", "runner.py"}


def lost_references(texts: dict[str, str], files: set[str]) -> list[str]:
    """Every note that is not defined exactly once, and every file that is named and does not exist.

    Args:
        texts: of each file, by its path.
        files: all paths that may be named, in full or by their last parts.
    """
    endings = {"/".join(path.split("/")[start:]) for path in files for start in range(path.count("/") + 1)}
    defined = [
        name for path, text in texts.items() if path.endswith(".py") for name in DEFINITION.findall(text)
    ]
    lost = [
        f"[Note: {name}] is defined {defined.count(name)} times"
        for name in set(defined)
        if defined.count(name) > 1
    ]
    for path, text in texts.items():
        notes = [name for name in NOTE.findall(" ".join(text.replace("#", " ").split())) if name != "name"]
        lost += [f"{path}: [Note: {name}] is defined nowhere" for name in notes if name not in defined]
        lost += [
            f"{path}: {name} does not exist" for name in FILE.findall(text) if name not in endings | NOT_OURS
        ]
    return lost


def test_notes_and_files_that_are_named_exist() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in tracked_files() if path.suffix == ".py"}
    named = {path for path in files if path.startswith(("ds_ring/", "launcher/", "tools/"))} | {
        f"ds_ring/{name}.md" for name in ("DESIGN", "NOTES", "READING", "models/PATCHES")
    }
    lost = lost_references({path: (ROOT / path).read_text() for path in named}, files)
    assert not lost, "\n".join(lost)


def test_every_note_has_its_row_in_the_index() -> None:
    rows = re.findall(r"^\| ([^|`]+) \(`([^`]+)`\) \|", (ROOT / "ds_ring/NOTES.md").read_text(), re.MULTILINE)
    paths = [path for folder in ("ds_ring", "launcher", "tools") for path in (ROOT / folder).rglob("*.py")]
    defined = {note: path.as_posix() for path in paths for note in DEFINITION.findall(path.read_text())}
    assert sorted(name for name, _ in rows) == sorted(defined), "one row of ds_ring/NOTES.md for each note"
    wrong = [f"{name}: {file}" for name, file in rows if not defined[name].endswith(f"/{file}")]
    assert not wrong, f"ds_ring/NOTES.md names another file: {wrong}"


def test_a_lost_note_and_a_lost_file_are_found() -> None:
    good = {
        "a/one.py": '"""See two.py.\n\n[Note: here]\nText."""',
        "a/b/two.py": "# wraps: [Note:\n# here] in a/one.py",
    }
    files = {*good, "a/__init__.py"}
    assert lost_references(good, files) == []
    faults = {
        "see [Note: gone].": "[Note: gone] is defined nowhere",
        "    # [Note: here] Text.": "[Note: here] is defined 2 times",
        "# [Note: there] in two.py": "[Note: there] is defined nowhere",
        "what graph_placement.py has": "graph_placement.py does not exist",
        "`c/two.py`": "c/two.py does not exist",
    }
    for text, words in faults.items():
        (found,) = lost_references(good | {"a/__init__.py": text}, files)
        assert found.endswith(words), found


def test_modules_of_all_folders_are_installed() -> None:
    for package in ("ds_ring", "ds_ring_launcher"):
        patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
        assert "**/*.py" in patterns[package]


def test_ci_runs_the_command_of_the_readme() -> None:
    done = subprocess.run([ROOT / ".ci/run", "--print"], capture_output=True, text=True, check=True)
    command = done.stdout.strip()
    assert command.splitlines()
    assert command in (ROOT / "README.md").read_text()
    assert "pip install" in command and '".[test]"' in command and "pytest" in command
    for wrong in (["--nihgt"], ["--night", "--print"]):
        script = [ROOT / ".ci/run", *wrong]
        done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 2 and "expected nothing, --print or --night" in done.stderr


# What must not stand in a file that others get: paths of one machine, package mirrors.
MACHINE = re.compile(r"(?<![\w.])/(?:work|root|home/\w+)/|/tmp/venv|\bfile:///|find-links|index-url")


def tracked_files() -> list[Path]:
    # Files that are new and not ignored count as well: they are what the next commit tracks.
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_folder_of_tests_is_skipped(pytestconfig: pytest.Config) -> None:
    patterns = pytestconfig.getini("norecursedirs")  # pytest's default has "dist"
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    for folder in folders:
        parts = folder.relative_to(ROOT).parts
        assert not any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in patterns), folder


def test_no_machine_paths_in_tracked_files() -> None:
    for path in tracked_files():
        if path == Path(__file__).resolve() or path.suffix in (".png", ".gz", ".pt"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found = MACHINE.search(line)
            assert not found, f"{path.relative_to(ROOT)}:{number}: {found.group() if found else ''}"


def test_scripts_are_executable() -> None:
    assert os.access(ROOT / ".ci/run", os.X_OK)


APPLIES_PATCHES = "patches"  # the only module that changes objects of other packages
# What these objects have is not ours, whatever its name.
FOREIGN = {"engine", "model", "module", "layer", "head", "part", "output", "sampler", "accelerator"}
# Objects of other packages that ds_ring has made itself, or that are made for it to write on.
OWN_OBJECTS = {
    ("*", "ctx"): "of an autograd.Function of ours",
    ("config.messages", "__init__"): "the constructor of a class of ours",
    ("health.client", "timer"): "a threading.Timer",
    ("contrib.compile.backend", "call"): "a node of the graph that a backend owns",
    ("contrib.compile.graph_sharding", "request"): "the same",
    ("checkpoint.save", "copied"): "a copy of a state dict",
    ("engines.first_batch.first_batch", "state[name]"): "a parameter of the copied model",
    ("decode.generation", "part"): "an attention of ours",
    ("engines.first_batch.first_batch", "part"): "a module of the copied model",
    ("engines.deepspeed.initialize", "args"): "a copy of the script's arguments",
    (
        "memory.saved_results.keep_results",
        "region",
    ): "torch's context of a checkpointed region: no other place lives as long",
    ("data.ring_batch", "region"): "the same",
    ("data.ring_batch", "x"): "a tensor of a sharded batch, which carries the sharding",
    ("ops.tracing", "function"): "a function of ours, which it marks for torch.compile",
    ("compat.torch", "function"): "a function of ours, which it marks for torch.compile",
    ("ops.traced_objects", "function"): "a function that it makes in place of a traced one",
    ("comm.mesh", "weakref.finalize(mesh.state, _drop, detector, mesh.state.groups)"): "its own finalizer",
    ("contrib.diffusers", "name"): "the member of an enumeration that it makes",
    ("comm.groups", "options"): "of a process group that is being made",
    ("comm.groups", "options.config"): "the same",
}
HOOKS = re.compile(r"register_\w*hook")


def own_attributes(trees: Iterator[ast.Module]) -> set[str]:
    """The names of data that classes of ds_ring have: fields, and what methods assign to self."""
    found = set()
    for tree in trees:
        for node in nodes_of(tree):
            if isinstance(node, ast.ClassDef):
                fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
                fields += [
                    target for one in node.body if isinstance(one, ast.Assign) for target in one.targets
                ]
                found |= {one.id for one in fields if isinstance(one, ast.Name)}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def foreign_changes(name: str, tree: ast.Module, own: set[str]) -> list[str]:
    """Every assignment to an attribute of an object that is not ds_ring's, and every hook, by line."""
    imported = {
        alias.asname or alias.name.split(".")[0]
        for node in nodes_of(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and not (getattr(node, "module", None) or "").startswith("ds_ring")
        for alias in node.names
    }
    classes = {node.name for node in nodes_of(tree) if isinstance(node, ast.ClassDef)}

    def is_foreign(owner: ast.expr, attribute: str | None) -> bool:
        text = ast.unparse(owner)
        if text in classes | {"self", "cls"} or {(name, text), ("*", text)} & set(OWN_OBJECTS):
            return False
        last, root = text.split(".")[-1].lstrip("_"), text.split(".")[0]
        return attribute not in own or last in FOREIGN or root in FOREIGN | imported

    found = []
    for node in nodes_of(tree):
        changed = False
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            changed = is_foreign(node.value, node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if called in ("setattr", "delattr") and node.args:
                key = node.args[1]
                changed = is_foreign(node.args[0], key.value if isinstance(key, ast.Constant) else None)
            changed |= isinstance(node.func, ast.Attribute) and bool(HOOKS.fullmatch(called))
            if called in ("pop", "update", "setdefault") and isinstance(node.func, ast.Attribute):
                owner = owner_of_namespace(node.func.value)
                changed |= owner is not None and is_foreign(owner, None)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            owner = owner_of_namespace(node.value)
            changed = owner is not None and is_foreign(owner, None)
        if changed:
            found.append(f"ds_ring.{name}, line {node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    return found


def owner_of_namespace(node: ast.expr) -> ast.expr | None:
    """Return x of `vars(x)` and of `x.__dict__`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args:
        return node.args[0]
    return node.value if isinstance(node, ast.Attribute) and node.attr == "__dict__" else None


def late_patches(name: str, tree: ast.Module) -> list[str]:
    """Every row that is made inside a function: an import of the file would not add it to its table."""
    rows = {"patch"}  # and what is made of it: `step_patch = partial(patch, ENGINE, when="monitor")`
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = node.value
            if ast.unparse(called.func).endswith("partial") and ast.unparse(called.args[0]) in rows:
                rows |= {ast.unparse(target) for target in node.targets}
    inside = {
        id(node)
        for function in nodes_of(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for part in (function.body if isinstance(function.body, list) else [function.body])
        for node in ast.walk(part)
    }
    return [
        f"ds_ring.{name}, line {node.lineno}: {ast.unparse(node.func)}"
        for node in nodes_of(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in rows and id(node) in inside
    ]


def test_only_adapters_change_objects_of_other_packages() -> None:
    own = own_attributes(tree_of(path) for path in MODULES.values())
    others = {name: tree_of(path) for name, path in MODULES.items() if name != APPLIES_PATCHES}
    lost = [line for name, tree in others.items() for line in foreign_changes(name, tree, own)]
    assert not lost, "a replacement without @patch:\n" + "\n".join(lost)
    late = [line for name, tree in others.items() for line in late_patches(name, tree)]
    assert not late, "a row that an import does not add to its table:\n" + "\n".join(late)


LATE = """def f():
    @patch(ENGINE, "step", stage="around_step")
    def step(call): pass
---
def f(): row = patch(ENGINE, stage="before_forward")
---
late = lambda: step_patch("step")
---
class A:
    def f(self):
        for name in names: step_patch(name)"""


def test_a_row_that_an_import_does_not_make_is_found() -> None:
    good = """
step_patch = partial(patch, ENGINE, when="monitor")
row = patch(ENGINE, "loss", stage="around_step", kind="set")
rows = [step_patch(name) for name in names]
class A:
    @step_patch("step")
    def step(self, call): pass
    @patch(ENGINE, stage="before_forward")
    def before(self, *_):
        @row
        def later(): pass
        apply(later, row.to(3))
"""
    assert late_patches("a", ast.parse(good)) == []
    for fault in LATE.split("---\n"):
        (found,) = late_patches("a", ast.parse(good + fault))
        assert "patch" in found


CHANGES = """torch.load = mine
engine.step = types.MethodType(step, engine)
engine.loss = 1
self._engine.step, y = mine, 2
self._module.scale *= 2
del x.unknown
with y() as x.unknown: pass
for x.unknown in y: pass
setattr(engine, 'step', mine)
setattr(x, name, mine)
delattr(x, 'unknown')
vars(x)['forward'] = mine
x.__dict__.pop('generate')
layer.register_forward_hook(f)
self.register_full_backward_hook(f)
loss.register_hook(f)
shutil.copytree = mine"""


def test_a_change_of_a_foreign_object_is_found() -> None:
    good = """
import torch, shutil
class Own:
    loss: int
    def __init__(self): self.scale = 1
    def change(self, other): other.scale, self.loss = 2, 3
Own.loss = 4
object.__setattr__(other, "x", 1)
vars(self)["x"] = 1
"""
    own = own_attributes(iter([ast.parse(good)]))
    assert own == {"loss", "scale"} and foreign_changes("a", ast.parse(good), own) == []
    for fault in CHANGES.splitlines():
        (found,) = foreign_changes("a", ast.parse(good + fault), own)
        assert "line 10" in found


# Tables of a process that hold what they have: what empties them. Weak ones end with their contents.
GLOBAL_TABLES = {
    ("comm.mesh", "_groups_of_garbage"): "the next mesh destroys them",
    ("contrib.ring_flash_attn", "DATA_PARAMS"): "one set of keys, for the current batch",
    ("health.stuck_waits", "_in_stuck_waits"): "nothing: torch may write to them for ever; one wait a mesh",
    ("ops.checks", "shards"): "each tensor takes its own entry back",
    ("patches", "_tables"): "one for each file of patches",
    ("patches", "_of_process"): "one for each patch",
    ("data.failure_attribution", "_hooked"): "one patch",
    ("contrib.families.recurrent.scan", "active"): "each layer takes its own entry back",
    ("kernels.flex.kernel", "_compiled_calls"): "MAX_COMPILED_CALLS",
    ("masks.pattern", "_CACHES"): "one for each cached function",
    ("masks.pattern", "_recent"): "KEPT_LARGE",
    ("patterns.captured.score_mod", "_score_mods"): "MAX_SCORE_MODS",
    ("patterns.captured.traced", "_codes"): "MAX_CODES",
}
CONTAINERS = {"set", "dict", "list", "deque", "OrderedDict", "defaultdict", "Counter", "ByteLRU"}


def unbounded(tree: ast.Module) -> list[str]:
    """Every container of a module that holds what it has, and every cache of a function without a bound."""
    found = []
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value, target = node.value, node.targets[0] if isinstance(node, ast.Assign) else node.target
            made = ast.unparse(value.func).split("[")[0] if isinstance(value, ast.Call) else ""
            empty = isinstance(value, (ast.Dict, ast.List)) and not ast.unparse(value)[1:-1]
            filled = isinstance(value, ast.Call) and any(not isinstance(one, ast.Name) for one in value.args)
            if empty or (made.split(".")[-1] in CONTAINERS and not filled):
                found.append(ast.unparse(target))
        elif isinstance(node, ast.FunctionDef):
            how = {ast.unparse(one).removeprefix("functools.") for one in node.decorator_list}
            arguments = ast.unparse(node.args)
            if how & {"lru_cache(maxsize=None)", "lru_cache(None)"} or ("cache" in how and arguments):
                found.append(node.name)
    return found


def test_every_table_of_a_process_has_a_bound_or_an_end() -> None:
    found = {(name, one) for name, path in MODULES.items() for one in unbounded(tree_of(path))}
    assert found == set(GLOBAL_TABLES), found ^ set(GLOBAL_TABLES)


TABLES = """_known: dict[str, int] = {}
_seen = set()
_last = collections.deque()
@cache
def f(x): pass
@functools.lru_cache(maxsize=None)
def f(x): pass"""


def test_a_table_that_nothing_empties_is_found() -> None:
    good = "_living = weakref.WeakSet()\nNAMES = {'a'}\nROWS = {'a': 1}\nONE = set('ab')\n"
    good += "@cache\ndef g(): pass\n@lru_cache(maxsize=64)\ndef h(x): pass\n"
    assert unbounded(ast.parse(good)) == []
    for fault in re.split(r"\n(?=_|@)", TABLES):
        assert len(unbounded(ast.parse(good + fault))) == 1, fault


# Which folder knows which.


def _imports_in(package: str) -> dict[str, set[str]]:
    return {name: set(imports_of(name)) for name in MODULES if is_in(name, package) and name != package}


def test_data_engines_and_models_know_each_other_one_way() -> None:
    """`data` knows neither engine nor model, and neither of these the other; `start` knows all three."""
    known = {
        "data": ("deepspeed", "transformers", "ds_ring.engines", "ds_ring.models"),
        "engines.deepspeed": ("ds_ring.models",),
        "models": ("deepspeed", "ds_ring.engines"),
    }
    for package, refused in known.items():
        for name, imports in _imports_in(package).items():
            wrong = [one for one in imports if any(is_in(one, other) for other in refused)]
            assert not wrong, f"ds_ring.{name} imports {wrong}"


def test_every_file_of_the_engine_calls_deepspeed() -> None:
    for name, imports in _imports_in("engines.deepspeed").items():
        assert any(is_in(one, "deepspeed") for one in imports), f"ds_ring.{name} knows no DeepSpeed: move it"


def _circles() -> Iterator[list[str]]:
    """Yield the sets of modules that import each other, whether by one step or by several."""
    reached = {name: set(own_imports_of(name)) for name in MODULES}
    for middle in MODULES:  # Warshall
        for name in MODULES:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    for name in MODULES:
        circle = sorted(other for other in reached[name] if name in reached[other])
        if circle and circle[0] == name:
            yield circle


def test_no_circle_of_imports_has_more_than_four_modules() -> None:
    assert not [circle for circle in _circles() if len(circle) > 4]


def test_initialize_is_short() -> None:
    (function,) = [
        node
        for node in nodes_of(tree_of(MODULES["start"]))
        if isinstance(node, ast.FunctionDef) and node.name == "initialize"
    ]
    assert function.end_lineno is not None and function.end_lineno - function.lineno < 40


def test_the_session_is_a_facade() -> None:
    (facade,) = [
        node
        for node in nodes_of(tree_of(MODULES["data.session"]))
        if isinstance(node, ast.ClassDef) and node.name == "RingSession"
    ]
    names = [one.name for one in facade.body if isinstance(one, ast.FunctionDef) and one.name[:1] != "_"]
    assert len(names) <= 14, sorted(names)


# Words that say nothing of a value, alone as a name; verbs that a function may begin with.
_DIALECT = "found given one own more asked made kept other"
_VERBS = """
get make build check read write find load compute send split set add remove run start stop open close create
parse format print show list count choose select take give put keep record apply undo patch wrap bind merge
join cut shard gather sum raise refuse resolve expand convert cast copy move wait poll post receive register
describe compare validate verify plan lower attend update reset clear install attach detach enable disable
measure rate estimate simulate draw sample render save restore fetch push encode decode pack unpack pad
strip trim sort order group map filter fill replace rename match test is has needs takes can allows should
covers contains accepts uses reads supports note report log warn end begin free allocate release listen
accept skip drop pick scan visit collect call execute handle watch trace launch kill synchronize prepare
init place look try ensure require limit round scale shift rotate view slice index search name label mark
number flatten insert swap exchange pass lend share assign
"""
DIALECT, VERBS = frozenset(_DIALECT.split()), frozenset(_VERBS.split())


def names_of_bindings(tree: ast.Module) -> list[str]:
    nodes = nodes_of(tree)
    names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return names + [node.arg for node in nodes if isinstance(node, ast.arg)]


def shares_of_names(trees: Iterable[ast.Module]) -> tuple[float, float, float]:
    """Return the shares of bindings in the dialect, of functions with "of", and of those with a verb."""
    trees = list(trees)
    bindings = [name for tree in trees for name in names_of_bindings(tree)]
    functions = [
        node.name.strip("_").split("_")
        for tree in trees
        for node in nodes_of(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return (
        sum(name in DIALECT for name in bindings) / len(bindings),
        sum("of" in words for words in functions) / len(functions),
        sum(words[0] in VERBS for words in functions) / len(functions),
    )


@pytest.mark.parametrize("folder", ["ds_ring", "launcher", "tools"])
def test_names_are_the_fields(folder: str) -> None:
    dialect, with_of, verbs = shares_of_names(map(tree_of, (ROOT / folder).rglob("*.py")))
    assert dialect <= 0.005 and with_of <= 0.01 and verbs >= 0.3, (dialect, with_of, verbs)


def test_a_name_of_the_dialect_is_found() -> None:
    tree = ast.parse("def tiles_of(one): found = one")
    assert shares_of_names([tree]) == (1.0, 1.0, 0.0)

"""What some tests need and a machine may lack: asked for, and the test skipped with the reason.

Owns the questions. In the test's own process `@pytest.mark.needs("mpirun")` asks before the test begins; a
function that runs on ranks calls `skip_without("fp16")`, and the harness then skips the test of which it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def lacks(module: str, where: str) -> str:
    """Return where to get a Python package, or ""; without importing it."""
    return "" if importlib.util.find_spec(module) else f"no {module} here{where}"


@contextmanager
def interpreted(name: str) -> Iterator[ModuleType]:
    """Import a module of Triton kernels for Triton's interpreter, also where it was imported before.

    Triton asks TRITON_INTERPRET when a kernel is decorated. A test that loads every plug-in of CUDA decorates
    them for a GPU, and then the order of the tests would decide.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module(name)


def lacks_fp16() -> str:
    """Return why DeepSpeed's CPU accelerator refuses fp16, or "": the processor's instructions decide."""
    from deepspeed.accelerator import get_accelerator

    return "" if get_accelerator().is_fp16_supported() else "this processor has no fp16 (DeepSpeed's answer)"


def lacks_bf16() -> str:
    """Return why DeepSpeed's CPU accelerator refuses bf16, or ""."""
    from deepspeed.accelerator import get_accelerator

    return "" if get_accelerator().is_bf16_supported() else "this processor has no bf16 (DeepSpeed's answer)"


def lacks_mounts() -> str:
    """Return why a test cannot mount a small file system of its own, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder), 1 << 20):
                return ""
        except OSError as error:
            return f"a small file system cannot be mounted: {error}"


def lacks_namespaces() -> str:
    """Return why there can be no two hosts on this machine, or ""."""
    from tests.dist.namespaces import why_not

    return why_not()


def lacks_mpirun() -> str:
    """Return where to get Open MPI's mpirun, or ""."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return "" if shutil.which("mpirun", path=path) else "no mpirun here: pip install 'ds_ring[mpi]' brings it"


def lacks_chromium() -> str:
    """Return where to get a browser that needs no screen, or ""."""
    found = any(shutil.which(name) for name in CHROMIUM)
    return "" if found else "no chromium here: 'apt-get install chromium' brings it on Debian"


def lacks_slurm() -> str:
    """Return why there can be no Slurm of two hosts, or ""."""
    from tests.dist.slurm_cluster import why_not

    return why_not()


def lacks_sshd() -> str:
    """Return why there can be no two hosts that ssh reaches, or ""."""
    from tests.dist.ssh_hosts import why_no_sshd

    return why_no_sshd() or lacks_namespaces()


def lacks_compiler() -> str:
    """Return why torch.compile's default backend cannot work on this machine's processor, or ""."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "torch.compile needs a C++ compiler (g++), and there is none"
    return ""


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """Mount a file system of so many bytes on `folder`; OSError where that is not allowed."""
    run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "ds_ring_test", str(folder))
    try:
        yield
    finally:
        run("umount", "--lazy", str(folder))  # a rank may still have its lock file open


def make_read_only(folder: Path) -> None:
    """Let nobody, not even root, write on the file system mounted on `folder`."""
    run("mount", "-o", "remount,ro", str(folder))


def run(*command: str) -> None:
    """Run a command; OSError with what it said where it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: exit code {done.returncode}, {done.stderr.strip()}")


NEEDS: dict[str, Callable[[], str]] = {
    "fp16": lacks_fp16,
    "bf16": lacks_bf16,
    "check_jsonschema": partial(lacks, "check_jsonschema", ": pip install 'ds_ring[test]' brings it"),
    "chromium": lacks_chromium,
    "compiler": lacks_compiler,
    "diffusers": partial(lacks, "diffusers", ": pip install 'ds_ring[test]' brings it"),
    "megatron": partial(lacks, "megatron", ": pip install 'ds_ring[megatron]' brings it"),
    "LLaMA-Factory": partial(
        lacks, "llamafactory", ": its environment is in ds_ring/contrib/training_commands/README.md"
    ),
    "mounts": cache(lacks_mounts),
    "mpirun": lacks_mpirun,
    "namespaces": lacks_namespaces,
    "pdoc": partial(lacks, "pdoc", ": pip install 'ds_ring[docs]' brings it"),
    "ray": partial(lacks, "ray", ", which no extra names: pip install 'ray[train]'"),
    "slurm": lacks_slurm,
    "sp_backend registry": partial(
        lacks, "accelerate.utils.sequence_parallel", ": see tools/upstream/README.md"
    ),
    "sshd": lacks_sshd,
    "tensorboard": partial(lacks, "tensorboard", ", which no extra names: pip install tensorboard"),
    "triton": partial(lacks, "triton", ": pip install 'ds_ring[test]' brings it"),
}


def skip_without(*names: str) -> None:
    """Skip the test, on a rank too, where the machine lacks one of these rows of NEEDS."""
    for name in names:
        reason = NEEDS[name]()
        if reason:
            pytest.skip(reason)

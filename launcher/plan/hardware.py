"""Describe hardware as a frozen model: what one device computes, holds and sends in a second.

The only file that knows the keys of `configs/hardware/*.yaml`. How a file is found and read is the
launcher's; pass_time.py computes times from it. `ds-ring tune` measures a machine and writes such a file,
`ds-ring plan` reads it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ds_ring.config.messages import Accepted, Section, sentence
from ds_ring.config.problems import config_error, list_problems
from ds_ring.errors import RingConfigError
from ds_ring.plugin import FAST_KERNELS, unmeasured

from ..cluster.cluster_file import read_mapping
from . import find_file, known_hardware

DTYPES = ("float32", "bfloat16", "float16")
# Bounds that no device comes near: within them no time that is estimated overflows.
_RATE = "a number of at least 1 and at most 1e+30"
_FRACTION = "a number of at least 1e-06 and at most 1"
_WAIT = "a number of seconds, 0 or more and at most 1e+06"

Name = Annotated[str, Field(min_length=1), Accepted("a word", "write the name of the device")]
DeviceKind = Annotated[Literal["cuda", "cpu"], Accepted("a word", "write one of these in the YAML")]
Bytes = Annotated[
    int, Field(ge=1, le=2**60), Accepted("a whole number of bytes above 0", "write 80_000_000_000, say")
]
Count = Annotated[int, Field(ge=1, le=2**20), Accepted("a whole number of at least 1", "write 8, say")]
CountOrNone = Annotated[
    Annotated[int, Field(ge=1, le=2**20)] | None,
    Accepted("a whole number of at least 1, or null", "write 4, say, or leave it out"),
]
Rate = Annotated[float, Field(ge=1, le=1e30, allow_inf_nan=False), Accepted(_RATE, "write 3.12e+14, say")]
RateOrNone = Annotated[
    Annotated[float, Field(ge=1, le=1e30, allow_inf_nan=False)] | None,
    Accepted(f"{_RATE}, or null", "write 3.12e+14, say, or leave it out"),
]
BytesOrNone = Annotated[
    Annotated[int, Field(ge=1, le=2**60)] | None,
    Accepted("a whole number of bytes above 0, or null", "write 2_000_000_000_000, say, or leave it out"),
]
Fraction = Annotated[
    float, Field(ge=1e-6, le=1, allow_inf_nan=False), Accepted(_FRACTION, "write 0.5 for half of the peak")
]
WaitSeconds = Annotated[
    float, Field(ge=0, le=1e6, allow_inf_nan=False), Accepted(_WAIT, "write 1.0e-05, say")
]
ShareOrNone = Annotated[
    Annotated[float, Field(ge=0, le=0.9, allow_inf_nan=False)] | None,
    Accepted("a number of at least 0 and at most 0.9, or null", "write 0.25 for a quarter of the device"),
]
Sources = Annotated[
    dict[str, str], Accepted("a mapping of keys to sentences", "write 'memory_bytes: ...' lines")
]


class PeakFlops(Section):
    """List floating-point operations per second by dtype; a dtype that is left out is not offered."""

    float32: RateOrNone = Field(default=None, description="as matrix products of that dtype run")
    bfloat16: RateOrNone = Field(default=None, description="dense, not sparse")
    float16: RateOrNone = Field(default=None, description="dense, not sparse")


class AttentionEfficiency(Section):
    """Give the fraction of the peak that the attention kernel reaches on long sequences."""

    forward: Fraction = Field(description="of 4 D FLOPs a pair")
    backward: Fraction = Field(description="of 10 D FLOPs a pair")


KernelOrNone = Annotated[
    Literal["cpu", "flex", "flash"] | None, Accepted("the name of a kernel, or null", "write flash, say")
]
ByKernel = Annotated[
    dict[Literal["cpu", "flex", "flash"], AttentionEfficiency] | None,
    Accepted("a mapping of kernels to efficiencies, or null", "write 'flash: {forward: 0.5, backward: 0.4}'"),
]
TorchEfficiency = Annotated[
    AttentionEfficiency | None,
    Accepted("a mapping with forward and backward, or null", "write 'forward: 0.5', or leave it out"),
]


class Hardware(Section):
    """Describe one kind of device and its network. Rates are FLOPs or bytes per second, waits are seconds."""

    name: Name = Field(description="what tables call it")
    kind: DeviceKind = Field(description="cuda also stands for ROCm, as in torch")
    memory_bytes: Bytes = Field(description="of one device (for kind cpu: that one process may use)")
    devices_per_node: Count = Field(description="devices that intra_node_bytes_per_s connects")
    devices_per_host: CountOrNone = Field(
        default=None, description="devices that share a host, a part of a node; without it a node is one host"
    )
    peak_flops: Annotated[
        PeakFlops, Accepted("a mapping of dtypes to rates", "write 'bfloat16: 9.89e+14'")
    ] = Field(description="of one device")
    attention_efficiency: Annotated[
        AttentionEfficiency, Accepted("a mapping with forward and backward", "write 'forward: 0.5'")
    ] = Field(description="fractions of peak_flops")
    kernel: KernelOrNone = Field(
        default=None, description="whose attention_efficiency it is; without it what auto takes on this kind"
    )
    attention_by_kernel: ByKernel = Field(
        default=None, description="the same of other kernels, for plans with that kernel in the JSON"
    )
    torch_attention: TorchEfficiency = Field(
        default=None, description="the same of torch's own call of flash, which other methods make"
    )
    matmul_efficiency: Fraction = Field(description="of peak_flops in the model's other matrices")
    call_overhead_s: WaitSeconds = Field(description="fixed cost of a kernel call")
    intra_node_bytes_per_s: Rate = Field(
        description="that one device receives from its neighbour in the node"
    )
    intra_node_links: Count = Field(
        default=1, description="of a device to its peers in the node, each of that rate; 1 for a switch"
    )
    inter_node_bytes_per_s: Rate = Field(description="that one device receives from another node")
    link_latency_s: WaitSeconds = Field(description="from a send to the first byte")
    hop_overhead_s: WaitSeconds = Field(description="fixed cost of posting and waiting for a hop's messages")
    message_share: ShareOrNone = Field(
        default=None,
        description="part of the device that the kernels of messages hold inside a node; without it nothing",
    )
    host_memory_bytes: BytesOrNone = Field(
        default=None, description="of a host, for what is offloaded; without it nothing is"
    )
    host_link_bytes_per_s: RateOrNone = Field(
        default=None, description="between one device and pinned memory of its host, each way"
    )
    host_memory_bytes_per_s: RateOrNone = Field(
        default=None, description="that a host's processors read and write, for an optimizer there"
    )
    source: Sources = Field(description="where each figure is from")

    @property
    def host_devices(self) -> int:
        """Return the number of devices that share a host: processes that a launcher starts there."""
        return self.devices_per_host or self.devices_per_node

    def flops(self, dtype: str) -> float:
        """Return peak FLOPs per second in a dtype."""
        rate: float | None = getattr(self.peak_flops, dtype, None)
        if rate is None:
            known = [name for name in DTYPES if getattr(self.peak_flops, name) is not None]
            advice = "add it under peak_flops, or take another dtype"
            what = sentence(f"one of {', '.join(known)}", dtype, advice)
            raise RingConfigError(f"hardware {self.name}: dtype: {what}")
        return rate

    def link_bytes_per_s(self, devices: int) -> float:
        """Return the rate of the slowest link between neighbours of so many devices."""
        inside = devices <= self.devices_per_node
        return self.intra_node_bytes_per_s if inside else self.inter_node_bytes_per_s

    def peers_bytes_per_s(self, peers: int) -> float:
        """Return the rate at which a device receives from so many peers of its node at once."""
        return self.intra_node_bytes_per_s * max(min(peers, self.intra_node_links), 1)

    def collective_bytes_per_s(self, devices: int) -> float:
        """Return the rate at which one of so many devices receives an all-gather or reduce-scatter of all.

        NCCL's rings enter and leave a node by all of its adapters, one a device, and pass on inside it: what
        comes from other nodes comes once for all devices of a node. Point-to-point messages and all-to-alls
        have one adapter a device. (A ring an adapter: NVIDIA/nccl issue 601; tools/results/published.md has
        times.) Where devices have a link to each peer, these rings share out the links.
        """
        inside = self.peers_bytes_per_s(min(devices, self.devices_per_node) - 1)
        if devices <= self.devices_per_node:
            return inside
        return min(inside, self.devices_per_node * self.inter_node_bytes_per_s)

    def runs(self, kernel: str, kinds: Iterable[str], refused: Container[str] = ()) -> str:
        """Return the kernel of a name of the JSON.

        "auto" is the file's own kernel if the file names one, else what "auto" takes for tiles of these kinds
        (`Pattern.tile_kind`) among those of which the file has rates, without the `refused` ones.

        Raises:
            RingConfigError: the file has no rates of it.
        """
        default, others = self.kernel or FAST_KERNELS[self.kind], self.attention_by_kernel or {}
        runs = kernel
        if kernel == "auto":
            able = [name for name in (default, *others) if name not in refused]
            runs = self.kernel if self.kernel in able else unmeasured(self.kind, kinds, able)
        if runs != default and runs not in others:
            known = ", ".join((default, *others))
            advice = "add it under attention_by_kernel, or take another file"
            raise RingConfigError(
                f"hardware {self.name}: kernel: {sentence(f'one of {known}', runs, advice)}"
            )
        return runs

    def efficiency(self, kernel: str) -> AttentionEfficiency:
        """Return the efficiency of a kernel that `runs` has returned."""
        by_name = {str(name): efficiency for name, efficiency in (self.attention_by_kernel or {}).items()}
        return by_name.get(kernel, self.attention_efficiency)


def hardware_from(values: dict[str, Any], source: str) -> Hardware:
    """Build a description from the values of a file; one RingConfigError that names `source` lists all
    faults.
    """
    required = [name for name, field in Hardware.model_fields.items() if field.is_required()]
    # A missing key becomes null, so that its error has the type of the key.
    filled = {**dict.fromkeys(required), **values}
    if isinstance(filled["peak_flops"], dict) and not any(filled["peak_flops"].values()):
        raise config_error(source, "peak_flops: expected a rate for one dtype at least, got none; add one")
    try:
        hardware = Hardware.model_validate(filled)
    except ValidationError as error:
        raise config_error(source, *list_problems(error, Hardware, "")) from None
    if hardware.devices_per_node % hardware.host_devices:
        expected = f"a divisor of devices_per_node, {hardware.devices_per_node}"
        what = sentence(expected, str(hardware.host_devices), "a node has whole hosts: correct one of them")
        raise config_error(source, f"devices_per_host: {what}")
    return hardware


def read_hardware(name_or_path: str) -> Hardware:
    """Read a description that comes with the package, or a YAML file; RingConfigError for anything else."""
    path = find_file("hardware", name_or_path, known_hardware(), "a YAML file", ".yaml", ".yml")
    return hardware_from(read_mapping(path), str(path))

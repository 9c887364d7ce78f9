"""Nodes whose hosts have a part of the devices, links between peers, and searches over whole nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_ring import Full
from ds_ring.errors import RingConfigError
from ds_ring.schedule.grid import Grid
from ds_ring_launcher.plan import known_hardware
from ds_ring_launcher.plan.advice import advise, describe_plan
from ds_ring_launcher.plan.estimate import estimate, get_optimizer_seconds, head_swaps
from ds_ring_launcher.plan.hardware import hardware_from, read_hardware
from ds_ring_launcher.plan.layer_passes import build_plans, layer_passes
from ds_ring_launcher.plan.more_devices import plan_more_devices
from ds_ring_launcher.plan.options import fewest_devices, fewest_planned
from ds_ring_launcher.plan.training_setting import USABLE_HOST, TrainingSetting
from tests.unit.launcher.plan.test_answers import make_setting, on_devices
from tests.unit.launcher.plan.test_node_orders import FAST, MACHINE, MODEL
from tests.unit.launcher.plan.test_node_orders import setting as small_setting

TRAY_BYTES = 960_000_000_000  # two Grace processors of 480 GB


def offloaded(gpu: str, devices: int, tokens: int = 1 << 17) -> TrainingSetting:
    setting = make_setting("llama-3-70b", gpu, "tiles", tokens)
    zero = replace(setting.zero, offload_optimizer=True)
    return on_devices(replace(setting, checkpointing=True, offload_checkpoints=True, zero=zero), devices)


@pytest.mark.parametrize("gpu", ["gb200", "gb300"])
def test_the_devices_of_a_tray_have_its_host_alone(gpu: str) -> None:
    """(Four devices had the memory of a rack's 36 processors, 15,041 GiB: 1,655 GiB fitted.)"""
    for devices in (1, 2, 4, 8, 72):
        setting = offloaded(gpu, devices)
        assert setting.node_devices == min(devices, 4)
        assert setting.usable_host_bytes == TRAY_BYTES * USABLE_HOST / min(devices, 4)
    planned = estimate(offloaded(gpu, 4))
    assert not planned.fits and planned.node_host_bytes > TRAY_BYTES
    assert planned.peak.total < planned.setting.usable_bytes
    warning = next(text for text in advise(planned).warnings if "does not fit" in text)
    assert "GiB of a host of 4 devices at the" in warning and "of 849.4 GiB that a plan may take" in warning
    assert " of a host of 4 devices, " in describe_plan(planned)
    assert fewest_devices(offloaded(gpu, 1, 1 << 16)).devices > 4


@pytest.mark.parametrize(("gpu", "rate"), [("gb200", 512e9), ("gb300", 14e12 / 36)])
def test_an_optimizer_on_a_tray_has_the_rate_of_its_processors(gpu: str, rate: float) -> None:
    """(Four devices had that of a rack's 36: a step 18 times too fast.)"""
    for devices in (4, 72):
        setting = offloaded(gpu, devices)
        by_hand = 28 * setting.model.parameters / devices * 4 / (2 * rate)
        assert get_optimizer_seconds(setting) == pytest.approx(by_hand, rel=0.01)


@pytest.mark.parametrize("name", known_hardware())
def test_a_node_has_whole_hosts(name: str) -> None:
    hardware = read_hardware(name)
    assert hardware.host_devices == (4 if name.startswith("gb") else hardware.devices_per_node)
    assert make_setting("llama-3-8b", name).host_name == (
        "host of 4 devices" if name.startswith("gb") else "node's host"
    )
    values = hardware.model_dump() | {"devices_per_host": hardware.devices_per_node + 1}
    with pytest.raises(RingConfigError, match="devices_per_host: expected a divisor of devices_per_node"):
        hardware_from(values, "mine.yaml")


def test_a_ring_over_the_hosts_of_a_node_is_planned_as_it_runs() -> None:
    """(It had stages, as inside a host: ranks count LOCAL_WORLD_SIZE. All goes over the node's links.)"""
    nvl = on_devices(make_setting("llama-3-8b", "gb200"), 8)
    plan = build_plans(nvl)[0][0]
    assert [way.ranks_per_node for way in plan.classes[0].directions] == [4]
    assert not plan.classes[0].directions[0].stages
    assert nvl.node_ranks == Grid(8, 8, 1).ring_ranks_per_node(0, 4) and nvl.bytes_per_s == 9e11
    quick = {"peak_flops": {"float32": 1e30}, "devices_per_node": 16, "devices_per_host": 4}
    hardware = hardware_from({**MACHINE.model_dump(), **quick}, "test")
    setting = small_setting(pattern=Full(), layout="contiguous", hardware=hardware, chunk_bytes=1)
    shard = MODEL.layers * 2 * MODEL.kv_heads * MODEL.head_dim * 4 * (4096 // 16)
    assert setting.node_ranks == 4
    assert layer_passes(setting).total.forward_s == pytest.approx(15 * shard / FAST, rel=1e-6)


def test_three_times_as_many_devices_are_whole_hosts() -> None:
    """(Twelve devices, three trays of a rack, had no row.)"""
    rows = plan_more_devices(on_devices(make_setting("qwen3-4b", "gb200", tokens=1 << 16), 4))
    assert 12 in [plan.setting.devices for plan in rows]


@pytest.mark.parametrize("ulysses", [1, 8, 16])
def test_the_fewest_devices_may_be_whole_racks(ulysses: int) -> None:
    """(No rack was looked at: neither 2^k nor 3 x 2^k is a multiple of 72. The answer was 128.)"""
    rack = on_devices(make_setting("qwen3-235b-a22b", "gb200", "tiles", 2_400 << 10), 72)
    model = replace(rack.model, kv_heads=16)
    rack = replace(rack, checkpointing=True, model=model, ulysses_size=ulysses)
    sizes = [0]
    while (larger := fewest_devices(rack, sizes[-1])) is not None:
        assert larger.ring_size * larger.ulysses_size == larger.devices and larger.ulysses_size == ulysses
        sizes.append(larger.devices)
    racks = [size for size in (72, 144, 216, 288, 432, 576, 864, 1152, 1728) if size % ulysses == 0]
    assert sizes[1] == (128 if ulysses == 16 else 72)  # 16 ranks that share heads divide two racks, not one
    assert set(racks) <= set(sizes) and sizes == sorted(set(sizes)) and sizes[-1] == 1 << 14
    doubled = {1 << power for power in range(7, 15)}
    assert doubled <= set(sizes) and all(size in doubled or size % 72 == 0 for size in sizes)


@pytest.mark.parametrize(
    ("devices", "swap_rate", "zero_rate"), [(2, 64e9, 64e9), (4, 192e9, 192e9), (8, 448e9, 448e9)]
)
def test_links_to_every_peer_are_at_work_at_once(devices: int, swap_rate: float, zero_rate: float) -> None:
    """(All-to-alls and ZeRO of eight MI300X had one of seven links.) A hop has one."""
    ring = on_devices(make_setting("llama-3-8b", "mi300x", tokens=1 << 16), devices)
    assert ring.bytes_per_s == 64e9
    setting = replace(ring, ring_size=1, ulysses_size=devices)
    planned = estimate(setting)
    parameters = 3 * 2 * setting.model.parameters * (devices - 1) / devices
    assert planned.zero_s == pytest.approx(parameters / zero_rate)
    sent = (1 << 16) // devices * 128 * 2 * 2 * (32 + 8) * (devices - 1) / devices
    fixed = 2 * setting.hardware.link_latency_s
    assert head_swaps(setting, 1 << 16).seconds == pytest.approx(sent / swap_rate + fixed, rel=1e-6)
    assert planned.swap_s == pytest.approx(2 * 32 * (sent / swap_rate + fixed), rel=1e-6)


def test_nodes_of_links_have_one_adapter_a_device() -> None:
    """Rings of collectives enter by eight adapters of 50 GB/s; half of sixteen ranks' all-to-alls by one."""
    setting = on_devices(make_setting("llama-3-8b", "mi300x", tokens=1 << 16), 16)
    assert setting.hardware.collective_bytes_per_s(16) == 400e9 and setting.bytes_per_s == 50e9
    model = replace(setting.model, kv_heads=16)
    wide = replace(setting, ring_size=1, ulysses_size=16, model=model)
    own = (1 << 16) // 16 * 128 * 2 * 2 * (32 + 16)
    fixed = 2 * setting.hardware.link_latency_s
    assert head_swaps(wide, 1 << 16).seconds == pytest.approx(own / 2 / 50e9 + fixed)
    one_link = wide.hardware.model_copy(update={"intra_node_links": 1, "inter_node_bytes_per_s": 1e12})
    slow = replace(wide, hardware=one_link)
    assert head_swaps(slow, 1 << 16).seconds == pytest.approx(own * 7 / 16 / 64e9 + fixed)


@pytest.mark.parametrize("name", known_hardware())
def test_a_switch_has_one_rate_to_all_peers(name: str) -> None:
    hardware = read_hardware(name)
    links = 7 if name == "mi300x" else 1
    assert hardware.intra_node_links == links
    for devices in {2, hardware.devices_per_node}:
        rate = hardware.intra_node_bytes_per_s * min(links, devices - 1)
        assert hardware.collective_bytes_per_s(devices) == rate


def test_larger_rings_are_bounded_after_ulysses_has_divided_them() -> None:
    """(384 to 1,024 devices had replicas alone, without a word: 384 x 1 was more than 256 ranks.)"""
    setting = on_devices(make_setting("llama-3-70b", "h100", tokens=1 << 20), 128)
    free = replace(setting, may_add_options=True, may_split_heads=True)
    warnings: list[str] = []
    rows = plan_more_devices(free, warn=warnings.append)
    shapes = [(plan.setting.ring_size, plan.setting.ulysses_size, plan.setting.replicas) for plan in rows]
    rings = [(16 * times, 8, 1) for times in (1, 2, 3, 4, 8)]
    assert [shape for shape in shapes if shape[2] == 1] == rings and not warnings
    assert [shape for shape in shapes if shape[2] > 1] == [(16, 8, times) for times in (2, 3, 4, 8)]
    assert all(plan.fits for plan in rows)


@pytest.mark.parametrize(("devices", "tokens"), [(128, 1 << 20), (16, 64)])
def test_a_ring_that_is_left_out_is_named(devices: int, tokens: int) -> None:
    """(It was left out without a word.)"""
    setting = on_devices(make_setting("qwen3-0.6b", "h100", tokens=tokens), devices)
    warnings: list[str] = []
    rows = plan_more_devices(setting, warn=warnings.append)
    most = max(plan.setting.devices for plan in rows if plan.setting.replicas == 1)
    assert most == (256 if devices == 128 else 64)
    named = "384, 512, 1,024" if devices == 128 else "128"
    assert len(warnings) == 1 and f"a larger ring on {named} devices is left out" in warnings[0]
    quiet: list[str] = []
    plan_more_devices(setting, keeps_ring=True, warn=quiet.append)
    assert not quiet


def make_free(model: str, tokens: int) -> TrainingSetting:
    setting = on_devices(make_setting(model, "h100", tokens=tokens), 128)
    return replace(setting, may_add_options=True, may_split_heads=True)


def test_the_fewest_devices_are_planned_where_ulysses_leaves_a_small_ring() -> None:
    """(512 devices had no seconds: one ring of all was too large to be planned, 64 x 8 is not.)"""
    fewest, planned = fewest_planned(make_free("llama-3-70b", 1 << 26))
    assert fewest is not None and planned is not None and planned.fits
    assert (fewest.ring_size, fewest.ulysses_size, fewest.devices) == (64, 8, 512)


@pytest.mark.night
def test_a_row_that_fits_in_one_ring_alone_does_not_say_that_nothing_fits() -> None:
    warnings: list[str] = []
    free = make_free("llama-3-8b", 1 << 28)
    rows = plan_more_devices(free, warn=warnings.append)
    larger = [plan.setting.devices for plan in rows if plan.setting.replicas == 1]
    assert larger == [128, 256, 1024] and rows[-2].fits
    assert len(warnings) == 1 and "ring on 384, 512 devices is left out" in warnings[0]
    fewest, planned = fewest_planned(free)  # 64 x 8 has no room, which one ring has
    assert fewest is not None and fewest.devices == 512 and planned is None

"""devices(): what there is, usable or not, on machines that are made up below torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakebox import CUDA_UNKNOWN_ERROR, GIB, GPU, FakeBox

import devicekit
from devicekit._backends import this_machine
from devicekit._device.checking import _FOUND
from devicekit.testing import fake_devices

PLUGIN = torch._C._get_privateuse1_backend_name()
SECOND = "GPU-00000001-aaaa-bbbb-cccc-dddddddddddd"
MIX = [
    GPU(name="NVIDIA A100-SXM4-80GB", capability=(8, 0), free=10),
    GPU(name="NVIDIA GeForce GTX 1660", capability=(7, 5), total=6, free=5),
    GPU(name="NVIDIA GeForce GTX 1080", capability=(6, 1), total=8, free=7),
]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test meets another machine in this process: nothing found or decided is kept."""
    this_machine().decisions.clear()
    _FOUND.clear()
    yield
    this_machine().decisions.clear()
    _FOUND.clear()


def accelerators() -> tuple[devicekit.DeviceInfo, ...]:
    *found, cpu = devicekit.devices()
    assert cpu.device == torch.device("cpu")
    return tuple(found)


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        pytest.param(FakeBox(built="cpu"), [], id="cpu"),
        pytest.param(FakeBox(), [], id="no-driver"),
        pytest.param(FakeBox(MIX, driver_cuda="11.4"), [], id="old-driver"),
        pytest.param(FakeBox(MIX, init_error=CUDA_UNKNOWN_ERROR), [], id="broken"),
        pytest.param(FakeBox(MIX, env={"CUDA_VISIBLE_DEVICES": "-1"}), [], id="hidden"),
        pytest.param(FakeBox(MIX), ["cuda:0", "cuda:1", "cuda:2"], id="cuda"),
        pytest.param(FakeBox(MIX, pynvml=True), ["cuda:0", "cuda:1", "cuda:2"], id="cuda-nvml"),
        pytest.param(
            FakeBox(MIX, env={"CUDA_VISIBLE_DEVICES": "2,0"}), ["cuda:0", "cuda:1"], id="2"
        ),
        pytest.param(FakeBox(MIX, built="rocm"), ["cuda:0", "cuda:1", "cuda:2"], id="rocm"),
        pytest.param(FakeBox(xpu=[GPU(), GPU()]), ["xpu:0", "xpu:1"], id="xpu"),
        pytest.param(
            FakeBox(xpu=[GPU(), GPU()], env={"ZE_AFFINITY_MASK": "1"}), ["xpu:0"], id="xpu-masked"
        ),
        pytest.param(FakeBox(mps=True), ["mps:0"], id="mps"),
        pytest.param(FakeBox(mps=False), [], id="no-mps"),
        pytest.param(FakeBox(mtia=[GPU()]), ["mtia:0"], id="mtia"),
        pytest.param(FakeBox([GPU()], hpu=[GPU()]), ["cuda:0", "hpu:0"], id="cuda-and-hpu"),
        pytest.param(
            FakeBox([GPU()], plugin=[GPU(), GPU()]),
            [f"{PLUGIN}:0", f"{PLUGIN}:1", "cuda:0"],
            id="plugin-and-cuda",
        ),
        pytest.param(FakeBox(plugin=[GPU()], plugin_module=False), [], id="plugin-half"),
    ],
)
def test_every_visible_device_is_listed(box: FakeBox, expected: list[str]) -> None:
    with box:
        assert [str(info.device) for info in accelerators()] == expected
        assert accelerators() == accelerators()
        assert box.contexts == set()


@pytest.mark.parametrize("started", [False, True], ids=["cold", "started"])
@pytest.mark.parametrize(
    "options",
    [{"pynvml": True}, {"pynvml": True, "pynvml_bytes": True}, {"smi": True}, {}],
    ids=["pynvml", "bytes", "smi", "neither"],
)
def test_facts_about_nvidia_gpus(options: dict[str, Any], started: bool) -> None:
    with FakeBox(MIX, arch_list="sm_75 sm_80", **options):
        if started:
            with pytest.warns(UserWarning, match="NVIDIA GeForce GTX 1080"):
                torch.cuda.init()
        a100, gtx1660, gtx1080 = accelerators()

    known = bool(options)
    assert a100 == devicekit.DeviceInfo(
        device=torch.device("cuda:0"),
        name="NVIDIA A100-SXM4-80GB",
        total_memory=80 * GIB,
        free_memory=10 * GIB if known else None,
        capability=(8, 0),
        bfloat16=True,
        tensor_cores=True,
    )
    assert gtx1660 == devicekit.DeviceInfo(
        device=torch.device("cuda:1"),
        name="NVIDIA GeForce GTX 1660",
        total_memory=6 * GIB,
        free_memory=5 * GIB if known else None,
        capability=(7, 5),
        bfloat16=False,
        tensor_cores=False,
    )
    assert gtx1080 == devicekit.DeviceInfo(
        device=torch.device("cuda:2"),
        name="NVIDIA GeForce GTX 1080",
        total_memory=8 * GIB,
        free_memory=7 * GIB if known else None,
        capability=(6, 1),
        bfloat16=False,
        tensor_cores=False,
        usable=False,
        reason="architecture not in this build",
    )


def test_facts_about_amd_gpus() -> None:
    gpu = GPU(name="AMD Instinct MI300X", capability=(9, 4), total=192, arch="gfx942:sramecc+")

    with FakeBox([gpu], built="rocm"):
        assert accelerators() == (
            devicekit.DeviceInfo(
                device=torch.device("cuda:0"),
                name="AMD Instinct MI300X",
                total_memory=192 * GIB,
                capability=(9, 4),
                bfloat16=True,
                tensor_cores=True,
            ),
        )


@pytest.mark.parametrize(
    ("box", "name", "total", "bfloat16"),
    [
        pytest.param(FakeBox(xpu=[GPU(name="Arc", total=16)]), "Arc", 16 * GIB, True, id="xpu"),
        pytest.param(FakeBox(mps=True), "Apple M3 Max", None, None, id="mps"),
        pytest.param(
            FakeBox(hpu=[GPU(name="Gaudi3", total=96)]), "Gaudi3", 96 * GIB, True, id="hpu"
        ),
        pytest.param(
            FakeBox(plugin=[GPU(name="X1", total=4)]), "X1", 4 * GIB, None, id="privateuse1"
        ),
        pytest.param(FakeBox(mtia=[GPU()]), "MTIA device", None, None, id="mtia"),
    ],
)
def test_facts_about_other_accelerators(
    box: FakeBox, name: str, total: int | None, bfloat16: bool | None
) -> None:
    with box:
        (info,) = accelerators()

    if info.device.type == "mps":  # newer torch can say more of it
        name, total = info.name, info.total_memory
    assert info == devicekit.DeviceInfo(
        device=info.device, name=name, total_memory=total, bfloat16=bfloat16
    )


@pytest.mark.parametrize(
    ("gpu", "usable"),
    [
        (GPU(mode="prohibited"), False),
        (GPU(mode="exclusive_process", pids=(1,)), False),
        (GPU(mode="exclusive_thread", pids=(1, 2)), False),
        (GPU(mode="exclusive_process"), True),
        (GPU(mode="exclusive_process", pids=(os.getpid(),)), True),
        (GPU(pids=(1, 2, 3)), True),
    ],
    ids=["prohibited", "taken", "taken-twice", "exclusive", "ours", "shared"],
)
@pytest.mark.parametrize("tool", ["pynvml", "smi"])
@pytest.mark.parametrize("started", [False, True], ids=["cold", "started"])
def test_a_gpu_that_others_keep_busy(gpu: GPU, usable: bool, tool: str, started: bool) -> None:
    with FakeBox([gpu], **{tool: True}):
        if started:
            torch.cuda.init()
        (info,) = accelerators()

    assert (info.usable, info.reason) == (usable, None if usable else "busy")


def test_a_gpu_on_which_this_process_holds_memory_is_not_busy() -> None:
    with FakeBox([GPU(mode="exclusive_process", pids=(1,), reserved=1)], pynvml=True):
        torch.cuda.init()
        (info,) = accelerators()

    assert info.usable


def test_devices_are_named_after_what_is_visible() -> None:
    with FakeBox(MIX, pynvml=True, env={"CUDA_VISIBLE_DEVICES": SECOND}):
        (info,) = accelerators()

    assert info.device == torch.device("cuda:0")
    assert info.name == "NVIDIA GeForce GTX 1660"
    assert info.free_memory == 5 * GIB


def test_cuda_counts_a_device_that_does_not_start() -> None:
    env = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

    with FakeBox([GPU()], init_error=CUDA_UNKNOWN_ERROR, env=env):
        (info,) = accelerators()

    assert not info.usable
    assert info.reason == "driver failed"
    assert info.name == "unknown"


def test_the_cpu_is_last_and_always_usable() -> None:
    cpu = devicekit.devices()[-1]

    assert cpu.device == torch.device("cpu")
    assert cpu.usable
    assert cpu.reason is None
    assert cpu.name
    assert cpu.capability is None
    assert cpu.tensor_cores is False
    if cpu.total_memory is not None and cpu.free_memory is not None:
        assert 0 < cpu.free_memory <= cpu.total_memory


def test_an_info_is_a_value() -> None:
    info = devicekit.devices()[-1]

    assert hash(info) == hash(dataclasses.replace(info))
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        info.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        devicekit.DeviceInfo(torch.device("cpu"), "name")  # type: ignore[misc]


def test_every_listed_device_can_be_asked_for() -> None:
    with FakeBox(MIX, pynvml=True, hpu=[GPU()], arch_list="sm_75 sm_80"):
        for info in devicekit.devices():
            if info.usable:
                assert devicekit.device(info.device) == info.device
            else:
                with pytest.raises(devicekit.DeviceUnavailableError, match="GTX 1080"):
                    devicekit.device(info.device)


def test_fake_devices_are_listed() -> None:
    with fake_devices(cuda=1, xpu=2, mps=1, names=["C", "X", "Y", "M"]):
        found = [(str(info.device), info.name) for info in accelerators()]

    assert found == [("cuda:0", "C"), ("xpu:0", "X"), ("xpu:1", "Y"), ("mps:0", "M")]

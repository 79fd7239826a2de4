"""diagnose(): each finding on a machine that is made up, whole pages, and what it must never do."""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fakebox import CUDA_UNKNOWN_ERROR, DRIVER_MISMATCH, GPU, FakeBox
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import devicekit
from devicekit._backends import DeviceInfo, driver, isolation, machine, survey, this_machine
from devicekit._device.checking import _FOUND
from devicekit._diagnose import Diagnosis, Finding, facts, findings, render
from devicekit.testing import fake_devices

TWINS = [GPU(free=10), GPU(free=70)]
AMD = [GPU(name="AMD Instinct MI300X", arch="gfx942"), GPU(name="AMD Instinct MI300X")]
FIRST = "GPU-00000000-aaaa-bbbb-cccc-dddddddddddd"
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="asks in a child on Linux only")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test meets another machine in this process: nothing found or decided is kept."""
    this_machine().decisions.clear()
    _FOUND.clear()
    yield
    this_machine().decisions.clear()
    _FOUND.clear()


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the machine a system of its own: an empty one, and a CPU that is always the same."""
    cpu = DeviceInfo(
        device=torch.device("cpu"), name="CPU", total_memory=64 << 30, free_memory=32 << 30
    )
    numbers = {75, 80, 86, 90, 100, 120}
    table = {"12.8": {"x86_64": numbers, "amd64": numbers, "aarch64": numbers, "arm64": numbers}}
    monkeypatch.setattr(machine.host, "read", lambda: cpu)
    monkeypatch.setattr(survey, "_ROOT", tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu128")
    monkeypatch.setattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", table, raising=False)
    for name in ("KUBERNETES_SERVICE_HOST", "container", "LD_LIBRARY_PATH", "DEVICEKIT_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def build(root: Path, files: Mapping[str, str]) -> None:
    """Put files into the made-up system."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def pci(vendor: str, device_class: str = "0x030200", slot: int = 0) -> dict[str, str]:
    folder = f"sys/bus/pci/devices/0000:0{slot}:00.0"
    return {f"{folder}/vendor": f"{vendor}\n", f"{folder}/class": f"{device_class}\n"}


def module(version: str) -> dict[str, str]:
    text = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Thu Feb  6 2025\n"
    return {"proc/driver/nvidia/version": text}


def library(version: str) -> dict[str, str]:
    names = ("libcuda.so", "libcuda.so.1", f"libcuda.so.{version}")
    return {f"usr/lib64/{name}": "" for name in names}


def codes(diagnosis: Diagnosis) -> list[str]:
    return [finding.code for finding in diagnosis.findings]


def only(code: str) -> Finding:
    """Return the finding with this code of the machine that is in place, which must be there."""
    found = [f for f in devicekit.diagnose().findings if f.code == code]
    assert len(found) == 1, codes(devicekit.diagnose())
    return found[0]


# ---- each finding: the machine, the code, the severity, the cause, the remedy --------------------

NVIDIA, AMD_ID, INTEL = "0x10de", "0x1002", "0x8086"
BOXES: dict[str, tuple[FakeBox, dict[str, str], tuple[str, str, str, str]]] = {
    "cpu build, NVIDIA GPU seen by nvidia-smi": (
        FakeBox(TWINS, built="cpu", smi=True),
        {},
        (
            "cpu-only-build",
            "error",
            "is for the CPU only, and the machine has 2 NVIDIA GPUs (NVIDIA H100 80GB HBM3).",
            "Install a build of torch with CUDA 12 (the driver supports CUDA up to 12.8).",
        ),
    ),
    "cpu build, NVIDIA GPU on the bus": (
        FakeBox(built="cpu"),
        pci(NVIDIA) | pci(NVIDIA, "0x030000", slot=1) | pci(NVIDIA, "0x040300", slot=2),
        (
            "cpu-only-build",
            "error",
            "is for the CPU only, and the machine has 2 NVIDIA devices on its PCI bus.",
            "Install a build of torch with CUDA.",
        ),
    ),
    "cpu build, NVIDIA GPU seen by its kernel module": (
        FakeBox(built="cpu"),
        module("570.124.06"),
        (
            "cpu-only-build",
            "error",
            "the machine has an NVIDIA GPU (its kernel module is loaded).",
            "Install a build of torch with CUDA.",
        ),
    ),
    "cpu build, AMD GPU": (
        FakeBox(built="cpu"),
        pci(AMD_ID) | {"dev/kfd": ""},
        (
            "cpu-only-build",
            "error",
            "is for the CPU only, and the machine has 1 AMD device on its PCI bus.",
            "Install a build of torch with ROCm.",
        ),
    ),
    "cpu build, AMD GPU seen by its device file": (
        FakeBox(built="cpu"),
        {"dev/kfd": ""},
        (
            "cpu-only-build",
            "error",
            "the machine has an AMD GPU (its device file is there).",
            "Install a build of torch with ROCm.",
        ),
    ),
    "cpu build, Intel GPU": (
        FakeBox(built="cpu"),
        pci(INTEL, "0x030000"),
        (
            "cpu-only-build",
            "note",
            "is for the CPU only, and the machine has 1 Intel device on its PCI bus.",
            "To use it, install a build of torch with XPU; otherwise there is nothing to do.",
        ),
    ),
    "ROCm build, NVIDIA GPU": (
        FakeBox(built="rocm"),
        pci(NVIDIA),
        (
            "other-build",
            "error",
            "is for ROCm, and the machine has 1 NVIDIA device on its PCI bus.",
            "Install a build of torch with CUDA.",
        ),
    ),
    "Ascend without its plugin": (
        FakeBox(built="cpu"),
        {"dev/davinci0": ""},
        (
            "plugin-not-installed",
            "error",
            "The machine has a Huawei device (its device file is there), and its plugin for torch "
            "is not installed.",
            "Install the plugin and import torch_npu.",
        ),
    ),
    "Gaudi seen by its device file": (
        FakeBox(built="cpu"),
        {"dev/hl0": "", "dev/dri/renderD128": "", "dev/nvidiactl": ""},
        (
            "plugin-not-installed",
            "error",
            "The machine has a Habana device (its device file is there), and its plugin for torch "
            "is not installed.",
            "Install the plugin and import habana_frameworks.torch.",
        ),
    ),
    "AMD driver that gives no device": (
        FakeBox(built="rocm"),
        pci(AMD_ID) | {"dev/kfd": ""},
        (
            "driver-failed",
            "error",
            "The driver gives ROCm no device, and the machine has 1 AMD device on its PCI bus.",
            "Restart the machine; look for 'NVRM' or 'amdgpu' in its kernel log.",
        ),
    ),
    "NVIDIA GPU of a Jetson, and a library that does not tell its version": (
        FakeBox(built="cpu"),
        {"dev/nvhost-gpu": "", "usr/lib/libcuda.so.1": "", "proc/driver/nvidia/version": "?"},
        (
            "cpu-only-build",
            "error",
            "the machine has an NVIDIA GPU (its kernel module is loaded).",
            "Install a build of torch with CUDA.",
        ),
    ),
    "Gaudi without its plugin": (
        FakeBox(built="cpu"),
        pci("0x1da3", "0x120000"),
        (
            "plugin-not-installed",
            "error",
            "The machine has 1 Habana device on its PCI bus, and its plugin for torch is not "
            "installed.",
            "Install the plugin and import habana_frameworks.torch.",
        ),
    ),
    "no driver": (
        FakeBox(),
        pci(NVIDIA),
        (
            "no-driver",
            "error",
            "The machine has 1 NVIDIA device on its PCI bus, and no NVIDIA driver is loaded.",
            "Install NVIDIA's driver, or load its kernel module with 'modprobe nvidia'.",
        ),
    ),
    "kernel module without libraries": (
        FakeBox(),
        pci(NVIDIA) | module("570.124.06"),
        (
            "no-driver",
            "error",
            "The machine has 1 NVIDIA device on its PCI bus, and torch finds no library libcuda.",
            "Install the driver's libraries (libcuda.so.1) on the search path of libraries.",
        ),
    ),
    "no AMD driver": (
        FakeBox(built="rocm"),
        pci(AMD_ID),
        (
            "no-driver",
            "error",
            "The machine has 1 AMD device on its PCI bus, and /dev/kfd is not there.",
            "Install AMD's driver amdgpu; start a container with --device=/dev/kfd "
            "--device=/dev/dri.",
        ),
    ),
    "driver too old": (
        FakeBox(TWINS, pynvml=True, driver="470.57.02", driver_cuda="11.4"),
        {},
        (
            "driver-too-old",
            "error",
            "The NVIDIA driver 470.57.02 supports CUDA up to 11.4, and this build of torch is for "
            "CUDA 12.8.",
            "Update the driver, or install a build of torch for CUDA 11.",
        ),
    ),
    "driver too old, said by torch alone": (
        FakeBox(TWINS, driver_cuda="11.4"),
        {},
        (
            "driver-too-old",
            "error",
            "The NVIDIA driver supports CUDA up to 11.4, and this build of torch is for CUDA 12.8.",
            "Update the driver, or install a build of torch for CUDA 11.",
        ),
    ),
    "driver and library differ, said by nvidia-smi": (
        FakeBox(TWINS, smi=True, pynvml=True, nvml_error=18),
        {},
        (
            "driver-mismatch",
            "error",
            "NVIDIA's kernel module and its libraries are of different versions, as after an "
            "update of the driver.",
            "Restart the machine; in a container, start it anew after the update of the host.",
        ),
    ),
    "driver and library differ, said by CUDA": (
        FakeBox(TWINS, init_error=DRIVER_MISMATCH),
        module("570.124.06") | library("570.133.20"),
        (
            "driver-mismatch",
            "error",
            "NVIDIA's kernel module and its libraries are of different versions (kernel module "
            "570.124.06, library 570.133.20), as after an update of the driver.",
            "Restart the machine; in a container, start it anew after the update of the host.",
        ),
    ),
    "driver fails": (
        FakeBox(TWINS, pynvml=True, init_error=CUDA_UNKNOWN_ERROR),
        {},
        (
            "driver-failed",
            "error",
            "CUDA does not start: CUDA unknown error - this may be due to an incorrectly set up "
            "environment, e.g. changing env variable CUDA_VISIBLE_DEVICES after program start.",
            "Set variables before the program starts and run it again; if it fails still, reload "
            "the kernel module nvidia_uvm or restart the machine.",
        ),
    ),
    "driver gives no device": (
        FakeBox(driver_installed=True),
        pci(NVIDIA),
        (
            "driver-failed",
            "error",
            "The driver gives CUDA no device, and the machine has 1 NVIDIA device on its PCI bus.",
            "Restart the machine; look for 'NVRM' or 'amdgpu' in its kernel log.",
        ),
    ),
    "count and availability disagree": (
        FakeBox(TWINS, pynvml=True, init_error=CUDA_UNKNOWN_ERROR),
        {},
        (
            "count-disagrees",
            "warning",
            "torch.cuda.device_count() is 2, which the management library says, and CUDA does not "
            "start.",
            "Go by devicekit.auto() or torch.cuda.is_available(), not by the count.",
        ),
    ),
    "container without the runtime, no libraries": (
        FakeBox(),
        pci(NVIDIA) | module("570.124.06") | {".dockerenv": ""},
        (
            "container-without-gpu",
            "error",
            "This container was started without NVIDIA's container runtime: the machine has 1 "
            "NVIDIA device on its PCI bus, and the container has no library libcuda.",
            "Start it with 'docker run --gpus all', or with the NVIDIA device plugin in "
            "Kubernetes.",
        ),
    ),
    "container without the runtime, no device file": (
        FakeBox(env={"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),
        module("570.124.06") | library("570.124.06"),
        (
            "container-without-gpu",
            "error",
            "This container was started without NVIDIA's container runtime: the machine has an "
            "NVIDIA GPU (its kernel module is loaded), and the container has no device file "
            "/dev/nvidia0.",
            "Start it with 'docker run --gpus all', or with the NVIDIA device plugin in "
            "Kubernetes.",
        ),
    ),
    "GPU older than the build": (
        FakeBox([GPU(name="GTX 1080", capability=(6, 1))], pynvml=True),
        {},
        (
            "architecture-not-built",
            "error",
            "cuda:0 (GTX 1080) has compute capability 6.1, older than what this build of torch has "
            "kernels for (sm_75 sm_80 sm_86 sm_90 sm_100 sm_120).",
            "Install an older build of torch, or one for an older CUDA.",
        ),
    ),
    "GPU newer than the build": (
        FakeBox([GPU(name="Next", capability=(13, 0))], pynvml=True),
        {},
        (
            "architecture-not-built",
            "error",
            "cuda:0 (Next) has compute capability 13.0, newer than what this build of torch has "
            "kernels for (sm_75 sm_80 sm_86 sm_90 sm_100 sm_120).",
            "Install a newer build of torch, or one for a newer CUDA.",
        ),
    ),
    "AMD GPU that is not in the build": (
        FakeBox([GPU(name="RX 580", arch="gfx803")], built="rocm"),
        {},
        (
            "architecture-not-built",
            "error",
            "cuda:0 (RX 580) has an architecture, other than what this build of torch has kernels "
            "for (gfx900 gfx906 gfx90a gfx942 gfx1030 gfx1100 gfx1200).",
            "Install a build of torch that has kernels for it.",
        ),
    ),
    "hidden by a variable": (
        FakeBox(TWINS, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "-1"}),
        {},
        (
            "hidden-by-variable",
            "error",
            "CUDA_VISIBLE_DEVICES='-1' hides all of 2 CUDA devices.",
            "Unset CUDA_VISIBLE_DEVICES, or name devices in it, before the program starts.",
        ),
    ),
    "hidden by a variable, nobody knows what": (
        FakeBox(TWINS, env={"CUDA_VISIBLE_DEVICES": ""}),
        {},
        (
            "hidden-by-variable",
            "error",
            "CUDA_VISIBLE_DEVICES='' hides every CUDA device.",
            "Unset CUDA_VISIBLE_DEVICES, or name devices in it, before the program starts.",
        ),
    ),
    "partly hidden": (
        FakeBox(TWINS, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "1"}),
        {},
        (
            "partly-hidden",
            "note",
            "CUDA_VISIBLE_DEVICES='1' leaves 1 of 2 devices visible, numbered anew from 0.",
            "Nothing to do if that is meant; otherwise change CUDA_VISIBLE_DEVICES before the "
            "program starts.",
        ),
    ),
    "malformed, and part of it read": (
        FakeBox(TWINS, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "0;1"}),
        {},
        (
            "malformed-variable",
            "warning",
            "CUDA_VISIBLE_DEVICES='0;1' has the entry '0;1', which is neither a number nor a UUID; "
            "CUDA reads the list as 0.",
            "Write numbers with commas between them, such as CUDA_VISIBLE_DEVICES=0,1, or UUIDs "
            "only.",
        ),
    ),
    "malformed, and nothing left": (
        FakeBox(TWINS, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "all"}),
        {},
        (
            "malformed-variable",
            "error",
            "CUDA_VISIBLE_DEVICES='all' has the entry 'all', which is neither a number nor a UUID; "
            "CUDA reads the list as no device.",
            "Write numbers with commas between them, such as CUDA_VISIBLE_DEVICES=0,1, or UUIDs "
            "only.",
        ),
    ),
    "numbers among UUIDs": (
        FakeBox(TWINS, pynvml=True, env={"CUDA_VISIBLE_DEVICES": f"{FIRST},1"}),
        {},
        (
            "malformed-variable",
            "warning",
            f"CUDA_VISIBLE_DEVICES='{FIRST},1' has the entry '1', which is neither a number nor a "
            "UUID like those before it; CUDA reads the list as 0.",
            "Write numbers with commas between them, such as CUDA_VISIBLE_DEVICES=0,1, or UUIDs "
            "only.",
        ),
    ),
    "malformed mask of Intel": (
        FakeBox(xpu=[GPU(name="Intel Max 1550")], env={"ZE_AFFINITY_MASK": "gpu0"}),
        {},
        (
            "malformed-variable",
            "warning",
            "ZE_AFFINITY_MASK='gpu0' is not a list of numbers.",
            "Write numbers with commas between them: ZE_AFFINITY_MASK=0,1.",
        ),
    ),
    "duplicate entry": (
        FakeBox(TWINS, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "0,0"}),
        {},
        (
            "duplicate-entry",
            "error",
            "CUDA_VISIBLE_DEVICES='0,0' names 0 twice, for which CUDA hides every device.",
            "Name each device once in CUDA_VISIBLE_DEVICES.",
        ),
    ),
    "unknown number": (
        FakeBox(TWINS, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "0,9,1"}),
        {},
        (
            "unknown-entry",
            "warning",
            "CUDA_VISIBLE_DEVICES='0,9,1' ends for CUDA at the entry '9', which is none of the 2 "
            "devices here.",
            "Name devices of this machine in CUDA_VISIBLE_DEVICES: numbers below 2, or UUIDs.",
        ),
    ),
    "unknown UUID": (
        FakeBox(TWINS, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "GPU-77777777"}),
        {},
        (
            "unknown-entry",
            "error",
            "CUDA_VISIBLE_DEVICES='GPU-77777777' ends for CUDA at the entry 'GPU-77777777', which "
            "is none of the 2 devices here.",
            "Name devices of this machine in CUDA_VISIBLE_DEVICES: numbers below 2, or UUIDs.",
        ),
    ),
    "ambiguous UUID": (
        FakeBox(TWINS, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "GPU-0000"}),
        {},
        (
            "unknown-entry",
            "error",
            "CUDA_VISIBLE_DEVICES='GPU-0000' ends for CUDA at the entry 'GPU-0000', which fits "
            "several of the 2 devices here.",
            "Name devices of this machine in CUDA_VISIBLE_DEVICES: numbers below 2, or UUIDs.",
        ),
    ),
    "several MIG slices": (
        FakeBox(
            [GPU(name="A100", migs=("MIG-aa", "MIG-bb"))],
            pynvml=True,
            env={"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb"},
        ),
        {},
        (
            "mig",
            "warning",
            "CUDA_VISIBLE_DEVICES names 2 MIG slices, and CUDA shows a process one: the first.",
            "Start one process for each slice, with its UUID in CUDA_VISIBLE_DEVICES.",
        ),
    ),
    "a GPU that is cut": (
        FakeBox([GPU(name="A100", migs=("MIG-aa", "MIG-bb"))], pynvml=True),
        {},
        (
            "mig",
            "note",
            "A100 is cut into MIG slices, of which CUDA shows a process one.",
            "To choose a slice, put its UUID ('nvidia-smi -L') into CUDA_VISIBLE_DEVICES.",
        ),
    ),
    "ROCm masked twice": (
        FakeBox(AMD, built="rocm", env={"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}),
        {},
        (
            "rocm-double-mask",
            "error",
            "ROCR_VISIBLE_DEVICES='1' hides devices first, and HIP_VISIBLE_DEVICES='1' then "
            "numbers those that are left, from 0.",
            "Set one of them only: unset ROCR_VISIBLE_DEVICES.",
        ),
    ),
    "busy": (
        FakeBox([GPU(mode="exclusive_process", pids=(5,))], pynvml=True),
        {},
        (
            "device-busy",
            "warning",
            "cuda:0 (NVIDIA H100 80GB HBM3) is in a compute mode that keeps this process out: "
            "exclusive with another process on it, or prohibited.",
            "End the other process, or have an administrator run "
            "'nvidia-smi --compute-mode=DEFAULT'.",
        ),
    ),
    "MPS built and not usable": (
        FakeBox(mps=False),
        {},
        (
            "mps-not-usable",
            "warning",
            "This build of torch has MPS, and this Mac has no GPU that it can use: it needs Apple "
            "silicon, or an AMD GPU, with a recent macOS, and no virtual machine.",
            "Update macOS, or use the CPU.",
        ),
    ),
    "more ranks than devices": (
        FakeBox(TWINS, pynvml=True, env={"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}),
        {},
        (
            "too-many-ranks",
            "warning",
            "LOCAL_WORLD_SIZE is 4, and this process sees 2 cuda devices.",
            "Start at most 2 processes on this machine.",
        ),
    ),
    "the rank that has none": (
        FakeBox(TWINS, pynvml=True, env={"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}),
        {},
        (
            "too-many-ranks",
            "error",
            "LOCAL_WORLD_SIZE is 4, and this process sees 2 cuda devices.",
            "Start at most 2 processes on this machine.",
        ),
    ),
    "auto() refuses": (
        FakeBox(built="cpu", env={"DEVICEKIT_DEVICE": "cuda0"}),
        {},
        (
            "auto-refuses",
            "error",
            "devicekit.auto() refuses to choose: The environment variable DEVICEKIT_DEVICE is set "
            "to 'cuda0'. 'cuda0' is not a device. Did you mean 'cuda:0'? Unset it to let auto() "
            "choose.",
            "Correct or unset the variable that it names.",
        ),
    ),
    "check by NVML": (
        FakeBox(TWINS, pynvml=True, env={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}),
        {},
        (
            "nvml-based-check",
            "note",
            "PYTORCH_NVML_BASED_CUDA_CHECK=1 makes torch.cuda.is_available() count the devices "
            "that the management library knows, without asking whether CUDA starts.",
            "Unset it where is_available() has to be true to the letter.",
        ),
    ),
    "check by NVML that is wrong": (
        FakeBox(
            TWINS,
            pynvml=True,
            init_error=CUDA_UNKNOWN_ERROR,
            env={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        ),
        {},
        (
            "nvml-based-check",
            "warning",
            "without asking whether CUDA starts, and it does not.",
            "Unset it where is_available() has to be true to the letter.",
        ),
    ),
    "order": (
        FakeBox([GPU(name="slow"), GPU(name="fast", speed=9)], pynvml=True),
        {},
        (
            "order-differs",
            "note",
            "The GPUs are of several models, so CUDA numbers the fastest first, and nvidia-smi "
            "goes by the PCI bus.",
            "Set CUDA_DEVICE_ORDER=PCI_BUS_ID to number them the same way.",
        ),
    ),
    "nothing at all": (
        FakeBox(built="cpu"),
        {},
        (
            "no-accelerator",
            "note",
            "No GPU or other accelerator that torch could use is found here.",
            "Nothing to do: torch computes on the CPU.",
        ),
    ),
    "nothing for a CUDA build": (
        FakeBox(),
        {},
        (
            "no-accelerator",
            "note",
            "This build of torch is for CUDA 12.8, and no NVIDIA GPU and no driver for one are "
            "found here.",
            "Nothing to do on a machine without one: torch computes on the CPU.",
        ),
    ),
}


@pytest.fixture(params=["in a child", "here"])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask in a child process, and once more in this one, as on other systems than Linux."""
    if request.param == "here":
        monkeypatch.setattr(machine, "can_use_child", lambda: False)


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(("box", "files", "expected"), BOXES.values(), ids=BOXES.keys())
def test_finds(
    box: FakeBox, files: dict[str, str], expected: tuple[str, str, str, str], root: Path
) -> None:
    build(root, files)
    code, severity, cause, remedy = expected

    with box:
        finding = only(code)

    assert (finding.severity, finding.remedy) == (severity, remedy)
    assert finding.cause.endswith(cause)


def test_finds_device_files_that_are_closed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(root, pci(AMD_ID) | {"dev/kfd": ""})
    monkeypatch.setattr(survey.os, "access", lambda path, mode: False)

    with FakeBox(built="rocm"):
        finding = only("no-permission")

    assert finding.cause == "This process may not open /dev/kfd, through which the GPU is used."
    assert finding.remedy == "Add the user to the groups 'render' and 'video', and log in again."


def test_finds_a_variable_changed_too_late() -> None:
    with FakeBox(TWINS, pynvml=True):
        torch.cuda.init()
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        finding = only("variable-changed-late")

    assert finding.severity == "error"
    assert finding.cause == (
        "CUDA_VISIBLE_DEVICES was changed to '1' after CUDA had started, which goes on with the 2 "
        "devices that it saw then."
    )
    assert finding.remedy == "Set it before the program starts, not in it."


@pytest.mark.parametrize("value", ["1", FIRST, "0,1", None])
def test_a_variable_set_in_time_is_no_finding(value: str | None) -> None:
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    with FakeBox(TWINS, pynvml=True, env=env):
        torch.cuda.init()

        assert "variable-changed-late" not in codes(devicekit.diagnose())


def test_finds_a_plugin_that_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_npu.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(tmp_path)

    with FakeBox(built="cpu"):
        finding = only("plugin-not-imported")

    assert finding.about == "npu"
    assert finding.cause == (
        "The plugin torch_npu is installed and not imported, so torch does not know 'npu'."
    )
    assert finding.remedy == "Write 'import torch_npu' before the device is used."
    assert "torch_npu" not in sys.modules


def test_a_plugin_that_is_imported_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))

    with FakeBox(built="cpu"):
        assert "plugin-not-imported" not in codes(devicekit.diagnose())


def test_finds_a_fork_of_a_process_that_had_started_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeBox(TWINS):
        monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
        finding = only("forked-after-start")

    assert finding.cause == (
        "This process was forked from one that had started CUDA, and cannot use it."
    )


def test_a_launcher_that_gives_each_process_a_device_is_no_finding() -> None:
    env = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "1"}
    with FakeBox(TWINS, pynvml=True, env=env):
        assert codes(devicekit.diagnose()) == ["partly-hidden"]


@pytest.mark.parametrize("value", ["0", "1,0", f"{FIRST}", "GPU-00000000", " 0 , 1 ", "01"])
def test_a_good_variable_is_no_warning(value: str) -> None:
    with FakeBox(TWINS, pynvml=True, env={"CUDA_VISIBLE_DEVICES": value}):
        assert set(codes(devicekit.diagnose())) <= {"partly-hidden"}


@pytest.mark.parametrize("env", [{"ZE_AFFINITY_MASK": "0"}, {"ZE_AFFINITY_MASK": "0.1, 1"}])
def test_a_good_mask_of_intel_is_no_warning(env: dict[str, str]) -> None:
    with FakeBox(xpu=[GPU(name="Intel Max 1550")] * 2, env=env):
        assert set(codes(devicekit.diagnose())) <= {"partly-hidden"}


def test_a_working_machine_has_no_findings() -> None:
    with FakeBox(TWINS, pynvml=True):
        diagnosis = devicekit.diagnose()

    assert diagnosis.findings == ()
    assert str(diagnosis.facts.choice) == "cuda:1"
    assert repr(diagnosis) == "<Diagnosis: auto() is cuda:1; nothing is wrong>"
    assert diagnosis.usable("cuda")
    assert diagnosis.usable("cuda", 1)
    assert not diagnosis.usable("cuda", 2)


def test_an_integrated_gpu_beside_one_that_works_is_a_note(root: Path) -> None:
    build(root, pci(AMD_ID) | {"dev/kfd": ""})

    with FakeBox(TWINS, pynvml=True):
        finding = only("other-build")

    assert finding.severity == "note"


def test_devices_that_do_not_start_are_not_usable() -> None:
    with FakeBox(TWINS, pynvml=True, init_error=CUDA_UNKNOWN_ERROR):
        diagnosis = devicekit.diagnose()

    assert [info.reason for info in diagnosis.facts.devices] == ["driver failed"] * 2 + [None]
    assert not diagnosis.usable("cuda")


def test_the_worst_comes_first() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0;1", "DEVICEKIT_DEVICE": "nonsense"}
    with FakeBox(TWINS, pynvml=True, env=env):
        severities = [f.severity for f in devicekit.diagnose().findings]

    assert severities == ["error", "warning", "note"]


# ---- what it does to the process, and to its time ------------------------------------------------


@ON_LINUX
@pytest.mark.parametrize("management", [{"pynvml": True}, {"smi": True}, {}], ids=repr)
def test_leaves_the_process_fit_to_fork(management: dict[str, bool]) -> None:
    with FakeBox(TWINS, **management) as box:
        diagnosis = devicekit.diagnose()

        assert diagnosis.usable("cuda")
        assert not box.fork_poisoned
        assert box.contexts == set()


@ON_LINUX
def test_decides_nothing_for_the_program(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "devicekit")

    with FakeBox(TWINS, pynvml=True):
        devicekit.diagnose()

    assert this_machine().decisions == {}
    assert caplog.records == []


def test_asks_here_once_cuda_runs_here() -> None:
    with FakeBox(TWINS) as box:
        torch.cuda.init()
        diagnosis = devicekit.diagnose()

        assert diagnosis.findings == ()
        assert box.contexts == set()


@ON_LINUX
def test_tells_what_auto_has_decided() -> None:
    with FakeBox(TWINS, pynvml=True) as box:
        devicekit.auto()
        box.change(0, free=79)

        assert str(devicekit.diagnose().facts.choice) == str(devicekit.auto()) == "cuda:1"


def hang() -> None:
    time.sleep(3600)  # whoever waits for it waits for long


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    msg = "no such luck"
    raise RuntimeError(msg)


@ON_LINUX
@pytest.mark.parametrize(
    ("trouble", "code", "cause"),
    [
        (
            hang,
            "driver-blocked",
            "The question for 'the start of CUDA' was not answered in time: a driver hangs.",
        ),
        (
            crash,
            "probe-crashed",
            "The process that asked for 'the start of CUDA' crashed in the driver or a plugin.",
        ),
        (
            raise_error,
            "probe-failed",
            "The question for 'the start of CUDA' ended in an error: RuntimeError: no such luck.",
        ),
    ],
)
def test_survives_a_driver_that(
    trouble: Callable[[], None], code: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "_LIMIT", 0.5)
    monkeypatch.setattr(machine.cuda, "starts", trouble)

    with FakeBox(TWINS, pynvml=True):
        diagnosis = devicekit.diagnose()

    assert codes(diagnosis) == [code]
    assert diagnosis.findings[0].cause == cause
    assert str(diagnosis.facts.choice) == "cuda:1"  # what was answered before is kept


@pytest.mark.usefixtures("asked")
def test_survives_nvidia_smi_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_TIMEOUT", 0.3)
    monkeypatch.setattr(survey, "_PATIENCE", 0.3)

    with FakeBox(TWINS, smi=True, smi_delay=60, nvml=False):
        diagnosis = devicekit.diagnose()

    assert codes(diagnosis) == ["driver-blocked"]
    assert "nvidia-smi does not answer" in str(diagnosis)
    assert "auto()     refuses: not asked, because the driver does not answer" in str(diagnosis)


@pytest.mark.parametrize("question", ["accelerator_types", "survey", "accelerator", "starts"])
def test_survives_a_plugin_that_raises(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, *args: object) -> None:
        raise_error()

    monkeypatch.setattr(type(this_machine()), question, refuse)
    monkeypatch.setattr(isolation, "can_use_child", lambda: False)
    monkeypatch.setattr(machine, "can_use_child", lambda: False)

    with FakeBox(TWINS, pynvml=True):
        diagnosis = devicekit.diagnose()

    assert "probe-failed" in codes(diagnosis)
    assert "RuntimeError: no such luck" in str(diagnosis)


def test_a_check_that_fails_costs_its_findings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(known: facts.Facts) -> Iterator[Finding]:
        raise_error()
        yield from ()

    monkeypatch.setattr(findings, "_CHECKS", (broken, *findings._CHECKS))

    with FakeBox(TWINS, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "0,0"}):
        assert codes(devicekit.diagnose()) == ["duplicate-entry", "probe-failed"]


def test_asks_here_where_no_process_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", refuse, raising=False)

    with FakeBox(TWINS, pynvml=True):
        assert devicekit.diagnose().findings == ()


@ON_LINUX
def test_the_child_sends_what_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(before: Mapping[str, Any]) -> Any:
        return dict(before)

    def fail(before: Mapping[str, Any]) -> Any:
        raise_error()

    reading, writing = os.pipe()
    with monkeypatch.context() as patch:
        logger = logging.getLogger("devicekit")
        patch.setattr(logger, "filters", [])
        for name in ("_exit", "dup2", "setpgid"):
            patch.setattr(os, name, lambda *args: None)
        isolation._answer([("first", ask), ("second", fail), ("third", ask)], writing)
        assert not logger.filter(logging.makeLogRecord({}))
    os.close(writing)

    answers = isolation._unpack(*isolation._receive(reading)[:1], in_time=True)
    assert answers.values == {"first": {}, "third": {"first": {}}}
    assert answers.failed == {"second": "RuntimeError: no such luck"}
    assert (answers.blocked, answers.crashed) == (None, None)


def test_asks_here_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")

    assert not isolation.can_use_child()


@ON_LINUX
def test_asks_here_where_others_have_started_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_open_files", lambda: ["/dev/null", "/dev/nvidia-uvm"])

    assert not isolation.can_use_child()


def test_an_answer_that_is_cut_off_is_left_out() -> None:
    assert isolation._unpack(b"\x40" + b"\0" * 10, in_time=True) == isolation.Answers()


# ---- fuzzed variables ----------------------------------------------------------------------------

NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "DEVICEKIT_DEVICE",
    "HIP_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
PARTS = ["0", "1", ",", ";", "-", " ", "GPU-", "MIG-", "all", "GPU-00000000", ":", "\n", "9" * 30]
VALUES = st.one_of(
    st.lists(st.sampled_from(PARTS), max_size=6).map("".join),
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    environ=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
    counts=st.sampled_from([{"cuda": 2}, {"rocm": 2}, {"xpu": 2}, {"cuda": 0}, {"mps": 1}, {}]),
)
def test_no_variable_breaks_it(environ: dict[str, str], counts: dict[str, int]) -> None:
    with fake_devices(**counts, environ=environ):
        diagnosis = devicekit.diagnose()

    assert_well_formed(diagnosis)
    assert "probe-failed" not in codes(diagnosis)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(environ=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
def test_no_variable_breaks_it_below_torch(environ: dict[str, str]) -> None:
    with FakeBox(TWINS, pynvml=True, env=environ):
        assert_well_formed(devicekit.diagnose())


def assert_well_formed(diagnosis: Diagnosis) -> None:
    page = str(diagnosis)
    assert all(len(line) <= 100 for line in page.splitlines())
    assert page.isascii() or any(not value.isascii() for _, value in diagnosis.facts.environment)
    json.dumps(diagnosis.to_dict())
    assert "<script" not in diagnosis._repr_html_()
    for finding in diagnosis.findings:
        assert finding.cause.endswith((".", "?")), finding
        assert finding.remedy.endswith("."), finding


# ---- whole pages ---------------------------------------------------------------------------------

HEAD = (
    f"devicekit  {devicekit.__version__}, Python {platform.python_version()}, "
    f"{platform.system()} {platform.machine()}"
)
CPU = "CPU, 32.0 of 64.0 GiB free, usable"
H100 = "NVIDIA H100 80GB HBM3"
TRAITS = "capability 9.0, bfloat16, tensor cores,"
PAGES: dict[str, tuple[FakeBox, str]] = {
    "works": (
        FakeBox(TWINS, pynvml=True),
        f"""
{HEAD}
torch      2.13.0+cu128, built for CUDA 12.8
driver     NVIDIA 570.124.06, CUDA up to 12.8
auto()     cuda:1: the most free memory of 2 CUDA devices (70.0 GiB)

Nothing is wrong.

devices
  cuda:0  {H100}, 10.0 of 80.0 GiB free, {TRAITS}
          usable
  cuda:1  {H100}, 70.0 of 80.0 GiB free, {TRAITS}
          usable
  cpu     {CPU}

variables
  none that matters is set
""",
    ),
    "no accelerator": (
        FakeBox(built="cpu"),
        f"""
{HEAD}
torch      2.13.0+cu128, built for the CPU only
driver     no NVIDIA driver
auto()     cpu: no usable accelerator

note     no-accelerator
         No GPU or other accelerator that torch could use is found here.
         Nothing to do: torch computes on the CPU.

devices
  cpu  {CPU}

variables
  none that matters is set
""",
    ),
    "driver too old": (
        FakeBox(TWINS, pynvml=True, driver_cuda="11.4"),
        f"""
{HEAD}
torch      2.13.0+cu128, built for CUDA 12.8
driver     NVIDIA 570.124.06, CUDA up to 11.4
auto()     cpu: no usable accelerator
           passed over: cuda, driver too old

error    driver-too-old
         The NVIDIA driver 570.124.06 supports CUDA up to 11.4, and this build of torch is for CUDA
         12.8.
         Update the driver, or install a build of torch for CUDA 11.
warning  count-disagrees
         torch.cuda.device_count() is 2, which the management library says, and CUDA does not start.
         Go by devicekit.auto() or torch.cuda.is_available(), not by the count.

devices
  cpu  {CPU}

variables
  none that matters is set
""",
    ),
    "half of it hidden by UUID": (
        FakeBox(TWINS, pynvml=True, env={"CUDA_VISIBLE_DEVICES": FIRST, "LOCAL_RANK": "0"}),
        f"""
{HEAD}
torch      2.13.0+cu128, built for CUDA 12.8
driver     NVIDIA 570.124.06, CUDA up to 12.8
auto()     cuda:0: the only visible device, LOCAL_RANK=0

note     partly-hidden
         CUDA_VISIBLE_DEVICES='GPU-00000000...' leaves 1 of 2 devices visible, numbered anew from 0.
         Nothing to do if that is meant; otherwise change CUDA_VISIBLE_DEVICES before the program
         starts.

devices
  cuda:0  {H100}, 10.0 of 80.0 GiB free, {TRAITS}
          usable
  cpu     {CPU}

variables
  CUDA_VISIBLE_DEVICES  'GPU-00000000...'
  LOCAL_RANK            '0'
""",
    ),
    "ROCm masked twice": (
        FakeBox(AMD, built="rocm", env={"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}),
        f"""
{HEAD}
torch      2.13.0+cu128, built for ROCm 6.3.42134-a9a80e791
driver     none of AMD (/dev/kfd)
auto()     cpu: no usable accelerator
           passed over: cuda, hidden by a visibility variable

error    rocm-double-mask
         ROCR_VISIBLE_DEVICES='1' hides devices first, and HIP_VISIBLE_DEVICES='1' then numbers
         those that are left, from 0.
         Set one of them only: unset ROCR_VISIBLE_DEVICES.

devices
  cpu  {CPU}

variables
  ROCR_VISIBLE_DEVICES  '1'
  HIP_VISIBLE_DEVICES   '1'
""",
    ),
    "old GPU": (
        FakeBox([GPU(name="GTX 1080", capability=(6, 1), total=8, free=7)], pynvml=True),
        f"""
{HEAD}
torch      2.13.0+cu128, built for CUDA 12.8
driver     NVIDIA 570.124.06, CUDA up to 12.8
auto()     cpu: no usable accelerator
           passed over: cuda:0, architecture not in this build

error    architecture-not-built
         cuda:0 (GTX 1080) has compute capability 6.1, older than what this build of torch has
         kernels for (sm_75 sm_80 sm_86 sm_90 sm_100 sm_120).
         Install an older build of torch, or one for an older CUDA.

devices
  cuda:0  GTX 1080, 7.0 of 8.0 GiB free, capability 6.1, no bfloat16, no tensor cores, not usable:
          architecture not in this build
  cpu     {CPU}

variables
  none that matters is set
""",
    ),
}


@pytest.mark.parametrize(("box", "page"), PAGES.values(), ids=PAGES.keys())
def test_page(box: FakeBox, page: str) -> None:
    with box:
        assert f"\n{devicekit.diagnose()}\n" == page


def test_color_is_for_the_severity_alone() -> None:
    with FakeBox(TWINS, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "0,0"}):
        diagnosis = devicekit.diagnose()

    assert "\x1b" not in str(diagnosis)
    assert "\x1b[1;31merror\x1b[0m    duplicate-entry\n" in diagnosis.to_text(color=True)


def test_html_shows_what_the_page_shows() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "<b>;&"}
    with FakeBox(TWINS, pynvml=True, env=env):
        shown = devicekit.diagnose()._repr_html_()

    assert shown.count("<table") == shown.count("</table>") == 4
    assert "<code>malformed-variable</code>" in shown
    assert "&lt;b&gt;;&amp;" in shown
    assert "<b>;&" not in shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FIRST, "GPU-00000000..."),
        ("MIG-GPU-01234567-89ab-cdef-0123-456789abcdef/1/0", "MIG-GPU-01234567.../1/0"),
        ("uuid 01234567-89ab-cdef-0123-456789abcdef", "uuid 01234567..."),
        ("/home/ann/x and /Users/ann/y", "~/x and ~/y"),
        (r"C:\Users\ann\x", r"~\x"),
        ("a\x1b[31m\nb", r"a\x1b[31m\nb"),
        ("x" * 300, "x" * 197 + "..."),
        ("2.13.0+cu128", "2.13.0+cu128"),
    ],
)
def test_redacts(text: str, expected: str) -> None:
    assert render.redacted(text) == expected


# ---- machines of fake_devices --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        ({"cuda": 2}, []),
        ({"rocm": 1}, []),
        ({"xpu": 1}, []),
        ({"mps": 1}, []),
        ({"mps": 0}, ["mps-not-usable"]),
        ({}, ["no-accelerator"]),
        ({"cuda": 0}, ["no-accelerator"]),
        ({"cuda": 2, "build": None}, ["cpu-only-build"]),
        ({"cuda": 2, "driver": None}, ["no-driver"]),
        ({"cuda": 2, "driver": "11.4"}, ["driver-too-old"]),
        ({"cuda": 1, "capability": (6, 1)}, ["architecture-not-built"]),
    ],
)
def test_fake_devices_are_diagnosed(hardware: dict[str, Any], expected: list[str]) -> None:
    with fake_devices(**hardware):
        assert codes(devicekit.diagnose()) == expected

"""The parts that ask torch, the driver and the environment, each on its own."""

from __future__ import annotations

import builtins
import importlib
import os
import pathlib
import platform
import re
import shutil
import stat
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from fakebox import GIB, GPU, FakeBox
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import devicekit
from devicekit._backends import (
    PLUGINS,
    architecture,
    cuda,
    current_machine,
    driver,
    host,
    known_accelerators,
    names,
    needs_plugin,
    pretend,
    this_machine,
    visibility,
)
from devicekit._backends.machine import Machine
from devicekit._backends.memory import format_size, parse_size
from devicekit._backends.visibility import VARIABLES
from devicekit._device.checking import _FOUND

PLUGIN = torch._C._get_privateuse1_backend_name()
FIRST = "GPU-00000000-aaaa-bbbb-cccc-dddddddddddd"
SECOND = "GPU-00000001-aaaa-bbbb-cccc-dddddddddddd"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test meets another machine in this process: nothing found or decided is kept."""
    this_machine().decisions.clear()
    _FOUND.clear()
    yield
    this_machine().decisions.clear()
    _FOUND.clear()


# ---- architectures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "architectures", "supported"),
    [
        ((9, 0), "sm_90", True),
        ((9, 0), "sm_80", False),
        ((8, 9), "sm_80", True),  # a cubin runs on later minors of its major
        ((8, 0), "sm_86", False),
        ((8, 6), "sm_75 sm_86", True),
        ((6, 1), "sm_50 sm_60 sm_70", True),
        ((6, 1), "sm_75 sm_80", False),
        ((12, 0), "sm_90 compute_90", True),  # the driver compiles PTX for later devices
        ((12, 0), "sm_90 compute_120", True),
        ((12, 1), "sm_120", True),
        ((8, 0), "sm_90 compute_90", False),
        ((9, 0), "sm_90a", True),  # "a": this one only, no later one
        ((9, 1), "sm_90a", False),
        ((10, 0), "compute_90a", False),
        ((9, 0), "compute_90a", True),
        ((10, 0), "sm_100f", True),  # "f": its family, which is the major
        ((10, 3), "sm_100f", True),
        ((10, 3), "compute_100f", True),
        ((12, 0), "compute_100f", False),
        ((10, 0), "sm_103f", False),
        ((3, 5), "sm_37", False),
        ((9, 0), "", True),  # the build does not say
        ((9, 0), "gfx942", True),
        ((5, 0), "sm_9 sm_1234 sm_90x junk", True),
        ((5, 0), "sm_90 junk", False),
        ((0, 0), "sm_50", False),
    ],
)
def test_cuda_architectures(
    capability: tuple[int, int], architectures: str, supported: bool
) -> None:
    built = architectures.split()

    assert architecture.cuda_architecture_supported(capability, built) is supported
    assert architecture.cuda_architecture_supported(capability, built[::-1]) is supported


@pytest.mark.parametrize(
    ("name", "architectures", "supported"),
    [
        ("gfx942", "gfx90a gfx942", True),
        ("gfx942:sramecc+:xnack-", "gfx942", True),
        ("gfx90a", "gfx90a:xnack+", True),
        ("gfx803", "gfx900 gfx942", False),
        ("gfx1100", "gfx11-generic", True),
        ("gfx942", "gfx9-4-generic", True),
        ("gfx1030", "gfx11-generic", False),
        ("gfx94", "gfx942", False),
        ("", "gfx942", True),
        ("gfx803", "", True),
    ],
)
def test_rocm_architectures(name: str, architectures: str, supported: bool) -> None:
    assert architecture.rocm_architecture_supported(name, architectures.split()) is supported


@pytest.mark.parametrize(
    ("name", "capability", "has"),
    [
        ("Tesla V100", (7, 0), True),
        ("Tesla P100", (6, 0), False),
        ("NVIDIA GeForce RTX 2080", (7, 5), True),
        ("NVIDIA GeForce GTX 1660 Ti", (7, 5), False),
        ("NVIDIA H100", (9, 0), True),
    ],
)
def test_tensor_cores(name: str, capability: tuple[int, int], has: bool) -> None:
    assert architecture.tensor_cores(name, capability) is has


# ---- visibility ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("", []),
        (" ", []),
        ("-1", []),
        ("-", []),
        ("-0", [0]),
        ("0", [0]),
        ("1,0", [1, 0]),
        (" 1 , 0 ", [1, 0]),
        ("+1", [1]),
        ("01", [1]),
        ("0,9,1", [0]),
        ("0,-1,1", [0]),
        ("0,0", []),
        ("1,0,1", []),
        ("0;1", [0]),
        ("0 1", [0]),
        ("0x1", [0]),
        ("1gpu2,0ampere", [1, 0]),
        ("all", []),
        ("none", []),
        ("NoDevFiles", []),
        (",0", []),
        ("0,,1", [0]),
        ("0,", [0]),
        ("9" * 5000, []),
        ("0" * 5000 + "1", [1]),
        ("GPU-a", [0]),
        ("GPU-b,GPU-a", [1, 0]),
        (" GPU-b", [1]),
        ("GPU-b,0", [1]),
        ("GPU-x,GPU-a", []),
        ("GPU-", []),  # the beginning of all of them
        ("GPU-c", []),
        ("GPU-c1,GPU-b", [2, 1]),
        ("GPU-a,GPU-a", []),
        ("GPU-a,", [0]),
        ("MIG-a", []),
        ("0,GPU-b", [0]),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_what_a_variable_leaves(value: str, left: list[int]) -> None:
    assert visibility.select(value, ["GPU-a", "GPU-b", "GPU-c1", "GPU-c2"]) == left


@settings(max_examples=400)
@given(value=st.text("0123-+, ;xGPUMIabc.\t", max_size=12))
def test_numbers_are_read_as_torch_reads_them(value: str) -> None:
    assume(not re.search(r"[0-9]{4}", value))  # torch does not know how many there are
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = value
    try:
        theirs = torch.cuda._parse_visible_devices()
    except ValueError:  # torch cannot read "-", and raises from device_count()
        return
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    if any(isinstance(entry, str) for entry in theirs):
        return  # torch leaves UUIDs to NVML

    uuids = [f"GPU-{i}" for i in range(1000)]
    ours = visibility.select(value, uuids)

    assert ours == theirs or value.lstrip().startswith("GPU-")


@pytest.mark.parametrize(
    ("kind", "environ", "left"),
    [
        ("cuda", {}, [0, 1, 2, 3]),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "3,1"}, [3, 1]),
        ("cuda", {"HIP_VISIBLE_DEVICES": "1"}, [0, 1, 2, 3]),
        ("rocm", {"CUDA_VISIBLE_DEVICES": "3,1"}, [3, 1]),
        ("rocm", {"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0"}, [2]),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, [3]),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, []),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "0"}, [2]),
        ("xpu", {"ZE_AFFINITY_MASK": "2,0"}, [0, 2]),
        ("xpu", {"ZE_AFFINITY_MASK": "1.0,1.1"}, [1]),
        ("xpu", {"ZE_AFFINITY_MASK": ""}, [0, 1, 2, 3]),
        ("xpu", {"ZE_AFFINITY_MASK": "9"}, []),
        ("xpu", {"ONEAPI_DEVICE_SELECTOR": "level_zero:1"}, [0, 1, 2, 3]),
        ("mps", {"CUDA_VISIBLE_DEVICES": ""}, [0, 1, 2, 3]),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "1"}, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_what_the_variables_of_a_platform_leave(
    kind: str, environ: dict[str, str], left: list[int]
) -> None:
    assert visibility.visible(kind, environ, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]) == left


def test_the_variables_that_are_set() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1", "OTHER": "2"}

    assert visibility.variables_set("rocm", environ) == (
        ("ROCR_VISIBLE_DEVICES", "1"),
        ("CUDA_VISIBLE_DEVICES", "0"),
    )
    assert visibility.variables_set("cuda", environ) == (("CUDA_VISIBLE_DEVICES", "0"),)
    assert visibility.variables_set("mps", environ) == ()
    assert set(VARIABLES) == {"cuda", "rocm", "xpu", "npu", "hpu"}


@pytest.mark.parametrize(
    "value", ["0", "1,0", "2,0", "0,9", "0,0", "", "-1", "junk", SECOND, f"{SECOND},{FIRST}"]
)
@pytest.mark.parametrize("order", [None, "PCI_BUS_ID"])
def test_the_order_is_that_of_torch(value: str, order: str | None) -> None:
    gpus = [GPU(name=str(i), speed=i) for i in range(3)]
    env = {"CUDA_VISIBLE_DEVICES": value} | ({"CUDA_DEVICE_ORDER": order} if order else {})

    with FakeBox(gpus, pynvml=True, env=env):
        known = driver.read_driver()
        assert known is not None
        ours = cuda.order(known.gpus, os.environ)
        theirs = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]

    if order is None and not value.startswith("GPU-"):
        assert ours is None
    else:
        assert ours is not None
        assert [gpu.name for gpu in ours] == theirs


# ---- the driver ----------------------------------------------------------------------------------

TWO = [
    GPU(name="A", total=80, free=10.5, capability=(8, 0)),
    GPU(name="B", total=24, free=3, capability=(12, 0), mode="exclusive_process", pids=(1,)),
]


@pytest.mark.parametrize(
    "options",
    [{"pynvml": True}, {"pynvml": True, "pynvml_bytes": True}, {"smi": True}],
    ids=["pynvml", "bytes", "smi"],
)
def test_what_the_management_library_says(options: dict[str, Any]) -> None:
    with FakeBox(TWO, driver="550.1", driver_cuda="12.4", **options) as box:
        read = driver.read_driver()
        assert not box.fork_poisoned
        assert box.contexts == set()

    assert read == driver.Driver(
        version="550.1",
        cuda=(12, 4),
        gpus=(
            driver.Gpu(
                uuid=FIRST,
                name="A",
                bus_id="00000000:01:00.0",
                total_memory=80 * GIB,
                free_memory=10 * GIB + GIB // 2,
                capability=(8, 0),
            ),
            driver.Gpu(
                uuid=SECOND,
                name="B",
                bus_id="00000000:02:00.0",
                total_memory=24 * GIB,
                free_memory=3 * GIB,
                capability=(12, 0),
                compute_mode="exclusive",
                taken=True,
            ),
        ),
    )
    assert [gpu.busy for gpu in read.gpus] == [False, True]


@pytest.mark.parametrize(
    "box",
    [
        FakeBox(TWO),
        FakeBox(TWO, driver_installed=False, pynvml=True, smi=True),
        FakeBox(TWO, nvml_error=18, pynvml=True, smi=True),
        FakeBox(TWO, pynvml=True, nvml_rejects={"nvmlDeviceGetCount"}),
        FakeBox(TWO, pynvml=True, nvml_rejects={"nvmlDeviceGetUUID"}),
        FakeBox(TWO, smi=True, smi_rejects={"uuid"}),
        FakeBox(driver_installed=True, smi=True),
    ],
    ids=["nothing", "no-driver", "mismatch", "no-count", "no-uuid", "no-fields", "no-gpu"],
)
def test_no_answer(box: FakeBox) -> None:
    with box:
        assert driver.read_driver() is None


def test_nvidia_smi_stands_in_for_pynvml() -> None:
    with FakeBox(TWO, pynvml=True, smi=True, nvml_rejects={"nvmlDeviceGetUUID"}) as box:
        assert driver.read_driver() is not None
        assert any(call.startswith("nvidia-smi") for call in box.calls)
    with FakeBox(TWO, pynvml=True, smi=True) as box:
        assert driver.read_driver() is not None
        assert not any(call.startswith("nvidia-smi") for call in box.calls)
        assert box.calls.count("nvmlInit") == box.calls.count("nvmlShutdown") == 1


def test_what_pynvml_cannot_answer_is_not_known() -> None:
    rejects = {
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetComputeMode",
        "nvmlDeviceGetName",
        "nvmlSystemGetDriverVersion",
        "nvmlSystemGetCudaDriverVersion",
        "nvmlDeviceGetMigMode",
    }

    with FakeBox([GPU()], pynvml=True, nvml_rejects=rejects):
        read = driver.read_driver()

    assert read == driver.Driver(
        version=None, cuda=None, gpus=(driver.Gpu(uuid=FIRST, name="", bus_id=""),)
    )


def test_an_old_nvidia_smi() -> None:
    with FakeBox(TWO, smi=True, smi_rejects={"compute_cap", "mig.mode.current"}) as box:
        read = driver.read_driver()
        assert sum("--query-gpu" in call for call in box.calls) == 2

    assert read is not None
    assert [(gpu.capability, gpu.compute_mode) for gpu in read.gpus] == [(None, "default")] * 2
    assert [gpu.free_memory for gpu in read.gpus] == [10 * GIB + GIB // 2, 3 * GIB]


def test_an_old_nvidia_smi_leaves_the_rest_to_cuda() -> None:
    with FakeBox(TWO, smi=True, smi_rejects={"compute_cap"}):
        infos = devicekit.devices()[:-1]

    assert [info.capability for info in infos] == [(8, 0), (12, 0)]
    assert [info.free_memory for info in infos] == [10 * GIB + GIB // 2, 3 * GIB]


def test_a_hanging_nvidia_smi_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_TIMEOUT", 0.3)
    with FakeBox(TWO, smi=True, smi_delay=60) as box:
        assert driver.read_driver() is None
        assert sum(call.startswith("nvidia-smi") for call in box.calls) == 1


def test_a_program_that_cannot_be_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_bytes(b"\x00\x01 no program")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert shutil.which("nvidia-smi") == str(program)
    assert driver.read_driver() is None


def script(folder: pathlib.Path, text: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("header", "version", "newest"),
    [
        ("NVIDIA-SMI 580.1  Driver Version: 580.1  CUDA Version: 13.0", "580.1", (13, 0)),
        ("NVIDIA-SMI 595.1  KMD Version: 595.1  CUDA UMD Version: 13.2", "595.1", (13, 2)),
        ("NVIDIA-SMI 390.1  Driver Version: 390.1", "390.1", None),
        ("Driver Version: 440.1  CUDA Version: N/A", "440.1", None),
        ("", None, None),
    ],
)
def test_headers_of_nvidia_smi(
    header: str,
    version: str | None,
    newest: tuple[int, int] | None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = "GPU-a, B\\377, 00000000:01:00.0, 100, [N/A], Prohibited, [N/A], [N/A]"
    script(tmp_path, f"[ $# -gt 0 ] && printf '{row}\\n\\n' || printf '{header}\\n'")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))

    read = driver.read_driver()

    assert read is not None
    assert (read.version, read.cuda) == (version, newest)
    (gpu,) = read.gpus
    assert (gpu.total_memory, gpu.free_memory, gpu.capability) == (100 << 20, None, None)
    assert gpu.busy
    assert gpu.name == "B\ufffd"


def test_a_pynvml_that_warns_or_fails_to_load(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "pynvml.py"
    module.write_text("import warnings\nwarnings.warn('deprecated', FutureWarning)\n1 / 0\n")
    importlib.invalidate_caches()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert driver.read_driver() is None


def test_a_module_of_that_name_that_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
    monkeypatch.setenv("PATH", "")

    assert driver.read_driver() is None


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (None, 0),
        (0, 0),
        (17, 17),
        (10**30, 10**30),
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("1 MB", 10**6),
        ("1 MiB", 1 << 20),
        ("8GiB", 8 << 30),
        ("8gib", 8 << 30),
        (" 8 GB ", 8 * 10**9),
        ("1.5GiB", 3 << 29),
        ("0.5 KiB", 512),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 << 40),
        ("9007199254740993", 9007199254740993),
    ],
    ids=repr,
)
def test_sizes(size: int | str | None, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize(
    "size",
    [-1, True, 1.5, "", " ", "GiB", "-1GiB", "1,5GiB", "1.GiB", ".5GiB", "1 G B", "1PiB", "8GiBs",
     "1e9", "inf", "nan", "\u0661", "9" * 400, "1." + "9" * 400, b"8GiB", [8], object()],
    ids=lambda value: ascii(value)[:16],
)  # fmt: skip
def test_what_is_no_size(size: Any) -> None:
    with pytest.raises(ValueError, match="is not an amount of memory: expected a number of bytes"):
        parse_size(size)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1_500_000_000, "1.4 GiB"),
        (8 << 30, "8.0 GiB"),
        (80 << 30, "80.0 GiB"),
        (500 << 30, "500 GiB"),
        (3 << 39, "1.5 TiB"),
        (1 << 60, "1048576 TiB"),
        pytest.param((1 << 60) + 1, "over 1 EiB", id="larger"),
        pytest.param(10**5000, "over 1 EiB", id="far larger"),
    ],
)
def test_sizes_as_people_read_them(size: int, text: str) -> None:
    assert format_size(size) == text


# ---- the CPU -------------------------------------------------------------------------------------


def test_the_cpu_of_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/cpuinfo": ["processor\t: 0", "model name\t: Tester 9000: fast", "flags : fpu"],
        "/proc/meminfo": ["MemTotal:  900 kB", "MemAvailable:   100 kB"],
    }
    monkeypatch.setattr(host, "_lines", lambda path: texts[path])

    info = host.read()

    assert info.name == "Tester 9000: fast"
    assert info.free_memory == 100 * 1024


def test_the_cpu_of_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    def sysconf(name: str) -> int:
        answers = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
        if name not in answers:
            msg = "unrecognized configuration name"
            raise ValueError(msg)
        return answers[name]

    monkeypatch.setattr(host, "_lines", lambda path: [])
    monkeypatch.setattr(os, "sysconf", sysconf)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")

    info = host.read()

    assert (info.name, info.total_memory, info.free_memory) == ("arm64", 4096000, None)
    assert info.device == torch.device("cpu")


def test_the_cpu_of_a_system_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_lines", lambda path: [])
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "")

    info = host.read()

    assert (info.name, info.total_memory, info.free_memory) == ("CPU", None, None)


def test_a_file_that_cannot_be_read_has_no_lines(tmp_path: pathlib.Path) -> None:
    assert host._lines(str(tmp_path / "missing")) == []


# ---- CUDA ----------------------------------------------------------------------------------------


def test_a_build_is_told_from_a_machine() -> None:
    with FakeBox(built="cpu"):
        assert not cuda.is_built()
    with FakeBox():
        assert cuda.is_built()
    with FakeBox(built="rocm"):
        assert cuda.is_built()


@pytest.mark.parametrize(
    ("box", "label", "runtime"),
    [
        (FakeBox([GPU()]), "CUDA", "CUDA 12.8"),
        (FakeBox([GPU()], built="rocm"), "ROCm", "ROCm 6.3.42134-a9a80e791"),
        (FakeBox(built="cpu"), "CUDA", ""),
    ],
    ids=["cuda", "rocm", "cpu"],
)
def test_labels(box: FakeBox, label: str, runtime: str) -> None:
    with box:
        read = Machine().accelerator("cuda")

    assert (read.type, read.label, read.runtime) == ("cuda", label, runtime)


@pytest.mark.parametrize(
    ("options", "hidden"),
    [
        ({"pynvml": True}, 0),
        ({"pynvml": True, "env": {"CUDA_VISIBLE_DEVICES": "1"}}, 2),
        ({"smi": True, "env": {"CUDA_VISIBLE_DEVICES": ""}}, 3),
        ({"env": {"CUDA_VISIBLE_DEVICES": "1"}}, None),
        ({"built": "rocm"}, None),
    ],
    ids=str,
)
def test_hidden_gpus(options: dict[str, Any], hidden: int | None) -> None:
    with FakeBox([GPU()] * 3, **options):
        assert Machine().accelerator("cuda").hidden == hidden


def test_cuda_that_starts_and_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeBox([GPU()]):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        read = Machine().accelerator("cuda")

    assert read.reason == "driver failed"
    assert read.detail == "CUDA started, and is_available() is False"


@pytest.mark.parametrize(
    ("version", "cuda_version", "architectures"),
    [
        ("2.13.0+cu128", "12.8", ["sm_75", "sm_90"]),
        ("2.13.0+cu999", "99.9", ["sm_80", "sm_90"]),  # not in torch's table: the build is asked
        ("2.13.0.dev20260101+cu128", "12.8", ["sm_80", "sm_90"]),
        ("2.13.0", "12.8", ["sm_80", "sm_90"]),
    ],
    ids=["release", "unknown", "nightly", "own"],
)
def test_architectures_of_releases(
    version: str, cuda_version: str, architectures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"12.8": {platform.machine().lower(): {90, 75}}}
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", table, raising=False)
    box = FakeBox([GPU()], pynvml=True, cuda_version=cuda_version, arch_list="sm_80 sm_90")

    with box:
        assert list(Machine().accelerator("cuda").architectures) == architectures


def test_a_gpu_that_the_table_of_releases_lacks_may_be_in_the_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {"12.8": {platform.machine().lower(): {90}}}
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu128")
    monkeypatch.setattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", table, raising=False)

    with FakeBox([GPU(capability=(15, 0))], pynvml=True, arch_list="sm_90 compute_90"):
        (info,) = Machine().accelerator("cuda").devices

    assert info.usable


def test_free_memory_counts_what_torch_holds_unused() -> None:
    with FakeBox([GPU(free=10, reserved=4, allocated=1)]):
        torch.cuda.init()
        assert Machine().free_memory(torch.device("cuda:0")) == 13 * GIB


# ---- other types ---------------------------------------------------------------------------------


def test_known_types() -> None:
    assert known_accelerators() == ("cuda", "xpu", "mps", "mtia", "hpu", PLUGIN)
    assert needs_plugin(PLUGIN)
    assert all(needs_plugin(name) for name in PLUGINS)
    assert not needs_plugin("cuda")
    assert not needs_plugin("mps")
    assert names.label("xpu") == "XPU"
    assert names.label("banana") == "banana"


def broken_module(error: type[BaseException], *working: str) -> Any:
    """Return a device module that raises from everything but `working`."""

    def fail(*_args: object) -> Any:
        raise error

    module = types.ModuleType("torch.broken")
    answers = {"is_available": True, "device_count": 2, "is_initialized": True}
    for name in (
        *answers,
        "current_device",
        "get_device_name",
        "get_device_properties",
        "mem_get_info",
        "memory_reserved",
    ):
        setattr(module, name, (lambda n: lambda: answers[n])(name) if name in working else fail)
    return module


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError,
        TypeError,
        OSError,
        KeyError,
        NotImplementedError,
        ZeroDivisionError,
        ImportError,
    ],
)
@pytest.mark.parametrize(
    "working",
    [
        (),
        ("is_available",),
        ("is_available", "device_count"),
        ("is_available", "device_count", "is_initialized"),
    ],
    ids=["nothing", "available", "count", "started"],
)
def test_a_plugin_that_raises_from_everything(
    error: type[Exception], working: tuple[str, ...]
) -> None:
    module = broken_module(error, *working)

    with FakeBox(plugin=[GPU(), GPU()]), mock.patch.object(torch, PLUGIN, module):
        machine = Machine()
        read, settled = machine.accelerator(PLUGIN), machine.settled_count(PLUGIN)
        assert machine.free_memory(torch.device(PLUGIN, 0)) is None
        assert machine.current_index(PLUGIN) == 0
        assert str(devicekit.auto()) == (f"{PLUGIN}:0" if "device_count" in working else "cpu")
        assert devicekit.devices()[-1].device == torch.device("cpu")
        if "device_count" in working:
            assert devicekit.device(PLUGIN) == torch.device(PLUGIN, 0)
            assert devicekit.device(f"{PLUGIN}:1") == torch.device(PLUGIN, 1)
        else:
            with pytest.raises(devicekit.DeviceUnavailableError, match=error.__name__):
                devicekit.device(PLUGIN)

    if "device_count" in working:
        assert [info.name for info in read.devices] == [f"{PLUGIN} device"] * 2
        assert settled == (2 if "is_initialized" in working else 0)
    else:
        assert read.reason == "driver failed"
        assert read.detail.startswith(error.__name__)


def test_a_plugin_that_raises_does_not_hide_cuda() -> None:
    module = broken_module(OSError)

    with FakeBox([GPU()], plugin=[GPU()]), mock.patch.object(torch, PLUGIN, module):
        assert devicekit.auto() == torch.device("cuda:0")


def test_a_module_with_a_count_and_nothing_else() -> None:
    module: Any = types.ModuleType("torch.bare")
    module.device_count = lambda: 2

    with FakeBox(plugin=[GPU()]), mock.patch.object(torch, PLUGIN, module):
        assert devicekit.device(f"{PLUGIN}:1") == torch.device(PLUGIN, 1)
        assert devicekit.device(PLUGIN) == torch.device(PLUGIN, 0)
        assert Machine().settled_count(PLUGIN) == 2


def test_a_plugin_without_a_module() -> None:
    with FakeBox(plugin=[GPU()], plugin_module=False):
        machine = Machine()
        read = machine.accelerator(PLUGIN)
        assert machine.accelerator_types() == (PLUGIN,)
        assert machine.settled_count(PLUGIN) == 0
        assert machine.free_memory(torch.device(PLUGIN, 0)) is None

    assert read.reason == "driver failed"
    assert read.detail == f"torch.{PLUGIN} does not exist: the plugin registered no device module"


def test_what_a_backend_warns_of_is_the_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> int:
        warnings.warn("no permission for /dev/dri", stacklevel=2)
        return 0

    with FakeBox(xpu=[GPU()]):
        monkeypatch.setattr(torch.xpu, "is_available", count)
        read = Machine().accelerator("xpu")

    assert (read.reason, read.detail) == ("driver failed", "no permission for /dev/dri")


@pytest.mark.parametrize(
    ("box", "types"),
    [
        (FakeBox(built="cpu"), ()),
        (FakeBox(), ("cuda",)),
        (FakeBox(built="rocm"), ("cuda",)),
        (FakeBox(xpu=[]), ("xpu",)),
        (FakeBox(mps=False), ("mps",)),
        (FakeBox(mtia=[GPU()]), ("mtia",)),
        (FakeBox(hpu=[GPU()]), ("hpu",)),
        (FakeBox(hpu=[GPU()], built="cuda"), ("cuda", "hpu")),
        (FakeBox(plugin=[GPU()], built="cuda"), (PLUGIN, "cuda")),
    ],
    ids=["cpu", "cuda", "rocm", "xpu", "mps", "mtia", "hpu", "cuda+hpu", "plugin+cuda"],
)
def test_the_types_of_a_build(box: FakeBox, types: tuple[str, ...]) -> None:
    with box:
        assert Machine().accelerator_types() == types
        assert not box.fork_poisoned


def test_free_memory_of_other_types() -> None:
    with FakeBox(plugin=[GPU(free=7)]):
        assert Machine().free_memory(torch.device(PLUGIN, 0)) == 7 * GIB
    with FakeBox(mps=True):
        assert Machine().free_memory(torch.device("mps", 0)) is None


# ---- the seam ------------------------------------------------------------------------------------


def test_another_machine_can_be_put_in_place() -> None:
    real, other = current_machine(), Machine()

    with pretend(other) as given:
        assert given is current_machine() is other
        with pretend(Machine()):
            assert current_machine() is not other
        assert current_machine() is other
    assert current_machine() is real


def test_another_machine_is_put_in_place_in_this_thread_only() -> None:
    seen: list[Machine] = []

    with pretend(Machine()):
        thread = threading.Thread(target=lambda: seen.append(current_machine()))
        thread.start()
        thread.join()

    assert seen == [current_machine()]


def test_the_real_machine_comes_back_after_an_error() -> None:
    with pytest.raises(KeyError, match="gone"), pretend(Machine()):
        raise KeyError("gone")  # noqa: EM101

    assert current_machine() is this_machine() is this_machine.__wrapped__()


def test_no_module_of_a_vendor_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real: Callable[..., Any] = builtins.__import__

    def watch(name: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", watch)
    with FakeBox(built="cpu"):
        devicekit.auto()
        devicekit.devices()
        for name in PLUGINS:
            with pytest.raises(devicekit.DeviceUnavailableError, match="is not imported"):
                devicekit.device(name)

    assert not {name.partition(".")[0] for name in asked} & {
        package.partition(".")[0] for package in PLUGINS.values()
    }

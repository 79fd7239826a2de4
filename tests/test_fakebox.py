"""The made-up machine itself: real torch code runs on it, and says what it would say there."""

from __future__ import annotations

import builtins
import ctypes
import importlib
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from fakebox import CUDA_UNKNOWN_ERROR, DRIVER_MISMATCH, GIB, GPU, FakeBox

PLUGIN = torch._C._get_privateuse1_backend_name()
FIRST = "GPU-00000000-aaaa-bbbb-cccc-dddddddddddd"
SECOND = "GPU-00000001-aaaa-bbbb-cccc-dddddddddddd"
PAIR = [GPU(name="A"), GPU(name="B")]


def attributes(module: ModuleType) -> dict[str, Any]:
    # Python itself notes there which warnings were shown.
    return {name: value for name, value in vars(module).items() if name != "__warningregistry__"}


def what_torch_says() -> dict[str, Any]:
    return {
        "environment": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "pynvml": sys.modules.get("pynvml", "absent"),
        "CDLL": ctypes.CDLL,
        "torch": {name for name in vars(torch) if not name.startswith("__")},
        "torch._C": {name for name in vars(torch._C) if "lazy" not in name},
        "torch.cuda": attributes(torch.cuda),
        "torch.xpu": attributes(torch.xpu),
        "torch.mtia": attributes(torch.mtia),
        "version": attributes(torch.version),
        "config": torch.__config__.show(),
        "cuda": (torch.cuda.is_available(), torch.cuda.device_count()),
        "mps": (torch.backends.mps.is_built(), torch.backends.mps.is_available()),
        "xpu": (torch.xpu.is_available(), torch.xpu.device_count()),
        "accelerator": torch.accelerator.current_accelerator(),
    }


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = what_torch_says()
    yield
    assert what_torch_says() == before


def visible_names() -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def smi(*args: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("nvidia-smi")
    assert program is not None
    return subprocess.run([program, *args], capture_output=True, text=True, check=False, timeout=60)


def query(fields: str, what: str = "gpu") -> list[list[str]]:
    done = smi(f"--query-{what}={fields}", "--format=csv,noheader,nounits")
    assert done.returncode == 0
    return [line.split(", ") for line in done.stdout.splitlines()]


# ---- builds and machines -------------------------------------------------------------------------


def test_a_build_without_accelerators() -> None:
    with FakeBox(built="cpu") as box:
        assert torch.version.cuda is None
        assert not torch.cuda.is_available()
        assert torch.cuda.device_count() == 0
        assert torch.cuda.get_arch_list() == []
        assert torch.accelerator.current_accelerator() is None
        with pytest.raises(AssertionError, match="not compiled with CUDA"):
            torch.cuda.init()
        with pytest.raises(RuntimeError, match="Cannot access accelerator device when none"):
            torch.accelerator.current_device_index()

    assert box.calls == []


def test_a_cpu_build_on_a_machine_with_gpus() -> None:
    with FakeBox(PAIR, built="cpu", smi=True):
        assert not torch.cuda.is_available()
        assert query("name") == [["A"], ["B"]]


def test_a_cuda_build_without_gpu_or_driver() -> None:
    with FakeBox() as box:
        assert not torch.cuda.is_available()
        assert torch.cuda.device_count() == 0
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.accelerator.current_accelerator(check_available=True) is None
        with pytest.raises(RuntimeError, match="Found no NVIDIA driver"):
            torch.cuda.init()

    assert box.contexts == set()


def test_a_cuda_build_with_a_driver_and_no_gpu() -> None:
    with (
        FakeBox(driver_installed=True),
        pytest.raises(RuntimeError, match="No CUDA GPUs are available"),
    ):
        torch.cuda.init()


def test_gpus_without_a_driver_are_not_seen() -> None:
    with FakeBox([GPU()], driver_installed=False, pynvml=True, smi=True):
        assert not torch.cuda.is_available()
        assert smi().returncode == 9
        assert "couldn't communicate with the NVIDIA driver" in smi().stdout


def test_one_gpu() -> None:
    with FakeBox([GPU(free=3, total=4, allocated=0.5, reserved=1)]) as box:
        assert torch.cuda.is_available()
        assert torch.cuda.memory_reserved(0) == 0  # torch says so until CUDA is started
        assert torch.cuda.current_device() == 0
        assert torch.cuda.memory_allocated() == GIB // 2
        assert torch.cuda.memory_reserved(0) == GIB
        assert torch.cuda.get_device_capability() == (9, 0)
        assert str(torch.cuda.get_device_properties(0).uuid) == FIRST.removeprefix("GPU-")
        assert box.contexts == set()
        assert torch.cuda.mem_get_info() == (3 * GIB, 4 * GIB)
        assert torch.accelerator.get_memory_info(0) == (3 * GIB, 4 * GIB)

    assert box.contexts == {0}


def test_counting_does_not_start_cuda_but_reading_the_memory_of_all_gpus_does() -> None:
    with FakeBox([GPU(free=f) for f in (1, 5, 70, 3, 71, 0.1, 9, 9)]) as box:
        assert torch.cuda.device_count() == 8
        assert not box.fork_poisoned
        free = [torch.cuda.mem_get_info(i)[0] for i in range(8)]

    assert free.index(max(free)) == 4
    assert box.fork_poisoned
    assert box.contexts == set(range(8))


def test_the_count_is_cached_only_after_the_start() -> None:
    with FakeBox(PAIR):
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        assert torch.cuda.device_count() == 1
        assert torch.cuda.is_available()  # the driver starts, and reads the variable for good
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
        assert torch.cuda.device_count() == 2  # NVML and torch's Python read it again
        torch.cuda.init()
        assert torch.cuda.device_count() == 1


def test_current_device() -> None:
    with FakeBox(PAIR) as box:
        torch.cuda.set_device(1)
        assert torch.cuda.current_device() == 1
        assert torch.accelerator.current_device_index() == 1
        assert box.contexts == {1}
        torch.accelerator.set_device_index(0)
        with torch.cuda.device(1):
            assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 0
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.set_device(2)
        with pytest.raises(AssertionError, match="Invalid device id"):
            torch.cuda.get_device_name(2)


def test_launcher_variables_of_the_real_machine_are_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")

    with FakeBox(PAIR, env={"RANK": "1"}):
        assert "LOCAL_RANK" not in os.environ
        assert os.environ["RANK"] == "1"
        assert torch.cuda.device_count() == 2


# ---- why CUDA does not start ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"driver_cuda": "11.4"}, r"too old \(found version 11040\)", id="too-old"),
        pytest.param({"init_error": CUDA_UNKNOWN_ERROR}, "CUDA unknown error", id="unknown"),
        pytest.param({"init_error": DRIVER_MISMATCH}, "Error 803", id="803"),
    ],
)
def test_cuda_does_not_start(options: dict[str, Any], message: str) -> None:
    with FakeBox([GPU()], **options):
        assert torch.cuda.device_count() == 1  # NVML answers all the same
        with pytest.warns(UserWarning, match=f"CUDA initialization: .*{message}"):
            assert not torch.cuda.is_available()
        assert not torch.cuda.is_available()  # it warns once per process
        with pytest.raises(RuntimeError, match=message):
            torch.cuda.init()


def test_driver_and_library_do_not_match() -> None:
    with FakeBox([GPU()], nvml_error=18, pynvml=True, smi=True):
        pynvml = importlib.import_module("pynvml")
        with (
            pytest.warns(UserWarning, match="Can't initialize NVML"),
            pytest.warns(UserWarning, match="Error 803"),
        ):
            assert torch.cuda.device_count() == 0
        with pytest.raises(pynvml.NVMLError, match="version mismatch"):
            pynvml.nvmlInit()
        assert smi().returncode == 18
        assert smi().stdout.startswith("Failed to initialize NVML: Driver/library version mismatch")


def test_an_older_driver_of_the_same_major_version_is_good_enough() -> None:
    with FakeBox([GPU()], cuda_version="12.8", driver_cuda="12.0"):
        assert torch.cuda.is_available()


def test_nvml_decides_availability_when_the_user_asks_for_it() -> None:
    env = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

    with FakeBox([GPU()], init_error=CUDA_UNKNOWN_ERROR, env=env) as box:
        assert torch.cuda.is_available()

    assert not box.fork_poisoned


@pytest.mark.parametrize("capability", [(5, 0), (13, 0)])
def test_torch_warns_of_an_architecture_that_the_build_lacks(capability: tuple[int, int]) -> None:
    number = "{}{}".format(*capability)

    with FakeBox([GPU(capability=capability)], arch_list="sm_75 sm_90a sm_120f compute_120"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.init()
        assert any(f"sm_{number} is not compatible" in str(w.message) for w in caught)
        assert torch.cuda.is_available()
        assert torch.cuda.get_arch_list() == ["sm_75", "sm_90a", "sm_120f", "compute_120"]


def test_asking_for_the_architectures_spoils_a_fork_either_way() -> None:
    with FakeBox([GPU()], arch_list="sm_75 sm_90a compute_120") as box:
        assert torch.cuda.get_arch_list() == ["sm_75", "sm_90a", "compute_120"]
        assert box.fork_poisoned
    with box:
        text = torch.__config__.show()
        assert box.fork_poisoned

    assert box.calls == ["cudaGetDeviceCount"]
    flags = (
        "  - NVCC architecture flags: -gencode;arch=compute_75,code=sm_75;"
        "-gencode;arch=compute_90a,code=sm_90a;-gencode;arch=compute_120,code=compute_120\n"
    )
    assert flags in text
    assert "CUDA_FLAGS= -gencode arch=compute_75,code=sm_75 -gencode arch=compute_90a" in text


def test_the_configuration_tells_less_where_there_is_no_gpu() -> None:
    with FakeBox():
        text = torch.__config__.show()

    assert "NVCC" not in text
    assert "-gencode arch=compute_75,code=sm_75" in text


@pytest.mark.parametrize(
    "box",
    [
        FakeBox([GPU()], show_config=False),
        FakeBox([GPU()], arch_list=""),
        FakeBox([GPU()], built="rocm"),
        FakeBox(built="cpu"),
    ],
    ids=["hidden", "unknown", "rocm", "cpu"],
)
def test_the_configuration_does_not_tell(box: FakeBox) -> None:
    with box:
        assert "NVCC" not in torch.__config__.show()
        assert "gencode" not in torch.__config__.show()


@pytest.mark.parametrize(
    "gpu",
    [
        GPU(mode="exclusive_process", pids=(1,)),
        GPU(mode="exclusive_thread", pids=(1,)),
        GPU(mode="prohibited"),
    ],
    ids=lambda gpu: gpu.mode,
)
def test_a_gpu_that_lets_nobody_in(gpu: GPU) -> None:
    with FakeBox([gpu, GPU(mode="exclusive_process")]) as box:
        assert torch.cuda.is_available()
        with pytest.raises(RuntimeError, match="busy or unavailable"):
            torch.cuda.mem_get_info(0)
        assert torch.cuda.mem_get_info(1)[1] == 80 * GIB

    assert box.contexts == {1}


# ---- visibility and order ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("", ""),
        ("-1", ""),
        ("0", "A"),
        ("1,0", "BA"),
        (" 1 ", "B"),
        ("0,0", ""),
        ("0,9", "A"),
        ("9", ""),
        ("0,-1,1", "A"),
        ("0;1", "A"),
        ("0 1", "A"),
        ("1gpu2,0ampere", "BA"),
        ("all", ""),
        (",0", ""),
        ("NoDevFiles", ""),
        (SECOND, "B"),
        ("GPU-00000001", "B"),
        (f"{SECOND},{FIRST}", "BA"),
        (f"{FIRST},1", "A"),
        ("GPU-0000000", ""),
        ("GPU-ffff", ""),
        (f"{FIRST},{FIRST}", ""),
    ],
)
def test_cuda_visible_devices(value: str, names: str) -> None:
    with FakeBox(PAIR, env={"CUDA_VISIBLE_DEVICES": value}):
        assert torch.cuda.device_count() == len(names)
        assert torch.cuda.is_available() == bool(names)
        assert "".join(visible_names()) == names


@pytest.mark.parametrize(
    ("value", "uuid"),
    [
        (None, "a"),
        ("0", "a"),
        ("1,0", "a"),  # a slice, and no whole GPU beside it
        (FIRST, "a"),
        ("MIG-b", "b"),
        ("MIG-b,MIG-a", "b"),
    ],
)
def test_mig_shows_one_slice(value: str | None, uuid: str) -> None:
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    gpus = [GPU(migs=("MIG-a", "MIG-b"), free=70), GPU()]

    with FakeBox(gpus, env=env) as box:
        torch.cuda.init()
        assert torch.cuda.device_count() == 1
        assert str(torch.cuda.get_device_properties(0).uuid) == uuid
        assert torch.cuda.mem_get_info(0) == (35 * GIB, 40 * GIB)

    assert box.contexts == {0}


def test_an_unknown_mig_slice() -> None:
    with FakeBox([GPU()], env={"CUDA_VISIBLE_DEVICES": "MIG-abc"}) as box:
        assert torch.cuda.device_count() == 0

    assert "cudaGetDeviceCount" in box.calls  # torch's NVML code leaves MIG to CUDA


def test_cuda_numbers_the_fastest_first_unless_told_otherwise() -> None:
    gpus = [GPU(name="slow"), GPU(name="fast", speed=2)]

    with FakeBox(gpus, smi=True):
        assert visible_names() == ["fast", "slow"]
        assert query("index,name") == [["0", "slow"], ["1", "fast"]]
    with FakeBox(gpus, env={"CUDA_VISIBLE_DEVICES": "0"}):
        assert visible_names() == ["fast"]
    with FakeBox(gpus, env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}):
        assert visible_names() == ["slow", "fast"]


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({}, "ABCD"),
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, "BC"),
        ({"HIP_VISIBLE_DEVICES": "3,0"}, "DA"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "C"),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, "C"),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, ""),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "CUDA_VISIBLE_DEVICES": "0"}, "B"),
        ({"ROCR_VISIBLE_DEVICES": SECOND}, "B"),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": SECOND}, ""),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, "B"),
    ],
)
def test_rocm_filters_twice(env: dict[str, str], names: str) -> None:
    with FakeBox([GPU(name=name, arch="gfx942") for name in "ABCD"], built="rocm", env=env):
        assert torch.cuda.is_available() == bool(names)
        assert "".join(visible_names()) == names


def test_rocm() -> None:
    with FakeBox([GPU(name="AMD Instinct MI300X", arch="gfx942")], built="rocm", pynvml=True):
        assert torch.version.hip is not None
        assert torch.version.cuda is None
        assert torch.cuda.get_device_properties(0).gcnArchName == "gfx942"
        assert "gfx942" in torch.cuda.get_arch_list()
        with pytest.raises(RuntimeError, match="HIP error: invalid device ordinal"):
            torch.cuda.set_device(1)
        pynvml = importlib.import_module("pynvml")
        with pytest.raises(pynvml.NVMLError_LibraryNotFound, match="Library Not Found"):
            pynvml.nvmlInit()


# ---- other accelerators --------------------------------------------------------------------------


def test_mps() -> None:
    with FakeBox(mps=True):
        assert torch.backends.mps.is_built()
        assert torch.backends.mps.is_available()
        assert torch.mps.device_count() == 1
        assert torch.mps.recommended_max_memory() == 36 * GIB
        assert torch.backends.mps.get_name() == "Apple M3 Max"
        assert torch.accelerator.current_accelerator(True) == torch.device("mps")
        assert torch.accelerator.current_device_index() == 0

    assert not torch.backends.mps.is_available()


def test_mps_built_but_unavailable() -> None:
    with FakeBox(mps=False):
        assert torch.backends.mps.is_built()
        assert not torch.backends.mps.is_available()
        assert torch.accelerator.current_accelerator() == torch.device("mps")
        assert torch.accelerator.current_accelerator(True) is None


@pytest.mark.parametrize(
    ("mask", "names"),
    [(None, "AB"), ("", "AB"), ("1", "B"), ("1,0", "AB"), ("7", ""), ("1.0", "B")],
)
def test_xpu(mask: str | None, names: str) -> None:
    env = {} if mask is None else {"ZE_AFFINITY_MASK": mask}

    with FakeBox(xpu=[GPU(name="A"), GPU(name="B", free=9)], env=env):
        assert torch.xpu.device_count() == torch.accelerator.device_count() == len(names)
        assert torch.xpu.is_available() == bool(names)
        found = [torch.xpu.get_device_name(i) for i in range(len(names))]
        assert "".join(found) == names


def test_xpu_devices() -> None:
    with FakeBox(xpu=[GPU(free=3, total=16), GPU(unified=True)]) as box:
        assert torch.xpu.get_device_properties(0).total_memory == 16 * GIB
        assert torch.xpu.mem_get_info(0) == (3 * GIB, 16 * GIB)
        assert torch.xpu.memory_reserved(0) == 0
        with pytest.raises(RuntimeError, match="doesn't support querying"):
            torch.xpu.mem_get_info(1)
        torch.xpu.set_device(1)
        assert torch.accelerator.current_device_index() == 1
        with pytest.raises(RuntimeError, match="out of range"):
            torch.xpu.get_device_name(2)

    assert box.fork_poisoned


def test_xpu_without_a_device() -> None:
    with FakeBox(xpu=[]):
        assert not torch.xpu.is_available()
        with pytest.raises(RuntimeError, match="No XPU devices"):
            torch.xpu.init()


def test_mtia() -> None:
    with FakeBox(mtia=[GPU(), GPU(capability=(8, 0))]):
        assert torch.mtia.is_available()
        assert torch.accelerator.device_count() == 2
        assert torch.accelerator.current_accelerator(True) == torch.device("mtia")
        assert torch.mtia.get_device_capability(1) == (8, 0)
        torch.mtia.set_device(1)
        assert torch.mtia.current_device() == 1
    with FakeBox(mtia=[]):
        assert not torch.mtia.is_available()


def test_hpu() -> None:
    with FakeBox(hpu=[GPU(name="GAUDI3")]):
        assert torch.accelerator.current_accelerator(True) == torch.device("hpu")
        module = torch.get_device_module("hpu")
        assert importlib.import_module("torch.hpu") is module
        assert module.get_device_name(0) == "GAUDI3"

    assert not hasattr(torch, "hpu")


def test_a_plugin_with_a_device_module() -> None:
    with FakeBox(plugin=[GPU(name="X"), GPU(free=5)]):
        module = torch.get_device_module(PLUGIN)
        assert torch.accelerator.current_accelerator(True) == torch.device(PLUGIN)
        assert torch.accelerator.device_count() == 2
        assert module.get_device_name(f"{PLUGIN}:0") == "X"
        assert module.mem_get_info(1)[0] == 5 * GIB
        module.set_device(1)
        assert torch.accelerator.current_device_index() == 1


def test_a_plugin_without_a_device_module() -> None:
    with FakeBox(plugin=[GPU()], plugin_module=False):
        assert torch.accelerator.current_accelerator() == torch.device(PLUGIN)
        with pytest.raises(RuntimeError, match="does not have a corresponding module"):
            torch.accelerator.device_count()


def test_torch_prefers_a_plugin_to_its_own_accelerator() -> None:
    with FakeBox([GPU()], plugin=[GPU()]):
        assert torch.cuda.is_available()
        assert torch.accelerator.current_accelerator() == torch.device(PLUGIN)


@pytest.mark.parametrize(
    "options", [{"built": "cuda", "xpu": []}, {"built": "xpu", "mps": True}, {"mps": 1, "xpu": []}]
)
def test_a_machine_that_no_build_fits(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected built="):
        FakeBox(**options)


@pytest.mark.parametrize(
    "box",
    [
        FakeBox([GPU()]),
        FakeBox(xpu=[GPU()]),
        FakeBox(mps=True),
        FakeBox(mtia=[GPU()]),
        FakeBox(hpu=[GPU()]),
        FakeBox(plugin=[GPU()]),
    ],
    ids=["cuda", "xpu", "mps", "mtia", "hpu", "plugin"],
)
def test_seeding_works_on_every_machine(box: FakeBox) -> None:
    with torch.random.fork_rng(devices=[]), box:
        torch.manual_seed(0)
        current = torch.accelerator.current_accelerator()
        assert current is not None
        assert torch.accelerator.current_device_index() == 0
        torch.manual_seed(1)


# ---- management ----------------------------------------------------------------------------------


def test_management_is_absent_unless_asked_for() -> None:
    with FakeBox([GPU()]):
        assert shutil.which("nvidia-smi") is None
        with pytest.raises(ImportError, match="pynvml"):
            importlib.import_module("pynvml")
        torch.cuda.device_count()  # torch finds its library all the same
    with FakeBox([GPU()], nvml=False) as box:
        torch.cuda.device_count()
    assert box.calls == ["cudaGetDeviceCount"]


def test_pynvml() -> None:
    gpus = [GPU(), GPU(name="B", free=8, total=10, capability=(7, 5), mode="exclusive_process")]

    with FakeBox(gpus, pynvml=True, driver_cuda="13.0", env={"CUDA_VISIBLE_DEVICES": ""}) as box:
        nvml = importlib.import_module("pynvml")
        with pytest.raises(nvml.NVMLError, match="Uninitialized"):
            nvml.nvmlDeviceGetCount()
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(SECOND)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        assert nvml.nvmlSystemGetDriverVersion() == "570.124.06"
        assert nvml.nvmlSystemGetCudaDriverVersion_v2() == 13000
        assert nvml.nvmlDeviceGetCount() == 2
        assert handle == nvml.nvmlDeviceGetHandleByIndex(1)
        assert nvml.nvmlDeviceGetUUID(handle) == SECOND
        assert nvml.nvmlDeviceGetName(handle) == "B"
        assert (memory.free, memory.total, memory.used) == (8 * GIB, 10 * GIB, 2 * GIB)
        assert nvml.nvmlDeviceGetCudaComputeCapability(handle) == (7, 5)
        assert nvml.nvmlDeviceGetComputeMode(handle) == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
        assert nvml.nvmlDeviceGetPciInfo(handle).busId == "00000000:02:00.0"
        with pytest.raises(nvml.NVMLError_NotFound, match="Not Found"):
            nvml.nvmlDeviceGetHandleByUUID("GPU-none")
        with pytest.raises(nvml.NVMLError, match="Invalid Argument"):
            nvml.nvmlDeviceGetHandleByIndex(2)
        nvml.nvmlShutdown()
        with pytest.raises(nvml.NVMLError, match="Uninitialized"):
            nvml.nvmlShutdown()

    assert not box.fork_poisoned
    assert box.calls[:2] == ["nvmlDeviceGetCount", "nvmlInit"]


def test_pynvml_of_a_gpu_with_slices() -> None:
    with FakeBox([GPU(migs=("MIG-a", "MIG-b"))], pynvml=True):
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(b"MIG-b")
        assert nvml.nvmlDeviceGetMemoryInfo(handle).total == 40 * GIB
        parent = nvml.nvmlDeviceGetHandleByIndex(0)
        assert nvml.nvmlDeviceGetMigMode(parent) == (1, 1)
        assert nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, 1) == handle


def test_pynvml_of_an_old_package_and_of_what_it_cannot_tell() -> None:
    rejects = {"nvmlDeviceGetComputeMode"}

    with FakeBox([GPU(unified=True)], pynvml=True, pynvml_bytes=True, nvml_rejects=rejects):
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        assert nvml.nvmlDeviceGetUUID(handle) == FIRST.encode()
        for function in (nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlDeviceGetComputeMode):
            with pytest.raises(nvml.NVMLError_NotSupported, match="Not Supported"):
                function(handle)


def test_torch_uses_pynvml_itself() -> None:
    with FakeBox([GPU(), GPU(free=70)], pynvml=True):
        assert torch.cuda.device_memory_used(1) == 10 * GIB


def test_nvidia_smi_answers_any_list_of_fields() -> None:
    gpus = [GPU(free=1.5, total=2, capability=(8, 9)), GPU(mode="prohibited", unified=True)]
    fields = "uuid,name,pci.bus_id,memory.total,memory.free,compute_cap,compute_mode,driver_version"

    with FakeBox(gpus, smi=True) as box:
        rows = query(fields)
        assert query("memory.used,index") == [["512", "0"], ["[N/A]", "1"]]
        with_units = smi("--query-gpu=index,memory.free", "--format=csv").stdout

    name, driver = "NVIDIA H100 80GB HBM3", "570.124.06"
    assert rows == [
        [FIRST, name, "00000000:01:00.0", "2048", "1536", "8.9", "Default", driver],
        [SECOND, name, "00000000:02:00.0", "[N/A]", "[N/A]", "9.0", "Prohibited", driver],
    ]
    assert with_units == "index, memory.free [MiB]\n0, 1536 MiB\n1, [N/A]\n"
    assert box.calls[1] == (
        "nvidia-smi --query-gpu=memory.used,index --format=csv,noheader,nounits"
    )
    assert not box.fork_poisoned


def test_nvidia_smi_shows_the_newest_cuda_of_the_driver() -> None:
    with FakeBox([GPU(migs=("MIG-a",))], smi=True, driver_cuda="13.0"):
        screen = smi()
        listed = smi("-L")

    assert "CUDA Version: 13.0" in screen.stdout
    assert listed.stdout.splitlines() == [
        f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {FIRST})",
        "  MIG 1g.10gb     Device  0: (UUID: MIG-a)",
    ]


def test_an_old_nvidia_smi_rejects_a_field() -> None:
    with FakeBox([GPU()], smi=True, smi_rejects={"compute_cap"}):
        done = smi("--query-gpu=uuid,compute_cap", "--format=csv,noheader,nounits")

    assert done.returncode == 2
    assert done.stdout == 'Field "compute_cap" is not a valid field to query.\n\n'


def test_nvidia_smi_without_a_gpu() -> None:
    with FakeBox(driver_installed=True, smi=True):
        done = smi("--query-gpu=uuid", "--format=csv")

    assert (done.returncode, done.stdout) == (6, "No devices were found\n")


def test_nvidia_smi_can_hang() -> None:
    with FakeBox([GPU()], smi=True, smi_delay=600):
        program = shutil.which("nvidia-smi")
        assert program is not None
        with pytest.raises(subprocess.TimeoutExpired, match="timed out"):
            subprocess.run([program], timeout=0.5, check=False, capture_output=True)


def test_management_sees_who_computes_where_and_what_changes() -> None:
    with FakeBox([GPU(pids=(12,)), GPU(), GPU()], pynvml=True, smi=True) as box:
        torch.cuda.set_device(2)
        apps = query("gpu_uuid,pid", what="compute-apps")
        box.change(1, free=0.5)
        assert query("memory.free")[1] == ["512"]
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(2)
        assert [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)] == [os.getpid()]
        assert torch.cuda.mem_get_info(1)[0] == GIB // 2

    assert apps == [[FIRST, "12"], [box.gpus[2].uuid, str(os.getpid())]]


# ---- leaving -------------------------------------------------------------------------------------


def test_everything_comes_back_after_an_exception() -> None:
    folder = None

    def fail_inside() -> None:
        nonlocal folder
        with FakeBox(PAIR, pynvml=True, smi=True, plugin=[GPU()], hpu=[GPU()]):
            folder = os.environ["PATH"].split(os.pathsep)[0]
            os.environ["CUDA_VISIBLE_DEVICES"] = "1"
            torch.cuda.set_device(0)
            msg = "inside"
            raise LookupError(msg)

    with pytest.raises(LookupError, match="inside"):
        fail_inside()

    assert folder is not None
    assert not os.path.exists(folder)


def test_what_is_installed_comes_back_when_the_box_cannot_be_built() -> None:
    env: Any = {"A": 1}  # os.environ takes texts only

    with pytest.raises(TypeError, match="str"), FakeBox(PAIR, smi=True, env=env):
        raise AssertionError


def test_modules_imported_inside_stay_imported() -> None:
    sys.modules.pop("this_is_imported", None)

    with FakeBox(pynvml=True):
        sys.modules["this_is_imported"] = builtins

    assert sys.modules.pop("this_is_imported") is builtins


def test_a_box_can_be_entered_again() -> None:
    box = FakeBox(PAIR, smi=True)

    for _ in range(2):
        with box:
            assert box.calls == []
            torch.cuda.set_device(1)
            assert query("pid", what="compute-apps") == [[str(os.getpid())]]
            assert box.contexts == {1}


def in_a_forked_child(function: Callable[[], object]) -> str:
    """Return the error of a function in a forked child, or nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, encoding="utf-8") as answer:
        return answer.read()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (torch.cuda.device_count, ""),
        (torch.cuda.is_available, "Cannot re-initialize CUDA in forked subprocess"),
        (torch.cuda.get_arch_list, "Cannot re-initialize CUDA in forked subprocess"),
        (torch.__config__.show, "CUDA driver initialization failed"),
    ],
)
def test_what_spoils_a_fork(ask: Callable[[], object], message: str) -> None:
    with FakeBox(PAIR) as box:
        ask()
        error = in_a_forked_child(torch.cuda.init)

    assert box.fork_poisoned == bool(message)
    assert error.startswith(message)
    assert bool(error) == bool(message)

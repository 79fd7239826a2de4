"""A made-up machine for tests of device *selection*: no hardware, no compiler, no tensors.

`FakeBox` puts itself below the Python code of torch: it replaces the `torch._C._cuda_*` functions
and their like, the management library NVML, the program nvidia-smi and the environment. So the
real `torch.cuda`, `torch.xpu`, `torch.mps`, `torch.mtia` and `torch.accelerator` run on top, with
their caches, lazy starts and warnings, and say what they would say on such a machine.

    with FakeBox([GPU(free=10), GPU(free=70)], env={"CUDA_VISIBLE_DEVICES": "1"}) as box:
        assert torch.cuda.mem_get_info(0)[0] == 70 * GIB
    assert box.contexts == {0}

GPUs are listed in the order of the PCI bus, which is the order of NVML and nvidia-smi.
What it cannot fake on a CPU-only build, because C++ answers: `torch.device(0)` and any tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal
from unittest import mock

import torch

__all__ = [
    "CUDA_UNKNOWN_ERROR",
    "DRIVER_MISMATCH",
    "GIB",
    "GPU",
    "FakeBox",
]

GIB = 1 << 30
_MIB = 1 << 20

# The texts of c10/cuda/CUDAFunctions.cpp, as torch 2.14.1+cu130 says them on a stub libcuda.so.1
# that answers with these errors.
CUDA_UNKNOWN_ERROR = (
    "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env "
    "variable CUDA_VISIBLE_DEVICES after program start. "
    "Setting the available devices to be zero."
)
DRIVER_MISMATCH = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
    "NumCudaDevices() that might have already set an error? "
    "Error 803: system has unsupported display driver / cuda driver combination"
)
_DRIVER_TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version {found}). Please update your GPU "
    "driver by downloading and installing a new version from the URL: "
    "http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to "
    "install a PyTorch version that has been compiled with your version of the CUDA driver."
)
_NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed "
    "a driver from http://www.nvidia.com/Download/index.aspx"
)
_BROKEN_BY_FORK = "CUDA driver initialization failed, you might not have a CUDA gpu."

_VARIABLES = (
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "DEVICEKIT_DEVICE",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NVIDIA_VISIBLE_DEVICES",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "ONEAPI_DEVICE_SELECTOR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "RANK",
    "ROCR_VISIBLE_DEVICES",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "WORLD_SIZE",
    "ZE_AFFINITY_MASK",
    "ZE_FLAT_DEVICE_HIERARCHY",
)

_COMPUTE_MODES = {
    "default": (0, "Default"),
    "exclusive_thread": (1, "Exclusive_Thread"),
    "prohibited": (2, "Prohibited"),
    "exclusive_process": (3, "Exclusive_Process"),
}

_CUDA_ARCHS = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
_ROCM_ARCHS = "gfx900 gfx906 gfx90a gfx942 gfx1030 gfx1100 gfx1200"

Build = Literal["cpu", "cuda", "rocm", "xpu", "mps"]
ComputeMode = Literal["default", "exclusive_thread", "prohibited", "exclusive_process"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPU:
    """One accelerator, of any vendor. Memory is in GiB."""

    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    total: float = 80.0
    free: float = 79.0
    uuid: str = ""  # the box gives one: GPU-00000000-aaaa-… for the first, and so on
    bus_id: str = ""  # the box gives one
    speed: float = 1.0  # CUDA numbers the fastest first, unless CUDA_DEVICE_ORDER=PCI_BUS_ID
    mode: ComputeMode = "default"
    pids: tuple[int, ...] = ()  # processes that compute there; others keep an exclusive GPU busy
    migs: tuple[str, ...] = ()  # UUIDs of its MIG slices
    unified: bool = False  # shares its memory with the CPU: management cannot tell how much
    arch: str = ""  # ROCm: gfx942
    allocated: float = 0.0  # by torch in this process
    reserved: float = 0.0

    @property
    def free_bytes(self) -> int:
        return int(self.free * GIB)

    @property
    def total_bytes(self) -> int:
        return int(self.total * GIB)

    @property
    def accepts_us(self) -> bool:
        """Whether this process can make a context there."""
        if self.mode == "prohibited":
            return False
        return self.mode == "default" or not set(self.pids) - {os.getpid()}


_APPLE = GPU(name="Apple M3 Max", total=48.0, free=40.0, unified=True)


@dataclasses.dataclass(eq=False)
class FakeBox:
    """A machine and a torch build; a context manager that restores everything.

    `calls` lists every call below torch's Python, in order: `cudaGetDeviceCount`, `cuda_init`,
    `getArchFlags`, `props:i`, `context:i`, `nvmlInit`, `nvidia-smi …` and so on.
    `contexts` holds the index of each device, as torch numbers them, where a context was made.
    """

    cuda: Sequence[GPU] = ()  # NVIDIA or AMD hardware, in bus order, whatever torch was built for
    _: dataclasses.KW_ONLY
    built: Build | None = None  # by default what xpu or mps ask for, else "cuda"
    cuda_version: str = "12.8"
    hip_version: str = "6.3.42134-a9a80e791"
    arch_list: str | None = None  # torch.cuda.get_arch_list(), separated by blanks
    show_config: bool = True  # torch.__config__.show() tells the architectures

    driver_installed: bool | None = None  # by default where there is a GPU
    driver: str = "570.124.06"
    driver_cuda: str = ""  # the newest CUDA that the driver supports; by default cuda_version
    init_error: str | None = None  # why CUDA cannot start; an old driver is found by itself

    nvml: bool = True  # libnvidia-ml.so.1 is there, which torch itself opens
    nvml_error: int = 0  # what nvmlInit answers; 18: driver and library do not match
    nvml_rejects: Collection[str] = ()  # functions of pynvml that answer "Not Supported"
    pynvml: bool = False  # the module can be imported
    pynvml_bytes: bool = False  # its texts are bytes, as before nvidia-ml-py 11.5
    smi: bool = False  # the program nvidia-smi is on PATH
    smi_delay: float = 0.0  # seconds before it answers
    smi_rejects: Collection[str] = ()  # fields that it is too old to know, such as compute_cap

    xpu: Sequence[GPU] | None = None
    mps: bool | GPU | None = None  # False: built, but this Mac cannot
    mtia: Sequence[GPU] | None = None
    hpu: Sequence[GPU] | None = None  # a plugin on top of any build, with the module torch.hpu
    plugin: Sequence[GPU] | None = None  # the same for PrivateUse1, under its present name
    plugin_module: bool = True  # the plugin registered a device module
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    gpus: list[GPU] = dataclasses.field(default_factory=list, init=False)
    contexts: set[int] = dataclasses.field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.built = self.built or _default_build(self)
        for name in ("xpu", "mps"):
            if getattr(self, name) is not None and self.built != name:
                msg = f"a build for {self.built!r} has no {name}: expected built={name!r}."
                raise ValueError(msg)
        if self.driver_installed is None:
            self.driver_installed = bool(self.cuda)
        self.driver_cuda = self.driver_cuda or self.cuda_version
        if self.arch_list is None:
            self.arch_list = _ROCM_ARCHS if self.built == "rocm" else _CUDA_ARCHS
        self._stack = contextlib.ExitStack()
        self._calls: list[str] = []
        self._started_in: set[int] = set()
        self._marked_in: set[int] = set()
        self._occupied: set[int] = set()
        self._smi_folder: pathlib.Path | None = None
        self._smi_lines = 0
        self.gpus = [_identified(gpu, i) for i, gpu in enumerate(self.cuda)]

    # What a test asks and says.

    @property
    def calls(self) -> list[str]:
        self._collect_smi_calls()
        return self._calls

    @property
    def fork_poisoned(self) -> bool:
        """Whether a process forked from here could no longer use the accelerator."""
        return bool(self._started_in | self._marked_in)

    @property
    def nvidia_driver(self) -> bool:
        return bool(self.driver_installed) and self.built != "rocm"

    def change(self, position: int, /, **fields: Any) -> None:
        """Change the GPU at this place of the bus: `box.change(0, free=0.5)`."""
        self.gpus[position] = dataclasses.replace(self.gpus[position], **fields)
        self._write_smi_facts()

    # Entering and leaving.

    def __enter__(self) -> FakeBox:
        self._calls.clear()
        self.contexts.clear()
        self._started_in.clear()
        self._marked_in.clear()
        self._occupied.clear()
        self._smi_lines = 0
        with contextlib.ExitStack() as stack:
            patcher = _Patcher(stack)
            self._install_environment(patcher)
            self._install_build(patcher)
            plugin = torch._C._get_privateuse1_backend_name()
            runtimes = self._runtimes(plugin)
            for owner, name in (
                (torch._C, "_cuda_getDeviceCount"),
                (torch, "hpu"),
                (torch, plugin),
            ):
                patcher.remove(owner, name)
            self._install_caches(patcher)
            self._install_config(patcher, runtimes.get("cuda"))
            for runtime in runtimes.values():
                runtime.install(patcher)
            _install_accelerator(patcher, next(iter(runtimes.values()), None))
            _install_management(patcher, self)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._collect_smi_calls()
        self._smi_folder = None
        self._stack.close()

    def _runtimes(self, plugin: str) -> dict[str, _Runtime]:
        """Return the backends of this build; the first is the accelerator that torch reports."""
        runtimes: dict[str, _Runtime] = {}
        if self.plugin is not None:  # C++ prefers PrivateUse1 to what it was built with
            runtimes[plugin] = _Plugin(self, plugin, self.plugin, module=self.plugin_module)
        if self.built in ("cuda", "rocm"):
            runtimes["cuda"] = _Cuda(self)
        if self.built == "xpu":
            runtimes["xpu"] = _Xpu(self)
        if self.built == "mps":
            runtimes["mps"] = _Mps(self)
        if self.mtia is not None:
            runtimes["mtia"] = _Mtia(self)
        if self.hpu is not None:
            runtimes["hpu"] = _Plugin(self, "hpu", self.hpu)
        return runtimes

    def _install_environment(self, patcher: _Patcher) -> None:
        patcher.stack.enter_context(mock.patch.dict(os.environ))
        for name in _VARIABLES:
            os.environ.pop(name, None)
        # A PATH without the machine's own nvidia-smi.
        folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
        folders = [f for f in folders if not pathlib.Path(f, "nvidia-smi").exists()]
        if self.smi:
            self._smi_folder = pathlib.Path(
                patcher.stack.enter_context(tempfile.TemporaryDirectory(prefix="fakebox-"))
            )
            _write_smi_program(self._smi_folder)
            self._write_smi_facts()
            folders.insert(0, str(self._smi_folder))
        os.environ["PATH"] = os.pathsep.join(folders)
        os.environ.update(self.env)

    def _install_build(self, patcher: _Patcher) -> None:
        gpu_build = self.built in ("cuda", "rocm")
        patcher.set(torch.version, "cuda", self.cuda_version if self.built == "cuda" else None)
        patcher.set(torch.version, "hip", self.hip_version if self.built == "rocm" else None)
        patcher.set(torch.version, "xpu", "20250300" if self.built == "xpu" else None)
        patcher.set(torch._C, "_has_cuda", gpu_build)
        patcher.set(torch._C, "_has_mps", self.built == "mps")
        patcher.set(torch._C, "_has_xpu", self.built == "xpu")
        patcher.set(torch._C, "_mps_is_available", lambda: False)
        patcher.set(torch._C, "_mtia_isBuilt", lambda: self.mtia is not None)

    def _install_config(self, patcher: _Patcher, cuda: _Runtime | None) -> None:
        real = torch._C._show_config

        def show() -> str:
            # C++ counts the devices for it, and says more where there are some: it starts the
            # driver and, unlike torch.cuda, does not even mark the process as unfit to fork
            # (seen in torch 2.14).
            seen = cuda.count(marks=False) if isinstance(cuda, _Cuda) else 0
            return _config_text(_config_text_of_cpu(real()), self, devices=bool(seen))

        patcher.set(torch._C, "_show_config", show)

    def _install_caches(self, patcher: _Patcher) -> None:
        """Forget what torch's Python remembers of the real machine, and afterwards of this one."""
        for module in (torch.cuda, torch.xpu, torch.mtia):
            patcher.set(module, "_initialized", False)
            patcher.set(module, "_queued_calls", [])
            patcher.set(module, "_lazy_seed_tracker", torch._utils._LazySeedTracker())
            patcher.set(module, "default_generators", ())
        patcher.set(torch.cuda, "_cached_device_count", None)
        patcher.set(torch.xpu, "_cached_device_count", None)
        # torch.xpu would count devices with this module.
        patcher.set_module("pyzes", None)
        cached: list[Any] = [
            value
            for value in (
                *vars(torch.backends.mps).values(),
                torch.get_device_module,
                torch.xpu.get_device_capability,
                getattr(torch.accelerator, "get_device_capability", None),
                getattr(torch.cuda, "_check_bf16_tensor_supported", None),
            )
            if hasattr(value, "cache_clear")
        ]
        for function in cached:
            function.cache_clear()
            patcher.stack.callback(function.cache_clear)

    # What the parts of the box tell it.

    def record(self, call: str, *, starts: bool = False, marks: bool = False) -> None:
        """Note a call: whether it starts the driver, whether torch marks the process for it."""
        self._collect_smi_calls()
        self._calls.append(call)
        if starts:
            self._started_in.add(os.getpid())
        if marks:
            self._marked_in.add(os.getpid())

    def in_bad_fork(self) -> bool:
        """Whether torch had marked a parent of this process before it forked."""
        return bool(self._marked_in - {os.getpid()})

    def broken_by_fork(self) -> bool:
        """Whether a parent of this process had started the driver before it forked."""
        return bool(self._started_in - {os.getpid()})

    def occupy(self, position: int) -> None:
        """Let the management tools see this process on a GPU."""
        self._occupied.add(position)
        self._write_smi_facts()

    def pids(self, position: int) -> list[int]:
        """Return the processes that compute on a GPU; this one since it has a context there."""
        ours = {os.getpid()} if position in self._occupied else set()
        return sorted({*self.gpus[position].pids, *ours})

    def _collect_smi_calls(self) -> None:
        if self._smi_folder is None:
            return
        log = self._smi_folder / "calls"
        if log.exists():
            lines = log.read_text(encoding="utf-8").splitlines()
            self._calls.extend(lines[self._smi_lines :])
            self._smi_lines = len(lines)

    def _write_smi_facts(self) -> None:
        if self._smi_folder is not None:
            facts = json.dumps(_smi_facts(self))
            (self._smi_folder / "facts.json").write_text(facts, encoding="utf-8")


def _default_build(box: FakeBox) -> Build:
    if box.xpu is not None:
        return "xpu"
    if box.mps is not None:
        return "mps"
    plugins = (box.mtia, box.hpu, box.plugin)
    return "cpu" if any(plugin is not None for plugin in plugins) and not box.cuda else "cuda"


def _identified(gpu: GPU, position: int) -> GPU:
    return dataclasses.replace(
        gpu,
        uuid=gpu.uuid or f"GPU-{position:08x}-aaaa-bbbb-cccc-dddddddddddd",
        bus_id=gpu.bus_id or f"00000000:{position + 1:02X}:00.0",
    )


class _Patcher:
    """Attributes that come back when the stack closes."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack

    def set(self, owner: Any, name: str, value: object) -> None:
        self.stack.enter_context(mock.patch.object(owner, name, value, create=True))

    def set_all(self, owner: Any, **values: object) -> None:
        for name, value in values.items():
            self.set(owner, name, value)

    def remove(self, owner: Any, name: str) -> None:
        if hasattr(owner, name):
            self.stack.callback(setattr, owner, name, getattr(owner, name))
            delattr(owner, name)

    def set_module(self, name: str, module: types.ModuleType | None) -> None:
        """Set what `import name` gives; None makes it fail, even where the real one is installed.

        Not with `mock.patch.dict`, which would also forget every module imported inside the box.
        """
        if name in sys.modules:
            self.stack.callback(sys.modules.__setitem__, name, sys.modules[name])
        else:
            self.stack.callback(sys.modules.pop, name, None)
        sys.modules[name] = module  # type: ignore[assignment]


# The build.


def _config_text_of_cpu(text: str) -> str:
    """Take out of the text of the real build what a CUDA build has."""
    text = re.sub(r"  - (CUDA Runtime|NVCC|CuDNN|    Built|Magma|HIP|MIOpen).*\n", "", text)
    return re.sub(r" -gencode arch=\w+,code=\w+", "", text)


def _config_text(text: str, box: FakeBox, *, devices: bool) -> str:
    """Return the text of `torch.__config__.show()` for the box's build."""
    lines: list[str] = []
    if box.built == "cuda":
        archs = (box.arch_list or "").split() if box.show_config else []
        pairs = [f"arch=compute_{arch.partition('_')[2]},code={arch}" for arch in archs]
        gencode = "".join(f" -gencode {pair}" for pair in pairs)
        text = text.replace("CUDA_FLAGS=", f"CUDA_FLAGS={gencode}")
        flags = ";".join(f"-gencode;{pair}" for pair in pairs)
        lines = [f"  - CUDA Runtime {box.cuda_version}", "  - CuDNN 91.0.2", "  - Magma 2.6.1"]
        if flags:
            lines.insert(1, f"  - NVCC architecture flags: {flags}")
    elif box.built == "rocm":
        lines = [f"  - HIP Runtime {box.hip_version}", "  - MIOpen 3.3.0", "  - Magma 2.7.2"]
    if not devices:
        return text
    before, settings, after = text.partition("  - Build settings")
    return before + "".join(f"{line}\n" for line in lines) + settings + after


# The runtimes: what torch's Python calls.


class _Runtime:
    """One backend below torch's Python."""

    type = ""

    def __init__(self, box: FakeBox) -> None:
        self.box = box
        self.current = 0

    def install(self, patcher: _Patcher) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Do what C++ does before it uses the backend."""

    def memory(self, index: int) -> tuple[int, int]:
        raise NotImplementedError

    def check(self, index: int) -> None:
        raise NotImplementedError

    def set_current(self, index: int) -> None:
        self.check(index)
        self.current = index

    def exchange(self, index: int) -> int:
        before = self.current
        if index >= 0:
            self.check(index)
            self.current = index
        return before


def _install_accelerator(patcher: _Patcher, runtime: _Runtime | None) -> None:
    def expect() -> _Runtime:
        if runtime is None:
            msg = "Cannot access accelerator device when none is available."
            raise RuntimeError(msg)
        return runtime

    def get_index() -> int:
        expect().start()
        return expect().current

    def set_index(index: int) -> None:
        expect().start()
        expect().set_current(index)

    def device_count() -> int:
        return int(torch.get_device_module(expect().type).device_count()) if runtime else 0

    def stats(index: int) -> dict[str, Any]:
        del index
        return {}

    def capability(index: int) -> dict[str, Any]:
        del index
        wide = {torch.float64} if expect().type != "mps" else set()
        return {"supported_dtypes": {torch.float32, torch.float16, torch.bfloat16} | wide}

    device = torch.device(runtime.type) if runtime else None
    patcher.set_all(
        torch._C,
        _accelerator_getAccelerator=lambda: device,
        _get_accelerator=lambda: device or torch.device("cpu"),
        _accelerator_getDeviceIndex=get_index,
        _accelerator_setDeviceIndex=set_index,
        _accelerator_exchangeDevice=lambda index: expect().exchange(index),
        _accelerator_maybeExchangeDevice=lambda index: expect().exchange(index),
        _accelerator_getDeviceCapability=capability,
        _accelerator_getMemoryInfo=lambda index: expect().memory(index),
        _accelerator_isAllocatorInitialized=lambda: False,
        _accelerator_getDeviceStats=stats,
        _accelerator_synchronizeDevice=lambda index: None,
    )
    if hasattr(torch._C, "_accelerator_deviceCount"):  # torch < 2.9 asks C++
        patcher.set(torch._C, "_accelerator_deviceCount", device_count)


@dataclasses.dataclass(frozen=True)
class _Visible:
    """A device as CUDA shows it: a GPU of the box, or one MIG slice of it."""

    position: int
    mig: str = ""


class _Cuda(_Runtime):
    """CUDA, and HIP under its name."""

    type = "cuda"

    def __init__(self, box: FakeBox) -> None:
        super().__init__(box)
        self._visible: list[_Visible] | None = None
        self._count: int | None = None

    @property
    def visible(self) -> list[_Visible]:
        # The driver reads the environment once, when it starts.
        if self._visible is None:
            select = _visible_to_hip if self.box.built == "rocm" else _visible_to_cuda
            self._visible = select(self.box.gpus) if self.box.driver_installed else []
        return self._visible

    def install(self, patcher: _Patcher) -> None:
        patcher.set_all(
            torch._C,
            _cuda_getDeviceCount=self.count,
            _cuda_init=self.init,
            _cuda_getArchFlags=self.arch_flags,
            _cuda_setDevice=self.set_current,
            _cuda_getDevice=lambda: self.current,
            _cuda_exchangeDevice=self.exchange,
            _cuda_maybeExchangeDevice=self.exchange,
            _cuda_isInBadFork=self.box.in_bad_fork,
            _cuda_synchronize=lambda: None,
            _cuda_memoryStats=self.memory_stats,
            _cuda_getCompiledVersion=lambda: _cuda_number(self.box.cuda_version),
        )
        patcher.set_all(
            torch.cuda,
            _is_in_bad_fork=self.box.in_bad_fork,
            _exchange_device=self.exchange,
            _maybe_exchange_device=self.exchange,
            _get_device_properties=self.properties,
            _cudart=types.SimpleNamespace(
                cudaMemGetInfo=self.memory,
                cudaError=type("cudaError", (int,), {"success": 0}),
                cudaGetErrorString=lambda code: f"error {code}",
            ),
        )
        # What torch.cuda queues when it is imported, for its first start.
        torch.cuda._lazy_call(torch.cuda._check_capability)
        torch.cuda._lazy_call(torch.cuda._check_cubins)

    def start(self) -> None:
        torch.cuda.init()

    def failure(self) -> str | None:
        """Return why the driver does not start."""
        box = self.box
        if box.init_error is not None:
            return box.init_error or None
        if not box.nvidia_driver:
            return None
        if box.nvml_error:
            return DRIVER_MISMATCH
        found, needed = _cuda_number(box.driver_cuda), _cuda_number(box.cuda_version)
        # Within one major version an older driver is good enough.
        return _DRIVER_TOO_OLD.format(found=found) if found // 1000 < needed // 1000 else None

    def count(self, *, marks: bool = True) -> int:
        self.box.record("cudaGetDeviceCount", starts=True, marks=marks)
        # C++ counts, and warns, once per process.
        if self._count is None:
            self._count = len(self.visible)
            if failure := self.failure():
                self._count = 0
                place = "Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:119."
                warnings.warn(f"CUDA initialization: {failure} ({place})", stacklevel=2)
        return self._count

    def init(self) -> None:
        self.box.record("cuda_init", starts=True, marks=True)
        if self.box.broken_by_fork():
            raise RuntimeError(_BROKEN_BY_FORK)
        if failure := self.failure():
            raise RuntimeError(failure)
        if not self.visible:
            no_driver = self.box.built == "cuda" and not self.box.nvidia_driver
            raise RuntimeError(_NO_DRIVER if no_driver else "No CUDA GPUs are available")
        torch.cuda.default_generators = tuple(torch.Generator() for _ in self.visible)  # type: ignore[assignment]

    def arch_flags(self) -> str | None:
        # It does not start CUDA, but marks the process as unfit to fork all the same.
        self.box.record("getArchFlags", marks=True)
        return self.box.arch_list or None

    def check(self, index: int) -> None:
        if not 0 <= index < len(self.visible):
            ordinal = "invalid device ordinal"
            raise self.error(ordinal)

    def error(self, text: str, /) -> RuntimeError:
        word = "HIP" if self.box.built == "rocm" else "CUDA"
        error = getattr(torch, "AcceleratorError", RuntimeError)  # torch >= 2.8
        return error(
            f"{word} error: {text}\n{word} kernel errors might be asynchronously reported at some "
            "other API call, so the stacktrace below might be incorrect.\n"
        )

    def gpu(self, index: int) -> GPU:
        """Return the GPU with this number; a MIG slice has its share of the memory."""
        self.check(index)
        seen = self.visible[index]
        gpu = self.box.gpus[seen.position]
        return _mig_slice(gpu, seen.mig) if seen.mig else gpu

    def context(self, index: int) -> None:
        self.check(index)
        self.box.record(f"context:{index}")
        if not self.gpu(index).accepts_us:
            busy = "CUDA-capable device(s) is/are busy or unavailable"
            raise self.error(busy)
        self.box.contexts.add(index)
        self.box.occupy(self.visible[index].position)

    def properties(self, index: int) -> types.SimpleNamespace:
        self.box.record(f"props:{index}")
        gpu = self.gpu(index)
        return types.SimpleNamespace(
            name=gpu.name,
            major=gpu.capability[0],
            minor=gpu.capability[1],
            total_memory=gpu.total_bytes,
            multi_processor_count=132,
            is_integrated=int(gpu.unified),
            is_multi_gpu_board=0,
            gcnArchName=gpu.arch,
            warp_size=64 if self.box.built == "rocm" else 32,
            uuid=_Uuid(gpu.uuid),
        )

    def set_current(self, index: int) -> None:
        torch.cuda.init()
        self.check(index)
        self.context(index)  # since CUDA 12 cudaSetDevice makes the primary context
        self.current = index

    def memory(self, index: int) -> tuple[int, int]:
        self.start()
        self.context(index)
        gpu = self.gpu(index)
        return gpu.free_bytes, gpu.total_bytes

    def memory_stats(self, index: int) -> dict[str, Any]:
        gpu = self.gpu(index)
        return _memory_stats(gpu)


def _memory_stats(gpu: GPU) -> dict[str, Any]:
    def pools(gib: float) -> dict[str, dict[str, int]]:
        return {"all": {"current": int(gib * GIB), "peak": int(gib * GIB)}}

    return {"allocated_bytes": pools(gpu.allocated), "reserved_bytes": pools(gpu.reserved)}


class _Uuid:
    """As torch's own: its text lacks the prefix that NVML gives."""

    def __init__(self, uuid: str) -> None:
        self._text = uuid.removeprefix("GPU-").removeprefix("MIG-")

    def __str__(self) -> str:
        return self._text

    @property
    def bytes(self) -> bytes:
        return bytes.fromhex(self._text.replace("-", ""))


def _mig_slice(gpu: GPU, uuid: str) -> GPU:
    share = len(gpu.migs)
    return dataclasses.replace(
        gpu,
        name=f"{gpu.name} MIG 1g",
        uuid=uuid,
        total=gpu.total / share,
        free=gpu.free / share,
        migs=(),
    )


def _cuda_number(version: str) -> int:
    """Return the number that CUDA gives for a version: 12080 for "12.8"."""
    major, minor = version.split(".")[:2]
    return int(major) * 1000 + int(minor) * 10


def _visible_to_cuda(gpus: Sequence[GPU]) -> list[_Visible]:
    positions = list(range(len(gpus)))
    if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        positions.sort(key=lambda position: -gpus[position].speed)
    # A GPU that is cut into slices stands for its first.
    devices = [_Visible(p, gpus[p].migs[0] if gpus[p].migs else "") for p in positions]
    uuids = [(gpus[device.position].uuid, device) for device in devices]
    uuids += [(uuid, _Visible(p, uuid)) for p in positions for uuid in gpus[p].migs]
    chosen = _chosen(os.environ.get("CUDA_VISIBLE_DEVICES"), devices, uuids)
    # CUDA shows one MIG slice per process, and no whole GPU beside it.
    slices = [device for device in chosen if device.mig]
    return slices[:1] or chosen


def _visible_to_hip(gpus: Sequence[GPU]) -> list[_Visible]:
    """ROCR_VISIBLE_DEVICES filters in the driver; HIP numbers what is left and filters again."""
    left = [_Visible(position) for position in range(len(gpus))]
    for text in (
        os.environ.get("ROCR_VISIBLE_DEVICES"),
        os.environ.get("HIP_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")),
    ):
        left = _chosen(text, left, [(gpus[device.position].uuid, device) for device in left])
    return left


def _chosen(
    text: str | None, devices: Sequence[_Visible], uuids: Sequence[tuple[str, _Visible]]
) -> list[_Visible]:
    """Return what a visibility variable leaves: up to the first bad entry; nothing if one is twice.

    An entry is a number, which may have junk behind it ("0;1" is 0), or the beginning of a UUID
    that fits one device only. A list that starts with a UUID has only such.
    """
    if text is None:
        return list(devices)
    prefix = next((p for p in ("GPU-", "MIG-") if text.startswith(p)), None)
    chosen: list[_Visible] = []
    for entry in text.split(","):
        if prefix is None:
            number = re.match(r"\+?\d+", entry.strip())
            found = [device for i, device in enumerate(devices) if number and i == int(number[0])]
        elif entry.startswith(prefix):
            found = [device for uuid, device in uuids if uuid.startswith(entry)]
        else:
            found = []
        if len(found) != 1:
            break
        if found[0] in chosen:
            return []
        chosen += found
    return chosen


class _Xpu(_Runtime):
    type = "xpu"

    def __init__(self, box: FakeBox) -> None:
        super().__init__(box)
        self.all = [_identified(gpu, i) for i, gpu in enumerate(box.xpu or ())]
        self._visible: list[GPU] | None = None

    @property
    def visible(self) -> list[GPU]:
        if self._visible is None:
            self._visible = self._masked()
        return self._visible

    def _masked(self) -> list[GPU]:
        mask = os.environ.get("ZE_AFFINITY_MASK", "")
        # Level Zero keeps its own order, and "0.1" (a tile of device 0) shows that device.
        numbers = {int(n) for n in re.findall(r"(?:^|,)\s*(\d+)", mask)}
        return [gpu for i, gpu in enumerate(self.all) if i in numbers or not mask.strip()]

    def install(self, patcher: _Patcher) -> None:
        patcher.set_all(
            torch._C,
            _xpu_getDeviceCount=self.count,
            _xpu_init=self.init,
            _xpu_getDevice=lambda: self.current,
            _xpu_setDevice=self.set_current,
            _xpu_exchangeDevice=self.exchange,
            _xpu_maybeExchangeDevice=self.exchange,
            _xpu_isInBadFork=self.box.in_bad_fork,
            _xpu_getMemoryInfo=self.memory,
            _xpu_memoryStats=lambda index: _memory_stats(self.gpu(index)),
            _xpu_synchronize=lambda index: None,
        )
        patcher.set_all(
            torch.xpu,
            _is_in_bad_fork=self.box.in_bad_fork,
            _exchange_device=self.exchange,
            _maybe_exchange_device=self.exchange,
            _get_device_properties=self.properties,
        )

    def start(self) -> None:
        torch.xpu.init()

    def count(self) -> int:
        self.box.record("xpuGetDeviceCount", starts=True, marks=True)
        return len(self.visible)

    def init(self) -> None:
        self.box.record("xpu_init", starts=True, marks=True)
        if not self.visible:
            msg = "No XPU devices are available."
            raise RuntimeError(msg)
        torch.xpu.default_generators = tuple(torch.Generator() for _ in self.visible)  # type: ignore[assignment]

    def check(self, index: int) -> None:
        if not 0 <= index < len(self.visible):
            msg = (
                "The device index is out of range. "
                f"It must be in [0, {len(self.visible)}), but got {index}."
            )
            raise RuntimeError(msg)

    def gpu(self, index: int) -> GPU:
        self.check(index)
        return self.visible[index]

    def properties(self, index: int) -> types.SimpleNamespace:
        self.box.record(f"props:{index}")
        gpu = self.gpu(index)
        return types.SimpleNamespace(
            name=gpu.name,
            platform_name="Intel(R) oneAPI Unified Runtime over Level-Zero",
            type="gpu",
            vendor="Intel(R) Corporation",
            driver_version="1.6.32567",
            version="20.4.4",
            total_memory=gpu.total_bytes,
            max_compute_units=512,
            gpu_eu_count=512,
            has_fp16=True,
            has_fp64=True,
            has_atomic64=True,
            has_bfloat16_conversions=True,
            has_subgroup_matrix_multiply_accumulate=True,
            is_integrated_gpu=gpu.unified,
            uuid=_Uuid(gpu.uuid),
        )

    def memory(self, index: int) -> tuple[int, int]:
        self.start()
        gpu = self.gpu(index)
        self.box.record(f"context:{index}")
        self.box.contexts.add(index)
        if gpu.unified:
            msg = f"The device ({gpu.name}) doesn't support querying the available free memory."
            raise RuntimeError(msg)
        return gpu.free_bytes, gpu.total_bytes


class _Mps(_Runtime):
    type = "mps"

    def __init__(self, box: FakeBox) -> None:
        super().__init__(box)
        self.gpu = box.mps if isinstance(box.mps, GPU) else _APPLE

    def install(self, patcher: _Patcher) -> None:
        patcher.set_all(
            torch._C,
            _mps_is_available=self.is_available,
            _mps_is_on_macos_or_newer=lambda major, minor: bool(self.box.mps),
            _mps_get_name=lambda: self.gpu.name,
            _mps_get_core_count=lambda: 40,
            _mps_get_default_generator=torch.Generator,
            _mps_currentAllocatedMemory=lambda: int(self.gpu.allocated * GIB),
            _mps_driverAllocatedMemory=lambda: int(self.gpu.reserved * GIB),
            _mps_recommendedMaxMemory=lambda: int(self.gpu.total * 0.75 * GIB),
            _mps_deviceSynchronize=lambda: None,
        )

    def is_available(self) -> bool:
        self.box.record("mps_is_available")
        return bool(self.box.mps)

    def check(self, index: int) -> None:
        if index != 0:
            msg = f"invalid MPS device index: {index}"
            raise RuntimeError(msg)

    def memory(self, index: int) -> tuple[int, int]:
        del index
        # The pessimistic guess: its allocator is none that torch.accelerator can ask. [no Mac here]
        msg = "Allocator for mps is not a DeviceAllocator."
        raise RuntimeError(msg)


class _Mtia(_Runtime):
    type = "mtia"

    def __init__(self, box: FakeBox) -> None:
        super().__init__(box)
        self.gpus = list(box.mtia or ())

    def install(self, patcher: _Patcher) -> None:
        patcher.set_all(
            torch._C,
            _mtia_init=self.init,
            _mtia_getDeviceCount=self.count,
            _mtia_getDevice=lambda: self.current,
            _mtia_setDevice=self.set_current,
            _mtia_exchangeDevice=self.exchange,
            _mtia_maybeExchangeDevice=self.exchange,
            _mtia_isInBadFork=self.box.in_bad_fork,
            _mtia_getDeviceCapability=lambda index: self.gpus[index].capability,
            _mtia_getDeviceProperties=lambda index: {"name": self.gpus[index].name},
            _mtia_memoryStats=lambda index: _memory_stats(self.gpus[index]),
            _mtia_deviceSynchronize=lambda: None,
        )

    def start(self) -> None:
        torch.mtia.init()

    def init(self) -> None:
        self.box.record("mtia_init", starts=True, marks=True)
        torch.mtia.default_generators = tuple(torch.Generator() for _ in self.gpus)

    def count(self) -> int:
        self.box.record("mtiaGetDeviceCount", starts=True, marks=True)
        return len(self.gpus)

    def check(self, index: int) -> None:
        if not 0 <= index < len(self.gpus):
            msg = f"invalid MTIA device index: {index}"
            raise RuntimeError(msg)

    def memory(self, index: int) -> tuple[int, int]:
        self.check(index)
        return self.gpus[index].free_bytes, self.gpus[index].total_bytes


class _Plugin(_Runtime):
    """A backend that comes from outside torch, with or without a module `torch.<name>`."""

    def __init__(
        self, box: FakeBox, name: str, gpus: Sequence[GPU], *, module: bool = True
    ) -> None:
        super().__init__(box)
        self.type = name
        self.gpus = list(gpus)
        self.with_module = module

    def install(self, patcher: _Patcher) -> None:
        if not self.with_module:
            return
        module = types.ModuleType(f"torch.{self.type}")
        functions: dict[str, Callable[..., object]] = {
            "is_available": lambda: bool(self.gpus),
            "device_count": self.count,
            "current_device": lambda: self.current,
            "set_device": lambda device: self.set_current(self.index_of(device)),
            "get_device_name": lambda device=None: self.gpus[self.index_of(device)].name,
            "get_device_properties": self.properties,
            "mem_get_info": lambda device=None: self.memory(self.index_of(device)),
            "memory_allocated": lambda device=None: 0,
            "memory_reserved": lambda device=None: 0,
            "synchronize": lambda device=None: None,
            "is_initialized": lambda: True,
            "_is_in_bad_fork": lambda: False,
            "manual_seed_all": lambda seed: None,
        }
        for name, function in functions.items():
            setattr(module, name, function)
        patcher.set(torch, self.type, module)
        patcher.set_module(module.__name__, module)

    def index_of(self, device: torch.device | int | str | None) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index if device is not None else None
        return self.current if index is None else index

    def count(self) -> int:
        self.box.record(f"{self.type}:device_count")
        return len(self.gpus)

    def check(self, index: int) -> None:
        if not 0 <= index < len(self.gpus):
            msg = f"{self.type}: invalid device index {index}"
            raise RuntimeError(msg)

    def properties(self, device: torch.device | int | str | None = None) -> object:
        gpu = self.gpus[self.index_of(device)]
        return types.SimpleNamespace(name=gpu.name, total_memory=gpu.total_bytes)

    def memory(self, index: int) -> tuple[int, int]:
        self.check(index)
        self.box.record(f"context:{index}")
        self.box.contexts.add(index)
        return self.gpus[index].free_bytes, self.gpus[index].total_bytes


# Management: the library NVML, as torch opens it and as the module pynvml, and nvidia-smi.
# None of them starts CUDA, makes a context or heeds CUDA_VISIBLE_DEVICES.

_NVML_ERRORS = {
    1: ("Uninitialized", "UNINITIALIZED"),
    2: ("Invalid Argument", "INVALID_ARGUMENT"),
    3: ("Not Supported", "NOT_SUPPORTED"),
    4: ("Insufficient Permissions", "NO_PERMISSION"),
    6: ("Not Found", "NOT_FOUND"),
    9: ("Driver Not Loaded", "DRIVER_NOT_LOADED"),
    12: ("NVML Shared Library Not Found", "LIBRARY_NOT_FOUND"),
    15: ("GPU is lost", "GPU_IS_LOST"),
    18: ("RM has detected an NVML/RM version mismatch.", "LIB_RM_VERSION_MISMATCH"),
    999: ("Unknown Error", "UNKNOWN"),
}


def _install_management(patcher: _Patcher, box: FakeBox) -> None:
    real = ctypes.CDLL

    def open_library(name: str | None, *args: Any, **kwargs: Any) -> Any:
        if "nvidia-ml" not in str(name):
            return real(name, *args, **kwargs)
        if not (box.nvml and box.nvidia_driver):
            msg = f"{name}: cannot open shared object file: No such file or directory"
            raise OSError(msg)
        return _NvmlLibrary(box)

    patcher.set(ctypes, "CDLL", open_library)
    module = _Pynvml(box).module() if box.pynvml else None
    patcher.set_module("pynvml", module)
    # torch looks for these when it is imported, for torch.cuda.device_memory_used() and its like.
    patcher.set_all(
        torch.cuda, _HAS_PYNVML=box.pynvml, _PYNVML_ERR=None, pynvml=module, _HAS_AMDSMI=False
    )


class _NvmlLibrary:
    """The calls that torch makes through ctypes; they answer with a status."""

    def __init__(self, box: FakeBox) -> None:
        self.box = box

    def nvmlInit(self) -> int:  # noqa: N802
        self.box.record("nvmlInit")
        return self.box.nvml_error

    def nvmlDeviceGetCount_v2(self, out: Any) -> int:  # noqa: N802
        self.box.record("nvmlDeviceGetCount_v2")
        out._obj.value = len(self.box.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, out: Any) -> int:  # noqa: N802
        self.box.record("nvmlDeviceGetHandleByIndex_v2")
        out._obj.value = index + 1  # a null pointer would read back as None
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, out: Any, size: int) -> int:  # noqa: N802
        self.box.record("nvmlDeviceGetUUID")
        del size
        out.value = self.box.gpus[handle.value - 1].uuid.encode()
        return 0


@dataclasses.dataclass(frozen=True)
class _Handle:
    position: int
    mig: str = ""


class _Pynvml:
    """The module of the package nvidia-ml-py."""

    def __init__(self, box: FakeBox) -> None:
        self.box = box
        self.users = 0

        class NVMLError(Exception):
            def __init__(self, value: int) -> None:
                super().__init__(value)
                self.value = value

            def __str__(self) -> str:
                return _NVML_ERRORS[self.value][0]

        self.error = NVMLError
        self.errors: dict[int, type[NVMLError]] = {}

    def module(self) -> Any:
        module: Any = types.ModuleType("pynvml")
        module.NVMLError = self.error
        for value, (_, name) in _NVML_ERRORS.items():
            pascal = "".join(word.capitalize() for word in name.split("_"))
            # A subclass that is made without arguments, as there.
            body = {"__init__": _constructor(self.error, value)}
            self.errors[value] = type(f"NVMLError_{pascal}", (self.error,), body)
            setattr(module, f"NVMLError_{pascal}", self.errors[value])
            setattr(module, f"NVML_ERROR_{name}", value)
        module.NVML_SUCCESS = 0
        module.NVML_COMPUTEMODE_DEFAULT = 0
        module.NVML_COMPUTEMODE_EXCLUSIVE_THREAD = 1
        module.NVML_COMPUTEMODE_PROHIBITED = 2
        module.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
        module.nvmlInit = self.init
        module.nvmlInitWithFlags = lambda flags: self.init()
        module.nvmlShutdown = self.shutdown
        for name, function in self._queries().items():
            setattr(module, name, self._checked(name, function))
        return module

    def _queries(self) -> dict[str, Callable[..., object]]:
        box = self.box

        def pci(handle: _Handle) -> object:
            bus_id = box.gpus[handle.position].bus_id
            return types.SimpleNamespace(busId=bus_id.encode() if box.pynvml_bytes else bus_id)

        def processes(handle: _Handle) -> list[object]:
            pids = box.pids(handle.position)
            return [types.SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids]

        return {
            "nvmlSystemGetDriverVersion": lambda: box.driver,
            "nvmlSystemGetNVMLVersion": lambda: f"12.{box.driver}",
            "nvmlSystemGetCudaDriverVersion": lambda: _cuda_number(box.driver_cuda),
            "nvmlSystemGetCudaDriverVersion_v2": lambda: _cuda_number(box.driver_cuda),
            "nvmlDeviceGetCount": lambda: len(box.gpus),
            "nvmlDeviceGetHandleByIndex": self.by_index,
            "nvmlDeviceGetHandleByUUID": self.by_uuid,
            "nvmlDeviceGetIndex": lambda handle: handle.position,
            "nvmlDeviceGetUUID": lambda handle: self.gpu(handle).uuid,
            "nvmlDeviceGetName": lambda handle: self.gpu(handle).name,
            "nvmlDeviceGetMemoryInfo": self.memory,
            "nvmlDeviceGetCudaComputeCapability": lambda handle: self.gpu(handle).capability,
            "nvmlDeviceGetComputeMode": lambda handle: _COMPUTE_MODES[self.gpu(handle).mode][0],
            "nvmlDeviceGetComputeRunningProcesses": processes,
            "nvmlDeviceGetPciInfo": pci,
            "nvmlDeviceGetMigMode": self.mig_mode,
            "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": self.mig_by_index,
        }

    def _checked(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            self.box.record(name)
            if not self.users:
                raise self.errors[1]
            if name in self.box.nvml_rejects:
                raise self.errors[3]
            answer = function(*args)
            if self.box.pynvml_bytes and isinstance(answer, str):
                return answer.encode()
            return answer

        call.__name__ = name
        return call

    def init(self) -> None:
        self.box.record("nvmlInit")
        if not (self.box.nvml and self.box.nvidia_driver):
            raise self.errors[12]
        if self.box.nvml_error:
            raise self.errors[self.box.nvml_error]
        self.users += 1

    def shutdown(self) -> None:
        self.box.record("nvmlShutdown")
        if not self.users:
            raise self.errors[1]
        self.users -= 1

    def gpu(self, handle: _Handle) -> GPU:
        gpu = self.box.gpus[handle.position]
        return _mig_slice(gpu, handle.mig) if handle.mig else gpu

    def by_index(self, index: int) -> _Handle:
        if not 0 <= index < len(self.box.gpus):
            raise self.errors[2]
        return _Handle(index)

    def by_uuid(self, uuid: str | bytes) -> _Handle:
        text = uuid.decode() if isinstance(uuid, bytes) else uuid
        for position, gpu in enumerate(self.box.gpus):
            if text == gpu.uuid:
                return _Handle(position)
            if text in gpu.migs:
                return _Handle(position, text)
        raise self.errors[6]

    def mig_mode(self, handle: _Handle) -> tuple[int, int]:
        on = int(bool(self.box.gpus[handle.position].migs))
        return on, on

    def mig_by_index(self, handle: _Handle, index: int) -> _Handle:
        migs = self.box.gpus[handle.position].migs
        if not 0 <= index < len(migs):
            raise self.errors[6]
        return _Handle(handle.position, migs[index])

    def memory(self, handle: _Handle) -> types.SimpleNamespace:
        gpu = self.gpu(handle)
        if gpu.unified:
            raise self.errors[3]
        used = gpu.total_bytes - gpu.free_bytes
        return types.SimpleNamespace(total=gpu.total_bytes, free=gpu.free_bytes, used=used)


def _constructor(base: type[Any], value: int) -> Callable[[Any], None]:
    def __init__(self: Any) -> None:  # noqa: N807
        base.__init__(self, value)

    return __init__


# The program only picks from facts.json what it is asked for, so that everything about the box is
# said in this file. It runs without torch, and starts in a few hundredths of a second.
_SMI_PROGRAM = """\
import json, pathlib, sys, time

folder = pathlib.Path(__file__).parent
with (folder / "calls").open("a", encoding="utf-8") as log:
    print("nvidia-smi", *sys.argv[1:], file=log)
facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
time.sleep(facts["delay"])
if facts["failure"]:
    print(facts["failure"][0])
    sys.exit(facts["failure"][1])
options = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
query = next((name for name in facts["queries"] if name in options), None)
if query is None:
    print(facts["list"] if "-L" in options else facts["screen"])
    sys.exit(0)
known, rows = facts["queries"][query]
fields = [field.strip() for field in options[query].split(",")]
for field in fields:
    if field not in known:
        print(f'Field "{field}" is not a valid field to query.\\n')
        sys.exit(2)
style = options.get("--format", "").split(",")
if "csv" not in style:
    print('Option --format=csv is required.')
    sys.exit(2)
def text(field, value):
    unit = known[field]
    return value if "nounits" in style or not unit or value == "[N/A]" else f"{value} {unit}"
if "noheader" not in style:
    print(", ".join(f"{f} [{known[f]}]" if known[f] else f for f in fields))
for row in rows:
    print(", ".join(text(field, row[field]) for field in fields))
"""


def _write_smi_program(folder: pathlib.Path) -> None:
    program = folder / "program.py"
    program.write_text(_SMI_PROGRAM, encoding="utf-8")
    script = folder / "nvidia-smi"
    # exec, so that whoever kills the program for being slow kills all of it.
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{program}" "$@"\n', "utf-8")
    script.chmod(0o755)


def _smi_facts(box: FakeBox) -> dict[str, Any]:
    gpu_units = {field: unit for field, unit, _ in _SMI_FIELDS if field not in box.smi_rejects}
    gpu_rows = [
        {field: read(position, gpu, box) for field, _, read in _SMI_FIELDS}
        for position, gpu in enumerate(box.gpus)
    ]
    app_units = {"gpu_uuid": "", "gpu_name": "", "gpu_bus_id": "", "pid": "", "process_name": ""}
    app_rows = [
        {
            "gpu_uuid": gpu.uuid,
            "gpu_name": gpu.name,
            "gpu_bus_id": gpu.bus_id,
            "pid": str(pid),
            "process_name": "python",
        }
        for position, gpu in enumerate(box.gpus)
        for pid in box.pids(position)
    ]
    return {
        "delay": box.smi_delay,
        "failure": _smi_failure(box),
        "queries": {
            "--query-gpu": (gpu_units, gpu_rows),
            "--query-compute-apps": (app_units, app_rows),
        },
        "list": "\n".join(_smi_list(box.gpus)),
        "screen": _smi_screen(box),
    }


def _smi_failure(box: FakeBox) -> tuple[str, int] | None:
    if not box.nvidia_driver:
        return (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make "
            "sure that the latest NVIDIA driver is installed and running.\n",
            9,
        )
    if box.nvml_error == 18:
        return "Failed to initialize NVML: Driver/library version mismatch", 18
    if box.nvml_error:
        return f"Failed to initialize NVML: {_NVML_ERRORS[box.nvml_error][0]}", box.nvml_error
    return None if box.gpus else ("No devices were found", 6)


def _mib(gib: float, gpu: GPU) -> str:
    return "[N/A]" if gpu.unified else str(int(gib * GIB) // _MIB)


_SMI_FIELDS: tuple[tuple[str, str, Callable[[int, GPU, FakeBox], str]], ...] = (
    ("index", "", lambda i, gpu, box: str(i)),
    ("count", "", lambda i, gpu, box: str(len(box.gpus))),
    ("name", "", lambda i, gpu, box: gpu.name),
    ("gpu_name", "", lambda i, gpu, box: gpu.name),
    ("uuid", "", lambda i, gpu, box: gpu.uuid),
    ("gpu_uuid", "", lambda i, gpu, box: gpu.uuid),
    ("pci.bus_id", "", lambda i, gpu, box: gpu.bus_id),
    ("gpu_bus_id", "", lambda i, gpu, box: gpu.bus_id),
    ("memory.total", "MiB", lambda i, gpu, box: _mib(gpu.total, gpu)),
    ("memory.free", "MiB", lambda i, gpu, box: _mib(gpu.free, gpu)),
    ("memory.used", "MiB", lambda i, gpu, box: _mib(gpu.total - gpu.free, gpu)),
    ("compute_cap", "", lambda i, gpu, box: "{}.{}".format(*gpu.capability)),
    ("compute_mode", "", lambda i, gpu, box: _COMPUTE_MODES[gpu.mode][1]),
    ("driver_version", "", lambda i, gpu, box: box.driver),
    ("mig.mode.current", "", lambda i, gpu, box: "Enabled" if gpu.migs else "Disabled"),
    ("utilization.gpu", "%", lambda i, gpu, box: "0"),
)


def _smi_list(gpus: Sequence[GPU]) -> Iterator[str]:
    for position, gpu in enumerate(gpus):
        yield f"GPU {position}: {gpu.name} (UUID: {gpu.uuid})"
        for number, uuid in enumerate(gpu.migs):
            yield f"  MIG 1g.10gb     Device {number:2}: (UUID: {uuid})"


def _smi_screen(box: FakeBox) -> str:
    versions = (
        f"| NVIDIA-SMI {box.driver:<21} Driver Version: {box.driver:<14} "
        f"CUDA Version: {box.driver_cuda:<8} |"
    )
    rule = "+" + "-" * 89 + "+"
    rows = [f"| {i:>3}  {gpu.name:<82} |" for i, gpu in enumerate(box.gpus)]
    return "\n".join(["Thu Jan  1 00:00:00 2026", rule, versions, rule, *rows, rule])

"""A fake CUDA under a torch that was built for CPUs only: real numbers on `cuda:0`, `cuda:1`.

A torch for CPUs has the dispatch keys, the autograd and the autocast rules of CUDA, but no device
guard, no allocator and no kernels: driver.cpp brings those. It has none of the C functions that
`torch.cuda` calls either: they are put in here, so that the Python of `torch.cuda` (lazy
initialisation, index checks, warnings) runs as it is.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fake_accelerator.build import build, unsupported
from fake_accelerator.driver import MAX_DEVICES, DefaultGenerator, Driver

if TYPE_CHECKING:
    import torch

__all__ = ["install"]

NAME = "Fake GPU"
CAPABILITY = (9, 0)
ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
CUDA_VERSION = 12080


class CudaDriver(Driver):
    def set_device_count(self, count: int) -> None:
        """Plug devices in or out, and let torch count again."""
        super().set_device_count(count)
        if torch := sys.modules.get("torch"):
            torch.cuda._cached_device_count = None


def install(devices: int = 2) -> Driver:
    """Give this process a CUDA with that many devices.

    Raises:
        RuntimeError: torch is imported already (it looks for CUDA once, while it is imported),
            the library could not be compiled, or this torch has a CUDA of its own.
    """
    if "torch" in sys.modules:
        msg = "the fake CUDA must be installed before torch is imported"
        raise RuntimeError(msg)
    if reason := unsupported("cuda"):
        raise RuntimeError(reason)
    driver = CudaDriver(build("cuda"), devices=devices)
    _inject_functions(driver)
    _inject_classes(driver)
    _poison_forks()
    return driver


def _inject_functions(driver: Driver) -> None:
    import torch

    core: Any = torch._C
    cuda: Any = torch.cuda

    def check(index: int) -> int:
        if not 0 <= index < driver.device_count():
            msg = (
                "CUDA error: invalid device ordinal\n"
                "GPU device may be out of range, do you have enough GPUs?"
            )
            raise torch.AcceleratorError(msg)
        return index

    def init() -> None:
        if driver.device_count() == 0:
            msg = "No CUDA GPUs are available"
            raise RuntimeError(msg)

    def set_device(index: int) -> None:
        driver.make_context(check(index))  # as cudaSetDevice does since CUDA 12
        driver.set_current_device(index)

    def exchange_device(index: int) -> int:
        before = driver.current_device()
        if index >= 0:
            driver.set_current_device(check(index))
        return before

    def mem_get_info(index: int) -> tuple[int, int]:
        driver.make_context(check(index))
        return driver.mem_info(index)

    def memory_stats(index: int) -> dict[str, Any]:
        current = {"current": driver.used(index), "peak": driver.peak(index)}
        return {"allocated_bytes": {"all": {**current, "allocated": 0, "freed": 0}}}

    functions: dict[str, Any] = {
        "canDeviceAccessPeer": lambda _a, _b: True,
        "emptyCache": lambda: None,
        "exchangeDevice": exchange_device,
        "getArchFlags": lambda: ARCHITECTURES,
        "getCompiledVersion": lambda: CUDA_VERSION,
        "getCurrentRawStream": driver.stream,
        "getCurrentStream": lambda index: (driver.stream(index), index, 1),
        "getDefaultStream": lambda index: (0, index, 1),
        "getDevice": driver.current_device,
        "getDeviceCount": driver.device_count,
        "init": init,
        "ipc_collect": lambda: None,
        "isInBadFork": lambda: False,
        "maybeExchangeDevice": exchange_device,
        "memoryStats": memory_stats,
        "resetAccumulatedMemoryStats": lambda _index: None,
        "resetPeakMemoryStats": driver.reset_peak,
        "setDevice": set_device,
        "synchronize": lambda: driver.synchronize(driver.current_device()),
    }
    for name, function in functions.items():
        setattr(core, f"_cuda_{name}", function)
    runtime = types.ModuleType("torch._C._cudart")
    vars(runtime).update(
        cudaError=type("cudaError", (int,), {"success": 0}),
        cudaGetErrorString=str,
        cudaMemGetInfo=mem_get_info,
    )

    # torch.cuda copied these names, or stand-ins for them, when it was imported.
    cuda._cudart = core._cudart = runtime
    # Two objects: dynamo registers one handler for each of the two.
    cuda._exchange_device = functools.partial(exchange_device)
    cuda._maybe_exchange_device = exchange_device
    cuda._is_in_bad_fork = functions["isInBadFork"]
    cuda._device_count_nvml = lambda: -1  # "ask CUDA instead": there may be a real driver here
    torch.backends.cuda.is_built = lambda: True
    # Without cuDNN: its stand-in in a CPU build warns whenever an LSTM asks for it.
    torch.backends.cudnn.is_acceptable = lambda _tensor: False


def _inject_classes(driver: Driver) -> None:
    import torch

    core: Any = torch._C
    cuda: Any = torch.cuda

    class Properties:
        gcnArchName = ""  # noqa: N815  torch's name
        multi_processor_count = 132

        def __init__(self, index: int) -> None:
            self.name = NAME
            self.major, self.minor = CAPABILITY
            self.total_memory = driver.mem_info(index)[1]
            self.uuid = f"00000000-0000-0000-0000-{index:012d}"

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> Stream:
            if ids:  # an existing stream, by its ids
                return super().__new__(cls, **ids)
            index = cuda._utils._get_device_index(device, optional=True)
            return super().__new__(cls, torch.device("cuda", index), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, **_options: bool) -> Event:
            return super().__new__(cls, "cuda", enable_timing=enable_timing)

    def set_stream(stream: torch.Stream | None) -> None:
        if stream is not None:
            torch._C._accelerator_setStream(stream)

    cuda._CudaDeviceProperties = core._CudaDeviceProperties = Properties
    cuda._get_device_properties = Properties
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.set_stream = set_stream
    cuda.default_generators = tuple(DefaultGenerator(driver, i) for i in range(MAX_DEVICES))

    # The constructor of storages has no branch for CUDA in a CPU build; torch.load needs it.
    plain_new = torch.UntypedStorage.__new__

    def new_storage(cls: type, *args: Any, **options: Any) -> torch.UntypedStorage:
        device = options.get("device")
        if device is None or torch.device(device).type != "cuda":
            return plain_new(cls, *args, **options)
        size = args[0] if args else 0
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = new_storage  # type: ignore[method-assign,assignment]


def _poison_forks() -> None:
    """Let the first use of CUDA in a forked child fail if the parent had initialised it."""
    import torch

    core: Any = torch._C
    cuda: Any = torch.cuda
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so"))
    # torch::utils::set_requires_device_init(c10::DeviceType, bool)
    require_init = library._ZN5torch5utils24set_requires_device_initEN3c1010DeviceTypeEb
    cuda_type = 1

    def in_child() -> None:
        if cuda._initialized:
            cuda._is_in_bad_fork = core._cuda_isInBadFork = lambda: True
            require_init(ctypes.c_int8(cuda_type), ctypes.c_bool(True))

    os.register_at_fork(after_in_child=in_child)

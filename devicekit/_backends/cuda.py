"""CUDA devices: NVIDIA's, and AMD's under ROCm, which torch calls CUDA as well.

Asking torch whether CUDA works starts the driver, after which a forked child cannot use it
(pytorch#83973). So as long as CUDA is not started, NVIDIA's management library is asked first, and
torch's runtime only for what that cannot tell.
"""

from __future__ import annotations

import platform
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from devicekit._backends import generic, visibility
from devicekit._backends.accelerator import Accelerator
from devicekit._backends.architecture import (
    cuda_architecture_supported,
    rocm_architecture_supported,
    tensor_cores,
)
from devicekit._backends.driver import Driver, Gpu, read_driver
from devicekit._backends.info import DeviceInfo
from devicekit._backends.isolation import in_bad_fork
from devicekit._types import Reason

__all__ = ["count", "describe_gpu", "free_memory", "is_built", "order", "read", "starts"]


def is_built() -> bool:
    """Return whether this build of torch has CUDA or ROCm; does not start it."""
    current = torch.accelerator.current_accelerator()
    return bool(
        torch.version.cuda
        or torch.version.hip
        or torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
        or (current is not None and current.type == "cuda")
    )


def read(environ: Mapping[str, str]) -> Accelerator:
    """Return the CUDA devices that this process sees, and why there are none if it sees none."""
    rocm = torch.version.hip is not None
    label = "ROCm" if rocm else "CUDA"
    runtime = f"{label} {torch.version.hip or torch.version.cuda or ''}".strip()
    variables = visibility.variables_set(label.lower(), environ)
    if not is_built():
        return Accelerator(
            type="cuda", label=label, reason="build without it", visibility=variables
        )
    if in_bad_fork():
        return Accelerator(
            type="cuda",
            label=label,
            reason="forked after start",
            visibility=variables,
            runtime=runtime,
        )
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    driver = None if rocm else read_driver()
    seen, said = count()
    hides = seen == 0 and _hides_all(variables, label.lower(), environ, driver)
    if not started and not hides and not (seen and _trusted(driver)):
        available, why = _starts()
        if not available:
            seen, said = 0, said if why in said else f"{said} {why}".strip()
    hidden = max(len(driver.gpus) - seen, 0) if driver else None
    if seen == 0:
        return Accelerator(
            type="cuda",
            label=label,
            reason=_why_none(said, hides=hides, masks=driver is None and bool(variables)),
            detail=said,
            hidden=hidden,
            visibility=variables,
            runtime=runtime,
        )
    in_use = generic.in_use(torch.cuda, seen, started=True) if started else None
    devices, architectures = _devices(seen, driver, environ, started=started)
    return Accelerator(
        type="cuda",
        label=label,
        devices=devices,
        hidden=hidden,
        visibility=variables,
        in_use=in_use,
        architectures=tuple(architectures),
        runtime=runtime,
    )


# ---- how many, and does it start -----------------------------------------------------------------


def count() -> tuple[int, str]:
    """Return torch's count, which NVML answers without starting CUDA, and what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = torch.cuda.device_count()
        except (RuntimeError, ValueError) as error:  # torch cannot read a visibility variable
            return 0, _cause(str(error))
    return found, _spoken(caught)


def _starts() -> tuple[bool, str]:
    """Ask CUDA itself whether it works, and why not; this starts the driver."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    return available, "" if available else _spoken(caught) or _refusal()


def starts() -> tuple[bool, str]:
    """Start CUDA and return whether it does, and why not; it makes no context on any device.

    `PYTORCH_NVML_BASED_CUDA_CHECK` keeps `is_available()` from starting it, so that is not enough.
    """
    available, why = _starts()
    if not available:
        return False, why
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return False, _cause(str(error))
    return True, ""


def _refusal() -> str:
    """Return why CUDA does not start, in torch's words: it warns of it once per process only."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return _cause(str(error))
    return "CUDA started, and is_available() is False"


def _spoken(caught: Sequence[warnings.WarningMessage]) -> str:
    return " ".join(_cause(str(w.message)) for w in caught)


def _cause(text: str) -> str:
    """Return what is wrong, without torch's advice, which `devicekit` words itself."""
    for advice in ("\n", " (Triggered internally", " Please "):
        text = text.partition(advice)[0]
    return text


def _trusted(driver: Driver | None) -> bool:
    """Whether the management library has shown that the driver is new enough for this build.

    Within a major version of CUDA every driver runs every build ("CUDA minor version
    compatibility").
    """
    built = re.match(r"[0-9]+", torch.version.cuda or "")
    return (
        driver is not None
        and driver.cuda is not None
        and built is not None
        and driver.cuda[0] >= int(built[0])
    )


def _why_none(said: str, *, hides: bool, masks: bool) -> Reason:
    """Return why CUDA counts no device, of what it said and of what the variables do or may do."""
    # torch tells the cause in words only; these are c10/cuda/CUDAFunctions.cpp's.
    if "too old" in said:
        return "driver too old"
    if "no NVIDIA driver" in said:
        return "no driver"
    if said and not hides and not re.search(r"No (CUDA|HIP) GPUs are available", said):
        return "driver failed"
    return "hidden by a visibility variable" if hides or masks else "none visible"


def _hides_all(
    variables: Sequence[tuple[str, str]],
    platform: str,
    environ: Mapping[str, str],
    driver: Driver | None,
) -> bool:
    """Whether the variables leave nothing, of the known GPUs or of any that there may be."""
    if driver is None and any(
        value.lstrip().startswith(("GPU-", "MIG-")) for _, value in variables
    ):
        return False  # nobody here knows the UUIDs
    uuids = [gpu.uuid for gpu in driver.gpus] if driver else ["GPU-unknown"] * 128
    return bool(uuids) and not visibility.visible(platform, environ, uuids)


def free_memory(device: torch.device) -> int:
    """Return the bytes that could be allocated: what is free, and what torch's cache has unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


# ---- one by one ----------------------------------------------------------------------------------


def _devices(
    seen: int, driver: Driver | None, environ: Mapping[str, str], *, started: bool
) -> tuple[tuple[DeviceInfo, ...], list[str]]:
    """Return the visible devices, and the architectures this build has kernels for."""
    gpus = order(driver.gpus, environ) if driver and not started else None
    if gpus is not None and len(gpus) == seen and all(gpu.capability for gpu in gpus):
        architectures = _architectures([gpu.capability for gpu in gpus])
        return tuple(
            describe_gpu(i, gpu, architectures) for i, gpu in enumerate(gpus)
        ), architectures
    architectures = _architectures([None])
    by_uuid = {_bare(gpu.uuid): gpu for gpu in driver.gpus if not gpu.mig} if driver else {}
    return tuple(_from_runtime(i, by_uuid, architectures) for i in range(seen)), architectures


def order(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu] | None:
    """Return the GPUs as CUDA numbers them in this process, or None where only CUDA can tell.

    CUDA puts the fastest first unless `CUDA_DEVICE_ORDER=PCI_BUS_ID`, the management library goes
    by the bus. Equal GPUs are in bus order both ways, and a list of UUIDs needs no order.
    Of a GPU that is cut into slices CUDA shows one slice.
    """
    if any(gpu.mig for gpu in gpus):
        return None
    value = environ.get("CUDA_VISIBLE_DEVICES")
    by_bus = sorted(gpus, key=lambda gpu: gpu.bus_id)
    alike = len({(gpu.name, gpu.capability, gpu.total_memory) for gpu in gpus}) <= 1
    named = value is not None and value.lstrip().startswith("GPU-")
    if not (alike or named or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"):
        return None
    return [by_bus[i] for i in visibility.visible("cuda", environ, [gpu.uuid for gpu in by_bus])]


def describe_gpu(index: int, gpu: Gpu, architectures: Sequence[str]) -> DeviceInfo:
    """Return what the management library knows about a GPU, under the index that torch gives it."""
    capability = gpu.capability or (0, 0)
    supported = cuda_architecture_supported(capability, architectures)
    reason: Reason | None = (
        "busy" if gpu.busy else None if supported else "architecture not in this build"
    )
    return DeviceInfo(
        device=torch.device("cuda", index),
        name=gpu.name,
        total_memory=gpu.total_memory,
        free_memory=gpu.free_memory,
        capability=gpu.capability,
        bfloat16=capability >= (8, 0),
        tensor_cores=tensor_cores(gpu.name, capability),
        usable=reason is None,
        reason=reason,
    )


def _from_runtime(
    index: int, by_uuid: Mapping[str, Gpu], architectures: Sequence[str]
) -> DeviceInfo:
    """Return what CUDA itself knows about a device, and its free memory, matched by UUID."""
    device = torch.device("cuda", index)
    try:
        with warnings.catch_warnings():  # torch warns of a missing architecture; `reason` says it
            warnings.simplefilter("ignore")
            properties = torch.cuda.get_device_properties(index)
    except (RuntimeError, AssertionError):  # CUDA counts the device and does not start
        return DeviceInfo(device=device, name="unknown", usable=False, reason="driver failed")
    capability = (properties.major, properties.minor)
    gpu = by_uuid.get(_bare(str(getattr(properties, "uuid", ""))))
    if torch.version.hip:
        supported = rocm_architecture_supported(properties.gcnArchName, architectures)
    else:
        supported = cuda_architecture_supported(capability, architectures)
    busy = gpu is not None and gpu.busy and not torch.cuda.memory_reserved(index)
    reason: Reason | None = (
        "busy" if busy else None if supported else "architecture not in this build"
    )
    return DeviceInfo(
        device=device,
        name=properties.name,
        total_memory=properties.total_memory,
        free_memory=gpu.free_memory if gpu else None,
        capability=capability,
        bfloat16=bool(torch.version.hip) or capability >= (8, 0),
        tensor_cores=tensor_cores(properties.name, capability),
        usable=reason is None,
        reason=reason,
    )


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


def _architectures(capabilities: Sequence[tuple[int, int] | None]) -> list[str]:
    """Return the architectures this build has kernels for; an empty list where it does not say.

    `torch.cuda.get_arch_list()` marks the process as one whose forks may not use CUDA, and
    `torch.__config__.show()` calls `cuInit` (both seen in torch 2.14). What torch's own table of
    its releases says is enough where the build is one of them and the table covers every GPU here.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        released = _released_architectures()
        if released and all(c and cuda_architecture_supported(c, released) for c in capabilities):
            return released
    return list(torch.cuda.get_arch_list())


def _released_architectures() -> list[str]:
    """Return what torch's own table says this release was built for; nothing for other builds."""
    if not re.fullmatch(r"[0-9.]+\+cu[0-9]+", torch.__version__):
        return []
    table: Mapping[str, Any] = getattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", {})
    built_for = table.get(torch.version.cuda or "", {}).get(platform.machine().lower(), ())
    return [f"sm_{number}" for number in sorted(built_for)]

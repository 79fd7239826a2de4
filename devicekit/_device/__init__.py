"""From a device-like value to a checked device; the automatic choice.

What chooses and what refuses is imported when there is something to choose or to refuse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from devicekit._backends import DeviceInfo, current_machine
from devicekit._device.checking import check, known
from devicekit._types import DeviceLike

__all__ = ["auto", "device", "devices"]


def device(spec: DeviceLike, /) -> torch.device:
    """Return a checked, canonical `torch.device`: the one that a tensor made there reports.

    A drop-in for `torch.device(...)` that refuses at once what does not exist. A device without an
    index gets the current one of its type; `"cpu:0"` becomes `cpu`.
    Before its runtime is started, a CUDA device is checked through NVIDIA's management library;
    where that does not answer (neither `pynvml` nor `nvidia-smi`, or ROCm), and for other types,
    torch's runtime is asked, after which a forked child cannot use the device.

    Args:
        spec: `"cuda"`, `"cuda:1"`, `"cpu"`, `"mps"`, `"xpu:0"`, `"meta"`, the name of a plugin,
            `"auto"`, the index of a device of the current accelerator, or a `torch.device`.

    Returns:
        The device, with an index where its type has several.

    Raises:
        InvalidDeviceError: `spec` is not a device at all; the message says what was probably meant.
        DeviceUnavailableError: It is a device, but not one that can be used here; `reason` says
            why.

    Examples:
        >>> import devicekit
        >>> devicekit.device("cpu:0")
        device(type='cpu')
        >>> devicekit.device("cuda:256")  # torch.device("cuda:256") is cuda:0
        Traceback (most recent call last):
            ...
        devicekit.errors.DeviceUnavailableError: 'cuda:256' is not available: ...
    """
    found = known(spec)
    if found is not None:
        return found
    if isinstance(spec, str):
        spec = str.__str__(spec)  # NumPy's texts and enums are texts, with a `str()` of their own
        if spec == "auto":
            return auto()
    return check(spec)


def devices() -> tuple[DeviceInfo, ...]:
    """Return every device that this process sees, usable or not, the CPU last.

    Reads hardware as `device()` does: without starting CUDA wherever NVIDIA's management library
    answers.

    Examples:
        >>> import devicekit
        >>> [info.usable for info in devicekit.devices()][-1]  # the CPU
        True
    """
    machine = current_machine()
    found: list[DeviceInfo] = []
    for device_type in machine.accelerator_types():
        found += machine.accelerator(device_type).devices
    return (*found, machine.cpu())


def auto(
    *, prefer: str | Sequence[str] | None = None, min_free: int | str | None = None
) -> torch.device:
    """Return the best usable device for this process; the CPU if there is none.

    The first that applies decides:

    1. The environment variable `DEVICEKIT_DEVICE`, unless it is empty.
    2. The accelerator types that torch reports, or those in `prefer`, that have a usable device:
       visible, with a driver that works, of an architecture that this build of torch has kernels
       for.
    3. Of one type, the device of the launcher's rank (`LOCAL_RANK`, `SLURM_LOCALID` or
       `OMPI_COMM_WORLD_LOCAL_RANK`); without a launcher the device this process already uses, else
       the one with the most free memory, else the current one.
    4. The CPU.

    The answer is the same for the whole process as long as the arguments and these variables are.
    It is logged once at INFO on the logger `devicekit`, with the reason.

    Free memory is read without making a context on any GPU, through `pynvml` (install
    `devicekit[nvml]`) or `nvidia-smi`. Where neither answers, and for ROCm and other types,
    torch's runtime is asked what is there, after which a forked child cannot use the device.

    Args:
        prefer: The device types to try, in this order, instead of torch's: `("xpu", "cuda")`.
        min_free: Memory that must be free, in bytes or as a text such as `"8GiB"`; a device with
            less is passed over. A device whose free memory is not known is not.

    Raises:
        InvalidDeviceError: `prefer` or a variable holds something that is not a device (or a rank).
        DeviceUnavailableError: `DEVICEKIT_DEVICE` names a device that is not here, or the
            launcher's rank has none of its own.
        ValueError: `min_free` is not an amount of memory.

    Examples:
        >>> import devicekit, devicekit.testing
        >>> with devicekit.testing.fake_devices(cuda=2, free_memory=["1GiB", "70GiB"]):
        ...     devicekit.auto()
        device(type='cuda', index=1)
    """
    from devicekit._device.choice import decide

    return decide(prefer=prefer, min_free=min_free).device

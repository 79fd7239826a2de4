"""From a device-like value to a checked device; the automatic choice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from devicekit._backends import (
    VARIABLES,
    Accelerator,
    DeviceInfo,
    Machine,
    current_machine,
    parse_size,
    pretended,
)
from devicekit._device.choice import LAUNCHER_VARIABLES, Choice, choose
from devicekit._device.refusal import unavailable
from devicekit._device.spelling import parse, parse_type, shown
from devicekit._types import CPU, DeviceLike
from devicekit.errors import DeviceError, DeviceUnavailableError

__all__ = ["auto", "decide", "device", "devices"]

_logger = logging.getLogger("devicekit")

_CPU, _META = CPU, torch.device("meta")

# Spellings whose meaning never changes. Looked up before anything else: `device()` stands in loops.
_HOST: dict[object, torch.device] = {
    "cpu": _CPU,
    "cpu:0": _CPU,
    _CPU: _CPU,
    torch.device("cpu:0"): _CPU,
    "meta": _META,
    "meta:0": _META,
    _META: _META,
    torch.device("meta:0"): _META,
}

# Spellings with an index that were found to exist on this machine once its runtime was started,
# which settles the numbering for the process, and what tells that it still is.
_FOUND: dict[object, tuple[torch.device, Callable[[], bool]]] = {}


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
    try:
        known = _HOST.get(spec) or _found(spec)
    except Exception:  # it refuses to be hashed or compared, in some way of its own
        known = None
    if known is not None:
        return known
    if isinstance(spec, str):
        spec = str.__str__(spec)  # NumPy's texts and enums are texts, with a `str()` of their own
        if spec == "auto":
            return auto()
    return _check(spec, current_machine())


def _found(spec: object) -> torch.device | None:
    """Return the device that was found under this spelling, if that still counts."""
    found = _FOUND.get(spec)
    return found[0] if found is not None and found[1]() and pretended() is None else None


def _forget_unsettled() -> None:
    """Drop what was found of a runtime that is not started, whose numbering may be another now."""
    for spelling, (_, settled) in list(_FOUND.items()):
        if not settled():
            _FOUND.pop(spelling, None)


def _check(spec: DeviceLike, machine: Machine) -> torch.device:
    device_type, index = parse(spec)
    requested = str(spec) if isinstance(spec, (str, torch.device)) else shown(index)
    if device_type is None:
        types = machine.accelerator_types()
        if not types:
            msg = (
                f"{requested} is not available: an index means a device of the current "
                f"accelerator, and this build of torch ({torch.__version__}) has none. "
                f"Here: cpu. Write 'cpu', or call devicekit.auto()."
            )
            raise DeviceUnavailableError(
                msg, requested=requested, available=(_CPU,), reason="build without it"
            )
        device_type = types[0]
        requested = f"{device_type}:{requested}"
    if device_type in ("cpu", "meta"):
        return _check_host(device_type, index, requested)
    if index is None:
        index = machine.current_index(device_type)
        found = _found(f"{device_type}:{index}")
        if found is not None:
            return found
    _forget_unsettled()
    accelerator = machine.accelerator(device_type)
    if not _exists(accelerator, index):
        raise unavailable(requested, index, accelerator, machine)
    checked = torch.device(device_type, index)
    settled = machine.settled(checked)
    if settled is not None:
        _FOUND[str(checked)] = _FOUND[checked] = checked, settled
    return checked


def _check_host(device_type: str, index: int | None, requested: str) -> torch.device:
    if index:
        msg = (
            f"{shown(requested)} is not available: there is one {device_type} device, and it has "
            f"no number. Write {device_type!r}."
        )
        raise DeviceUnavailableError(
            msg,
            requested=requested,
            available=(torch.device(device_type),),
            reason="index out of range",
        )
    return torch.device(device_type)


def _exists(accelerator: Accelerator, index: int) -> bool:
    """Whether the device is there and works; a busy one may be free by the time it is used."""
    if index >= len(accelerator.devices):
        return False
    info = accelerator.devices[index]
    return info.usable or info.reason == "busy"


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

    1. The environment variable `DEVICEKIT_DEVICE`.
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
    return decide(prefer=prefer, min_free=min_free).device


def decide(
    *, prefer: str | Sequence[str] | None = None, min_free: int | str | None = None
) -> Choice:
    """Return what `auto()` decides, with the reason; decided and logged once."""
    machine = current_machine()
    chosen_types = None if prefer is None else _types_in(prefer)
    bytes_wanted = parse_size(min_free)
    key = (chosen_types, bytes_wanted, _circumstances(machine))
    kept = machine.decisions.get(key)
    if kept is None:
        _forget_unsettled()
        choice = _decide(machine, chosen_types, bytes_wanted)
        kept = machine.decisions.setdefault(key, choice)  # two threads may both have decided
        if kept is choice:
            _logger.info("auto() chose %s", choice)
    return kept


def _decide(machine: Machine, types: tuple[str, ...] | None, min_free: int) -> Choice:
    requested = machine.environ.get("DEVICEKIT_DEVICE")
    if requested is None or requested == "auto":
        return choose(machine, types, min_free)
    try:
        return Choice(device(requested), f"DEVICEKIT_DEVICE={requested}")
    except DeviceError as error:
        error.args = (
            f"The environment variable DEVICEKIT_DEVICE is set to {shown(requested)}. {error} "
            "Unset it to let auto() choose.",
        )
        raise


def _types_in(prefer: str | Sequence[str]) -> tuple[str, ...]:
    # What is no sequence is taken for one name, which parse_type() refuses.
    one = isinstance(prefer, str) or not hasattr(prefer, "__iter__")
    return tuple(map(parse_type, [prefer] if one else prefer))


def _circumstances(machine: Machine) -> tuple[object, ...]:
    """Return what may change an answer: the variables, and how many devices torch counts."""
    names = ("DEVICEKIT_DEVICE", *LAUNCHER_VARIABLES, "CUDA_DEVICE_ORDER", *_VISIBILITY_VARIABLES)
    counts = tuple((t, machine.count(t)) for t in machine.accelerator_types())
    return (*map(machine.environ.get, names), counts)


_VISIBILITY_VARIABLES = tuple(sorted({name for names in VARIABLES.values() for name in names}))

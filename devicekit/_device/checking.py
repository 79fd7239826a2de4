"""From a device-like value to a checked device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from devicekit._backends import current_machine, pretended
from devicekit._device.spelling import parse, shown
from devicekit._types import CPU, DeviceLike
from devicekit.errors import DeviceUnavailableError

if TYPE_CHECKING:
    from devicekit._backends.accelerator import Accelerator

__all__ = ["check", "forget_unsettled", "known"]

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


def known(spec: object) -> torch.device | None:
    """Return what needs no check: the host, and what was found under this spelling before."""
    try:
        return _HOST.get(spec) or _found(spec)
    except Exception:  # it refuses to be hashed or compared, in some way of its own
        return None


def _found(spec: object) -> torch.device | None:
    """Return the device that was found under this spelling, if that still counts."""
    found = _FOUND.get(spec)
    return found[0] if found is not None and found[1]() and pretended() is None else None


def forget_unsettled() -> None:
    """Drop what was found of a runtime that is not started, whose numbering may be another now."""
    for spelling, (_, settled) in list(_FOUND.items()):
        if not settled():
            _FOUND.pop(spelling, None)


def check(spec: DeviceLike) -> torch.device:
    """Return the device that `spec` names, if it can be used here.

    Raises:
        InvalidDeviceError: It is not a device at all.
        DeviceUnavailableError: It is a device, but not one that can be used here.
    """
    machine = current_machine()
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
    forget_unsettled()
    accelerator = machine.accelerator(device_type)
    if not _exists(accelerator, index):
        from devicekit._device.refusal import unavailable  # imported when there is one

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

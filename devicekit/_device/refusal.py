"""The words for a device that is not here: the true cause, what there is, one thing to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from devicekit._backends import PLUGINS, DeviceInfo, needs_plugin
from devicekit._backends.names import label
from devicekit._device.spelling import UNUSED_TYPES, shown
from devicekit._types import Reason
from devicekit.errors import DeviceUnavailableError

if TYPE_CHECKING:
    from devicekit._backends.accelerator import Accelerator
    from devicekit._backends.machine import Machine

__all__ = ["unavailable", "why_unknown"]


def unavailable(
    requested: str, index: int, accelerator: Accelerator, machine: Machine
) -> DeviceUnavailableError:
    """Return the error for a device that cannot be used here."""
    reason, cause = _cause(index, accelerator)
    here = _usable_devices(machine, accelerator)
    names = ", ".join(f"{info.device} ({info.name})" for info in here)
    remedy = _remedy(reason, accelerator)
    message = f"{shown(requested)} is not available: {cause}. Here: {names}. {remedy}"
    return DeviceUnavailableError(
        message, requested=requested, available=tuple(info.device for info in here), reason=reason
    )


def why_unknown(device_type: str, version: str) -> str:
    """Return why torch does not know a device type here, in words; asks nothing of the machine.

    Args:
        device_type: What `parse` has accepted.
        version: The build of torch.
    """
    if needs_plugin(device_type):
        return f"the plugin {PLUGINS.get(device_type, f'for {device_type}')} is not imported"
    if device_type in UNUSED_TYPES:
        return "torch has no more than the name of this type, and no device of it in any release"
    apple = ", which is for the GPUs of Apple" if device_type == "mps" else ""
    return f"this build of torch ({version}) has no {label(device_type)}{apple}"


def _usable_devices(machine: Machine, known: Accelerator) -> list[DeviceInfo]:
    """Return every device that can be used, the CPU last."""
    found: list[DeviceInfo] = []
    for device_type in machine.accelerator_types():
        accelerator = known if device_type == known.type else machine.accelerator(device_type)
        found += [info for info in accelerator.devices if info.usable]
    return [*found, machine.cpu()]


def _cause(index: int, accelerator: Accelerator) -> tuple[Reason, str]:
    """Return why the device with this index cannot be used, as a reason and in words."""
    title, detail = accelerator.label, accelerator.detail
    in_force = " and ".join(f"{name}={shown(value)}" for name, value in accelerator.visibility)
    seen = len(accelerator.devices)
    if index < seen:
        info = accelerator.devices[index]
        return info.reason or "driver failed", _cause_of_one(info, accelerator)
    if seen:
        count = f"this process sees {seen} {title} device{'s' if seen > 1 else ''}, numbered from 0"
        if in_force and index < seen + (accelerator.hidden or 0):
            return "hidden by a visibility variable", f"{count}, because of {in_force}"
        return "index out of range", f"{count}{f' ({in_force})' if in_force else ''}"
    reason = accelerator.reason or "none visible"
    unknown = why_unknown(accelerator.type, torch.__version__)
    leave = "leaves" if len(accelerator.visibility) == 1 else "leave"
    maker = "AMD" if title == "ROCm" else "NVIDIA"
    words: dict[Reason, str] = {
        "build without it": unknown,
        "plugin not installed": unknown,
        "no driver": f"this machine has no {maker} driver, or this process cannot reach it",
        "driver too old": f"the driver is too old for this build of torch ({accelerator.runtime})",
        "driver failed": f"{title} did not start",
        "forked after start": f"this process was forked from one that had started {title}, "
        "and cannot use it",
        "none visible": f"the driver sees no {title} device",
        "hidden by a visibility variable": f"{in_force} {leave} no {title} device visible",
    }
    return reason, words[reason] + (f" ({detail.rstrip('.')})" if detail else "")


def _cause_of_one(info: DeviceInfo, accelerator: Accelerator) -> str:
    if info.reason == "architecture not in this build":
        has = "another architecture"
        if info.capability and accelerator.label == "CUDA":
            has = f"compute capability {info.capability[0]}.{info.capability[1]}"
        built = " ".join(accelerator.architectures)
        return f"{info.name} has {has}, and this build of torch has kernels for {built} only"
    return f"{accelerator.label} counts this device and does not start"


def _remedy(reason: Reason, accelerator: Accelerator) -> str:
    variable = " and ".join(name for name, _ in accelerator.visibility)
    may_be_hidden = variable and accelerator.hidden is None
    remedies: dict[Reason, str] = {
        "build without it": _remedy_of_no_build(accelerator),
        "plugin not installed": "Install and import "
        f"{PLUGINS.get(accelerator.type, 'its package')} first.",
        "no driver": "Install the driver (in a container: start it with its GPUs), "
        "or call devicekit.auto().",
        "driver too old": "Update the driver, or install a build of torch for an older CUDA.",
        "driver failed": "Run 'python -m devicekit' for the diagnosis.",
        "forked after start": "In a DataLoader worker, return CPU tensors and call move() in the "
        "loop; start other processes by 'spawn'.",
        "none visible": "Run 'python -m devicekit' for the diagnosis, or call devicekit.auto().",
        "index out of range": (
            f"Use an index below {len(accelerator.devices)}"
            if any(info.usable for info in accelerator.devices)
            else "Call devicekit.auto()"
        )
        + (f", or change {variable} before the program starts." if may_be_hidden else "."),
        "hidden by a visibility variable": f"Change {variable} before the program "
        f"starts, or unset {'it' if len(accelerator.visibility) == 1 else 'them'}.",
        "architecture not in this build": "Install a build of torch for this GPU, "
        "or call devicekit.auto().",
    }
    return remedies.get(reason, "Call devicekit.auto().")


def _remedy_of_no_build(accelerator: Accelerator) -> str:
    if accelerator.type in UNUSED_TYPES:
        return "Call devicekit.auto() for the best device here."
    if accelerator.type == "mps":
        return "On a Mac, install a build of torch for macOS; elsewhere call devicekit.auto()."
    return f"Install a build of torch with {accelerator.label}, or call devicekit.auto()."

"""Accelerators other than CUDA's: XPU, MPS, MTIA, HPU, and plugins nobody has heard of yet.

All go by the device module that torch or the plugin registers as `torch.<type>`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from devicekit._backends import visibility
from devicekit._backends.facts import Accelerator, DeviceInfo

__all__ = ["PLUGINS", "count", "is_built", "known_types", "label", "read"]

PLUGINS: Mapping[str, str] = {
    "hpu": "habana_frameworks.torch",
    "mlu": "torch_mlu",
    "musa": "torch_musa",
    "npu": "torch_npu",
    "xla": "torch_xla",
}
"""Device types that come with a package of their own, and the package to import."""

_LABELS = {"xpu": "XPU", "mps": "MPS", "mtia": "MTIA", "hpu": "HPU", "npu": "NPU", "xla": "XLA"}


def known_types() -> tuple[str, ...]:
    """Return the accelerator types that torch may know besides CUDA; the plugin's last."""
    plugin = torch._C._get_privateuse1_backend_name()
    return ("xpu", "mps", "mtia", "hpu", plugin)


def label(device_type: str) -> str:
    """Return what people call a device type."""
    return _LABELS.get(device_type, device_type)


def is_built(device_type: str) -> bool:
    """Return whether this build of torch, with the plugins imported so far, can use a type.

    Does not initialise the device.
    """
    current = torch.accelerator.current_accelerator()
    if current is not None and current.type == device_type:
        return True
    if device_type == "mps":
        return torch.backends.mps.is_built()
    if device_type == "xpu":
        return getattr(torch.version, "xpu", None) is not None
    if (
        device_type == "mtia"
    ):  # torch has the module in every build, and no question about the build
        return False
    return hasattr(torch, device_type)


def read(device_type: str, environ: Mapping[str, str]) -> Accelerator:
    """Return the accelerators of a type as its device module describes them.

    The module is asked whether a device is available and what it is called, which starts the
    runtime of most backends.
    """
    name = label(device_type)
    if not is_built(device_type):
        package_missing = device_type in PLUGINS
        return Accelerator(
            type=device_type,
            label=name,
            reason="plugin not installed" if package_missing else "build without it",
        )
    variables = visibility.variables_set(device_type, environ)
    seen, detail = count(device_type)
    if seen == 0:
        hides = bool(variables) and not detail
        return Accelerator(
            type=device_type,
            label=name,
            reason="driver failed"
            if detail
            else "hidden by a visibility variable"
            if hides
            else "none visible",
            detail=detail,
            visibility=variables,
        )
    module = getattr(torch, device_type)
    return Accelerator(
        type=device_type,
        label=name,
        devices=tuple(_device(device_type, module, index) for index in range(seen)),
        visibility=variables,
        in_use=_in_use(module, seen),
    )


def count(device_type: str) -> tuple[int, str]:
    """Return how many devices of a type can be used, and what the backend said about it."""
    module: ModuleType | None = getattr(torch, device_type, None)
    if module is None:  # a plugin that registered its name and nothing else
        return 0, f"torch.{device_type} does not exist: the plugin registered no device module"
    available = (
        torch.backends.mps.is_available
        if device_type == "mps"
        else getattr(module, "is_available", None)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            usable = available is None or available()
            found = int(module.device_count()) if usable else 0
        except (
            Exception
        ) as error:  # a plugin may raise anything: a broken one must not take the rest down
            return 0, f"{type(error).__name__}: {error}"
    return found, "" if found else " ".join(str(w.message) for w in caught)


def _device(device_type: str, module: ModuleType, index: int) -> DeviceInfo:
    device = torch.device(device_type, index)
    properties = _ask(module, "get_device_properties", index)
    return DeviceInfo(
        device=device,
        name=str(_ask(module, "get_device_name", index) or f"{label(device_type)} device"),
        total_memory=getattr(properties, "total_memory", None),
        bfloat16=True if device_type in ("xpu", "hpu", "npu") else None,
    )


def _ask(module: ModuleType, function: str, index: int) -> Any:
    """Call a function of a device module; None where it is missing or the backend cannot answer."""
    call: Callable[[int], Any] | None = getattr(module, function, None)
    if call is None:
        return None
    try:
        return call(index)
    except (RuntimeError, AssertionError, AttributeError, ValueError):
        return None


def _in_use(module: ModuleType, seen: int) -> int | None:
    """Return the device that the process has made the current one, unless it is the first."""
    current = getattr(module, "current_device", None)
    if current is None or seen == 1:
        return None
    return int(current()) or None

"""Accelerators other than CUDA's: XPU, MPS, MTIA, HPU, and plugins nobody has heard of yet.

All go by the device module that torch or the plugin registers as `torch.<type>`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from devicekit._backends import names, visibility
from devicekit._backends.accelerator import Accelerator
from devicekit._backends.info import DeviceInfo
from devicekit._types import Reason

__all__ = ["count", "free_memory", "in_use", "is_built", "read"]


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
    if device_type == "mtia":  # every build of torch has the module, and does not say more
        return False
    return hasattr(torch, device_type)


def read(device_type: str, environ: Mapping[str, str]) -> Accelerator:
    """Return the accelerators of a type as its device module describes them.

    The module is asked whether a device is available and what it is called, which starts the
    runtime of most backends.
    """
    title = names.label(device_type)
    if not is_built(device_type):
        return Accelerator(
            type=device_type,
            label=title,
            reason="plugin not installed"
            if names.needs_plugin(device_type)
            else "build without it",
        )
    variables = visibility.variables_set(device_type, environ)
    seen, detail = count(device_type)
    if seen == 0:
        quiet: Reason = "hidden by a visibility variable" if variables else "none visible"
        return Accelerator(
            type=device_type,
            label=title,
            reason="driver failed" if detail else quiet,
            detail=detail,
            visibility=variables,
        )
    module = getattr(torch, device_type)
    started = bool(_ask(module, "is_initialized"))  # before the questions below may start it
    return Accelerator(
        type=device_type,
        label=title,
        devices=tuple(_device(device_type, module, index) for index in range(seen)),
        visibility=variables,
        in_use=in_use(module, seen, started=started),
    )


def in_use(module: ModuleType, seen: int, *, started: bool) -> int | None:
    """Return the device on which this process holds memory, or that it has made the current one.

    None where nothing shows that a device was chosen.
    """
    current = _ask(module, "current_device") or 0
    held = {i: _ask(module, "memory_reserved", i) or 0 for i in range(seen if started else 0)}
    if held.get(current) or not any(held.values()):
        return current if held.get(current) or current else None
    return max(held, key=lambda i: held[i])


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
        except Exception as error:  # a plugin may raise anything, and must not take the rest down
            return 0, f"{type(error).__name__}: {error}"
    return found, "" if found else " ".join(str(w.message) for w in caught)


def _device(device_type: str, module: ModuleType, index: int) -> DeviceInfo:
    device = torch.device(device_type, index)
    properties = _ask(module, "get_device_properties", index)
    return DeviceInfo(
        device=device,
        name=str(_ask(module, "get_device_name", index) or f"{names.label(device_type)} device"),
        total_memory=getattr(properties, "total_memory", None),
        bfloat16=True if device_type in ("xpu", "hpu", "npu") else None,
    )


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that could be allocated on a device, or None where that is not known."""
    module: ModuleType | None = getattr(torch, device.type, None)
    answer = None if module is None else _ask(module, "mem_get_info", device.index)
    return None if answer is None else int(answer[0])


def _ask(module: ModuleType, function: str, *args: int) -> Any:
    """Call a function of a device module; None where it is missing or the backend cannot answer."""
    call: Callable[..., Any] | None = getattr(module, function, None)
    if call is None:
        return None
    try:
        return call(*args)
    except Exception:  # as in count(): a plugin may raise anything
        return None

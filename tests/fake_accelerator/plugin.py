"""A fake accelerator that devicekit has never heard of, on torch's PrivateUse1 backend.

Where it differs from CUDA, it differs as every such backend does: `Module.to` puts new Parameters
in place of the old ones.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from fake_accelerator.build import build
from fake_accelerator.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["NAME", "install"]

NAME = "fakechip"


def install(devices: int = 2) -> Driver:
    """Give this process a backend called `NAME` with that many devices."""
    import torch

    driver = Driver(build("plugin"), devices=devices)
    utils: Any = torch.utils
    utils.rename_privateuse1_backend(NAME)
    register: Any = torch._register_device_module
    register(NAME, _device_module(driver))
    utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return driver


def _device_module(driver: Driver) -> types.ModuleType:
    """Return what `torch.<name>` is: the functions that torch asks of every backend."""
    module = types.ModuleType(f"torch.{NAME}")
    for name, value in {
        **_device_functions(driver),
        **_random_functions(driver),
        **_stream_functions(),
    }.items():
        setattr(module, name, value)
    return module


def _device_functions(driver: Driver) -> dict[str, Any]:
    import torch

    def set_device(device: Any) -> None:
        torch.accelerator.set_device_index(_index(device))

    class DeviceContext:
        def __init__(self, device: Any) -> None:
            self.index = _index(device)

        def __enter__(self) -> None:
            self.before = torch.accelerator.current_device_index()
            set_device(self.index)

        def __exit__(self, *_error: object) -> None:
            set_device(self.before)

    return {
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "current_device": driver.current_device,
        "device": DeviceContext,
        "device_count": driver.device_count,
        "empty_cache": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_device_name": lambda device=None: f"{NAME.title()} {_index(device)}",
        "is_available": lambda: driver.device_count() > 0,
        "is_initialized": lambda: True,
        "mem_get_info": lambda device=None: driver.mem_info(_index(device)),
        "memory_allocated": lambda device=None: driver.used(_index(device)),
        "set_device": set_device,
        "synchronize": lambda device=None: driver.synchronize(_index(device)),
    }


def _random_functions(driver: Driver) -> dict[str, Callable[..., Any]]:
    def manual_seed_all(seed: int) -> None:
        for index in range(driver.device_count()):
            driver.seed(index, seed)

    return {
        "get_rng_state": lambda device=NAME: driver.rng_state(_index(device)),
        "manual_seed": lambda seed: driver.seed(_index(None), seed),
        "manual_seed_all": manual_seed_all,
        "set_rng_state": lambda state, device=NAME: driver.set_rng_state(_index(device), state),
    }


def _stream_functions() -> dict[str, Callable[..., Any]]:
    import torch

    def stream(device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device(NAME, _index(device)), priority=priority)

    def event(*, enable_timing: bool = False) -> torch.Event:
        return torch.Event(NAME, enable_timing=enable_timing)

    return {
        "Event": event,
        "Stream": stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
    }


def _index(device: Any) -> int:
    """Return the index that a device, an int or None (the current device) stands for."""
    import torch

    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index

"""A fake XPU (Intel GPU): enough of `torch.xpu` to find the devices and to move things there."""

from __future__ import annotations

from typing import Any

from fake_accelerator.build import build
from fake_accelerator.driver import MAX_DEVICES, DefaultGenerator, Driver

__all__ = ["install"]


def install(devices: int = 2) -> Driver:
    """Give this process that many XPUs; must come before torch is imported."""
    driver = Driver(build("xpu"), devices=devices)

    import torch

    def exchange_device(index: int) -> int:
        before = driver.current_device()
        if index >= 0:
            driver.set_current_device(index)
        return before

    core: Any = torch._C
    core._has_xpu = True
    core._xpu_init = lambda: None
    core._xpu_getDeviceCount = driver.device_count
    core._xpu_getDevice = driver.current_device
    core._xpu_setDevice = driver.set_current_device
    core._xpu_isInBadFork = lambda: False
    core._xpu_synchronize = driver.synchronize
    core._xpu_emptyCache = lambda: None
    core._xpu_getMemoryInfo = driver.mem_info
    xpu: Any = torch.xpu
    xpu._is_compiled = lambda: True
    xpu.default_generators = tuple(DefaultGenerator(driver, i) for i in range(MAX_DEVICES))
    xpu._exchange_device = xpu._maybe_exchange_device = exchange_device
    return driver

"""A fake MPS: one device, no float64, copies in flight from and to any host memory."""

from __future__ import annotations

from typing import Any

from fake_accelerator.build import build
from fake_accelerator.driver import DefaultGenerator, Driver

__all__ = ["install"]


class MpsDriver(Driver):
    def reset(self) -> None:
        """Undo every setting, except that MPS has no float64."""
        super().reset()
        self.block_float64()


def install() -> Driver:
    """Give this process an MPS device; must come before torch is imported."""
    driver = MpsDriver(build("mps"), devices=1)

    import torch

    core: Any = torch._C
    core._has_mps = True
    core._mps_is_available = lambda: driver.device_count() > 0
    core._mps_is_on_macos_or_newer = lambda _major, _minor: True
    core._mps_deviceSynchronize = lambda: driver.synchronize(0)
    core._mps_currentAllocatedMemory = lambda: driver.used(0)
    core._mps_driverAllocatedMemory = lambda: driver.used(0)
    core._mps_recommendedMaxMemory = lambda: driver.mem_info(0)[1]
    core._mps_emptyCache = lambda: None
    core._mps_get_default_generator = lambda: DefaultGenerator(driver, 0)
    # Remembered from the import of torch, when there was no MPS yet.
    torch.backends.mps.is_available.cache_clear()
    return driver

"""Everything that a diagnosis goes by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from devicekit._backends import DeviceInfo

if TYPE_CHECKING:
    from devicekit._backends.accelerator import Accelerator
    from devicekit._backends.survey import Build, Survey

__all__ = ["Facts"]


class Facts(NamedTuple):
    """Everything that a diagnosis goes by.

    Attributes:
        version: The version of devicekit.
        build: This build of torch.
        survey: What the system shows of hardware and drivers.
        environment: The variables that matter and are set, with their values as they are.
        accelerators: What torch can use of each type, in torch's order.
        cpu: The CPU.
        counted: How many CUDA devices torch counts, whether or not CUDA starts.
        refused_to_start: What CUDA said when it did not start; None where it did, or was not asked.
        choice: The device that `auto()` takes, or None where it refuses.
        choice_reason: Why, or what it refuses.
        passed_over: What `auto()` passes over, with the reason.
        failed: The questions that ended in an error, with the error.
        blocked: The question that was not answered in time, or None.
        crashed: The question at which the process that asked it ended, or None.
    """

    version: str
    build: Build
    survey: Survey
    environment: tuple[tuple[str, str], ...]
    accelerators: tuple[Accelerator, ...]
    cpu: DeviceInfo
    counted: int = 0
    refused_to_start: str | None = None
    choice: torch.device | None = None
    choice_reason: str = ""
    passed_over: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    blocked: str | None = None
    crashed: str | None = None

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables that matter and are set."""
        return dict(self.environment)

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        """Every device, the CPU last."""
        return (*(info for found in self.accelerators for info in found.devices), self.cpu)

    def accelerator(self, device_type: str) -> Accelerator | None:
        """Return what torch can use of a type; None where this build does not know the type."""
        return next((found for found in self.accelerators if found.type == device_type), None)

"""The facts about devices that everything above goes by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from devicekit._types import Reason

__all__ = ["Accelerator", "DeviceInfo"]


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One device of this machine.

    Attributes:
        device: The device, as a tensor on it reports it.
        name: What its maker calls it.
        total_memory: Its memory in bytes, or None where that is not known.
        free_memory: What of it is free, in bytes, or None where it cannot be known without making
            a context.
        capability: The compute capability of a CUDA device, `(major, minor)`, else None.
        bfloat16: Whether it computes in bfloat16 in hardware, or None where that is not known.
        tensor_cores: Whether it has matrix units such as NVIDIA's tensor cores, or None where that
            is not known.
        usable: Whether a tensor can be made and computed with there.
        reason: Why it is not usable, or None.

    Examples:
        >>> import devicekit
        >>> devicekit.devices()[-1].device
        device(type='cpu')
    """

    device: torch.device
    name: str
    total_memory: int | None = None
    free_memory: int | None = None
    capability: tuple[int, int] | None = None
    bfloat16: bool | None = None
    tensor_cores: bool | None = None
    usable: bool = True
    reason: Reason | None = None


class Accelerator(NamedTuple):
    """The accelerators of one type: what is there, and why what is not there is not.

    Attributes:
        type: The device type, as in `torch.device(type)`.
        label: What people call it: `"CUDA"`, `"ROCm"`, `"MPS"`.
        devices: The visible devices in torch's order, usable or not.
        reason: Why there is no visible device, or None.
        detail: What torch or the driver said about it, in their words.
        hidden: How many more devices there are that this process does not see, or None where
            nobody can tell.
        visibility: The visibility variables that are set, with their values.
        in_use: The index of the device that this process already works on, or None.
        architectures: What this build has kernels for (`"sm_90"`, `"gfx942"`); empty where it does
            not say.
        runtime: What the build was made for, with its version (`"CUDA 12.8"`), or nothing.
    """

    type: str
    label: str
    devices: tuple[DeviceInfo, ...] = ()
    reason: Reason | None = None
    detail: str = ""
    hidden: int | None = None
    visibility: tuple[tuple[str, str], ...] = ()
    in_use: int | None = None
    architectures: tuple[str, ...] = ()
    runtime: str = ""

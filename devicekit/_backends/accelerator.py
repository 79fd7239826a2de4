"""The accelerators of one type, as everything above goes by them."""

from __future__ import annotations

from typing import NamedTuple

from devicekit._backends.info import DeviceInfo
from devicekit._types import Reason

__all__ = ["Accelerator"]


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

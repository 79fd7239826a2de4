"""Pick, check, move to and report PyTorch devices."""

from devicekit._backends import DeviceInfo
from devicekit._device import auto, device, devices
from devicekit._diagnose import Diagnosis, diagnose
from devicekit._inspect import DeviceReport, check, device_of, inspect
from devicekit._move import move
from devicekit._prefetch import prefetch
from devicekit._tree import register
from devicekit._types import DeviceLike
from devicekit._wrap import unwrap, wrap
from devicekit.errors import (
    DeviceError,
    DeviceMismatchError,
    DeviceUnavailableError,
    InvalidDeviceError,
    MoveError,
    NoDeviceError,
)

__all__ = [
    "DeviceError",
    "DeviceInfo",
    "DeviceLike",
    "DeviceMismatchError",
    "DeviceReport",
    "DeviceUnavailableError",
    "Diagnosis",
    "InvalidDeviceError",
    "MoveError",
    "NoDeviceError",
    "auto",
    "check",
    "device",
    "device_of",
    "devices",
    "diagnose",
    "inspect",
    "move",
    "prefetch",
    "register",
    "unwrap",
    "wrap",
]

__version__ = "0.1.0"

"""Pick, check, move to and report PyTorch devices."""

from devicekit._backends import DeviceInfo
from devicekit._device import auto, device, devices
from devicekit._inspect import device_of
from devicekit._move import move
from devicekit._tree import register
from devicekit._types import DeviceLike
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
    "DeviceUnavailableError",
    "InvalidDeviceError",
    "MoveError",
    "NoDeviceError",
    "auto",
    "device",
    "device_of",
    "devices",
    "move",
    "register",
]

__version__ = "0.1.0"

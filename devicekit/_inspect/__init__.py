"""Read where tensors live; never moves anything."""

from devicekit._inspect.check import check
from devicekit._inspect.device import device_of, execution_device
from devicekit._inspect.hooks import hooks_of
from devicekit._inspect.report import DeviceReport
from devicekit._inspect.strays import strays_of, tensors_of
from devicekit._inspect.summary import inspect

__all__ = [
    "DeviceReport",
    "check",
    "device_of",
    "execution_device",
    "hooks_of",
    "inspect",
    "strays_of",
    "tensors_of",
]

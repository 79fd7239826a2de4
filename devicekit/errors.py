"""Every exception that devicekit raises on purpose.

```
DeviceError
├── InvalidDeviceError      (ValueError, RuntimeError)  not a device at all
├── DeviceUnavailableError  (RuntimeError)              a device, but not here
├── DeviceMismatchError     (RuntimeError)              tensors on several devices
├── NoDeviceError           (LookupError)               nothing there that has a device
└── MoveError               (RuntimeError)              something could not be moved
```

Each is also what torch or Python would have raised in its place, so that an existing `except`
clause keeps working. Every class takes one positional message; what else it carries are
keyword-only attributes with defaults, so that an error survives pickling and torch's re-raise in
worker processes with its class.
"""

from __future__ import annotations

import torch

from devicekit._types import Reason

__all__ = [
    "DeviceError",
    "DeviceMismatchError",
    "DeviceUnavailableError",
    "InvalidDeviceError",
    "MoveError",
    "NoDeviceError",
]


class DeviceError(Exception):
    """The base of every error of devicekit.

    Args:
        message: What was given, what was expected, and one thing to do.

    Examples:
        >>> import devicekit
        >>> try:
        ...     devicekit.device("gpu")
        ... except devicekit.DeviceError as error:
        ...     print(type(error).__name__)
        InvalidDeviceError
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message)


class InvalidDeviceError(DeviceError, ValueError, RuntimeError):
    """What was given is not a device at all.

    A `ValueError` for what it is, and a `RuntimeError` because that is what `torch.device` raises.

    Examples:
        >>> import devicekit
        >>> devicekit.device("cuda0")
        Traceback (most recent call last):
            ...
        devicekit.errors.InvalidDeviceError: 'cuda0' is not a device. Did you mean 'cuda:0'?
    """


class DeviceUnavailableError(DeviceError, RuntimeError):
    """A device, but not here.

    Args:
        message: What was given, what was expected, and one thing to do.
        requested: The device that was asked for, as it was written.
        available: The devices that can be used here instead.
        reason: Why it cannot be used; one of `devicekit._types.Reason`.

    Attributes:
        requested: The device that was asked for, as it was written.
        available: The devices that can be used here instead.
        reason: Why it cannot be used, for example `"index out of range"`.

    Examples:
        >>> import devicekit, devicekit.testing
        >>> with devicekit.testing.fake_devices(cuda=2):
        ...     try:
        ...         devicekit.device("cuda:2")
        ...     except devicekit.DeviceUnavailableError as error:
        ...         print(error.reason, [str(d) for d in error.available])
        index out of range ['cuda:0', 'cuda:1', 'cpu']
    """

    def __init__(
        self,
        message: str = "",
        *,
        requested: str | None = None,
        available: tuple[torch.device, ...] = (),
        reason: Reason | None = None,
    ) -> None:
        super().__init__(message)
        self.requested = requested
        self.available = available
        self.reason = reason


class DeviceMismatchError(DeviceError, RuntimeError):
    """Tensors are on several devices where one device was expected.

    Args:
        message: What was given, what was expected, and one thing to do.
        devices: The devices that were found.
        paths: Where the tensors stand that are on the wrong device.

    Attributes:
        devices: The devices that were found; the one that most are on comes first.
        paths: Where the tensors stand that are on the wrong device, for example `("mask",)`.
    """

    def __init__(
        self,
        message: str = "",
        *,
        devices: tuple[torch.device, ...] = (),
        paths: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.devices = devices
        self.paths = paths


class NoDeviceError(DeviceError, LookupError):
    """There is nothing that has a device: no parameter, no buffer, no tensor.

    Examples:
        >>> import devicekit, torch
        >>> devicekit.device_of(torch.nn.ReLU())
        Traceback (most recent call last):
            ...
        devicekit.errors.NoDeviceError: ReLU holds no tensor, so it has no device. ...
    """


class MoveError(DeviceError, RuntimeError):
    """Something could not be moved.

    Args:
        message: What was given, what was expected, and one thing to do.
        path: Where in the object the trouble is, for example `"batch['image'][0].mask"`.
        target: The device it should have gone to.

    Attributes:
        path: Where in the object the trouble is, or None where it is the object as a whole.
        target: The device it should have gone to.
    """

    def __init__(
        self, message: str = "", *, path: str | None = None, target: torch.device | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.target = target

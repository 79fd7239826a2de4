"""Read where tensors live; never moves anything.

What surveys a whole object is imported when there is one to survey.
"""

from __future__ import annotations

from collections.abc import Callable

from devicekit._inspect.device import device_of, execution_device
from devicekit._inspect.hooks import hooks_of
from devicekit._inspect.report import DeviceReport
from devicekit._inspect.strays import strays_of, tensors_of

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


def inspect(obj: object, /) -> DeviceReport:
    """Return which tensors of an object are where, and everything odd about it.

    What `print` shows of it begins with what matters most: the tensor that is elsewhere, the weight
    that has no values. It only reads, touches no tensor's data and starts no device, and costs no
    more than `model.to(device)` where the model is there already.

    Bytes are those of the memory that is held: tied weights and views of one storage are counted
    once, sparse and nested tensors by their parts. On meta they are what the values would take.
    What quantized modules have packed is listed, but says no size.

    Args:
        obj: A module, an optimizer, a tensor, or any structure that holds some: `inspect([model,
            optimizer])` says as well whether the optimizer trains this model.

    Raises:
        Nothing: `report.device` does, where there is not one device.

    Examples:
        >>> import devicekit, torch
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.fc = torch.nn.Linear(2, 2)
        ...         self.mask = torch.ones(2)  # no buffer: `to` leaves it behind
        >>> model = Net().to("meta")
        >>> print(devicekit.inspect(model).headline)
        mask is on cpu, but Net is on meta: a plain attribute, which .to() leaves behind.
        >>> [stray.path for stray in devicekit.inspect(model).strays]
        ['mask']
    """
    from devicekit._inspect.summary import report_on

    return report_on(obj)


def check(model: Callable[..., object], /, *args: object, **kwargs: object) -> None:
    """Return None if a call `model(*args, **kwargs)` would find everything on one device.

    The model is not called. What is looked at: the inputs, by the names that `forward` gives them,
    the parameters and buffers, and the tensors in plain attributes, wherever they are. 0-dim
    tensors on the CPU are fine with every device. So is what somebody else brings to its place:
    inputs of a model that accelerate has dispatched, that `DataParallel`, DDP, FSDP or
    `devicekit.wrap` feeds, and weights that accelerate has put where its hooks say.

    It walks the whole model, which takes about as long as `model.to(device)` where nothing moves
    (some milliseconds for 1,000 parameters). Call it once before the loop, or where torch has
    failed, but not in every step.

    Args:
        model: The model, or anything else that is called and holds tensors.
        args: What it is called with.
        kwargs: What it is called with by name.

    Raises:
        InvalidDeviceError: The first argument is nothing that can be called.
        DeviceMismatchError: Something is on another device; it lists all of that with paths, and
            what to write to mend it.

    Examples:
        >>> import devicekit, torch
        >>> model = torch.nn.Linear(2, 2)
        >>> devicekit.check(model, torch.ones(1, 2))
        >>> try:
        ...     devicekit.check(model, torch.ones(1, 2, device="meta"))
        ... except devicekit.DeviceMismatchError as error:
        ...     print(error.paths)
        ('input',)
    """
    from devicekit._inspect.mismatch import check_call

    check_call(model, args, kwargs)

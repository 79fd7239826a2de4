"""One call of a wrapped model: its arguments, its results, and why it has failed."""

from __future__ import annotations

from collections import UserDict
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from devicekit._inspect import check, device_of
from devicekit._move import move
from devicekit.errors import DeviceError, DeviceMismatchError

__all__ = [
    "INPUTS",
    "INSIDE",
    "SCALARS",
    "Options",
    "delivered",
    "explanation_of",
    "moved",
    "origin_of",
]

INPUTS = "inputs"
"""The value of `outputs` that sends results back to where inputs came from."""

SCALARS = frozenset((type(None), bool, int, float, str))
"""Types of arguments in which there is nothing to move."""

# The ids of the objects one of whose replaced methods is running in this thread or task: what they
# pass among themselves is no result yet.
INSIDE: ContextVar[tuple[int, ...]] = ContextVar("devicekit.wrap", default=())


class Options(NamedTuple):
    """How a model was wrapped.

    Attributes:
        methods: The names of the entry points, sorted.
        outputs: Where results go: a device, `"inputs"`, or None for wherever they are.
    """

    methods: tuple[str, ...]
    outputs: torch.device | str | None


def moved(args: Any, kwargs: Any, device: torch.device | None) -> tuple[Any, Any]:
    """Return the arguments of a call on a device; the very same ones where they all are there."""
    if device is None:
        return args, kwargs
    # In one, so that a tensor that is passed twice stays one; errors say `batch['mask']`.
    call: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    there = move(call, device)
    if there is call:
        return args, kwargs
    return tuple(there[i] for i in range(len(args))), {name: there[name] for name in kwargs}


def origin_of(args: Any, kwargs: Any) -> torch.device | None:
    """Return where the first tensor of a call comes from."""
    for value in (*args, *kwargs.values()):
        if type(value) is Tensor:
            return value.device
        if type(value) not in SCALARS:
            find = _traced_device if is_dynamo_compiling() else _eager_device
            found = find(value)
            if found is not None:
                return found
    return None


def _eager_device(x: Any) -> torch.device | None:
    return device_of(x, None)


def _traced_device(x: Any) -> torch.device | None:
    if isinstance(x, Tensor):
        return x.device
    values = x.values() if isinstance(x, (dict, UserDict)) else x
    for value in values if isinstance(x, (dict, UserDict, list, tuple)) else ():
        found = _traced_device(value)
        if found is not None:
            return found
    return None


def delivered(result: Any, outputs: torch.device | str, origin: torch.device | None) -> Any:
    """Return a result where it should go."""
    where = origin if isinstance(outputs, str) else outputs
    return result if where is None else move(result, where)


# What torch says when tensors on several devices meet, on any of its backends.
_SIGNS = (
    "same device",
    "expected device",
    "device type",
    "two devices",
    "weight type",
    "with arguments from the",
)


def explanation_of(
    module: nn.Module | None, args: Any, kwargs: Any, error: BaseException
) -> DeviceMismatchError | None:
    """Return what `check` says of a call that has failed with an error of torch about devices."""
    if module is None or isinstance(error, DeviceError):
        return None
    if not any(sign in str(error) for sign in _SIGNS):
        return None
    try:
        check(module, *args, **kwargs)
    except DeviceMismatchError as mismatch:
        mismatch.__cause__ = error
        return mismatch.with_traceback(None)
    return None

"""What `move` is while `torch.compile` traces it.

A plain recursion over `isinstance`, without the table of types: dynamo would guard on its size,
and every type met later anywhere in the process would recompile every function that calls `move`.
Containers are simply rebuilt, which tracing makes free; those that this would change (deques,
dataclasses with a `__post_init__`, unknown types) are moved outside the graph, as are calls with
options.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict, defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from devicekit._device import auto
from devicekit._device import device as checked_device
from devicekit.errors import NoDeviceError

Move: TypeAlias = Callable[..., Any]
"""`move` itself, handed in because it lies above."""

__all__ = ["move_traced", "outside_graph"]


def move_traced(move: Move, arguments: tuple[Any, ...]) -> Any:
    """Return what `move(*arguments)` does; in a graph there is only data to move."""
    if len(arguments) == 2 and isinstance(arguments[0], nn.Module):
        model, where = arguments
        if not isinstance(where, (str, int, torch.device)):
            return _traced(where, _device_of(model), move)
    return _traced(arguments[0], _target(*arguments[1:]), move)


def _target(*where: Any) -> torch.device:
    return checked_device(where[0]) if where else auto()


# What `torch.compiler.assume_constant_result` does; calling that would import all of dynamo.
_target._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _device_of(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        return parameter.device
    for buffer in model.buffers():
        return buffer.device
    msg = "The model holds no tensor, so it has no device to move a batch to. Name one."
    raise NoDeviceError(msg)


def _traced(x: Any, device: torch.device, move: Move) -> Any:
    if isinstance(x, Tensor):
        return x if x.device == device else x.to(device)
    if isinstance(x, (int, float, str)):  # a number may be a symbol, which has no attributes
        return x
    if isinstance(x, defaultdict):
        return defaultdict(x.default_factory, {k: _traced(v, device, move) for k, v in x.items()})
    if isinstance(x, (dict, UserDict)):
        new = {key: _traced(value, device, move) for key, value in x.items()}
        return new if type(x) is dict else type(x)(new)
    if hasattr(x, "to"):  # before tuples: a PackedSequence is one
        return x.to(device)
    if isinstance(x, tuple):
        parts = [_traced(value, device, move) for value in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if type(x) is list:
        return [_traced(value, device, move) for value in x]
    if x is None or isinstance(x, (bytes, type, torch.device, torch.dtype)) or callable(x):
        return x
    if dataclasses.is_dataclass(x) and not hasattr(x, "__post_init__"):
        fields = dataclasses.fields(x)
        if all(f.init for f in fields):
            new = {f.name: _traced(getattr(x, f.name), device, move) for f in fields}
            return dataclasses.replace(cast("Any", x), **new)
    return outside_graph(move, (x, device), {})


def outside_graph(move: Move, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return `move(*arguments, **options)`, not traced: at the price of a break of the graph."""
    # Not `torch.compiler.disable`: it would import all of dynamo, which runs by now.
    untraced: Any = torch._dynamo.disable(move)  # type: ignore[no-untyped-call]
    return untraced(*arguments, **options)


outside_graph._torchdynamo_disable = True  # type: ignore[attr-defined]  # or it would be traced

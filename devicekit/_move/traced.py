"""What `move` is while `torch.compile` traces it.

A plain recursion over `isinstance`, without the table of types: dynamo would guard on its size,
and every type met later anywhere in the process would recompile every function that calls `move`.
Containers are simply rebuilt, which tracing makes free; those that this would change (deques,
registered and unknown types) are moved outside the graph, as are calls with options.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from devicekit._device import auto
from devicekit._device import device as checked_device
from devicekit._tree.kinds import registered
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


def _is_kept_whole(cls: type) -> bool:
    """Return whether tracing would lose what a container of this class is."""
    return registered(cls) is not None or (issubclass(cls, defaultdict) and cls is not defaultdict)


# What `torch.compiler.assume_constant_result` does; calling that would import all of dynamo.
_target._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_kept_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
    if _is_kept_whole(type(x)):
        return outside_graph(move, (x, device), {})
    if type(x) is dict:
        return {key: _traced(value, device, move) for key, value in x.items()}
    if isinstance(x, dict):
        return _traced_dict(x, device, move)
    if isinstance(x, UserDict):
        return _traced_state(x, device, move)
    if hasattr(x, "to"):  # before tuples: a PackedSequence is one
        return x.to(device)
    if isinstance(x, tuple):
        parts = [_traced(value, device, move) for value in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if type(x) is list:
        return [_traced(value, device, move) for value in x]
    if x is None or isinstance(x, (bytes, type, torch.device, torch.dtype)) or callable(x):
        return x
    if dataclasses.is_dataclass(x) and hasattr(x, "__dict__"):
        return _traced_state(x, device, move)
    return outside_graph(move, (x, device), {})


def _traced_state(x: Any, device: torch.device, move: Move) -> Any:
    """Return a twin of an object that keeps all that it holds in its `__dict__`."""
    twin = object.__new__(type(x))
    for name, value in x.__dict__.items():
        object.__setattr__(twin, name, _traced(value, device, move))
    return twin


def _traced_dict(x: Any, device: torch.device, move: Move) -> Any:
    """Return a dict of the same class with its attributes, and run none of the class's own code."""
    if type(x) is defaultdict:
        return defaultdict(x.default_factory, {k: _traced(v, device, move) for k, v in x.items()})
    base = OrderedDict if isinstance(x, OrderedDict) else dict
    twin = base.__new__(type(x))
    for key, value in base.items(x):
        base.__setitem__(twin, key, _traced(value, device, move))
    for name, value in getattr(x, "__dict__", {}).items():
        one = name in x and base.__getitem__(x, name) is value  # an item and an attribute as well
        new = base.__getitem__(twin, name) if one else _traced(value, device, move)
        object.__setattr__(twin, name, new)
    return twin


def outside_graph(move: Move, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return `move(*arguments, **options)`, not traced: at the price of a break of the graph."""
    # Not `torch.compiler.disable`: it would import all of dynamo, which runs by now.
    untraced: Any = torch._dynamo.disable(move)  # type: ignore[no-untyped-call]
    return untraced(*arguments, **options)


outside_graph._torchdynamo_disable = True  # type: ignore[attr-defined]  # or it would be traced

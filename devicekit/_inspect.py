"""Read where tensors live; never moves anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from devicekit._backends import current_machine
from devicekit._tree import walk
from devicekit.errors import NoDeviceError

__all__ = ["device_of", "execution_device", "hooks_of", "strays_of", "tensors_of"]

_D = TypeVar("_D")
_NOTHING: Any = object()


@overload
def device_of(obj: object, /) -> torch.device: ...
@overload
def device_of(obj: object, default: _D, /) -> torch.device | _D: ...
def device_of(obj: object, default: Any = _NOTHING, /) -> Any:
    """Return the one device where the inputs of a model belong, or where data is.

    What `next(model.parameters()).device` is written for, made total: of a model it is the
    execution device that accelerate's hooks give it when it is offloaded or dispatched, else the
    device of its first parameter, else of its first buffer, else of what a `DataParallel` replica
    holds (pytorch#40457). Wrappers such as DDP and `torch.compile` are seen through. Of data it is
    the device of the first tensor, of an optimizer that of its first parameter. Cheap enough for
    loops: it looks no further than the first.

    Args:
        obj: A module, an optimizer, a tensor, or any structure that holds some.
        default: What to return where there is no tensor, as in `next(iterator, default)`.

    Raises:
        NoDeviceError: There is no tensor, and no `default` was given.

    Examples:
        >>> import devicekit, torch
        >>> devicekit.device_of(torch.nn.Linear(2, 2))
        device(type='cpu')
        >>> devicekit.device_of(torch.nn.ReLU(), None) is None
        True
    """
    found = _device_of(obj)
    if found is not None:
        return found
    if default is not _NOTHING:
        return default
    msg = (
        f"{type(obj).__name__} holds no tensor, so it has no device. "
        f"Pass what to return then: device_of(obj, None)."
    )
    raise NoDeviceError(msg)


def _device_of(obj: object) -> torch.device | None:
    if isinstance(obj, Tensor):
        return obj.device
    if isinstance(obj, nn.Module):
        return execution_device(obj)
    if isinstance(obj, Optimizer):
        obj = [group["params"] for group in obj.param_groups]
    for _, leaf in walk(obj, opaque=True):
        found = leaf.device if isinstance(leaf, Tensor) else _device_of(leaf)
        if found is not None:
            return found
    return None


def execution_device(module: nn.Module) -> torch.device | None:
    """Return where the inputs of a module belong, or None where it holds no tensor."""
    return (
        _by_hook_or_parameter(module)
        or _first(module, "_buffers")
        or _first(module, "_former_parameters")  # of a DataParallel replica
    )


def _by_hook_or_parameter(module: nn.Module) -> torch.device | None:
    # Written without `parameters()`, whose generators cost more than moving a small batch.
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        declared = _declared(hook)
        if declared is not None:
            return declared
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter.device
    for child in module._modules.values():
        if child is not None:
            found = _by_hook_or_parameter(child)
            if found is not None:
                return found
    return None


def _first(module: nn.Module, store: str) -> torch.device | None:
    for child in module.modules():
        for tensor in getattr(child, store, {}).values():
            if tensor is not None:
                return tensor.device  # type: ignore[no-any-return]
    return None


def _declared(hook: Any) -> torch.device | None:
    """Return the execution device that one of accelerate's hooks declares."""
    for part in _flattened(hook):
        declared = getattr(part, "execution_device", None)
        if declared is not None:
            device = torch.device(declared)
            if device.type in ("cpu", "meta"):
                return torch.device(device.type)
            if device.index is None:
                index = current_machine().current_index(device.type)
                return torch.device(device.type, index)
            return device
    return None


def _flattened(hook: Any) -> tuple[Any, ...]:
    """Return the parts of one of accelerate's hooks, which may be several in a row."""
    return tuple(getattr(hook, "hooks", (hook,)))


def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield accelerate's hooks in a module, with the name of the sub-module each is on."""
    for name, part in module.named_modules():
        hook = part.__dict__.get("_hf_hook")
        if hook is not None:
            yield from ((name, single) for single in _flattened(hook))


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module by name, each tensor once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def strays_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a module holds outside its parameters and buffers, by path.

    `Module.to` does not move them: plain attributes, items of lists and dicts, unregistered
    sub-modules.
    """
    registered = {id(tensor) for _, tensor in tensors_of(module)} | set(map(id, module.modules()))
    for name, part in module.named_modules():
        for key, value in part.__dict__.items():
            if key in _MODULE_STATE or type(value) in _SCALARS:
                continue
            for path, leaf in walk(value, f"{name}.{key}" if name else key):
                if id(leaf) in registered:
                    continue
                registered.add(id(leaf))
                if isinstance(leaf, nn.Module):
                    yield from ((f"{path}.{n}", t) for n, t in tensors_of(leaf))
                    yield from ((f"{path}.{n}", t) for n, t in strays_of(leaf))
                elif isinstance(leaf, Tensor) and leaf.grad_fn is None:  # else it is recomputed
                    yield path, leaf


_MODULE_STATE = frozenset(nn.Module().__dict__) | {"_hf_hook", "_old_forward", "_former_parameters"}
_SCALARS = frozenset((type(None), bool, int, float, str))

"""The one device where inputs belong: cheap, for loops."""

# pyright: reportPrivateUsage=false
# Of torch: the public ways to its stores are slow.

from __future__ import annotations

from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from devicekit._backends import current_machine
from devicekit._inspect.hooks import declared_device
from devicekit._tree import walk
from devicekit._types import CPU
from devicekit.errors import NoDeviceError

__all__ = ["device_of", "execution_device", "is_packed", "moves_itself"]

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
    holds (pytorch#40457). Wrappers such as DDP, FSDP and `torch.compile` are seen through. Of data
    it is the device of the first tensor, of an optimizer that of its first parameter. Cheap enough
    for loops: it looks no further than the first.

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
    """Return where the inputs of a module belong, or None where it holds no tensor.

    The CPU is always the object `CPU`.
    """
    # Straight down to the first parameter, which is all there is to do in most models:
    # `parameters()` and its generators cost more than moving a small batch.
    state = module.__dict__
    try:
        for _ in _LEVELS:
            own, children = state["_parameters"], state["_modules"]
            if "_hf_hook" in state or "_fsdp_wrapped_module" in children:
                break
            if own:
                parameter = next(iter(own.values()))
                if type(parameter) is nn.Parameter:
                    return CPU if parameter.is_cpu else parameter.device
                break
            child = next(iter(children.values())) if children else None
            if child is None:
                break
            state = child.__dict__
    except KeyError:  # a ScriptModule keeps them elsewhere
        pass
    found = _searched(module)
    return CPU if found == CPU else found


_LEVELS = range(100)  # a module may hold itself


def _searched(module: nn.Module) -> torch.device | None:
    if not hasattr(module, "_modules"):  # `super().__init__()` was not called in its own
        return None
    if "_fsdp_wrapped_module" in module._modules:  # its shards may be kept on the CPU
        computing = module.__dict__.get("compute_device")
        if isinstance(computing, torch.device):
            return computing
    try:
        found = _by_hook_or_parameter(module)
    except RecursionError:  # a module that holds itself, or one nested very deep
        found = _first(module, "_parameters")
    return (
        found
        or _first(module, "_buffers")
        or _first(module, "_former_parameters")  # of a DataParallel replica
        or _of_packed_or_own(module)
    )


def _by_hook_or_parameter(module: nn.Module) -> torch.device | None:
    if "_hf_hook" in module.__dict__:
        declared = declared_device(module.__dict__["_hf_hook"])
        if declared is not None:
            return declared
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter.device if type(parameter) in _PLAIN else _of_shards(parameter)
    for child in module._modules.values():
        if child is not None:
            found = _by_hook_or_parameter(child)
            if found is not None:
                return found
    return None


_PLAIN = (nn.Parameter, Tensor)


def _of_shards(parameter: Tensor) -> torch.device:
    """Return where a DTensor is computed with: FSDP may keep its shards on the CPU."""
    device = parameter.device
    computing = getattr(getattr(parameter, "device_mesh", None), "device_type", device.type)
    if computing == device.type:
        return device
    return torch.device(computing, current_machine().current_index(computing))


def _first(module: nn.Module, store: str) -> torch.device | None:
    for child in module.modules():
        for tensor in getattr(child, store, {}).values():
            if tensor is not None:
                return tensor.device  # type: ignore[no-any-return]
    return None


def _of_packed_or_own(module: nn.Module) -> torch.device | None:
    """Return the device of packed weights, or of state that a module moves by itself."""
    for child in module.modules():
        own = moves_itself(child)
        for value in child.__dict__.values():
            if is_packed(value):
                return CPU
            if own and isinstance(value, Tensor):
                return value.device
    return None


def moves_itself(module: nn.Module) -> bool:
    """Return whether a module moves what it holds in plain attributes, by an `_apply` of its own.

    Torch's own modules that have one move nothing more by it.
    """
    cls: Any = type(module)
    apply = cls._apply
    return apply is not nn.Module._apply and not apply.__module__.startswith("torch.")


def is_packed(value: object) -> bool:
    """Return whether this is what quantized modules hold for weights.

    The kernels that use them, those of FBGEMM, oneDNN and QNNPACK, are all for the CPU.
    """
    return isinstance(value, torch.ScriptObject) and "PackedParams" in str(value._type())

"""Put hooks and methods on an object, and take them off again."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from devicekit._device import device as checked_device
from devicekit._device.spelling import shown
from devicekit._types import DeviceLike
from devicekit._wrap.calls import INPUTS, Options
from devicekit._wrap.hooks import KEY, add_hooks, hook_stores
from devicekit._wrap.methods import Method
from devicekit.errors import InvalidDeviceError

__all__ = ["attach", "detach"]


def attach(model: object, methods: Collection[str], outputs: DeviceLike | None) -> None:
    """Make an object move its inputs, as `devicekit.wrap` promises."""
    _refuse(model)
    options = _options(methods, outputs)
    for name in options.methods:
        _refuse_method(model, name)
    if _options_of(model) == options:
        return
    detach(model)
    if isinstance(model, nn.Module):
        add_hooks(model, options)
    for name in options.methods:
        if not _is_hooked(model, name):
            state = vars(model)
            state[name] = Method(model, name, options, state.get(name))


def detach(model: object) -> None:
    """Restore an object as it was before `attach`."""
    if isinstance(model, nn.Module) and _has_hooks(model):
        for store in hook_stores(model):
            store.pop(KEY, None)
    state: dict[str, Any] = getattr(model, "__dict__", {})
    for name, value in list(state.items()):
        if not isinstance(value, Method):
            continue
        if value.previous is None:
            del state[name]
        else:
            state[name] = value.previous


def _options(methods: Collection[str], outputs: DeviceLike | None) -> Options:
    names = _names(methods)
    if not names:
        msg = "methods is empty: expected the names of one or more methods that take inputs."
        raise ValueError(msg)
    return Options(tuple(sorted(names)), _checked_outputs(outputs))


def _names(methods: Any) -> set[str]:
    several = isinstance(methods, Iterable) and not isinstance(methods, str)
    names: list[Any] = list(methods) if several else [methods]
    if all(isinstance(name, str) for name in names):
        return set(names)
    msg = (
        f"methods is {shown(methods)}: expected the names of one or more methods that take "
        f"inputs, such as ('forward', 'generate')."
    )
    raise TypeError(msg)


def _checked_outputs(outputs: DeviceLike | None) -> torch.device | str | None:
    if outputs is None or (isinstance(outputs, str) and outputs == INPUTS):
        return outputs
    try:
        return checked_device(outputs)
    except InvalidDeviceError:
        if isinstance(outputs, str) and get_close_matches(
            outputs.strip().lower(), [INPUTS], 1, 0.8
        ):
            msg = f"{outputs!r} is neither a device nor {INPUTS!r}. Did you mean {INPUTS!r}?"
            raise InvalidDeviceError(msg) from None
        raise


def _options_of(model: object) -> Options | None:
    """Return how a model was wrapped, or None where it was not."""
    if isinstance(model, nn.Module) and KEY in model._forward_pre_hooks:
        return model._forward_pre_hooks[KEY].options  # type: ignore[attr-defined,no-any-return]
    for value in getattr(model, "__dict__", {}).values():
        if isinstance(value, Method):
            return value.options
    return None


def _refuse(model: object) -> None:
    """Raise for what is no model."""
    kind = type(model).__name__
    if isinstance(model, type):
        name = model.__name__
        msg = f"{name} is a class: expected an object of it. Write wrap({name}(...))."
        raise TypeError(msg)
    if type(model).__module__ == "builtins" or isinstance(model, (torch.Tensor, Optimizer)):
        msg = (
            f"{shown(model)} is no model: expected a module, or an object that holds one. "
            f"Wrap the object whose methods take inputs."
        )
        raise TypeError(msg)
    if not isinstance(model, nn.Module) or _has_hooks(model):
        return
    if nn.Module in type(model).__mro__:
        msg = (
            f"{kind} has no hooks: expected a module on which nn.Module.__init__ has run. "
            f"Call super().__init__() in its __init__."
        )
    else:
        msg = (
            f"{kind} only looks like a module: expected one that has hooks. "
            f"Wrap a small real one, such as torch.nn.Identity()."
        )
    raise TypeError(msg)


def _has_hooks(module: nn.Module) -> bool:
    """Return whether it is a module indeed, on which `nn.Module.__init__` has run."""
    return "_forward_pre_hooks" in vars(module)


def _refuse_method(model: object, name: str) -> None:
    """Raise for what is no method of a model that can be replaced on the object."""
    kind = type(model).__name__
    if name.startswith("__") and name.endswith("__"):
        msg = (
            f"{name!r} cannot be replaced on one object: Python looks it up on the class. "
            f"Name the method that it calls, such as 'forward'."
        )
        raise TypeError(msg)
    method = getattr(model, name, None)
    if not callable(method):
        msg = (
            f"{kind} has no method {name!r}: expected methods of it that take inputs. "
            f"Name them in methods=(...)."
        )
        raise AttributeError(msg)
    if isinstance(method, nn.Module):
        msg = f"{name!r} of {kind} is a module and no method: write wrap(model.{name})."
        raise TypeError(msg)
    if not hasattr(model, "__dict__"):
        msg = f"{kind} has __slots__ and no __dict__, so no method of one object can be replaced."
        raise TypeError(msg)


def _is_hooked(model: object, name: str) -> bool:
    return name == "forward" and isinstance(model, nn.Module)

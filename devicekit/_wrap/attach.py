"""Put hooks and methods on an object, and take them off again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from devicekit._device import device as checked_device
from devicekit._types import DeviceLike
from devicekit._wrap.calls import INPUTS, Options
from devicekit._wrap.hooks import KEY, add_hooks, hook_stores
from devicekit._wrap.methods import Method

__all__ = ["attach", "detach"]


def attach(model: object, methods: Collection[str], outputs: DeviceLike | None) -> None:
    """Make an object move its inputs, as `devicekit.wrap` promises."""
    options = _options(methods, outputs)
    for name in options.methods:
        _refuse(model, name)
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
    if isinstance(model, nn.Module):
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
    names = tuple(sorted({methods} if isinstance(methods, str) else set(methods)))
    if not names:
        msg = "methods is empty: expected the names of one or more methods that take inputs."
        raise ValueError(msg)
    return Options(names, outputs if outputs in (None, INPUTS) else checked_device(outputs))


def _options_of(model: object) -> Options | None:
    """Return how a model was wrapped, or None where it was not."""
    if isinstance(model, nn.Module) and KEY in model._forward_pre_hooks:
        return model._forward_pre_hooks[KEY].options  # type: ignore[attr-defined,no-any-return]
    for value in getattr(model, "__dict__", {}).values():
        if isinstance(value, Method):
            return value.options
    return None


def _refuse(model: object, name: str) -> None:
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
        msg = f"{kind} has no method {name!r}: expected methods of it that take inputs."
        raise AttributeError(msg)
    if isinstance(method, nn.Module):
        msg = f"{name!r} of {kind} is a module and no method: write wrap(model.{name})."
        raise TypeError(msg)
    if not hasattr(model, "__dict__"):
        msg = f"{kind} has __slots__ and no __dict__, so no method of one object can be replaced."
        raise TypeError(msg)


def _is_hooked(model: object, name: str) -> bool:
    return name == "forward" and isinstance(model, nn.Module)

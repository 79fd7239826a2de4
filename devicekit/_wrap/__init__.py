"""A model you did not write takes its inputs from anywhere."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from torch import nn

from devicekit._device import device as checked_device
from devicekit._types import DeviceLike
from devicekit._wrap.calls import INPUTS, Options
from devicekit._wrap.hooks import KEY, add_hooks, hook_stores
from devicekit._wrap.methods import Method

__all__ = ["unwrap", "wrap"]

_T = TypeVar("_T")


def wrap(
    model: _T,
    /,
    *,
    methods: Collection[str] = ("forward",),
    outputs: DeviceLike | None = None,
) -> _T:
    """Return the same model, whose inputs are moved to it from now on.

    The model stays the same object of the same class with the same `state_dict`. It can be
    pickled, deep-copied, compiled, traced and exported, and it may move later: inputs follow it.
    What is on its device already is handed over as it is. Inputs of a model that is split or
    offloaded go where its first part is executed; those of a model without parameters and buffers
    stay where they are.

    A forward that still meets two devices raises `DeviceMismatchError`, which names the tensors
    as `check` would; torch's own error is its cause.

    Calls of the model are reached by hooks. `model.forward(x)` is not, nor is any other method:
    name those that take inputs in `methods`. They are replaced on this one object; the class stays
    as it is. A model with replaced methods refers to itself, so that its memory is only given back
    when Python collects garbage. An object that is no module but holds one, such as a pipeline, is
    wrapped by the names of its methods alone.

    Wrapping again with the same options does nothing; with others, the new ones replace the old.
    It is no context manager, because `with` looks at the class of the model, which is not
    devicekit's to change. Call `unwrap(model)` in a `finally` clause, or hand it to
    `contextlib.ExitStack.callback`.

    Args:
        model: A module, or an object that holds one.
        methods: The entry points whose inputs are moved: for a module `"forward"` (which stands
            for calling it) and any method, for example `("forward", "generate")`.
        outputs: Where results go: None leaves them on the model's device, a device sends them
            there, `"inputs"` sends them back to where the first tensor of the call came from.
            What one entry point passes to another of the same model stays on its device.

    Raises:
        AttributeError: The model has no such method.
        TypeError: What was named cannot be replaced on an object.
        ValueError: `methods` is empty.
        InvalidDeviceError: `outputs` is neither a device nor `"inputs"`.
        DeviceUnavailableError: `outputs` is a device that does not exist here.

    Examples:
        >>> import devicekit, torch
        >>> model = torch.nn.Linear(3, 1, device="meta")
        >>> devicekit.wrap(model) is model
        True
        >>> model(torch.ones(2, 3)).device  # the input is on the CPU
        device(type='meta')
        >>> devicekit.wrap(model, outputs="inputs")(torch.ones(2, 3, device="meta")).device
        device(type='meta')
    """
    options = _options(methods, outputs)
    for name in options.methods:
        _refuse(model, name)
    if _options_of(model) == options:
        return model
    unwrap(model)
    if isinstance(model, nn.Module):
        add_hooks(model, options)
    for name in options.methods:
        if not _is_hooked(model, name):
            state = vars(model)
            state[name] = Method(model, name, options, state.get(name))
    return model


def unwrap(model: _T, /) -> _T:
    """Return the same model as it was before `wrap`; a model that is not wrapped stays as it is.

    Its sub-modules are left alone: unwrap those that you wrapped.

    Args:
        model: What `wrap` was given.

    Examples:
        >>> import devicekit, torch
        >>> model = devicekit.wrap(torch.nn.Linear(3, 1))
        >>> devicekit.unwrap(model) is model
        True
    """
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
    return model


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

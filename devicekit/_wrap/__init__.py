"""A model you did not write takes its inputs from anywhere.

What wraps is imported when there is a model to wrap.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from devicekit._types import DeviceLike

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
        TypeError: What is to be wrapped is a class or no model at all, or `nn.Module.__init__` has
            not run on it; `methods` holds something else than names; or what was named cannot be
            replaced on an object.
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
    from devicekit._wrap.attach import attach

    attach(model, methods, outputs)
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
    from devicekit._wrap.attach import detach

    detach(model)
    return model

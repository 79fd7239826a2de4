"""A model you did not write takes its inputs from anywhere."""

from __future__ import annotations

import inspect
import sys
from collections import UserDict
from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from devicekit._device import device as checked_device
from devicekit._inspect import check, device_of, execution_device
from devicekit._move import move
from devicekit._tree import walk
from devicekit._types import DeviceLike
from devicekit.errors import DeviceError, DeviceMismatchError

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
        _add_hooks(model, options)
    for name in options.methods:
        if not _is_hooked(model, name):
            vars(model)[name] = _Method(model, name, options)
    return model


def unwrap(model: _T, /) -> _T:
    """Return the same model as it was before `wrap`; a model that is not wrapped stays as it is.

    Its sub-modules are left alone: unwrap those that you wrapped.

    Args:
        model: What `wrap` was given.

    Raises:
        Nothing.

    Examples:
        >>> import devicekit, torch
        >>> model = devicekit.wrap(torch.nn.Linear(3, 1))
        >>> devicekit.unwrap(model) is model
        True
    """
    if isinstance(model, nn.Module):
        for store in _hook_stores(model):
            store.pop(_KEY, None)
    state: dict[str, Any] = getattr(model, "__dict__", {})
    for name, value in list(state.items()):
        if not isinstance(value, _Method):
            continue
        if value.previous is None:
            del state[name]
        else:
            state[name] = value.previous
    return model


# ---- options -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    """How a model was wrapped.

    Attributes:
        methods: The names of the entry points, sorted.
        outputs: Where results go: a device, `"inputs"`, or None for wherever they are.
    """

    methods: tuple[str, ...]
    outputs: torch.device | str | None


_INPUTS = "inputs"


def _options(methods: Collection[str], outputs: DeviceLike | None) -> _Options:
    names = tuple(sorted({methods} if isinstance(methods, str) else set(methods)))
    if not names:
        msg = "methods is empty: expected the names of one or more methods that take inputs."
        raise ValueError(msg)
    return _Options(names, outputs if outputs in (None, _INPUTS) else checked_device(outputs))


def _options_of(model: object) -> _Options | None:
    """Return how a model was wrapped, or None where it was not."""
    if isinstance(model, nn.Module) and _KEY in model._forward_pre_hooks:
        return model._forward_pre_hooks[_KEY].options  # type: ignore[attr-defined,no-any-return]
    for value in getattr(model, "__dict__", {}).values():
        if isinstance(value, _Method):
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


# ---- hooks ---------------------------------------------------------------------------------------

# Not one of torch's numbers, which start anew in every process: the next hook that is registered on
# a model that was unpickled there may get the number of one that it brought along, and replace it.
_KEY: Any = "devicekit.wrap"


def _hook_stores(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    return (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    )


def _add_hooks(module: nn.Module, options: _Options) -> None:
    """Do what `register_forward_pre_hook` and `register_forward_hook` do, under our own key."""
    before, before_kwargs, after, after_kwargs, always = _hook_stores(module)
    before[_KEY] = _InputHook(options)
    # To the front, so that other hooks see what forward gets.
    module._forward_pre_hooks.move_to_end(_KEY, last=False)  # type: ignore[attr-defined]
    before_kwargs[_KEY] = True
    after[_KEY] = _OutputHook(options)
    after_kwargs[_KEY] = always[_KEY] = True


class _InputHook:
    """Moves what a module is called with to where the module is."""

    def __init__(self, options: _Options) -> None:
        self.options = options
        self.is_plain = options.methods == ("forward",) and options.outputs != _INPUTS

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if is_dynamo_compiling() or not self.is_plain:
            return self._with_options(module, args, kwargs)
        device = execution_device(module)
        for value in (*args, *kwargs.values()):
            cls = type(value)
            if cls is Tensor:
                if value.device != device:
                    return _moved(args, kwargs, device)
            elif cls not in _SCALARS:
                return _moved(args, kwargs, device)
        return None

    def _with_options(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            _bind_methods(module)
        if "forward" not in self.options.methods:
            return None
        new_args, new_kwargs = _moved(args, kwargs, execution_device(module))
        if self.options.outputs == _INPUTS:
            new_kwargs = _Keywords(new_kwargs)
            new_kwargs.origin = _origin(args, kwargs)
        return new_args, new_kwargs


_SCALARS = frozenset((type(None), bool, int, float, str))


class _Keywords(dict[str, Any]):
    """The keyword arguments of one call, on which its hooks leave each other a note.

    Attributes:
        origin: Where the first tensor came from.
    """

    origin: torch.device | None = None


class _OutputHook:
    """Sends results on, and explains why a forward has failed."""

    def __init__(self, options: _Options) -> None:
        self.outputs = options.outputs if "forward" in options.methods else None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        eager = not is_dynamo_compiling()
        if eager and result is None:  # it has failed, or has nothing to say
            _relay_explained(module, args, kwargs)
            return None
        if self.outputs is None or (eager and id(module) in _inside.get()):
            return None
        return _delivered(result, self.outputs, getattr(kwargs, "origin", None))


def _relay_explained(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise a better error for the one that the forward of a module has just raised, if any."""
    error = sys.exc_info()[1]
    trace = None if error is None else error.__traceback__
    # A forward that returned None may itself have been called while something else was handled.
    if error is None or trace is None or trace.tb_frame.f_locals.get("self") is not module:
        return
    if trace.tb_frame.f_code.co_name != "_call_impl":
        return
    explained = _explained(module, args, kwargs, error)
    if explained is not None:
        raise _Relay(explained)


class _Relay(Exception):  # noqa: N818  # never seen by anybody
    """Carries an error out of a hook that torch calls while a forward fails.

    torch keeps what such a hook raises to itself and warns with its text. Asking for the text
    raises the error, in place of torch's. If torch did not ask, the user would see its own.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def __str__(self) -> str:
        raise self.error


# ---- methods -------------------------------------------------------------------------------------

# The ids of the objects one of whose replaced methods is running in this thread or task: what they
# pass among themselves is no result yet.
_inside: ContextVar[tuple[int, ...]] = ContextVar("devicekit.wrap", default=())


class _Method:
    """A method of one object that moves its arguments first; stands in the object's `__dict__`.

    It holds the object itself and nothing bound to it, so that a copy's method is the copy's own.

    Attributes:
        owner: The object.
        name: The name of the method.
        options: How the object was wrapped.
        previous: What stood there before, or None where the method came from the class.
    """

    def __init__(self, owner: Any, name: str, options: _Options) -> None:
        self.owner = owner
        self.name = self.__name__ = name
        self.options = options
        self.previous = vars(owner).get(name)
        self.__doc__ = self._original().__doc__

    @property
    def __self__(self) -> Any:
        return self.owner

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._original())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = _module_of(self.owner)
        device = None if module is None else execution_device(module)
        new_args, new_kwargs = _moved(args, kwargs, device)
        original = self._original()
        if is_dynamo_compiling():
            result = original(*new_args, **new_kwargs)
            outermost = True
        else:
            outer = _inside.get()
            outermost = id(self.owner) not in outer
            token = _inside.set((*outer, id(self.owner)))
            try:
                result = original(*new_args, **new_kwargs)
            except RuntimeError as error:
                explained = _explained(module, new_args, new_kwargs, error)
                if explained is None:
                    raise
                raise explained from error
            finally:
                _inside.reset(token)
        if self.options.outputs is None or not outermost:
            return result
        origin = _origin(args, kwargs) if self.options.outputs == _INPUTS else None
        return _delivered(result, self.options.outputs, origin)

    def _original(self) -> Any:
        if self.previous is not None:
            return self.previous
        cls = type(self.owner)
        for base in cls.__mro__:
            if self.name in base.__dict__:
                return base.__dict__[self.name].__get__(self.owner, cls)
        return self.owner.__getattr__(self.name)


def _bind_methods(module: nn.Module) -> None:
    """Give a shallow copy, such as a replica that DataParallel makes, methods of its own."""
    state = module.__dict__
    for name, value in list(state.items()):
        if isinstance(value, _Method) and value.owner is not module:
            del state[name]
            state[name] = _Method(module, name, value.options)
            state[name].previous = value.previous


def _module_of(owner: Any) -> nn.Module | None:
    """Return the module itself, or the first that an object holds and that has a device."""
    if isinstance(owner, nn.Module):
        return owner
    for value in vars(owner).values():
        if isinstance(value, nn.Module) and execution_device(value) is not None:
            return value
    for _, leaf in walk(owner, opaque=True, limit=_MAX_OBJECTS):
        if isinstance(leaf, nn.Module) and execution_device(leaf) is not None:
            return leaf
    return None


_MAX_OBJECTS = 10_000  # how many a search for a module looks at, in every call


# ---- what both do --------------------------------------------------------------------------------


def _moved(args: Any, kwargs: Any, device: torch.device | None) -> tuple[Any, Any]:
    """Return the arguments of a call on a device; the very same ones where they all are there."""
    if device is None:
        return args, kwargs
    # In one, so that a tensor that is passed twice stays one; errors say `batch['mask']`.
    call: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    moved = move(call, device)
    if moved is call:
        return args, kwargs
    return tuple(moved[i] for i in range(len(args))), {name: moved[name] for name in kwargs}


def _origin(args: Any, kwargs: Any) -> torch.device | None:
    """Return where the first tensor of a call comes from."""
    call = (*args, *kwargs.values())
    return _traced_device(call) if is_dynamo_compiling() else device_of(call, None)


def _traced_device(x: Any) -> torch.device | None:
    if isinstance(x, Tensor):
        return x.device
    values = x.values() if isinstance(x, (dict, UserDict)) else x
    for value in values if isinstance(x, (dict, UserDict, list, tuple)) else ():
        found = _traced_device(value)
        if found is not None:
            return found
    return None


def _delivered(result: Any, outputs: torch.device | str, origin: torch.device | None) -> Any:
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


def _explained(
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

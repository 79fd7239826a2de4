"""Methods that are replaced on one object, because hooks do not reach them."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from devicekit._inspect import execution_device
from devicekit._tree import walk
from devicekit._wrap.calls import (
    INPUTS,
    INSIDE,
    Options,
    delivered,
    explanation_of,
    moved,
    origin_of,
)

__all__ = ["Method", "bind_methods"]


class Method:
    """A method of one object that moves its arguments first; stands in the object's `__dict__`.

    It holds the object itself and nothing bound to it, so that a copy's method is the copy's own.

    Attributes:
        owner: The object.
        name: The name of the method.
        options: How the object was wrapped.
        previous: What stood there before, or None where the method came from the class.
    """

    def __init__(self, owner: Any, name: str, options: Options, previous: Any) -> None:
        self.owner = owner
        self.name = self.__name__ = name
        self.options = options
        self.previous = previous
        self.__doc__ = self._original().__doc__

    @property
    def __self__(self) -> Any:
        return self.owner

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._original())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = () if is_dynamo_compiling() else INSIDE.get()  # dynamo cannot trace a ContextVar
        result = self._call(outer, args, kwargs)
        outputs = self.options.outputs
        if outputs is None or id(self.owner) in outer:
            return result
        return delivered(result, outputs, origin_of(args, kwargs) if outputs == INPUTS else None)

    def _call(self, outer: tuple[int, ...], args: Any, kwargs: Any) -> Any:
        module = _module_of(self.owner)
        device = None if module is None else execution_device(module)
        args, kwargs = moved(args, kwargs, device)
        if is_dynamo_compiling():
            return self._original()(*args, **kwargs)
        token = INSIDE.set((*outer, id(self.owner)))
        try:
            return self._original()(*args, **kwargs)
        except RuntimeError as error:
            better = explanation_of(module, args, kwargs, error)
            if better is None:
                raise
            raise better from error
        finally:
            INSIDE.reset(token)

    def _original(self) -> Any:
        if self.previous is not None:
            return self.previous
        cls = type(self.owner)
        for base in cls.__mro__:
            if self.name in base.__dict__:
                return base.__dict__[self.name].__get__(self.owner, cls)
        return self.owner.__getattr__(self.name)


def bind_methods(module: nn.Module) -> None:
    """Give a shallow copy, such as a replica that DataParallel makes, methods of its own."""
    state = module.__dict__
    for name, value in list(state.items()):
        if isinstance(value, Method) and value.owner is not module:
            state[name] = Method(module, name, value.options, value.previous)


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

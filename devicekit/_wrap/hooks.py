"""The hooks by which a wrapped module takes its inputs from anywhere."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from devicekit._inspect import execution_device
from devicekit._types import CPU
from devicekit._wrap.calls import (
    INPUTS,
    INSIDE,
    SCALARS,
    Options,
    delivered,
    explanation_of,
    moved,
    origin_of,
)
from devicekit._wrap.methods import bind_methods

__all__ = ["KEY", "add_hooks", "hook_stores"]

# Not one of torch's numbers, which start anew in every process: the next hook that is registered on
# a model that was unpickled there may get the number of one that it brought along, and replace it.
KEY: Any = "devicekit.wrap"


def hook_stores(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """Return the dicts in which a module keeps its hooks, and what it knows of them."""
    return (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    )


def add_hooks(module: nn.Module, options: Options) -> None:
    """Do what `register_forward_pre_hook` and `register_forward_hook` do, under our own key."""
    before, before_kwargs, after, after_kwargs, always = hook_stores(module)
    before[KEY] = _InputHook(options)
    # To the front, so that other hooks see what forward gets.
    module._forward_pre_hooks.move_to_end(KEY, last=False)  # type: ignore[attr-defined]
    before_kwargs[KEY] = True
    outputs = options.outputs if "forward" in options.methods else None
    after[KEY] = _explain if outputs is None else _OutputHook(outputs)
    after_kwargs[KEY] = always[KEY] = True


class _InputHook:
    """Moves what a module is called with to where the module is."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.is_plain = options.methods == ("forward",) and options.outputs != INPUTS

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.is_plain or is_dynamo_compiling():
            return self._with_options(module, args, kwargs)
        device = execution_device(module)
        on_cpu = device == CPU  # whether a tensor is there is asked in a third of the time then
        for values in (args, kwargs.values()):
            for value in values:
                cls = type(value)
                if cls is Tensor:
                    if value.is_cpu if on_cpu else value.device == device:
                        continue
                elif cls in SCALARS:
                    continue
                return moved(args, kwargs, device)
        return None

    def _with_options(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            bind_methods(module)
        if "forward" not in self.options.methods:
            return None
        new_args, new_kwargs = moved(args, kwargs, execution_device(module))
        if self.options.outputs == INPUTS:
            new_kwargs = _Keywords(new_kwargs)
            new_kwargs.origin = origin_of(args, kwargs)
        return new_args, new_kwargs


class _Keywords(dict[str, Any]):
    """The keyword arguments of one call, on which its hooks leave each other a note.

    Attributes:
        origin: Where the first tensor came from.
    """

    origin: torch.device | None = None


def _explain(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
    """Say why a forward has failed."""
    if not is_dynamo_compiling() and result is None:  # it has failed, or has nothing to say
        _relay_explained(module, args, kwargs)


class _OutputHook:
    """Sends results on, and says why a forward has failed."""

    def __init__(self, outputs: torch.device | str) -> None:
        self.outputs = outputs

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        if not is_dynamo_compiling():
            if result is None:
                return _explain(module, args, kwargs, result)
            if id(module) in INSIDE.get():
                return None
        return delivered(result, self.outputs, getattr(kwargs, "origin", None))


def _relay_explained(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise a better error for the one that the forward of a module has just raised, if any."""
    error = sys.exc_info()[1]
    trace = None if error is None else error.__traceback__
    if error is None or trace is None:
        return
    # A forward that returned None may itself have been called while something else was handled.
    frame = trace.tb_frame
    if frame.f_code.co_name != "_call_impl" or frame.f_locals.get("self") is not module:
        return
    better = explanation_of(module, args, kwargs, error)
    if better is not None:
        raise _Relay(better)


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

"""Send data, modules and optimizers to a device."""

from __future__ import annotations

import contextlib
import reprlib
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer

from devicekit._device import auto
from devicekit._device import device as checked_device
from devicekit._inspect import execution_device, strays_of
from devicekit._move.traced import move_traced, outside_graph
from devicekit._move.transfer import CarefulTransfer, Transfer, explain, original
from devicekit._tree import LeafError, paths_of, rebuild
from devicekit._tree.rebuild import (
    HANDLERS,
    NOT_FAST,
    send_whole,
    untangled,
    walk_dict,
    walk_parts,
    walk_state,
    with_state,
)
from devicekit._types import CPU, DeviceLike
from devicekit.errors import DeviceError, InvalidDeviceError, MoveError, NoDeviceError

__all__ = ["move"]

_T = TypeVar("_T")
_NOWHERE: Any = object()
_Device = torch.device


@overload
def move(
    x: _T,
    /,
    *,
    non_blocking: bool | None = ...,
    skip_keys: Collection[str] = ...,
    downcast: bool = ...,
    strict: bool = ...,
) -> _T: ...
@overload
def move(
    x: _T,
    device: DeviceLike,
    /,
    *,
    non_blocking: bool | None = ...,
    skip_keys: Collection[str] = ...,
    downcast: bool = ...,
    strict: bool = ...,
) -> _T: ...
@overload  # what it says is said by the next one; with it, pyright takes a batch of type Any as one
def move(
    model: nn.Module,
    batch: Tensor,
    /,
    *,
    non_blocking: bool | None = ...,
    skip_keys: Collection[str] = ...,
    downcast: bool = ...,
    strict: bool = ...,
) -> Tensor: ...
@overload
def move(
    model: nn.Module,
    batch: _T,
    /,
    *,
    non_blocking: bool | None = ...,
    skip_keys: Collection[str] = ...,
    downcast: bool = ...,
    strict: bool = ...,
) -> _T: ...
def move(
    x: Any,
    where: Any = _NOWHERE,
    /,
    *,
    non_blocking: bool | None = None,
    skip_keys: Collection[str] = (),
    downcast: bool = False,
    strict: bool = False,
) -> Any:
    """Return `x` on a device, or a batch on the device of a model.

    `move(x)` sends `x` to `auto()`, `move(x, device)` to that device, and `move(model, batch)`
    sends the batch to where the model's inputs belong (see `device_of`).

    Containers come back as what they are, with everything they carry, and are never changed: where
    something has to move there is a new one, where nothing has to it is the very same object. A
    tensor or container met twice stays one, and structures may hold themselves. Objects with a
    `.to` of their own are sent by it. Texts, numbers, arrays, types and functions pass through.

    Under `torch.compile` it becomes a part of the graph. Calls with options break the graph, and so
    do containers that tracing would change: deques, registered and unknown types.

    A module moves in place and is returned, and so does an optimizer, whose state goes to its
    parameters. It is checked first and put back if anything fails. Parameters and buffers keep
    their identity, so that an optimizer made before keeps training the model.

    Args:
        x: What to move; a model if a batch follows.
        where: A device, or a batch for the model.
        non_blocking: None lets a copy run on while the program continues exactly where that is
            safe: from pinned memory to a CUDA or XPU device. Such a buffer must not be filled
                again right away; pass False if it is.
            With True, copies towards the CPU are issued together and waited for once. What is
            returned can always be read.
        skip_keys: Keys and attribute names whose values stay where they are, at every depth.
        downcast: Towards MPS, turn float64 into float32 and complex128 into complex64 instead of
            refusing them.
        strict: Raise for an object that holds tensors and that nothing is known about, instead of
            warning.

    Returns:
        `x`, or the batch, there.

    Raises:
        InvalidDeviceError: The second argument is neither a device nor a batch for a model.
        DeviceUnavailableError: The device does not exist here, whether or not there is anything to
            move.
        NoDeviceError: A batch was given for a model that holds no tensor.
        MoveError: Something could not be moved; `path` says what. Nothing has changed.
        TypeError: `skip_keys` holds something that is no name.

    Warns:
        UserWarning: Something that holds tensors was left behind; it is named.

    Examples:
        >>> import devicekit, torch
        >>> model = devicekit.move(torch.nn.Linear(3, 1), "cpu")
        >>> batch = {"x": torch.ones(2, 3), "ids": ["a", "b"]}
        >>> devicekit.move(model, batch) is batch  # everything is there
        True
        >>> devicekit.move(batch, "meta")["x"].device
        device(type='meta')
    """
    cls, kind = type(x), type(where)
    if kind is _Device and cls is Tensor:
        if x.device == where:
            return x
        if where in _HOSTS and not non_blocking and not is_dynamo_compiling():
            try:
                return x.to(where)
            except Exception as error:
                raise explain(error, x, x, where) from error
    if is_dynamo_compiling():
        arguments = (x,) if where is _NOWHERE else (x, where)
        if skip_keys or downcast or strict or non_blocking is not None:
            options = {"non_blocking": non_blocking, "skip_keys": skip_keys}
            return outside_graph(
                move, arguments, options | {"downcast": downcast, "strict": strict}
            )
        return move_traced(move, arguments)
    if kind is _Device or (kind is not dict and _names_device(where)):
        target = _HOSTS.get(where) or checked_device(where)
        handler = HANDLERS.get(cls)
        if (handler is None or handler is send_whole) and issubclass(cls, Optimizer):
            raise InvalidDeviceError(_NO_PLACE_OF_ITS_OWN.format(where))
    elif where is _NOWHERE:
        target, handler = auto(), HANDLERS.get(cls)
    else:
        device = execution_device(x) if isinstance(x, nn.Module) else None
        if device is None or where is None:
            raise _no_model_and_batch(x, where)
        target, x, handler = device, where, HANDLERS.get(kind)
    if non_blocking is None and not skip_keys and not downcast:
        job = Transfer()
        job.device = target
    else:
        skip = _names(skip_keys)
        job = CarefulTransfer(target, non_blocking=non_blocking, skip=skip, downcast=downcast)
        handler = rebuild if skip else handler
    try:
        try:  # as `rebuild` and the handlers of most batches do, whose frames cost
            if handler is walk_dict:
                moved = walk_parts(x, x.items(), dict.copy, job, 0)
            elif handler is walk_state:
                state = x.__dict__
                news = walk_parts(state, state.items(), dict.copy, job, 0)
                moved = x if news is state else with_state(x, news)
            else:
                moved = (handler or rebuild)(x, job, 0)
        except NOT_FAST:
            moved = untangled(x, job)
        if moved is not x:
            job.finish()
        if strict and job.remarks:
            for message, path in _left_behind(x, job):
                raise MoveError(message, path=path, target=target)
    except LeafError as error:
        job.undo()
        raise explain(error.__cause__, error.leaf, x, target) from original(error.__cause__)
    except BaseException:
        job.undo()
        raise
    if job.remarks:
        _warn_of_what_stayed(x, job)
    return moved


# Devices that are always there, and that take whatever comes.
_HOSTS: dict[object, torch.device] = {CPU: CPU, torch.device("meta"): torch.device("meta")}


def _names_device(x: Any) -> bool:
    """Whether it stands for a device: a text or a whole number, of whichever library."""
    return isinstance(x, (str, int)) or (
        hasattr(type(x), "__index__") and not isinstance(x, Tensor)
    )


def _names(skip_keys: Any) -> frozenset[str]:
    names: frozenset[Any] = frozenset([None])
    with contextlib.suppress(TypeError):  # no collection, or of what cannot be a key
        names = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())
    if not all(isinstance(name, str) for name in names):
        msg = (
            f"skip_keys is {reprlib.repr(skip_keys)}: expected the names of keys and attributes, "
            f"such as skip_keys=('labels',)."
        )
        raise TypeError(msg)
    return names


_NO_PLACE_OF_ITS_OWN = (
    "an optimizer has no device of its own: its state belongs where its parameters are, and {!r} "
    "was given. Move the model with move(model, device), then the state with move(optimizer)."
)


def _no_model_and_batch(model: Any, batch: Any) -> DeviceError:
    """Return the error for two things that are no model with a device, and a batch."""
    if isinstance(model, nn.Module) and batch is not None:
        msg = (
            f"{type(model).__name__} holds no tensor, so it has no device to move a batch to. "
            f"Name one: move(batch, device)."
        )
        return NoDeviceError(msg)
    if isinstance(model, (torch.device, str, int)):
        name = str(model)
        msg = f"the data comes first: write move(batch, {name!r}), not move({name!r}, batch)."
    elif isinstance(batch, nn.Module):
        msg = "the model comes first: write move(model, batch), not move(batch, model)."
    else:
        msg = (
            f"{reprlib.repr(batch)} is neither a device nor a batch for a model: expected move(x), "
            f"move(x, device) or move(model, batch). Leave it out for the best device here."
        )
    return InvalidDeviceError(msg)


def _left_behind(x: Any, job: Transfer) -> Iterator[tuple[str, str]]:
    """Yield what to say of objects that nothing is known about, with the path of the first."""
    strangers = list({id(stranger): stranger for stranger in job.strangers}.values())
    if strangers:
        paths = paths_of(strangers[:_MAX_NAMED], x, "batch")
        kinds = ", ".join(sorted({type(stranger).__name__ for stranger in strangers}))
        yield _not_moved(paths, len(strangers), f" ({kinds})", f"to {job.device}"), paths[0]
    paths = [path for rewrite in job.rewrites for path in rewrite.left]
    if paths:
        yield _not_moved(paths[:_MAX_NAMED], len(paths), "", "to its parameter"), paths[0]


_MAX_NAMED = 5


def _not_moved(paths: Sequence[str], number: int, kinds: str, where: str) -> str:
    named = ", ".join(paths) + (f" and {number - len(paths)} more" if number > len(paths) else "")
    verbs = "holds tensors and was" if number == 1 else "hold tensors and were"
    return (
        f"{named}{kinds} {verbs} not moved {where}: move() does not know the type. "
        f"Give it a .to(device) method, or call devicekit.register()."
    )


def _warn_of_what_stayed(x: Any, job: Transfer) -> None:
    for message, _ in _left_behind(x, job):
        warnings.warn(message, stacklevel=3)
    for relocation in job.relocations:
        module = relocation.module
        names = [
            f"{path} ({tensor.device})"
            for path, tensor in strays_of(module)
            if tensor.device != job.device and tensor.dim() > 0
        ]
        if names:
            msg = (
                f"{type(module).__name__} was moved to {job.device}, but not "
                f"{', '.join(names[:5])}: plain attributes, which Module.to does not move. "
                f"Make them buffers with register_buffer(), or move them yourself."
            )
            warnings.warn(msg, stacklevel=3)

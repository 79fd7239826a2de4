"""Rebuild a structure with its tensors replaced: the hot path of `move`.

Two ways through a structure. `walk_parts` is the fast one: it recurses, compares each tensor's
device in the loop, copies a container when its first part really changes, and keeps a memo only of
what changed, so that a structure that is there already costs no allocation. `untangled` is for what
that cannot do: structures that hold themselves, that are nested deeper than Python recurses
or that share so much that walking every path would not end, and calls that leave keys out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from devicekit._tree.job import Job
from devicekit._tree.kinds import (
    STRUCTURE,
    Kind,
    all_in_dict,
    is_atom,
    kind_of,
    moves_itself,
    registered,
)
from devicekit._tree.state import has_state
from devicekit._tree.tangled import LeafError, apply_to_parts, untangle
from devicekit._tree.walk import holds_tensors
from devicekit._types import CPU

__all__ = [
    "HANDLERS",
    "NOT_FAST",
    "LeafError",
    "forget_types",
    "rebuild",
    "send_whole",
    "untangled",
    "walk_dict",
    "walk_parts",
    "walk_state",
    "with_state",
]

Handler = Callable[[Any, "Job", int], Any]

_MAX_DEPTH = 200  # levels that the fast way goes down; each takes two frames of Python's thousand
_MAX_DEEP = 10_000  # containers on every fourth level, before it looks as if it would not end


class _TangledError(Exception):
    """The structure is not for the fast way."""


NOT_FAST = (_TangledError, RecursionError)
"""What the fast way ends in where `untangled` has to go another one."""


def rebuild(x: Any, job: Job, depth: int = 0) -> Any:
    """Return `x` with its tensors on the job's device: the same object where they all are there.

    Raises:
        LeafError: A tensor or an object could not be sent.
    """
    handler = _handler_of(type(x))
    if handler is None:
        if issubclass(type(x), weakref.ProxyTypes):
            msg = "a weak proxy only stands for an object; pass the object itself"
            raise LeafError(x) from TypeError(msg)
        return x
    try:
        thorough = job.skip and handler is not _stranger
        return untangled(x, job) if thorough else handler(x, job, depth)
    except NOT_FAST:
        return untangled(x, job)


# ---- the fast way --------------------------------------------------------------------------------


def walk_parts(
    x: Any,
    parts: Iterable[tuple[Any, Any]],
    thaw: Callable[[Any], Any],
    job: Job,
    depth: int,
) -> Any:
    """Return `x`, or `thaw(x)` with the parts that changed replaced."""
    if depth & 3 == 3:  # on every fourth level: does this end, and is Python's stack enough?
        job.deep += 1
        if depth > _MAX_DEPTH or job.deep > _MAX_DEEP:
            raise _TangledError
    device = job.device
    on_cpu = device is CPU
    memo: dict[int, Any] | None = None
    plain = True
    out = x
    for key, value in parts:
        cls = type(value)
        if cls is Tensor:
            if value.is_cpu:  # a question that takes half the time of comparing devices
                if on_cpu:
                    continue
            elif value.device == device:
                continue
            if memo is None:
                memo = job.begin()
                plain = job.plain
            ref = id(value)
            if ref in memo:
                new = memo[ref]
            else:
                try:
                    new = value.to(device) if plain else job.send(value)
                except RecursionError:
                    raise
                except Exception as error:
                    raise LeafError(value) from error
                memo[ref] = new
        else:
            try:
                handler = HANDLERS[cls]
            except KeyError:
                handler = _learn(cls)
            if handler is None:
                continue
            new = job.memo.get(id(value)) if job.begun else None
            if new is None:
                # The most frequent two without the frame of their handlers.
                if cls is dict:
                    new = walk_parts(value, value.items(), dict.copy, job, depth + 1)
                elif handler is _tuple_subclass:
                    new = walk_parts(value, enumerate(value), list, job, depth + 1)
                    if new is not value:
                        new = tuple.__new__(cls, new)
                else:
                    new = handler(value, job, depth + 1)
                if new is value:
                    continue
                if memo is None:
                    memo = job.begin()
                    plain = job.plain
                memo[id(value)] = new
        if out is x:
            out = thaw(x)
        out[key] = new
    return out


def _tensor(x: Tensor, job: Job, depth: int) -> Tensor:
    """Send a tensor; in containers plain ones are sent by `walk_parts` itself."""
    if x.device == job.device:
        return x
    try:
        return x.to(job.device) if job.is_plain() else job.send(x)
    except RecursionError:
        raise
    except Exception as error:
        raise LeafError(x) from error


def walk_dict(x: dict[Any, Any], job: Job, depth: int) -> Any:
    return walk_parts(x, x.items(), dict.copy, job, depth)


def _list(x: list[Any], job: Job, depth: int) -> Any:
    if len(x) > _LONG and _ATOMS.issuperset(map(type, x)):  # long lists of labels are read in C
        return x
    return walk_parts(x, enumerate(x), list, job, depth)


def _tuple(x: tuple[Any, ...], job: Job, depth: int) -> Any:
    if len(x) > _LONG and _ATOMS.issuperset(map(type, x)):
        return x
    out = walk_parts(x, enumerate(x), list, job, depth)
    return x if out is x else tuple(out)


_LONG = 32


def _tuple_subclass(x: Any, job: Job, depth: int) -> Any:
    out = walk_parts(x, enumerate(x), list, job, depth)
    return x if out is x else tuple.__new__(type(x), out)


def _tuple_with_iter(x: Any, job: Job, depth: int) -> Any:
    """One whose own `__iter__` may show something else than what it holds."""
    out = walk_parts(x, enumerate(tuple.__iter__(x)), _thawed, job, depth)
    return x if out is x else tuple.__new__(type(x), out)


def _thawed(x: tuple[Any, ...]) -> list[Any]:
    return list(tuple.__iter__(x))


def walk_state(x: Any, job: Job, depth: int) -> Any:
    """A dataclass, a `UserDict` or the like, all of whose state is in its `__dict__`."""
    state = x.__dict__
    out = walk_parts(state, state.items(), dict.copy, job, depth)
    return x if out is state else with_state(x, out)


def with_state(x: Any, state: dict[str, Any]) -> Any:
    """Return a twin of an object that keeps all that it holds in its `__dict__`, with another."""
    twin = object.__new__(type(x))
    twin.__dict__.update(state)
    return twin


def _other(kind: Kind) -> Handler:
    def handler(x: Any, job: Job, depth: int) -> Any:
        changes = walk_parts(x, kind.parts(x), _no_changes, job, depth)
        if changes is x:
            return x
        try:
            return kind.rebuild(x, changes)
        except Exception as error:  # whatever the hash of a part raises
            raise LeafError(x) from error

    return handler


def _no_changes(x: Any) -> dict[Any, Any]:
    return {}


def send_whole(x: Any, job: Job, depth: int) -> Any:
    try:
        return job.send_object(x)
    except (LeafError, RecursionError):
        raise
    except Exception as error:
        raise LeafError(x) from error


def _registered(x: Any, job: Job, depth: int) -> Any:
    if depth & 3 == 3:  # as in `walk_parts`
        job.deep += 1
        if depth > _MAX_DEPTH or job.deep > _MAX_DEEP:
            raise _TangledError
    changed = False

    def move_part(part: Any) -> Any:
        nonlocal changed
        handler = _handler_of(type(part))
        if handler is None:
            return part
        new = job.memo.get(id(part)) if job.begun else None
        if new is None:
            new = handler(part, job, depth + 1)
            if new is part:
                return part
            job.begin()[id(part)] = new
            job.kept = (part, job.kept)  # it may have been made for this call only
        changed = True
        return new

    new = apply_to_parts(x, move_part, passing=NOT_FAST)
    return new if changed else x


def _stranger(x: Any, job: Job, depth: int) -> Any:
    if depth == 0 and hasattr(type(x), "__next__"):  # it is all that there is to move
        msg = "a move would use up an iterator; make a list of it, or use prefetch()"
        raise LeafError(x) from TypeError(msg)
    if holds_tensors(x, job.device):
        job.strangers += (x,)
        job.remarks = True
    return x


# ---- which way for which type --------------------------------------------------------------------


def _learn(cls: type) -> Handler | None:
    """Return what to do with a type that is met for the first time, and remember it."""
    if len(HANDLERS) > _MAX_TYPES:  # classes made anew for every batch must not pile up
        forget_types()
    handler = _handler(cls)
    if handler is None:
        _ATOMS.add(cls)
    # A parametrized module has a class of its own, which refers to it: remembered, both would stay.
    if not issubclass(cls, torch.nn.Module):
        HANDLERS[cls] = handler
    return handler


def _handler(cls: type) -> Handler | None:
    if registered(cls) is not None:
        return _registered
    if issubclass(cls, Tensor):
        return _tensor
    # A class may have a `.to` that its objects have. What is held weakly is not theirs.
    if issubclass(cls, (type, *weakref.ProxyTypes)):
        return None
    if moves_itself(cls):
        return send_whole
    kind = kind_of(cls)
    if kind is not None:
        return _fast_handler(cls) or _other(kind)
    return None if is_atom(cls) else _stranger


def _fast_handler(cls: type) -> Handler | None:
    if issubclass(cls, tuple) and kind_of(cls) is not STRUCTURE and not has_state(cls):
        own = cls.__iter__ is not tuple.__iter__
        return _tuple_with_iter if own else _tuple_subclass
    return walk_state if all_in_dict(cls) else None


def forget_types() -> None:
    """Forget what was learnt about types: something was registered, or there are too many."""
    HANDLERS.clear()
    HANDLERS.update({Tensor: _tensor, dict: walk_dict, list: _list, tuple: _tuple})
    HANDLERS.update(dict.fromkeys(_SCALARS))
    _ATOMS.clear()
    _ATOMS.update(_SCALARS)


_MAX_TYPES = 4096
_SCALARS = (type(None), bool, int, float, complex, str, bytes, bytearray)
HANDLERS: dict[type, Handler | None] = {}
"""What sends objects of a type, of the types met so far; None where there is nothing to send."""
_ATOMS: set[type] = set()
forget_types()


# ---- the thorough way ----------------------------------------------------------------------------


def untangled(root: Any, job: Job) -> Any:
    """Do what `rebuild` promises for any shape of structure; see tangled.py."""
    return untangle(root, job, _handler_of)


def _handler_of(cls: type) -> Handler | None:
    try:
        return HANDLERS[cls]
    except KeyError:
        return _learn(cls)

"""Which types are containers, and how each kind is taken apart and put together again.

A container is rebuilt from the inside: its items and attributes are set on a bare twin, so that no
`__init__`, `__post_init__` or `__setitem__` of somebody else's class runs again, and whatever else
the container carries comes along.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import logging
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from devicekit._types import Apply

__all__ = [
    "STRUCTURE",
    "Attribute",
    "Kind",
    "all_in_dict",
    "has_state",
    "is_atom",
    "kind_of",
    "moves_itself",
    "parts_of",
    "register",
    "registered",
    "state_of",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Attribute:
    """The key of a part that is an attribute of its container, and not an item of it."""

    name: str


Parts = Iterable[tuple[Any, Any]]
Changes = Mapping[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """How a kind of container is taken apart and put together.

    Attributes:
        parts: `parts(x)` gives each part of `x` with its key: an `Attribute`, or the key or index
            of an item.
        rebuild: `rebuild(x, changes)` gives a copy of `x` with some parts replaced; of kinds that
            may hold themselves, `rebuild(x, changes, twin)` fills the twin that `hollow` made.
        hollow: `hollow(x)` gives an empty object of the same type, or None where a container of
            this kind cannot hold itself.
    """

    parts: Callable[[Any], Parts]
    rebuild: Callable[..., Any]
    hollow: Callable[[Any], Any] | None = None


def kind_of(cls: type) -> Kind | None:
    """Return the kind of a container class, or None where it is no container that is known here."""
    if issubclass(
        cls, (str, bytes, bytearray)
    ):  # sequences to Python, one value each to everybody else
        return None
    for base, kind in _BUILTIN.items():
        if issubclass(cls, base):
            return kind
    if issubclass(cls, tuple):
        return STRUCTURE if _is_structure(cls) else _TUPLE
    if (
        issubclass(cls, _BY_STATE)
        or dataclasses.is_dataclass(cls)
        or hasattr(cls, "__attrs_attrs__")
    ):
        return _STATE
    # A mapping or sequence written in Python keeps its items in attributes, whatever its __init__
    # takes.
    if issubclass(cls, (collections.abc.Mapping, collections.abc.Sequence)) and has_state(cls):
        return _STATE
    return None


def register(cls: type, apply: Apply[Any]) -> None:
    """Treat objects of a class, and of its subclasses, as `apply` says."""
    _REGISTERED[cls] = apply


def registered(cls: type) -> Apply[Any] | None:
    """Return what was registered for a class or the nearest of its bases."""
    return next((_REGISTERED[base] for base in cls.__mro__ if base in _REGISTERED), None)


_REGISTERED: dict[type, Apply[Any]] = {}


def moves_itself(cls: type) -> bool:
    """Return whether objects of a class move as a whole: by their own `.to`, or by torch's rules.

    A `UserDict` is not: the `.to` of Hugging Face's `BatchEncoding` changes the caller's batch in
    place.
    """
    if issubclass(cls, (torch.nn.Module, torch.optim.Optimizer)):
        return True
    return callable(getattr(cls, "to", None)) and not issubclass(cls, collections.UserDict)


# ---- attributes ----------------------------------------------------------------------------------


def has_state(cls: type) -> bool:
    """Return whether objects of a class can have attributes that Python code sets."""
    return cls.__dictoffset__ != 0 or bool(_slots(cls))


def all_in_dict(cls: type) -> bool:
    """Return whether a container class keeps all that it holds in the `__dict__` of its objects."""
    return kind_of(cls) is _STATE and _builtin_base(cls) is object and not _slots(cls)


def state_of(x: object) -> Iterator[tuple[Attribute, Any]]:
    """Yield the attributes that an object itself holds, in its `__dict__` and in slots."""
    for name, value in getattr(x, "__dict__", {}).items():
        yield Attribute(name), value
    for name in _slots(type(x)):  # type: ignore[arg-type]  # mypy: a class is hashable
        value = _slot(x, name)
        if value is not _EMPTY:
            yield Attribute(name), value


@functools.lru_cache(maxsize=1024)
def _slots(cls: type[Any]) -> tuple[str, ...]:
    names: list[str] = []
    for base in cls.__mro__:
        declared = base.__dict__.get("__slots__", ())
        for name in [declared] if isinstance(declared, str) else declared:
            if name in ("__dict__", "__weakref__"):
                continue
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(names)


def _slot(x: object, name: str) -> Any:
    try:
        return object.__getattribute__(x, name)
    except AttributeError:  # nothing was put into it yet
        return _EMPTY


_EMPTY = object()


def _bare(x: Any, *args: Any) -> Any:
    """Return a new object of the type of `x`, made by the built-in class it descends from."""
    cls = type(x)
    return _builtin_base(cls).__new__(cls, *args)


def _builtin_base(cls: type) -> Any:
    return next(c for c in cls.__mro__ if "__new__" in c.__dict__ and not c.__flags__ & _HEAP_TYPE)


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a `class` statement


def _copy_state(x: object, twin: object, changes: Changes) -> None:
    for key, value in state_of(x):
        object.__setattr__(twin, key.name, changes.get(key, value))


# ---- items ---------------------------------------------------------------------------------------


def _mapping_parts(x: Any) -> Iterator[tuple[Any, Any]]:
    yield from dict.items(x)
    yield from state_of(x)


def _rebuild_dict(x: Any, changes: Changes, twin: Any = None) -> Any:
    twin = _bare(x) if twin is None else twin
    base = collections.OrderedDict if isinstance(x, collections.OrderedDict) else dict
    for key, value in dict.items(x):
        base.__setitem__(twin, key, changes.get(key, value))
    if isinstance(x, collections.defaultdict):
        twin.default_factory = x.default_factory
    _copy_state(x, twin, changes)
    return twin


def _sequence_parts(x: Any) -> Iterator[tuple[Any, Any]]:
    yield from enumerate(x)
    yield from state_of(x)


def _replaced(x: Iterable[Any], changes: Changes) -> list[Any]:
    return [changes.get(i, value) for i, value in enumerate(x)]


def _rebuild_list(x: Any, changes: Changes, twin: Any = None) -> Any:
    twin = _bare(x) if twin is None else twin
    list.extend(twin, _replaced(list.__iter__(x), changes))
    _copy_state(x, twin, changes)
    return twin


def _hollow_deque(x: Any) -> Any:
    twin = _bare(x)
    collections.deque.__init__(twin, (), x.maxlen)
    return twin


def _rebuild_deque(x: Any, changes: Changes, twin: Any = None) -> Any:
    twin = _hollow_deque(x) if twin is None else twin
    collections.deque.extend(twin, _replaced(x, changes))
    _copy_state(x, twin, changes)
    return twin


def _rebuild_set(x: Any, changes: Changes) -> Any:
    items = _replaced(x, changes)
    if isinstance(x, frozenset):
        twin = _bare(x, items)
    else:
        twin = _bare(x)
        set.update(twin, items)
    _copy_state(x, twin, changes)
    return twin


def _rebuild_tuple(x: Any, changes: Changes) -> Any:
    twin = _bare(x, _replaced(x, changes))
    _copy_state(x, twin, changes)
    return twin


def _is_structure(cls: type) -> bool:
    """Whether it is one of C's named tuples, such as `torch.return_types.max`."""
    return hasattr(cls, "n_sequence_fields")


def _rebuild_proxy(x: Any, changes: Changes) -> Any:
    return types.MappingProxyType({key: changes.get(key, value) for key, value in x.items()})


def _rebuild_structure(x: Any, changes: Changes) -> Any:
    return type(x)(_replaced(x, changes))


def _rebuild_state(x: Any, changes: Changes, twin: Any = None) -> Any:
    twin = _bare(x) if twin is None else twin
    _copy_state(x, twin, changes)
    return twin


_STATE = Kind(state_of, _rebuild_state, _bare)
_TUPLE = Kind(_sequence_parts, _rebuild_tuple)
STRUCTURE = Kind(enumerate, _rebuild_structure)
_BUILTIN = {
    dict: Kind(_mapping_parts, _rebuild_dict, _bare),
    list: Kind(_sequence_parts, _rebuild_list, _bare),
    collections.deque: Kind(_sequence_parts, _rebuild_deque, _hollow_deque),
    set: Kind(_sequence_parts, _rebuild_set),
    frozenset: Kind(_sequence_parts, _rebuild_set),
    types.MappingProxyType: Kind(lambda x: x.items(), _rebuild_proxy),
}
_BY_STATE = (types.SimpleNamespace, argparse.Namespace)


# ---- what is no container ------------------------------------------------------------------------


def is_atom(cls: type) -> bool:
    """Return whether an object of this class holds no tensors that anybody could expect to move.

    Numbers, texts, arrays, types, modules, functions: whatever has no attributes of its own, or is
    code.
    """
    if issubclass(cls, _ATOMS):
        return True
    return not issubclass(cls, (functools.partial, collections.abc.MappingView)) and not has_state(
        cls
    )


_ATOMS = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.GeneratorType,
    enum.Enum,
    logging.Logger,
    threading.Thread,
)


def parts_of(x: Any) -> Parts:
    """Return the parts of any object with their keys, to look for tensors in them."""
    apply = registered(type(x))
    if apply is not None:
        found: list[Any] = []

        def look(part: Any) -> Any:
            found.append(part)
            return part

        apply(x, look)
        return enumerate(found)
    kind = kind_of(type(x))
    if kind is not None:
        return kind.parts(x)
    if isinstance(x, functools.partial):
        return [(Attribute("args"), x.args), (Attribute("keywords"), x.keywords), *state_of(x)]
    if isinstance(x, collections.abc.MappingView):
        return enumerate(list(x))  # type: ignore[call-overload]
    return state_of(x)

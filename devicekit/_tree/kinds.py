"""Which types are containers, and how each kind is taken apart and put together again.

A container is rebuilt from the inside: its items and attributes are set on a bare twin, so that no
`__init__`, `__post_init__` or `__setitem__` of somebody else's class runs again, and whatever else
the container carries comes along.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import gc
import logging
import threading
import types
import weakref
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from devicekit._tree.state import (
    Attribute,
    Storage,
    bare,
    builtin_base,
    copy_state,
    has_slots,
    has_state,
    per_class,
    state_of,
)
from devicekit._types import Apply

__all__ = [
    "STRUCTURE",
    "Kind",
    "all_in_dict",
    "is_atom",
    "is_opaque",
    "kind_of",
    "moves_itself",
    "name_of",
    "parts_of",
    "register",
    "registered",
]


Parts = Iterable[tuple[Any, Any]]
Changes = Mapping[Any, Any]


class Kind(NamedTuple):
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
    if issubclass(cls, _NO_CONTAINERS):
        return None
    for base, kind in _BUILTIN.items():
        if issubclass(cls, base):
            return kind
    if issubclass(cls, tuple):
        return STRUCTURE if _is_structure(cls) else _TUPLE
    if builtin_base(cls) not in (object, types.SimpleNamespace):
        return None  # a number, an exception: more than its attributes, and nobody's container
    if dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__"):
        return _STATE
    # A mapping or sequence written in Python keeps its items in attributes, whatever its __init__
    # takes.
    return _STATE if issubclass(cls, _BY_STATE) and has_state(cls) else None


def register(cls: type, apply: Apply[Any]) -> None:
    """Treat objects of a class, and of its subclasses, as `apply` says."""
    _REGISTERED[cls] = apply


def registered(cls: type) -> Apply[Any] | None:
    """Return what was registered for a class or the nearest of its bases."""
    return next((_REGISTERED[base] for base in cls.__mro__ if base in _REGISTERED), None)


_REGISTERED: dict[type, Apply[Any]] = {}


def all_in_dict(cls: type) -> bool:
    """Return whether a container class keeps all that it holds in the `__dict__` of its objects."""
    return kind_of(cls) is _STATE and builtin_base(cls) is object and not has_slots(cls)


def moves_itself(cls: type) -> bool:
    """Return whether objects of a class move as a whole: by their own `.to`, or by torch's rules.

    A `UserDict` is not: the `.to` of Hugging Face's `BatchEncoding` changes the caller's batch in
    place. Nor is a single value, such as a number with a unit, whose `.to` means something else.
    """
    if issubclass(cls, (torch.nn.Module, torch.optim.Optimizer)):
        return True
    return callable(getattr(cls, "to", None)) and not issubclass(cls, _VALUES)


_VALUES = (
    *(collections.UserDict, enum.Enum, str, bytes, bytearray, int, float, complex),
    *(datetime.date, datetime.time, datetime.timedelta),
)


# ---- items ---------------------------------------------------------------------------------------


def _dict_items(x: Any) -> Iterable[tuple[Any, Any]]:
    # Of an OrderedDict, the items of the dict beneath may be in another order.
    if isinstance(x, collections.OrderedDict):
        return collections.OrderedDict.items(x)
    return dict.items(x)


def _mapping_parts(x: Any) -> Iterator[tuple[Any, Any]]:
    yield from _dict_items(x)
    yield from state_of(x)


def _rebuild_dict(x: Any, changes: Changes, twin: Any = None) -> Any:
    twin = bare(x) if twin is None else twin
    base = collections.OrderedDict if isinstance(x, collections.OrderedDict) else dict
    for key, value in _dict_items(x):
        base.__setitem__(twin, key, changes.get(key, value))
    if isinstance(x, collections.defaultdict):
        object.__setattr__(twin, "default_factory", x.default_factory)
    copy_state(x, twin, changes)
    return twin


def _items(x: Any) -> Iterator[Any]:
    """Iterate as the built-in class does; a subclass may show something else than what it holds."""
    return _iterating(type(x))(x)  # type: ignore[no-any-return]


@per_class
def _iterating(cls: type[Any]) -> Any:
    sequences = (list, tuple, collections.deque, set, frozenset)
    return next(base for base in sequences if issubclass(cls, base)).__iter__


def _sequence_parts(x: Any) -> Iterator[tuple[Any, Any]]:
    yield from enumerate(_items(x))
    yield from state_of(x)


def _replaced(x: Any, changes: Changes) -> list[Any]:
    return [changes.get(i, value) for i, value in enumerate(_items(x))]


def _rebuild_list(x: Any, changes: Changes, twin: Any = None) -> Any:
    twin = bare(x) if twin is None else twin
    list.clear(twin)  # a twin may be filled in part before, where something asks for its hash
    list.extend(twin, _replaced(x, changes))
    copy_state(x, twin, changes)
    return twin


def _hollow_deque(x: Any) -> Any:
    twin = bare(x)
    collections.deque.__init__(twin, (), x.maxlen)
    return twin


def _rebuild_deque(x: Any, changes: Changes, twin: Any = None) -> Any:
    twin = _hollow_deque(x) if twin is None else twin
    collections.deque.clear(twin)
    collections.deque.extend(twin, _replaced(x, changes))
    copy_state(x, twin, changes)
    return twin


def _rebuild_set(x: Any, changes: Changes, twin: Any = None) -> Any:
    twin = bare(x) if twin is None else twin
    set.update(twin, _replaced(x, changes))
    copy_state(x, twin, changes)
    return twin


def _rebuild_tuple(x: Any, changes: Changes) -> Any:
    """Of a tuple, or of a frozenset."""
    twin = bare(x, _replaced(x, changes))
    copy_state(x, twin, changes)
    return twin


def _is_structure(cls: type) -> bool:
    """Whether it is one of C's named tuples, such as `torch.return_types.max`."""
    return hasattr(cls, "n_sequence_fields")


def _proxy_parts(x: Any) -> Parts:
    # Python shows the mapping behind a proxy to nobody else, and it may be shared.
    return [(_BEHIND, gc.get_referents(x)[0])]


def _rebuild_proxy(x: Any, changes: Changes) -> Any:
    return types.MappingProxyType(changes[_BEHIND])


_BEHIND = Storage("")


def _rebuild_structure(x: Any, changes: Changes) -> Any:
    return type(x)(_replaced(x, changes))


def _rebuild_state(x: Any, changes: Changes, twin: Any = None) -> Any:
    twin = bare(x) if twin is None else twin
    copy_state(x, twin, changes)
    return twin


_STATE = Kind(state_of, _rebuild_state, bare)
_TUPLE = Kind(_sequence_parts, _rebuild_tuple)
STRUCTURE = Kind(enumerate, _rebuild_structure)
_BUILTIN = {
    dict: Kind(_mapping_parts, _rebuild_dict, bare),
    list: Kind(_sequence_parts, _rebuild_list, bare),
    collections.deque: Kind(_sequence_parts, _rebuild_deque, _hollow_deque),
    set: Kind(_sequence_parts, _rebuild_set, bare),
    frozenset: Kind(_sequence_parts, _rebuild_tuple),
    types.MappingProxyType: Kind(_proxy_parts, _rebuild_proxy),
}
_BY_STATE = (
    types.SimpleNamespace,
    argparse.Namespace,
    abc.Mapping,
    abc.Sequence,
)
_NO_CONTAINERS = (
    *(str, bytes, bytearray),  # sequences to Python, one value each to everybody else
    enum.Enum,  # there is one of each member
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary),  # what they hold is not theirs
)


# ---- what is no container ------------------------------------------------------------------------


def is_atom(cls: type) -> bool:
    """Return whether an object of this class holds no tensors that anybody could expect to move.

    Numbers, texts, arrays, types, modules, functions: whatever holds nothing that Python knows of,
    or is code.
    """
    return issubclass(cls, _ATOMS) or not (has_state(cls) or is_opaque(cls))


def is_opaque(cls: type) -> bool:
    """Return whether objects of a class hold others and have no attributes to see them by.

    As iterators do, and other classes written in C. Python's garbage collector sees what they hold.
    """
    if has_state(cls) or any("__call__" in base.__dict__ for base in cls.__mro__):
        return False  # a method of a tensor is code, and no holder of it
    return bool(cls.__flags__ & _HAVE_GC)


_HAVE_GC = 1 << 14  # Py_TPFLAGS_HAVE_GC


_ATOMS = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    slice,
    enum.Enum,
    logging.Logger,
    threading.Thread,
)


def name_of(key: Any, container: Any) -> str | None:
    """Return the name that the caller has for a part, or None where it goes by a number."""
    if isinstance(key, Attribute):
        return None if isinstance(key, Storage) else key.name
    if isinstance(container, tuple):
        names: tuple[str, ...] = getattr(container, "_fields", ())
        names = names or getattr(container, "__match_args__", ())  # of one of C's
        return str(names[key]) if key < len(names) else None
    return key if isinstance(key, str) else None


def parts_of(x: Any) -> Parts:
    """Return the parts of any object with their keys, to look for tensors in them."""
    cls = type(x)
    apply = registered(cls)
    if apply is not None:
        found: list[Any] = []

        def look(part: Any) -> Any:
            found.append(part)
            return part

        apply(x, look)
        return enumerate(found)
    kind = kind_of(cls)
    if kind is not None:
        return kind.parts(x)
    if issubclass(cls, functools.partial):
        return [(Attribute("args"), x.args), (Attribute("keywords"), x.keywords), *state_of(x)]
    if issubclass(cls, abc.MappingView):
        return enumerate(list(x))
    if issubclass(cls, BaseException):
        return [(Attribute("args"), x.args), *state_of(x)]
    return state_of(x)

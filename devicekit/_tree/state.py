"""The attributes that an object holds, read and copied without running any code of its class."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

__all__ = [
    "Attribute",
    "Storage",
    "bare",
    "builtin_base",
    "copy_state",
    "has_slots",
    "has_state",
    "per_class",
    "state_of",
]

_T = TypeVar("_T")


def per_class(fn: Callable[[type[Any]], _T]) -> Callable[[type[Any]], _T]:
    """Make a function remember what it said of the last thousand classes."""
    return functools.lru_cache(maxsize=1024)(fn)  # type: ignore[return-value]  # they are hashable


class Attribute:
    """The key of a part that is an attribute of its container, and not an item of it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attribute) and other.name == self.name

    def __hash__(self) -> int:
        return hash((Attribute, self.name))


class Storage(Attribute):
    """An attribute in which a class of the standard library keeps its items.

    No caller means it: of a `UserDict` with a key `"data"`, `skip_keys` means the key.
    """

    __slots__ = ()


_STORAGE: tuple[tuple[type, str], ...] = (
    (collections.UserDict, "data"),
    (collections.UserList, "data"),
    (collections.ChainMap, "maps"),
)


def has_state(cls: type) -> bool:
    """Return whether objects of a class can have attributes that Python code sets."""
    return cls.__dictoffset__ != 0 or has_slots(cls)


def has_slots(cls: type) -> bool:
    """Return whether objects of a class have attributes outside their `__dict__`."""
    return bool(_slots(cls))


def state_of(x: object) -> Iterator[tuple[Attribute, Any]]:
    """Yield the attributes that an object itself holds, in its `__dict__` and in slots."""
    yield from _dict_state(x)
    yield from _slot_state(x)


def copy_state(x: Any, twin: Any, changes: Mapping[Any, Any]) -> None:
    """Give a twin the attributes of `x`, some of them replaced."""
    state = {key.name: changes.get(key, value) for key, value in _dict_state(x)}
    if state:
        twin.__dict__.update(state)
    elif getattr(x, "__dict__", None) is x:
        object.__setattr__(twin, "__dict__", twin)
    slots = _slots(type(x))
    for key, value in _slot_state(x):
        slots[key.name].__set__(twin, changes.get(key, value))


def bare(x: Any, *args: Any) -> Any:
    """Return a new object of the type of `x`, made by the built-in class it descends from."""
    cls = type(x)
    return builtin_base(cls).__new__(cls, *args)


@per_class
def builtin_base(cls: type[Any]) -> Any:
    """Return the class written in C whose `__new__` makes objects of a class."""
    # Only there it is a built-in function.
    news = ((base, base.__dict__.get("__new__")) for base in cls.__mro__)
    return next(base for base, new in news if isinstance(new, types.BuiltinFunctionType))


def _dict_state(x: object) -> Iterator[tuple[Attribute, Any]]:
    try:
        state = getattr(x, "__dict__", None)
    except Exception:  # a property of its own; what is behind it nobody can know
        return
    if not isinstance(state, dict) or state is x:  # a dict may be its own `__dict__`
        return
    storage = next((name for base, name in _STORAGE if isinstance(x, base)), None)
    for name, value in state.items():
        yield (Storage(name) if name == storage else Attribute(name)), value


def _slot_state(x: object) -> Iterator[tuple[Attribute, Any]]:
    for name, slot in _slots(type(x)).items():
        # The descriptor is asked, and not the object, whose class may have a property of that name.
        try:
            value = slot.__get__(x)
        except AttributeError:  # nothing was put into it yet
            continue
        yield Attribute(name), value


@per_class
def _slots(cls: type[Any]) -> dict[str, Any]:
    """Return the slots that Python code has declared, by name as it is mangled."""
    return {
        name: slot
        for base in reversed(cls.__mro__)
        if "__slots__" in base.__dict__
        for name, slot in base.__dict__.items()
        if isinstance(slot, types.MemberDescriptorType)
    }

"""A sample of each kind of container that the library knows, of classes with a mind of their own.

`CONTAINERS[kind](a, b)` holds two parts. What runs of the classes' own code is noted in `CALLS`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import attrs

__all__ = [
    "CALLS",
    "CONTAINERS",
    "Attrs",
    "Frozen",
    "FrozenSlotted",
    "NamedPair",
    "Pair",
    "Plain",
    "Slotted",
    "Tagged",
]

CALLS: list[str] = []
"""What ran of the code of the classes below since it was cleared."""


def factory() -> list[Any]:
    return ["made by the factory"]


# ---- classes with a mind of their own ------------------------------------------------------------


class Noisy:
    """Notes each time a method of a subclass runs that rebuilding must not run."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        CALLS.append("__new__")
        base = next(b for b in (dict, list, set, collections.deque, object) if issubclass(cls, b))
        return base.__new__(cls)  # type: ignore[call-overload]

    def __setattr__(self, name: str, value: Any) -> None:
        CALLS.append("__setattr__")
        super().__setattr__(name, value)


class NoisyItems(Noisy):
    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        CALLS.append("__setitem__")
        super().__setitem__(key, value)  # type: ignore[misc]

    def __iter__(self) -> Any:
        CALLS.append("__iter__")
        return iter(["not", "what", "is", "inside"])


class Tagged(NoisyItems, dict[Any, Any]):
    """A dict whose `__init__` takes something else, with attributes."""

    def __init__(self, tag: str, data: dict[Any, Any], private: Any) -> None:
        CALLS.append("__init__")
        dict.update(self, data)
        self.tag = tag
        self.__private = private

    def items(self) -> Any:
        CALLS.append("items")
        return ()


class TaggedList(NoisyItems, list[Any]):
    def __init__(self, tag: str, data: list[Any]) -> None:
        CALLS.append("__init__")
        list.extend(self, data)
        self.tag = tag


class TaggedDeque(Noisy, collections.deque[Any]):
    def __init__(self, data: list[Any], note: Any) -> None:
        super().__init__(data, 5)
        self.note = note


class TaggedSet(Noisy, set[Any]):
    def __init__(self, data: list[Any], note: Any) -> None:
        super().__init__(data)
        self.note = note


class FrozenTaggedSet(frozenset[Any]):
    note: Any


class OwnDict(dict[Any, Any]):
    """The idiom of a dict that is its own `__dict__`."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class NoisyUserDict(collections.UserDict[Any, Any]):
    def __init__(self, data: dict[Any, Any], note: Any) -> None:
        CALLS.append("__init__")
        self.data = data
        self.note = note

    def __setitem__(self, key: Any, value: Any) -> None:
        CALLS.append("__setitem__")
        super().__setitem__(key, value)


class OwnMapping(collections.abc.Mapping[Any, Any]):
    """A mapping written in Python, whose `__init__` takes something else."""

    def __init__(self, note: str, **items: Any) -> None:
        CALLS.append("__init__")
        self.note = note
        self._store = items

    def __getitem__(self, key: Any) -> Any:
        return self._store[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._store)

    def __len__(self) -> int:
        return len(self._store)


class OwnSequence(collections.abc.Sequence[Any]):
    __slots__ = ("__rows",)

    def __init__(self, *rows: Any) -> None:
        CALLS.append("__init__")
        self.__rows = rows

    def __getitem__(self, index: Any) -> Any:
        return self.__rows[index]

    def __len__(self) -> int:
        return len(self.__rows)


class Pair(NamedTuple):
    left: Any
    right: Any


class NamedPair(Pair):
    """A namedtuple with attributes, and with code that runs where it is made or read."""

    note: Any

    def __new__(cls, *args: Any) -> Any:
        CALLS.append("__new__")
        return super().__new__(cls, *args)

    def __iter__(self) -> Iterator[Any]:
        CALLS.append("__iter__")
        return iter(())


class StrictPair(Pair):
    """A namedtuple without attributes whose `__new__` takes something else."""

    __slots__ = ()

    def __new__(cls, both: Any) -> Any:
        CALLS.append("__new__")
        return super().__new__(cls, *both)

    def __iter__(self) -> Iterator[Any]:
        CALLS.append("__iter__")
        return iter(())


@dataclasses.dataclass(eq=False)
class Plain:
    left: Any
    right: Any
    count: int = dataclasses.field(default=0, init=False)
    scale: dataclasses.InitVar[int] = 1

    def __post_init__(self, scale: int) -> None:
        CALLS.append("__post_init__")
        self.count += scale

    @functools.cached_property
    def both(self) -> list[Any]:
        CALLS.append("both")
        return [self.left, self.right]


@dataclasses.dataclass(frozen=True)
class Frozen:
    left: Any
    right: Any = None
    unset: Any = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        CALLS.append("__post_init__")


@dataclasses.dataclass(slots=True, eq=False)
class Slotted:
    left: Any
    right: Any
    late: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        CALLS.append("__post_init__")


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True, eq=False)
class FrozenSlotted:
    left: Any
    right: Any

    def __post_init__(self) -> None:
        CALLS.append("__post_init__")


class SlottedChild(Slotted):
    """Slots in the base, a `__dict__` here, and a slot mangled with the name of the class."""

    __slots__ = ("__dict__", "__hidden")

    def hide(self, value: Any) -> SlottedChild:
        self.__hidden = value
        return self


@dataclasses.dataclass(eq=False)
class Guarded:
    """A dataclass with a property that stands before what is in its `__dict__`."""

    left: Any

    @classmethod
    def around(cls, left: Any, right: Any) -> Guarded:
        x = cls(left)
        x.__dict__["right"] = right
        return x

    @property
    def right(self) -> Any:
        CALLS.append("right")
        return self.__dict__["right"]


@dataclasses.dataclass(eq=False)
class BothWays(collections.OrderedDict[str, Any]):
    """Both dict and dataclass, as the outputs of Hugging Face's models are."""

    left: Any = None
    right: Any = None

    def __post_init__(self) -> None:
        CALLS.append("__post_init__")
        for field in dataclasses.fields(self):
            super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        CALLS.append("__setitem__")
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@attrs.define(eq=False)
class Attrs:
    left: Any
    right: Any

    def __attrs_post_init__(self) -> None:
        CALLS.append("__attrs_post_init__")


@attrs.frozen(eq=False)
class AttrsFrozen:
    left: Any
    right: Any
    derived: Any = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        CALLS.append("__attrs_post_init__")


@attrs.define(slots=False, eq=False)
class AttrsDict:
    left: Any
    right: Any = attrs.field(converter=lambda x: CALLS.append("converter") or x)


class Names(argparse.Namespace):
    pass


# ---- one of each ---------------------------------------------------------------------------------


def _with(x: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        object.__setattr__(x, name, value)
    return x


def _reordered(a: Any, b: Any) -> collections.OrderedDict[Any, Any]:
    x = collections.OrderedDict(first=a, last=b)
    x.move_to_end("first")
    return x


def _cached(a: Any, b: Any) -> Plain:
    x = Plain(a, b, scale=3)
    x.both.append("kept")
    return _with(x, other=b, _private=a)


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda a, b: {"z": a, 1: b, ("t", 2): "text", None: None},
    "OrderedDict": _reordered,
    "defaultdict": lambda a, b: collections.defaultdict(factory, a=a, b=b),
    "Counter": lambda a, b: collections.Counter({"a": a, "b": b, "n": 3}),
    "ChainMap": lambda a, b: collections.ChainMap({"a": a}, {"a": b, "n": 1}),
    "UserDict": lambda a, b: collections.UserDict({"a": a, 2: b}),
    "UserList": lambda a, b: collections.UserList([a, "text", b]),
    "dict subclass": lambda a, b: Tagged("tag", {"a": a}, private=b),
    "dict that is its __dict__": lambda a, b: OwnDict(a=a, b=b),
    "UserDict subclass": lambda a, b: NoisyUserDict({"a": a}, b),
    "Mapping": lambda a, b: OwnMapping("note", a=a, b=b),
    "Sequence": OwnSequence,
    "list": lambda a, b: [a, 1, b, "text"],
    "list subclass": lambda a, b: TaggedList("tag", [a, b]),
    "tuple": lambda a, b: (a, None, b),
    "namedtuple": Pair,
    "namedtuple subclass": lambda a, b: _with(NamedPair(a, 1), note=b),
    "namedtuple with its own __new__": lambda a, b: StrictPair((a, b)),
    "deque": lambda a, b: collections.deque([a, 1, b], maxlen=4),
    "deque subclass": lambda a, b: TaggedDeque([a, 2], b),
    "set subclass with attributes": lambda a, b: TaggedSet(["text"], [a, b]),
    "frozenset subclass with attributes": lambda a, b: _with(FrozenTaggedSet([1]), note=[a, b]),
    "dataclass": lambda a, b: Plain(a, b, scale=2),
    "dataclass with more attributes": _cached,
    "frozen dataclass": Frozen,
    "slots dataclass": Slotted,
    "frozen slots kw_only dataclass": lambda a, b: FrozenSlotted(left=a, right=b),
    "slots and dict dataclass": lambda a, b: _with(SlottedChild(a, 1), extra=[b]).hide(b),
    "dataclass behind a property": Guarded.around,
    "dict and dataclass": BothWays,
    "attrs": Attrs,
    "attrs frozen": AttrsFrozen,
    "attrs without slots": AttrsDict,
    "SimpleNamespace": lambda a, b: types.SimpleNamespace(a=a, b=b, n=1),
    "argparse.Namespace": lambda a, b: argparse.Namespace(a=a, b=b),
    "Namespace subclass": lambda a, b: Names(a=a, b=b),
    "MappingProxyType": lambda a, b: types.MappingProxyType({"a": a, 2: b}),
}
"""`make(a, b)` of each kind that can hold any two parts."""

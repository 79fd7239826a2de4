"""A reader of structures of its own, to compare them without the library.

Two structures have an equal `anatomy` exactly when they are built alike, down to which object is
met where; a `snapshot` is equal exactly when it holds the same objects.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["anatomy", "contents", "snapshot", "tensors_in"]


class Same:
    """Equal to nothing but what holds the same object, which it keeps alive."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.x is other.x

    __hash__ = None  # type: ignore[assignment]


def contents(x: Any) -> list[tuple[Any, Any]]:
    """Return the items and the attributes of a container with their keys; nothing of a leaf."""
    items: list[tuple[Any, Any]] = []
    if isinstance(x, types.MappingProxyType):
        items += x.items()
    elif isinstance(x, collections.OrderedDict):
        items += collections.OrderedDict.items(x)
    elif isinstance(x, dict):
        items += dict.items(x)
    elif isinstance(x, (set, frozenset)):
        items += enumerate(sorted(set(x), key=_rank))
    elif isinstance(x, PackedSequence):
        return list(zip(x._fields, x, strict=True))
    else:
        for base in (list, tuple, collections.deque):
            if isinstance(x, base):
                items += enumerate(base.__iter__(x))
    if _is_leaf(x):
        return items
    if vars_of(x) is not x:
        items += ((f".{name}", value) for name, value in vars_of(x).items())
    return items + [(f".{name}", value) for name, value in _in_slots(x)]


def vars_of(x: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(x, "__dict__", {})
    return found


def _is_leaf(x: Any) -> bool:
    return isinstance(x, (Tensor, type, np.ndarray)) or callable(x)


def _in_slots(x: Any) -> Iterator[tuple[str, Any]]:
    for cls in type(x).__mro__:
        for slot in vars(cls).get("__slots__", ()):
            name = f"_{cls.__name__}{slot}" if slot[:2] == "__" != slot[-2:] else slot
            if slot not in ("__dict__", "__weakref__") and hasattr(x, name):
                yield name, getattr(x, name)


def _rank(x: Any, depth: int = 2) -> str:
    """The order of set members is by their ids, which differ; their sizes do not."""
    if isinstance(x, Tensor):
        return f"tensor {x.numel():5}"
    if not depth or isinstance(x, (set, frozenset)):
        return type(x).__name__
    parts = contents(x)
    return f"{type(x).__name__} {[_rank(p, depth - 1) for _, p in parts] if parts else repr(x)}"


def _visit(root: Any) -> Iterator[tuple[Any, list[tuple[Any, Any]]]]:
    """Yield each container and tensor once, breadth first, with its parts."""
    seen = {id(root)}
    queue = [root]
    for x in queue:
        parts = contents(x)
        yield x, parts
        for _, part in parts:
            if id(part) not in seen and (isinstance(part, Tensor) or contents(part)):
                seen.add(id(part))
                queue.append(part)


def anatomy(root: Any) -> list[Any]:
    """Describe a structure: types, keys in order, and which object is met where.

    Objects that have parts and tensors go by the order in which they are met, all others by their
    identity.
    """
    numbers: dict[int, int] = {}
    visited = list(_visit(root))
    for x, _ in visited:
        numbers[id(x)] = len(numbers)
    return [(_facts(x), [(key, _who(part, numbers)) for key, part in p]) for x, p in visited]


def _who(part: Any, numbers: dict[int, int]) -> Any:
    return numbers.get(id(part), Same(part))


def _facts(x: Any) -> tuple[Any, ...]:
    if isinstance(x, Tensor):
        return (type(x), x.shape, x.dtype)
    if isinstance(x, collections.defaultdict):
        return (type(x), x.default_factory)
    if isinstance(x, collections.deque):
        return (type(x), x.maxlen)
    return (type(x), vars_of(x) is x)


def snapshot(root: Any) -> list[Any]:
    """Return which objects hold which: equal before and after exactly if nothing was changed."""
    return [(Same(x), [(key, Same(part)) for key, part in parts]) for x, parts in _visit(root)]


def tensors_in(root: Any) -> list[Tensor]:
    """Return each tensor in a structure once."""
    return [x for x, _ in _visit(root) if isinstance(x, Tensor)]

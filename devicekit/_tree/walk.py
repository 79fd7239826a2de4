"""Read what is in a structure, and where; nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from devicekit._tree.kinds import (
    Attribute,
    is_atom,
    kind_of,
    moves_itself,
    parts_of,
    registered,
)

__all__ = ["holds_tensors", "path_of", "walk"]

_MAX_OBJECTS = 10_000  # how many a search for tensors in somebody's object looks at

# Where an object stands: the key under which the container above holds it, and where that stands.
_Place = tuple[Any, Any, Any] | None


def walk(
    root: Any, path: str = "", *, opaque: bool = False, limit: int | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a structure with its path, each object once, in order.

    Leaves are tensors, objects that move themselves, and objects nothing is known about.

    Args:
        root: The structure.
        path: How the structure itself is called: `"batch"` gives `"batch['image'][0]"`.
        opaque: Look into the latter two as well; modules and optimizers stay leaves.
        limit: How many objects to look at.
    """
    for place, x, is_leaf in _visit(root, opaque=opaque, limit=limit):
        if is_leaf:
            yield _path(path, place), x


def _visit(
    root: Any, *, opaque: bool, limit: int | None = None
) -> Iterator[tuple[_Place, Any, bool]]:
    """Yield every object once, in order, with where it stands and whether it is a leaf."""
    seen: set[int] = set()
    stack: list[tuple[_Place, Any]] = [(None, root)]
    kept: list[Any] = []  # parts made on the fly must live as long as their ids are in `seen`
    while stack and (limit is None or len(seen) < limit):
        place, x = stack.pop()
        cls = type(x)
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, Tensor) or _is_torch_object(cls):
            yield place, x, True
            continue
        known = registered(cls) is not None or (not moves_itself(cls) and kind_of(cls) is not None)
        if not known and is_atom(cls) and not moves_itself(cls):
            continue
        yield place, x, not known and not opaque
        if not known and not opaque:
            continue
        parts = list(parts_of(x))
        kept.append(parts)
        stack.extend(
            ((place, key, x), part) for key, part in reversed(parts) if type(part) not in _SCALARS
        )


_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes))


def _is_torch_object(cls: type) -> bool:
    return issubclass(cls, (Module, Optimizer))


def _path(root: str, place: _Place) -> str:
    steps: list[str] = []
    while place is not None:
        place, key, container = place
        steps.append(_step(key, container))
    return root + "".join(reversed(steps))


def _step(key: Any, container: Any) -> str:
    """Return one step of a path: `['image']`, `[0]`, `.mask`."""
    if isinstance(key, Attribute):
        return f".{key.name}"
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return f".{container._fields[key]}"
    return f"[{key!r}]"


def path_of(leaf: Any, root: Any, path: str) -> str:
    """Return the path at which a leaf stands in a structure, or the structure's own."""
    found = (place for place, x, _ in _visit(root, opaque=True) if x is leaf)
    return _path(path, next(found, None))


def holds_tensors(x: Any) -> bool:
    """Return whether an object of an unknown type holds tensors, at any depth within reason."""
    leaves = walk(x, opaque=True, limit=_MAX_OBJECTS)
    return any(isinstance(leaf, Tensor) or _is_torch_object(type(leaf)) for _, leaf in leaves)

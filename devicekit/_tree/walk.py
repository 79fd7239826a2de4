"""Read what is in a structure, and where; nothing is changed."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Collection, Iterable, Iterator, MappingView
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from devicekit._tree.kinds import (
    is_atom,
    is_opaque,
    kind_of,
    moves_itself,
    name_of,
    parts_of,
    registered,
)
from devicekit._tree.state import Attribute, Storage

__all__ = ["holds_tensors", "path_of", "paths_of", "walk"]

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
        if issubclass(cls, Tensor) or _is_torch_object(cls):
            yield place, x, True
            continue
        known = _is_known(cls)
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


def _is_known(cls: type) -> bool:
    return registered(cls) is not None or (not moves_itself(cls) and kind_of(cls) is not None)


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
    if isinstance(key, Storage):
        return f".{key.name}" if key.name == "maps" else ""  # the items are written as if its own
    if isinstance(key, Attribute):
        return f".{key.name}"
    name = name_of(key, container) if isinstance(container, tuple) else None
    return f"[{key!r}]" if name is None else f".{name}"


def path_of(leaf: Any, root: Any, path: str) -> str:
    """Return the path at which a leaf stands in a structure, or the structure's own."""
    return paths_of([leaf], root, path)[0]


def paths_of(leaves: Collection[Any], root: Any, path: str) -> list[str]:
    """Return the paths at which leaves stand in a structure, or its own for what is not there."""
    wanted = {id(leaf) for leaf in leaves}
    places: dict[int, _Place] = {}
    for place, x, _ in _visit(root, opaque=True):
        if id(x) in wanted:
            places[id(x)] = place
            if len(places) == len(wanted):
                break
    return [_path(path, places.get(id(leaf))) for leaf in leaves]


def holds_tensors(x: Any, device: torch.device) -> bool:
    """Return whether an object of an unknown type holds tensors that are not on a device.

    What is nearest is looked at first: a tensor is found however much else there is far below.
    """
    seen: set[int] = set()
    queue: deque[Any] = deque([x])
    kept: list[Any] = []  # as in `_visit`
    while queue and len(seen) < _MAX_OBJECTS:
        x = queue.popleft()
        cls = type(x)
        if id(x) in seen or (is_atom(cls) and not _is_known(cls) and not moves_itself(cls)):
            continue
        seen.add(id(x))
        kept.append(x)
        for part in _parts_of_interest(x):
            if not issubclass(type(part), (Tensor, Module, Optimizer)):
                if len(queue) < _MAX_OBJECTS:
                    queue.append(part)
            elif any(tensor.device != device for tensor in _tensors_of(part)):
                return True
    return False


def _tensors_of(x: Any) -> Iterable[Tensor]:
    if isinstance(x, Module):
        return chain(x.parameters(), x.buffers())
    if isinstance(x, Optimizer):
        return (tensor for group in x.param_groups for tensor in group["params"])
    return (x,)


def _parts_of_interest(x: Any) -> Iterable[Any]:
    cls = type(x)
    if cls in (list, tuple, set, frozenset) and _SCALARS.issuperset(map(type, x)):
        return ()  # a million labels are read in C
    if is_opaque(cls) and not _is_known(cls) and not issubclass(cls, MappingView):
        return gc.get_referents(x)  # asking an iterator would use it up
    return (part for _, part in parts_of(x) if type(part) not in _SCALARS)

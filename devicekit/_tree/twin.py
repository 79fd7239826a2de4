"""Copy an object with everything in it that holds tensors, and share the tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from devicekit._tree.kinds import kind_of
from devicekit._tree.state import bare, builtin_base, copy_state, has_state, state_of
from devicekit._tree.walk import walk

__all__ = ["twin_of"]

_MAX_OBJECTS = 10_000  # that are looked at for one with tensors


def twin_of(x: Any, twins: dict[int, Any]) -> Any:
    """Return a copy of an object, whose containers and objects that hold tensors are copies too.

    Tensors, modules and optimizers are shared with it, and so is what holds none of them. Nothing
    of the code of a class is run.

    Args:
        x: The object.
        twins: The copies that were made, by the ids of what they are copies of.

    Raises:
        RecursionError: It is nested too deep.
    """
    if id(x) in twins:
        return twins[id(x)]
    kind = kind_of(type(x))
    if kind is not None:
        twin = None if kind.hollow is None else kind.hollow(x)
        if twin is not None:
            twins[id(x)] = twin
        parts = [(key, _part_of(part, twins)) for key, part in kind.parts(x)]
        changes = dict(parts)
        new = kind.rebuild(x, changes) if twin is None else kind.rebuild(x, changes, twin)
    else:
        new = twins[id(x)] = bare(x)
        copy_state(x, new, {key: _part_of(part, twins) for key, part in state_of(x)})
    twins[id(x)] = new
    return new


def _part_of(part: Any, twins: dict[int, Any]) -> Any:
    cls = type(part)
    if issubclass(cls, (type, Tensor, Module, Optimizer)):
        return part
    if kind_of(cls) is None and (builtin_base(cls) is not object or not has_state(cls)):
        return part
    if kind_of(cls) is None and not _holds_tensors(part):
        return part
    return twin_of(part, twins)


def _holds_tensors(x: Any) -> bool:
    leaves = walk(x, opaque=True, limit=_MAX_OBJECTS)
    return any(isinstance(leaf, (Tensor, Module)) for _, leaf in leaves)

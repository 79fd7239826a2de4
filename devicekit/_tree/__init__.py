"""Walk and rebuild containers: the only part that knows container types."""

from typing import TypeVar

from devicekit._tree import kinds
from devicekit._tree.job import Job
from devicekit._tree.rebuild import LeafError, forget_types, rebuild
from devicekit._tree.twin import twin_of
from devicekit._tree.walk import path_of, paths_of, walk
from devicekit._types import Apply

__all__ = ["Job", "LeafError", "path_of", "paths_of", "rebuild", "register", "twin_of", "walk"]

_T = TypeVar("_T")


def register(cls: type[_T], apply: Apply[_T], /) -> None:
    """Teach `move`, `inspect` and `check` a type of your own.

    Args:
        cls: The type; its subclasses are meant as well, unless one is registered itself.
        apply: `apply(obj, fn)` returns an object like `obj` in which each part is `fn(part)`. It
            must not change `obj`. A part may be a tensor or any structure.

    Raises:
        TypeError: `cls` is no class, or `apply` cannot be called.

    Examples:
        >>> import devicekit, torch
        >>> class Graph:
        ...     def __init__(self, nodes, edges):
        ...         self.nodes, self.edges = nodes, edges
        >>> devicekit.register(Graph, lambda g, fn: Graph(fn(g.nodes), fn(g.edges)))
        >>> devicekit.move(Graph(torch.ones(2), torch.ones(3)), "meta").edges.device
        device(type='meta')
    """
    if not isinstance(cls, type):  # pyright: ignore[reportUnnecessaryIsInstance]
        msg = f"register() was given {cls!r} first: expected a class, such as {type(cls).__name__}."
        raise TypeError(msg)
    if not callable(apply):
        msg = (
            f"register({cls.__name__}, ...) was given {apply!r}: expected a function apply(x, fn)."
        )
        raise TypeError(msg)
    kinds.register(cls, apply)
    forget_types()

"""Rebuild what recursion cannot: structures that hold themselves, are deep, or share much.

First every object is visited once, and what has to move is sent. Then what contains something that
changed is found from the inside out, and only that is rebuilt: what can be changed gets an empty
twin, what cannot is made of those, and the twins are filled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from devicekit._tree.kinds import Kind, kind_of, moves_itself, name_of, parts_of, registered
from devicekit._tree.state import Attribute, copy_state

if TYPE_CHECKING:
    from devicekit._tree.job import Job

__all__ = ["LeafError", "apply_to_parts", "untangle"]

Handler = Callable[[Any, "Job", int], Any]


class LeafError(Exception):
    """A leaf could not be moved; the cause says why."""

    def __init__(self, leaf: object) -> None:
        super().__init__()
        self.leaf = leaf


class _Node:
    """A container that was visited, with the parts that are not to be left alone.

    It has no kind where its type was registered.
    """

    def __init__(self, x: Any, kind: Kind | None, parts: list[tuple[Any, Any]]) -> None:
        self.x = x
        self.kind = kind
        self.parts = parts


_Nodes = dict[int, _Node]


def untangle(
    root: Any,
    job: Job,
    handler_of: Callable[[type], Handler | None],
    within: frozenset[int] = frozenset(),
) -> Any:
    """Return `root` with its tensors on the job's device, without recursion.

    Args:
        root: The structure, of any shape.
        job: What to do with tensors and objects that move themselves.
        handler_of: What sends objects of a class, or None where there is nothing to send.
        within: The ids of the objects of registered types that this structure is a part of.

    Raises:
        LeafError: Something could not be sent or rebuilt.
    """
    memo = job.begin()
    nodes = _survey(root, job, handler_of, within)
    if not memo:
        return root
    job.kept = (nodes, job.kept)
    changed = _containing(nodes, memo)

    def rebuild_part(part: Any, owner: Any) -> Any:
        job.kept = (part, job.kept)
        return untangle(part, job, handler_of, within | {id(owner)})

    _Assembly(nodes, changed, memo, rebuild_part).put_together(root)
    return memo.get(id(root), root)


def _survey(
    root: Any, job: Job, handler_of: Callable[[type], Handler | None], within: frozenset[int]
) -> _Nodes:
    """Visit every object once, send what is a leaf, and return the containers."""
    nodes: _Nodes = {}
    seen: set[int] = set()
    ways: dict[type, tuple[bool, Kind | None]] = {}
    memo = job.memo
    stack = [root]
    while stack:
        x = stack.pop()
        cls = type(x)
        handler = handler_of(cls)
        if handler is None or id(x) in seen or id(x) in memo:
            continue
        seen.add(id(x))
        by_apply, kind = ways.get(cls) or ways.setdefault(cls, _way(cls))
        if by_apply and id(x) in within:
            raise LeafError(x) from RuntimeError(_HOLDS_ITSELF)
        try:
            if kind is None and not by_apply:
                new = handler(x, job, 1)
                if new is not x:
                    memo[id(x)] = new
                continue
            parts = list(parts_of(x) if kind is None else kind.parts(x))
        except LeafError:
            raise
        except Exception as error:
            raise LeafError(x) from error
        if job.skip:
            parts = [(key, part) for key, part in parts if name_of(key, x) not in job.skip]
        nodes[id(x)] = _Node(x, kind, parts)
        stack.extend(part for _, part in reversed(parts))
    return nodes


def _way(cls: type) -> tuple[bool, Kind | None]:
    """Return whether a class was registered, and else its kind, or None for a leaf."""
    if registered(cls) is not None:
        return True, None
    is_leaf = issubclass(cls, Tensor) or moves_itself(cls)
    return False, None if is_leaf else kind_of(cls)


_HOLDS_ITSELF = (
    "it holds itself, and the function that was registered for its type can only make it of parts "
    "that are finished"
)


def _containing(nodes: _Nodes, memo: dict[int, Any]) -> set[int]:
    """Return the containers in which, at any depth, something changed."""
    inside: dict[int, list[int]] = {}
    for ref, node in nodes.items():
        for _, part in node.parts:
            inside.setdefault(id(part), []).append(ref)
    changed: set[int] = set()
    stack = [ref for ref in inside if ref in memo and ref not in nodes]
    while stack:
        for ref in inside.get(stack.pop(), ()):
            if ref not in changed:
                changed.add(ref)
                stack.append(ref)
    return changed


class _UnfinishedError(Exception):
    """What was asked for is being made."""


class _Assembly:
    """Puts the containers together that changed."""

    def __init__(
        self,
        nodes: _Nodes,
        changed: set[int],
        memo: dict[int, Any],
        rebuild_part: Callable[[Any, Any], Any],
    ) -> None:
        self.nodes = nodes
        self.changed = changed
        self.memo = memo
        self.rebuild_part = rebuild_part
        self.unfilled: set[int] = set()
        self.late: list[_Node] = []
        self.hashing: set[int] = set()

    def put_together(self, root: Any) -> None:
        """Rebuild what changed, the inner parts first."""
        for ref in self.changed:
            node = self.nodes[ref]
            if node.kind is not None and node.kind.hollow is not None:
                self.memo[ref] = node.kind.hollow(node.x)
                self.unfilled.add(ref)
        sets: list[int] = []
        for ref in self._inner_first(root):
            if ref not in self.unfilled:
                self._make(ref)
            elif isinstance(self.nodes[ref].x, set):
                sets.append(ref)
            else:
                self._fill(ref)
        for ref in sets:  # at last: what they hold has to be whole for its hash
            self._fill(ref)
        for node in self.late:
            copy_state(node.x, self.memo[id(node.x)], self._changes(node))

    def _inner_first(self, root: Any) -> list[int]:
        order: list[int] = []
        entered: set[int] = set()
        stack: list[tuple[int, bool]] = [(id(root), False)]
        while stack:
            ref, on_the_way_out = stack.pop()
            if on_the_way_out:
                order.append(ref)
            elif ref in self.changed and ref not in entered:
                entered.add(ref)
                stack.append((ref, True))
                stack.extend((id(part), False) for _, part in self.nodes[ref].parts)
        return order

    def _make(self, ref: int) -> None:
        """Make what cannot be changed later, and before it the parts of which that is true too."""
        waiting: set[int] = set()
        stack = [ref]
        while stack:
            ref = stack[-1]
            if ref in self.hashing:
                raise _UnfinishedError
            missing = [] if ref in self.memo else self._missing(ref)
            if not missing:
                stack.pop()
                if ref not in self.memo:
                    self.memo[ref] = self._made(self.nodes[ref])
            elif ref in waiting:
                raise LeafError(self.nodes[ref].x) from RuntimeError(_HOLDS_ITSELF)
            else:
                waiting.add(ref)
                stack.extend(missing)

    def _missing(self, ref: int) -> list[int]:
        parts = self.nodes[ref].parts
        # Attributes are no hindrance: those of a tuple can be set later as well.
        refs = [id(part) for key, part in parts if type(key) is not Attribute]
        return [part for part in refs if part in self.changed and part not in self.memo]

    def _made(self, node: _Node) -> Any:
        if node.kind is None:
            return self._applied(node)
        if isinstance(node.x, frozenset):
            self._prepare_for_hash(node)
        if any(type(key) is Attribute and id(part) in self.changed for key, part in node.parts):
            self.late.append(node)
        return self._rebuilt(node)

    def _prepare_for_hash(self, node: _Node) -> None:
        """Give what a frozenset holds, and what holds it, all but the frozenset itself."""
        self.hashing.add(id(node.x))
        for _, part in node.parts:
            if id(part) in self.unfilled:
                for ref in self._changed_parts(self.nodes[id(part)]):
                    with contextlib.suppress(_UnfinishedError):
                        self._make(ref)
                self._rebuilt(self.nodes[id(part)], self.memo[id(part)])
        self.hashing.discard(id(node.x))

    def _fill(self, ref: int) -> None:
        node = self.nodes[ref]
        for part in self._changed_parts(node):
            self._make(part)
        self._rebuilt(node, self.memo[ref])
        self.unfilled.discard(ref)

    def _changed_parts(self, node: _Node) -> list[int]:
        return [id(part) for _, part in node.parts if id(part) in self.changed]

    def _rebuilt(self, node: _Node, *twin: Any) -> Any:
        assert node.kind is not None
        try:
            return node.kind.rebuild(node.x, self._changes(node), *twin)
        except Exception as error:  # whatever the hash of a part raises
            raise LeafError(node.x) from error

    def _changes(self, node: _Node) -> dict[Any, Any]:
        memo = self.memo
        return {key: memo[id(part)] for key, part in node.parts if id(part) in memo}

    def _applied(self, node: _Node) -> Any:
        x = node.x
        known = {id(part): self.memo.get(id(part), part) for _, part in node.parts}

        def moved(part: Any) -> Any:
            if id(part) in known:
                return known[id(part)]
            return self.rebuild_part(part, x)  # it was made in this call

        return apply_to_parts(x, moved)


def apply_to_parts(
    x: Any, fn: Callable[[Any], Any], *, passing: tuple[type[Exception], ...] = ()
) -> Any:
    """Return what the function that was registered for the type of `x` makes of it.

    Args:
        x: The object.
        fn: What to apply to each of its parts.
        passing: What is raised as it is.

    Raises:
        LeafError: It raised something, or returned nothing.
    """
    apply = registered(type(x))
    assert apply is not None
    try:
        new = apply(x, fn)
        if new is None:
            raise TypeError(_RETURNS_NOTHING.format(type(x).__name__))
    except Exception as error:
        if isinstance(error, (LeafError, *passing)):
            raise
        raise LeafError(x) from error
    return new


_RETURNS_NOTHING = "the function that was registered for {} returned None and not a new object"

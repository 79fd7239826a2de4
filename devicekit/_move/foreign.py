"""Send objects by a `.to` of their own, and leave the caller's as they are."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor

from devicekit._tree import twin_of, walk

__all__ = ["send_foreign"]


def send_foreign(x: Any, device: torch.device, non_blocking: bool | None) -> Any:
    """Send an object by its own `.to`, which may return a new object, itself, or nothing.

    It is called on a copy, because many change the object in place (a PyG `Data` does) and the
    caller's must stay as it is.
    """
    before = _tensors_of(x)
    if before and all(tensor.device == device for tensor in before.values()):
        return x
    twins: dict[int, Any] = {}
    twin = _copied(x, twins)
    new = _call_to(twin, device, non_blocking)
    if new is None:  # it has moved itself
        new = twin
    return x if new is twin and _is_unchanged(x, twin, twins, before) else new


def _tensors_of(x: Any) -> dict[int, Tensor]:
    return {id(leaf): leaf for _, leaf in walk(x, opaque=True) if isinstance(leaf, Tensor)}


def _copied(x: Any, twins: dict[int, Any]) -> Any:
    """Return a copy of an object, with copies of what it may write into; of no tensor.

    Args:
        x: The object.
        twins: Where to note the copies, by the ids of what they are copies of.
    """
    try:
        if hasattr(type(x), "__copy__"):  # which knows how deep a copy must go
            return copy.copy(x)
        return twin_of(x, twins)
    except Exception:  # whatever its class raises: then it moves itself in place
        return x


def _is_unchanged(x: Any, twin: Any, twins: dict[int, Any], before: dict[int, Tensor]) -> bool:
    """Whether an object's own `.to` had nothing to do to a copy of it."""
    if _tensors_of(twin).keys() != before.keys():
        return False
    states = getattr(x, "__dict__", {}), getattr(twin, "__dict__", {})
    return states[0].keys() == states[1].keys() and all(
        old is new or twins.get(id(old)) is new or _equal(old, new)
        for old, new in zip(*(state.values() for state in states), strict=True)
        if not isinstance(old, Tensor)
    )


def _equal(old: Any, new: Any) -> bool:
    return isinstance(old, (torch.device, str, int, float)) and bool(old == new)


def _call_to(x: Any, device: torch.device, non_blocking: bool | None) -> Any:
    """Call an object's `.to` once, in the form that its signature shows."""
    to = type(x).to
    try:
        parameters = inspect.signature(to).parameters
    except (TypeError, ValueError):  # written in C without a signature
        return to(x, device)
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    options: dict[str, Any] = {}
    if "non_blocking" in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values():
        options = {} if non_blocking is None else {"non_blocking": non_blocking}
    if kinds.get("device") is inspect.Parameter.KEYWORD_ONLY:
        return to(x, device=device, **options)
    return to(x, device, **options)

"""A bound on the work that a block does, which no busy machine and no fast one can blur."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["at_most"]


@contextmanager
def at_most(calls: int) -> Iterator[None]:
    """Fail as soon as the block has made more calls, of Python and of C, than that.

    Examples:
        >>> with at_most(calls=10):
        ...     [len(text) for text in "a" * 20]
        Traceback (most recent call last):
            ...
        AssertionError: more than 10 calls
    """
    made = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")
        if made > calls:
            sys.setprofile(None)
            msg = f"more than {calls} calls"
            raise AssertionError(msg)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)

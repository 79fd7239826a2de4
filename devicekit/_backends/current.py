"""Which machine to go by: this one, or another that was put in its place."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devicekit._backends.machine import Machine

__all__ = ["current_machine", "pretend", "pretended", "this_machine"]

_PRETENDED: ContextVar[Machine | None] = ContextVar("devicekit_machine", default=None)

pretended = _PRETENDED.get
"""Return the machine that `pretend` has put in the place of the real one, or None."""


def current_machine() -> Machine:
    """Return the machine to go by: the real one, or the one that `pretend` has put in its place."""
    return pretended() or this_machine()


@functools.cache
def this_machine() -> Machine:
    """Return the real one; what asks the hardware is imported with the first question."""
    from devicekit._backends.machine import THIS_MACHINE  # one, whichever thread is first

    return THIS_MACHINE


@contextmanager
def pretend(machine: Machine) -> Generator[Machine]:
    """Put another machine in the place of the real one, in this thread or task, in the block."""
    token = _PRETENDED.set(machine)
    try:
        yield machine
    finally:
        _PRETENDED.reset(token)

"""Aliases and protocols shared by all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import torch

__all__ = ["CPU", "Apply", "DeviceLike", "Reason"]

DeviceLike: TypeAlias = str | int | torch.device
"""What names one device: `"cuda:1"`, an index on the current accelerator, a `torch.device`."""

Reason: TypeAlias = Literal[
    "build without it",
    "no driver",
    "driver too old",
    "driver failed",
    "forked after start",
    "none visible",
    "index out of range",
    "hidden by a visibility variable",
    "architecture not in this build",
    "plugin not installed",
    "busy",
]
"""Why a device cannot be used."""

CPU = torch.device("cpu")
"""The object that stands for the CPU wherever a device was checked."""

_T = TypeVar("_T")

Apply: TypeAlias = Callable[[_T, Callable[[Any], Any]], _T]
"""`apply(obj, fn)` gives `obj` with `fn` applied to each of its parts."""

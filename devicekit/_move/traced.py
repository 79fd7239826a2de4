"""What `move` is while `torch.compile` traces it.

A plain recursion over `isinstance`, without the table of types: dynamo would guard on its size,
and every type met later anywhere in the process would recompile every function that calls `move`.
Containers are simply rebuilt, which tracing makes free.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["move_traced"]


def move_traced(x: Any, where: Any) -> Any:
    """Return `x` on the device `where`, or the batch `where` on the device of the model `x`."""
    if isinstance(x, nn.Module) and not isinstance(where, (str, int, torch.device)):
        return _traced(where, next(x.parameters()).device)
    return _traced(x, torch.device(where))


def _traced(x: Any, device: torch.device) -> Any:
    if isinstance(x, Tensor):
        return x if x.device == device else x.to(device)
    if isinstance(x, (dict, UserDict)):
        new = {key: _traced(value, device) for key, value in x.items()}
        return new if type(x) is dict else type(x)(new)
    if hasattr(x, "to"):  # before tuples: a PackedSequence is one
        return x.to(device)
    if isinstance(x, tuple):
        parts = [_traced(value, device) for value in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if isinstance(x, list):
        return [_traced(value, device) for value in x]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        names = [f.name for f in dataclasses.fields(x) if f.init]
        return dataclasses.replace(x, **{n: _traced(getattr(x, n), device) for n in names})
    return x

"""What a module holds outside its parameters and buffers: `Module.to` does not move it."""

# pyright: reportPrivateUsage=false
# Of torch: the public ways to its stores are slow.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from devicekit._inspect.device import is_packed
from devicekit._inspect.hooks import modules_of
from devicekit._tree import walk

__all__ = ["attribute_names", "attributes_of", "strays_of", "tensors_of"]

# Attributes of every module, and of some, that hold nothing of the user's.
_MODULE_STATE = frozenset(nn.Module().__dict__) | {"_hf_hook", "_old_forward", "_former_parameters"}
_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes))
_MAX_OBJECTS = 1_000  # how many an object of an unknown type is searched for tensors


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module by name, each tensor once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def strays_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a module holds outside its parameters and buffers, by path.

    `Module.to` does not move them: plain attributes, items of lists and dicts, unregistered
    sub-modules. Results of a computation that has a gradient are no strays: it makes them anew.
    """
    seen = {id(tensor) for _, tensor in tensors_of(module)} | set(map(id, module.modules()))
    yield from _strays(module, seen)


def _strays(module: nn.Module, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    for name, part in modules_of(module):
        for path, leaf in attributes_of(part, name, seen):
            if id(leaf) in seen:
                continue
            seen.add(id(leaf))
            if isinstance(leaf, nn.Module):
                for inner, tensor in tensors_of(leaf):
                    if id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield f"{path}.{inner}", tensor
                seen.update(map(id, leaf.modules()))
                yield from ((f"{path}.{inner}", tensor) for inner, tensor in _strays(leaf, seen))
            elif isinstance(leaf, Tensor) and leaf.grad_fn is None:
                yield path, leaf


def attributes_of(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield what a module itself holds in plain attributes, at any depth, with its path.

    Tensors, modules, devices, and the packed weights of quantized modules. Weights that a
    parametrization of the old kind (`weight_norm`, `spectral_norm`, pruning) makes anew for each
    forward are left out.

    Args:
        module: The module.
        name: How it is called.
        seen: The ids of what was searched before: many modules refer to one configuration.
    """
    if isinstance(module, DistributedDataParallel):  # which lists what its module has
        return
    state = module.__dict__
    names = attribute_names(state)
    if len(names) > 1:
        names = [key for key in state if key in names]  # in the order in which they were set
    prefix = f"{name}." if name else ""
    for key in names:
        value = state[key]
        if isinstance(value, Tensor):
            if not _is_generated(module, key):
                yield prefix + key, value
        elif isinstance(value, torch.device) or is_packed(value) or isinstance(value, nn.Module):
            yield prefix + key, value
        elif id(value) not in seen and not isinstance(module, GraphModule):
            # A GraphModule has its graph there, and what its compiler noted.
            seen.add(id(value))
            yield from _inside(value, prefix + key)


def attribute_names(state: Mapping[str, Any]) -> list[str]:
    """Return the names of a module's own attributes but for plain values, and rows of them."""
    names = [key for key in state.keys() - _MODULE_STATE if type(state[key]) not in _SCALARS]
    return [key for key in names if not _is_row(state[key])] if names else names


def _is_row(value: object) -> bool:
    cls = type(value)
    return (cls is tuple or cls is list) and _SCALARS.issuperset(map(type, value))  # type: ignore[call-overload]


def _is_generated(module: nn.Module, key: str) -> bool:
    own: Mapping[str, Any] = module._parameters
    return f"{key}_g" in own or f"{key}_orig" in own


def _has_to(value: object) -> bool:
    return callable(getattr(type(value), "to", None))


def _inside(value: object, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and modules in an attribute.

    Data of any kind is searched to its end, an object of somebody's class in its own attributes
    only: a module that refers to its trainer does not own what that refers to.
    """
    for inner, leaf in walk(value, path):
        if isinstance(leaf, (Tensor, nn.Module)):
            yield inner, leaf
        elif isinstance(leaf, Optimizer):
            continue
        elif _has_to(leaf):
            for deeper, part in walk(leaf, inner, opaque=True, limit=_MAX_OBJECTS):
                if isinstance(part, (Tensor, nn.Module)):
                    yield deeper, part
        else:
            held = {f"{inner}.{key}": part for key, part in getattr(leaf, "__dict__", {}).items()}
            for start, part in held.items():
                for deeper, found in walk(part, start):
                    if isinstance(found, (Tensor, nn.Module)):
                        yield deeper, found

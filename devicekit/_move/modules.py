"""Move a module: check first, then move in place, then verify; put everything back on failure."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from devicekit._inspect import strays_of, tensors_of
from devicekit._move.contents import (
    Narrower,
    Origin,
    can_be_assigned,
    is_plain,
    memory_of,
    origin_of,
    put_back,
    relocate,
)
from devicekit._move.refusals import reason_of, refuse
from devicekit.errors import MoveError

__all__ = ["Relocation", "move_module"]


class Relocation:
    """What was moved of one module, so that it can be moved back.

    Where each tensor came from, and no copy of it: the memory needed at the peak stays that of
    `Module.to`. Only what the way back would not restore is kept as it was.

    Attributes:
        module: The module.
        origins: Where each of its tensors came from.
        registries: Every dict in which the module and its parts hold something, with what it held.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.origins: list[Origin] = []
        self.registries: list[tuple[Any, dict[Any, Any]]] = []

    def undo(self) -> list[str]:
        """Put every tensor back where it was, the last one first, which frees what is scarce.

        Returns:
            The names of those that cannot go back: there is no memory left where they were.
        """
        for registry, held in self.registries:
            now = dict(registry.items())
            for key in now.keys() - held.keys():
                del registry[key]
            for key in held:
                if now.get(key) is not held[key]:
                    registry[key] = held[key]
        stuck: list[str] = []
        # What has its memory from another one comes after that.
        self.origins.sort(key=lambda origin: origin.first is None)
        while self.origins:
            origin = self.origins.pop()
            try:
                put_back(origin)
            except RuntimeError:
                stuck.append(origin.name)
        for part in _recurrent(self.module):
            weights = part._flat_weights
            part._flat_weight_refs = [None if w is None else weakref.ref(w) for w in weights]
        return stuck


def move_module(
    module: nn.Module, device: torch.device, *, narrower: Narrower | None = None
) -> Relocation:
    """Move a module in place, and return what was moved.

    Every tensor keeps its identity: parameters, gradients and buffers get new contents, so that
    optimizers, ties and other references stay right on every backend. `Module.to` is called as
    well, for what modules do in an `_apply` of their own.

    Raises:
        MoveError: It cannot be moved, or a part of it could not be; it is where it was.
    """
    relocation = Relocation(module)
    away = {name: tensor for name, tensor in tensors_of(module) if tensor.device != device}
    if not away and not _moves_more(module, device):
        return relocation
    narrow = (narrower or {}) if device.type == "mps" else {}
    try:
        derived = _release(module)
        relocation.registries = list(_registries(module))
        ours, theirs = _divide(module, away, device)
        refuse(module, away, device, ours=ours, narrower=narrower)
        for name, tensor, first in _by_memory(ours):
            relocation.origins.append(origin_of(name, tensor, device, narrow, first))
            relocate(relocation.origins[-1], device, narrow)
        for name, tensor in theirs.items():
            relocation.origins.append(origin_of(name, tensor, device, narrow))
        for part, name in derived:
            setattr(part, name, getattr(part, name).to(device))
        module.to(device)
        _keep_identities(relocation, device)
        _verify(module, device)
    except BaseException as error:
        stuck = relocation.undo()
        if stuck or (isinstance(error, Exception) and not isinstance(error, MoveError)):
            raise _failure(module, device, error, stuck) from error
        raise
    return relocation


def _failure(
    module: nn.Module, device: torch.device, error: BaseException, stuck: list[str]
) -> MoveError:
    outcome = "is where it was"
    if stuck:
        outcome = f"there was no memory to put {', '.join(stuck[:5])} back where it was"
    kind, reason = type(module).__name__, reason_of(error)
    msg = f"{kind} could not be moved to {device}, and {outcome}: {reason}."
    return MoveError(msg, path=stuck[0] if stuck else None, target=device)


def _moves_more(module: nn.Module, device: torch.device) -> bool:
    """Whether something would move of a module whose parameters and buffers are all there.

    A metric, say, keeps its state in plain attributes, which its `_apply` moves.
    """
    has_its_way = any(
        type(part)._apply is not nn.Module._apply or type(part).to is not nn.Module.to
        for part in module.modules()
    )
    return has_its_way and any(tensor.device != device for _, tensor in strays_of(module))


def _registries(module: nn.Module) -> Iterator[tuple[Any, dict[Any, Any]]]:
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):  # keeps them in C++, behind what looks alike
            live: Any = (part._parameters, part._buffers)
        else:
            values = part.__dict__.values()
            live = (part.__dict__, *(v for v in values if isinstance(v, dict) and v))
        yield from ((registry, dict(registry.items())) for registry in live)


def _release(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Cut what modules compute from their parameters before each forward loose from them.

    The hooks of `torch.nn.utils.weight_norm` and `spectral_norm` keep the weight of the last
    forward in a plain attribute, which holds the parameters by its graph. `RNNBase` keeps weak
    references to its weights, and makes them anew in its `_apply`.
    """
    derived: list[tuple[nn.Module, str]] = []
    for part in _recurrent(module):
        part._flat_weight_refs = []
        # Of parametrized weights it keeps what was computed from them last.
        weights = part._flat_weights
        part._flat_weights = [w if w is None or w.is_leaf else w.detach() for w in weights]
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            name = str(getattr(hook, "name", None))
            if hasattr(hook, "compute_weight") and isinstance(part.__dict__.get(name), Tensor):
                setattr(part, name, part.__dict__[name].detach())
                derived.append((part, name))
    return derived


def _recurrent(module: nn.Module) -> Iterator[Any]:
    return (part for part in module.modules() if isinstance(part, nn.RNNBase))


def _divide(
    module: nn.Module, away: dict[str, Tensor], device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return which tensors get new contents here, and which are left to the module's own `.to`."""
    scripted = {
        id(tensor)
        for part in module.modules()
        if isinstance(part, torch.jit.ScriptModule)  # holds its tensors in C++: none can be traded
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))
    }
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    for name, tensor in away.items():
        plain = is_plain(tensor) and (id(tensor) not in scripted or can_be_assigned(tensor, device))
        (ours if plain else theirs)[name] = tensor
    return ours, theirs


def _by_memory(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield tensors by name; after each those that are the same memory, and then it as well.

    They go together, so that whatever fails, none of them is left with memory of its own.
    """
    groups: dict[Hashable, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(memory_of(tensor) or name, []).append((name, tensor))
    for (name, first), *others in groups.values():
        yield name, first, None
        yield from ((name, tensor, first) for name, tensor in others)


def _keep_identities(relocation: Relocation, device: torch.device) -> None:
    """Put back the objects in whose place the module's `.to` has put others with their contents.

    As `set_overwrite_module_params_on_conversion` and some modules of their own make it do.
    """
    for registry, held in relocation.registries:
        now = dict(registry.items())
        for key, old in held.items():
            new = now.get(key)
            if new is old or not isinstance(old, Tensor) or not isinstance(new, Tensor):
                continue
            if old.device == device and is_plain(old) and _share_memory(old, new):
                registry[key] = old


def _share_memory(x: Tensor, y: Tensor) -> bool:
    try:
        same = x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):  # neither sparse nor lazy tensors have one storage
        return False
    return same and type(x) is type(y) and x.shape == y.shape and x.dtype == y.dtype


def _verify(module: nn.Module, device: torch.device) -> None:
    left = [f"{name} on {t.device}" for name, t in tensors_of(module) if t.device != device]
    if left:
        msg = (
            f"{type(module).__name__}.to({str(device)!r}) left {', '.join(left[:5])} behind: "
            f"expected every parameter and buffer there. Move it by the means of its own library."
        )
        raise MoveError(msg, path=left[0].partition(" ")[0], target=device)

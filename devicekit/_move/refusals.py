"""Why a module cannot be moved: found before anything is moved, with the way out."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from devicekit._backends import current_machine
from devicekit._inspect import hooks_of
from devicekit.errors import MoveError

__all__ = ["refuse"]


def refuse(
    module: nn.Module,
    away: Mapping[str, Tensor],
    device: torch.device,
    *,
    narrower: Mapping[torch.dtype, torch.dtype] | None,
) -> None:
    """Raise if a module cannot be moved.

    Args:
        module: The module.
        away: Its parameters and buffers that are not on the device yet, by name.
        device: Where it is to go.
        narrower: What to replace dtypes by that the device does not have, or None to refuse them.

    Raises:
        MoveError: It cannot be moved.
    """
    for check in (_dispatched, _quantized, _sharded, _on_meta, _held_by_graph, _too_large):
        found = check(module, away, device)
        if found is not None:
            path, trouble = found
            msg = f"{type(module).__name__} cannot be moved to {device}: {trouble}"
            raise MoveError(msg, path=path, target=device)
    if device.type == "mps" and narrower is None:
        for name, tensor in away.items():
            if tensor.dtype in (torch.float64, torch.complex128):
                dtype = str(tensor.dtype).removeprefix("torch.")
                msg = (
                    f"{type(module).__name__} cannot be moved to {device}: {name} is {dtype}, "
                    f"which MPS does not have. Pass downcast=True, or convert it first."
                )
                raise MoveError(msg, path=name, target=device)


_Found = tuple[str | None, str] | None


def _dispatched(module: nn.Module, away: Mapping[str, Tensor], device: torch.device) -> _Found:
    for name, hook in hooks_of(module):
        if getattr(hook, "offload", False):
            return name or None, (
                "accelerate has offloaded its weights and brings them back for each forward. "
                "Leave it there and move the batch to it, or load it without a device map."
            )
    places = set(map(str, getattr(module, "hf_device_map", {}).values()))
    if len(places) > 1:
        return None, (
            f"accelerate has dispatched it over {', '.join(sorted(places))}. "
            f"Leave it there and move the batch to it, or load it without a device map."
        )
    return None


def _quantized(module: nn.Module, away: Mapping[str, Tensor], device: torch.device) -> _Found:
    for name, part in module.named_modules():
        bits = "8-bit" if getattr(part, "is_loaded_in_8bit", False) else ""
        bits = bits or ("4-bit" if getattr(part, "is_loaded_in_4bit", False) else "")
        if bits:
            return name or None, (
                f"it is quantized ({bits}), and its weights are packed for the device they are on. "
                f"Load it there in the first place: device_map={{'': {str(device)!r}}}."
            )
    return None


def _sharded(module: nn.Module, away: Mapping[str, Tensor], device: torch.device) -> _Found:
    for name, tensor in away.items():
        kinds = {base.__name__ for base in type(tensor).__mro__}
        if kinds & {"DTensor", "FlatParameter", "ShardedTensor"}:
            return name, (
                f"{name} is sharded over several processes ({type(tensor).__name__}). "
                f"Move the model before it is sharded, or give the device to the device mesh."
            )
    return None


def _on_meta(module: nn.Module, away: Mapping[str, Tensor], device: torch.device) -> _Found:
    names = [name for name, tensor in away.items() if tensor.device.type == "meta"]
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return names[0], (
        f"{names[0]}{more} on the meta device: there are no values to move. "
        f"Load the weights first, with load_state_dict(..., assign=True); "
        f"to_empty() leaves garbage."
    )


def _held_by_graph(module: nn.Module, away: Mapping[str, Tensor], device: torch.device) -> _Found:
    """Where contents cannot be replaced, objects trade places; nothing else may hold them then."""
    replaceable: dict[torch.device, bool] = {}
    for name, tensor in away.items():
        source = tensor.device
        if source not in replaceable:
            probe = torch.empty(0, device=source), torch.empty(0, device=device)
            replaceable[source] = torch._has_compatible_shallow_copy_type(*probe)
        if replaceable[source]:
            continue
        if tensor._use_count() > 1 or weakref.getweakrefs(tensor):  # type: ignore[attr-defined]
            return name, (
                f"{name} is held by an autograd graph or a weak reference, and a {device.type} "
                f"tensor cannot take its place. Move the model before the forward pass, or delete "
                f"the loss and the outputs first."
            )
    return None


def _too_large(module: nn.Module, away: Mapping[str, Tensor], device: torch.device) -> _Found:
    if device.type in ("cpu", "meta"):
        return None
    free = current_machine().free_memory(device)
    needed = sum({_storage(tensor): tensor.nbytes for tensor in away.values()}.values())
    if free is None or needed <= free:
        return None
    return None, (
        f"it needs {needed} bytes, and {free} are free there. "
        f"Free some, choose another device, or load it with less precision."
    )


def _storage(tensor: Tensor) -> Any:
    """Return what tells tensors apart that do not share memory."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):  # sparse and nested tensors have no single storage
        return id(tensor)

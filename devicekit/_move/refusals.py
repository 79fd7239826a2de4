"""Why a module cannot be moved: found before anything is moved, with the way out."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from devicekit._backends import current_machine
from devicekit._backends.memory import format_size
from devicekit._inspect import hooks_of
from devicekit._move.contents import can_be_assigned
from devicekit.errors import MoveError

__all__ = ["reason_of", "refuse"]


def reason_of(error: BaseException | None) -> str:
    """Return what went wrong as half a sentence: the first line of an error, or else its name."""
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def refuse(
    module: nn.Module,
    away: Mapping[str, Tensor],
    device: torch.device,
    *,
    ours: Mapping[str, Tensor],
    narrower: Mapping[torch.dtype, torch.dtype] | None,
) -> None:
    """Raise if a module cannot be moved.

    Args:
        module: The module.
        away: Its parameters and buffers that are not on the device yet, by name.
        device: Where it is to go.
        ours: Those of them that get new contents, and are not left to the module's own `.to`.
        narrower: What to replace dtypes by that the device does not have, or None to refuse them.

    Raises:
        MoveError: It cannot be moved.
    """
    found = (
        _dispatched(module)
        or _quantized(module, device)
        or _sharded(module, away)
        or _on_meta(away)
        or _unknown_dtype(away, device, narrower)
        or _too_large(away, device)
        or _held(module, ours, device)
    )
    if found is not None:
        path, trouble = found
        msg = f"{type(module).__name__} cannot be moved to {device}: {trouble}"
        raise MoveError(msg, path=path, target=device)


_Found = tuple[str | None, str] | None


def _dispatched(module: nn.Module) -> _Found:
    for name, hook in hooks_of(module):
        if getattr(hook, "offload", False):
            return name or None, (
                "accelerate has offloaded its weights and brings them back for each forward. "
                "Leave it there and move the batch to it, or load it without a device map."
            )
    for name, part in module.named_modules():
        places = set(map(str, (getattr(part, "hf_device_map", None) or {}).values()))
        if len(places) > 1 or "disk" in places:
            return name or None, (
                f"accelerate has dispatched it over {', '.join(sorted(places))}. "
                f"Leave it there and move the batch to it, or load it without a device map."
            )
    return None


def _quantized(module: nn.Module, device: torch.device) -> _Found:
    for name, part in module.named_modules():
        bits = "8-bit" if getattr(part, "is_loaded_in_8bit", False) else ""
        bits = bits or ("4-bit" if getattr(part, "is_loaded_in_4bit", False) else "")
        if bits:
            return name or None, (
                f"it is quantized ({bits}), and its weights are packed for the device they are on. "
                f"Load it there in the first place: device_map={{'': {str(device)!r}}}."
            )
    return None


def _sharded(module: nn.Module, away: Mapping[str, Tensor]) -> _Found:
    wholes = [("", module), *module.named_modules()] if away else []
    for name, thing in (*wholes, *away.items()):
        kinds = {base.__name__ for base in type(thing).__mro__}
        if kinds & _SHARDED:
            return name or None, (
                f"{name or 'it'} is sharded over several processes ({type(thing).__name__}). "
                f"Move the model before it is sharded, or give the device to the device mesh."
            )
    return None


_SHARDED = {"DTensor", "FlatParameter", "FullyShardedDataParallel", "ShardedTensor"}


def _on_meta(away: Mapping[str, Tensor]) -> _Found:
    names = [name for name, tensor in away.items() if tensor.device.type == "meta"]
    if not names:
        return None
    subject = f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"
    return names[0], (
        f"{subject} on the meta device: there are no values to move. "
        f"Load the weights first, with load_state_dict(..., assign=True); "
        f"to_empty() leaves garbage."
    )


def _unknown_dtype(
    away: Mapping[str, Tensor],
    device: torch.device,
    narrower: Mapping[torch.dtype, torch.dtype] | None,
) -> _Found:
    if device.type != "mps" or narrower is not None:
        return None
    for name, tensor in away.items():
        if tensor.dtype in (torch.float64, torch.complex128):
            dtype = str(tensor.dtype).removeprefix("torch.")
            return name, (
                f"{name} is {dtype}, which MPS does not have. "
                f"Pass downcast=True, or convert it first."
            )
    return None


def _too_large(away: Mapping[str, Tensor], device: torch.device) -> _Found:
    if device.type in ("cpu", "meta") or not away:
        return None
    free = current_machine().free_memory(device)
    needed = sum(_size(t) + _size(t.grad if t.is_leaf else None) for t in away.values())
    if free is None or needed <= free:
        return None
    return None, (
        f"it needs {format_size(needed)} ({needed} bytes), and {format_size(free)} ({free}) are "
        f"free there. "
        f"Free some, choose another device, or load it with less precision."
    )


def _size(tensor: Tensor | None) -> int:
    """Return the bytes that a tensor's contents take."""
    if tensor is None or is_lazy(tensor):
        return 0
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices().nbytes + tensor.col_indices().nbytes + tensor.values().nbytes
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices().nbytes + tensor.row_indices().nbytes + tensor.values().nbytes
    return tensor.numel() * tensor.element_size()


def _held(module: nn.Module, ours: Mapping[str, Tensor], device: torch.device) -> _Found:
    """Where contents cannot be assigned, objects trade places; nothing else may hold them then."""
    for name, tensor in ours.items():
        grad = tensor.grad if tensor.is_leaf else None
        parts = (tensor,) if grad is None else (tensor, grad)
        if all(can_be_assigned(part, device) for part in parts):
            continue
        # What `tensor.grad` gives is held by the tensor as well.
        in_graph = _uses(tensor) > 1 or (grad is not None and _uses(grad) > 2)
        if in_graph or any(weakref.getweakrefs(part) for part in parts):
            holder, before = (
                ("an autograd graph", "the forward pass, or delete the loss and the outputs first")
                if in_graph
                else ("a weak reference, as torch.export makes them", "that")
            )
            return name, (
                f"{name} is held by {holder}, and cannot become a {device.type} tensor then. "
                f"Move the model before {before}."
            )
    return None


def _uses(tensor: Tensor) -> int:
    return int(tensor._use_count())  # type: ignore[attr-defined]

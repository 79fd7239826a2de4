"""Give a tensor other contents, on another device, while it stays the same object."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "Narrower",
    "Origin",
    "can_be_assigned",
    "is_plain",
    "memory_of",
    "origin_of",
    "put_back",
    "relocate",
]

Narrower = Mapping[torch.dtype, torch.dtype]


class Origin(NamedTuple):
    """Where a tensor came from.

    Attributes:
        name: What the tensor is called in its module.
        tensor: The tensor.
        grad: Its gradient.
        device: Where it was.
        contents: What it and its gradient held, kept only where the way back loses something.
        first: The tensor that was moved before it and whose memory is its own as well, or None.
    """

    name: str
    tensor: Tensor
    grad: Tensor | None
    device: torch.device
    contents: tuple[Tensor, Tensor | None] | None = None
    first: Tensor | None = None


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's contents can be replaced; others know themselves how they move."""
    return type(tensor).to is Tensor.to and not is_traceable_wrapper_subclass(tensor)


def can_be_assigned(tensor: Tensor, device: torch.device) -> bool:
    """Return whether contents on a device can be assigned to `tensor.data`, as `Module.to` does.

    Not to a compressed sparse tensor, although torch allows it: the values would stay behind.
    """
    layout = tensor.layout
    return (
        (layout is torch.strided or layout is torch.sparse_coo)
        and not (tensor.is_quantized or tensor.is_nested)
        and _are_alike(tensor.device, device)
    )


@functools.lru_cache(maxsize=64)  # of two backends, whose nature does not change
def _are_alike(source: torch.device, target: torch.device) -> bool:
    probes = torch.empty(0, device=source), torch.empty(0, device=target)
    can = torch._has_compatible_shallow_copy_type  # pyright: ignore[reportPrivateImportUsage]
    return can(*probes)


def memory_of(tensor: Tensor) -> Hashable | None:
    """Return what is equal for tensors that are the same memory, or None for what has no one."""
    if tensor.layout is not torch.strided or is_lazy(tensor) or not tensor.numel():
        return None
    part = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return tensor.untyped_storage()._cdata, *part


def origin_of(
    name: str,
    tensor: Tensor,
    device: torch.device,
    narrower: Narrower,
    first: Tensor | None = None,
) -> Origin:
    """Return where a tensor is, before it goes to a device."""
    grad = tensor.grad if tensor.is_leaf else None
    contents = None
    if device.type == "meta" or tensor.dtype in narrower:
        contents = tensor.data, None if grad is None else grad.data
    return Origin(name, tensor, grad, tensor.device, contents, first)


def relocate(origin: Origin, device: torch.device, narrower: Narrower) -> None:
    """Move a tensor's contents and those of its gradient.

    Everything is copied before anything is replaced, so that it happens as a whole or not at all.
    """
    tensor, grad = origin.tensor, origin.grad
    data = _copied(tensor if origin.first is None else origin.first, device, narrower)
    grad_data = None if grad is None else _copied(grad, device, narrower)
    _replace(tensor, grad, data, grad_data)


def put_back(origin: Origin) -> None:
    """Bring a tensor and its gradient back to where they came from."""
    tensor, grad = origin.tensor, origin.grad
    if origin.contents is not None:
        _replace(tensor, grad, *origin.contents)
        return
    parts = (tensor,) if grad is None else (tensor, grad)
    lost = grad is not None and tensor.grad is not grad
    if lost or any(part.device != origin.device for part in parts):
        relocate(origin, origin.device, {})


def _copied(part: Tensor, device: torch.device, narrower: Narrower) -> Tensor:
    with _mode_of(part):
        data = part.data if is_plain(part) else part.detach()
        dtype = narrower.get(part.dtype)
        return data.to(device) if dtype is None else data.to(dtype).to(device)


def _mode_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Return the mode in which a tensor was made.

    Only in `inference_mode` can some be changed, and what is made in it cannot be trained.
    """
    return torch.inference_mode(not is_lazy(tensor) and tensor.is_inference())


def _replace(tensor: Tensor, grad: Tensor | None, data: Tensor, grad_data: Tensor | None) -> None:
    """Give a tensor and its gradient new contents; both stay the same objects.

    By assigning to `.data` where torch allows it between the two backends. Elsewhere (PrivateUse1,
    XLA, meta) the objects trade places, where `Module.to` would make a new `Parameter`.
    """
    assignable = is_plain(tensor) and can_be_assigned(tensor, data.device)
    if grad is None or grad_data is None:
        (_assign if assignable else _trade)(tensor, data)
        return
    if assignable and can_be_assigned(grad, data.device):
        _assign(tensor, data)
        _assign(grad, grad_data)
        return
    tensor.grad = None  # a gradient is where its tensor is, or not its gradient
    _trade(grad, grad_data)
    (_assign if assignable else _trade)(tensor, data)
    tensor.grad = grad


def _assign(tensor: Tensor, data: Tensor) -> None:
    with _mode_of(tensor):
        tensor.data = data


def _trade(tensor: Tensor, data: Tensor) -> None:
    with _mode_of(tensor):
        if is_plain(tensor):
            twin = Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
        elif isinstance(tensor, nn.Parameter):  # of a class whose tensors consist of others
            twin = nn.Parameter(data, tensor.requires_grad)
        else:
            twin = data
        vars(twin).update(vars(tensor))
        torch.utils.swap_tensors(tensor, twin)  # type: ignore[no-untyped-call]
        # Hooks hang on what was traded away; setting them again hangs them on what came.
        tensor._backward_hooks = tensor._backward_hooks
        tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks

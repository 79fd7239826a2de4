"""Give a tensor other contents, on another device, while it stays the same object."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Narrower", "Origin", "can_be_assigned", "is_plain", "put_back", "relocate"]

Narrower = Mapping[torch.dtype, torch.dtype]


@dataclass(frozen=True)
class Origin:
    """Where a tensor came from.

    Attributes:
        name: What the tensor is called in its module.
        tensor: The tensor.
        grad: Its gradient.
        device: Where it was.
        contents: What it and its gradient held, kept only where the way back loses something.
    """

    name: str
    tensor: Tensor
    grad: Tensor | None
    device: torch.device
    contents: tuple[Tensor, Tensor | None] | None = None


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's contents can be replaced; others know themselves how they move."""
    return type(tensor).to is Tensor.to and not is_traceable_wrapper_subclass(tensor)


def can_be_assigned(tensor: Tensor, device: torch.device) -> bool:
    """Return whether contents on a device can be assigned to `tensor.data`, as `Module.to` does.

    Not to a compressed sparse tensor, although torch allows it: the values would stay behind.
    """
    layout = tensor.layout
    return (
        (layout is torch.strided or (layout is torch.sparse_coo and not is_lazy(tensor)))
        and not (tensor.is_quantized or tensor.is_nested)
        and _are_alike(tensor.device, device)
    )


@functools.lru_cache(maxsize=64)  # of two backends, whose nature does not change
def _are_alike(source: torch.device, target: torch.device) -> bool:
    probes = torch.empty(0, device=source), torch.empty(0, device=target)
    return torch._has_compatible_shallow_copy_type(*probes)


def relocate(name: str, tensor: Tensor, device: torch.device, narrower: Narrower) -> Origin:
    """Move a tensor's contents and those of its gradient, and return where they came from.

    Everything is copied before anything is replaced, so that it happens as a whole or not at all.
    """
    grad = tensor.grad if tensor.is_leaf else None
    lossy = device.type == "meta" or tensor.dtype in narrower
    kept = (tensor.data, None if grad is None else grad.data) if lossy else None
    origin = Origin(name, tensor, grad, tensor.device, kept)
    data = _copied(tensor, device, narrower)
    assert data is not None
    _replace(tensor, grad, data, _copied(grad, device, narrower))
    return origin


def put_back(origin: Origin) -> None:
    """Bring a tensor and its gradient back to where they came from."""
    tensor, grad = origin.tensor, origin.grad
    if origin.contents is not None:
        _replace(tensor, grad, *origin.contents)
    elif tensor.device != origin.device or (grad is not None and tensor.grad is not grad):
        data = _copied(tensor, origin.device, {})
        assert data is not None
        _replace(tensor, grad, data, _copied(grad, origin.device, {}))


def _copied(part: Tensor | None, device: torch.device, narrower: Narrower) -> Tensor | None:
    if part is None:
        return None
    # Inside `inference_mode` a copy would turn a Parameter into one that cannot be trained.
    with torch.inference_mode(part.is_inference()):
        data = part.data if is_plain(part) else part.detach()
        dtype = narrower.get(part.dtype)
        return data.to(device) if dtype is None else data.to(dtype).to(device)


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
    with torch.inference_mode(tensor.is_inference()):
        tensor.data = data


def _trade(tensor: Tensor, data: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()):
        if is_plain(tensor):
            twin = Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
        elif isinstance(tensor, nn.Parameter):  # of a class whose tensors consist of others
            twin = nn.Parameter(data, tensor.requires_grad)
        else:
            twin = data
        twin.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, twin)  # type: ignore[no-untyped-call]
        # Hooks hang on what was traded away; setting them again hangs them on what came.
        tensor._backward_hooks = tensor._backward_hooks
        tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks

"""Move a module: check first, then move in place, then verify; put everything back on failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from devicekit._inspect import tensors_of
from devicekit._move.refusals import refuse
from devicekit.errors import MoveError

__all__ = ["Relocation", "move_module"]

Narrower = Mapping[torch.dtype, torch.dtype]


@dataclass
class Relocation:
    """What was moved of one module, so that it can be moved back.

    Where each tensor came from, and no copy of it: the memory needed at the peak stays that of
    `Module.to`. Only what lost precision on the way is kept as it was.
    """

    module: nn.Module
    origins: list[tuple[Tensor, torch.device, Tensor | None]] = field(default_factory=list)
    left_to_module: dict[str, torch.device] = field(default_factory=dict)

    def undo(self) -> None:
        """Put every tensor back where it was, the last one first, which frees what is scarce."""
        while self.origins:
            tensor, device, original = self.origins.pop()
            if original is not None:
                _set(tensor, original)
            elif tensor.device != device:
                _set(tensor, tensor.detach().to(device))
        now = dict(tensors_of(self.module))
        for device in {d for name, d in self.left_to_module.items() if now[name].device != d}:
            self.module.to(device)


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
    if not away:
        return relocation
    refuse(module, away, device, narrower=narrower)
    try:
        for name, tensor in away.items():
            if _is_plain(tensor):
                _relocate(tensor, device, narrower or {}, relocation)
            else:
                relocation.left_to_module[name] = tensor.device
        module.to(device)
        _verify(module, device)
    except BaseException as error:
        relocation.undo()
        if not isinstance(error, Exception) or isinstance(error, MoveError):
            raise
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        kind = type(module).__name__
        msg = f"{kind} could not be moved to {device}, and is where it was: {reason}."
        raise MoveError(msg, target=device) from error
    return relocation


def _is_plain(tensor: Tensor) -> bool:
    """Whether the contents of a tensor can be replaced; other kinds know how they move."""
    cls = type(tensor)
    return (
        cls.to is Tensor.to
        and not is_traceable_wrapper_subclass(tensor)
        and not is_lazy(tensor)
        and not tensor.is_quantized
        and not tensor.is_inference()
    )


def _relocate(
    tensor: Tensor, device: torch.device, narrower: Narrower, relocation: Relocation
) -> None:
    """Move a tensor's contents, and those of its gradient."""
    for part in (tensor, tensor.grad if tensor.is_leaf else None):
        if part is None or part.device == device:
            continue
        dtype = narrower.get(part.dtype) if device.type == "mps" else None
        data = part.detach()
        relocation.origins.append((part, part.device, None if dtype is None else data))
        _set(part, data.to(device) if dtype is None else data.to(dtype).to(device))


def _set(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor new contents on another device; it stays the same object.

    By assigning to `.data`, as `Module.to` does, where torch allows it between the two backends.
    Elsewhere (PrivateUse1, XLA, meta) the objects trade places, where `Module.to` would make a new
    `Parameter`.
    """
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        return
    grad, tensor.grad = tensor.grad, None
    twin = Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    twin.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, twin)  # type: ignore[no-untyped-call]
    # Hooks hang on what was traded away; setting them again hangs them on what came.
    tensor._backward_hooks = tensor._backward_hooks
    tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    if grad is not None:
        if grad.device != data.device:
            _set(grad, grad.detach().to(data.device))
        tensor.grad = grad


def _verify(module: nn.Module, device: torch.device) -> None:
    left = [f"{name} on {t.device}" for name, t in tensors_of(module) if t.device != device]
    if left:
        msg = (
            f"{type(module).__name__}.to({str(device)!r}) left {', '.join(left[:5])} behind: "
            f"expected every parameter and buffer there. Move it by the means of its own library."
        )
        raise MoveError(msg, path=left[0].partition(" ")[0], target=device)

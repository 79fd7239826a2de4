"""How one call of `move` copies: what may be asynchronous, and what moves itself."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import get_worker_info

from devicekit._move.foreign import send_foreign
from devicekit._move.modules import Relocation, move_module
from devicekit._move.optimizers import Rewrite, move_optimizer
from devicekit._move.refusals import reason_of
from devicekit._tree import Job, path_of
from devicekit.errors import DeviceError, MoveError

__all__ = ["STREAMED", "CarefulTransfer", "Transfer", "explain", "original"]

# Types of device to which a copy from pinned memory may still run when the call returns, because
# work on the device waits for it by itself. MPS does so too, but reads the source too late
# (pytorch#139550).
STREAMED = ("cuda", "xpu")

_NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}
"""What MPS has no arithmetic for, and what comes nearest."""


class Transfer(Job):
    """A job that copies to a device by the default rules.

    A copy to a CUDA or XPU device is asynchronous, which it really is from pinned memory only; all
    others are done when the call returns.
    """

    non_blocking: bool | None = None
    downcast: bool = False
    relocations: tuple[Relocation, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()

    def is_plain(self) -> bool:
        """Return whether `tensor.to(device)` is all: not towards CUDA, XPU and MPS."""
        return _is_plain(self.device)

    def send(self, tensor: Tensor) -> Tensor:
        """Send a tensor, asynchronously where that is safe, in a dtype that the device has."""
        device = self.device
        if type(tensor).to is not Tensor.to:  # of a class whose `.to` may take nothing but a device
            return tensor.to(device)
        if device.type in STREAMED:
            return tensor.to(device, None, self.non_blocking is not False)
        narrower = _NARROWER.get(tensor.dtype) if device.type == "mps" else None
        if narrower is None:
            return tensor.to(device)
        if self.downcast:
            return tensor.to(narrower).to(device)
        dtype = str(tensor.dtype).removeprefix("torch.")
        msg = f"MPS has no {dtype}; pass downcast=True for {str(narrower).removeprefix('torch.')}"
        raise TypeError(msg)

    def send_object(self, x: Any) -> Any:
        """Send a module, an optimizer or an object with a `.to` of its own."""
        if isinstance(x, nn.Module):
            self.relocations += (move_module(x, self.device, narrower=self._narrower()),)
            self.remarks = True
            for optimizer in self.optimizers:  # that came before their model
                self._send_state(optimizer)
            return x
        if isinstance(x, Optimizer):
            self.optimizers += (x,)
            self._send_state(x)
            return x
        # Asynchronous only where that is safe.
        flag = self.non_blocking if self.device.type in STREAMED else None
        return send_foreign(x, self.device, flag)

    def _send_state(self, optimizer: Optimizer) -> None:
        self.rewrites += (move_optimizer(optimizer, narrower=self._narrower()),)
        self.remarks = True

    def _narrower(self) -> dict[torch.dtype, torch.dtype] | None:
        return _NARROWER if self.downcast else None

    def undo(self) -> None:
        """Put back the modules and optimizers that were moved before something else failed."""
        for rewrite in reversed(self.rewrites):
            rewrite.undo()
        for relocation in reversed(self.relocations):
            stuck = relocation.undo()
            if stuck:
                kind = type(relocation.module).__name__
                msg = (
                    f"{', '.join(stuck[:5])} of {kind} is still on {self.device}: "
                    f"there was no memory to put it back where it was."
                )
                warnings.warn(msg, stacklevel=4)

    def finish(self) -> None:
        """Wait for what must not be in flight when the call returns."""


class CarefulTransfer(Transfer):
    """A job for a call with options."""

    def __init__(
        self,
        device: torch.device,
        *,
        non_blocking: bool | None,
        skip: frozenset[str],
        downcast: bool,
    ) -> None:
        self.device = device
        self.non_blocking = non_blocking
        self.skip = skip
        self.downcast = downcast
        self._sources: set[torch.device] = set()

    def is_plain(self) -> bool:
        """Return whether `tensor.to(device)` is all, and copies need not be issued together."""
        return not self.non_blocking and super().is_plain()

    def send(self, tensor: Tensor) -> Tensor:
        """Send a tensor; from CUDA or XPU towards the CPU without waiting for it yet."""
        deferred = self.non_blocking and self.device.type == "cpu" and type(tensor).to is Tensor.to
        if not deferred or tensor.device.type not in STREAMED:
            return super().send(tensor)
        self._sources.add(tensor.device)
        return tensor.to(self.device, None, True)

    def finish(self) -> None:
        """Wait once for all copies that were issued on one device."""
        while self._sources:
            source = self._sources.pop()
            torch.get_device_module(source.type).current_stream(source).synchronize()


@functools.lru_cache(maxsize=64)  # `torch.device.type` makes a new text each time
def _is_plain(device: torch.device) -> bool:
    return device.type not in (*STREAMED, "mps")


def explain(
    cause: BaseException | None, leaf: object, root: object, device: torch.device
) -> DeviceError:
    """Return the error for a leaf that could not be moved: where it stands, and why."""
    path = path_of(leaf, root, "batch")
    if isinstance(cause, DeviceError) and not isinstance(cause, MoveError):
        return cause
    if isinstance(cause, MoveError):
        message, inner = str(cause), cause.path
        where = inner if leaf is root else f"{path}.{inner}" if inner else path
    else:
        message, where = f"{path} could not be moved to {device}: {reason_of(cause)}.", path
    if get_worker_info() is not None and device.type != "cpu":
        message += (
            " This is a DataLoader worker: return CPU tensors from it, and call move() in the loop."
        )
    return MoveError(message, path=where, target=device)


def original(error: BaseException | None) -> BaseException | None:
    """Return what an error came from: of one of ours what it was raised from."""
    return error.__cause__ if isinstance(error, DeviceError) else error

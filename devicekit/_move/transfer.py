"""How one call of `move` copies: what may be asynchronous, and what moves itself."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import get_worker_info

from devicekit._move.modules import Relocation, move_module
from devicekit._move.optimizers import move_optimizer
from devicekit._tree import Job, path_of, walk
from devicekit.errors import DeviceError, MoveError

__all__ = ["CarefulTransfer", "Transfer"]

# Types of device to which a copy from pinned memory may still run when the call returns, because
# work on the device waits for it by itself. MPS does so too, but reads the source too late
# (pytorch#139550).
_STREAMED = ("cuda", "xpu")

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

    def is_plain(self) -> bool:
        """Return whether `tensor.to(device)` is all: not towards CUDA, XPU and MPS."""
        return _is_plain(self.device)

    def send(self, tensor: Tensor) -> Tensor:
        """Send a tensor, asynchronously where that is safe, in a dtype that the device has."""
        device = self.device
        if device.type in _STREAMED:
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
            return x
        if isinstance(x, Optimizer):
            return move_optimizer(x)
        return _send_foreign(x, self.device, self.non_blocking)

    def _narrower(self) -> dict[torch.dtype, torch.dtype] | None:
        return _NARROWER if self.downcast else None

    def undo(self) -> None:
        """Put back the modules that were moved before something else failed."""
        for relocation in reversed(self.relocations):
            relocation.undo()

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
        if self.device.type != "cpu" or tensor.device.type not in _STREAMED:
            return super().send(tensor)
        self._sources.add(tensor.device)
        return tensor.to(self.device, None, bool(self.non_blocking))

    def finish(self) -> None:
        """Wait once for all copies that were issued on one device."""
        while self._sources:
            source = self._sources.pop()
            torch.get_device_module(source.type).current_stream(source).synchronize()


@functools.lru_cache(maxsize=64)  # `torch.device.type` makes a new text each time
def _is_plain(device: torch.device) -> bool:
    return device.type not in (*_STREAMED, "mps")


def _send_foreign(x: Any, device: torch.device, non_blocking: bool | None) -> Any:
    """Send an object by its own `.to`, which may return a new object, itself, or nothing.

    It is called on a shallow copy, because many change the object in place (a PyG `Data` does) and
    the caller's must stay as it is.
    """
    before = _tensors_of(x)
    if before and all(tensor.device == device for tensor in before.values()):
        return x
    twin = _shallow_copy(x)
    to = type(twin).to
    flagged = non_blocking is not None and device.type in _STREAMED and _takes_non_blocking(to)
    new = to(twin, device, non_blocking=non_blocking) if flagged else to(twin, device)
    if new is None:  # it has moved itself
        new = twin
    return x if new is twin and _tensors_of(twin).keys() == before.keys() else new


def _tensors_of(x: Any) -> dict[int, Tensor]:
    return {id(leaf): leaf for _, leaf in walk(x, opaque=True) if isinstance(leaf, Tensor)}


def _shallow_copy(x: Any) -> Any:
    if isinstance(x, tuple):  # cannot change itself
        return x
    try:
        return copy.copy(x)
    except Exception:  # whatever its __copy__ or __reduce__ raises: then it moves itself in place
        return x


def _takes_non_blocking(to: Any) -> bool:
    try:
        parameters = inspect.signature(to).parameters
    except (TypeError, ValueError):  # written in C without a signature
        return False
    return "non_blocking" in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )


def explain(
    cause: BaseException | None, leaf: object, root: object, device: torch.device
) -> DeviceError:
    """Return the error for a leaf that could not be moved: where it stands, and why."""
    path = path_of(leaf, root, "batch")
    if isinstance(cause, MoveError):
        inner = cause.path
        where = f"{path}.{inner}" if inner and leaf is not root else inner
        return MoveError(str(cause), path=where, target=device)
    if isinstance(cause, DeviceError):
        return cause
    reason = str(cause).partition("\n")[0].rstrip(".") or type(cause).__name__
    message = f"{path} could not be moved to {device}: {reason}."
    if get_worker_info() is not None and device.type != "cpu":
        message += (
            " This is a DataLoader worker: return CPU tensors from it, and call move() in the loop."
        )
    return MoveError(message, path=path, target=device)
